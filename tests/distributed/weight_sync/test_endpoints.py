"""What a training rank and an engine's worker hold: whole updates, and who has begun to load when one breaks off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from transfer_members import assert_equal, fresh

from roll_lite.distributed.strategy.base import TrainStrategy
from roll_lite.distributed.weight_sync.broadcast import GlooReceiver
from roll_lite.distributed.weight_sync.endpoints import WeightReceiver, WeightSender
from roll_lite.distributed.weight_sync.group import StaleEpoch, TransferError, interrupt, rendezvous_client
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, TransferPlan, by_bucket, plan_transfers
from roll_lite.distributed.weight_sync.update import checksum, require_equal

OWNERS = {"a": 0, "b": 2, "c": 2, "d": 0}
BUCKETS = {"a": 0, "b": 1, "c": 1, "d": 2}


class Trainer:
    """One rank of three, of which the second owns nothing."""

    def __init__(self, rank: int, state: dict[str, torch.Tensor]) -> None:
        self.rank, self.state, self.gathered = rank, state, []

    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        return ExportPlan(tuple(ExportedTensor(n, tuple(t.shape), t.dtype, OWNERS[n], BUCKETS[n]) for n, t in self.state.items()))

    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, torch.Tensor] | None:
        self.gathered.append(tensors[0].bucket)
        owned = {t.name: self.state[t.name] for t in tensors if t.owner == self.rank}
        return owned or None


class Worker:
    """An engine's worker whose model is a dictionary."""

    def __init__(self) -> None:
        self.receiver = WeightReceiver()
        self.model: dict[str, torch.Tensor] = {}
        self.begun = 0

    def begin(self, again: bool) -> None:
        self.begun += 1
        self.again = again
        self.model = {}

    def update(self, plan: TransferPlan) -> None:
        buckets = [[route.plain() for route in routes] for routes in by_bucket(plan.routes)]
        for routes, following in zip(buckets, [*buckets[1:], []], strict=True):
            self.receiver.load(routes, self.begin, self.model_update, following)
        self.receiver.finish(lambda: None)

    def model_update(self, arrived: Any) -> None:
        self.model.update(arrived)


class Run:
    """A trainer of three ranks and its engines, each a worker, on threads."""

    def __init__(self, timeout_s: float = 10.0) -> None:
        self.state = {name: torch.randn(3, 5) for name in OWNERS}
        self.trainers = [Trainer(rank, self.state) for rank in range(3)]
        self.senders = [WeightSender(cast(TrainStrategy, trainer), trainer.rank) for trainer in self.trainers]
        self.exports = [sender.export_plan(1 << 20) for sender in self.senders]
        self.port = self.senders[0].host("127.0.0.1", timeout_s)
        self.timeout_s = timeout_s
        self.pool = ThreadPoolExecutor(8)

    def connect(
        self, epoch: int, engines: Mapping[int, Worker], dtype: torch.dtype = torch.float32, transport: str = "gloo"
    ) -> TransferPlan:
        plan = plan_transfers(self.exports[0], dict.fromkeys(engines, 1), dtype)
        membership = plan.membership(epoch, transport, "127.0.0.1", self.port, self.timeout_s)
        joining = [self.pool.submit(sender.connect, plan, membership) for sender in self.senders]
        joining += [
            self.pool.submit(worker.receiver.connect, membership.plain(), plan.first_member(number)) for number, worker in engines.items()
        ]
        for future in joining:
            future.result(20)
        return plan

    def push(self, plan: TransferPlan, engines: Mapping[int, Worker]) -> None:
        new = fresh(self.state)
        self.state.update(new)
        receiving = [self.pool.submit(worker.update, plan) for worker in engines.values()]
        for future in [*(self.pool.submit(sender.send) for sender in self.senders), *receiving]:
            future.result(20)
        for worker in engines.values():
            assert_equal(worker.model, new)


def test_an_engine_takes_the_place_of_another_between_two_updates() -> None:
    run = Run()
    engines = {0: Worker(), 1: Worker()}
    plan = run.connect(1, engines)
    for _ in range(2):
        run.push(plan, engines)
    assert all(trainer.gathered == [0, 1, 2] * 2 for trainer in run.trainers)  # a collective: also the rank that owns nothing
    gone = engines.pop(1)
    engines[2] = Worker()
    again = run.connect(2, engines)
    run.push(again, engines)
    assert engines[0].begun == 3 and engines[2].begun == 1
    with pytest.raises(StaleEpoch, match="engine 1 worker 0 belongs to epoch 1"):
        gone.update(plan)
    assert gone.begun == 2 and not gone.receiver.touched  # its weights are whole


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_the_next_bucket_comes_while_one_is_loaded_and_not_the_one_after(transport: str) -> None:
    run, worker = Run(), Worker()
    plan = run.connect(1, {0: worker}, transport=transport)
    first, second, third = ([route.plain() for route in routes] for routes in by_bucket(plan.routes))
    sending = [run.pool.submit(sender.send) for sender in run.senders]
    loaded: list[int] = []

    def load(arrived: Any) -> None:
        worker.model.update(arrived)
        loaded.append(len(worker.model))
        sending[2].result(20)  # it owns the second bucket alone
        assert not sending[0].done() or len(loaded) > 1

    worker.receiver.load(first, worker.begin, load, second)
    worker.receiver.load(second, worker.begin, load, third)
    worker.receiver.load(third, worker.begin, load)
    sending[0].result(20)
    assert loaded == [1, 3, 4]
    assert_equal(worker.model, run.state)


def test_an_engine_that_leaves_with_a_bucket_on_its_way_is_not_kept() -> None:
    """Nobody sends it; the time-out is longer than the test may take."""
    run, worker = Run(timeout_s=100.0), Worker()
    plan = run.connect(1, {0: worker})
    half = worker.receiver._transport
    assert isinstance(half, GlooReceiver)
    half.expect(plan.routes[0])
    worker.receiver.leave()
    with pytest.raises(TransferError, match="engine 0 worker 0 has left the transfer group"):
        half._coming[0][1].result(20)


def test_an_update_that_breaks_off_is_known_to_have_begun() -> None:
    run = Run(timeout_s=0.5)
    engines = {0: Worker()}
    plan = run.connect(1, engines)
    first, second, _ = by_bucket(plan.routes)
    worker = engines[0]
    sending = run.pool.submit(run.senders[0]._transport.send, first[0], run.state)  # type: ignore[union-attr]
    worker.receiver.load([route.plain() for route in first], worker.begin, worker.model_update)
    sending.result(20)
    assert worker.receiver.touched and worker.begun == 1
    said: list[bool] = []

    def gone(mine: bool) -> bool:
        said.append(mine)
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(TransferError, match="trainer rank 2 did not take part"):
        worker.receiver.load([route.plain() for route in second], worker.begin, worker.model_update, all_workers_ok=gone)
    assert worker.receiver.touched and said == [False]


def test_workers_of_an_engine_load_a_bucket_together_or_not_at_all() -> None:
    """Where another one has not got its part, which is the cause, this one's weights stay."""
    run, worker = Run(), Worker()
    first, *_ = by_bucket(run.connect(1, {0: worker}).routes)
    sending = run.pool.submit(run.senders[0]._transport.send, first[0], run.state)  # type: ignore[union-attr]
    with pytest.raises(StaleEpoch, match="another worker of engine 0 worker 0's engine has not got its part"):
        worker.receiver.load([route.plain() for route in first], worker.begin, worker.model_update, all_workers_ok=lambda mine: False)
    sending.result(20)
    assert not worker.receiver.touched and worker.begun == 0 and worker.model == {}


def test_a_worker_that_has_not_joined_says_so() -> None:
    worker = Worker()
    with pytest.raises(RuntimeError, match="connect_weights comes first"):
        worker.receiver.load([], worker.begin, worker.model_update)
    assert not worker.receiver.touched


def test_what_engines_of_fewer_bits_get_is_cast_before_it_is_sent_and_compared() -> None:
    """Equal to what an engine makes of the whole tensor itself, in half the bytes."""
    run = Run()
    worker = Worker()
    plan = run.connect(1, {0: worker}, torch.bfloat16)
    assert plan.nbytes == plan_transfers(run.exports[0], {0: 1}).nbytes // 2
    sending = [run.pool.submit(sender.send) for sender in run.senders]
    worker.update(plan)
    for future in sending:
        future.result(20)
    assert_equal(worker.model, {name: tensor.bfloat16() for name, tensor in run.state.items()})
    sent = {name: one for sender in run.senders for name, one in sender.checksums(list(run.state)).items()}
    require_equal(sent, {name: checksum(tensor) for name, tensor in worker.model.items()}, engine="actor_infer[0]", version=1)
    with pytest.raises(RuntimeError, match="4 of 4 compared tensors differ"):
        require_equal(sent, {name: checksum(tensor) for name, tensor in run.state.items()}, engine="actor_infer[0]", version=1)


def test_only_buckets_of_which_something_is_compared_are_gathered() -> None:
    run = Run()
    run.connect(1, {0: Worker()})
    found = [sender.checksums(["c"]) for sender in run.senders]
    assert found == [{}, {}, {"c": checksum(run.state["c"])}]
    assert [trainer.gathered for trainer in run.trainers] == [[1]] * 3


def test_checksums_of_all_ranks_are_those_of_the_model() -> None:
    run = Run()
    run.connect(1, {0: Worker()})
    sent: dict[str, str] = {}
    for sender in run.senders:
        sent |= sender.checksums(list(run.state))
    held = {name: checksum(tensor) for name, tensor in run.state.items()}
    assert sent == held
    require_equal(sent, held, engine="actor_infer[1]", version=3)
    with pytest.raises(
        RuntimeError, match=r"actor_infer\[1\] does not hold version 3 after its update: 1 of 4 compared tensors differ, among them b"
    ):
        require_equal(sent, held | {"b": "other"}, engine="actor_infer[1]", version=3)


@pytest.mark.usefixtures("machines")
def test_the_loss_of_an_engine_in_an_update_leaves_nobody_waiting_and_the_others_get_all_of_the_next_one() -> None:
    """One engine has taken the first bucket and is gone; the time-out is longer than the test may take."""
    run = Run(timeout_s=100.0)
    engines = {0: Worker(), 1: Worker(), 2: Worker()}
    plan = run.connect(1, engines)
    run.push(plan, engines)
    lost = engines.pop(1)
    first, *_ = by_bucket(plan.routes)
    updating = [run.pool.submit(worker.update, plan) for worker in engines.values()]
    sending = [run.pool.submit(sender.send) for sender in run.senders]
    lost.receiver.load([route.plain() for route in first], lost.begin, lost.model_update)
    assert not any(future.done() for future in (*updating, *sending[::2]))
    interrupt(rendezvous_client("127.0.0.1", run.port), 2)
    for future in (*updating, *sending[::2]):
        with pytest.raises(TransferError):  # of the epoch or, where a bucket was under way already, of the broken connection
            future.result(20)
    sending[1].result(20)  # owns nothing
    assert all(trainer.gathered == [0, 1, 2] * 2 for trainer in run.trainers), "a collective, to its end"
    assert all(worker.receiver.touched for worker in engines.values())
    run.push(run.connect(3, engines), engines)
    assert all(worker.again and not worker.receiver.touched for worker in engines.values())
    run.push(run.connect(4, engines), engines)
    assert not any(worker.again for worker in engines.values())


def test_an_engine_that_is_lost_before_it_joins_leaves_nobody_waiting() -> None:
    run = Run(timeout_s=100.0)
    plan = plan_transfers(run.exports[0], {0: 1, 1: 1})
    membership = plan.membership(1, "gloo", "127.0.0.1", run.port, run.timeout_s)
    worker = Worker()
    joining = [run.pool.submit(sender.connect, plan, membership) for sender in (run.senders[0], run.senders[2])]
    joining.append(run.pool.submit(worker.receiver.connect, membership.plain(), plan.first_member(0)))
    interrupt(rendezvous_client("127.0.0.1", run.port), 2)
    for future in joining:
        with pytest.raises(StaleEpoch):
            future.result(20)
    run.push(run.connect(3, {0: worker}), {0: worker})


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("transport", ["gloo", "auto"])
def test_one_that_fails_alone_keeps_nobody_waiting_for_it(transport: str) -> None:
    """Workers of an engine answer only when all of them have: nobody but the one that fails can tell the others."""
    run = Run(timeout_s=100.0)
    engines = {0: Worker(), 1: Worker()}
    run.push(plan := run.connect(1, engines, transport=transport), engines)
    engines[1].model_update = lambda arrived: [][0]  # type: ignore[method-assign]
    updating = [run.pool.submit(worker.update, plan) for worker in engines.values()]
    sending = [run.pool.submit(sender.send) for sender in run.senders]
    with pytest.raises(IndexError, match="list index out of range"):
        updating[1].result(20)
    for future in (updating[0], sending[0]):  # the second bucket may have come to all: it was on its way
        with pytest.raises(StaleEpoch, match=r"engine 1 worker 0 has broken off \(IndexError: list index out of range\); connect again"):
            future.result(20)
    del engines[1].model_update
    run.push(run.connect(2, engines, transport=transport), engines)
