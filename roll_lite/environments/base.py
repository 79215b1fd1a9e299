"""Interface of environments, which users write (docs/environments.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

Message = dict[str, Any]
"""Chat message: role and content. An assistant's may have tool_calls; a tool's has tool_call_id and name."""


@dataclass(frozen=True)
class Task:
    """A row of the data, for one episode."""

    messages: list[Message]
    """First prompt: the template's system message, if any, and the prompt of the row."""
    answer: Any = None
    """Reference answer."""
    columns: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    """Seed for the environment's own random numbers. In deterministic runs it depends on the sample only."""


class Step(NamedTuple):
    """Answer of an environment to a response."""

    messages: str | Message | Sequence[Message] = ()
    """New messages; a text is a message of the user."""
    reward: float = 0.0
    done: bool = False
    """The episode is over."""
    correct: bool | None = None
    """True if the episode is solved, False if it cannot be solved any more; None: not known yet."""
    metrics: Mapping[str, float] = {}
    """Numbers to add to the episode's metrics."""


class Environment(Protocol):
    """Class of an environment; the run makes an instance for each episode. Both methods may be async. A `close` method, if there is one,
    is called at the end."""

    def reset(self, task: Task) -> Sequence[Message] | None:
        """Begin an episode; returns the messages of the first prompt, or None for those of the task."""
        ...

    def step(self, message: Message) -> Step:
        """Answer a response of the policy by a Step, a tuple of its first fields, or one text."""
        ...


def messages_from(given: str | Message | Sequence[Message], role: str = "user") -> list[Message]:
    """Convert what an environment returned to messages; ValueError for anything else."""
    if isinstance(given, str):
        return [{"role": role, "content": given}]
    messages = [given] if isinstance(given, Mapping) else list(given)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ValueError(f"returned {message!r:.80} as a message; expected a text or {{role, content}}, with texts in both")
    return [dict(message) for message in messages]


def opening(task: Task, text: str) -> list[Message]:
    """First prompt of an environment: the row's prompt, and the environment's own text below it."""
    *before, last = task.messages
    return [*before, {**last, "content": "\n\n".join(filter(None, (last["content"], text)))}]


def seed_of(task: Task) -> int:
    """Seed for what an environment generates: the row's `seed`, if it has one, so that all samples of a prompt get the same."""
    return int(task.columns.get("seed", task.seed))


class EpisodeOver(Exception):
    """The episode has reached a limit: no further response is possible. Do not catch it."""
