"""When weights are pushed, and that engines which hold others are noticed. Ranks and engines are stand-ins; a whole update has no time
but the limit of its phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from roll_lite.config.schema.run import WeightSyncConfig
from roll_lite.distributed.failures import RankFailed
from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError, Transferred
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, Membership
from roll_lite.pipeline import weights as module
from roll_lite.pipeline.weights import WeightSync

PLAN = ExportPlan((ExportedTensor("a", (2,), torch.float32, 0, 0),))


class Restarts:
    """Engines of which none is lost unless a test says so; `newcomers` lack the current weights."""

    def __init__(self, replicas: Cluster) -> None:
        self.replicas = replicas
        self.newcomers: list[int] = []

    def living(self, parts: Any) -> list[int]:
        return self.replicas.left


class Cluster:
    left: ClassVar[list[int]] = [0]
    lost: ClassVar[dict[int, str]] = {}

    def __init__(self, checksums: dict[str, str]) -> None:
        self.checksums = checksums
        self.calls: list[str] = []
        self.memberships: list[Membership] = []
        self.receivers: list[tuple[str, list[int]]] = []
        """Calls to engines, with their numbers."""
        self.compared: list[list[str]] = []
        """Tensors of each comparison."""

    def all(self, method: Any, *arguments: Any) -> list[Any]:
        self.calls.append(method.__name__)
        return [{"export_plan": PLAN, "weight_checksums": self.checksums}.get(method.__name__)]

    def one(self, method: Any, *arguments: Any) -> Any:
        self.calls.append(method.__name__)
        return ("host", 1) if method.__name__ == "host_weight_transfer" else None

    def start_all(self, method: Any, *arguments: Any) -> Any:
        self.calls.append(method.__name__)
        self.memberships += [argument for argument in arguments if isinstance(argument, Membership)]
        return SimpleNamespace(calls=[SimpleNamespace(rank=rank, lost=False, value=None) for rank in self.left])

    def start_each_own(self, method: Any, own: dict[int, Any], *arguments: Any) -> Any:
        self.receivers.append((method.__name__, list(own)))
        if method.__name__ == "weight_checksums":
            self.compared.append(next(iter(own.values())))
        pending = self.start_all(method, *arguments)
        pending.result = lambda: dict.fromkeys(own, self.checksums)
        return pending


@pytest.fixture
def sync(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(
        module,
        "gather",
        lambda *pending, poll: [
            [
                Transferred(seconds={"gather": 1.0}, nbytes={"gloo": 2**20}, by_transport={"gloo": 0.5}),
                Transferred(seconds={"gather": 0.5}, nbytes={"gloo": 2**21, "nccl": 2**20}, by_transport={"gloo": 0.25, "nccl": 0.25}),
            ],
            {0: Transferred(seconds={"load": 2.0})},
        ],
    )
    monkeypatch.setattr(module, "rendezvous_client", lambda host, port: f"{host}:{port}")
    loads: list[str] = []

    @contextmanager
    def loaded(groups: Any) -> Iterator[None]:
        loads.append("in")
        yield
        loads.append("out")

    def make(held: str, verify: Any = "full", drops_weights: bool = False, transport: Any = "auto", unreadable: str | None = None) -> Any:
        actor, engines, rollouts = Cluster({"a": "1"}), Cluster({"a": held}), Cluster({})
        model = SimpleNamespace(ranks=actor, loaded=loaded)
        restarts = Restarts(engines)
        config = WeightSyncConfig(verify=verify, transport=transport)
        sync = WeightSync(model, restarts, rollouts, config, 1, "float32", 1, drops_weights, unreadable)  # type: ignore[arg-type]
        return SimpleNamespace(sync=sync, actor=actor, rollouts=rollouts, loads=loads, engines=engines, restarts=restarts)

    return make


def test_a_version_is_pushed_once_with_the_actor_on_its_devices(sync: Any) -> None:
    made = sync("1")
    pushed = made.sync.push(3)
    assert (pushed.version, pushed.megabytes) == (3, 8 / 2**20)
    assert {"gather": 1.0, "load": 2.0}.items() <= pushed.phases.items() and pushed.phases.keys() == {"gather", "load", "verify"}
    assert (pushed.by_transport, pushed.transport_seconds) == ({"gloo": 3.0, "nccl": 1.0}, {"gloo": 0.5, "nccl": 0.25})
    assert made.loads == ["in", "out"] and made.actor.calls.count("send_weights") == 1
    assert made.sync.push(3) is None and made.loads == ["in", "out"]
    assert made.sync.push(4).version == 4 and made.actor.calls.count("export_plan") == 1


@pytest.mark.parametrize(("transport", "members"), [("auto", 4), ("shared_memory", 2)])
def test_ranks_that_hand_tensors_on_join_only_where_the_transport_is_chosen(
    sync: Any, monkeypatch: pytest.MonkeyPatch, transport: str, members: int
) -> None:
    """Ranks of other nodes could not map the owner's memory, and need not."""
    monkeypatch.setattr(f"{__name__}.PLAN", replace(PLAN, handing_on=(0, 1, 2)))
    made = sync("1", transport=transport)
    made.sync.push(3)
    assert [len(one.members) for one in made.actor.memberships] == [members]


def test_engines_that_drop_their_weights_get_every_version_again(sync: Any) -> None:
    """A validation, and a step without an update, leave the version as it was."""
    made = sync("1", drops_weights=True)
    for _ in range(2):
        assert made.sync.sender(3) is not None
        assert made.sync.push(3).version == 3
    assert made.actor.calls.count("send_weights") == 2 and made.rollouts.calls.count("set_version") == 2
    assert sync("1").sync.sender(3) is not None
    keeps = sync("1")
    keeps.sync.push(3)
    assert keeps.sync.sender(3) is None


def test_a_newcomer_gets_the_version_that_the_others_have_alone(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sync("1")
    monkeypatch.setattr(Cluster, "left", [0, 1])
    made.sync.push(3)
    made.restarts.newcomers = [1]
    made.engines.receivers.clear()
    made.rollouts.calls.clear()
    assert made.sync.push(3).version == 3
    assert made.engines.receivers == [("connect_weights", [1]), ("update_weights", [1]), ("weight_checksums", [1])]
    assert made.rollouts.calls == [], "the others generate on"
    made.restarts.newcomers = []
    assert made.sync.push(3) is None
    made.engines.receivers.clear()
    made.sync.push(4)
    assert made.engines.receivers[0] == ("connect_weights", [0, 1]), "all of them join one group again"


def test_engines_compute_their_checksums_beside_the_trainers(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, computing = sync("1"), []

    def all_ranks(cluster: Cluster, method: Any, *arguments: Any) -> list[Any]:
        if method.__name__ == "weight_checksums":
            computing.extend(made.engines.calls[-1:])
        return every(cluster, method, *arguments)

    every = Cluster.all
    monkeypatch.setattr(Cluster, "all", all_ranks)
    made.sync.push(3)
    assert computing == ["weight_checksums"]


def test_a_successor_of_the_only_engine_connects_anew(sync: Any) -> None:
    made = sync("1")
    made.sync.push(3)
    made.restarts.newcomers = [0]
    made.engines.receivers.clear()
    made.sync.push(4)
    assert [method for method, _ in made.engines.receivers] == ["connect_weights", "update_weights", "weight_checksums"]


def test_an_engines_first_updates_are_compared_wholly_and_later_ones_by_samples(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tensors each update compares one. A successor is new again."""
    monkeypatch.setattr(f"{__name__}.PLAN", ExportPlan(tuple(replace(PLAN.tensors[0], name=name) for name in "ab")))
    made = sync("1", "sampled")
    for version in range(1, 17):
        made.sync.push(version)
    assert made.engines.compared == [["a", "b"]] * 3 + [["a"], ["b"]] * 6 + [["a"]]
    made.restarts.newcomers = [0]
    made.sync.push(17)
    made.restarts.newcomers = []
    for version in (18, 19, 20):
        made.sync.push(version)
    assert made.engines.compared[16:] == [["a", "b"]] * 3 + [["a"]]


def test_tensors_that_engines_hold_otherwise_are_left_out(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("layers.0.mlp.experts.3.up_proj.weight", "layers.0.mlp.gate.weight", "norm.weight")
    monkeypatch.setattr(f"{__name__}.PLAN", ExportPlan(tuple(replace(PLAN.tensors[0], name=name) for name in names)))
    made = sync("1", unreadable=r"\.experts\.")
    made.sync.push(3)
    assert made.engines.compared == [list(names[1:])]


def test_an_engine_with_other_weights_is_noticed_before_anything_is_sampled(sync: Any) -> None:
    made = sync("2")
    with pytest.raises(
        RuntimeError, match=r"actor_infer\[0\] does not hold version 3 after its update: 1 of 1 compared tensors differ, among them a"
    ):
        made.sync.push(3)
    assert "set_version" not in made.rollouts.calls


def test_an_update_that_breaks_off_although_nobody_is_lost_is_a_failure(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sync("1")
    monkeypatch.setattr(module, "interrupt", lambda *_: None)

    def gathered(trainers: Any, engines: Any, poll: Any) -> list[Any]:
        engines.calls[0].value = Transferred("trainer rank 0 did not come")
        trainers.calls[0].value = Transferred()
        poll()
        return [[trainers.calls[0].value], {0: engines.calls[0].value}]

    monkeypatch.setattr(module, "gather", gathered)
    with pytest.raises(RuntimeError, match=r"^connect_weights failed: actor_infer\[0\]: trainer rank 0 did not come$"):
        made.sync.push(3)
    assert "set_version" not in made.rollouts.calls


@pytest.mark.parametrize("trainers_live", [True, False])
def test_a_transfer_that_another_roles_loss_left_in_flight_is_ended(
    sync: Any, monkeypatch: pytest.MonkeyPatch, trainers_live: bool
) -> None:
    made, told, waited = sync("1"), [], []
    monkeypatch.setattr(module, "interrupt", lambda rendezvous, epoch: told.append(epoch))
    made.sync.push(3)
    connects = made.engines.calls.count("connect_weights")

    def gathered(trainers: Any, engines: Any, poll: Any) -> list[Any]:
        for calls, end in ((engines, None), (trainers, None if trainers_live else "dead")):
            calls.done, calls.group, calls.phase = False, SimpleNamespace(end=end), "update_weights"
        silent = SimpleNamespace(done=False, rank=0)
        engines.calls = [silent]
        raise RankFailed("rollouts", 0, "update_weights", "its process died", retryable=True)

    whole = module.gather
    monkeypatch.setattr(module, "gather", gathered)
    with pytest.raises(RankFailed):
        made.sync.push(4)
    assert told == []
    now, given_up = [100.0], []
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    made.sync._engines.actors = [SimpleNamespace(give_up=SimpleNamespace(remote=given_up.append))]
    killed: list[int] = []
    made.sync._engines.group = SimpleNamespace(give_up=lambda engine, cause: killed.append(engine))

    def until_given_up(*in_flight: Any, poll: Any) -> None:
        waited.append(len(in_flight))
        for now[0] in (129.0, 131.0):
            assert given_up == []
            poll()
        assert killed == []
        now[0] = 136.0  # it is stopped, and did not hear of it
        poll()
        monkeypatch.setattr(Cluster, "lost", {0: "it hangs"})
        poll()  # the number may be its successor's by now
        assert killed == [0]

    monkeypatch.setattr(module, "gather", until_given_up)
    made.sync.end_transfer()
    assert told == [2] and waited == [1 + trainers_live]
    assert given_up == ["it hangs in update_weights: no answer for 30 s after the transfer had broken off"]
    made.sync.end_transfer()
    assert told == [2], "the next trainers have begun none"
    monkeypatch.setattr(module, "gather", whole)
    made.sync.push(4)
    assert made.engines.calls.count("connect_weights") == connects + 1, "its group has broken off"


@pytest.mark.parametrize("trainer_first", [False, True])
def test_whoever_waits_for_one_that_broke_off_is_told_at_once_and_does_not_count_as_a_cause(
    sync: Any, monkeypatch: pytest.MonkeyPatch, trainer_first: bool
) -> None:
    made, told = sync("1"), []
    made.sync._engines.left = [0, 1]
    made.actor.left = [0, 1]
    monkeypatch.setattr(module, "interrupt", lambda rendezvous, epoch: told.append(epoch))

    def gathered(trainers: Any, engines: Any, poll: Any) -> list[Any]:
        first, *later = reversed(engines.calls + trainers.calls) if trainer_first else engines.calls + trainers.calls
        poll()
        assert told == []
        first.value = Transferred("no memory")
        poll()
        assert told == [2], "the others still wait"
        for call in later:
            call.value = Transferred.broke_off(StaleEpoch("connect again"))
        later[1].value = Transferred.broke_off(TransferError("the connection broke"))
        poll()
        return [[call.value for call in trainers.calls], {call.rank: call.value for call in engines.calls}]

    monkeypatch.setattr(module, "gather", gathered)
    cause = r"actor_train rank 1: no memory; actor_infer\[1\]" if trainer_first else r"actor_infer\[0\]: no memory; actor_train rank 0"
    with pytest.raises(RuntimeError, match=rf"^connect_weights failed: {cause}: the connection broke$"):
        made.sync.push(3)
    assert told == [2], "once"


def test_an_engine_that_is_lost_in_an_update_is_left_out_and_the_update_repeated(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It falls out while the weights travel; whoever waits for it is told at once, and the others get all of them."""
    made = sync("1")
    engines, told = made.sync._engines, []
    engines.left = [0, 1]
    monkeypatch.setattr(module, "interrupt", lambda rendezvous, epoch: told.append(epoch))

    def gathered(trainers: Any, engines_calls: Any, poll: Any) -> list[Any]:
        poll()
        if engines.calls[-1] == "update_weights" and engines.left == [0, 1]:
            engines.left, engines.lost = [0], {1: "its process died"}
            engines_calls.calls[1].lost = True
            poll()
            poll()
            return [[Transferred("the connection broke")], {}]
        return [[Transferred()], {call.rank: Transferred() for call in engines_calls.calls}]

    monkeypatch.setattr(module, "gather", gathered)
    assert made.sync.push(3).version == 3
    assert engines.calls == ["connect_weights", "update_weights"] * 2 + ["weight_checksums"]
    assert told == [2], "once, and before the others connect again"
    assert [membership.epoch for membership in made.actor.memberships] == [1, 3]
    assert made.rollouts.calls.count("set_version") == 1


def test_the_loss_of_an_engine_that_has_answered_is_no_failure_of_one_that_read_from_it(sync: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By gloo a worker hands on what it has received. That it has died is known a moment after the other one cannot read it."""
    made = sync("1")
    engines, looks = made.sync._engines, []
    engines.left = [0, 1]
    monkeypatch.setattr(module, "interrupt", lambda *_: None)

    def lose(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            engines.left, engines.lost = [1], {0: "its process died"}

    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: float(len(looks)), sleep=lose))

    def gathered(trainers: Any, engines_calls: Any, poll: Any) -> list[Any]:
        for call in [*engines_calls.calls, *trainers.calls]:
            call.value = Transferred()
        if engines.calls.count("update_weights") == 1 and not engines.lost:
            engines_calls.calls[1].value = Transferred("cannot open the memory of engine 0")
        poll()
        return [[call.value for call in trainers.calls], {call.rank: call.value for call in engines_calls.calls}]

    monkeypatch.setattr(module, "gather", gathered)
    assert made.sync.push(3).version == 3
    assert engines.calls == ["connect_weights", "update_weights"] * 2 + ["weight_checksums"] and len(looks) == 3
