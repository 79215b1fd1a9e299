"""Who is on the devices when: the order of loads, work and offloads. Clusters are stand-ins that answer when they are told to."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.config.device_phases import Phase
from roll_lite.distributed.cluster import ClusterDead
from roll_lite.pipeline import clusters as module
from roll_lite.pipeline.clusters import DeviceTurn, Engines, Model, loaded, states, take_turns
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.pipeline.sources import LiveRollouts
from roll_lite.workers.actor import ActorWorker


@dataclass(eq=False)
class Answer:
    name: str
    log: list[str]

    def result(self) -> str:
        return self.name

    def settle(self) -> None:
        self.log.append(f"{self.name} settled")


@dataclass(eq=False)
class Role:
    name: str
    log: list[str]
    devices: tuple[int, ...] = (0,)
    offloads: bool = True
    dead: bool = False

    def start_load(self, parts: Sequence[Any]) -> Answer:
        self.log.append(f"{self.name} in")
        return Answer(f"{self.name} in", self.log)

    def start_offload(self, parts: Sequence[Any]) -> Answer:
        if self.dead:
            raise ClusterDead(self.name, "killed")
        self.log.append(f"{self.name} out")
        return Answer(f"{self.name} out", self.log)

    start_abandoning = start_offload

    def turn(self, error: BaseException | None = None) -> DeviceTurn[Any]:
        def start() -> Answer:
            self.log.append(f"{self.name} works")
            if error is not None:
                raise error
            return Answer(self.name, self.log)

        return DeviceTurn(self, start)  # type: ignore[arg-type]


@dataclass(eq=False)
class Named(Role):
    """Says what of it moves."""

    def start_load(self, parts: Sequence[Any]) -> Answer:
        self.log.append(f"{self.name} load {' '.join(parts)}")
        return Answer(f"{self.name} in", self.log)

    def start_offload(self, parts: Sequence[Any]) -> Answer:
        self.log.append(f"{self.name} offload {' '.join(parts)}")
        return Answer(f"{self.name} out", self.log)


@dataclass
class House:
    """Work is done in the order `finish`, by name; and so are moves that it names, the others at once."""

    finish: list[str] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def first_done(self, pendings: list[Answer]) -> list[Answer]:
        if moved := [pending for pending in pendings if pending.name.endswith((" in", " out")) and pending.name not in self.finish]:
            return moved
        done = min(pendings, key=lambda pending: self.finish.index(pending.name))
        self.log.append(f"{done.name} done")
        return [done]

    def role(self, name: str, *devices: int, **settings: Any) -> Role:
        return Role(name, self.log, devices, **settings)


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    made = House()
    monkeypatch.setattr(module, "first_done", made.first_done)
    monkeypatch.setattr(module, "gather", lambda *pendings: [pending.result() for pending in pendings])
    return made


def test_roles_on_one_device_are_there_one_after_the_other(house: House) -> None:
    house.finish = ["reference", "actor", "critic"]
    roles = [house.role(name, 0) for name in ("reference", "actor", "critic")]
    assert take_turns([role.turn() for role in roles], ("weights",)) == ["reference", "actor", "critic"]
    assert house.log == [f"{name} {what}" for name in house.finish for what in ("in", "works", "done", "out")]


def test_roles_with_devices_of_their_own_work_side_by_side_and_the_next_one_does_not_wait_for_the_slowest(house: House) -> None:
    house.finish = ["reference", "actor", "critic"]
    roles = [house.role("reference", 0, 1), house.role("actor", 1), house.role("critic", 2)]
    assert take_turns([role.turn() for role in roles], ("weights",)) == ["reference", "actor", "critic"]
    log = house.log
    assert log[:4] == ["reference in", "critic in", "reference works", "critic works"], "side by side"
    assert log.index("reference out") < log.index("actor in"), "they share device 1"
    assert log.index("actor works") < log.index("critic done"), "the critic's work is none of its business"


@pytest.mark.parametrize(
    ("slow", "finish"),
    [
        ("reference in", ["critic", "actor", "reference in", "reference", "judge"]),
        ("reference out", ["reference", "critic", "actor", "reference out", "judge"]),
    ],
)
def test_a_turn_does_not_wait_for_moves_on_devices_of_others(house: House, slow: str, finish: list[str]) -> None:
    house.finish = finish
    roles = [house.role("reference", 0), house.role("critic", 1), house.role("actor", 1), house.role("judge", 0)]
    assert take_turns([role.turn() for role in roles], ("weights",)) == ["reference", "critic", "actor", "judge"]
    log = house.log
    assert log.index("actor works") < log.index(f"{slow} done") < log.index("judge in"), "device 1 goes on, device 0 is not free yet"


def test_a_role_that_stays_neither_moves_nor_waits(house: House) -> None:
    house.finish = ["actor", "critic"]
    roles = [house.role("actor", 0), house.role("critic", 0, offloads=False)]
    take_turns([role.turn() for role in roles], ("weights",))
    assert house.log == ["actor in", "critic works", "actor works", "actor done", "actor out", "critic done"]


def test_a_step_moves_as_the_table_says(house: House) -> None:
    """Weights in beside the trainer's, sync, trainer out, KV cache in, generate, both out; then the trainer alone, with everything."""
    log = house.log

    class Replicas:
        def start_each(self, method: Any, parts: Sequence[Any]) -> Answer:
            log.append(f"engines {method.__name__} {' '.join(parts)}")
            return Answer("engines", log)

    actor = Named("actor", log)
    weights = SimpleNamespace(sender=lambda version: actor if version == 3 else None)
    engines = Engines(Replicas(), SimpleNamespace(offload=True))  # type: ignore[arg-type]
    restarts = SimpleNamespace(living=lambda parts: [0])
    source = LiveRollouts(engines, restarts, None, None, {}, {}, 1, None, weights)  # type: ignore[arg-type]

    def sync_weights() -> None:
        if step.version == 3:
            with loaded(actor, states(Phase.SYNC_WEIGHTS)):
                log.append("sync")

    house.finish = ["actor"]
    step: Any = SimpleNamespace(
        source=source,
        version=3,
        steps_done=0,
        models=SimpleNamespace(trained=["actor_train"]),
        sync_weights=sync_weights,
        generate=lambda: log.append("generate") or [1],
        shape_rewards=lambda batch: batch,
        compute_log_probs=lambda batch: take_turns([actor.turn()], states(Phase.LOG_PROBS)),
        assign_credit=lambda batch: None,
        write_batch=lambda batch: None,
        train=lambda batch: take_turns([actor.turn()], states(Phase.TRAIN)),
        learn=lambda batch: RLVRPipeline.learn(step, batch),
        recovery=SimpleNamespace(updating=nullcontext),
    )
    RLVRPipeline.step(step)
    moves = [
        "engines load weights",
        "actor load weights",
        "actor load weights",  # is there already, and is somebody's to take out from here on
        "sync",
        "actor offload weights",
        "engines load weights kv_cache",
        "generate",
        "engines offload weights kv_cache",
        "engines offload weights",
        *(f"actor {what}" for what in ("load weights", "works", "done", "offload weights")),
        *(f"actor {what}" for what in ("load weights gradients optimizer", "works", "done", "offload weights gradients optimizer")),
    ]
    assert log == moves
    log.clear()
    step.version = 4
    RLVRPipeline.step(step)
    assert log[:2] == ["engines load weights", "engines load weights kv_cache"], "nothing to send: the trainer stays away"


def test_each_turn_tells_how_long_it_took(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock is a second later. One and other begin at 1 and 2, one ends at 3, then the third, on the same device, begins;
    other ends at 5 and the third at 6."""
    clock = iter(range(1, 99))
    took: dict[str, float] = {}
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(clock)))
    house.finish = ["one", "other", "third"]
    roles = [house.role("one", 0), house.role("other", 1), house.role("third", 0)]
    turns = [replace(role.turn(), took=partial(took.__setitem__, role.name)) for role in roles]
    take_turns(turns, ("weights",))
    assert took == {"one": 2.0, "other": 3.0, "third": 2.0}


def test_who_comes_in_beside_another_leaves_where_the_block_fails(house: House) -> None:
    engines, actor = house.role("engines", 0), house.role("actor", 0)
    with pytest.raises(ValueError, match="boom"), loaded(engines, ("weights",), [(actor, ("weights",))]):  # type: ignore[arg-type]
        raise ValueError("boom")
    assert house.log == ["engines in", "actor in", "engines out", "engines out settled", "actor out", "actor out settled"]


def test_engines_of_a_block_that_fails_may_stay_for_a_weight_update(house: House) -> None:
    class Replicas:
        def start_each(self, method: Any, parts: Sequence[Any]) -> Answer:
            house.log.append(f"engines {method.__name__} {' '.join(parts)}")
            return Answer("engines", house.log)

    engines = Engines(Replicas(), SimpleNamespace(offload=True))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="boom"), engines.loaded(Phase.SYNC_WEIGHTS):
        raise ValueError("boom")
    assert house.log == ["engines load weights", "engines leave_device weights", "engines settled"]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_a_block_that_fails_gives_back_what_it_took(house: House, error: BaseException) -> None:
    with pytest.raises(type(error)), loaded(house.role("engine", 0), ("weights",)):  # type: ignore[arg-type]
        raise error
    assert house.log == ["engine in", "engine out", "engine out settled"]


def test_turns_that_fail_give_back_what_they_took_and_what_is_dead_hides_nothing(house: House) -> None:
    roles = [house.role("reference", 0, dead=True), house.role("critic", 1), house.role("actor", 0)]
    with pytest.raises(ValueError, match="boom"):
        take_turns([roles[0].turn(), roles[1].turn(ValueError("boom")), roles[2].turn()], ("weights",))
    left = ["reference settled", "critic in settled", "critic out", "critic out settled"]
    assert house.log == ["reference in", "critic in", "reference works", "critic works", *left]


def test_files_of_ranks_on_other_nodes_come_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ranks 0 and 2 are on nodes without the folder, rank 1 shares it with the driver."""
    here, contents = tmp_path / "here", [{"a": b"seven b", "empty": b""}, {"b": b"own"}, {"c": b"sixsix"}]
    places = [tmp_path / "far", here, tmp_path / "farther"]
    for place, own in zip(places, contents, strict=True):
        place.mkdir()
        for name, text in own.items():
            (place / name).write_bytes(text)
    rank_now = 0
    monkeypatch.setattr("roll_lite.workers.model.Place", SimpleNamespace(here=lambda: SimpleNamespace(address=places[rank_now].name)))
    monkeypatch.setattr("roll_lite.pipeline.clusters.CHUNK_BYTES", 3)

    def all_ranks(method: Any, given: Any, *arguments: Any) -> list[Any]:
        nonlocal rank_now
        answers = []
        for rank, place in enumerate(places):  # a folder has one path everywhere
            rank_now = rank
            there = place if isinstance(given, Path) else [file and place / file.name for file in given]
            answers.append(method(SimpleNamespace(rank=rank), there, *arguments))
        return answers

    model: Any = Model(SimpleNamespace(all=all_ranks), None, ActorWorker)  # type: ignore[arg-type]
    model.bring_home(here, contents, {"far", "farther"})
    assert {file.name: file.read_bytes() for file in here.iterdir()} == {name: text for own in contents for name, text in own.items()}
    assert not places[0].exists() and not places[2].exists()
