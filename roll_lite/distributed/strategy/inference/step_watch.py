"""Detect an engine that takes no steps although its processes live: a hung kernel, a deadlock.

The engine's loop answers between steps. It is stuck if an answer takes much longer than the longest step so far, without compilation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager, suppress

import torch

from roll_lite.distributed.liveness import Heartbeat

AUTO_S = 7.0
AUTO_CPU_S = 300.0
"""Step limit for "auto" on a CPU: there vLLM prefills a whole prompt in one step."""
ASK_S = 1.0
LISTEN_S = 0.25
LATE = 0.5
"""Fraction of the limit after which to look for running compilers; compile time does not count."""
SLOWER = 4.0
"""Minimum ratio of the limit to the longest step so far."""
FIRST_STEPS = 40.0
"""Factor of the limit while kernels may compile in-process: until the first response of each kind of sampling has ended."""


def step_limit(setting: float | str | None) -> float | None:
    """Convert `limits.engine_step` to seconds on this machine; None: unlimited."""
    if setting == "auto":
        return AUTO_S if torch.cuda.is_available() else AUTO_CPU_S
    assert not isinstance(setting, str)
    return setting or None


class StepWatch(Heartbeat):
    def __init__(
        self, answer: Callable[[], Awaitable[object]], limit_s: float | None, is_compiling: Callable[[], bool] = lambda: False
    ) -> None:
        """`answer()` returns once the engine's loop replies. `is_compiling()` is called if the reply is late (LATE)."""
        super().__init__(self._step, limit_s, ASK_S, LISTEN_S)
        self._answer = answer
        self._is_compiling = is_compiling
        self._longest_s = 0.0
        self._in_flight: Counter[Hashable] = Counter()
        self._responded: set[Hashable] = set()
        self._suspended = 0

    @contextmanager
    def in_flight(self, kernels: Hashable) -> Iterator[None]:
        """Count the block's request. `kernels`: settings that select its sampling kernels."""
        self._in_flight[kernels] += 1
        try:
            yield
        finally:
            self._in_flight[kernels] -= 1

    def responded(self, kernels: Hashable) -> None:
        """Record a response's end: the kernels of its sampling are compiled."""
        self._responded.add(kernels)

    @property
    def _may_compile(self) -> bool:
        return not self._responded or any(count and kernels not in self._responded for kernels, count in self._in_flight.items())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Ignore the block's time: no steps are expected."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    async def until_stuck(self) -> str:
        limit_s = await self.until_silent()
        longest = f"the longest before took {self._longest_s:.1f} s" if self._responded else "no response has ended yet"
        return f"no step has ended for {limit_s:g} s, {longest} (limits.engine_step)"

    async def _step(self) -> None:
        with suppress(Exception):  # EngineStrategy._watch reports failures
            await self._answer()
            self.listen()
            if not self._may_compile:
                self._longest_s = max(self._longest_s, self.waited_s)

    def listen(self, most_s: float | None = None) -> None:
        limit_s, waited_s = self.limit(), self.waited_s
        super().listen(most_s)
        if self._suspended:
            self.waited_s = 0.0
        elif limit_s is not None and waited_s > LATE * limit_s and self._is_compiling():
            self.waited_s = waited_s

    def limit(self) -> float | None:
        limit_s = super().limit()
        if limit_s is None:
            return None
        return max(FIRST_STEPS * limit_s if self._may_compile else limit_s, SLOWER * self._longest_s)
