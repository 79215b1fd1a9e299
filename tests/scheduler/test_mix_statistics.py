"""Requested, admitted and realised mix, before and after filters, with numbers worked out by hand."""

from __future__ import annotations

from typing import Any

from scheduler_support import make_domain, make_service, prompt_of
from support_scripted import Response, Script

from roll_lite.data.samples import GenerationRequest, SampleGroup
from roll_lite.scheduler.filters import FUNCTION, GroupFilter, LeftOut
from roll_lite.scheduler.service import RolloutService
from roll_lite.scheduler.stats import DomainStats
from roll_lite.scheduler.supply import Synchronous
from roll_lite.simulator.clock import run_virtual

COUNTS = ("requested", "admitted", "scored", "response_tokens", "delivered", "accepted", "batch_tokens")
SHARES = ("requested_share", "generated_share", "realised_share", "token_share")


def first_two_left_out() -> GroupFilter:
    seen: list[int] = []

    def cause(group: SampleGroup) -> LeftOut | None:
        seen.append(group.group)
        return LeftOut(FUNCTION, "one of the first") if len(seen) <= 2 else None

    return GroupFilter(cause)


def two_domains(filtered: bool) -> RolloutService:
    """Of `a` 2 samples of 10 tokens each for a prompt, of `b` 4 of 5."""

    def script(request: GenerationRequest) -> Response:
        return Response(10 if prompt_of(request)[0] == 0 else 5, 0.1)

    a = make_domain("a", 0, samples=2, filter=first_two_left_out() if filtered else None)
    return make_service([a, make_domain("b", 1, samples=4)], [script])[0]


def of(stats: dict[str, DomainStats], names: tuple[str, ...]) -> list[tuple[Any, Any]]:
    return [(getattr(stats["a"], name), getattr(stats["b"], name)) for name in names]


def test_the_mix_is_told_of_each_batch_and_over_the_run_also_of_one_that_is_resumed() -> None:
    """Of `a` the first two groups are filtered. Shares are sums over the batches so far: of tokens before filters 80 of 80 + 40, then
    80 + 40 of 120 + 80, then 120 + 40 of 200 + 80."""

    async def main() -> list[dict[str, DomainStats]]:
        service = two_domains(filtered=True)
        told = [(await service.next_batch(4)).stats.domains for _ in range(2)]
        resumed = two_domains(filtered=False)
        resumed.load_state_dict(service.state_dict())
        return [*told, (await resumed.next_batch(4)).stats.domains]

    first, second, third = run_virtual(main())
    assert of(first, COUNTS) == [(2, 2), (4, 2), (8, 8), (80, 40), (2, 2), (4, 8), (40, 40)]
    assert of(second, COUNTS) == of(third, COUNTS) == [(2, 2), (2, 2), (4, 8), (40, 40), (2, 2), (4, 8), (40, 40)]
    half = (1 / 2, 1 / 2)
    assert of(first, SHARES) == [half, (80 / 120, 40 / 120), half, half]
    assert of(second, SHARES) == [half, (120 / 200, 80 / 200), half, half]
    assert of(third, SHARES) == [half, (160 / 280, 120 / 280), half, half]


def test_why_groups_became_too_old() -> None:
    """Four are started for two places. The batch is complete when the first two are: by then the third is done as well and the fourth is
    not, and both are put back; the statistics are those of the time until the next batch."""
    tokens = {0: 10, 1: 20, 2: 15, 3: 100}

    def script() -> Script:
        return lambda request: Response(tokens.get(int(request.request_id.split("/")[3]), 1), 1.0)

    async def main() -> list[DomainStats]:
        service, _, _ = make_service([make_domain("a", samples=1, max_tokens=200)], [script()], supply=Synchronous(), oversample=2.0)
        return [(await service.next_batch(2)).stats.domains["a"] for _ in range(2)]

    first, second = run_virtual(main())
    assert first.stale_by_cause == {}
    assert second.stale_by_cause == {"unfinished": 1, "surplus": 1}
