"""Weights of trainer over engine against the loops of `reference_losses.py`, and numbers worked out by hand."""

import math

import pytest
import torch
from policy_cases import case
from reference_losses import mismatch_weights

from roll_lite.algorithms.losses import mismatch_correction

DEFAULTS = {"level": "token", "mode": "truncate", "low": 0.0, "high": 2.0}
LEVELS = ("token", "sequence", "geometric")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.1), (0.8, 1.2)])
def test_weights_token_by_token(level: str, mode: str, low: float, high: float) -> None:
    terms = case(4).terms
    old, rollout, mask = terms.log_probs, terms.old_log_probs, terms.mask
    result = mismatch_correction(old, rollout, mask, level, mode, low, high)  # type: ignore[arg-type]
    assert result.limited.any()
    for number in range(len(mask)):
        here = mask[number]
        expected = (
            mismatch_weights(old[number][here].tolist(), rollout[number][here].tolist(), level, mode, low, high) if here.any() else []
        )
        torch.testing.assert_close(result.weight[number][here], torch.tensor([w for w, _ in expected], dtype=torch.float64))
        assert result.limited[number][here].tolist() == [outside for _, outside in expected]
    assert (result.weight[~mask] == 0).all() and not result.limited[~mask].any()


def test_weights_by_hand() -> None:
    """FINDINGS 8: training over rollout. Probabilities 0.4 / 0.1 = 4 and 0.1 / 0.2 = 1/2; product 2, geometric mean sqrt 2."""
    old, rollout = torch.log(torch.tensor([[0.4, 0.1]])), torch.log(torch.tensor([[0.1, 0.2]]))
    mask = torch.ones(1, 2, dtype=torch.bool)

    def weights(**settings: object) -> list[float]:
        return mismatch_correction(old, rollout, mask, **(DEFAULTS | settings)).weight[0].tolist()  # type: ignore[arg-type]

    assert weights() == pytest.approx([2.0, 0.5])
    assert weights(low=0.75) == pytest.approx([2.0, 0.75])
    assert weights(mode="mask") == pytest.approx([0.0, 0.5])
    assert weights(level="sequence", high=3.0) == pytest.approx([2.0, 2.0])
    assert weights(level="sequence", mode="mask", high=1.5) == [0.0, 0.0]
    assert weights(level="geometric") == pytest.approx([math.sqrt(2)] * 2)


def test_weights_carry_no_gradient_and_do_not_overflow() -> None:
    old = torch.tensor([[-0.1, -0.1, -1e4]], requires_grad=True)
    rollout, mask = torch.tensor([[-1e4, -1e4, -0.1]]), torch.ones(1, 3, dtype=torch.bool)
    result = mismatch_correction(old, rollout, mask, "sequence", "truncate", 0.0, 1e30)
    assert torch.isfinite(result.weight).all() and not result.weight.requires_grad


@pytest.mark.parametrize("level", LEVELS)
def test_equal_log_probs_weigh_one(level: str) -> None:
    terms = case().terms
    result = mismatch_correction(terms.log_probs, terms.log_probs, terms.mask, level, "truncate", 0.0, 2.0)  # type: ignore[arg-type]
    assert torch.equal(result.weight, terms.mask.double()) and not result.limited.any()
