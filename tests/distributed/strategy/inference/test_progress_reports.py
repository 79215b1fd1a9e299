"""What the progress of requests costs: it grew with requests in flight times seconds once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from roll_lite.data.samples import GenerationRequest, Sampling
from roll_lite.distributed.strategy.base import RequestProgress
from roll_lite.distributed.strategy.inference.requests import BEGUN_POLL_S, PARTS_EVERY, InFlight, ProgressReports
from roll_lite.simulator.clock import run_virtual

REQUESTS, SECONDS = 300, 60.0


def test_requests_that_have_begun_are_asked_about_only_with_the_parts() -> None:
    asked: list[int] = []
    reported: list[int] = []

    async def look(flights: Sequence[InFlight], parts: bool) -> list[RequestProgress | None]:
        asked.append(len(flights))
        return [RequestProgress(1, None) for _ in flights]

    async def main() -> None:
        reports = ProgressReports(look)
        answers = [asyncio.get_running_loop().create_future() for _ in range(REQUESTS)]
        for number, answer in enumerate(answers):
            request = GenerationRequest(str(number), (1, 2), Sampling(1.0, 8))
            reports.add(InFlight(request, lambda _: reported.append(1), entered=True), answer)
        await asyncio.sleep(SECONDS)
        for answer in answers:
            answer.set_result(None)

    run_virtual(main())
    rounds = 1 + SECONDS / (BEGUN_POLL_S * PARTS_EVERY)
    assert sum(asked) <= REQUESTS * (rounds + 1) and len(asked) <= rounds + 1
    assert len(reported) == sum(asked)
