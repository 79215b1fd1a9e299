"""Losses while the driver waits for a batch on shared devices, with stand-ins for the rollout service."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.distributed.failures import ClusterDead, RankFailed
from roll_lite.pipeline.sources import LiveRollouts
from roll_lite.workers.judge import JudgeAddress, JudgeWorker
from roll_lite.workers.rollout import RolloutWorker

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


@pytest.mark.parametrize("service_end", [None, "it is lost, too"])
def test_rewards_are_told_the_new_address_of_a_judge_that_comes_back_on_another_node(service_end: str | None) -> None:
    """A rollout service that is lost, too, asks for it when it starts."""
    old, new, other = (JudgeAddress((f"http://10.0.0.{number}:8/v1",), name) for number, name in ((1, "main"), (2, "main"), (3, "other")))
    answers, told = {JudgeWorker.initialize: [], JudgeWorker.address: [new]}, list[Any]()
    judge = SimpleNamespace(rebuild=lambda: None, all=lambda method, *_: answers[method])
    service = SimpleNamespace(group=SimpleNamespace(end=service_end), one=lambda *call: told.append(call))
    journal = SimpleNamespace(console=SimpleNamespace(message=lambda _: None))
    source = LiveRollouts(None, None, service, {}, {"main": judge}, {}, 1, journal)  # type: ignore[arg-type, dict-item]
    source._addresses |= {"main": [old], "other": [other]}
    for _ in range(2):
        source._lost_judges["main"] = 0.0
        source.restart_judges()
    assert told == ([] if service_end else [(RolloutWorker.judges_moved, {"main": new, "other": other})])
    assert source._addresses["main"] == [new]


def test_a_batch_that_is_complete_outlives_a_loss_while_the_driver_waits_for_engines() -> None:
    batch = SimpleNamespace(ledger=["a line"], work=[], memory=[])
    asked, written, settled = list[str](), list[str](), [ACTOR]

    def settle() -> None:
        if settled:
            raise settled.pop()

    def start_one(method: Any, *_: Any) -> Any:
        asked.append(method.__name__)
        return SimpleNamespace(result=lambda poll: batch, done=True)

    restarts = SimpleNamespace(tell_losses=lambda: None, settle=settle)
    engines, service = SimpleNamespace(offloads=True, replicas=SimpleNamespace(name="actor_infer")), SimpleNamespace(name="rollouts")
    service.start_one = start_one
    ledger = SimpleNamespace(append=written.extend)
    journal = SimpleNamespace(console=SimpleNamespace(watching=nullcontext), ledger=ledger, pools_worked=lambda *_: None)
    source = LiveRollouts(engines, restarts, service, {}, {}, {}, 1, journal)  # type: ignore[arg-type]
    with pytest.raises(RankFailed):
        source.next_batch(1, lambda _: None)
    assert source.next_batch(1, lambda _: None) is batch  # type: ignore[comparison-overlap]
    assert asked == ["next_batch"] and written == ["a line"]


def test_a_single_loss_on_shared_devices_waits_for_the_batch() -> None:
    with pytest.raises(RankFailed) as caught:
        complete(ACTOR, "batch")
    assert caught.value is ACTOR and complete("batch") == "batch"
    with pytest.raises(RankFailed):
        complete(ACTOR, offloads=False)
