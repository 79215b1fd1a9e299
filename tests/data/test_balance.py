"""Balanced data-parallel parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_lite.data.balance import balanced_partition


def test_by_hand() -> None:
    """9 to part 0, 7 to part 1, 6 to part 1 (13), 5 to part 0 (14), 4 to part 1 (17), 2 to part 0 (16)."""
    parts = balanced_partition([4, 9, 2, 7, 5, 6], 2)
    assert [part.tolist() for part in parts] == [[1, 2, 4], [0, 3, 5]]


def test_ties_are_settled_by_number() -> None:
    assert [part.tolist() for part in balanced_partition([3, 3, 3, 3, 3], 2)] == [[0, 2, 4], [1, 3]]
    assert [part.tolist() for part in balanced_partition([0, 0], 2)] == [[0], [1]]


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 8))
def test_every_row_once_and_balanced(lengths: list[int], parts: int) -> None:
    found = balanced_partition(lengths, parts)
    assert len(found) == parts
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    assert all((np.diff(part) > 0).all() for part in found)
    if len(lengths) >= parts:
        assert all(len(part) for part in found)
    loads = [sum(lengths[i] for i in part) for part in found]
    # Longest-first: the heaviest part was the lightest one before its last row came.
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_no_parts_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="0 is no number of parts"):
        balanced_partition([1], 0)
