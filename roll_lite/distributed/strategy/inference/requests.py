"""Request handling for all engines: requests in flight, progress reports, stop strings in resumed responses, expert choices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from roll_lite.data.samples import GenerationRequest
from roll_lite.distributed.strategy.base import Report, RequestProgress
from roll_lite.models.hf_config import ExpertsConfig

SEAM = "roll_lite_seam"
"""Key of an extra request argument: number of tokens at the end of a resumed prompt in which a stop string may begin."""
TOKENS_PER_CHARACTER = 4
WITHOUT_TEXT = 32
"""Number of tokens that `seam_tokens` adds for those without text: special tokens, and all but the last token of a character."""
BEGUN_POLL_S = 1.0
PARTS_EVERY = 5
"""Number of polls between two reports of new tokens. If the engine dies, tokens since the last report are lost."""


@dataclass(eq=False)
class InFlight:
    request: GenerationRequest
    report: Report
    version: int = 0
    """Weight version when the request was given to the engine."""
    entered: bool = False
    """True once the request was given to the engine."""
    aborted: bool = False
    begun: bool = False
    reported: int = 0
    """Number of tokens already reported (RequestProgress.part)."""
    number: int = -1
    """Number by which SglangEngine identifies the request."""


Look = Callable[[Sequence[InFlight], bool], Awaitable[Sequence[RequestProgress | None]]]
"""Function that polls the engine for the progress of requests; None for a request that has not begun. If its second argument is True,
progress includes new tokens (RequestProgress.part)."""


class ProgressReports:
    """Requests in flight, and a task that polls and reports their progress."""

    def __init__(self, look: Look) -> None:
        self.flights: dict[InFlight, asyncio.Future[Any]] = {}
        self._look = look
        self._polling: asyncio.Task[None] | None = None

    def add(self, flight: InFlight, answer: asyncio.Future[Any]) -> None:
        self.flights[flight] = answer
        answer.add_done_callback(lambda _: self.flights.pop(flight))
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def _poll(self) -> None:
        for poll in itertools.count():
            if not self.flights:
                return
            parts = poll > 0 and poll % PARTS_EVERY == 0
            flights = [one for one in self.flights if one.entered and (parts or not one.begun)]
            try:
                found = await self._look(flights, parts) if flights else ()
            except Exception:  # the engine failed; its requests will report that
                found = [None] * len(flights)
            self._report(flights, found)
            await asyncio.sleep(BEGUN_POLL_S)

    def _report(self, flights: Sequence[InFlight], found: Sequence[RequestProgress | None]) -> None:
        for flight, progress in zip(flights, found, strict=True):
            if progress is not None and flight in self.flights:
                flight.begun = True
                flight.reported += len(progress.part.token_ids) if progress.part is not None else 0
                flight.report(progress)


def seam_tokens(request: GenerationRequest) -> int:
    """Number of tokens at the end of a resumed request's prompt in which a stop string may begin. These tokens belong to the response so
    far."""
    longest = max(map(len, request.sampling.stop), default=0)
    return min(request.resumed, longest * TOKENS_PER_CHARACTER + WITHOUT_TEXT) if longest else 0


def chosen_experts(told: np.ndarray, experts: ExpertsConfig) -> np.ndarray:
    """Flatten an engine's expert choices `told` [tokens, layers, experts per token] to int16 [tokens, expert layers * experts per token].
    The engine may report all layers or only those with experts."""
    if told.shape[1] == len(experts.layers):
        told = told[:, np.array(experts.layers)]
    assert told.shape[1:] == (sum(experts.layers), experts.per_token), f"the engine tells of {told.shape[1:]} experts of a token"
    return told.reshape(len(told), -1).astype(np.int16)
