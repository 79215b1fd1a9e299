"""Ragged columns against plain lists of lists."""

from __future__ import annotations

import pickle
import subprocess
import sys
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.data.ragged import Ragged, as_index, from_numpy

properties = settings(deadline=None, max_examples=60)

Rows = list[list[int]]
rows_of_numbers = st.lists(st.lists(st.integers(-(2**40), 2**40), max_size=7), max_size=9)


def ragged(rows: Rows) -> Ragged:
    return Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows], torch.int64)


def listed(column: Ragged) -> Rows:
    return [column.row(i).tolist() for i in range(len(column))]


@properties
@given(rows_of_numbers)
def test_rows_come_back(rows: Rows) -> None:
    column = ragged(rows)
    assert listed(column) == rows
    assert [row.tolist() for row in column.rows()] == rows
    assert column.lengths.tolist() == [len(row) for row in rows]


@properties
@given(rows_of_numbers, st.data())
def test_take_selects_reorders_and_repeats(rows: Rows, data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=12)) if rows else []
    for form in (index, np.array(index, dtype=np.int32), torch.tensor(index, dtype=torch.int64)):
        assert listed(ragged(rows).take(form)) == [rows[i] for i in index]


@properties
@given(rows_of_numbers, st.integers(0, 3))
def test_padding_comes_and_goes(rows: Rows, extra: int) -> None:
    column = ragged(rows)
    width = max((len(row) for row in rows), default=0) + extra
    padded = column.to_padded(-7, width)
    assert padded.tolist() == [row + [-7] * (width - len(row)) for row in rows]
    assert Ragged.from_padded(padded, column.lengths).equals(column)


@properties
@given(rows_of_numbers, st.data())
def test_slices_concatenate_to_the_whole(rows: Rows, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    column, edges = ragged(rows), [0, *cuts, len(rows)]
    parts = [column.slice(a, b) for a, b in pairwise(edges)]
    assert [listed(part) for part in parts] == [rows[a:b] for a, b in pairwise(edges)]
    assert Ragged.concat(parts).equals(column)


@properties
@given(rows_of_numbers)
def test_pickle_round_trip(rows: Rows) -> None:
    column = ragged(rows)
    assert pickle.loads(pickle.dumps(column)).equals(column)


def test_a_slice_pickles_without_its_base() -> None:
    column = Ragged(torch.arange(1_000_000), torch.arange(0, 1_000_001, 1000))
    assert len(pickle.dumps(column.slice(5, 7))) < 2 * 1000 * 8 + 500
    assert len(pickle.dumps(column.slice(5, 7).row(0).numpy())) < 1000 * 8 + 500


def test_read_only_memory_is_viewed_without_copy_or_warning() -> None:
    """What Ray's object store hands out. In a new process, because torch warns once per process."""
    program = """
import pickle, warnings, torch
from roll_lite.data.ragged import Ragged
warnings.simplefilter("error")
column, buffers = Ragged.from_rows([torch.arange(3), torch.arange(5)]), []
data = pickle.dumps(column, protocol=5, buffer_callback=buffers.append)
frozen = [bytes(buffer.raw()) for buffer in buffers]
first, second = (pickle.loads(data, buffers=frozen) for _ in range(2))
assert first.values.data_ptr() == second.values.data_ptr()
assert first.equals(column) and first.take([1, 0, 1]).lengths.tolist() == [5, 3, 5]
assert first.to_padded(0).tolist() == [[0, 1, 2, 0, 0], [0, 1, 2, 3, 4]]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_a_view_keeps_its_memory_alive() -> None:
    frozen = np.arange(100_000)
    frozen.setflags(write=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = from_numpy(frozen)
    del frozen
    np.zeros(100_000)
    assert torch.equal(tensor, torch.arange(100_000))


def test_nan_equals_nan_and_dtypes_differ() -> None:
    column = Ragged.from_rows([torch.tensor([float("nan"), 1.0])])
    assert column.equals(pickle.loads(pickle.dumps(column)))
    assert not column.equals(Ragged.from_rows([torch.tensor([float("nan"), 2.0])]))
    assert not column.equals(Ragged.from_rows([torch.tensor([3.0, 1.0])]))
    assert not ragged([[1]]).equals(Ragged.from_rows([torch.tensor([1], dtype=torch.int32)]))
    assert not ragged([[1], [2, 3]]).equals(ragged([[1, 2], [3]]))


def test_broken_columns_are_refused() -> None:
    with pytest.raises(ValueError, match="offsets must run from 0 to the number of values, 3"):
        Ragged(torch.arange(3), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="must not decrease"):
        Ragged(torch.arange(3), torch.tensor([0, 4, 3]))
    with pytest.raises(ValueError, match="int64"):
        Ragged(torch.arange(3), torch.tensor([0, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="one-dimensional"):
        Ragged(torch.zeros(2), torch.tensor([[0, 2]]))
    with pytest.raises(ValueError, match="must have entries"):
        Ragged(torch.tensor(1.0), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="host memory"):
        Ragged(torch.empty(3, device="meta"), torch.tensor([0, 3]))


def test_impossible_requests_are_refused() -> None:
    column = ragged([[1, 2], [3]])
    with pytest.raises(IndexError, match="rows 0 to 1"):
        column.take([2])
    with pytest.raises(IndexError, match="row numbers between -1"):
        column.take([-1])
    with pytest.raises(ValueError, match="list of integers"):
        column.take(torch.tensor([True, False]))
    with pytest.raises(ValueError, match="does not fit the length 1"):
        column.to_padded(0, 1)
    with pytest.raises(ValueError, match="do not fit rows of 2"):
        Ragged.from_padded(torch.zeros(1, 2), [3])
    with pytest.raises(IndexError):
        column.slice(1, 3)
    with pytest.raises(ValueError, match="nothing to concatenate"):
        Ragged.concat([])
    assert as_index([]).dtype == torch.int64


# ---------------------------------------------------------------- entries that are vectors


def vectors(k: int = 3) -> Ragged:
    """Rows of 2, 0 and 1 entries of k numbers."""
    return Ragged.from_rows([torch.arange(2 * k).view(2, k), torch.empty(0, k, dtype=torch.int64), torch.full((1, k), 9)])


def test_vector_entries_by_hand() -> None:
    column = vectors()
    assert column.lengths.tolist() == [2, 0, 1]
    assert [row.tolist() for row in column.rows()] == [[[0, 1, 2], [3, 4, 5]], [], [[9, 9, 9]]]
    assert [row.tolist() for row in column.take([2, 0, 2]).rows()] == [[[9, 9, 9]], [[0, 1, 2], [3, 4, 5]], [[9, 9, 9]]]
    assert column.slice(1, 3).values.tolist() == [[9, 9, 9]]
    padded = column.to_padded(-1, 3)
    assert padded.tolist() == [[[0, 1, 2], [3, 4, 5], [-1, -1, -1]], [[-1, -1, -1]] * 3, [[9, 9, 9], [-1, -1, -1], [-1, -1, -1]]]
    assert Ragged.from_padded(padded, column.lengths).equals(column)
    assert pickle.loads(pickle.dumps(column)).equals(column)
    assert Ragged.concat([column.slice(0, 1), column.slice(1, 3)]).equals(column)
    assert not column.equals(Ragged(column.values.flip(1), column.offsets))


def test_vectors_of_different_lengths_are_joined_only_with_a_filling() -> None:
    short, long = Ragged.from_rows([torch.tensor([[1], [2]])]), vectors().slice(2, 3)
    with pytest.raises(ValueError, match="entries of different shapes"):
        Ragged.concat([short, long])
    joined = Ragged.concat([short, long, Ragged.from_rows([], torch.int64)], fill=-1)
    assert [row.tolist() for row in joined.rows()] == [[[1, -1, -1], [2, -1, -1]], [[9, 9, 9]]]
