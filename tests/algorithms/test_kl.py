"""The oracle is the exact divergence of small categorical distributions, summed over all tokens."""

import math

import pytest
import torch
from reference_losses import kl_full, kl_value

from roll_lite.algorithms.kl import LOG_RATIO_LIMIT, KlEstimator, full_kl, kl_estimate, kl_loss

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3", "abs")


def distributions() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, dtype=torch.float64, generator=generator).requires_grad_()
    reference = torch.randn(5, dtype=torch.float64, generator=generator).log_softmax(0)
    return logits, reference


def expected_gradient(estimator: KlEstimator) -> torch.Tensor:
    """Of the loss of a token, over tokens drawn from the policy: sum of p(a) * grad loss(a), p itself held fixed."""
    logits, reference = distributions()
    new = logits.log_softmax(0)
    (gradient,) = torch.autograd.grad((new.exp().detach() * kl_loss(new, reference, estimator)).sum(), logits)
    return gradient


def exact_gradient(reverse: bool) -> torch.Tensor:
    logits, reference = distributions()
    new = logits.log_softmax(0)
    divergence = (reference.exp() * (reference - new)).sum() if reverse else (new.exp() * (new - reference)).sum()
    (gradient,) = torch.autograd.grad(divergence, logits)
    return gradient


def test_estimates_by_hand() -> None:
    new, ref = torch.log(torch.tensor([0.5])), torch.log(torch.tensor([0.25]))
    r = math.log(2.0)
    assert kl_estimate(new, ref, "k1").item() == pytest.approx(r)
    assert kl_estimate(new, ref, "k2").item() == pytest.approx(r * r / 2)
    assert kl_estimate(new, ref, "k3").item() == pytest.approx(0.5 - 1 + r)
    assert kl_estimate(new, ref, "abs").item() == pytest.approx(r)
    # The other way round r is -log 2: the sign says which distribution is which.
    assert kl_estimate(ref, new, "k1").item() == pytest.approx(-r)
    assert kl_estimate(ref, new, "k3").item() == pytest.approx(2.0 - 1 - r)
    assert kl_estimate(ref, new, "abs").item() == pytest.approx(r)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_estimates_of_random_tokens(estimator: KlEstimator) -> None:
    new, ref = torch.randn(2, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) - 2
    expected = [kl_value(n, r, estimator) for n, r in zip(new.tolist(), ref.tolist(), strict=True)]
    torch.testing.assert_close(kl_estimate(new, ref, estimator), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased_estimates(estimator: KlEstimator) -> None:
    logits, reference = distributions()
    new = logits.detach().log_softmax(0)
    exact = (new.exp() * (new - reference)).sum()
    torch.testing.assert_close((new.exp() * kl_estimate(new, reference, estimator)).sum(), exact)


def test_k3_is_never_negative_and_precise_near_zero() -> None:
    ref = torch.linspace(-3, 0, 1001)
    new = ref + torch.linspace(-1e-3, 1e-3, 1001)
    estimate, exact = kl_estimate(new, ref, "k3"), (new - ref).double()
    assert (estimate >= 0).all()
    torch.testing.assert_close(estimate.double(), torch.expm1(-exact) + exact, rtol=1e-6, atol=1e-30)


def test_back_propagating_k1_itself_is_useless() -> None:
    """FINDINGS 6.7 and 8: the expected gradient of the bare estimate is zero; that of kl_loss is not."""
    logits, reference = distributions()
    new = logits.log_softmax(0)
    (bare,) = torch.autograd.grad((new.exp().detach() * kl_estimate(new, reference, "k1")).sum(), logits)
    torch.testing.assert_close(bare, torch.zeros(5, dtype=torch.float64))
    assert expected_gradient("k1").abs().max() > 0.01


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_k1_and_k2_in_the_loss_have_the_unbiased_gradient(estimator: KlEstimator) -> None:
    torch.testing.assert_close(expected_gradient(estimator), exact_gradient(reverse=False))


def test_k3_in_the_loss_has_the_gradient_of_the_reverse_divergence() -> None:
    """FINDINGS 6.7: biased for KL(new || ref), and by how: it is the gradient of KL(ref || new)."""
    torch.testing.assert_close(expected_gradient("k3"), exact_gradient(reverse=True))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_gradient_equals_finite_differences(estimator: KlEstimator) -> None:
    new = torch.tensor([-0.1, -2.0, -3.5, -0.7], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-1.1, -0.2, -3.5, -9.0], dtype=torch.float64)
    step = 1e-6
    (gradient,) = torch.autograd.grad(kl_loss(new, ref, estimator).sum(), new)
    numeric = (kl_estimate(new + step, ref, estimator) - kl_estimate(new - step, ref, estimator)) / (2 * step)
    torch.testing.assert_close(gradient, numeric.detach(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_log_ratios_are_clamped_before_exp(estimator: KlEstimator) -> None:
    """FINDINGS 6.7: log-probs that are worlds apart, infinitely even, stay finite in value and gradient."""
    new = torch.tensor([-1e4, -0.1, -0.1], requires_grad=True)
    loss = kl_loss(new, torch.tensor([-0.1, -1e4, -math.inf]), estimator)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert torch.isfinite(loss).all() and torch.isfinite(gradient).all()
    assert loss.abs().max() <= math.exp(LOG_RATIO_LIMIT)
    assert (gradient[1:] > 0).all(), "a token far above the reference is still pulled down"


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_value_of_the_loss_is_the_estimate_and_the_reference_gets_no_gradient(estimator: KlEstimator) -> None:
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0], requires_grad=True)
    loss = kl_loss(new, ref, estimator)
    torch.testing.assert_close(loss.detach(), kl_estimate(new, ref, estimator).detach())
    loss.sum().backward()
    assert ref.grad is None


def off_policy() -> torch.Tensor:
    return torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(9)).log_softmax(0)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("older", [False, True], ids=["on-policy", "off-policy"])
def test_unbiased_gradient_of_every_estimate(estimator: KlEstimator, older: bool) -> None:
    """FINDINGS 6.7: with the option the expected gradient is that of KL(new || ref), also on tokens of an older policy."""
    logits, reference = distributions()
    new = logits.log_softmax(0)
    old = off_policy() if older else None
    sampled_by = new.detach() if old is None else old
    loss = kl_loss(new, reference, estimator, unbiased_gradient=True, old=old)
    torch.testing.assert_close(loss.detach(), kl_estimate(new, reference, estimator).detach())
    (gradient,) = torch.autograd.grad((sampled_by.exp() * loss).sum(), logits)
    torch.testing.assert_close(gradient, exact_gradient(reverse=False))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_an_impossible_token_has_a_finite_loss(estimator: KlEstimator) -> None:
    new = torch.tensor([-torch.inf, -1.0, -torch.inf], requires_grad=True)
    loss = kl_loss(new, torch.tensor([-1.0, -2.0, -torch.inf]), estimator)
    loss.sum().backward()
    assert torch.isfinite(loss).all() and new.grad is not None and torch.isfinite(new.grad).all() and new.grad[1] != 0
    assert loss[2] == 0, "for both policies: no difference, as actor/approx_kl measures it too"


def test_without_the_option_older_tokens_bias_every_gradient() -> None:
    logits, reference = distributions()
    loss = kl_loss(logits.log_softmax(0), reference, "k1")
    (gradient,) = torch.autograd.grad((off_policy().exp() * loss).sum(), logits)
    assert (gradient - exact_gradient(reverse=False)).abs().max() > 0.01


def test_unbiased_gradient_does_not_overflow() -> None:
    new = torch.tensor([-0.1, -1e4], requires_grad=True)
    kl_loss(new, torch.tensor([-1e4, -0.1]), "k3", unbiased_gradient=True, old=torch.tensor([-1e4, -0.1])).sum().backward()
    assert new.grad is not None and torch.isfinite(new.grad).all()


def test_full_kl_by_hand() -> None:
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/4, 1/2): log 2 / 2 + 0 - log 2 / 4."""
    p, q = (torch.tensor([[x]], dtype=torch.float64).log() for x in ([0.5, 0.25, 0.25], [0.25, 0.25, 0.5]))
    assert full_kl(p, q).shape == (1, 1) and full_kl(p, q).item() == pytest.approx(math.log(2) / 4)


def test_full_kl_is_what_k1_estimates() -> None:
    logits, reference = distributions()
    new = logits.detach().log_softmax(0)
    assert full_kl(new, reference).item() == pytest.approx(kl_full(new.tolist(), reference.tolist()))
    torch.testing.assert_close(full_kl(new, reference), (new.exp() * kl_estimate(new, reference, "k1")).sum())


def test_full_kl_has_the_exact_gradient_and_none_for_the_reference() -> None:
    logits, reference = distributions()
    fixed = reference.clone().requires_grad_()
    full_kl(logits.log_softmax(0), fixed).backward()
    torch.testing.assert_close(logits.grad, exact_gradient(reverse=False))
    assert fixed.grad is None


def test_full_kl_does_not_end_at_the_clamp_of_log_ratios() -> None:
    """p = (1/2, 1/2), q = (1 - e^-30, e^-30): log(1/2) + 30 / 2 and nothing less; the gradient in the logits pulls them together."""
    logits = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
    log_q = torch.tensor([[math.log1p(-math.exp(-30)), -30.0]], dtype=torch.float64)
    value = full_kl(logits.log_softmax(-1), log_q)
    assert value.item() == pytest.approx(math.log(0.5) + 15)
    value.sum().backward()
    # d/dz_v = p_v * (log(p_v / q_v) - KL): 1/2 * (+-15).
    torch.testing.assert_close(logits.grad, torch.tensor([[-7.5, 7.5]], dtype=torch.float64))


@pytest.mark.parametrize("nothing", [-math.inf, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("reference_too", [True, False])
def test_full_kl_over_truncated_vocabularies(nothing: float, reference_too: bool) -> None:
    """Entries that the policy never chooses add 0 to value and gradient, where the reference never does so either as well."""
    logits = torch.tensor([[0.3, -0.2, 0.1]], requires_grad=True)
    kept = torch.tensor([[0.5, 0.5]]).log()
    new = torch.cat([logits.log_softmax(-1)[:, :2] - logits.softmax(-1)[:, :2].sum().log(), torch.full((1, 1), nothing)], -1)
    ref = torch.cat([kept, torch.full((1, 1), nothing if reference_too else -3.0)], -1)
    value = full_kl(new, ref)
    assert value.item() == pytest.approx(kl_full(new[0, :2].tolist(), kept[0].tolist()), abs=1e-6)
    value.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_full_kl_where_only_the_reference_never_chooses_is_large_not_infinite() -> None:
    new = torch.tensor([[0.5, 0.5]]).log().requires_grad_()
    value = full_kl(new, torch.tensor([[0.0, -math.inf]]))
    assert value.item() == pytest.approx(0.5 * math.log(0.5) + 0.5 * LOG_RATIO_LIMIT)
    value.sum().backward()
    assert new.grad is not None and torch.isfinite(new.grad).all()
