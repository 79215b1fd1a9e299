"""Losses while the driver waits for a batch on shared devices, with stand-ins for the rollout service."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.distributed.failures import ClusterDead, RankFailed
from roll_lite.pipeline.sources import LiveRollouts

ACTOR = RankFailed("actor_train", 0, "idle", "its process died", retryable=True)
REFERENCE = RankFailed("reference", 1, "idle", "its process died", retryable=True)
SERVICE = RankFailed("rollouts", 0, "next_batch", "its process died", retryable=True)


def complete(*ends: Any, offloads: bool = True) -> Any:
    """Wait for a batch; each wait ends in turn with a value or an exception."""
    left = list(ends)

    def result(poll: Any) -> Any:
        if isinstance(end := left.pop(0), Exception):
            raise end
        return end

    replicas = SimpleNamespace(name="actor_infer", each=lambda method: None)
    engines, service = SimpleNamespace(offloads=offloads, replicas=replicas), SimpleNamespace(name="rollouts")
    journal = SimpleNamespace(console=SimpleNamespace(watching=nullcontext))
    source = LiveRollouts(engines, None, service, {}, {}, {}, 1, journal)  # type: ignore[arg-type]
    return source._complete(SimpleNamespace(result=result), "step 1", lambda: None)  # type: ignore[arg-type]


@pytest.mark.parametrize("second", [REFERENCE, SERVICE])
def test_a_second_loss_on_shared_devices_is_handed_on_with_the_first(second: RankFailed) -> None:
    first = RankFailed(*ACTOR.args)
    with pytest.raises(RankFailed) as caught:
        complete(first, second)
    assert caught.value is first and first.others == (second,)


def test_a_new_engine_that_cannot_get_a_lost_ranks_weights_waits_for_its_recovery() -> None:
    with pytest.raises(RankFailed) as caught:
        complete(ACTOR, ClusterDead("actor_train", "its process died"))
    assert caught.value is ACTOR and ACTOR.others == ()
    with pytest.raises(ClusterDead):
        complete(ClusterDead("actor_train", "its process died"))


def test_a_single_loss_on_shared_devices_waits_for_the_batch() -> None:
    with pytest.raises(RankFailed) as caught:
        complete(ACTOR, "batch")
    assert caught.value is ACTOR and complete("batch") == "batch"
    with pytest.raises(RankFailed):
        complete(ACTOR, offloads=False)
