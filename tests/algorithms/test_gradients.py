"""Gradients against central differences in float64: of the independent references where they have one, of the code itself elsewhere.

The references are pure functions of the log-probs; what a paper keeps from the gradient is frozen in them.
"""

from __future__ import annotations

import math

import pytest
import torch
from policy_cases import LOSSES, case
from reference_losses import central_differences, kl_full, kl_value, limited, value_loss

from roll_lite.algorithms.kl import KlEstimator, full_kl, kl_loss
from roll_lite.algorithms.losses import PolicyTerms, clipped_value_loss
from roll_lite.workers.objectives import policy_loss


def normal(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [0, 4])
def test_policy_losses(name: str, seed: int) -> None:
    """Of a random mixture of token losses, row by row; masked entries, rows without policy tokens among them, get exactly 0."""
    config, reference = LOSSES[name]
    batch = case(seed, extremes=False)  # differences of numbers as large as exp(20) have too few digits left
    terms, weights = batch.terms, normal(*batch.terms.mask.shape, seed=7)
    leaf = terms.log_probs.clone().requires_grad_()
    loss = policy_loss(config, PolicyTerms(leaf, terms.old_log_probs, terms.advantages, terms.mask)).loss
    (gradient,) = torch.autograd.grad((weights * loss).sum(), leaf)
    assert (gradient[~terms.mask] == 0).all()
    for number, mask in enumerate(terms.mask):
        if not mask.any():
            continue
        factors = weights[number][mask].tolist()

        def mixture(new: list[float], number: int = number, mask: torch.Tensor = mask, factors: list[float] = factors) -> float:
            row = batch.row(number, terms.log_probs.masked_scatter(_only(number, terms.mask), torch.tensor(new, dtype=torch.float64)))
            return sum(factor * token.loss for factor, token in zip(factors, reference(row), strict=True))

        expected = torch.tensor(central_differences(mixture, terms.log_probs[number][mask].tolist()), dtype=torch.float64)
        torch.testing.assert_close(gradient[number][mask], expected, rtol=1e-5, atol=1e-7)


def _only(number: int, mask: torch.Tensor) -> torch.Tensor:
    return mask & (torch.arange(len(mask)) == number)[:, None]


def kl_surrogate(new: float, frozen: float, ref: float, old: float, estimator: str, unbiased: bool) -> float:
    """Whose differences in `new` at `frozen` are the gradient that is meant."""
    r = frozen - ref
    if unbiased:
        return math.exp(frozen - old) * r * new
    return r * new if estimator == "k1" else kl_value(new, ref, estimator)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("unbiased", [False, True])
def test_kl_losses(estimator: KlEstimator, unbiased: bool) -> None:
    new, ref, old = normal(3, 9, seed=5) - 2
    leaf = new.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(kl_loss(leaf, ref, estimator, unbiased, old).sum(), leaf)
    for at, ours, r, o in zip(new.tolist(), gradient.tolist(), ref.tolist(), old.tolist(), strict=True):
        (expected,) = central_differences(lambda x, at=at, r=r, o=o: kl_surrogate(x[0], at, r, o, estimator, unbiased), [at])
        assert ours == pytest.approx(expected, rel=1e-6, abs=1e-8)


def test_full_kl() -> None:
    log_p, log_q = normal(4, 6, seed=1).log_softmax(-1), normal(4, 6, seed=2).log_softmax(-1)
    leaf = log_p.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(full_kl(leaf, log_q).sum(), leaf)
    for p, q, ours in zip(log_p.tolist(), log_q.tolist(), gradient.tolist(), strict=True):
        assert ours == pytest.approx(central_differences(lambda x, q=q: kl_full(x, q), p), rel=1e-6, abs=1e-9)
    logits = normal(2, 5, seed=3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: full_kl(x.log_softmax(-1), normal(2, 5, seed=4).log_softmax(-1)), (logits,))


@pytest.mark.parametrize("clip", [None, 0.5])
def test_value_losses(clip: float | None) -> None:
    values, old, returns = normal(3, 24, seed=6).unbind()
    mask = torch.arange(24) % 5 != 0
    leaf = values.clone().requires_grad_()
    loss = clipped_value_loss(leaf[None], old[None], returns[None], mask[None], clip).loss
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    for i in range(24):
        (expected,) = central_differences(lambda v, i=i: value_loss(v[0], float(old[i]), float(returns[i]), clip), [float(values[i])])
        assert float(gradient[i]) == pytest.approx(expected if mask[i] else 0.0, rel=1e-6, abs=1e-8)
        assert float(loss[0, i].detach()) == pytest.approx(
            value_loss(float(values[i]), float(old[i]), float(returns[i]), clip) if mask[i] else 0.0
        )


def test_differences_see_a_wrong_gradient() -> None:
    """The check itself: half the gradient, or a sign, is found."""
    (slope,) = central_differences(lambda x: limited(x[0], 0, 10) ** 2, [3.0])
    assert slope == pytest.approx(6.0) and slope != pytest.approx(3.0) and slope != pytest.approx(-6.0)
