from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from typing import Any, Protocol

from roll_lite.environments.base import Message, Task
from roll_lite.environments.episode import Calls, EpisodeFunction, Policy
from roll_lite.environments.tool_calls import schema_of
from roll_lite.sandbox.pool import SandboxTrouble

MAX_THREADS = 256
"""Maximum calls of a sync tool at a time in a worker."""
LEFT_OUT = "\n[... the middle is left out: the result is too long ...]\n"


class ToolError(Exception):
    """Failure of a call; the model reads the message as the call's result."""


class ToolLost(Exception):
    """Loss of a tool's backend, such as a server. The episode attempt fails."""


LOST = (ToolLost, SandboxTrouble)
Call = Callable[[str, dict[str, Any]], Awaitable[Any]]


class Tools(Protocol):
    @property
    def schemas(self) -> Sequence[dict[str, Any]]: ...

    def opened(self, task: Task) -> AbstractAsyncContextManager[Call]:
        """Return a context manager that yields the function for calls; entered before an episode's first call, left at its end."""
        ...


class FunctionTool:
    def __init__(self, function: Callable[..., Any], calls: Calls) -> None:
        self.schemas = [schema_of(function)]
        self._function = function
        self._calls = calls
        # Each call of a sync function takes a thread.
        self._places = nullcontext() if inspect.iscoroutinefunction(function) else asyncio.Semaphore(MAX_THREADS)

    def opened(self, task: Task) -> AbstractAsyncContextManager[Call]:
        return nullcontext(self._call)

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        async with self._places:
            return await self._calls(self._function, **arguments)


def play_tools(tools: Sequence[Tools], max_chars: int) -> EpisodeFunction:
    """Return the episode function: the policy calls tools until a response has no call."""
    by_name = {schema["function"]["name"]: one for one in tools for schema in one.schemas}

    async def play(task: Task, policy: Policy) -> None:
        opened: dict[Tools, Call] = {}

        async def answer(call: Message) -> tuple[Message, bool]:
            name, arguments, problem = call["function"]["name"], call["function"]["arguments"], call.get("problem")
            if problem is None and name not in by_name:
                problem = f"there is no tool {name!r}; there are {', '.join(by_name)}"
            content = f"Error: {problem}"
            if problem is None:
                try:
                    result = await opened[by_name[name]](name, arguments)
                    content = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
                except LOST:
                    raise
                except ToolError as error:
                    problem = content = str(error)
                except (Exception, SystemExit) as error:  # the model's arguments may make a tool raise anything
                    problem = content = f"Error: {type(error).__name__}: {error}"
            return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": cut(content, max_chars)}, problem is None

        policy.count("tool_calls", 0)
        policy.count("tool_errors", 0)
        closing = AsyncExitStack()
        try:
            message = await policy.respond(task.messages)
            while made := message.get("tool_calls"):
                for name in by_name.keys() & {call["function"]["name"] for call in made}:
                    if (one := by_name[name]) not in opened:
                        opened[one] = await closing.enter_async_context(one.opened(task))
                answers = await asyncio.gather(*map(answer, made))
                policy.count("tool_calls", len(answers))
                policy.count("tool_errors", sum(not succeeded for _, succeeded in answers))
                message = await policy.respond([one for one, _ in answers])
        finally:
            await closing.aclose()  # not __aexit__: a tool's task group would wrap the exception that ends the episode

    return play


def cut(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    kept = max_chars - len(LEFT_OUT)
    return text[: kept - kept // 2] + LEFT_OUT + text[-(kept // 2) :]
