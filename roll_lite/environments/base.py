"""Interface of environments, which users write (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
"""Chat message with `role` and `content`. Messages of the assistant may have `tool_calls`; messages of tools have `tool_call_id` and
`name`."""


@dataclass(frozen=True)
class Task:
    messages: list[Message]
    """Messages of the first prompt: the template's system message, if any, and the prompt of the row."""
    answer: Any = None
    columns: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Seed for random numbers of the environment. In deterministic runs, it depends only on the sample."""


class Step(NamedTuple):
    messages: str | Message | Sequence[Message] = ()
    """New messages; a plain text is a user message."""
    reward: float = 0.0
    done: bool = False
    correct: bool | None = None
    """True: the task is solved. False: it cannot be solved any more. None: undecided."""
    metrics: Mapping[str, float] = {}


class Environment(Protocol):
    """Environment of one episode, written by users. Methods may be async. If it has a method `close`, this is called at the end."""

    def reset(self, task: Task) -> Sequence[Message] | None:
        """Begin an episode. Return the messages of the first prompt, or None to use those of the task."""
        ...

    def step(self, message: Message) -> Step:
        """React to a response of the policy. Return a Step, a tuple with the first fields of a Step, or a text, which becomes a user
        message."""
        ...


def messages_from(given: str | Message | Sequence[Message], role: str = "user") -> list[Message]:
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    messages = [given] if isinstance(given, Mapping) else list(given)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"returned {message!r:.80} as a message; expected a text or {{role, content}}, with texts in both")
    return [dict(message) for message in messages]


def opening(task: Task, text: str) -> list[Message]:
    *before, last = task.messages
    return [*before, {**last, "content": "\n\n".join(filter(None, (last["content"], text)))}]


def seed_of(task: Task) -> int:
    """Return the seed for a generated task. It is the row's column `seed`, if any, so that all samples of a prompt get the same task."""
    return int(task.columns.get("seed", task.seed))


class EpisodeOver(Exception):
    """Raised when the episode has reached a limit, so that no further response is possible. Environments must not catch it."""
