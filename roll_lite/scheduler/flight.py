"""Request in flight: its timeout and its share of an engine's load. It continues on another engine after a loss or interruption."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from dataclasses import replace
from functools import reduce
from itertools import accumulate
from sys import intern

from roll_lite.data.samples import TURN, FinishReason, GenerationRequest, Turn, joined
from roll_lite.data.stable_hash import stable_hash
from roll_lite.distributed.liveness import AwakeClock
from roll_lite.scheduler.choice import EngineChoice, EngineLoad
from roll_lite.scheduler.engines import Asked, EngineLost

PRIOR_RESPONSES = 8
"""Maximum-length responses that start an estimate: short responses finish first and would bias it."""
RESPONSES_REMEMBERED = 512
"""Latest lengths in an estimate, since lengths drift during training."""
REFRESH = 16
"""Lengths are sorted again once 1/REFRESH of them are new."""
CLOCK_S = 1e-6
"""Tolerance for timers that fire early."""
LOOK_S = 1.0
"""Seconds between timeout checks while the engine is paused, and between looks for a stop of this process."""
ABORT_PATIENCE_S = 10.0


DEADLY = 3
"""Engine deaths after which the request that was running is given up, as it may be the cause."""


class RequestFailed(Exception):
    """Failure of one generation request; another attempt may succeed."""

    def __init__(self, cause: str, partial: Turn | None = None, timed_out: bool = False, began: bool = False, final: bool = False) -> None:
        """`partial`: response so far. `began`: generation may have started. `final`: no retry."""
        super().__init__(cause)
        self.cause = cause
        self.final = final
        self.partial = partial
        self.timed_out = timed_out
        self.began = began or partial is not None


class ExpectedLength:
    """Expected response length by the domain's latest lengths and the maximum `most`."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._last = deque([most] * PRIOR_RESPONSES, maxlen=RESPONSES_REMEMBERED)
        self._sort()

    def _sort(self) -> None:
        self._lengths = sorted((*self._last, self.most))
        self._sums = [0, *accumulate(reversed(self._lengths))]
        self._new = 0

    def observe(self, tokens: int) -> None:
        self._last.append(tokens)
        self._new += 1
        if self._new * REFRESH >= len(self._last):
            self._sort()

    def left(self, generated: int) -> float:
        """Return the expected further tokens: the mean length of responses longer than `generated`, minus `generated`."""
        longer = len(self._lengths) - bisect_right(self._lengths, generated)
        return self._sums[longer] / longer - generated if longer else 0.0


class EngineClock:
    """Event loop clock that stops while engines are paused or, if watched, this process is stopped."""

    def __init__(self) -> None:
        self._awake = AwakeClock(lambda: asyncio.get_running_loop().time())
        self._stood_s = 0.0
        self._stopped_at: float | None = None

    def time(self) -> float:
        now = self._awake.time() if self._stopped_at is None else self._stopped_at
        return now - self._stood_s

    @property
    def stands(self) -> bool:
        return self._stopped_at is not None

    def stop(self) -> None:
        if self._stopped_at is None:
            self._stopped_at = self._awake.time()

    def go_on(self) -> None:
        if self._stopped_at is not None:
            self._stood_s += self._awake.time() - self._stopped_at
            self._stopped_at = None

    async def watch(self) -> None:
        """Notice stops of this process, as by SIGSTOP, until cancelled."""
        with self._awake.watched():
            while True:
                self._awake.time()
                await asyncio.sleep(LOOK_S)


class Flight(Asked):
    __slots__ = (
        "_choice",
        "_clock",
        "_done",
        "_generating_s",
        "_grown",
        "_length",
        "_loop",
        "_since",
        "_timeout_s",
        "_timer",
        "aborts_without_progress",
        "assigned",
        "begun",
        "continuations",
        "cost",
        "domain",
        "engine",
        "expected",
        "first",
        "prefix",
        "so_far",
        "survived",
        "timed_out",
    )
    engine: EngineLoad
    cost: float
    assigned: asyncio.Future[None]

    def __init__(
        self,
        domain: str,
        first: GenerationRequest,
        expected: ExpectedLength,
        timeout_s: float,
        choice: EngineChoice,
        clock: EngineClock,
        so_far: Turn | None = None,
    ) -> None:
        # The attributes of Asked are set for each engine anew, by `depart`.
        self.domain, self.first, self.expected = domain, first, expected
        self.request, self.parts = first, []
        self.so_far = so_far
        self.continuations, self.aborts_without_progress = int(so_far is not None), 0
        self.survived: tuple[EngineLost, ...] = ()
        self.timed_out = False
        group = intern("/".join(first.request_id.split("/", 4)[:4]))
        self.prefix = self.sample if first.context is not None else first.request_id if TURN in first.request_id else group
        """Key of the shared token prefix: the sample's earlier turns, else the agent's own prompt, else the group's prompt."""
        self._timeout_s, self._choice, self._clock = timeout_s, choice, clock
        self._loop = asyncio.get_running_loop()
        self._generating_s = 0.0

    @property
    def sample(self) -> str:
        return self.first.request_id.partition(TURN)[0]

    @property
    def shared_tokens(self) -> int:
        return self.first.context.length if self.first.context is not None else len(self.first.prompt_ids)

    @property
    def own_tokens(self) -> int:
        """Tokens to prefill beyond `shared_tokens`: new messages, and the response before an interruption."""
        new = len(self.first.prompt_ids) if self.first.context is not None else 0
        return new + (self.so_far.length if self.so_far is not None else 0)

    def left(self, generated: int = 0) -> float:
        done = generated + (self.so_far.length if self.so_far is not None else 0)
        return max(1.0, min(self.expected.left(done), self.first.sampling.max_tokens - done))

    @property
    def response(self) -> Turn | None:
        """Response so far on all engines. `tokens` covers only earlier engines: the current engine's are joined later."""
        so_far = reduce(joined, self.parts, self.so_far)
        if so_far is None:
            return None
        return so_far._replace(finish_reason=FinishReason.ABORT, tokens=None if self.so_far is None else self.so_far.tokens)

    def interrupted(self, turn: Turn) -> None:
        self.so_far = joined(self.so_far, turn)
        self.continuations += 1

    def survive(self, loss: EngineLost) -> None:
        self.survived += (loss,)
        if len(self.survived) >= DEADLY:
            causes = f"{DEADLY} engines died while running it: {'; '.join(str(loss) for loss in self.survived)}"
            raise RequestFailed(f"request given up: {causes}", self.so_far, final=True) from loss

    def start_over(self) -> None:
        self.timed_out, self._generating_s = False, 0.0

    def _next_request(self) -> GenerationRequest:
        if self.so_far is None:
            return self.first
        sampling, done = self.first.sampling, self.so_far.length
        seed = None if sampling.seed is None else stable_hash(sampling.seed, "continued", self.continuations)
        rest = replace(sampling, max_tokens=sampling.max_tokens - done, min_tokens=max(0, sampling.min_tokens - done), seed=seed)
        return GenerationRequest(f"{self.first.request_id}~{self.continuations}", (), rest, self.so_far.tokens, done, self.first.wants_ids)

    # ------------------------------------------------------------ at one engine

    def depart(self) -> None:
        self.ask(self._next_request())
        self._length = self.left()
        self._done = self._grown = 0.0
        self.begun, self._since = False, self._clock.time()
        # A timer and callbacks: a task per request would dominate the cost.
        self._timer = self._loop.call_later(self._timeout_s, self._check_timeout)
        self.engine.client.send(self)

    def generated(self, tokens: int) -> None:
        if self.answer.done() or self.timed_out:
            return
        if not self.begun:
            self.begun, self._since = True, self._clock.time()
            self.engine.last_sign = self._since
            self.engine.generating += 1
            if self._generating_s:  # otherwise the timer fires early enough
                self._timer.cancel()
                self._check_timeout()
        left = self.left(tokens)
        self._report(self.cost - left, tokens + left - self._length)

    def _report(self, done: float, grown: float) -> None:
        """Report progress since `depart`: decrease of the remaining load (`done`), change of the expected length (`grown`)."""
        done += grown
        self._choice.report(self.engine, done - self._done, grown - self._grown)
        self._done, self._grown = done, grown

    def _check_timeout(self) -> None:
        """Abort the request if its timeout is up; else check again later.

        Before the request starts, only time in which its engine generates nothing counts; then the request's generation time, on this and
        earlier engines.
        """
        now = self._clock.time()
        if self.begun:
            used = self._generating_s + now - self._since
        else:
            used = 0.0 if self.engine.generating else now - max(self._since, self.engine.last_sign)
        left = self._timeout_s - used
        if left > CLOCK_S:
            self._timer = self._loop.call_later(max(left, LOOK_S if self._clock.stands else 0.0), self._check_timeout)
        elif not self.answer.done():
            self.timed_out = True
            self._timer = self._loop.call_later(ABORT_PATIENCE_S, self._give_up)
            self.engine.client.abort([self.request.request_id])

    def _give_up(self) -> None:
        if not self.answer.done():
            self.answer.set_result(None)

    def arrive(self) -> None:
        self._timer.cancel()
        self.parts = []
        if self.begun:
            self._report(0.0, 0.0)
            self.engine.last_sign = self._clock.time()
            self.engine.generating -= 1
            self._generating_s += self.engine.last_sign - self._since
        elif self.answer.done() and not self.answer.cancelled() and not self.timed_out:
            # An answer after the time-out answers an abort and is no sign of life.
            self.engine.last_sign = self._clock.time()
