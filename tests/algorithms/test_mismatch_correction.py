"""Weights and filters of trainer over engine against the loops of `reference_losses.py`, and numbers worked out by hand."""

import math

import pytest
import reference_losses as reference
import torch
from policy_cases import case

from roll_lite.algorithms.losses import mismatch_weights, within

LEVELS = ("token", "sequence", "geometric")
FILTER_LEVELS = ("token", "sequence_sum", "sequence_mean", "sequence_min", "sequence_max")
LN2 = math.log(2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.1), (0.8, 1.2)])
def test_weights_token_by_token(level: str, mode: str, low: float, high: float) -> None:
    terms = case(4).terms
    trained, rollout, mask = terms.log_probs, terms.old_log_probs, terms.mask
    weight, limited = mismatch_weights(trained, rollout, mask, level, mode, low, high)  # type: ignore[arg-type]
    assert limited.any()
    for number in range(len(mask)):
        here = mask[number]
        row = trained[number][here].tolist(), rollout[number][here].tolist()
        expected = reference.mismatch_weights(*row, level, mode, low, high) if here.any() else []
        torch.testing.assert_close(weight[number][here], torch.tensor([w for w, _ in expected], dtype=torch.float64))
        assert limited[number][here].tolist() == [outside for _, outside in expected]
    assert (weight[~mask] == 0).all() and not limited[~mask].any()


@pytest.mark.parametrize("level", FILTER_LEVELS)
@pytest.mark.parametrize("estimator", ["ratio", "k1", "k2", "k3", "abs", "difference"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_filters_token_by_token(level: str, estimator: str, share: float) -> None:
    """The range ends at a number that lies between those of two tokens or sequences, so that some pass and others do not."""
    terms = case(4).terms
    trained, rollout, mask = terms.log_probs, terms.old_log_probs, terms.mask
    rows = [(trained[i][mask[i]].tolist(), rollout[i][mask[i]].tolist()) for i in range(len(mask))]
    numbers = [reference.mismatch_numbers(*row, level, estimator) if row[0] else [] for row in rows]
    seen = sorted({number for row in numbers for number in row})
    place = int(share * len(seen))
    end = (seen[place - 1] + seen[place]) / 2
    for low, high in ((None, end), (end, None), (end, seen[-1] + 1.0)):
        kept = within(trained, rollout, mask, level, estimator, low, high)  # type: ignore[arg-type]
        assert kept.any() and not kept.equal(mask) and not kept[~mask].any()
        for number, of_row in enumerate(numbers):
            expected = [(low is None or low <= one) and (high is None or one <= high) for one in of_row]
            assert kept[number][mask[number]].tolist() == expected


def row_of(*ratios: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of the trainer, whose probabilities are these multiples of the engine's 0.1."""
    rollout = torch.full((1, len(ratios)), 0.1, dtype=torch.float64).log()
    return rollout + torch.tensor([ratios], dtype=torch.float64).log(), rollout, torch.ones(1, len(ratios), dtype=torch.bool)


WEIGHTS = {
    "nothing is limited": ({"high": None}, [4.0, 0.5]),
    "truncated token by token, TIS": ({"high": 2.0}, [2.0, 0.5]),
    "limited on both sides": ({"low": 0.75, "high": 2.0}, [2.0, 0.75]),
    "masked token by token, IcePop": ({"mode": "mask", "low": 0.4, "high": 2.0}, [0.0, 0.5]),
    "the sequence's product is 2": ({"level": "sequence", "high": 3.0}, [2.0, 2.0]),
    "truncated by sequence": ({"level": "sequence", "high": 1.5}, [1.5, 1.5]),
    "masked by sequence": ({"level": "sequence", "mode": "mask", "high": 1.5}, [0.0, 0.0]),
    "the geometric mean is sqrt 2": ({"level": "geometric", "high": 2.0}, [math.sqrt(2)] * 2),
}


@pytest.mark.parametrize(("settings", "expected"), WEIGHTS.values(), ids=WEIGHTS)
def test_weights_by_hand(settings: dict[str, object], expected: list[float]) -> None:
    """FINDINGS 8: training over rollout, 4 and 1/2."""
    weight, _ = mismatch_weights(*row_of(4.0, 0.5), **({"level": "token", "mode": "truncate", "low": 0.0} | settings))  # type: ignore[arg-type]
    assert weight[0].tolist() == pytest.approx(expected)


NUMBERS = {
    # by level: token, sum, mean, min, max; of ratios 4 and 1/2, whose logarithms are 2 ln 2 and -ln 2
    "ratio": ((4.0, 0.5), 2.0, math.sqrt(2), 0.5, 4.0),
    "k1": ((-2 * LN2, LN2), -LN2, -LN2 / 2, -2 * LN2, LN2),
    "k2": ((2 * LN2**2, LN2**2 / 2), 2.5 * LN2**2, 1.25 * LN2**2, LN2**2 / 2, 2 * LN2**2),
    "k3": ((3 - 2 * LN2, LN2 - 0.5), 2.5 - LN2, 1.25 - LN2 / 2, LN2 - 0.5, 3 - 2 * LN2),
    "abs": ((2 * LN2, LN2), 3 * LN2, 1.5 * LN2, LN2, 2 * LN2),
    "difference": ((0.3, -0.05), 0.25, 0.125, -0.05, 0.3),
}


@pytest.mark.parametrize("estimator", NUMBERS)
@pytest.mark.parametrize("level", FILTER_LEVELS)
def test_what_a_filter_looks_at_by_hand(level: str, estimator: str) -> None:
    """A narrow range around the number lets pass what has it, and nothing else."""
    numbers = NUMBERS[estimator][FILTER_LEVELS.index(level)]
    trained, rollout, mask = row_of(4.0, 0.5)
    for place, number in enumerate(numbers if isinstance(numbers, tuple) else (numbers, numbers)):
        kept = within(trained, rollout, mask, level, estimator, number - 1e-9, number + 1e-9)  # type: ignore[arg-type]
        assert kept[0, place]
        assert kept[0, 1 - place] == (level != "token")


def test_weights_carry_no_gradient_and_do_not_overflow() -> None:
    trained = torch.tensor([[-0.1, -0.1, -1e4]], requires_grad=True)
    rollout, mask = torch.tensor([[-1e4, -1e4, -0.1]]), torch.ones(1, 3, dtype=torch.bool)
    weight, _ = mismatch_weights(trained, rollout, mask, "sequence", "truncate", 0.0, None)
    assert torch.isfinite(weight).all() and not weight.requires_grad
    assert not within(trained, rollout, mask, "sequence_sum", "ratio", None, 1e8).any(), "e^20 is the most that a ratio may be"


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_weigh_one(level: str) -> None:
    terms = case().terms
    weight, limited = mismatch_weights(terms.log_probs, terms.log_probs, terms.mask, level, "truncate", 0.0, 2.0)  # type: ignore[arg-type]
    assert torch.equal(weight, terms.mask.double()) and not limited.any()


@pytest.mark.parametrize("level", FILTER_LEVELS)
def test_what_is_not_a_number_passes_no_filter_and_no_tokens_are_fine(level: str) -> None:
    trained, mask = torch.tensor([[math.nan, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    kept = within(trained, torch.full((1, 2), -1.0), mask, level, "k3", 0.0, None)  # type: ignore[arg-type]
    assert kept.tolist() == [[False, level == "token"]]
    for shape in ((0, 4), (3, 0)):
        nothing = torch.zeros(shape)
        assert within(nothing, nothing, nothing.bool(), level, "ratio", 0.5, 2.0).shape == shape  # type: ignore[arg-type]
