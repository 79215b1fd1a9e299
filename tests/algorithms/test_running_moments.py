from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from reference_shaping import moments

from roll_lite.algorithms.rewards import RunningMoments


def test_merged_batches_give_the_moments_of_all_numbers() -> None:
    draw = random.Random(1)
    batches = [[draw.gauss(100.0, 0.01) for _ in range(count)] for count in (1, 7, 0, 64, 3)]
    running = RunningMoments()
    for batch in batches:
        running.update(np.array(batch))
    count, mean, squares = moments([value for batch in batches for value in batch])
    assert running.count == count
    assert running.mean == pytest.approx(mean, rel=1e-15)
    assert running.squares == pytest.approx(squares, rel=1e-9)
    assert running.std == pytest.approx(math.sqrt(squares / (count - 1)), rel=1e-9)


def test_by_hand() -> None:
    running = RunningMoments()
    assert running.std == 0
    running.update(np.array([2.0]))
    assert (running.mean, running.std) == (2.0, 0.0)
    running.update(np.array([4.0, 6.0]))
    assert (running.count, running.mean, running.squares, running.std) == (3, 4.0, 8.0, 2.0)


def test_a_restored_state_goes_on_bit_for_bit() -> None:
    """FINDINGS 6.11: running moments belong into the checkpoint."""
    draw = np.random.default_rng(5)
    batches = [draw.normal(size=33) for _ in range(4)]
    whole, first, second = RunningMoments(), RunningMoments(), RunningMoments()
    for batch in batches:
        whole.update(batch)
    for batch in batches[:2]:
        first.update(batch)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for batch in batches[2:]:
        second.update(batch)
    assert second.state_dict() == whole.state_dict()


def test_the_order_within_a_batch_changes_nothing() -> None:
    values = np.random.default_rng(2).normal(size=1000) * 10.0 ** np.random.default_rng(3).integers(-8, 8, 1000)
    one, other = RunningMoments(), RunningMoments()
    one.update(values)
    other.update(values[::-1])
    assert one.state_dict() == other.state_dict()
