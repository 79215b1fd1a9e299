"""Simulated engine with continuous batching. Time advances from event to event, not token by token."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roll_lite.data.samples import FinishReason, GenerationRequest, TokenRow, Turn, VersionSpan
from roll_lite.scheduler.engines import Asked, EngineLost

REPORT_S = 5.0
"""Interval of progress reports, as in real engine workers. Reported tokens survive an engine's death."""
TOKEN_TOLERANCE = 1e-6


@dataclass(frozen=True)
class EngineRates:
    """Durations of engine work; a forward pass adds one token to each running request."""

    pass_s: float
    """Fixed cost of a forward pass (reading the weights)."""
    request_s: float = 0.0
    """Cost of a forward pass per running request (computation)."""
    cached_token_s: float = 0.0
    """Cost of a forward pass per token in the KV cache (reading it)."""
    prefill_token_s: float = 0.0
    """Cost of prefilling a token; decoding waits meanwhile."""

    def seconds(self, tokens: float, running: int, cached: float) -> float:
        """Time to decode `tokens` tokens for each of `running` requests, from `cached` tokens in the KV cache."""
        pace = self.pass_s + running * self.request_s + cached * self.cached_token_s
        return tokens * pace + running * self.cached_token_s * tokens * tokens / 2

    def tokens(self, seconds: float, running: int, cached: float) -> float:
        """Tokens that each running request decodes in `seconds`."""
        pace = self.pass_s + running * self.request_s + cached * self.cached_token_s
        growth = running * self.cached_token_s
        return 2 * seconds / (pace + math.sqrt(pace * pace + 2 * growth * seconds))

    def work(self, prompt: int, tokens: int, slots: int, prefilled: int) -> float:
        """Engine time of one response of `tokens` tokens if `slots` requests always run: 1/`slots` of each pass's fixed cost, its own
        computation and cache reads, and the prefill of `prefilled` tokens."""
        decode = tokens * (self.pass_s / slots + self.request_s) + self.cached_token_s * (prompt * tokens + tokens * tokens / 2)
        return decode + prefilled * self.prefill_token_s


@dataclass(frozen=True)
class EngineLimits:
    slots: int
    cached_tokens: int | None = None
    """KV cache size; None: unlimited. Requests that do not fit wait, or are preempted and prefilled again."""
    reserve: float = 0.01
    """Fraction of the cache that must stay free at admission."""


@dataclass(frozen=True, slots=True)
class Span:
    """Interval in which a request ran under one weight version."""

    engine: int
    slot: int
    start: float
    end: float
    version: int
    domain: str


@dataclass(eq=False, slots=True)
class _Run:
    """Request in an engine. Running requests decode at the same pace and share a counter: each has generated
    `SimulatedEngine._decoded_per_request - decoded_at_start` tokens."""

    asked: Asked
    prompt: int
    tokens: int
    reason: FinishReason
    generated: float = 0.0
    decoded_at_start: float = 0.0
    prefix: str = ""
    """Key of the prompt, which a group's samples share."""
    slot: int = -1
    since: float = 0.0
    cached: int = 0
    reported: int = 0
    """Tokens that survive the engine's death."""
    versions: list[VersionSpan] = field(default_factory=list)


class SimulatedEngine:
    """Simulated engine behind the router's EngineClient interface. `length(request)`: response tokens before the cut at max_tokens.
    `spans`: list that receives the Spans of its requests."""

    def __init__(
        self,
        number: int,
        rates: EngineRates,
        limits: EngineLimits,
        length: Callable[[GenerationRequest], int],
        spans: list[Span] | None = None,
    ) -> None:
        self.name = f"engine {number}"
        self.number = number
        self.rates = rates
        self.limits = limits
        self.version = 0
        self.dead: str | None = None
        self.hangs = False
        self.generated = 0
        self.prefilled = 0
        self.put_back = 0
        self._length = length
        self._spans = spans
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Run] = deque()
        self._runs: dict[str, _Run] = {}
        self._running: dict[str, _Run] = {}
        self._ends: list[tuple[float, int, _Run]] = []
        self._slots = list(range(limits.slots))
        self._admitted = 0
        self._prefixes: Counter[str] = Counter()
        """Number of running requests by shared prompt. Only a prompt's first request prefills it."""
        self._decoded_per_request = 0.0
        """Tokens decoded by a request that has run since the engine was last idle."""
        self._cached = 0.0
        self._prefill_s = 0.0
        self._settled = self._loop.time()
        self._frozen = False
        self._timer: asyncio.TimerHandle | None = None
        self._arming = self._reporting = False

    @property
    def running(self) -> int:
        return len(self._running)

    # ------------------------------------------------------------ calls of the router

    def send(self, asked: Asked) -> None:
        request = asked.request
        if self.dead is not None:
            asked.answer.set_exception(EngineLost(self.name, self.dead))
            return
        whole, most = self._length(request) - request.resumed_tokens, request.sampling.max_tokens
        prompt = request.prompt_length
        reason = FinishReason.LENGTH if whole >= most else FinishReason.STOP
        run = _Run(asked, prompt, max(1, min(whole, most)), reason, prefix="/".join(request.request_id.split("/", 4)[:4]))
        self._runs[request.request_id] = run
        self._waiting.append(run)
        self._process_due_events_soon()

    def abort(self, request_ids: Sequence[str]) -> None:
        if self.hangs:
            return
        self._settle()
        for run in [self._runs[one] for one in request_ids if one in self._runs]:
            self._end(run, FinishReason.ABORT)
        self._waiting = deque(run for run in self._waiting if run.asked.request.request_id in self._runs)
        self._process_due_events_soon()

    # ------------------------------------------------------------ events from outside

    def freeze(self) -> None:
        """Stop generating until `update`."""
        self._settle()
        for run in self._running.values():
            self._record_span(run)
        self._frozen = True
        self._process_due_events_soon()

    def update(self, version: int) -> None:
        """Use new weights. Running requests continue after a new prefill."""
        self._settle()
        self.version = version
        self._prefixes.clear()
        self._prefill_s = 0.0
        for run in self._running.values():
            self._record_span(run)
            self._stamp(run)
            self._prefill(run)
        self._frozen = False
        self._process_due_events_soon()

    def hang(self) -> None:
        self.hangs = True
        self.freeze()

    def kill(self, cause: str) -> None:
        self._settle()
        self.dead = cause
        for run in self._running.values():
            self._record_span(run)
        runs, self._runs, self._running = self._runs, {}, {}
        self._waiting.clear()
        self._ends.clear()
        for run in runs.values():
            if not run.asked.answer.done():
                partial = self._turn(run, run.reported, FinishReason.ABORT) if run.reported else None
                run.asked.answer.set_exception(EngineLost(self.name, cause, partial))
        if self._timer is not None:
            self._timer.cancel()

    # ------------------------------------------------------------ time

    def _settle(self) -> None:
        now = self._loop.time()
        elapsed, self._settled = now - self._settled, now
        running = len(self._running)
        if not running or self._frozen or elapsed <= 0:
            return
        prefilling = min(elapsed, self._prefill_s)
        self._prefill_s -= prefilling
        tokens = self.rates.tokens(elapsed - prefilling, running, self._cached)
        self._decoded_per_request += tokens
        self._cached += running * tokens

    def _process_due_events_soon(self) -> None:
        if not self._arming and self.dead is None:
            self._arming = True
            self._loop.call_soon(self._process_due_events)

    def _process_due_events(self) -> None:
        self._arming = False
        if self.dead is not None:
            return
        self._settle()
        ends, reached = self._ends, self._decoded_per_request + TOKEN_TOLERANCE
        while ends and (ends[0][2].slot < 0 or ends[0][0] <= reached):
            run = heapq.heappop(ends)[2]
            if run.slot >= 0 and run.decoded_at_start + run.tokens <= reached:
                self._end(run, run.reason)
        most, running = self.limits.cached_tokens, len(self._running)
        if not self._frozen:
            if most is not None and running > 1 and self._cached >= most - TOKEN_TOLERANCE * running:
                run = self._running[next(reversed(self._running))]  # the cache is full: put the newest request back
                run.generated = float(self._tokens(run))
                self._leave(run)
                self.put_back += 1
                self._waiting.appendleft(run)
            else:
                self._admit()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        running = len(self._running)
        if running and not self._frozen:
            tokens = self._ends[0][0] - self._decoded_per_request
            if most is not None and running > 1:
                tokens = min(tokens, (most - self._cached) / running)
            until_next = self._prefill_s + self.rates.seconds(max(0.0, tokens), running, self._cached)
            self._timer = self._loop.call_later(until_next, self._process_due_events)

    # ------------------------------------------------------------ requests in and out

    def _admit(self) -> None:
        most = self.limits.cached_tokens
        room = math.inf if most is None else most * (1 - self.limits.reserve)
        while self._waiting and self._slots:
            run = self._waiting[0]
            if self._running and self._cached + run.prompt + run.generated > room:
                return
            self._waiting.popleft()
            run.slot, run.since, run.decoded_at_start = heapq.heappop(self._slots), self._settled, self._decoded_per_request - run.generated
            self._stamp(run)
            run.cached = self._prefill(run)
            self._cached += run.prompt + run.generated
            self._running[run.asked.request.request_id] = run
            self._admitted += 1
            heapq.heappush(self._ends, (run.decoded_at_start + run.tokens, self._admitted, run))
            run.asked.generated(self._tokens(run))
            if not self._reporting:
                self._reporting = True
                self._loop.call_later(REPORT_S, self._report)

    def _prefill(self, run: _Run) -> int:
        """Add a request's prefill time; return how many prompt tokens are cached, so take no time."""
        held = run.prompt - run.asked.request.resumed_tokens - 1 if self._prefixes[run.prefix] > 0 else 0
        self._prefixes[run.prefix] += 1
        tokens = run.prompt + self._tokens(run) - held
        self.prefilled += tokens
        self._prefill_s += tokens * self.rates.prefill_token_s
        return held

    def _report(self) -> None:
        if self.hangs:
            return
        self._settle()
        for run in self._running.values():
            run.reported = self._tokens(run)
            run.asked.generated(run.reported)
        self._reporting = bool(self._running)
        if self._reporting:
            self._loop.call_later(REPORT_S, self._report)

    def _end(self, run: _Run, reason: FinishReason) -> None:
        tokens = self._tokens(run)
        if run.slot >= 0:
            self._leave(run)
        del self._runs[run.asked.request.request_id]
        self.generated += tokens
        if not run.asked.answer.done():
            run.asked.answer.set_result(self._turn(run, tokens, reason))

    def _turn(self, run: _Run, tokens: int, reason: FinishReason) -> Turn:
        row = TokenRow(None, 0, run.prompt + tokens)
        versions = tuple(span for span in run.versions if span.start < max(1, tokens))
        text = sample_of(run.asked.request.request_id)
        return Turn(run.asked.request.request_id, tokens, text, reason, versions, cached_tokens=run.cached, tokens=row)

    def _leave(self, run: _Run) -> None:
        self._record_span(run)
        self._cached -= run.prompt + self._decoded_per_request - run.decoded_at_start
        heapq.heappush(self._slots, run.slot)
        run.slot = -1
        self._prefixes[run.prefix] -= 1
        del self._running[run.asked.request.request_id]
        if not self._running:  # discard accumulated rounding errors
            self._cached = self._decoded_per_request = self._prefill_s = 0.0
            self._ends.clear()

    def _tokens(self, run: _Run) -> int:
        if run.slot < 0:
            return int(run.generated)
        return min(run.tokens, int(self._decoded_per_request - run.decoded_at_start + TOKEN_TOLERANCE))

    def _stamp(self, run: _Run) -> None:
        start = self._tokens(run)
        kept = [span for span in run.versions if span.start < start]
        run.versions = kept if kept and kept[-1].version == self.version else [*kept, VersionSpan(start, self.version)]

    def _record_span(self, run: _Run) -> None:
        if self._spans is not None and not self._frozen and run.slot >= 0 and self._settled > run.since:
            version, domain = run.versions[-1].version, run.asked.request.request_id.partition("/")[0]
            self._spans.append(Span(self.number, run.slot, run.since, self._settled, version, domain))
        run.since = self._settled


def sample_of(request_id: str) -> str:
    return "/".join(request_id.partition("~")[0].split("/", 6)[:6])
