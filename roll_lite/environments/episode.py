"""Play episodes in an environment's worker: render messages to tokens and pass them to the policy. Independent of Ray and engines."""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from roll_lite.data.samples import EpisodeRecord, FinishReason
from roll_lite.environments.base import EpisodeOver, Message, Step, Task, messages_from

STUCK_THREADS, STUCK_AFTER_S = 8, 30.0
"""A call hangs if it still runs STUCK_AFTER_S after its caller gave up. At STUCK_THREADS such calls the worker is replaced: Python cannot
end threads."""
MOST_CHARACTERS = 64
"""Maximum characters per token of a conversation. More are refused untokenized, since tokenizing takes seconds per megabyte."""
LONGEST_REFUSAL = 200
"""Maximum characters of a refusal's reason in a cause of failure; the ledger has room for this and the failure itself."""


class Renderer(Protocol):
    def prompt(self, messages: Sequence[Message]) -> list[int]: ...

    def continuation(self, response_ids: Sequence[int], messages: Sequence[Message]) -> list[int]: ...

    def message(self, response_ids: Sequence[int]) -> Message:
        """Convert a response to an assistant message."""
        ...

    thinking: bool
    """True if the generation prompt opens the thoughts (<think>), so that responses lack the opening tag."""

    def text(self, text: str, after: bool = False) -> list[int]:
        """Tokenize a prompt without a template. `after`: it follows a response."""
        ...

    def exact(self, response_ids: Sequence[int]) -> str:
        """Decode a response with its special tokens."""
        ...

    def content_tokens(self, messages: Sequence[Message]) -> int:
        """Number of tokens in the messages' contents."""
        ...

    def difference(self) -> str | None:
        """Describe where an episode's tokens differ from the whole conversation rendered at once; None if nowhere."""
        ...


class Begin(NamedTuple):
    episode: int
    task: Task
    max_tokens: int
    """Maximum tokens after the first prompt: responses, and messages between them."""


class Answer(NamedTuple):
    episode: int
    number: int
    ids: bytes
    """Token ids, int32."""
    finish_reason: FinishReason | None = None


class Cancel(NamedTuple):
    episode: int


class Ask(NamedTuple):
    episode: int
    number: int
    after: int | None
    """Number of the response that these tokens follow; None: they start a conversation."""
    ids: bytes
    """Token ids, int32, to append to the conversation before the response is sampled."""
    most: int | None
    """Maximum tokens of the response; None: all that are left."""
    stop: tuple[str, ...] = ()


class Ended(NamedTuple):
    episode: int
    record: EpisodeRecord
    finish_reason: FinishReason | None
    """Limit that ended the episode, or STOP if an agent ended by itself; else None."""


class Failed(NamedTuple):
    episode: int
    cause: str


Event = Ask | Ended | Failed
EpisodeFunction = Callable[[Task, "Policy"], Awaitable[Any]]
"""Function that plays one episode. It may return the last response's reward; a bool also sets whether the episode was solved."""


@dataclass(frozen=True)
class Limits:
    max_turns: int
    turn_timeout_s: float
    max_prompt_tokens: int
    max_turn_tokens: int | None = None
    last_reward: bool = False
    """True: the last response's reward is the score, not the sum."""


class Response(NamedTuple):
    number: int
    ids: np.ndarray
    finish_reason: FinishReason | None


class Policy:
    def __init__(self, number: int, renderer: Renderer, limits: Limits, room: int, ask: Callable[[Ask], None]) -> None:
        self.messages: list[Message] = []
        self.correct: bool | None = None
        self.metrics: dict[str, float] = {}
        self.branches: list[list[Message]] = []
        self.answer: str | None = None
        self.finish_reason: FinishReason | None = None
        """Reset to None when another response is sampled."""
        self.limit: tuple[FinishReason, str] | None = None
        """Last limit reached: (reason, explanation)."""
        self.refusal: str | None = None
        """Why an agent's last refused request was refused."""
        self.cancelled = False
        self.limits = limits
        self.room = room
        """Tokens left for responses and for messages between them."""
        self.longest = limits.max_prompt_tokens + room
        """Maximum tokens of a conversation."""
        self.timer: asyncio.Timeout | None = None
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._number = number
        self._renderer = renderer
        self._ask = ask
        self._last: np.ndarray | None = None
        self._cancelled = False
        """True if the environment cancelled a response: further requests are refused."""
        self._rewards: list[float] = []
        self._too_long = 0
        """Number of times that LENGTH was the limit."""
        self._seconds = 0.0
        self._begun = self._since = asyncio.get_running_loop().time()
        self._given = self._template = self._sampled = 0

    async def respond(self, messages: str | Message | Sequence[Message]) -> Message:
        """Add messages, and let the policy respond; EpisodeOver at a limit."""
        if self._answers:
            raise RuntimeError("the policy was asked for a response while it writes another one")
        self._refuse_if_cancelled()
        new = messages_from(messages)
        self.begin_turn()
        self.check_characters(sum(len(one["content"]) for one in new))
        contents = 0
        if self._last is None:
            ids = self._renderer.prompt(new)
            if len(ids) > self.limits.max_prompt_tokens:
                raise ValueError(f"the first prompt has {len(ids)} tokens; sampling.max_prompt_tokens is {self.limits.max_prompt_tokens}")
        else:
            ids = self._renderer.continuation(self._last.tolist(), new)
            if len(ids) >= self.room:
                self.finish(FinishReason.LENGTH, f"no room is left for a response ({self.room} tokens, {len(ids)} of new messages)")
            self.room -= len(ids)
            contents = self._renderer.content_tokens(new)
        self.messages += new
        most = self.limits.max_turn_tokens
        after = len(self._rewards) - 1 if self._rewards else None
        try:
            response = (await self.sample(ids, after, most if most is not None and most < self.room else None, contents=contents)).ids
        except asyncio.CancelledError:
            self._cancelled = True
            raise
        self.room -= len(response)
        self._last = response
        message = self._renderer.message(response.tolist())
        self.messages.append(message)
        return message

    def _refuse_if_cancelled(self) -> None:
        if self._cancelled:
            raise RuntimeError("the environment cancelled a response of the policy; await respond without a time limit of its own")

    def begin_turn(self) -> None:
        if len(self._rewards) >= self.limits.max_turns:
            self.finish(FinishReason.MAX_TURNS, f"the episode has had its {self.limits.max_turns} turns")
        if self._too_long > self.limits.max_turns:
            self.finish(FinishReason.LENGTH, "too many messages were too long")

    def check_characters(self, number: int) -> None:
        """Refuse messages of `number` characters if they cannot fit."""
        if number > MOST_CHARACTERS * self.longest:
            self.finish(FinishReason.LENGTH, f"no room is left for a response: the messages have {number} characters")

    async def sample(
        self, ids: Sequence[int], after: int | None, most: int | None, stop: Sequence[str] = (), contents: int = 0
    ) -> Response:
        """Append tokens to a conversation, and sample a response. `contents`: those of a continuation's contents.
        `after`, `most`: as in `Ask`."""
        loop = asyncio.get_running_loop()
        number = len(self._rewards)
        self._rewards.append(0.0)
        self.finish_reason = None
        if after is not None:
            self._given += len(ids)
            self._template += max(0, len(ids) - contents)
        answer = self._answers[number] = loop.create_future()
        if len(self._answers) == 1:
            self._seconds += loop.time() - self._since
            self._set_timer(None)
        self._ask(Ask(self._number, number, after, np.array(ids, np.int32).tobytes(), most, tuple(stop)))
        try:
            given = await answer
        finally:
            del self._answers[number]
            if not self._answers:
                self._since = loop.time()
                self._set_timer(self._since + self.limits.turn_timeout_s)
        sampled = np.frombuffer(given.ids, np.int32)
        self._sampled += len(sampled)
        return Response(number, sampled, given.finish_reason)

    def _set_timer(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the episode has ended
            if self.timer is not None:
                self.timer.reschedule(when)

    def answered(self, answer: Answer) -> None:
        waiting = self._answers.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def finish(self, reason: FinishReason, why: str) -> NoReturn:
        self.finish_reason, self.limit = reason, (reason, why)
        self._too_long += reason is FinishReason.LENGTH
        raise EpisodeOver(why)

    def reward(self, value: float) -> None:
        if not self._rewards:
            raise ValueError("there is no response yet that could be rewarded")
        if not math.isfinite(value):
            raise ValueError(f"the reward {value!r} is not finite")
        self._rewards[-1] += float(value)

    def count(self, name: str, number: float = 1.0) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + float(number)

    def record(self) -> EpisodeRecord:
        self._refuse_if_cancelled()
        if not self._rewards:
            raise ValueError(f"it ended without a response{f': {self.limit[1]}' if self.limit else ''}")
        rewards = tuple(self._rewards)
        score = rewards[-1] if self.limits.last_reward else sum(rewards)
        now = asyncio.get_running_loop().time()
        seconds = self._seconds + (0.0 if self._answers else now - self._since)
        facts: dict[str, float] = {"turns": len(rewards), "rows": 1 + len(self.branches)}
        facts |= {"environment_seconds": round(seconds, 6), "waiting_seconds": round(now - self._begun - seconds, 6)}
        facts |= {"policy_tokens": self._sampled, "environment_tokens": self._given, "template_tokens": self._template}
        facts = {name: float(number) for name, number in facts.items()}
        branches = tuple(map(tuple, self.branches))
        correct = None if self.correct is None else bool(self.correct)  # it may be NumPy's
        return EpisodeRecord(tuple(self.messages), rewards, score, correct, {**self.metrics, **facts}, branches, self.answer)


class Player:
    def __init__(self, play: EpisodeFunction, renderer: Renderer, limits: Limits, calls: Calls) -> None:
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
                task = self._tasks[order.episode] = asyncio.get_running_loop().create_task(self._run(order, policy))
                task.add_done_callback(partial(self._forget, order.episode))
            elif order.episode not in self._tasks:  # it has ended
                continue
            elif isinstance(order, Cancel):
                self._policies[order.episode].cancelled = True
                self._tasks[order.episode].cancel()
            else:
                self._policies[order.episode].answered(order)

    def note(self) -> str | None:
        """Difference from the chat template, or None."""
        return self._renderer.difference()

    @property
    def stuck(self) -> int:
        return self._calls.stuck

    async def events(self, max_wait_s: float) -> list[Event]:
        """Return the events since the last call; wait for the first, at most `max_wait_s`."""
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
            try:
                async with asyncio.timeout(limit_s) as policy.timer:
                    try:
                        result = await self._play(order.task, policy)
                        if isinstance(result, bool | np.bool_):
                            policy.correct = bool(result)
                        if result is not None:
                            policy.reward(float(result))
                    except* EpisodeOver:  # also in the exception group of a task group
                        pass
            except TimeoutError:
                if policy.limit is None or policy.timer is None or not policy.timer.expired():
                    raise
                policy.finish_reason = policy.limit[0]  # a failure would have the sample repeated until it is short
            self._emit(Ended(order.episode, policy.record(), policy.finish_reason))
        except (Exception, asyncio.CancelledError, SystemExit) as error:  # process edge: what user code raises is recorded as a failure
            if policy.cancelled:
                return
            if isinstance(error, TimeoutError) and policy.timer is not None and policy.timer.expired():
                cause = f"it took longer than {limit_s:g} s (turn_timeout_s) to answer a response"
            else:
                first: BaseException = error
                while isinstance(first, BaseExceptionGroup):
                    first = first.exceptions[0]
                last = traceback.extract_tb(first.__traceback__ or error.__traceback__)[-1]
                cause = f"{type(first).__name__}: {first} ({last.filename}, line {last.lineno})"
            refusal = f"a request was refused ({policy.refusal:.{LONGEST_REFUSAL}}), then: " if policy.refusal else ""
            self._emit(Failed(order.episode, refusal + cause))

    def _forget(self, episode: int, task: asyncio.Task[None]) -> None:
        if self._tasks[episode] is task:  # else the number is already used again
            del self._policies[episode], self._tasks[episode]


# ---------------------------------------------------------------- the user's functions and classes


class Calls:
    """Calls of the user's functions: async ones in the event loop, others each in its own thread, because they may block. `stuck`: number
    of calls that hang."""

    def __init__(self) -> None:
        self.stuck = 0

    async def __call__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        ended = hangs = False

        def give_up() -> None:
            nonlocal hangs
            hangs = not ended
            self.stuck += hangs

        def resolve(result: Any, error: Exception | None) -> None:
            nonlocal ended
            ended = True
            if answer.cancelled():
                self.stuck -= hangs
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
            with suppress(RuntimeError):  # the caller has given up, and the loop is closed
                loop.call_soon_threadsafe(resolve, result, failure)

        threading.Thread(target=run, daemon=True).start()
        try:
            result = await answer
        except asyncio.CancelledError:
            loop.call_later(STUCK_AFTER_S, give_up)
            raise
        return await result if inspect.isawaitable(result) else result


def play_class(cls: Callable[..., Any], args: dict[str, Any], call: Calls) -> EpisodeFunction:
    async def play(task: Task, policy: Policy) -> None:
        environment = await call(cls, **args)
        try:
            first = await call(environment.reset, task)
            message = await policy.respond(task.messages if first is None else first)
            while True:
                answer = await call(environment.step, message)
                answer = (answer,) if isinstance(answer, str) else answer
                if not isinstance(answer, tuple) or not 1 <= len(answer) <= len(Step._fields):
                    raise ValueError(f"step returned {answer!r:.80}; expected a Step, or a tuple (messages, reward, done)")
                step = Step(*answer)
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
