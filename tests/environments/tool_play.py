"""Episodes with tools in one process. A text's tokens are its bytes; a response is a text, or a JSON list of calls [name, arguments]."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from roll_lite.environments.base import Message, Task
from roll_lite.environments.build import tools_of
from roll_lite.environments.episode import Answer, Ask, Begin, Calls, Event, Limits, Player
from roll_lite.environments.tools import Tools, play_tools

FIRST = {"role": "user", "content": "Go."}


class JsonCalls:
    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return list(json.dumps([message["content"] for message in messages]).encode())

    def continuation(self, response_ids: Sequence[int], messages: Sequence[Message]) -> list[int]:
        return self.prompt(messages)

    def content_tokens(self, messages: Sequence[Message]) -> int:
        return sum(len(message["content"]) for message in messages)

    def message(self, response_ids: Sequence[int]) -> Message:
        text = bytes(response_ids).decode()
        if not text.startswith("["):
            return {"role": "assistant", "content": text}
        made = enumerate(json.loads(text))
        calls = [
            {"id": f"call{number:05d}", "function": {"name": name, "arguments": given}}
            | ({} if isinstance(given, dict) else {"problem": "the arguments are no JSON object"})
            for number, (name, given) in made
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def difference(self) -> None: ...


def begin(columns: dict[str, Any]) -> Begin:
    return Begin(1, Task([FIRST], columns=columns), 1_000_000)


def answer(response: Any, number: int = 0) -> Answer:
    text = response if isinstance(response, str) else json.dumps(response)
    return Answer(1, number, np.array(list(text.encode()), np.int32).tobytes())


def loaded(*settings: Any, turn_timeout_s: float = 60.0) -> list[Tools]:
    return [tools_of(one, f"tools.{number}", Calls(), turn_timeout_s, 60.0) for number, one in enumerate(settings)]


def player_of(tools: Sequence[Tools], max_chars: int = 8000, timeout_s: float = 30.0, max_turns: int = 99) -> Player:
    return Player(play_tools(tools, max_chars), JsonCalls(), Limits(max_turns, timeout_s, 10_000), Calls())


async def played(player: Player, responses: Sequence[Any], columns: dict[str, Any] | None = None) -> tuple[list[Any], Event]:
    """Play an episode with these responses; returns what each was answered with, and how the episode ended."""
    player.tell([begin(columns or {})])
    shown: list[Any] = []
    waiting = list(responses)
    while True:
        for event in await player.events(30.0):
            if not isinstance(event, Ask):
                return shown[1:], event
            shown.append(json.loads(bytes(np.frombuffer(event.ids, np.int32).tolist())))
            player.tell([answer(waiting.pop(0), event.number)])
