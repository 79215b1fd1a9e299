"""Tools that the model may call, and the episode that offers them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from roll_lite.data.user_function import load_function
from roll_lite.environments.base import Message, Task
from roll_lite.environments.episode import Calls, Play, Policy
from roll_lite.environments.tool_calls import schema_of


@dataclass(frozen=True)
class Tool:
    name: str
    schema: dict[str, Any]
    """Description for the chat template, in OpenAI's form."""
    function: Callable[..., Any]

    @staticmethod
    def of(name: str, path: str) -> Tool:
        """Load a tool by its dotted path. ValueError if the model cannot be told how to call it."""
        function = load_function(name, path, "arguments -> result")
        try:
            schema = schema_of(function)
        except ValueError as error:
            raise ValueError(f"{path}: {name!r}: {error}") from error
        return Tool(schema["function"]["name"], schema, function)


def play_tools(tools: Sequence[Tool], calls: Calls) -> Play:
    """Make a Play in which the policy may call tools until a response has no call."""
    by_name = {tool.name: tool for tool in tools}

    async def answer(call: Message) -> tuple[Message, bool]:
        """Call a tool; returns its message, and whether the call succeeded."""
        name, arguments, problem = call["function"]["name"], call["function"]["arguments"], call.get("problem")
        if problem is None and name not in by_name:
            problem = f"there is no tool {name!r}; there are {', '.join(by_name)}"
        content = f"Error: {problem}"
        if problem is None:
            try:
                result = await calls(by_name[name].function, **arguments)
                content = result if isinstance(result, str) else json.dumps(result, default=str, ensure_ascii=False)
            except Exception as error:  # the model's arguments may make a tool raise anything
                problem = content = f"Error: {type(error).__name__}: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}, problem is None

    async def play(task: Task, policy: Policy) -> None:
        policy.count("tool_calls", 0)
        policy.count("tool_errors", 0)
        message = await policy.respond(task.messages)
        while made := message.get("tool_calls"):
            answers = await asyncio.gather(*map(answer, made))
            policy.count("tool_calls", len(answers))
            policy.count("tool_errors", sum(not succeeded for _, succeeded in answers))
            message = await policy.respond([one for one, _ in answers])

    return play
