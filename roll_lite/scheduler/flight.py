"""Requests in flight: `Asked` follows one over all its engines, `Flight` keeps its time at one engine."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from sys import intern

from roll_lite.data.samples import TURN, GenerationRequest, Turn, VersionSpan, merged
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.choice import EngineChoice, EngineLoad
from roll_lite.scheduler.engines import EngineLost

PRIOR_RESPONSES = 8
"""Number of assumed responses of max_tokens at the start, since short responses finish first."""
RESPONSES_REMEMBERED = 512
"""Number of lengths remembered; old ones are dropped, since lengths drift during training."""
REFRESH = 16
"""Lengths are sorted again when 1/REFRESH of them are new."""
CLOCK_S = 1e-6
"""Tolerance for timers that fire early."""
LOOK_S = 1.0
"""Interval of time-out checks while the engine is paused."""


class ExpectedLength:
    """Estimate of response lengths from a domain's latest responses. One response of `most` tokens always counts."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._last = deque([most] * PRIOR_RESPONSES, maxlen=RESPONSES_REMEMBERED)
        self._sort()

    def _sort(self) -> None:
        self._lengths = sorted((*self._last, self.most))
        self._sums = [0, *accumulate(reversed(self._lengths))]
        """Sums of the n longest lengths, by n."""
        self._new = 0

    def observe(self, tokens: int) -> None:
        self._last.append(tokens)
        self._new += 1
        if self._new * REFRESH >= len(self._last):
            self._sort()

    def left(self, generated: int) -> float:
        """Expected further tokens of an unfinished response: the mean length of longer ones, minus `generated`.

        With a long tail this grows with the length so far.
        """
        longer = len(self._lengths) - bisect_right(self._lengths, generated)
        return self._sums[longer] / longer - generated if longer else 0.0


@dataclass(eq=False, slots=True)
class Asked:
    """A request over all the engines that work on it."""

    domain: str
    first: GenerationRequest
    expected: ExpectedLength
    so_far: Turn | None = None
    """Response so far, if the request was interrupted."""
    legs: int = 0
    fruitless: int = 0
    survived: tuple[EngineLost, ...] = ()
    generating_s: float = 0.0
    """Time used so far."""
    prefix: str = ""
    """Identifies a shared prompt beginning: the group's prompt or, in a later turn, the sample's earlier turns."""

    def __post_init__(self) -> None:
        first_turn = self.first.context is None
        self.prefix = intern("/".join(self.first.request_id.split("/", 4)[:4])) if first_turn else self.sample

    @property
    def sample(self) -> str:
        return self.first.request_id.partition(TURN)[0]

    @property
    def shared_tokens(self) -> int:
        """Prompt tokens that an engine with this prefix has cached."""
        return self.first.context.length if self.first.context is not None else len(self.first.prompt_ids)

    @property
    def own_tokens(self) -> int:
        """Further tokens that exist already: a later turn's prompt, and the response so far."""
        new = len(self.first.prompt_ids) if self.first.context is not None else 0
        return new + (self.so_far.length if self.so_far is not None else 0)

    def left(self, generated: int = 0) -> float:
        """Load that it adds to an engine after `generated` tokens there: the tokens still expected.

        Before its prefill the prompt counts too. So an engine's load is the prefill that waits and the growth of its responses; finished
        tokens cost little in comparison.
        """
        done = generated + (self.so_far.length if self.so_far is not None else 0)
        return max(1.0, min(self.expected.left(done), self.first.sampling.max_tokens - done))

    def interrupted(self, turn: Turn) -> None:
        self.so_far = joined(self.so_far, turn)
        self.legs += 1

    def request(self) -> GenerationRequest:
        """The request to send: the original one, or one that continues from the response so far."""
        if self.so_far is None:
            return self.first
        sampling, done = self.first.sampling, self.so_far.length
        seed = None if sampling.seed is None else stable_hash(sampling.seed, "continued", self.legs)
        rest = replace(sampling, max_tokens=sampling.max_tokens - done, min_tokens=max(0, sampling.min_tokens - done), seed=seed)
        return GenerationRequest(f"{self.first.request_id}~{self.legs}", (), rest, self.so_far.tokens, resumed=done)


def joined(before: Turn | None, turn: Turn) -> Turn:
    """Join the parts of a response: of an interrupted request and of its continuation."""
    if before is None:
        return turn
    shifted = tuple(VersionSpan(before.length + span.start, span.version) for span in turn.versions)
    return turn._replace(
        request_id=before.request_id,
        length=before.length + turn.length,
        versions=merged(*before.versions, *shifted),
        cached_tokens=before.cached_tokens,
    )


class EngineClock:
    """The event loop's time without the time in which engines were paused."""

    def __init__(self) -> None:
        self._stood_s = 0.0
        self._stopped_at: float | None = None

    def time(self) -> float:
        now = asyncio.get_running_loop().time() if self._stopped_at is None else self._stopped_at
        return now - self._stood_s

    @property
    def stands(self) -> bool:
        return self._stopped_at is not None

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = asyncio.get_running_loop().time()

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._stood_s += asyncio.get_running_loop().time() - self._stopped_at
            self._stopped_at = None


class Flight:
    """Time-out and progress of a request at one engine. Uses callbacks and a timer, since a task per request would dominate the cost."""

    __slots__ = (
        "_asked",
        "_begun_at",
        "_choice",
        "_clock",
        "_cost",
        "_done",
        "_engine",
        "_grown",
        "_length",
        "_loop",
        "_sent",
        "_timeout_s",
        "_timer",
        "over",
    )

    def __init__(self, engine: EngineLoad, asked: Asked, timeout_s: float, choice: EngineChoice, cost: float, clock: EngineClock) -> None:
        """`cost`: load that the request added to the engine."""
        self._engine, self._asked, self._timeout_s = engine, asked, timeout_s
        self._choice, self._cost, self._done, self._grown = choice, cost, 0.0, 0.0
        self._length = asked.left()
        """Expected length of the response."""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        """Done when there is an answer or the time is up."""
        self._sent = clock.time()
        self._begun_at: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._look_at_engine)

    def answered(self, _: object) -> None:
        """Note the engine's answer. (An answer after the time-out was provoked by an abort and is no sign of life.)"""
        if not self.over.done():
            self._engine.last_sign = self._clock.time()
            self.over.set_result(None)

    @property
    def begun(self) -> bool:
        return self._begun_at is not None

    def generated(self, tokens: int) -> None:
        """Note the engine's progress report: the request has started and has this many tokens."""
        if self.over.done():
            return
        if self._begun_at is None:
            self._begin()
        left = self._asked.left(tokens)
        self._report(self._cost - left, tokens + left - self._length)

    def _report(self, done: float, grown: float) -> None:
        """Report to the choice. `done`: tokens finished; `grown`: change of the expected length."""
        done += grown
        self._choice.report(self._engine, done - self._done, grown - self._grown)
        self._done, self._grown = done, grown

    def _end_wait(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _begin(self) -> None:
        """Start the request's own time."""
        self._timer.cancel()
        self._begun_at = self._engine.last_sign = self._clock.time()
        self._engine.generating += 1
        self._look_at_time()

    def _look_at_time(self) -> None:
        """End the wait if a started request has used up its time."""
        assert self._begun_at is not None
        used = self._asked.generating_s + self._clock.time() - self._begun_at
        self._wait_or_end(self._timeout_s - used, self._look_at_time)

    def _look_at_engine(self) -> None:
        """End the wait of a request that has not started if its engine was idle for a whole time limit."""
        since = max(self._sent, self._engine.last_sign)
        left = self._timeout_s - (0.0 if self._engine.generating else self._clock.time() - since)
        self._wait_or_end(left, self._look_at_engine)

    def _wait_or_end(self, left: float, look_again: Callable[[], None]) -> None:
        if left > CLOCK_S:
            self._timer = self._loop.call_later(max(left, LOOK_S if self._clock.stands else 0.0), look_again)
        else:
            self._end_wait()

    def close(self) -> None:
        """Stop the timer and withdraw the request from the engine's counts."""
        self._timer.cancel()
        if self._begun_at is not None:
            self._report(0.0, 0.0)
            self._engine.last_sign = self._clock.time()
            self._engine.generating -= 1
            self._asked.generating_s += self._engine.last_sign - self._begun_at
