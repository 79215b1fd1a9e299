"""Interface of environments, which users write (docs/environments.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
"""Chat message: role and content. Assistant messages may have tool_calls; tool messages have tool_call_id and name."""


@dataclass(frozen=True)
class Task:
    messages: list[Message]
    """First prompt: the template's system message, if any, and the row's prompt."""
    answer: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Seed for the environment's random numbers. In deterministic runs it depends only on the sample."""


class Step(NamedTuple):
    messages: str | Message | Sequence[Message] = ()
    """New messages; a plain text is a user message."""
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None
    """True: solved. False: cannot be solved any more. None: undecided."""
    metrics: Mapping[str, float] = {}


class Environment(Protocol):
    """Environment of one episode. Methods may be async. A `close` method, if present, is called at the end."""

    def reset(self, task: Task) -> Sequence[Message] | None:
        """Begin an episode; return the first prompt's messages, or None to use the task's."""
        ...

    def step(self, message: Message) -> Step:
        """Answer a response with a Step, a tuple of a Step's first fields, or a text, which becomes a user message."""
        ...


def messages_from(given: str | Message | Sequence[Message]) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages = [given] if isinstance(given, Mapping) else list(given)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"returned {message!r:.80} as a message; expected a text or {{role, content}}, with texts in both")
    try:
        plain: list[Message] = json.loads(json.dumps([dict(message) for message in messages]))
    except (TypeError, ValueError, RecursionError) as error:  # other objects could be lost between processes
        raise ValueError(f"returned {messages!r:.80} as messages, but all fields must be JSON values: {error}") from None
    return plain


def opening(task: Task, text: str) -> list[Message]:
    *before, last = task.messages
    return [*before, {**last, "content": "\n\n".join(filter(None, (last["content"], text)))}]


def seed_of(task: Task) -> int:
    """Seed for generated tasks: the row's `seed`, if any, so that all samples of a prompt get the same task."""
    return int(task.columns.get("seed", task.seed))


class EpisodeOver(Exception):
    """End of the episode at a limit: no further response is possible. Do not catch it."""
