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

STOP_OVERLAP = "roll_lite_stop_overlap"
"""Request argument: number of tokens at a resumed prompt's end in which a stop string may begin."""
TOKENS_PER_CHARACTER = 4
WITHOUT_TEXT = 32
"""Tokens added to the stop overlap: special tokens and parts of characters have no text."""
BEGUN_POLL_S = 1.0
PARTS_EVERY = 5
"""Polls between reports of new tokens. If the engine dies, tokens after the last report are lost."""


@dataclass(eq=False)
class InFlight:
    request: GenerationRequest
    report: Report
    version: int = 0
    entered: bool = False
    aborted: bool = False
    begun: bool = False
    reported: int = 0
    number: int = -1


ProgressQuery = Callable[[Sequence[InFlight], bool], Awaitable[Sequence[RequestProgress | None]]]
"""Returns each request's progress, None before it begins. The bool: also return new tokens."""


class ProgressReports:
    def __init__(self, query: ProgressQuery) -> None:
        self.flights: dict[InFlight, asyncio.Future[Any]] = {}
        self._query = query
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
                found = await self._query(flights, parts) if flights else ()
            except Exception:  # the engine failed; its requests will report that
                found = [None] * len(flights)
            for flight, progress in zip(flights, found, strict=True):
                if progress is not None and flight in self.flights:
                    flight.begun = True
                    flight.reported += len(progress.part.token_ids) if progress.part is not None else 0
                    flight.report(progress)
            await asyncio.sleep(BEGUN_POLL_S)


def stop_overlap_tokens(request: GenerationRequest) -> int:
    longest = max(map(len, request.sampling.stop), default=0)
    return min(request.resumed_tokens, longest * TOKENS_PER_CHARACTER + WITHOUT_TEXT) if longest else 0


def chosen_experts(told: np.ndarray, experts: ExpertsConfig) -> np.ndarray:
    """Convert expert choices [tokens, layers, experts per token], of all or of expert layers, to int16 [tokens, expert layers * experts per
    token]."""
    if told.shape[1] == len(experts.layers):
        told = told[:, np.array(experts.layers)]
    assert told.shape[1:] == (sum(experts.layers), experts.per_token), f"the engine reports {told.shape[1:]} experts per token"
    return told.reshape(len(told), -1).astype(np.int16)
