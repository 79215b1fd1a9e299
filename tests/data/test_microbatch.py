"""Plans of micro-batches, padding, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.data import microbatch
from roll_lite.data.microbatch import MicroBatchPlan, Multiples, PaddedBudget, RowsAtATime, TokenBudget, padded
from roll_lite.data.minibatches import balanced_partition
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged

properties = settings(deadline=None, max_examples=60)


@dataclass(frozen=True)
class Given:
    """A planner that has its parts from the test."""

    parts: list[list[int]]

    def cut(self, lengths: torch.Tensor, parts: int = 1) -> list[np.ndarray]:
        return [np.array(part, dtype=np.int64) for part in self.parts]


def tokens(lengths: list[int]) -> DataProto:
    """Row i holds 100 i, 100 i + 1, ..."""
    return DataProto({"input_ids": Ragged.from_rows([torch.arange(n) + 100 * i for i, n in enumerate(lengths)], torch.int64)})


# ---------------------------------------------------------------- plans


def test_a_plan_by_hand() -> None:
    """Seven rows, three at a time: 3 + 3 + 1. Another rank has four micro-batches, stages take turns in twos: four, one of them idle."""
    plan = MicroBatchPlan.of(torch.tensor([9, 4, 12, 2, 7, 5, 3]), RowsAtATime(3), Multiples(tokens=4, count=2), agree=lambda count: 4)
    assert [part.tolist() for part in plan.parts] == [[0, 1, 2], [3, 4, 5], [6]]
    assert (plan.count, plan.rows, plan.tokens_divisor) == (4, 7, 4)
    shapes = [tuple(padded(rows).columns["input_ids"].shape) for rows in plan.cut(tokens([9, 4, 12, 2, 7, 5, 3]))]
    assert shapes == [(3, 12), (3, 7), (1, 3), (0, 2)]


@pytest.mark.parametrize(
    ("rows", "others", "multiple", "count"), [(0, 0, 1, 1), (0, 3, 1, 3), (5, 3, 1, 3), (5, 3, 4, 4), (8, 4, 4, 4), (9, 5, 4, 8)]
)
def test_the_number_of_micro_batches(rows: int, others: int, multiple: int, count: int) -> None:
    """At least one, as many as any rank has, rounded up to what the stages need."""
    lengths = torch.full((rows,), 3)
    plan = MicroBatchPlan.of(lengths, RowsAtATime(2), Multiples(count=multiple), agree=lambda own: max(own, others))
    assert plan.count == count == len(plan.cut(tokens(lengths.tolist())))


def test_micro_batches_without_rows_have_every_column() -> None:
    """Of the same dtypes, so that a loss can run on them."""
    batch = tokens([3, 5]).with_columns(advantages=Ragged.from_rows([torch.ones(2), torch.ones(4)]), reward=torch.tensor([1.0, 2.0]))
    first, idle = map(padded, MicroBatchPlan.of(batch.lengths, RowsAtATime(2), agree=lambda count: 2).cut(batch))
    assert {name: (column.dtype, column.shape[0]) for name, column in idle.columns.items()} == {
        name: (column.dtype, 0) for name, column in first.columns.items()
    }
    assert idle.mask.shape == (0, 1)


def test_a_token_budget_by_hand() -> None:
    """27 tokens at 12 a time are three micro-batches; the longest row goes to each of them first, then the next to the lightest. A row
    that is longer than the budget goes alone."""
    lengths = torch.tensor([2, 9, 4, 3, 4, 5])
    assert [part.tolist() for part in TokenBudget(12).cut(lengths)] == [[1], [5, 3, 0], [2, 4]]
    assert [part.tolist() for part in TokenBudget(4).cut(torch.tensor([9, 2, 2, 9]))] == [[0], [3], [1, 2]]
    assert [part.tolist() for part in TokenBudget(100, rows=2).cut(torch.tensor([5, 1, 3, 5]))] == [[0, 2], [3, 1]]
    assert [part.tolist() for part in TokenBudget(100, rows=2).cut(torch.tensor([5, 4, 1, 1]))] == [[0, 3], [1, 2]]
    assert TokenBudget(12).cut(torch.empty(0, dtype=torch.int64)) == []


def test_rows_of_which_no_two_fit_are_not_tried_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more micro-batch at a time would be a partition for each of a thousand rows."""
    tried: list[int] = []

    def partition(costs: Any, parts: int, most: int | None) -> Any:
        tried.append(parts)
        return balanced_partition(costs, parts, most)

    monkeypatch.setattr(microbatch, "balanced_partition", partition)
    assert len(TokenBudget(16).cut(torch.full((1000,), 9))) == 1000 and tried == [1000]


def test_a_token_budget_spreads_over_what_other_ranks_run_anyway() -> None:
    plan = MicroBatchPlan.of(torch.tensor([4, 4, 4, 4]), TokenBudget(16), agree=lambda own: 3)
    assert [len(part) for part in plan.parts] == [2, 1, 1] and plan.count == 3


def test_rows_are_limited_without_further_parts() -> None:
    """Seven rows, two at a time, are four micro-batches, however unlike their lengths are."""
    cut = TokenBudget(1000, rows=2).cut(torch.tensor([900, 1, 1, 1, 1, 1, 1]))
    assert sorted(map(len, cut)) == [1, 2, 2, 2]


def test_where_padding_counts_it_fits_too() -> None:
    cut = TokenBudget(20, with_padding=True).cut(torch.tensor([10, 2, 2, 2, 2, 2]))
    assert all(len(part) * (10 if 0 in part.tolist() else 2) <= 20 for part in cut)
    assert len(TokenBudget(20).cut(torch.tensor([10, 2, 2, 2, 2, 2]))) == 1


def test_rows_of_like_lengths_are_padded_together() -> None:
    """9 + 8, padded to 2 x 9, leave no room for a third row of 20 tokens; 3, 2 and 2 take 9; 25 is more than all."""
    lengths = torch.tensor([2, 9, 25, 3, 8, 2])
    assert [part.tolist() for part in PaddedBudget(20).cut(lengths)] == [[2], [1, 4], [3, 0, 5]]
    assert [part.tolist() for part in PaddedBudget(18, rows=2).cut(lengths)] == [[2], [1, 4], [3, 0], [5]]
    assert [part.tolist() for part in PaddedBudget(17).cut(lengths)] == [[2], [1], [4, 3], [0, 5]]
    assert PaddedBudget(20).cut(torch.empty(0, dtype=torch.int64)) == []


def test_costs_decide_what_goes_together() -> None:
    """By tokens 6 + 2 and 4 + 4 are equal; where a row costs its square, the last one goes where 32 are instead of to the 36."""
    lengths = torch.tensor([6, 4, 4, 2])
    assert [part.tolist() for part in TokenBudget(10).cut(lengths)] == [[0, 3], [1, 2]]
    assert [part.tolist() for part in TokenBudget(10, attention_parity_tokens=1e-6).cut(lengths)] == [[0], [1, 2, 3]]


@properties
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120), st.none() | st.integers(1, 6), st.integers(1, 9))
def test_a_token_budget_holds(lengths: list[int], tokens: int, rows: int | None, parts: int) -> None:
    """And takes no more micro-batches than one row each; a second look with as many parts as it found changes nothing."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    planner = TokenBudget(tokens, rows)
    cut = planner.cut(sizes, parts)
    assert sorted(row for part in cut for row in part.tolist()) == list(range(len(lengths)))
    for part in cut:
        taken = sizes[part]
        assert len(part) == 1 or (int(taken.sum()) <= tokens and (rows is None or len(part) <= rows))
        assert taken.tolist() == sorted(taken.tolist(), reverse=True)
    assert [part.tolist() for part in planner.cut(sizes, len(cut))] == [part.tolist() for part in cut]


def test_plans_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="needs at least one"):
        RowsAtATime(0)
    for parts in ([[0]], [[0, 1], [1]], [[0, 2]]):
        with pytest.raises(AssertionError, match="does not cut 2 rows"):
            MicroBatchPlan.of(torch.tensor([3, 4]), Given(parts))
    plan = MicroBatchPlan.of(torch.tensor([3, 4]), RowsAtATime(1))
    with pytest.raises(ValueError, match="a plan for 2 rows was given a batch of 3"):
        plan.cut(tokens([3, 4, 5]))
    with pytest.raises(ValueError, match="1 outputs for a plan of 2 micro-batches"):
        plan.collect_transitions([torch.zeros(1, 2)], tokens([3, 4]))
    with pytest.raises(ValueError, match="3 outputs for a plan of 2 micro-batches"):
        plan.collect_rows([torch.zeros(1)] * 3)


# ---------------------------------------------------------------- padding


def test_golden_mask() -> None:
    """`<bos> a b | c d <eos>`, from the design: the shifted mask is 0 0 1 1 1."""
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows([torch.tensor([1, 5, 6, 7, 8, 2])]),
            "response_mask": Ragged.from_rows([torch.tensor([0, 0, 0, 1, 1, 1]).bool()]),
        }
    )
    micro = padded(batch)
    assert micro.mask.int().tolist() == [[0, 0, 1, 1, 1]]


def test_padding_by_hand() -> None:
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows([torch.tensor([1, 5, 2]), torch.tensor([1, 6, 7, 8, 2]), torch.tensor([1, 9])]),
            "response_mask": Ragged.from_rows(
                [torch.tensor([0, 0, 1]).bool(), torch.tensor([0, 0, 1, 1, 1]).bool(), torch.tensor([0, 1]).bool()]
            ),
            "values": Ragged.from_rows([torch.tensor([0.5, 1.5]), torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([9.0])]),
            "score": torch.tensor([1.0, 2.0, 3.0]),
            "domain": object_column(["a", "b", "c"]),
        }
    )
    first, last = map(padded, MicroBatchPlan.of(batch.lengths, RowsAtATime(2)).cut(batch))
    assert first.columns["input_ids"].tolist() == [[1, 5, 2, 0, 0], [1, 6, 7, 8, 2]]
    assert first.columns["values"].tolist() == [[0.5, 1.5, 0, 0], [1, 2, 3, 4]]
    assert first.mask.int().tolist() == [[0, 1, 0, 0], [0, 1, 1, 1]]
    assert first.columns["score"].tolist() == [1.0, 2.0]
    assert "domain" not in first.columns
    assert last.columns["input_ids"].tolist() == [[1, 9]] and last.mask.int().tolist() == [[1]]


def test_without_a_response_mask_every_real_transition_counts() -> None:
    assert padded(tokens([2, 4])).mask.int().tolist() == [[1, 0, 0], [1, 1, 1]]


@properties
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5), st.integers(0, 3), st.randoms(use_true_random=False))
def test_outputs_are_collected_in_the_order_of_the_batch(lengths: list[int], size: int, idle: int, random: object) -> None:
    batch = tokens(lengths)
    shuffled = list(range(len(lengths)))
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    given_parts = Given([shuffled[start : start + size] for start in range(0, len(lengths), size)])
    for planner in (RowsAtATime(size), given_parts, TokenBudget(9 * size, rows=size), PaddedBudget(9 * size, rows=size)):
        plan = MicroBatchPlan.of(batch.lengths, planner, agree=lambda count: count + idle)
        micros = [padded(rows) for rows in plan.cut(batch)]
        assert all(micro.mask.shape == micro.columns["input_ids"][:, 1:].shape for micro in micros)
        column = plan.collect_transitions([micro.columns["input_ids"][:, 1:].double().requires_grad_() for micro in micros], batch)
        assert [row.tolist() for row in column.rows()] == [[float(100 * i + t) for t in range(1, n)] for i, n in enumerate(lengths)]
        assert column.dtype == torch.float32 and not column.values.requires_grad
        ends = [of[:, 0].double() if len(of) else torch.empty(0) for of in (micro.columns["input_ids"] for micro in micros)]
        assert plan.collect_rows(ends).tolist() == [100.0 * i for i in range(len(lengths))]


def test_vectors_are_padded_each_with_its_own() -> None:
    """kept_ids: 0 would be a token."""
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows([torch.tensor([1, 5, 2]), torch.tensor([1, 6])]),
            "kept_ids": Ragged.from_rows([torch.tensor([[5, 7], [2, -1]]).int(), torch.tensor([[6, 0]]).int()]),
            "ref_distribution": Ragged.from_rows([torch.full((2, 4), -1.5), torch.full((1, 4), -2.5)]),
        }
    )
    micro = padded(batch)
    assert micro.columns["kept_ids"].tolist() == [[[5, 7], [2, -1]], [[6, 0], [-1, -1]]]
    assert micro.columns["ref_distribution"][1].tolist() == [[-2.5] * 4, [0.0] * 4]
    plan = MicroBatchPlan.of(batch.lengths, RowsAtATime(1))
    collected = plan.collect_transitions([padded(rows).columns["ref_distribution"] for rows in plan.cut(batch)], batch)
    assert collected.equals(batch.ragged("ref_distribution"))
    nothing = padded(DataProto({"input_ids": Ragged.from_rows([], torch.int64), "ref_distribution": Ragged.from_rows([])}))
    assert nothing.columns["ref_distribution"].shape == (0, 1, 1), "a vector per transition, of any length"
