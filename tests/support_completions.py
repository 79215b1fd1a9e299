"""Requests that finish in their own order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.strategy.base import InferenceStrategy


async def completions(strategy: InferenceStrategy, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
    """Completions in the order in which they finish; the requests are admitted in theirs."""
    answers = [strategy.generate(request) for request in requests]
    for answer in asyncio.as_completed(answers):
        yield await answer
