"""Where a step's time goes. Phases hang on the verbs of the pipeline; what no phase covers is shown as `other`.

    class Pipeline:
        timers: StepTimers

        @phase("generate")
        def generate(self) -> Batch: ...

    with pipeline.timers.step():
        pipeline.generate()
    pipeline.timers.last.phases["generate"]

Used from the one thread that drives the run. A phase inside a phase is kept as `outer/inner` and is part of the outer one: it
does not count again in the step's sum.
"""

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
class StepTimes:
    """Seconds."""

    total: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Outermost phases, in the order of their first start."""
    inner: dict[str, float] = field(default_factory=dict)
    """Nested phases, as `outer/inner`."""

    @property
    def other(self) -> float:
        return max(0.0, self.total - sum(self.phases.values()))

    def labelled(self) -> dict[str, float]:
        """All times by label for the metric `time`: phases, nested phases, `other`, `step`."""
        return {**self.phases, **self.inner, OTHER: self.other, STEP: self.total}


class StepTimers:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.around: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext()
        """Entered with the name of every phase, for what else happens while one runs: its time limit."""
        self._clock = clock
        self._open: list[str] = []
        self._running: dict[str, float] | None = None
        self._totals: dict[str, float] = {}
        self._started = clock()
        self.last = StepTimes()
        """The step that ended last."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time a step; if it fails, the times so far are kept."""
        assert self._running is None and not self._open, "a step inside a step or a phase"
        self._running = {}
        start = self._clock()
        try:
            yield
        finally:
            total, seconds, self._running = self._clock() - start, self._running, None
            self.last = StepTimes(
                total=total,
                phases={path: s for path, s in seconds.items() if "/" not in path},
                inner={path: s for path, s in seconds.items() if "/" in path},
            )

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time of a block; inside or outside of a step."""
        assert "/" not in name and name not in (OTHER, STEP), f"not a name for a phase: {name}"
        self._open.append(name)
        path = "/".join(self._open)
        if self._running is not None:
            self._running.setdefault(path, 0.0)  # the order of a step's phases is that of their starts
        start = self._clock()
        try:
            with self.around(name):
                yield
        finally:
            seconds = self._clock() - start
            self._open.pop()
            if self._running is not None:
                self._running[path] += seconds
            if not self._open:
                self._totals[name] = self._totals.get(name, 0.0) + seconds

    def part(self, name: str, seconds: float) -> None:
        """Time of a part of the open phase, kept as an inner phase: parts may overlap."""
        if self._running is not None:
            path = "/".join([*self._open, name])
            self._running[path] = self._running.get(path, 0.0) + seconds

    def wall(self) -> dict[str, float]:
        """Seconds of the run so far: `total` and each outermost phase, steps and everything between them."""
        return {"total": self._clock() - self._started, **self._totals}


class HasTimers(Protocol):
    timers: StepTimers


T = TypeVar("T", bound=HasTimers)


def phase(name: str) -> Callable[[Callable[Concatenate[T, P], R]], Callable[Concatenate[T, P], R]]:
    """Decorator for a method of an object with `timers`: the whole call is the phase."""

    def decorate(method: Callable[Concatenate[T, P], R]) -> Callable[Concatenate[T, P], R]:
        @functools.wraps(method)
        def timed(owner: T, /, *args: P.args, **kwargs: P.kwargs) -> R:
            with owner.timers.phase(name):
                return method(owner, *args, **kwargs)

        return timed

    return decorate
