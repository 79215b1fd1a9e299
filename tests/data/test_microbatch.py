"""Padding into micro-batches and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.data.microbatch import MicroBatch, collect_transitions, micro_batches
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged

properties = settings(deadline=None, max_examples=60)


def test_golden_mask() -> None:
    """`<bos> a b | c d <eos>`, from the design: the shifted mask is 0 0 1 1 1."""
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows([torch.tensor([1, 5, 6, 7, 8, 2])]),
            "response_mask": Ragged.from_rows([torch.tensor([0, 0, 0, 1, 1, 1]).bool()]),
        }
    )
    [(rows, micro)] = micro_batches(batch, 4)
    assert rows.tolist() == [0]
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
    (rows, first), (last_rows, last) = micro_batches(batch, 2, pad_id=99, pad_multiple=4)
    assert rows.tolist() == [0, 1] and last_rows.tolist() == [2]
    assert first.columns["input_ids"].tolist() == [[1, 5, 2, 99, 99, 99, 99, 99], [1, 6, 7, 8, 2, 99, 99, 99]]
    assert first.columns["values"].tolist() == [[0.5, 1.5, 0, 0, 0, 0, 0], [1, 2, 3, 4, 0, 0, 0]]
    assert first.mask.int().tolist() == [[0, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 0, 0, 0]]
    assert first.columns["score"].tolist() == [1.0, 2.0]
    assert "domain" not in first.columns
    assert last.columns["input_ids"].tolist() == [[1, 9, 99, 99]] and last.mask.int().tolist() == [[1, 0, 0]]


def test_without_a_response_mask_every_real_transition_counts() -> None:
    [(_, micro)] = micro_batches(DataProto({"input_ids": Ragged.from_rows([torch.arange(2), torch.arange(4)])}), 2, pad_multiple=5)
    assert micro.mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 1, 0]]


@properties
@given(st.lists(st.integers(1, 9), max_size=12), st.integers(1, 5), st.integers(1, 4))
def test_outputs_are_collected_in_row_order(lengths: list[int], size: int, multiple: int) -> None:
    batch = DataProto({"input_ids": Ragged.from_rows([torch.arange(n) + 100 * i for i, n in enumerate(lengths)], torch.int64)})
    cut = micro_batches(batch, size, pad_multiple=multiple)
    assert all(micro.columns["input_ids"].shape[1] % multiple == 0 for _, micro in cut)
    assert all(micro.mask.shape == micro.columns["input_ids"][:, 1:].shape for _, micro in cut)

    def outputs(parts: list[tuple[object, MicroBatch]]) -> list[torch.Tensor]:
        return [micro.columns["input_ids"][:, 1:].double().requires_grad_() for _, micro in parts]

    expected = [[float(100 * i + t) for t in range(1, n)] for i, n in enumerate(lengths)]
    for order in (cut, cut[::-1]):
        column = collect_transitions(outputs(order), order, batch)
        assert [row.tolist() for row in column.rows()] == expected
        assert column.dtype == torch.float32 and not column.values.requires_grad


def test_missing_outputs_are_noticed() -> None:
    batch = DataProto({"input_ids": Ragged.from_rows([torch.arange(3), torch.arange(4)])})
    cut = micro_batches(batch, 1)
    outputs = [micro.mask.float() for _, micro in cut]
    with pytest.raises(ValueError, match="do not make up the 2 rows"):
        collect_transitions(outputs[:1], cut[:1], batch)
    with pytest.raises(ValueError, match="do not make up the 2 rows"):
        collect_transitions(outputs, [cut[0], cut[0]], batch)
    with pytest.raises(ValueError, match="must be positive"):
        micro_batches(batch, 0)


def test_vectors_are_padded_each_with_its_own() -> None:
    """kept_ids: 0 would be a token."""
    batch = DataProto(
        {
            "input_ids": Ragged.from_rows([torch.tensor([1, 5, 2]), torch.tensor([1, 6])]),
            "kept_ids": Ragged.from_rows([torch.tensor([[5, 7], [2, -1]]).int(), torch.tensor([[6, 0]]).int()]),
            "ref_distribution": Ragged.from_rows([torch.full((2, 4), -1.5), torch.full((1, 4), -2.5)]),
        }
    )
    [(_, micro)] = micro_batches(batch, 2, pad_multiple=4)
    assert micro.columns["kept_ids"].tolist() == [[[5, 7], [2, -1], [-1, -1]], [[6, 0], [-1, -1], [-1, -1]]]
    assert micro.columns["ref_distribution"][1].tolist() == [[-2.5] * 4, [0.0] * 4, [0.0] * 4]
    cut = micro_batches(batch, 1)
    collected = collect_transitions([micro.columns["ref_distribution"] for _, micro in cut], cut, batch)
    assert collected.equals(batch.ragged("ref_distribution"))
