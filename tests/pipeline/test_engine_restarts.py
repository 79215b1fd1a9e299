"""Successors of lost engines on Ray, with a real rollout service; engines are scripted."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from rollout_cases import changed, engines, role_of, rollouts, spec_of, toy_model
from support_scripted import ScriptedWorker, scripted_spec

from roll_lite.config.schema.models import InferRoleConfig, ModelConfig
from roll_lite.distributed.cluster import Cluster, ClusterSpec, RankFailed, start_cluster
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import Placement, anywhere
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.strategy.base import EngineSpec
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.pipeline import engine_restarts
from roll_lite.pipeline.clusters import Engines
from roll_lite.pipeline.engine_restarts import EngineRestarts, JoiningEngines
from roll_lite.pipeline.nodes import LaterNodes
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutWorker

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return toy_model(tmp_path_factory.mktemp("model"))


class FailsToReturn(ScriptedWorker):
    """Engine whose second process cannot start."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._mark = spec.model.path / "started"

    async def initialize(self, turn: int = 0, turns: int = 1, is_first: bool = True) -> None:
        if self._mark.exists():
            raise RuntimeError("no memory is free")
        self._mark.touch()
        await super().initialize(turn, turns, is_first)


class SlowToAnswer(ScriptedWorker):
    """Engine 1 dies before it has told the service that it is ready."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        mark = spec.model.path / f"started {self.rank}"
        self._answers = self.rank == 0 or mark.exists()
        mark.touch()

    async def until_ready(self) -> None:
        if not self._answers:
            await asyncio.Event().wait()
        await super().until_ready()


class Moves(ScriptedWorker):
    async def away(self) -> list[str]:
        return sorted(self._strategy.life.away)


@dataclass
class Record:
    """What the journal is told."""

    told: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)

    def knows_lost(self, engines: Any) -> bool:
        return self.lost.issuperset(engines)

    def engines_lost(self, causes: dict[int, str], engines: int) -> None:
        self.told += [f"{number} lost" for number in causes if number not in self.lost]
        self.lost |= causes.keys()

    def engine_restarted(self, number: int, seconds: float, version: int | None) -> None:
        self.lost.discard(number)
        self.told.append(f"{number} returned with {version}")

    def engine_joined(self, number: int, engines: int, version: int | None) -> None:
        self.told.append(f"{number} joined with {version}, {engines} now")

    def engine_left(self, number: int, engines: int) -> None:
        self.told.append(f"{number} left, {engines} now")

    @property
    def console(self) -> Any:
        return self

    def message(self, text: str) -> None:
        self.told.append(text)


@dataclass
class House:
    restarts: EngineRestarts
    infer: Cluster[InferWorker]
    service: Cluster[RolloutWorker]
    record: Record

    def kill(self, engine: int) -> None:
        psutil.Process(self.infer.each(InferWorker.place)[engine].pid).kill()
        until(lambda: engine in self.infer.lost)

    def batch(self, step: int) -> int:
        return len(self.service.one(RolloutWorker.next_batch, 8, step).rows)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def all_known() -> LaterNodes:
    """No node is new to the run."""
    nodes = object.__new__(LaterNodes)
    nodes.known = defaultdict(lambda: {ray.get_runtime_context().get_node_id()})
    return nodes


@contextmanager
def house(
    model: ModelConfig, folder: Path, count: int, restarts: int = 3, offload: bool = False, worker: type[InferWorker] = ScriptedWorker
) -> Iterator[House]:
    record = Record()
    with (
        engines(model, count, worker) as infer,
        rollouts(changed(spec_of(model, folder), actor_infer=role_of(restarts)), infer) as service,
    ):
        returning = EngineRestarts(Engines(infer, InferRoleConfig(offload=offload)), service, restarts, record, all_known())  # type: ignore[arg-type]
        returning.begin()
        try:
            yield House(returning, infer, service, record)
        finally:
            WATCH.errands.pop("engines", None)


@pytest.mark.nightly
def test_a_successor_serves_once_it_is_handed_over(model: ModelConfig, tmp_path: Path) -> None:
    with house(model, tmp_path, 2) as made:
        assert made.batch(1) == 32
        made.kill(1)
        assert made.infer.left == [0]
        until(made.restarts.may_serve)
        assert made.infer.left == [0], "started, and not yet called"
        made.restarts.take(())
        assert (made.restarts.newcomers, made.infer.left) == ([1], [0, 1])
        assert made.service.one(RolloutWorker.lost_engines).keys() == {1}, "it serves nobody yet"
        made.restarts.hand_over(7)
        assert made.record.told == ["1 lost", "1 returned with 7"] and made.restarts.newcomers == []
        assert made.service.one(RolloutWorker.lost_engines) == {} and made.batch(2) == 32


def test_a_batch_waits_for_the_successor_of_the_only_engine_which_starts_while_the_driver_waits(model: ModelConfig, tmp_path: Path) -> None:
    with house(model, tmp_path, 1) as made:
        made.kill(0)
        batch = made.service.start_one(RolloutWorker.next_batch, 8, 1)
        with WATCHDOG.limit("sync_weights", 0.5):
            assert made.restarts.living(()) == [0] == made.restarts.newcomers, "the limit of an update is none of a start"
        assert "no engine is left; the run waits until one has devices and has started" in made.record.told
        made.restarts.hand_over(None)
        assert len(batch.result().rows) == 32


@pytest.mark.nightly
def test_a_newcomer_that_dies_before_it_serves_gets_a_successor_too(model: ModelConfig, tmp_path: Path) -> None:
    with house(model, tmp_path, 2) as made:
        made.kill(0)
        until(made.restarts.may_serve)
        made.restarts.take(())
        made.kill(0)
        assert made.restarts.newcomers == []
        until(made.restarts.may_serve)
        made.restarts.take(())
        made.restarts.hand_over(1)
        assert made.record.told == ["0 lost", "0 returned with 1"] and made.batch(1) == 32


@pytest.mark.nightly
def test_an_engine_that_dies_before_it_serves_gets_a_successor(tmp_path: Path) -> None:
    with house(toy_model(tmp_path / "model"), tmp_path, 2, worker=SlowToAnswer) as made:
        made.kill(1)
        until(made.restarts.may_serve)
        made.restarts.take(())
        made.restarts.hand_over(1)
        assert made.batch(1) == 32


@pytest.mark.nightly
def test_after_its_restarts_an_engine_stays_away_and_with_the_last_one_the_run_ends(model: ModelConfig, tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="actor_infer rank 0 failed"), house(model, tmp_path, 1, restarts=1) as made:
        made.kill(0)
        made.restarts.living(())
        made.restarts.hand_over(1)
        made.kill(0)
        made.restarts.tell_losses()
        made.restarts.tend()
        assert "actor_infer[0] is not started again" in made.record.told[-1]
        assert "after 1 restarts within an hour, actor_infer.restarts" in made.record.told[-1]
        made.batch(1)


@pytest.mark.nightly
def test_a_start_that_fails_counts_as_a_restart(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match="actor_infer rank 0 failed"):
        with house(toy_model(tmp_path / "model"), tmp_path, 1, restarts=2, worker=FailsToReturn) as made:
            made.kill(0)
            until(lambda: made.restarts.tend() or len(made.record.told) > 0)  # type: ignore[func-returns-value]
            (told,) = made.record.told
            assert "RuntimeError: no memory is free (after 2 restarts" in told
            made.batch(1)


def test_a_start_that_hangs_fails_once_its_process_has_had_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ready = 0.0, list[str]()
    monkeypatch.setattr(engine_restarts.time, "monotonic", lambda: now)
    monkeypatch.setattr(engine_restarts.ray, "wait", lambda calls, **_: (list(ready), []))
    place = Place("there", 7)
    monkeypatch.setattr(engine_restarts.ray, "get", lambda refs: [place for _ in refs])
    restarts: Any = object.__new__(EngineRestarts)
    restarts._group, restarts._start_s = SimpleNamespace(death_of=lambda engine: "death", name="actor_infer"), 60.0
    restarts._later_nodes = SimpleNamespace(compare=lambda role, nodes: [])
    start: Any = engine_restarts._Start(["until_placed", "initialize"])
    assert restarts._failure(0, start) is None
    now = 1000.0  # it, or an actor on a further node, may wait for devices
    assert restarts._failure(0, start) is None
    ready.append("until_placed")
    assert restarts._failure(0, start) is None
    now = 1061.0
    assert restarts._failure(0, start) == "it did not start within 60 s (limits.start)"
    ready.append("initialize")
    assert restarts._failure(0, start) is None and start.place == place


def test_engines_of_one_gpu_start_again_one_after_the_other() -> None:
    started, initialized = list[int](), list[tuple[int, int, bool]]()
    replicas: Any = SimpleNamespace(group=SimpleNamespace(initial_ranks=4), world_size=4)
    restarts = EngineRestarts(Engines(replicas, InferRoleConfig(), turns=2), None, 3, None, None)  # type: ignore[arg-type]

    def restart(engine: int) -> Any:
        started.append(engine)
        initialize = SimpleNamespace(remote=lambda *given: initialized.append(given))
        return SimpleNamespace(until_placed=SimpleNamespace(remote=lambda: None), initialize=initialize)

    restarts._group = SimpleNamespace(lost=dict.fromkeys([0, 1, 3], "died"), replaceable=set(range(4)), restart=restart)  # type: ignore[assignment]
    restarts._failure = lambda engine, start: None  # type: ignore[method-assign]
    restarts.tend()
    assert started == [0, 3], "0 and 1 share a GPU, each measures what is free of it"
    restarts.tend()
    assert started == [0, 3]
    restarts._starts[0].place = Place("there", 7)
    restarts.tend()
    assert started == [0, 3, 1] and initialized == [(0, 2, False), (1, 2, False), (1, 2, False)]


@pytest.mark.parametrize("is_dead", [True, False])
def test_only_a_dead_service_is_asked_again_to_drain_an_engine(monkeypatch: pytest.MonkeyPatch, is_dead: bool) -> None:
    def answer(_: object) -> None:
        raise ActorDiedError() if is_dead else RayTaskError("engine_leaves", "traceback", KeyError("engine 0"))

    monkeypatch.setattr(engine_restarts.ray, "wait", lambda calls, **_: (calls, []))
    monkeypatch.setattr(engine_restarts.ray, "get", answer)
    restarts: Any = object.__new__(EngineRestarts)
    restarts._group, restarts._newcomers, restarts._asked = SimpleNamespace(living_pulses=list), [], time.monotonic()
    restarts._leaving = {0: "call"}
    with nullcontext() if is_dead else pytest.raises(RankFailed, match="rollouts rank 0 failed in engine_leaves: KeyError: 'engine 0'"):
        restarts._follow_drains()
    assert restarts._leaving == {}


def test_a_successor_on_a_node_that_the_start_did_not_compare_serves_only_if_its_files_are_the_drivers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that spans nodes: all of them are compared once its actors run on them."""
    asked, answers = [], dict[str, Any]()
    restarts: Any = object.__new__(EngineRestarts)
    restarts._group, restarts._start_s = SimpleNamespace(death_of=lambda engine: "death", name="actor_infer"), None
    restarts._later_nodes = SimpleNamespace(compare=lambda role, nodes: asked.append((role, nodes)) or sorted(nodes))
    monkeypatch.setattr(engine_restarts.ray, "wait", lambda calls, **_: ([call for call in calls if call in answers], []))
    monkeypatch.setattr(engine_restarts.ray, "get", lambda refs: [value_or_raise(answers[ref]) for ref in refs])
    start: Any = engine_restarts._Start(["until_placed", "initialize"])
    whole = Place("first", 7, further=(Place("second", 8),))
    answers["until_placed"] = whole
    assert restarts._failure(0, start) is None and asked == [("actor_infer", {"first", "second"})]
    answers |= {"initialize": whole, "first": None}
    assert restarts._failure(0, start) is None and start.place is None
    answers["second"] = ValueError("model.path: /m on node 10.0.0.2")
    assert restarts._failure(0, start) == "ValueError: model.path: /m on node 10.0.0.2"
    answers["second"] = None
    assert restarts._failure(0, start) is None and start.place == whole
    assert len(asked) == 1


def value_or_raise(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


@pytest.mark.slow
def test_on_shared_devices_a_successor_starts_only_where_it_may_and_leaves_them(model: ModelConfig, tmp_path: Path) -> None:
    with house(model, tmp_path, 2, offload=True, worker=Moves) as made:
        assert "engines" not in WATCH.errands, "other roles have the devices while the driver waits for them"
        made.kill(1)
        made.restarts.tend()
        made.restarts.settle()
        assert not made.restarts.may_serve() and made.restarts.newcomers == [1]
        assert made.infer.each(Moves.away) == {0: [], 1: ["kv_cache", "weights"]}  # type: ignore[arg-type]
        made.infer.each(InferWorker.load, tuple(EngineMemory))
        made.restarts.hand_over(1)
        assert made.batch(1) == 32


@pytest.mark.nightly
@pytest.mark.slow
def test_an_engine_joins_when_devices_are_free_and_leaves_a_drained_node(
    model: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement, draining = Placement({"actor_infer": 1}, 30.0), set[str]()
    others = placement_group([{"CPU": ray.available_resources()["CPU"]}])
    assert others.wait(30)
    monkeypatch.setattr(engine_restarts, "draining_nodes", lambda: draining)
    monkeypatch.setattr(engine_restarts, "DRAIN_SECONDS", 0.0)
    spec, record = ClusterSpec("actor_infer", [*anywhere(1), placement.later_slot(1)], initial_ranks=1), Record()
    infer = start_cluster(spec, ScriptedWorker, scripted_spec(model, max_model_len=128))
    infer.all(InferWorker.initialize)
    rollout = changed(spec_of(model, tmp_path), deterministic=False, actor_infer=role_of(restarts=1))
    service = start_cluster(ClusterSpec("rollouts", anywhere(1)), RolloutWorker, rollout)
    joining, known = JoiningEngines(spec.slots, lambda: placement.later_slot(1)), all_known()
    restarts = EngineRestarts(Engines(infer, InferRoleConfig()), service, 1, record, known, joining, follows_drains=True)  # type: ignore[arg-type]
    try:
        service.one(RolloutWorker.prepare, {}, {})
        service.one(RolloutWorker.initialize, infer.actors, restarts.absent)
        restarts.begin()
        assert len(service.one(RolloutWorker.next_batch, 8, 1).rows) == 32
        assert not restarts.may_serve() and infer.left == [0] and record.told == []
        remove_placement_group(others)
        for joins in (1, 2):
            until(restarts.may_serve)
            restarts.take(())
            assert (restarts.newcomers, infer.left) == ([1], [0, 1])
            restarts.hand_over(joins)
            assert record.told[-1] == f"1 joined with {joins}, 2 now"
            assert len(service.one(RolloutWorker.next_batch, 8, 2 * joins).rows) == 32
            draining.add(ray.get_runtime_context().get_node_id())  # of both engines: the last one stays
            until(lambda: restarts.tend() or record.told[-1] == "1 left, 1 now")  # type: ignore[func-returns-value]
            draining.clear()
            assert infer.start_each_own(InferWorker.offload, {0: (), 1: ()}).result().keys() == {0}, "one that waits is not called"
            assert len(service.one(RolloutWorker.next_batch, 8, 2 * joins + 1).rows) == 32
        restarts.tell_losses()
        assert len(record.told) == 4, "none was lost"
        for _ in range(2):
            until(restarts.may_serve)
            ray.kill(infer.actors[1])
            until(lambda: not restarts.may_serve())
        assert record.told[-1].startswith("actor_infer[1] is tried again in an hour: ") and restarts.newcomers == []
        until(lambda: ray.available_resources().get("CPU", 0) >= 1)
        monkeypatch.setattr(engine_restarts, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + 4000.0))
        until(restarts.may_serve)
        service.one(RolloutWorker.shutdown)
    finally:
        WATCH.errands.pop("engines", None)
        service.shutdown()
        infer.shutdown()
        placement.release()
        for slot in spec.slots[1:]:
            remove_placement_group(slot.reserved)
