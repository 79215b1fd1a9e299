"""Which rows are computed when, and by which pass their columns join the batch. Models and the rollout service are stand-ins."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from roll_lite.data.proto import DataProto
from roll_lite.distributed.dataflow import Batch, Block
from roll_lite.observability.timers import StepTimers
from roll_lite.pipeline import clusters, early_passes
from roll_lite.pipeline.early_passes import EarlyPass, EarlyPasses
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.workers.rollout import RolloutWorker

SAMPLES = 2
"""Of each group."""


@dataclass(eq=False)
class Answer:
    value: Any
    ready: bool = True
    error: Exception | None = None
    settled: bool = False

    def answer(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value if self.ready else None

    def result(self) -> Any:
        return self.value

    def settle(self) -> None:
        self.settled = True


def rows_of(groups: Sequence[int]) -> DataProto:
    """As the rollout service numbers them: from 0 on."""
    names = [(group, index) for group in groups for index in range(SAMPLES)]
    group, index = torch.tensor(names, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return DataProto({"sample": torch.arange(len(names)), "group": group, "index": index})


def block_of(rows: DataProto, *keys: str) -> Block:
    count = len(rows)
    return Block(("a reference",), keys, rows.tensor("sample").numpy(), np.zeros(count, np.int32), np.arange(count, dtype=np.int32))  # type: ignore[arg-type]


@dataclass(eq=False)
class StandIn:
    """A model that remembers which samples it was asked for, by group and place."""

    column: str
    passes: list[list[tuple[int, int]]] = field(default_factory=list)
    running: list[Answer] = field(default_factory=list)
    fast: bool = True
    offloads: bool = False
    devices: tuple[int, ...] = (1,)
    ranks: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(name="reference"))

    def start_forward(self, batch: Batch, columns: Sequence[str]) -> Answer:
        assert list(columns) == [self.column]
        self.passes.append(early_passes._names(batch.rows))
        # What other ranks than the heads return is left out by the cluster; a data rank without rows returns a block without any.
        self.running.append(Answer([block_of(batch.rows, self.column)], self.fast))
        return self.running[-1]

    @property
    def computed(self) -> list[tuple[int, int]]:
        return sorted(name for names in self.passes for name in names)


@dataclass(eq=False)
class Service:
    """The rollout service: so much is finished."""

    done: list[int] = field(default_factory=list)
    asked: list[Answer] = field(default_factory=list)

    def start_one(self, method: Any, known: Collection[int], least: int) -> Answer:
        assert method is RolloutWorker.finished
        groups = [group for group in self.done if group not in known]
        rows = rows_of(groups if len(groups) >= least else [])
        self.asked.append(Answer((rows, block_of(rows, "input_ids"))))
        return self.asked[-1]


@dataclass
class House:
    models: list[StandIn]
    counted: list[int] = field(default_factory=list)
    service: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        self.early = EarlyPasses([(model, [model.column]) for model in self.models], 8, SimpleNamespace(early=self.counted.append))  # type: ignore[arg-type, misc]

    def finish(self, *groups: int) -> None:
        """They end, and two seconds pass."""
        self.service.done += groups
        for _ in range(2):
            self.early.poll(self.service)  # type: ignore[arg-type]

    def complete(self, groups: Sequence[int]) -> Batch:
        """The batch is there, and what is left of its columns is computed."""
        rows = rows_of(groups)
        batch = Batch(rows, [block_of(rows, "input_ids")])
        pipeline = SimpleNamespace(early=self.early, timers=StepTimers(), wanted=lambda: [(model, [model.column]) for model in self.models])
        RLVRPipeline.compute_log_probs(pipeline, batch)  # type: ignore[arg-type]
        return batch


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    for module in (clusters, early_passes):
        monkeypatch.setattr(module, "gather", lambda *pendings: [pending.result() for pending in pendings])
    monkeypatch.setattr(clusters, "first_done", lambda pendings: pendings)
    return House([StandIn("ref_log_probs"), StandIn("old_log_probs")])


def names(*groups: int) -> list[tuple[int, int, int]]:
    return [(group, index, 0) for group in groups for index in range(SAMPLES)]


def test_finished_groups_are_computed_early_the_rest_later_and_each_row_once(house: House) -> None:
    house.finish(11)
    assert all(not model.passes for model in house.models), "less than a quarter of eight groups"
    house.finish(13)
    house.finish(10, 16, 12)
    batch = house.complete(range(10, 18))
    for model in house.models:
        assert model.passes == [names(11, 13), names(10, 16, 12), names(14, 15, 17)]
        assert model.column in batch
    assert house.counted == [10]
    places = {name: row for row, name in enumerate(names(*range(10, 18)))}
    held, row = batch._where["old_log_probs"]
    own = [held[places[name]] for name in ((13, 1, 0), (12, 0, 0), (17, 1, 0))]
    assert len(set(own)) == 3 and row[[places[name] for name in ((13, 1, 0), (12, 0, 0), (17, 1, 0))]].tolist() == [3, 4, 5]


def test_rows_of_one_sample_count_once(house: House) -> None:
    names = torch.tensor([[1, 0, 0], [1, 0, 1], [1, 1, 0], [2, 0, 0]])
    columns = dict(zip(("group", "index", "branch"), names.unbind(1), strict=True))
    rows = DataProto({"sample": torch.arange(4), **columns})
    house.early._parts.append(EarlyPass(rows, []))
    house.early.join(Batch(rows))
    assert house.counted == [3]


def test_one_pass_at_a_time(house: House) -> None:
    slow = house.models[1]
    slow.fast = False
    house.finish(1, 2)
    house.finish(3, 4)
    assert [len(model.passes) for model in house.models] == [1, 1]
    slow.running[0].ready = True
    house.finish(5)
    assert house.models[0].passes == [names(1, 2), names(3, 4, 5)]


def test_a_pass_that_is_under_way_when_the_batch_is_there_is_waited_for_and_used(house: House) -> None:
    house.models[0].fast = False
    house.finish(1, 2, 3)
    house.complete([1, 2, 3, 4])
    assert house.models[0].passes == [names(1, 2, 3), names(4)]


def test_nothing_is_left(house: House) -> None:
    house.finish(1, 2, 3, 4)
    assert "old_log_probs" in house.complete([1, 2, 3, 4])
    assert house.models[0].passes == [names(1, 2, 3, 4)] and house.counted == [8]


def test_what_does_not_end_up_in_the_batch_is_not_used(house: House) -> None:
    house.finish(1, 2, 3)
    batch = house.complete([2, 5])
    assert house.models[0].passes == [names(1, 2, 3), names(5)]
    assert house.counted == [2] and "ref_log_probs" in batch


def test_a_batch_that_trains_nothing_leaves_nothing_behind(house: House) -> None:
    house.finish(1, 2)
    house.early.poll(house.service)  # type: ignore[arg-type]
    house.early.forget()
    assert all(answer.settled for answer in (*house.models[0].running, house.service.asked[-1]))
    house.service.done = []
    house.finish(7, 8)
    house.complete([7, 8, 9])
    assert house.models[0].passes == [names(1, 2), names(7, 8), names(9)] and house.counted == [4]


def test_a_failing_rank_ends_the_wait_for_the_batch(house: House) -> None:
    house.finish(1, 2)
    house.models[0].running[0].error = RuntimeError("rank 0 failed")
    with pytest.raises(RuntimeError, match="rank 0"):
        house.early.poll(house.service)  # type: ignore[arg-type]


def test_where_it_is_not_wanted_all_is_as_always(house: House) -> None:
    house.early = EarlyPasses([], 8, None)  # type: ignore[arg-type]
    house.finish(1, 2, 3)
    house.complete([1, 2, 3])
    assert house.models[0].passes == [names(1, 2, 3)] and house.service.asked == []


def test_passes_of_dead_ranks_are_forgotten(house: House) -> None:
    house.models[0].fast = False
    house.finish(1, 2)
    house.early.forget()
    assert house.models[0].running[0].settled
    house.complete([1, 2, 3])
    assert house.counted == [0] and house.models[0].passes == [names(1, 2), names(1, 2, 3)]
