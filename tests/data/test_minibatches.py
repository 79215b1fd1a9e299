"""What a mini-batch holds and weighs comes from the global batch alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll_lite.data.minibatches import balanced_partition, cut_mini_batches, spread

SAMPLES = np.array([10, 11, 12, 13, 14, 15, 16])
TOKENS = np.array([3, 1, 4, 0, 5, 9, 2])


def cut(epochs: int = 2, mini_batches: int = 3, aggregation: str = "token_mean", seed: int = 7, weights: np.ndarray | None = None):
    given = np.ones(len(SAMPLES), dtype=np.float32) if weights is None else weights
    return cut_mini_batches(SAMPLES, TOKENS, given, epochs=epochs, mini_batches=mini_batches, aggregation=aggregation, seed=seed)


def test_samples_that_do_not_train_are_in_no_mini_batch_and_in_no_denominator() -> None:
    weights = np.array([1, 0, 1, 1, 0, 0, 2], dtype=np.float32)
    plan = cut(epochs=1, mini_batches=2, weights=weights)
    assert sorted(np.concatenate([part.samples for part in plan]).tolist()) == [10, 12, 13, 16]
    tokens = dict(zip(SAMPLES.tolist(), TOKENS.tolist(), strict=True))
    for part in plan:
        total = sum(tokens[sample] for sample in part.samples.tolist())
        for sample, weight in zip(part.samples.tolist(), part.weights.tolist(), strict=True):
            factor = (2 if sample == 16 else 1) if tokens[sample] else 0
            assert weight == pytest.approx(factor / total)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
def test_a_sample_in_several_rows_weighs_what_it_weighs_in_one(aggregation: str) -> None:
    """Samples 0, 1, 2 with 5, 4 and 3 tokens; 0 has rows of 2, 3 and 0, and 2 rows of 1 and 2."""
    given = {"epochs": 2, "mini_batches": 2, "aggregation": aggregation, "constant": 7, "seed": 3}
    whole = cut_mini_batches(np.arange(3), np.array([5, 4, 3]), np.array([1.0, 0.5, 2.0]), **given)
    owners, tokens = np.array([0, 0, 0, 1, 2, 2]), np.array([2, 3, 0, 4, 1, 2])
    split = cut_mini_batches(np.arange(6), tokens, np.array([1.0, 0.5, 2.0])[owners], owners=owners, **given)
    assert [part.epoch for part in split] == [part.epoch for part in whole]
    for one, other in zip(whole, split, strict=True):
        weights = dict(zip(one.samples.tolist(), one.weights.tolist(), strict=True))
        assert {(owner, weight) for owner, weight in zip(owners[other.samples].tolist(), other.weights.tolist(), strict=True)} == set(
            weights.items()
        ), "all rows of a sample, with its weight"
    rows = cut_mini_batches(np.arange(6), tokens, np.ones(6), owners=owners, rows_are_sequences=True, **given | {"mini_batches": 1})[0]
    expected = cut_mini_batches(np.arange(6), tokens, np.ones(6), **given | {"mini_batches": 1})[0]
    assert rows.weights.tolist() == expected.weights.tolist(), "each row as a sample of its own"


def test_parts_without_a_sample_that_trains_are_left_out() -> None:
    weights = np.zeros(len(SAMPLES), dtype=np.float32)
    assert cut(weights=weights) == []
    weights[2] = 1
    assert [part.samples.tolist() for part in cut(epochs=1, weights=weights)] == [[12]]


def test_every_epoch_holds_every_sample_once_in_parts_of_even_size() -> None:
    plan = cut()
    assert [len(part.samples) for part in plan] == [3, 2, 2, 3, 2, 2]
    for epoch in (0, 1):
        assert sorted(np.concatenate([part.samples for part in plan if part.epoch == epoch])) == SAMPLES.tolist()


def test_epochs_are_ordered_differently_and_a_seed_repeats() -> None:
    first, second = cut(seed=7), cut(seed=8)
    assert [p.samples.tolist() for p in first] == [p.samples.tolist() for p in cut(seed=7)]
    assert [p.samples.tolist() for p in first] != [p.samples.tolist() for p in second]
    assert [p.samples.tolist() for p in first[:3]] != [p.samples.tolist() for p in first[3:]]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_weights_of_a_mini_batch_add_up_to_one_over_its_own_tokens(aggregation: str) -> None:
    tokens = dict(zip(SAMPLES.tolist(), TOKENS.tolist(), strict=True))
    for part in cut(aggregation=aggregation):
        counts = np.array([tokens[s] for s in part.samples.tolist()])
        assert (part.weights * counts).sum() == pytest.approx(1.0)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_spreading_over_ranks_changes_neither_rows_nor_weights(ranks: int) -> None:
    plan = cut()
    lengths = {int(s): 2 + int(t) for s, t in zip(SAMPLES, TOKENS, strict=True)}
    shares = spread(plan, lengths, ranks)
    assert len(shares) == ranks
    for number, whole in enumerate(plan):
        parts = [share[number] for share in shares]
        pairs = {(int(s), float(w)) for part in parts for s, w in zip(part.samples, part.weights, strict=True)}
        assert pairs == {(int(s), float(w)) for s, w in zip(whole.samples, whole.weights, strict=True)}
        assert sum(len(part.samples) for part in parts) == len(whole.samples)
        assert all(part.epoch == whole.epoch for part in parts)


def test_balance_by_hand() -> None:
    """9 to part 0, 7 to part 1, 6 to part 1 (13), 5 to part 0 (14), 4 to part 1 (17), 2 to part 0 (16)."""
    parts = balanced_partition([4, 9, 2, 7, 5, 6], 2)
    assert [part.tolist() for part in parts] == [[1, 2, 4], [0, 3, 5]]


def test_ties_of_balance_are_settled_by_number() -> None:
    assert [part.tolist() for part in balanced_partition([3, 3, 3, 3, 3], 2)] == [[0, 2, 4], [1, 3]]
    assert [part.tolist() for part in balanced_partition([0, 0], 2)] == [[0], [1]]


@given(st.lists(st.integers(1, 1000), max_size=60), st.integers(1, 8))
def test_every_row_on_one_rank_and_balanced(lengths: list[int], parts: int) -> None:
    found = balanced_partition(lengths, parts)
    assert len(found) == parts
    assert sorted(np.concatenate(found).tolist()) == list(range(len(lengths)))
    assert all((np.diff(part) > 0).all() for part in found)
    if len(lengths) >= parts:
        assert all(len(part) for part in found)
    loads = [sum(lengths[i] for i in part) for part in found]
    # Longest-first: the heaviest part was the lightest one before its last row came.
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_balance_over_no_parts_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="0 is no number of parts"):
        balanced_partition([1], 0)
