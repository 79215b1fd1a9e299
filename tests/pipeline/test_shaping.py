"""Goldens worked out by hand, and plain loops written from the papers (reference_shaping)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from reference_shaping import dapo_overlong, kimi_length_rewards, normalised
from shaping_support import make_rows

from roll_lite.algorithms.rewards import RewardRows, RunningMoments
from roll_lite.config.schema.algorithm import AlgorithmConfig, MasksConfig, RewardShapingConfig
from roll_lite.config.schema.domains import FormatConfig
from roll_lite.pipeline.shaping import DomainRewards, shape_baseline, shape_rewards


def shaped(
    rows: RewardRows,
    domains: Sequence[DomainRewards] = (DomainRewards(), DomainRewards()),
    masks: MasksConfig | None = None,
    running: RunningMoments | None = None,
    train_weights: Sequence[float] | None = None,
    **config: Any,
) -> list[float]:
    algorithm = AlgorithmConfig(reward=RewardShapingConfig.model_validate(config), masks=masks or MasksConfig())
    weights = torch.ones(len(rows)) if train_weights is None else torch.tensor(train_weights)
    rewards = shape_rewards(rows, weights, algorithm, domains, running or RunningMoments())
    assert rewards.dtype == torch.float32
    return rewards.tolist()


def test_nothing_configured_leaves_the_scores_bit_for_bit() -> None:
    scores = torch.randn(50).tolist()
    assert shaped(make_rows(scores)) == scores


def test_format_bonus_and_penalty_by_domain() -> None:
    domains = [DomainRewards(format=FormatConfig(pattern="x", bonus=0.25, penalty=0.5)), DomainRewards()]
    rows = make_rows([1.0, 1.0, 1.0, 0.0], format_ok=[1, 0, 0, 0], domain_number=[0, 0, 1, 1])
    assert shaped(rows, domains) == [1.25, 0.5, 1.0, 0.0]


def test_linear_length_penalty_is_relative_to_the_domains_limit() -> None:
    rows = make_rows([1.0, 1.0, 0.0], policy_tokens=[0, 50, 64], max_tokens=[100, 100, 256])
    assert shaped(rows, length_penalty={"name": "linear", "coef": 0.5}) == [1.0, 0.75, -0.125]


def test_group_length_penalty_by_hand() -> None:
    """Group 7 has lengths 10 to 30: lambda = 0.5, 0, -0.5; the wrong short one gets no bonus. Group 9 has equal lengths, 4 one sample.
    The rows of the groups are mixed: ids count, not places (FINDINGS 6.5)."""
    rows = make_rows(
        [1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0], group=[7, 9, 7, 7, 7, 9, 4, 9], policy_tokens=[10, 20, 20, 10, 30, 20, 99, 20]
    )
    expected = [1.0 + 0.5 * 2, 0.0, 1.0, 0.0, -0.5 * 2, 1.0, 1.0, 0.0]
    assert shaped(rows, length_penalty={"name": "group", "coef": 2.0}) == expected


@pytest.mark.parametrize("seed", range(4))
def test_group_length_penalty_against_the_papers_loop(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 6, (40,), generator=generator).tolist()
    groups = torch.randint(0, 9, (40,), generator=generator).tolist()
    correct = torch.randint(0, 2, (40,), generator=generator).tolist()
    scores = torch.randn(40, generator=generator).tolist()
    expected = list(scores)
    for number in set(groups):
        rows = [i for i, group in enumerate(groups) if group == number]
        for i, reward in zip(rows, kimi_length_rewards([lengths[i] for i in rows], [bool(correct[i]) for i in rows]), strict=True):
            expected[i] += 0.7 * reward
    rows_ = make_rows(scores, group=groups, policy_tokens=lengths, correct=correct)
    assert shaped(rows_, length_penalty={"name": "group", "coef": 0.7}) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("length", "punishment"), [(1, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (99, -0.95), (100, -1.0), (101, -1.0), (500, -1.0)]
)
def test_overlong_punishment_is_dapos(length: int, punishment: float) -> None:
    """L_max = 100, L_cache = 20."""
    assert dapo_overlong(length, 100, 20) == pytest.approx(punishment)
    rows = make_rows([0.0, 1.0], policy_tokens=[length, 5])
    assert shaped(rows, overlong={"buffer_tokens": 20, "penalty": 2.0}) == pytest.approx([2 * punishment, 1.0])


def test_a_response_cut_with_its_tools_output_pays_the_whole_overlong_penalty() -> None:
    """40 tokens of the policy and 60 of a tool reach max_tokens 100; the linear penalty takes 0.5 * 40 / 100."""
    rows = make_rows([1.0, 1.0], policy_tokens=[40, 40], row_tokens=[100, 90])
    assert shaped(rows, overlong={"buffer_tokens": 20}) == [0.0, 0.5]
    assert shaped(rows, length_penalty={"coef": 0.5}) == pytest.approx([0.8, 0.8])


def test_truncated_responses_pay_their_penalty_only_where_asked_for() -> None:
    rows = make_rows([1.0, 1.0], truncated=[True, False])
    assert shaped(rows, masks=MasksConfig(truncated="penalize", truncated_penalty=0.75)) == [0.25, 1.0]
    assert shaped(rows, masks=MasksConfig(truncated="mask", truncated_penalty=0.75)) == [1.0, 1.0]
    assert shaped(rows, masks=MasksConfig(truncated_penalty=0.75)) == [1.0, 1.0]


def test_scale_comes_before_clip_and_the_domains_weight_after_all() -> None:
    rows = make_rows([0.25, 4.0, -4.0, 1.0], domain_number=[0, 0, 0, 1])
    domains = [DomainRewards(weight=3.0), DomainRewards(weight=0.5)]
    assert shaped(rows, domains, scale=2.0, clip=1.5) == [1.5, 4.5, -4.5, 0.75]


def test_everything_at_once_in_its_order() -> None:
    """Sample 0: 1 + 0.5 format - 0.25 * 90/100 - 1 truncated - 0.5 overlong = -0.225, * 4 = -0.9, within 1.
    Sample 1: 1 + 0.5 - 0.25 * 0.2 = 1.45, * 4, clipped to 1. Batch of two: mean 0.05, std sqrt(2 * 0.95^2) = 1.3435, then times 10."""
    rows = make_rows([1.0, 1.0], format_ok=[1, 1], policy_tokens=[90, 20], truncated=[True, False])
    rewards = shaped(
        rows,
        [DomainRewards(weight=10.0, format=FormatConfig(pattern="x", bonus=0.5))],
        MasksConfig(truncated="penalize"),
        length_penalty={"coef": 0.25},
        overlong={"buffer_tokens": 20},
        scale=4.0,
        clip=1.0,
        normalize={"over": "batch"},
    )
    assert rewards == pytest.approx([-10 * 0.5**0.5, 10 * 0.5**0.5])


def test_greedy_baselines_are_scaled_clipped_and_weighted() -> None:
    rows = make_rows([0.0, 0.0, 0.0], domain_number=[0, 1, 0])
    config = RewardShapingConfig(scale=2.0, clip=1.5)
    baselines = shape_baseline(torch.tensor([0.5, 5.0, -5.0]), rows, config, [DomainRewards(), DomainRewards(weight=2.0)])
    assert baselines.tolist() == [1.0, 3.0, -1.5]


# ---------------------------------------------------------------- normalisation


@pytest.mark.parametrize(("mean", "std"), [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("over", ["batch", "group", "running"])
def test_normalisation_against_the_reference(over: str, mean: bool, std: bool) -> None:
    generator = torch.Generator().manual_seed(11)
    steps = [torch.randn(12, generator=generator).tolist() for _ in range(3)]
    groups = [5, 3, 5, 3, 3, 8, 5, 1, 1, 1, 1, 5]  # uneven, mixed, 8 alone
    running, history = RunningMoments(), []
    for scores in steps:
        history += scores
        if over == "group":
            expected = [normalised([s], [x for x, g in zip(scores, groups, strict=True) if g == group], mean, std)[0]
                        for s, group in zip(scores, groups, strict=True)]  # fmt: skip
        else:
            expected = normalised(scores, scores if over == "batch" else history, mean, std)
        rows = make_rows(scores, group=groups)
        assert shaped(rows, running=running, normalize={"over": over, "mean": mean, "std": std}) == pytest.approx(expected, abs=1e-5)
    assert running.count == (len(history) if over == "running" else 0)


@pytest.mark.parametrize("over", ["batch", "group", "running"])
def test_constant_rewards_are_exactly_zero_and_never_divided_by_rounding(over: str) -> None:
    """FINDINGS 6.4."""
    rows = make_rows([0.6] * 7, group=[1, 1, 1, 2, 2, 2, 3])
    assert shaped(rows, normalize={"over": over}) == [0.0] * 7
    assert shaped(rows, normalize={"over": over, "mean": False}) == pytest.approx([0.6] * 7)


def test_rewards_that_differ_by_rounding_only_have_no_spread() -> None:
    """FINDINGS 6.4: 1 - 0.1 and a score of 0.9 are one reward."""
    domains = [DomainRewards(format=FormatConfig(pattern="x", bonus=0.0, penalty=0.1))]
    rows = make_rows([1.0, 0.9, 0.9], format_ok=[0, 1, 1])
    assert shaped(rows, domains, normalize={"over": "group"}) == [0.0] * 3


def test_a_group_of_one_is_zero() -> None:
    """FINDINGS 6.5: neither its raw reward nor NaN."""
    assert shaped(make_rows([3.0, 1.0, 2.0], group=[4, 6, 6]), normalize={"over": "group", "std": False}) == [0.0, -0.5, 0.5]


def test_masked_samples_count_in_no_moments_but_their_groups() -> None:
    """The two that train have mean 1 and deviation sqrt 2; the masked 9 is 8 above that mean. In the group it is part of the baseline:
    mean 11/3."""
    rows, weights = make_rows([0.0, 2.0, 9.0]), [1.0, 0.5, 0.0]
    running = RunningMoments()
    expected = [-(0.5**0.5), 0.5**0.5, 8 * 0.5**0.5]
    assert shaped(rows, train_weights=weights, normalize={"over": "batch"}) == pytest.approx(expected)
    assert shaped(rows, train_weights=weights, running=running, normalize={"over": "running"}) == pytest.approx(expected)
    assert (running.count, running.mean) == (2, 1.0)
    by_group = shaped(rows, train_weights=weights, normalize={"over": "group", "std": False})
    assert by_group == pytest.approx([-11 / 3, 2 - 11 / 3, 9 - 11 / 3])
    assert shaped(rows, train_weights=[0.0] * 3, normalize={"over": "batch"}) == [0.0] * 3


@pytest.mark.parametrize("over", ["batch", "group", "running"])
def test_rewards_that_float32_tells_apart_have_spread(over: str) -> None:
    """1e7 and 1e7 + 1 are neighbours in float32. Mean 0.5 above the first, deviation sqrt(1/3) of four."""
    rows = make_rows([1e7, 1e7 + 1, 1e7, 1e7 + 1])
    assert shaped(rows, normalize={"over": over}) == pytest.approx([-(0.75**0.5), 0.75**0.5] * 2)


def test_a_reward_beyond_float32_is_told_with_its_remedy() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.reward: the score 1e\+30 of domain 'a' became the reward 1e\+39.*or a clip"):
        shaped(make_rows([0.0, 1e30]), scale=1e9)
    assert shaped(make_rows([0.0, 1e30]), scale=1e9, clip=1.0) == [0.0, 1.0]


def test_running_moments_take_the_batch_in_before_it_is_normalised() -> None:
    running = RunningMoments()
    assert shaped(make_rows([0.0, 2.0]), running=running, normalize={"over": "running"}) == pytest.approx([-(0.5**0.5), 0.5**0.5])
    # 0, 2, 4, 6: mean 3, variance 20/3
    assert shaped(make_rows([4.0, 6.0]), running=running, normalize={"over": "running"}) == pytest.approx(
        [(4 - 3) / (20 / 3) ** 0.5, (6 - 3) / (20 / 3) ** 0.5]
    )


FULL: dict[str, Any] = {"length_penalty": {"name": "group", "coef": 0.5}, "overlong": {"buffer_tokens": 30}, "scale": 0.7, "clip": 2.0}


@pytest.mark.parametrize("over", ["batch", "group", "running"])
def test_the_order_of_rows_changes_nothing(over: str) -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(20, generator=generator)
    lengths, groups = torch.randint(1, 101, (20,), generator=generator), torch.randint(0, 5, (20,), generator=generator)
    order = torch.randperm(20, generator=generator)
    config = {**FULL, "normalize": {"over": over}}
    straight = shaped(make_rows(scores.tolist(), policy_tokens=lengths.tolist(), group=groups.tolist()), **config)
    mixed = shaped(make_rows(scores[order].tolist(), policy_tokens=lengths[order].tolist(), group=groups[order].tolist()), **config)
    assert mixed == pytest.approx([straight[i] for i in order.tolist()], abs=1e-6)


def test_a_constant_shift_of_a_groups_scores_changes_nothing_after_the_groups_mean() -> None:
    rows, moved = make_rows([0.0, 1.0, 0.5, 2.0], group=[1, 1, 2, 2]), make_rows([8.0, 9.0, 0.5, 2.0], group=[1, 1, 2, 2])
    assert shaped(rows, normalize={"over": "group"}) == pytest.approx(shaped(moved, normalize={"over": "group"}))


@pytest.mark.parametrize("over", ["batch", "group", "running"])
def test_no_samples_at_all(over: str) -> None:
    assert shaped(make_rows([]), **FULL, normalize={"over": over}) == []
