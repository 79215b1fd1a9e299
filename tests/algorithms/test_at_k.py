"""pass@k, best@k, maj@k: numbers worked out by hand, every choice of k samples one by one, and the estimator's published code."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations

import numpy as np
import pytest

from roll_lite.algorithms.at_k import NO_ANSWER, READS_NONE, SampledPrompts, accuracy_error, every_k


def of_one_prompt(correct: list[int], scores: list[float] | None = None, answers: list[int] | None = None) -> SampledPrompts:
    n = len(correct)
    return SampledPrompts(
        np.zeros(n, np.int64), np.array(correct), np.array(scores or correct, float), np.array(answers or [READS_NONE] * n)
    )


@pytest.mark.parametrize(
    ("most", "told"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8]), (64, [2, 4, 8, 16, 32, 64])]
)
def test_powers_of_two_and_all(most: int, told: list[int]) -> None:
    assert every_k(most) == told


# ---------------------------------------------------------------- pass@k and best@k


def test_pass_at_k_by_hand() -> None:
    """Two of four are right. Of the six pairs one has none of them; of the four triples every one has."""
    of = of_one_prompt([0, 1, 1, 0])
    assert of.passed(1).tolist() == [0.5]
    assert of.passed(2).tolist() == [pytest.approx(5 / 6)]
    assert of.passed(3).tolist() == of.passed(4).tolist() == [1.0]
    assert np.isnan(of.passed(5)).all()


def test_best_at_k_by_hand() -> None:
    """Of 0.1, 0.5 and 0.9: the pairs' best are 0.5, 0.9, 0.9."""
    of = of_one_prompt([0, 0, 0], [0.5, 0.9, 0.1])
    assert of.best(1).tolist() == [pytest.approx(0.5)]
    assert of.best(2).tolist() == [pytest.approx((0.5 + 0.9 + 0.9) / 3)]
    assert of.best(3).tolist() == [0.9]
    assert np.isnan(of.best(4)).all()


def random_prompts(seed: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Prompts of 1 to `most` samples, in any order of prompts."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, most + 1, 30)
    prompts = generator.permutation(np.repeat(generator.permutation(1000)[:30], sizes))
    n = len(prompts)
    return prompts, generator.integers(0, 2, n), generator.normal(size=n).round(1), generator.integers(NO_ANSWER, 3, n)


@pytest.mark.parametrize("k", [1, 2, 3, 5, 8])
def test_against_every_choice_of_k_samples(k: int) -> None:
    prompts, correct, scores, answers = random_prompts(k, 9)
    of = SampledPrompts(prompts, correct, scores, answers)
    passed, best = of.passed(k), of.best(k)
    for prompt in range(30):
        mine = np.flatnonzero(prompts == prompts[of.first[prompt]])
        choices = [list(choice) for choice in combinations(mine, k)]
        if not choices:
            assert np.isnan(passed[prompt]) and np.isnan(best[prompt])
            continue
        assert passed[prompt] == pytest.approx(np.mean([correct[choice].max() for choice in choices]))
        assert best[prompt] == pytest.approx(np.mean([scores[choice].max() for choice in choices]))


def estimate_pass_at_k(n: int, c: int, k: int) -> float:
    """As published with HumanEval (Chen et al. 2021, openai/human-eval)."""
    if n - c < k:
        return 1.0
    return float(1.0 - np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


@pytest.mark.parametrize(("n", "k"), [(64, 8), (64, 64), (200, 100), (1000, 512)])
def test_pass_at_k_of_many_samples(n: int, k: int) -> None:
    for c in (0, 1, 7, n // 2, n):
        (ours,) = of_one_prompt([1] * c + [0] * (n - c)).passed(k)
        assert ours == pytest.approx(estimate_pass_at_k(n, c, k), abs=1e-12)


def test_best_at_k_of_verdicts_is_pass_at_k() -> None:
    prompts, correct, _, answers = random_prompts(3, 64)
    of = SampledPrompts(prompts, correct, correct, answers)
    for k in every_k(64):
        np.testing.assert_allclose(of.best(k), of.passed(k), atol=1e-12)


# ---------------------------------------------------------------- maj@k


def test_majorities_by_hand() -> None:
    """Answers 7 7 8 | 8 8 7 | 9, of which 7 is right. One vote of three goes to 7, one to 8; the last sample is in none."""
    of = of_one_prompt([1, 1, 0, 0, 0, 1, 0], answers=[7, 7, 8, 8, 8, 7, 9])
    assert of.majority(3).tolist() == [0.5]
    assert of.majority(1).tolist() == [pytest.approx(3 / 7)]
    # All seven: three say 7, three say 8.
    assert of.majority(7).tolist() == [0.5]
    assert np.isnan(of.majority(8)).all()


def test_who_has_no_answer_does_not_vote() -> None:
    silent = [0] * 3
    assert of_one_prompt([*silent, 1], answers=[NO_ANSWER] * 3 + [4]).majority(4).tolist() == [1.0]
    assert of_one_prompt(silent, answers=[NO_ANSWER] * 3).majority(3).tolist() == [0.0], "a vote of nobody is wrong"
    assert np.isnan(of_one_prompt([1, 1, 1], answers=[READS_NONE] * 3).majority(3)).all(), "nothing to vote on"


def test_an_answer_that_is_not_always_right_counts_as_often_as_it_is() -> None:
    assert of_one_prompt([1, 0, 1, 1, 0], answers=[0, 0, 0, 0, 1]).majority(5).tolist() == [0.75]


def vote(correct: list[int], answers: list[int]) -> float:
    counts = Counter(answer for answer in answers if answer >= 0)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    verdicts = [np.mean([c for c, a in zip(correct, answers, strict=True) if a == winner]) for winner in winners]
    return float(np.mean(verdicts)) if winners else 0.0


@pytest.mark.parametrize("k", [1, 2, 3, 4, 7])
def test_votes_one_by_one(k: int) -> None:
    prompts, correct, scores, answers = random_prompts(10 + k, 16)
    of = SampledPrompts(prompts, correct, scores, answers)
    found = of.majority(k)
    for prompt in range(30):
        mine = np.flatnonzero(prompts == prompts[of.first[prompt]])
        ballots = [mine[start : start + k] for start in range(0, len(mine) - k + 1, k)]
        expected = np.mean([vote(correct[one].tolist(), answers[one].tolist()) for one in ballots]) if ballots else np.nan
        np.testing.assert_allclose(found[prompt], expected)


@pytest.mark.parametrize("k", [2, 3])
def test_over_all_orders_it_is_the_mean_over_every_choice_of_k_samples(k: int) -> None:
    """Which is what k new samples would give: nothing depends on the order on average."""
    answers, correct = [0, 0, 1, 2, 1, NO_ANSWER], [1, 1, 0, 0, 0, 0]
    exact = np.mean([vote([correct[i] for i in one], [answers[i] for i in one]) for one in combinations(range(6), k)])
    orders = [of_one_prompt([correct[i] for i in order], answers=[answers[i] for i in order]) for order in permutations(range(6))]
    assert np.mean([one.majority(k) for one in orders]) == pytest.approx(exact)


def test_no_samples() -> None:
    nothing = SampledPrompts(*(np.zeros(0, np.int64) for _ in range(4)))
    assert [len(one) for one in (nothing.passed(2), nothing.best(2), nothing.majority(2))] == [0, 0, 0]


def test_the_error_of_an_accuracy_counts_prompts_not_samples() -> None:
    """Prompts with means 1, 1/2, 0: the standard deviation of the means is 1/2. Copies of the samples add nothing."""
    prompts, correct = np.array([7, 7, 3, 3, 5, 5]), np.array([1.0, 1, 1, 0, 0, 0])
    assert accuracy_error(prompts, correct) == pytest.approx(0.5 / 3**0.5)
    assert accuracy_error(np.tile(prompts, 8), np.tile(correct, 8)) == pytest.approx(0.5 / 3**0.5)
    unequal = accuracy_error(np.array([0, 0, 0, 1]), np.array([1.0, 1, 1, 0]))  # deviations from 3/4: 3/4 and -3/4
    assert unequal == pytest.approx((2 * 2 * 9 / 16) ** 0.5 / 4)
    assert np.isnan(accuracy_error(np.zeros(4), np.ones(4)))
