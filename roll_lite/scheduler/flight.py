"""A request on its way: over all the engines that it comes to, and its time at one of them."""

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
"""Of max_tokens, as if they had been seen: the first responses to finish are the short ones."""
RESPONSES_REMEMBERED = 512
"""The policy's lengths drift during training."""
REFRESH = 16
"""Lengths are sorted anew when so large a part of them has changed."""
CLOCK_S = 1e-6
"""Timers may fire so much too early."""
LOOK_S = 1.0
"""While its engine stands still, it is looked after a request's time so often."""


class ExpectedLength:
    """What a domain's last responses say of one that is on its way. One of `most` tokens always counts among them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._last = deque([most] * PRIOR_RESPONSES, maxlen=RESPONSES_REMEMBERED)
        self._sort()

    def _sort(self) -> None:
        self._lengths = sorted((*self._last, self.most))
        self._sums = [0, *accumulate(reversed(self._lengths))]
        """Of the longest, by their number."""
        self._new = 0

    def observe(self, tokens: int) -> None:
        self._last.append(tokens)
        self._new += 1
        if self._new * REFRESH >= len(self._last):
            self._sort()

    def left(self, generated: int) -> float:
        """To be generated still, of a response that has so many tokens and has not ended: the mean of those that became longer, less what
        it has. With a long tail that is the more, the longer it is already."""
        longer = len(self._lengths) - bisect_right(self._lengths, generated)
        return self._sums[longer] / longer - generated if longer else 0.0


@dataclass(eq=False, slots=True)
class Asked:
    """A request on its way, over all the engines that it comes to."""

    domain: str
    first: GenerationRequest
    expected: ExpectedLength
    so_far: Turn | None = None
    """What was generated of it before it was interrupted."""
    legs: int = 0
    fruitless: int = 0
    survived: tuple[EngineLost, ...] = ()
    generating_s: float = 0.0
    """Of its time, what is used up."""
    prefix: str = ""
    """What its prompt begins with: that of its group (domain, prompt, epoch and group) or, in a later turn, what was said in its sample."""

    def __post_init__(self) -> None:
        first_turn = self.first.context is None
        self.prefix = intern("/".join(self.first.request_id.split("/", 4)[:4])) if first_turn else self.sample

    @property
    def sample(self) -> str:
        return self.first.request_id.partition(TURN)[0]

    @property
    def shared_tokens(self) -> int:
        """Of its prompt, those that an engine with its prefix has."""
        return self.first.context.length if self.first.context is not None else len(self.first.prompt_ids)

    @property
    def own_tokens(self) -> int:
        """The others that there are already."""
        new = len(self.first.prompt_ids) if self.first.context is not None else 0
        return new + (self.so_far.length if self.so_far is not None else 0)

    def left(self, generated: int = 0) -> float:
        """What it adds to the load of an engine that has generated so many tokens of it, and prefilled it by then: the tokens that it is
        expected to get there. Before, its prompt comes on top. So an engine's load is what waits for its prefill and what its responses
        will still grow by; tokens that they have already cost little compared with those to come."""
        done = generated + (self.so_far.length if self.so_far is not None else 0)
        return max(1.0, min(self.expected.left(done), self.first.sampling.max_tokens - done))

    def interrupted(self, turn: Turn) -> None:
        self.so_far = joined(self.so_far, turn)
        self.legs += 1

    def request(self) -> GenerationRequest:
        """For an engine: the first one, or what goes on from the tokens that there are."""
        if self.so_far is None:
            return self.first
        sampling, done = self.first.sampling, self.so_far.length
        seed = None if sampling.seed is None else stable_hash(sampling.seed, "continued", self.legs)
        rest = replace(sampling, max_tokens=sampling.max_tokens - done, min_tokens=max(0, sampling.min_tokens - done), seed=seed)
        return GenerationRequest(f"{self.first.request_id}~{self.legs}", (), rest, self.so_far.tokens, resumed=done)


def joined(before: Turn | None, turn: Turn) -> Turn:
    """One response, of an interrupted request and the one that went on from it."""
    if before is None:
        return turn
    shifted = tuple(VersionSpan(before.length + span.start, span.version) for span in turn.versions)
    return replace(
        turn,
        request_id=before.request_id,
        length=before.length + turn.length,
        versions=merged(*before.versions, *shifted),
        cached_tokens=before.cached_tokens,
    )


class EngineClock:
    """The event loop's time, without that in which the engines stood still."""

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
    """The time of a request at one engine. Callbacks and a timer: a task for each would cost more than all else."""

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
        """`cost`: what it has added to the engine's load."""
        self._engine, self._asked, self._timeout_s = engine, asked, timeout_s
        self._choice, self._cost, self._done, self._grown = choice, cost, 0.0, 0.0
        self._length = asked.left()
        """Of the response, as expected so far."""
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[None] = self._loop.create_future()
        """There is an answer, or the time is up."""
        self._sent = clock.time()
        self._begun_at: float | None = None
        self._timer = self._loop.call_later(timeout_s, self._look_at_engine)

    def answered(self, _: object) -> None:
        """The engine has said something of it, whatever it is. (What it says once the time is up, it was asked for.)"""
        if not self.over.done():
            self._engine.last_sign = self._clock.time()
            self.over.set_result(None)

    @property
    def begun(self) -> bool:
        return self._begun_at is not None

    def generated(self, tokens: int) -> None:
        """The engine says that it has begun with it and how far it is."""
        if self.over.done():
            return
        if self._begun_at is None:
            self._begin()
        left = self._asked.left(tokens)
        self._report(self._cost - left, tokens + left - self._length)

    def _report(self, done: float, grown: float) -> None:
        """`done`: of what was expected; `grown`: beyond that, or less."""
        done += grown
        self._choice.report(self._engine, done - self._done, grown - self._grown)
        self._done, self._grown = done, grown

    def _end_wait(self) -> None:
        if not self.over.done():
            self.over.set_result(None)

    def _begin(self) -> None:
        """Its own time runs from now on."""
        self._timer.cancel()
        self._begun_at = self._engine.last_sign = self._clock.time()
        self._engine.generating += 1
        self._look_at_time()

    def _look_at_time(self) -> None:
        """It has begun. Has it used up its own time?"""
        assert self._begun_at is not None
        used = self._asked.generating_s + self._clock.time() - self._begun_at
        self._wait_or_end(self._timeout_s - used, self._look_at_time)

    def _look_at_engine(self) -> None:
        """It has not begun. Has the engine stood still for as long as a request may take?"""
        since = max(self._sent, self._engine.last_sign)
        left = self._timeout_s - (0.0 if self._engine.generating else self._clock.time() - since)
        self._wait_or_end(left, self._look_at_engine)

    def _wait_or_end(self, left: float, look_again: Callable[[], None]) -> None:
        if left > CLOCK_S:
            self._timer = self._loop.call_later(max(left, LOOK_S if self._clock.stands else 0.0), look_again)
        else:
            self._end_wait()

    def close(self) -> None:
        """It is there no more."""
        self._timer.cancel()
        if self._begun_at is not None:
            self._report(0.0, 0.0)
            self._engine.last_sign = self._clock.time()
            self._engine.generating -= 1
            self._asked.generating_s += self._engine.last_sign - self._begun_at
