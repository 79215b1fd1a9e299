"""Plays episodes in an environment's worker: renders messages to tokens, and passes them to the policy. Knows neither Ray nor engines."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from roll_lite.data.samples import EpisodeRecord, FinishReason
from roll_lite.environments.base import EpisodeOver, Message, Step, Task, messages_from

STUCK_THREADS = 8
"""Calls that may hang in threads before the worker is replaced: Python cannot end a thread."""


class Renderer(Protocol):
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def continuation(self, response_ids: Sequence[int], messages: Sequence[Message]) -> list[int]: ...

    def message(self, response_ids: Sequence[int]) -> Message:
        """Convert a response to a message of the assistant."""
        ...

    def difference(self) -> str | None:
        """Describe where an episode's tokens differ from the whole conversation rendered at once; None: nowhere."""
        ...


class Begin(NamedTuple):
    """Order to play an episode."""

    episode: int
    task: Task
    max_tokens: int
    """Maximum tokens after the first prompt."""


class Answer(NamedTuple):
    """Response of the policy."""

    episode: int
    ids: bytes
    """Token ids, int32."""


class Cancel(NamedTuple):
    episode: int


class Ask(NamedTuple):
    """Request for a response of the policy."""

    episode: int
    ids: bytes
    """New tokens since the last response, int32."""
    most: int | None
    """Maximum tokens of the response; None: no limit of its own."""


class Ended(NamedTuple):
    episode: int
    record: EpisodeRecord
    finish_reason: FinishReason | None
    """Why the episode ended, if a limit ended it."""


class Failed(NamedTuple):
    episode: int
    cause: str


Event = Ask | Ended | Failed
Play = Callable[[Task, "Policy"], Awaitable[Any]]
"""Plays one episode. It may return the last response's reward; a bool also says whether the episode was solved."""


@dataclass(frozen=True)
class Limits:
    max_turns: int
    turn_timeout_s: float
    max_prompt_tokens: int
    max_turn_tokens: int | None = None
    last_reward: bool = False
    """The score is the reward of the last response, not the sum of all."""


class Policy:
    """The policy, as an environment sees it in one episode."""

    def __init__(self, number: int, renderer: Renderer, limits: Limits, room: int, ask: Callable[[Ask], None]) -> None:
        self.messages: list[Message] = []
        """Conversation so far."""
        self.correct: bool | None = None
        """True if the episode is solved. None: its score decides."""
        self.metrics: dict[str, float] = {}
        self.finish_reason: FinishReason | None = None
        """Limit that the episode has reached."""
        self.timer: asyncio.Timeout | None = None
        self._answer: asyncio.Future[bytes] | None = None
        self._number = number
        self._renderer = renderer
        self._limits = limits
        self._room = room
        self._ask = ask
        self._last: np.ndarray | None = None
        self._rewards: list[float] = []
        self._seconds = 0.0
        self._since = asyncio.get_running_loop().time()
        self._given = 0

    async def respond(self, messages: str | Message | Sequence[Message]) -> Message:
        """Add messages, and let the policy respond. Raises EpisodeOver if a limit is reached."""
        if self._answer is not None:
            raise RuntimeError("the policy was asked for a response while it writes another one")
        new = messages_from(messages)
        if len(self._rewards) >= self._limits.max_turns:
            self._finish(FinishReason.MAX_TURNS, f"the episode has had its {self._limits.max_turns} turns")
        ids = self._rendered(new)
        self.finish_reason = None
        self.messages += new
        loop = asyncio.get_running_loop()
        self._answer = loop.create_future()
        self._seconds += loop.time() - self._since
        if self.timer is not None:
            self.timer.reschedule(None)
        most = self._limits.max_turn_tokens
        self._ask(Ask(self._number, np.array(ids, np.int32).tobytes(), most if most is not None and most < self._room else None))
        try:
            response = np.frombuffer(await self._answer, np.int32)
        finally:
            self._answer = None
        self._since = loop.time()
        if self.timer is not None:
            self.timer.reschedule(self._since + self._limits.turn_timeout_s)
        self._room -= len(response)
        self._last = response
        self._rewards.append(0.0)
        message = self._renderer.message(response.tolist())
        self.messages.append(message)
        return message

    def answered(self, ids: bytes) -> None:
        """Take the response that `respond` waits for."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(ids)

    def _rendered(self, new: Sequence[Message]) -> list[int]:
        if self._last is None:
            ids = self._renderer.prompt(new)
            if len(ids) > self._limits.max_prompt_tokens:
                raise ValueError(f"the first prompt has {len(ids)} tokens; sampling.max_prompt_tokens is {self._limits.max_prompt_tokens}")
            return ids
        ids = self._renderer.continuation(self._last.tolist(), new)
        if len(ids) >= self._room:
            self._finish(FinishReason.LENGTH, f"no room is left for a response ({self._room} tokens, {len(ids)} of new messages)")
        self._room -= len(ids)
        self._given += len(ids)
        return ids

    def _finish(self, reason: FinishReason, why: str) -> None:
        self.finish_reason = reason
        raise EpisodeOver(why)

    def reward(self, value: float) -> None:
        """Add to the reward of the last response."""
        if not self._rewards:
            raise ValueError("there is no response yet that could be rewarded")
        if not math.isfinite(value):
            raise ValueError(f"the reward {value!r} is not finite")
        self._rewards[-1] += float(value)

    def count(self, name: str, number: float = 1.0) -> None:
        """Add to one of the episode's metrics."""
        self.metrics[name] = self.metrics.get(name, 0.0) + number

    def record(self) -> EpisodeRecord:
        if not self._rewards:
            raise ValueError("it ended without a response")
        rewards = tuple(self._rewards)
        score = rewards[-1] if self._limits.last_reward else sum(rewards)
        seconds = self._seconds + asyncio.get_running_loop().time() - self._since
        facts = {"turns": float(len(rewards)), "environment_seconds": round(seconds, 6), "environment_tokens": float(self._given)}
        return EpisodeRecord(tuple(self.messages), rewards, score, self.correct, {**self.metrics, **facts})


class Player:
    """Plays many episodes at a time in one event loop."""

    def __init__(self, play: Play, renderer: Renderer, limits: Limits, calls: Calls) -> None:
        self._play = play
        self._renderer = renderer
        self._limits = limits
        self._calls = calls
        self._policies: dict[int, Policy] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._events: list[Event] = []
        self._changed = asyncio.Event()

    def tell(self, orders: Sequence[Begin | Answer | Cancel]) -> None:
        for order in orders:
            if isinstance(order, Begin):
                policy = Policy(order.episode, self._renderer, self._limits, order.max_tokens, self._emit)
                self._policies[order.episode] = policy
                self._tasks[order.episode] = asyncio.get_running_loop().create_task(self._run(order, policy))
            elif order.episode not in self._tasks:  # it has ended
                continue
            elif isinstance(order, Cancel):
                self._tasks[order.episode].cancel()
            else:
                self._policies[order.episode].answered(order.ids)

    def note(self) -> str | None:
        """Note for the user about the rendering; None if there is nothing to note."""
        return self._renderer.difference()

    @property
    def stuck(self) -> int:
        """Calls that hang in threads."""
        return self._calls.stuck

    async def events(self, max_wait_s: float) -> list[Event]:
        """Return the events since the last call. Waits for the first one, at most `max_wait_s`."""
        if not self._events:
            self._changed.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._changed.wait()
            except TimeoutError:
                return []
        events, self._events = self._events, []
        return events

    def _emit(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    async def _run(self, order: Begin, policy: Policy) -> None:
        limit_s = self._limits.turn_timeout_s
        try:
            async with asyncio.timeout(limit_s) as policy.timer:
                with suppress(EpisodeOver):
                    result = await self._play(order.task, policy)
                    if isinstance(result, bool):
                        policy.correct = result
                    if result is not None:
                        policy.reward(float(result))
            self._emit(Ended(order.episode, policy.record(), policy.finish_reason))
        except Exception as error:  # process edge: any exception of user code is recorded as a failure
            expired = isinstance(error, TimeoutError) and policy.timer is not None and policy.timer.expired()
            cause = f"it took longer than {limit_s:g} s (turn_timeout_s) to answer a response" if expired else _told(error)
            self._emit(Failed(order.episode, cause))
        finally:
            del self._policies[order.episode], self._tasks[order.episode]


def _told(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({last.filename}, line {last.lineno})"


# ---------------------------------------------------------------- the user's functions and classes


class Calls:
    """Calls user functions: async ones in the event loop, others in a thread each, since they may block."""

    def __init__(self) -> None:
        self.stuck = 0
        """Threads whose caller gave up."""

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def resolve(result: Any, error: Exception | None) -> None:
            if answer.cancelled():
                self.stuck -= 1
            elif error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)

        def run() -> None:
            result: Any = None
            failure: Exception | None = None
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # a thread's edge; sys.exit must not end the worker, and a future refuses StopIteration
                is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
                failure = error if is_plain else RuntimeError(f"{type(error).__name__}: {error}")  # type: ignore[assignment]
            loop.call_soon_threadsafe(resolve, result, failure)

        threading.Thread(target=run, daemon=True).start()
        try:
            result = await answer
        except asyncio.CancelledError:
            self.stuck += answer.cancelled()
            raise
        return await result if inspect.isawaitable(result) else result


def play_class(cls: Callable[..., Any], args: dict[str, Any], call: Calls) -> Play:
    """Make a Play of a class with `reset` and `step`."""

    async def play(task: Task, policy: Policy) -> None:
        environment = await call(cls, **args)
        try:
            first = await call(environment.reset, task)
            message = await policy.respond(task.messages if first is None else first)
            while True:
                step = Step(*_fields(await call(environment.step, message)))
                policy.reward(step.reward)
                if step.correct is not None:
                    policy.correct = step.correct
                for name, number in step.metrics.items():
                    policy.count(name, number)
                if step.done:
                    return
                message = await policy.respond(step.messages)
        finally:
            if hasattr(environment, "close"):
                await call(environment.close)

    return play


def _fields(answer: Any) -> tuple[Any, ...]:
    if isinstance(answer, str):
        return (answer,)
    if not isinstance(answer, tuple) or not 1 <= len(answer) <= len(Step._fields):
        raise ValueError(f"step returned {answer!r:.80}; expected a Step, or a tuple (messages, reward, done)")
    return answer
