"""Whether an engine still steps, although its processes live and answer: a kernel that hangs and a deadlocked loop stop nothing else.

The sign is that the engine's own loop answers a question, which both makes do between two steps only, whatever they generate. A step is
bounded, prompts being prefilled in chunks of at most `max_batched_tokens`, so an answer that is late for much longer than any step so far
will not come. Tokens would be a worse sign: a long prompt yields none for many steps, and an idle engine none at all.

On GPUs a step may stop for a kernel that is used for the first time and has to be compiled: long at the start, where both makes also
capture their CUDA graphs and tune, and now and then later, when a request wants something new. Compilers are processes of their own, which
are seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import torch

AUTO_S = 7.0
AUTO_CPU_S = 300.0
"""A CPU takes as long for a step as it takes; vLLM's never cuts a prompt there."""
ASK_S = 1.0
"""Between an answer and the next question."""
LISTEN_S = 0.25
LATE = 0.5
"""Share of the limit after which it is looked for a compiler: what a compilation does in the engine's own process is shorter."""
SLOWER = 4.0
"""A step may take so many times as long as the longest so far, of those after the first response."""
FIRST_STEPS = 40.0
"""So many times as long as later ones those may take that come before the first response has ended: kernels are compiled in them."""


def step_limit(setting: float | str | None) -> float | None:
    """`limits.engine_step` in seconds, on this machine; None: without limit."""
    if setting == "auto":
        return AUTO_S if torch.cuda.is_available() else AUTO_CPU_S
    assert not isinstance(setting, str)
    return setting or None


class StepWatch:
    """Of one engine. Time in which this process itself does not run is not the engine's."""

    def __init__(
        self, ask: Callable[[], Awaitable[object]], limit_s: float | None, is_compiling: Callable[[], bool] = lambda: False
    ) -> None:
        """`ask`: done when the engine's loop has answered, between two steps. `is_compiling`: a compiler runs for it; is asked only when an
        answer is late."""
        self._ask = ask
        self._is_compiling = is_compiling
        self._limit_s = limit_s
        self._longest_s = 0.0
        self._has_responded = False
        self._suspended = 0

    def responded(self) -> None:
        """A response has ended: every kind of step has been taken. How long the first ones took says nothing of later ones."""
        if not self._has_responded:
            self._has_responded, self._longest_s = True, 0.0

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """While the engine's loop does something else that we have asked of it, which takes as long as it takes."""
        self._suspended += 1
        try:
            yield
        finally:
            self._suspended -= 1

    async def until_stuck(self) -> str:
        """Why the engine is of no use any more."""
        while True:
            waited = 0.0
            question = asyncio.ensure_future(self._ask())
            try:
                while not question.done():
                    waited = await self._listen(question, waited)
                    limit = self._limit()
                    if limit is not None and waited > limit and not question.done():
                        longest = f"the longest before took {self._longest_s:.1f} s" if self._has_responded else "no response has ended yet"
                        return f"no step has ended for {limit:g} s, {longest} (limits.engine_step)"
            finally:
                question.cancel()
            if not question.cancelled() and question.exception() is None:  # what fails is told by those who watch its processes
                self._longest_s = max(self._longest_s, waited)
            await asyncio.sleep(ASK_S)

    async def _listen(self, question: asyncio.Future[object], waited: float) -> float:
        loop = asyncio.get_running_loop()
        before = loop.time()
        await asyncio.wait((question,), timeout=LISTEN_S)
        if self._suspended:
            return 0.0
        limit = self._limit()
        is_late = limit is not None and waited > LATE * limit and not question.done()
        return waited if is_late and self._is_compiling() else waited + min(loop.time() - before, 2 * LISTEN_S)

    def _limit(self) -> float | None:
        if self._limit_s is None:
            return None
        least = self._limit_s if self._has_responded else FIRST_STEPS * self._limit_s
        return max(least, SLOWER * self._longest_s)
