"""Planted hangs and crashes among sound samples: every sample ends as it should. The large version is bench/reward_faults.py."""

from __future__ import annotations

import pytest

from bench.reward_faults import faults

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.mark.slow
async def test_every_sample_is_accounted_for_among_planted_faults() -> None:
    report = await faults("math", 400)
    assert sum(report.get(kind, 0) for kind in ("hang", "spin", "crash")) == 4
    assert report["sound"] == 396
    assert report["replaced"] >= 4
