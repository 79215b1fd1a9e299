"""Engines and scenarios small enough to be worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from support_local_engine import ask

from roll_lite.data.samples import GenerationRequest, Sampling, TokenRow, Turn
from roll_lite.simulator.engine import EngineLimits, EngineRates, SimulatedEngine, Span

SECOND_PER_PASS = EngineRates(pass_s=1.0)


def request(name: str, prompt: int = 2, max_tokens: int = 1000, context: int | None = None, resumed: int = 0) -> GenerationRequest:
    row = TokenRow(None, 0, context) if context is not None else None
    ids = tuple(range(prompt)) if context is None else ()
    return GenerationRequest(f"a/p/0/0/{name}/0", ids, Sampling(1.0, max_tokens), row, resumed)


def engine_of(
    lengths: Mapping[str, int],
    rates: EngineRates = SECOND_PER_PASS,
    slots: int = 4,
    cached_tokens: int | None = None,
    spans: list[Span] | None = None,
) -> SimulatedEngine:
    limits = EngineLimits(slots, cached_tokens, reserve=0.0)
    return SimulatedEngine(0, rates, limits, lambda request: lengths[request.request_id.split("/")[4]], spans)


async def finished(engine: SimulatedEngine, one: GenerationRequest, after: float = 0.0) -> tuple[float, Turn]:
    """When it is answered, and with what."""
    await asyncio.sleep(after)
    turn = await ask(engine, one)
    return asyncio.get_running_loop().time(), turn
