"""Dispatch verbs on real actors."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import ray
from cluster_workers import Adder, Grid, Keeper, Loner, MainThreadAdder, Service

from roll_lite.distributed.cluster import Cluster, ClusterDead, ClusterSpec, RankFailed, first_done, gather, start_cluster
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import anywhere


@pytest.fixture(scope="module")
def adders(ray_local: object) -> Iterator[Cluster[Adder]]:
    cluster = start_cluster(ClusterSpec("adders", anywhere(2), threads=3, env={"EXTRA": "yes"}), Adder, base=1000)
    yield cluster
    cluster.shutdown()


@pytest.fixture(scope="module")
def grid(ray_local: object) -> Iterator[Cluster[Grid]]:
    cluster = start_cluster(ClusterSpec("grid", anywhere(4)), Grid)
    yield cluster
    cluster.shutdown()


def test_places_of_ranks_are_checked_at_each_start_before_other_calls(ray_local: object) -> None:
    checked: list[tuple[str, list[Place]]] = []

    def check(name: str, places: list[Place]) -> None:
        checked.append((name, places))
        if len(checked) == 2:
            raise ValueError("another model")

    cluster = start_cluster(ClusterSpec("actor_train", anywhere(2), check_places=check), Adder)
    assert cluster.all(Adder.add, 1) == [1, 101] == cluster.all(Adder.add, 1) and len(checked) == 1
    cluster.rebuild()
    with pytest.raises(ValueError, match="another model"):
        cluster.all(Adder.add, 1)
    assert cluster.all(Adder.place) == checked[2][1] and checked[2][0] == "actor_train"
    assert {place.pid for place in checked[0][1]}.isdisjoint(place.pid for place in checked[2][1])
    cluster.shutdown()


def test_all_and_one(adders: Cluster[Adder]) -> None:
    assert adders.all(Adder.add, 1, b=2) == [1003, 1103]
    assert adders.one(Adder.add, 5) == 1005


def test_rank_environment_is_there_before_the_process_starts(adders: Cluster[Adder]) -> None:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS", "EXTRA"]
    assert [tuple(found.values()) for found in adders.all(Adder.environment, names)] == [
        ("0", "2", "0", "3", "yes"),
        ("1", "2", "1", "3", "yes"),
    ]
    places = adders.all(Adder.environment, ["MASTER_ADDR", "MASTER_PORT"])
    assert places[0] == places[1] and int(places[0]["MASTER_PORT"] or 0) > 0


def test_the_first_answer_does_not_wait_for_the_others(adders: Cluster[Adder], grid: Cluster[Grid]) -> None:
    grid.all(Grid.who)  # its start may take longer than the sleep
    slow, fast = adders.start_all(Adder.sleep, 2.0), grid.start_all(Grid.who)
    assert first_done([slow, fast]) == [fast] and not slow.done
    assert fast.result() == [0, 1, 2, 3]
    assert first_done([slow]) == [slow] and slow.result() == [2.0, 2.0]
    assert (adders.group.phases, grid.group.phases) == ([], []), "nothing is under way any more"


def test_without_a_strategy_every_rank_is_a_data_rank(adders: Cluster[Adder]) -> None:
    assert [(layout.rank, layout.data_rank, layout.data_size, layout.is_head) for layout in adders.layouts] == [
        (0, 0, 2, True),
        (1, 1, 2, True),
    ]
    assert adders.start_scatter(Adder.add, [1, 2], 10).result() == [1011, 1112]


def test_methods_run_on_one_thread(adders: Cluster[Adder]) -> None:
    threads = [adders.one(Adder.thread) for _ in range(5)]
    assert len({thread for thread, _ in threads}) == 1


def test_scatter_sends_a_shard_to_every_rank_of_its_data_rank(grid: Cluster[Grid]) -> None:
    assert grid.all(Grid.who) == [0, 1, 2, 3]
    assert grid.start_scatter(Grid.total, [[1, 2, 3, 4], []], 100).result() == [(3, 110), (1, 100)]
    assert grid.all(Grid.last_total) == [100, 100, 110, 110]


def test_heads_scatter_leaves_the_other_ranks_alone(grid: Cluster[Grid]) -> None:
    grid.start_scatter(Grid.total, [[0], [0]], 0).result()
    assert grid.heads_scatter(Grid.total, [[7], [8, 9]], 1) == [(3, 8), (1, 18)]
    assert grid.all(Grid.last_total) == [0, 18, 0, 8]


def test_wrong_number_of_shards(grid: Cluster[Grid]) -> None:
    with pytest.raises(ValueError, match=r"grid\.total: 3 shards for 2 data-parallel ranks"):
        grid.start_scatter(Grid.total, [[1], [2], [3]], 0).result()


def test_start_does_not_wait_and_clusters_overlap(adders: Cluster[Adder], grid: Cluster[Grid]) -> None:
    sleeping = adders.start_all(Adder.sleep, 0.5)
    assert grid.one(Grid.who) == 0
    assert not all(call.done for call in sleeping.calls)
    both = gather(sleeping, adders.start_all(Adder.add, 0))
    assert both == [[0.5, 0.5], [1000, 1100]]


def test_something_else_can_be_looked_at_while_waiting(adders: Cluster[Adder], ray_local: object) -> None:
    services = start_cluster(ClusterSpec("services", anywhere(1)), Service)
    endless = services.start_one(Service.forever)
    slow, asked = adders.start_one(Adder.sleep, 4), services.start_one(Service.twice, 21)
    seen: list[tuple[int | None, object]] = []
    assert slow.result(poll=lambda: seen.append((asked.answer(), endless.answer()))) == 4
    assert len(seen) >= 2 and seen[-1] == (42, None), "about once a second, without waiting"
    assert services.group.phases == ["forever"]
    endless.settle()
    assert services.group.phases == []
    services.shutdown()


def test_a_rank_that_raises_is_reported_by_whoever_looks_for_an_answer(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("adders", anywhere(2)), Adder, 0)
    cluster.all(Adder.thread)
    failing = cluster.start_all(Adder.add, "no number")  # type: ignore[arg-type]
    with pytest.raises(RankFailed, match="adders rank . failed in add: TypeError"):
        while failing.answer() is None:
            time.sleep(0.1)
    with pytest.raises(ClusterDead):
        cluster.all(Adder.thread)


def test_async_workers(ray_local: object) -> None:
    services = start_cluster(ClusterSpec("services", anywhere(2)), Service)
    endless = services.start_one(Service.forever)
    assert services.all(Service.twice, 21) == [42, 42]
    services.shutdown()
    with pytest.raises(ClusterDead, match="services is dead: it was shut down"):
        endless.result()
    with pytest.raises(ClusterDead, match="shut down"):
        services.all(Service.twice, 1)


def test_an_unwatched_worker_has_the_main_thread(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("rewards", anywhere(1)), MainThreadAdder)
    assert cluster.one(Adder.thread)[1]
    cluster.shutdown()


def test_coroutines_need_an_async_worker(ray_local: object) -> None:
    class Mixed(Adder):
        async def wait(self) -> None: ...

    with pytest.raises(TypeError, match="Mixed has coroutine methods: it must derive from AsyncWorker"):
        start_cluster(ClusterSpec("mixed", anywhere(1)), Mixed)


def test_ranks_that_live_alone_are_left_out_once_they_are_lost(ray_local: object) -> None:
    """One that dies in the middle of a call, one that says of itself that it is of no use any more, and errors that are no losses."""
    members = start_cluster(ClusterSpec("members", anywhere(3)), Loner)
    assert members.each(Loner.number) == {0: 0, 1: 1, 2: 2} and dict(members.lost) == {}
    with pytest.raises(RankFailed, match="members rank 1 failed in die: ValueError: not yet"):
        members.start_each_own(Loner.die, {1: "not yet"}).result()
    members = start_cluster(ClusterSpec("members", anywhere(3)), Loner)
    assert members.start_each_own(Loner.die, {0: "", 1: "kill", 2: ""}).result() == {0: None, 2: None}
    assert list(members.lost) == [1] and "its process" in members.lost[1] and members.left == [0, 2]
    assert members.each(Loner.number) == {0: 0, 2: 2}
    assert members.start_each_own(Loner.die, {0: "", 2: "lost"}).result() == {0: None}
    assert members.lost[2] == "worn out" and members.left == [0]
    assert members.start_each_own(Loner.die, {0: "kill"}).result() == {}
    with pytest.raises(RankFailed, match="members rank 0 failed in idle: its process"):
        members.each(Loner.number)
    members.shutdown()


def test_where_nobody_is_left_the_worker_that_gave_up_the_last_one_says_why(ray_local: object) -> None:
    """Whoever wants something of them may notice before that worker's own end."""
    members, keeper = start_cluster(ClusterSpec("members", anywhere(1)), Loner), start_cluster(ClusterSpec("keeper", anywhere(1)), Keeper)
    assert members.each(Loner.number) == {0: 0}
    keeper.one(Keeper.give_up, members.actors[0], "it said nothing for 7 s")
    ready, _ = ray.wait(list(members.group.deaths), timeout=60)
    assert ready
    with pytest.raises(RankFailed, match="^members rank 0 failed in idle: it said nothing for 7 s"):
        members.each(Loner.number)
    keeper.shutdown()
