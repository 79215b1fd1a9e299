"""Row-level estimators against numbers worked out by hand and the papers' loops, on uneven, shuffled groups."""

import math
import random
from collections.abc import Callable

import pytest
import reference_advantages as paper
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.algorithms.advantages import gpg, grpo, minus_group_mean, opo, remax, rloo

Estimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

ESTIMATORS: dict[str, Estimator] = {
    "grpo": lambda rewards, groups, tokens: grpo(rewards, groups, True),
    "dr_grpo": lambda rewards, groups, tokens: grpo(rewards, groups, False),
    "group_mean": lambda rewards, groups, tokens: minus_group_mean(rewards, groups),
    "rloo": lambda rewards, groups, tokens: rloo(rewards, groups),
    "opo": opo,
    "gpg": lambda rewards, groups, tokens: gpg(rewards, groups),
}

PAPERS: dict[str, Callable[[list[float], list[int]], list[float]]] = {
    "grpo": lambda rewards, lengths: paper.grpo(rewards),
    "dr_grpo": lambda rewards, lengths: paper.dr_grpo(rewards),
    "group_mean": lambda rewards, lengths: paper.dr_grpo(rewards),
    "rloo": lambda rewards, lengths: paper.rloo(rewards),
    "opo": paper.opo,
}

each_estimator = pytest.mark.parametrize("estimator", list(ESTIMATORS.values()), ids=list(ESTIMATORS))


def f64(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_by_hand() -> None:
    # Group 7: rewards 1, 0, 0, 1: mean 0.5, variance with ddof 1 is 4 * 0.25 / 3 = 1/3.
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 1.0]), torch.tensor([7, 7, 7, 7])
    root = math.sqrt(1 / 3)
    torch.testing.assert_close(grpo(rewards, groups, True), f64(0.5, -0.5, -0.5, 0.5) / (root + 1e-6))
    torch.testing.assert_close(grpo(rewards, groups, False), f64(0.5, -0.5, -0.5, 0.5))
    # The others of a right sample: 0, 0, 1; of a wrong one: 1, 0, 1.
    torch.testing.assert_close(rloo(rewards, groups), f64(2 / 3, -2 / 3, -2 / 3, 2 / 3))
    # Lengths 6, 1, 1, 2: baseline (6 + 2) / 10.
    torch.testing.assert_close(opo(rewards, groups, torch.tensor([6, 1, 1, 2])), f64(0.2, -0.8, -0.8, 0.2))
    torch.testing.assert_close(remax(rewards, torch.tensor([1.0, 1.0, 0.0, 0.5])), f64(0.0, -1.0, 0.0, 0.5))


def test_gpg_makes_up_for_flat_groups_by_hand() -> None:
    # 2 of 7 samples stand in a group with spread: 0.5 * 7 / 2.
    rewards, groups = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.3, 0.3]), torch.tensor([0, 0, 0, 4, 4, 5, 5])
    torch.testing.assert_close(gpg(rewards, groups), f64(0, 0, 0, -1.75, 1.75, 0, 0))
    assert (gpg(torch.ones(4), torch.tensor([0, 0, 1, 1])) == 0).all()
    # Of the five that train, one stands in a group with spread: 0.5 * 5 / 1. The masked ones are part of their groups' means.
    trains = torch.tensor([True, True, False, True, False, True, True])
    torch.testing.assert_close(gpg(rewards, groups, trains=trains), f64(0, 0, 0, -2.5, 2.5, 0, 0))


def test_gpg_looks_for_spread_before_kl_by_hand() -> None:
    """KL gives the second group a spread of 0.02; it is still half of the samples that have spread in their rewards: a factor of 2."""
    before_kl, groups = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    rewards = before_kl.double() - f64(0.1, 0.1, 0.02, 0.0)
    torch.testing.assert_close(gpg(rewards, groups, before_kl), f64(1.0, -1.0, -0.02, 0.02))


@each_estimator
@pytest.mark.parametrize("reward", [0.6, 0.1, -1 / 3, 1e-9, 1e9])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constant_group_has_exactly_no_advantage(estimator: Estimator, reward: float, size: int, dtype: torch.dtype) -> None:
    """FINDINGS 6.4: rounding of a mean must not become a pseudo-advantage of 0.1."""
    rewards = torch.cat([torch.full((size,), reward, dtype=dtype), torch.tensor([0.0, 1.0], dtype=dtype)])
    groups = torch.cat([torch.zeros(size), torch.ones(2)]).long()
    advantages = estimator(rewards, groups, torch.arange(1, size + 3))
    assert (advantages[:size] == 0).all()
    assert (advantages[size:] != 0).all()


@each_estimator
def test_group_of_one_has_no_advantage(estimator: Estimator) -> None:
    """FINDINGS 6.5 and 8: neither the raw reward nor NaN."""
    advantages = estimator(torch.tensor([5.0, 1.0, 0.0]), torch.tensor([4, 2, 2]), torch.tensor([3, 4, 5]))
    assert advantages[0] == 0 and torch.isfinite(advantages).all() and (advantages[1:] != 0).all()


def test_remax_is_defined_for_a_single_sample() -> None:
    assert remax(torch.tensor([1.0]), torch.tensor([0.25])).tolist() == [paper.remax(1.0, 0.25)]


@pytest.mark.parametrize("name", list(PAPERS))
def test_groups_are_matched_by_id_not_by_position(name: str) -> None:
    """FINDINGS 6.5: uneven groups, rows shuffled, numbers that are no positions: each row keeps what its group gives it."""
    chooser = random.Random(1)
    sizes = {11: 3, -2: 5, 2**40: 2, 0: 9}
    rewards = {group: [chooser.random() for _ in range(size)] for group, size in sizes.items()}
    lengths = {group: [chooser.randint(1, 90) for _ in range(size)] for group, size in sizes.items()}
    expected = {(g, i): a for g in sizes for i, a in enumerate(PAPERS[name](rewards[g], lengths[g]))}
    order = list(expected)
    chooser.shuffle(order)
    columns = [torch.tensor([table[g][i] for g, i in order], dtype=kind) for table, kind in ((rewards, torch.float64), (lengths, None))]
    advantages = ESTIMATORS[name](columns[0], torch.tensor([g for g, _ in order]), columns[1])
    torch.testing.assert_close(advantages, f64(*(expected[key] for key in order)), rtol=1e-9, atol=1e-12)


def test_gpg_equals_the_paper() -> None:
    groups = [[0.1, 0.9, 0.4], [1.0, 1.0], [0.0, 0.5, 0.5, 0.25], [0.7]]
    expected = [a for group in paper.gpg(groups) for a in group]
    numbers = [number for number, group in enumerate(groups) for _ in group]
    torch.testing.assert_close(gpg(f64(*(r for group in groups for r in group)), torch.tensor(numbers)), f64(*expected))


rewards_and_groups = st.lists(st.tuples(st.integers(-8, 8), st.integers(0, 4), st.integers(1, 50)), min_size=1, max_size=24)


@each_estimator
@settings(max_examples=25, deadline=None)
@given(rows=rewards_and_groups, shift=st.integers(-64, 64), seed=st.integers(0, 9))
def test_invariances(estimator: Estimator, rows: list[tuple[int, int, int]], shift: int, seed: int) -> None:
    """A constant shift of rewards within a group, the order of rows, and the groups' numbers change nothing."""
    rewards, groups, tokens = (torch.tensor(column) for column in zip(*rows, strict=True))
    rewards = rewards.double() / 8
    advantages = estimator(rewards, groups, tokens)
    torch.testing.assert_close(estimator(rewards + shift * (groups - 2), groups, tokens), advantages, rtol=1e-9, atol=1e-9)
    order = torch.randperm(len(rewards), generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(estimator(rewards[order], groups[order], tokens[order]), advantages[order], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(estimator(rewards, 1000 - 7 * groups, tokens), advantages, rtol=1e-9, atol=1e-9)


@each_estimator
def test_no_rows(estimator: Estimator) -> None:
    none = torch.zeros(0, dtype=torch.int64)
    assert estimator(torch.zeros(0), none, none).shape == (0,)
    assert remax(torch.zeros(0), torch.zeros(0)).shape == (0,)


def test_opo_of_empty_responses() -> None:
    """An empty response does not weigh in the baseline; a group of nothing but empty ones has none."""
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0]), torch.tensor([0, 0, 0, 1, 1])
    advantages = opo(rewards, groups, torch.tensor([3, 1, 0, 0, 0]))
    torch.testing.assert_close(advantages, f64(0.25, -0.75, -0.25, 0.0, 0.0))
