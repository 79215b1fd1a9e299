"""Times of a step's phases, for one thread. A nested phase is recorded as `outer/inner`, and also counts in the outer phase."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec, Protocol, TypeVar

OTHER = "other"
STEP = "step"

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Span:
    """Interval spent in a phase by the driver or, with `role` and `rank`, by a training rank or a member of a pool (`PoolWork`)."""

    name: str
    start: float
    """Unix time in seconds, by the clock of the span's node."""
    seconds: float
    parent: str = ""
    """Name of the driver's span that contains this one; empty for the span of the whole step."""
    role: str = ""
    rank: int | None = None

    def holds(self, moment: float) -> bool:
        return self.start <= moment <= self.start + self.seconds


@dataclass(frozen=True)
class StepTimes:
    total: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of phases and their parts, in order of their first start."""
    spans: tuple[Span, ...] = ()
    """The step and its phases, outer ones first."""

    def labelled(self) -> dict[str, float]:
        outermost = sum(seconds for path, seconds in self.phases.items() if "/" not in path)
        return {**self.phases, OTHER: max(0.0, self.total - outermost), STEP: self.total}


class StepTimers:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        """Returns a phase's context manager, such as a time limit, from the phase's name."""
        self._clock = clock
        self._open: list[str] = []
        self._running: dict[str, float] | None = None
        self._totals: dict[str, float] = {}
        self._spans: list[Span] = []
        self._started = clock()
        self.last = StepTimes()

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step. A failed step keeps its times so far."""
        assert self._running is None and not self._open, "a step inside a step or a phase"
        self._running, self._spans = {}, []
        start, since = self._clock(), time.time()
        try:
            yield
        finally:
            total, seconds, self._running = self._clock() - start, self._running, None
            spans = Span(STEP, since, total), *sorted(self._spans, key=lambda span: span.name.count("/"))
            self.last = StepTimes(total, seconds, spans)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        assert "/" not in name and name not in (OTHER, STEP), f"not a name for a phase: {name}"
        self._open.append(name)
        path = "/".join(self._open)
        if self._running is not None:
            self._running.setdefault(path, 0.0)  # the order of a step's phases is that of their starts
        start, since = self._clock(), time.time()
        try:
            with self.around(name):
                yield
        finally:
            seconds = self._clock() - start
            self._open.pop()
            if self._running is not None:
                self._running[path] += seconds
                self._spans.append(Span(path, since, seconds, "/".join(self._open) or STEP))
            if not self._open:
                self._totals[name] = self._totals.get(name, 0.0) + seconds

    def part(self, name: str, seconds: float) -> None:
        """Add `seconds` to a named part of the current phase. Parts may overlap in time."""
        if self._running is not None:
            path = "/".join([*self._open, name])
            self._running[path] = self._running.get(path, 0.0) + seconds

    def wall(self) -> dict[str, float]:
        return {"total": self._clock() - self._started, **self._totals}


class PoolWork:
    """Records when members of this process's pools worked: reward models, judges, environment workers. A member's overlapping work is one
    span."""

    def __init__(self) -> None:
        self._times: dict[tuple[str, int, str], list[tuple[float, float]]] = {}

    def add(self, role: str, rank: int, phase: str, seconds: float) -> None:
        """Record work that ends now."""
        now = time.time()
        start, own = now - seconds, self._times.setdefault((role, rank, phase), [])
        while own and own[-1][1] >= start:
            start = min(start, own.pop()[0])
        own.append((start, now))

    @contextmanager
    def of(self, role: str, rank: int, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(role, rank, phase, time.perf_counter() - start)

    def take(self) -> list[Span]:
        times, self._times = self._times, {}
        return [
            Span(f"{role}[{rank}] {phase}", start, end - start, STEP, role, rank)
            for (role, rank, phase), own in times.items()
            for start, end in own
        ]


POOL_WORK = PoolWork()


class HasTimers(Protocol):
    timers: StepTimers


T = TypeVar("T", bound=HasTimers)


def phase(name: str) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Decorator: measure each call of a method as phase `name`. The object must have `timers`."""

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @functools.wraps(method)
        def timed(owner: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with owner.timers.phase(name):
                return method(owner, *args, **kwargs)

        return timed

    return decorate
