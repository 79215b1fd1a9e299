"""Progress display while the driver waits for a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from roll_lite.distributed.cluster import Cluster, Pending
from roll_lite.observability.console import RunConsole
from roll_lite.scheduler.stats import Progress
from roll_lite.workers.rollout import RolloutWorker

T = TypeVar("T")


def shown(
    batch: Pending[T], rollouts: Cluster[RolloutWorker], console: RunConsole, label: str, also: Callable[[], None], held_out: bool = False
) -> T:
    """Wait for a batch or validation and show its progress. Calls `also` about once a second."""
    asked: Pending[dict[str, Progress]] | None = None

    def look() -> None:
        nonlocal asked
        also()
        if asked is None:
            asked = None if batch.done else rollouts.start_one(RolloutWorker.progress, held_out)
        elif (progress := asked.answer()) is not None:
            console.progress(label, progress)
            asked = None

    try:
        with console.watching():
            return batch.result(meanwhile=look)
    finally:
        if asked is not None:
            asked.settle()
