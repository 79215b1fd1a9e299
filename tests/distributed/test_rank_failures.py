"""A rank raises, leaves or is killed while others hang in a collective: the driver says who and why within seconds."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from cluster_workers import Adder, Collective, Loner, MainThreadAdder, Service, Unbuildable

from roll_lite.distributed.cluster import Cluster, ClusterDead, ClusterSpec, RankFailed, gather, start_cluster
from roll_lite.distributed.failures import MemberLost
from roll_lite.distributed.pending import _stack_traces, at_fault, pause
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.distributed.worker import Stand, Worker

SECONDS = 30.0
"""Half of what the others would go on sleeping; measured below 0.2 on an idle machine."""


def processes_of(cluster: Cluster[Worker]) -> list[int]:
    return [place.pid for place in cluster.all(Worker.place)]


def assert_gone(processes: list[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while left := [pid for pid in processes if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.05)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("how", "cause"),
    [("raise", "ValueError: the data is broken"), ("exit", r"its process \d+ died .*about to leave"), ("kill", r"its process \d+ died")],
)
def test_failure_while_another_rank_hangs_in_a_collective(ray_local: object, tmp: Path, how: str, cause: str) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2), log_folder=tmp), Collective)
    processes = processes_of(cluster)
    assert cluster.all(Collective.reduce) == [2.0, 2.0]
    start = time.monotonic()
    with pytest.raises(RankFailed, match=rf"(?s)actor_train rank 1 failed in fail_in_collective: {cause}") as caught:
        cluster.all(Collective.fail_in_collective, how)
    assert time.monotonic() - start < SECONDS
    assert (caught.value.role, caught.value.rank, caught.value.phase) == ("actor_train", 1, "fail_in_collective")
    assert_gone(processes)
    with pytest.raises(ClusterDead, match=r"(?s)actor_train is dead: actor_train rank 1 failed in fail_in_collective"):
        cluster.all(Collective.reduce)
    if how == "raise":
        assert "in fail_in_collective" in caught.value.cause and "cluster_workers.py" in caught.value.cause, "the remote traceback"


def test_what_a_rank_leaves_in_the_object_store_outlives_it(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2)), Adder)
    pending = cluster.start_all(Adder.sum_and_ones, 10**6)
    assert pending.result() == [10**6, 10**6]
    kept = [call.kept[0] for call in pending.calls]
    for process in processes_of(cluster):
        os.kill(process, signal.SIGKILL)
    cluster.rebuild()
    assert cluster.all(Adder.fetch, kept) == [10**6, 2 * 10**6]
    with pytest.raises(RankFailed, match="failed in fetch: ObjectReconstructionFailedError") as caught:
        cluster.all(Adder.fetch, [])
    assert caught.value.retryable and caught.value.lost_object, "an object that was lost with its node: new ranks may do without"


@pytest.mark.nightly
def test_a_group_starts_anew_after_its_end(ray_local: object, tmp: Path) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2), log_folder=tmp), Collective)
    before = processes_of(cluster)
    abandoned = cluster.start_one(Collective.place)
    os.kill(before[1], signal.SIGSTOP)
    with pytest.raises(RankFailed) as caught, WATCH.expecting_answers(2.0):
        cluster.all(Collective.reduce)
    assert caught.value.retryable
    cluster.rebuild()
    assert_gone(before)
    assert cluster.all(Collective.reduce) == [2.0, 2.0] and not set(processes_of(cluster)) & set(before)
    abandoned.settle()
    assert cluster.group.phases == []
    with pytest.raises(RankFailed, match="rank 1 failed in fail_in_collective: its process"), WATCH.expecting_answers(30.0):
        cluster.all(Collective.fail_in_collective, "kill")
    cluster.rebuild()
    alive = processes_of(cluster)
    cluster.rebuild()
    assert_gone(alive)
    assert cluster.all(Collective.reduce) == [2.0, 2.0]
    cluster.shutdown()


def stand(waits: bool = True, **begun: int) -> Stand:
    return Stand(begun, ["waits in collective"] if waits else [], "")


@pytest.mark.parametrize(
    ("stands", "blamed"),
    [
        ({0: stand(data=3), 1: stand(data=2), 2: stand(data=3)}, 1),
        # On GPUs all have unfinished collectives. 0 and 2 wait for 1, which waits for 3 in another group.
        ({0: stand(data=3, left=5), 1: stand(data=2, right=9), 2: stand(data=3, left=5), 3: stand(right=8)}, 3),
        # Nobody is behind: one that computes, then the first.
        ({0: stand(data=3), 1: stand(waits=False, data=3)}, 1),
        ({0: stand(data=3), 1: stand(data=3)}, 0),
        # 2 gives no answer.
        ({0: stand(data=3), 1: stand(data=2)}, 2),
        ({}, 0),
    ],
)
def test_the_rank_for_which_the_others_wait_is_at_fault(stands: dict[int, Stand], blamed: int) -> None:
    assert at_fault(sorted({*stands, blamed}), stands) == blamed


def test_a_rank_that_never_comes_to_a_collective_is_blamed_and_the_collective_is_named(ray_local: object, tmp: Path) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(3), log_folder=tmp), Collective)
    assert cluster.all(Collective.reduce) == [3.0] * 3
    cluster.group.timeout_s = 2.0
    with pytest.raises(RankFailed) as caught:
        cluster.all(Collective.hang_before_a_collective)
    cause = caught.value.cause
    assert caught.value.rank == 1 and cause.startswith("no answer after 2 s from ranks 0-2"), cause
    _, blamed, waiting = re.split(r"\n\n(?=rank |each of )", cause)
    assert blamed.startswith("rank 1 stands at\n") and "in hang_before_a_collective" in blamed and "waits in" not in blamed
    collective = "waits in collective gloo:all_reduce number 2 of 0 default_pg, sizes [[1]]\n"
    assert waiting.startswith(f"each of ranks 0, 2 stands at\n  {collective}")


def test_equal_stacks_of_many_ranks_are_told_once() -> None:
    stands = {rank: Stand({}, [], "in send" if rank == 3 else "in receive") for rank in range(20)}
    group: Any = SimpleNamespace(deaths={"one": 0}, pulses=[SimpleNamespace(place=None)] * 21, log_file=lambda _: None)
    assert _stack_traces(group, [3, 20, *(rank for rank in range(20) if rank != 3)], stands).split("\n\n")[1:] == [
        "rank 3 stands at\nin send",
        "rank 20 does not say where it stands: where its process is, is not known",
        "each of ranks 0-2, 4-19 stands at\nin receive",
    ]


def test_a_rank_that_never_releases_the_lock_says_where_it_stands_and_so_do_the_others(ray_local: object, tmp: Path) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2), log_folder=tmp), Collective)
    processes_of(cluster)
    with pytest.raises(RankFailed) as caught, WATCH.expecting_answers(2.0):
        cluster.all(Collective.hang_with_the_lock)
    cause = caught.value.cause
    assert cause.startswith("nothing was heard of its process for 2 s (limits.silence)")
    assert "rank 1 does not say where it stands: its process" in cause and "in backtracks" in cause.partition("rank 1 ")[2]
    assert "rank 0 stands at" in cause and "in hang_with_the_lock" in cause


@pytest.mark.parametrize("worker", [Adder, Service])
def test_death_in_another_cluster_is_noticed_while_waiting(ray_local: object, worker: type[Adder] | type[Service]) -> None:
    busy = start_cluster(ClusterSpec("reference", anywhere(1)), Adder)
    other = start_cluster(ClusterSpec("actor_infer", anywhere(2)), worker)
    victims = processes_of(other)
    waiting = busy.start_all(Adder.sleep, 60.0)
    killed: list[float] = []

    def kill() -> None:
        os.kill(victims[1], signal.SIGKILL)
        killed.append(time.monotonic())

    threading.Timer(0.5, kill).start()
    with pytest.raises(RankFailed, match=f"actor_infer rank 1 failed in idle: its process {victims[1]} died"):
        waiting.result()
    assert time.monotonic() - killed[0] < SECONDS
    assert_gone(victims)
    busy.shutdown()


def test_gather_raises_at_the_first_failure_of_any(ray_local: object) -> None:
    slow = start_cluster(ClusterSpec("actor_train", anywhere(1)), Adder)
    broken = start_cluster(ClusterSpec("critic", anywhere(1)), Adder)
    calls = slow.start_all(Adder.sleep, 60.0), broken.start_all(Adder.add, "not a number")  # type: ignore[arg-type]
    start = time.monotonic()
    with pytest.raises(RankFailed, match="critic rank 0 failed in add: TypeError"):
        gather(*calls)
    assert time.monotonic() - start < SECONDS
    slow.shutdown()


def test_a_constructor_that_raises(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("critic", anywhere(2)), Unbuildable, "/nowhere")
    with pytest.raises(RankFailed, match=r"(?s)critic rank [01] failed in start.*FileNotFoundError: no model at /nowhere") as caught:
        cluster.all(Unbuildable.place)
    assert caught.value.phase == "start"


def test_an_unwatched_worker_fails_at_its_call(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("rewards", anywhere(1)), MainThreadAdder)
    os.kill(cluster.one(Adder.place).pid, signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"rewards rank 0 failed in add: its process \d+ died"):
        cluster.all(Adder.add, 1)


def test_a_time_out_names_the_stuck_rank_and_where_it_stands(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2), timeout_s=30.0), Adder)
    cluster.all(Adder.place)
    start = time.monotonic()
    with pytest.raises(RankFailed, match=r"(?s)no answer after 1 s from rank 1; rank 0 answered.*in sleep_where") as caught:
        cluster.start_all(Adder.sleep_where, 1, 60.0).result(timeout_s=1.0)
    assert caught.value.rank == 1 and time.monotonic() - start < SECONDS
    with pytest.raises(ClusterDead):
        cluster.all(Adder.place)


def test_the_limit_of_a_phase_names_its_setting(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("rollouts", anywhere(1), timeout_s=0.5), Service)
    cluster.all(Service.place)
    started = time.monotonic()
    with (
        WATCHDOG.limit("generate", 2.0),
        pytest.raises(RankFailed, match=r"limit for the phase generate is limits.generate: 2 s; raise it") as caught,
    ):
        cluster.all(Service.forever)
    assert 2.0 <= time.monotonic() - started < 2 + SECONDS, "the cluster's own limit is for calls of no phase"
    assert "in forever" in str(caught.value), "where the coroutine waits"
    cluster = start_cluster(ClusterSpec("rollouts", anywhere(1), timeout_s=0.5), Service)
    with pytest.raises(RankFailed, match=r"the limit for calls of no phase is limits.other: 0.5 s"):
        cluster.all(Service.forever)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("worker", [pytest.param(Adder, marks=pytest.mark.nightly), Service])
def test_a_stopped_rank_of_an_idle_cluster_is_noticed(ray_local: object, worker: type[Adder] | type[Service]) -> None:
    busy = start_cluster(ClusterSpec("reference", anywhere(1)), Adder)
    idle = start_cluster(ClusterSpec("actor_infer", anywhere(2)), worker)
    processes = processes_of(idle)
    with WATCH.expecting_answers(2.0):
        busy.all(Adder.sleep, 3.0)  # a busy rank is no silent one
        os.kill(processes[1], signal.SIGSTOP)
        start = time.monotonic()
        with pytest.raises(RankFailed, match=r"(?s)actor_infer rank 1 failed in idle: nothing was heard of its process for 2 s") as caught:
            busy.all(Adder.sleep, 60.0)
    assert time.monotonic() - start < SECONDS
    assert f"its process {processes[1]} is stopped, as by SIGSTOP, and can say nothing" in str(caught.value)
    assert_gone(processes)
    busy.shutdown()


def test_a_stopped_rank_that_will_be_replaced_is_lost_alone(ray_local: object) -> None:
    busy = start_cluster(ClusterSpec("reference", anywhere(1)), Adder)
    engines = start_cluster(ClusterSpec("actor_infer", anywhere(2)), Loner)
    processes = processes_of(engines)
    engines.group.replaceable = {0, 1}
    os.kill(processes[1], signal.SIGSTOP)
    with WATCH.expecting_answers(2.0):
        assert engines.each(Loner.number) == {0: 0}, "the call to the stopped one ends without an answer"
        assert busy.all(Adder.sleep, 1.0) == [1.0]
    assert engines.left == [0] and engines.lost == {1: "nothing was heard of its process for 2 s (limits.silence)"}
    assert_gone(processes[1:])
    busy.shutdown()
    engines.shutdown()


@pytest.mark.usefixtures("signals_arrive")
def test_ctrl_c_ends_a_wait(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(1)), Adder)
    waiting = cluster.start_all(Adder.sleep, 60.0)
    start = time.monotonic()
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        waiting.result()
    assert time.monotonic() - start < SECONDS
    cluster.shutdown()


def test_children_of_a_killed_worker_die_with_it(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_infer", anywhere(1)), Adder)
    child = cluster.one(Adder.start_child)
    assert psutil.pid_exists(child)
    cluster.shutdown()
    assert_gone([child])


def test_a_failure_names_the_node_where_there_are_several(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2)), Collective)
    cluster.all(Collective.place)
    here = WATCH.places()["actor_train", 1]
    assert WATCH.where("actor_train", 1) == WATCH.where("nobody", 0) == "" and here.address
    cluster.group.pulses[0].place = here._replace(node="another node")
    with pytest.raises(RankFailed, match=f"actor_train rank 1 on {here.address} failed in train: it took longer"):
        with WATCHDOG.limit("train", 1e-9):
            pause(cluster.group, 1, "it")
    engines = start_cluster(ClusterSpec("actor_infer", anywhere(1)), Loner)
    engines.each(Loner.number)
    engines.group.lose(0, MemberLost("worn out"))
    with pytest.raises(RankFailed, match=f"actor_infer rank 0 on {here.address} failed in idle: MemberLost: worn out"):
        assert engines.left
    engines.shutdown()
    with pytest.raises(RankFailed, match=rf"actor_train rank 1 on {here.address} failed in fail_in_collective: its process"):
        cluster.all(Collective.fail_in_collective, "kill")
