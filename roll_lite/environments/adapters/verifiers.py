from __future__ import annotations

import json
import signal
import threading
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from roll_lite.config.schema.environments import VerifiersEnvironmentConfig
from roll_lite.config.user_function import search_current_folder
from roll_lite.environments.base import EpisodeOver, Message, Task
from roll_lite.environments.episode import EpisodeFunction, Policy

try:
    import verifiers as vf
    from verifiers.clients import OpenAIChatCompletionsClient
except ImportError as error:
    raise ImportError(f'version {version("verifiers")}: {error}; pip install "roll_lite[verifiers]"') from error

_set_handler = signal.signal


def _set_in_main_thread(number: int, handler: Any) -> Any:
    """Replace signal.signal: outside the main thread, keep the handlers of SIGINT and SIGTERM. Environments of verifiers set handlers,
    which raises ValueError in workers' threads."""
    if threading.current_thread() is threading.main_thread() or number not in (signal.SIGINT, signal.SIGTERM):
        return _set_handler(number, handler)
    return signal.getsignal(number)


signal.signal = _set_in_main_thread  # type: ignore[assignment]


def play_verifiers(settings: VerifiersEnvironmentConfig, path: str) -> tuple[EpisodeFunction, list[dict[str, Any]]]:
    """Return the episode function and the tool schemas; ValueError if the environment cannot be loaded."""
    search_current_folder()
    place, arguments = f"{path}.id: {settings.id!r}", settings.args
    try:
        environment = vf.load_environment(settings.id, **arguments)
    except Exception as error:  # a user's environment may raise anything
        raise ValueError(f"{place}: {error}") from error
    if environment.rubric.has_group_rewards:
        raise ValueError(f"{place}: its rubric compares the rollouts of a group; here each episode is scored by itself")
    tools = [{"type": "function", "function": one.model_dump(exclude_none=True)} for one in environment.tool_defs or ()]
    names = [one.name for one in environment.tool_defs or ()]

    async def play(task: Task, policy: Policy) -> float:
        answer = {} if task.answer is None else {"answer": task.answer}
        row = {"example_id": 0, **task.columns, **answer, "prompt": task.messages}
        result = await environment.run_rollout(row, PolicyClient(policy, names), "policy", {})
        if (failure := result.get("error")) is not None:
            raise RuntimeError(f"verifiers: {failure['error_chain_repr']}")
        for name, number in (result["metrics"] or {}).items():
            policy.count(name, float(number))
        return float(result["reward"])

    return play, tools


class PolicyClient(OpenAIChatCompletionsClient):
    """Model client for verifiers. Its requests contain the whole conversation; the policy gets only new messages."""

    def __init__(self, policy: Policy, tools: Sequence[str]) -> None:
        super().__init__(policy)
        self._policy = policy
        self._tools = tools
        self._known: list[Any] = []

    async def get_response(self, prompt: Any, model: str, sampling_args: Any, tools: Any = None, **_: Any) -> Any:
        offered = [one.name for one in tools or ()]
        if offered != list(self._tools):
            raise ValueError(f"the environment offers the tools {offered} in this episode; the chat template describes {list(self._tools)}")
        messages, _ = await self.to_native_prompt(prompt)
        known = len(self._known)
        if messages[:known] != self._known:
            changed = next(at for at in range(known) if messages[at : at + 1] != self._known[at : at + 1])
            raise ValueError(f"the environment changed message {changed + 1} of {known}; a conversation whose tokens train can only grow")
        try:
            response = await self._policy.respond([_message(one) for one in messages[known:]])
        except EpisodeOver as over:  # verifiers then ends the rollout, and scores it
            raise vf.OverlongPromptError(str(over)) from over
        calls = []
        for one in response.get("tool_calls", ()):
            arguments = one["text"] if "problem" in one else json.dumps(one["function"]["arguments"], ensure_ascii=False)
            calls.append({"id": one["id"], "name": one["function"]["name"], "arguments": arguments})
        message = {"content": response["content"], "tool_calls": calls or None, "finish_reason": "tool_calls" if calls else "stop"}
        answer = vf.Response(id="", created=0, model=model, message={**message, "is_truncated": False})
        said, _ = await self.to_native_prompt([answer.message])
        self._known = [*messages, *said]
        return answer


def _message(native: Message) -> Message:
    content = native.get("content") or ""
    if not isinstance(content, str):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("the environment sent a message with images or sound; only texts are possible")
        content = "".join(part["text"] for part in content)
    if native.get("tool_calls"):
        raise ValueError("the environment sent tool calls; only the policy can make calls")
    of_call = {"tool_call_id": native["tool_call_id"]} if native["role"] == "tool" else {}
    return {"role": native["role"], "content": content, **of_call}
