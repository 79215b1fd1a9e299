"""Every policy loss against the loops of `reference_losses.py`, and cases worked out by hand."""

import dataclasses
import math

import pytest
import torch
from policy_cases import LOSSES, case
from reference_losses import token_weights

from roll_lite.algorithms.kl import LOG_RATIO_LIMIT
from roll_lite.algorithms.losses import PolicyTerms, row_weights
from roll_lite.config.schema.losses import (
    CispoLossConfig,
    CustomLossConfig,
    GmpoLossConfig,
    GspoLossConfig,
    KimiLossConfig,
    PolicyLossConfig,
    PpoLossConfig,
    RaftLossConfig,
    SapoLossConfig,
    ToprLossConfig,
)
from roll_lite.workers.objectives import policy_loss

NAN = math.nan


def terms_of(new: list[list[float]], old: list[list[float]], advantages: list[list[float]]) -> PolicyTerms:
    """From probabilities; NaN marks masked tokens."""
    probabilities, before = torch.tensor(new, dtype=torch.float64), torch.tensor(old, dtype=torch.float64)
    mask = ~probabilities.isnan()
    return PolicyTerms(probabilities.log().requires_grad_(), before.log(), torch.tensor(advantages, dtype=torch.float64), mask)


def gradient(config: PolicyLossConfig, terms: PolicyTerms) -> torch.Tensor:
    leaf = terms.log_probs.detach().requires_grad_()
    policy_loss(config, dataclasses.replace(terms, log_probs=leaf)).loss.sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def close(x: torch.Tensor, expected: list[list[float]]) -> None:
    torch.testing.assert_close(x.detach(), torch.tensor(expected, dtype=torch.float64))


# ---------------------------------------------------------------- against the reference


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", [0, 1])
def test_loss_ratio_and_clipping_token_by_token(name: str, seed: int) -> None:
    """Ragged rows, tool gaps, an empty row, a row of one token, advantage 0, log-ratios beyond the clamp, NaN and inf where masked."""
    config, reference = LOSSES[name]
    batch = case(seed)
    result = policy_loss(config, batch.terms)
    mask = batch.terms.mask
    for number in range(len(mask)):
        tokens = reference(batch.row(number)) if mask[number].any() else []
        expected = torch.tensor([[t.loss, t.ratio, t.low, t.high] for t in tokens], dtype=torch.float64).reshape(-1, 4).T
        torch.testing.assert_close(result.loss[number][mask[number]], expected[0], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(result.ratio[number][mask[number]], expected[1], rtol=1e-9, atol=1e-12)
        assert result.clipped_low[number][mask[number]].tolist() == expected[2].bool().tolist()
        assert result.clipped_high[number][mask[number]].tolist() == expected[3].bool().tolist()
    assert (result.loss[~mask] == 0).all() and (result.ratio[~mask] == 1).all()
    assert not (result.clipped_low | result.clipped_high)[~mask].any()


@pytest.mark.parametrize("name", LOSSES)
def test_masked_garbage_reaches_neither_loss_nor_gradient(name: str) -> None:
    """FINDINGS 6.2: what the mask takes out is out, NaN and infinities included; rows without policy tokens have gradient 0."""
    config, terms = LOSSES[name][0], case().terms
    clean = PolicyTerms(*(x.masked_fill(~terms.mask, 0.5) for x in (terms.log_probs, terms.old_log_probs, terms.advantages)), terms.mask)
    assert torch.equal(policy_loss(config, terms).loss, policy_loss(config, clean).loss)
    pulled = gradient(config, terms)
    assert torch.equal(pulled, gradient(config, clean))
    assert torch.isfinite(pulled).all() and (pulled[~terms.mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_batches_without_policy_tokens(name: str, shape: tuple[int, int]) -> None:
    x = torch.full(shape, NAN)
    terms = PolicyTerms(x.clone().requires_grad_(), x, x, torch.zeros(shape, dtype=torch.bool))
    result = policy_loss(LOSSES[name][0], terms)
    result.loss.sum().backward()
    assert result.loss.shape == shape and not result.loss.any()
    assert terms.log_probs.grad is not None and not terms.log_probs.grad.any()


@pytest.mark.parametrize("name", LOSSES)
def test_padding_and_row_order_do_not_matter(name: str) -> None:
    config, terms = LOSSES[name][0], case().terms
    order = torch.randperm(len(terms.mask), generator=torch.Generator().manual_seed(3))
    padded = PolicyTerms(
        *(torch.nn.functional.pad(x, (2, 5), value=NAN)[order] for x in (terms.log_probs, terms.old_log_probs, terms.advantages)),
        torch.nn.functional.pad(terms.mask, (2, 5))[order],
    )
    torch.testing.assert_close(policy_loss(config, padded).loss[:, 2:-5], policy_loss(config, terms).loss[order], rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(gradient(config, padded)[:, 2:-5], gradient(config, terms)[order], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_log_ratios_are_clamped_before_exp(name: str) -> None:
    """FINDINGS 8: log-ratios of 10,000 and sums of them stay finite, in float32 as well."""
    new = torch.tensor([[-0.1, -1e4, -1e4], [-0.1, -0.1, -0.1]], requires_grad=True)
    terms = PolicyTerms(new, torch.tensor([[-1e4, -0.1, -0.1], [-1e4, -1e4, -1e4]]), torch.tensor([[1.0], [-1.0]]).expand(2, 3), new < 0)
    result = policy_loss(LOSSES[name][0], terms)
    result.loss.sum().backward()
    assert torch.isfinite(result.loss).all() and new.grad is not None and torch.isfinite(new.grad).all()
    assert result.ratio.max() <= math.exp(LOG_RATIO_LIMIT) * 1.001


@pytest.mark.parametrize("old", [-1.0, -math.inf])
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "custom"])
def test_an_impossible_token_without_advantage_adds_nothing(name: str, old: float) -> None:
    """Beside others that train; kimi pulls towards the old policy where there is no advantage, and the sequence losses share one ratio."""
    config, inf = LOSSES[name][0], math.inf
    terms = PolicyTerms(
        torch.tensor([[-1.0, -inf], [-inf, -inf]]),
        torch.tensor([[-1.0, old], [old, old]]),
        torch.tensor([[1.0, 0.0], [0.0, 0.0]]),
        torch.ones(2, 2, dtype=torch.bool),
    )
    result, pulled = policy_loss(config, terms), gradient(config, terms)
    assert torch.isfinite(result.loss).all() and torch.isfinite(pulled).all()
    assert pulled[0, 0] != 0 and (pulled[1] == 0).all()
    if name not in ("gspo", "gmpo", "kimi"):
        assert not result.loss[0, 1] and not result.loss[1].any() and pulled[0, 1] == 0


@pytest.mark.parametrize("name", ["ppo", "dual_clip", "gspo", "gmpo", "sapo", "kimi"])
def test_clipped_means_no_gradient(name: str) -> None:
    """And the other way round: whoever has an advantage and is not clipped has a gradient."""
    config, terms = LOSSES[name][0], case(4).terms
    result, pulled = policy_loss(config, terms), gradient(LOSSES[name][0], terms)
    clipped = result.clipped_low | result.clipped_high
    assert clipped.any() and result.clipped_low.any() and result.clipped_high.any()
    assert (pulled[clipped] == 0).all()
    ordinary = terms.mask & ~clipped & (terms.advantages != 0)
    assert (pulled[ordinary] != 0).all()


def test_tokens_beyond_the_clamp_of_log_ratios_count_as_clipped() -> None:
    """PPO does not clip a rising ratio of a bad token, nor a falling one of a good token; beyond +-20 the clamp does, and takes the
    gradient away. By hand: log-ratios 21, -21 with A = -1, 1, 0, then 19, -19 with A = -1, 1, which keep theirs."""
    new = torch.tensor([[0.0, -21.0, 0.0, 0.0, -19.0]], dtype=torch.float64)
    old = torch.tensor([[-21.0, 0.0, -21.0, -19.0, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0, 1.0, 0.0, -1.0, 1.0]], dtype=torch.float64)
    terms = PolicyTerms(new, old, advantages, torch.ones(1, 5, dtype=torch.bool))
    result, pulled = policy_loss(PpoLossConfig(), terms), gradient(PpoLossConfig(), terms)
    assert result.clipped_high.tolist() == [[True, False, False, False, False]]
    assert result.clipped_low.tolist() == [[False, True, False, False, False]]
    assert (pulled == 0).tolist() == [[True, True, True, False, False]]
    assert [len(found) for found in (result.clipped_low.nonzero(), result.clipped_high.nonzero())] == [1, 1]


def test_topr_counts_as_clipped_only_what_its_ranges_limit_by_hand() -> None:
    """Good samples have the weight 1 whatever their ratio: nothing is limited. Bad ones up to 1: a ratio of 2 is, one of 0.5 is not,
    and one that float32 sees a millionth above 1, on-policy, is not either."""
    ratios = torch.tensor([2.0, 0.5, 2.0, 0.5, 1.000001], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)[:, None]
    terms = PolicyTerms(ratios.log()[:, None], torch.zeros(5, 1, dtype=torch.float64), advantages, torch.ones(5, 1, dtype=torch.bool))
    result = policy_loss(ToprLossConfig(), terms)
    assert not result.clipped_low.any() and result.clipped_high[:, 0].tolist() == [False, False, True, False, False]


@pytest.mark.parametrize("name", ["cispo", "cispo_both", "topr_wide", "sapo"])
def test_losses_that_cut_no_token_off(name: str) -> None:
    terms = case(4).terms
    pulled = gradient(LOSSES[name][0], terms)
    ordinary = terms.mask & (terms.advantages != 0) & ((terms.log_probs - terms.old_log_probs).abs() < LOG_RATIO_LIMIT)
    assert (pulled[ordinary] != 0).all()


AT_RATIO_ONE: dict[str, tuple[PolicyLossConfig, str, str]] = {
    "ppo": (PpoLossConfig(dual_clip=3.0), "token_mean", "token_mean"),
    "cispo": (CispoLossConfig(clip_low=0.2), "token_mean", "token_mean"),
    "topr": (ToprLossConfig(), "sequence_mean_token_sum", "sequence_mean_token_sum"),
    "sapo": (SapoLossConfig(tau_positive=0.7, tau_negative=3.0), "token_mean", "token_mean"),
    "gspo": (GspoLossConfig(), "sequence_mean_token_mean", "sequence_mean_token_mean"),
    "gmpo": (GmpoLossConfig(), "sequence_mean_token_mean", "sequence_mean_token_mean"),
    "kimi": (KimiLossConfig(), "sequence_mean_token_mean", "sequence_mean_token_sum"),
}
"""Loss, its aggregation, and the aggregation under which -A * log-prob has the same gradient at ratio 1."""


@pytest.mark.parametrize("name", AT_RATIO_ONE)
def test_at_ratio_one_it_is_the_plain_policy_gradient(name: str) -> None:
    config, own, plain = AT_RATIO_ONE[name]
    terms = case().terms
    per_row = terms.advantages.nan_to_num(0.0, 0.0, 0.0)[:, 3:4].expand_as(terms.mask) + 0.1
    leaf = terms.log_probs.clone().requires_grad_()
    lengths = terms.mask.sum(1)
    loss = policy_loss(config, PolicyTerms(leaf, terms.log_probs, per_row, terms.mask)).loss
    (loss * row_weights(lengths, own).double()[:, None]).sum().backward()  # type: ignore[arg-type]
    weights = torch.tensor(token_weights(lengths.tolist(), plain), dtype=torch.float64)[:, None]
    torch.testing.assert_close(leaf.grad, (-per_row * weights).masked_fill(~terms.mask, 0.0), rtol=1e-6, atol=1e-12)


# ---------------------------------------------------------------- by hand


def test_ppo_by_hand() -> None:
    # Ratios 1.5, 1.5, 0.5, 0.5, 1.1 with advantages 2, -2, 2, -2, 1 and bounds 1 - 0.2, 1 + 0.3:
    # -min(3, 2.6) = -2.6 clipped high; -min(-3, -2.6) = 3; -min(1, 1.6) = -1; -min(-1, -1.6) = 1.6 clipped low; -1.1.
    terms = terms_of([[0.6, 0.6, 0.2, 0.2, 0.44]], [[0.4] * 5], [[2.0, -2.0, 2.0, -2.0, 1.0]])
    config = PpoLossConfig(clip_low=0.2, clip_high=0.3)
    result = policy_loss(config, terms)
    close(result.loss, [[-2.6, 3.0, -1.0, 1.6, -1.1]])
    close(result.ratio, [[1.5, 1.5, 0.5, 0.5, 1.1]])
    assert result.clipped_high.tolist() == [[True, False, False, False, False]]
    assert result.clipped_low.tolist() == [[False, False, False, True, False]]
    close(gradient(config, terms), [[0.0, 3.0, -1.0, 0.0, -1.1]])


def test_dual_clip_by_hand() -> None:
    # Ratio 5 with A = -2: PPO's loss 10, at most 3 * 2 = 6 and flat there. Ratio 2: 4, untouched. A > 0: untouched.
    terms = terms_of([[0.5, 0.2, 0.5]], [[0.1, 0.1, 0.1]], [[-2.0, -2.0, 1.0]])
    config = PpoLossConfig(dual_clip=3.0)
    result = policy_loss(config, terms)
    close(result.loss, [[6.0, 4.0, -1.2]])
    assert result.clipped_high.tolist() == [[True, False, True]] and not result.clipped_low.any()
    close(gradient(config, terms), [[0.0, 4.0, 0.0]])


def test_gspo_by_hand() -> None:
    """One ratio per sequence, the geometric mean over its policy tokens alone; token advantages that vary are averaged.

    Row 1: ratios 4 and 1 around a gap: s = 2, A = (1 + 2) / 2 = 1.5 clipped to 1.5 * (1 + 0.5). Row 2: one token, ratio 0.5, A = -1
    clipped at 1 - 0.2. Row 3: s = 1.
    """
    terms = terms_of([[0.4, NAN, 0.3], [0.2, NAN, NAN], [0.2, 0.4, NAN]], [[0.1, NAN, 0.3], [0.4, 0.4, NAN], [0.4, 0.2, NAN]], [
        [1.0, NAN, 2.0],
        [-1.0, 9.0, 9.0],
        [3.0, 1.0, 9.0],
    ])  # fmt: skip
    config = GspoLossConfig(clip_low=0.2, clip_high=0.5)
    result = policy_loss(config, terms)
    close(result.loss, [[-2.25, 0.0, -2.25], [0.8, 0.0, 0.0], [-2.0, -2.0, 0.0]])
    close(result.ratio, [[2.0, 1.0, 2.0], [0.5, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert result.clipped_high.tolist() == [[True, False, True], [False] * 3, [False] * 3]
    assert result.clipped_low.tolist() == [[False] * 3, [True, False, False], [False] * 3]
    # Each of two tokens moves s by s / 2, and both tokens' losses with it: -A * s / 2 * 2.
    close(gradient(config, terms), [[0.0] * 3, [0.0] * 3, [-2.0, -2.0, 0.0]])


def test_gmpo_by_hand() -> None:
    """A = 1: log-ratios log 4 -> limited to log 2, and -log 8 untouched: exp((log 2 - log 8) / 2) = 1/2.
    A = -1: log 4 untouched, -log 8 -> -log 2: exp((log 4 - log 2) / 2) = sqrt 2."""
    terms = terms_of([[0.4, 0.1]] * 2, [[0.1, 0.8]] * 2, [[1.0, 1.0], [-1.0, -1.0]])
    config = GmpoLossConfig(log_clip_low=math.log(2), log_clip_high=math.log(2))
    result = policy_loss(config, terms)
    close(result.loss, [[-0.5, -0.5], [math.sqrt(2)] * 2])
    assert result.clipped_high.tolist() == [[True, False], [False, False]]
    assert result.clipped_low.tolist() == [[False, False], [False, True]]
    close(gradient(config, terms), [[0.0, -0.5], [math.sqrt(2), 0.0]])


def test_cispo_by_hand() -> None:
    """FINDINGS 8: upper bound only by default, bounds 1 - low and 1 + high. Ratios 8, 2, 1/8; the gradient is -weight * A."""
    terms = terms_of([[0.8, 0.2, 0.1]], [[0.1, 0.1, 0.8]], [[1.0, -1.0, 2.0]])
    close(gradient(CispoLossConfig(), terms), [[-5.0, 2.0, -0.25]])
    close(gradient(CispoLossConfig(clip_low=0.5, clip_high=0.5), terms), [[-1.5, 1.5, -1.0]])
    both = policy_loss(CispoLossConfig(clip_low=0.5, clip_high=0.5), terms)
    close(both.loss, [[-1.5 * math.log(0.8), 1.5 * math.log(0.2), -math.log(0.1)]])
    assert both.clipped_high.tolist() == [[True, True, False]] and both.clipped_low.tolist() == [[False, False, True]]


def test_topr_by_hand() -> None:
    """Sequence ratios 2 * 2 = 4, 4 and 1/4: positive ones weigh 1 without looking at theirs, negative ones min(4, 1) = 1 and 1/4."""
    terms = terms_of([[0.2, 0.4], [0.2, 0.4], [0.1, 0.1]], [[0.1, 0.2], [0.1, 0.2], [0.2, 0.2]], [[3.0, 3.0], [-2.0, -2.0], [-2.0, -2.0]])
    close(gradient(ToprLossConfig(), terms), [[-3.0, -3.0], [2.0, 2.0], [0.5, 0.5]])
    result = policy_loss(ToprLossConfig(), terms)
    close(result.ratio, [[4.0, 4.0], [4.0, 4.0], [0.25, 0.25]])
    assert result.clipped_high.tolist() == [[False, False], [True, True], [False, False]] and not result.clipped_low.any()


def test_sapo_by_hand() -> None:
    """Ratio 1: 4 / tau * 1/2. Ratio 2, tau = log 3: sigmoid(log 3) = 3/4, so 3 / tau, with gradient 4 * 3/4 * 1/4 * 2 = 1.5."""
    tau = math.log(3)
    terms = terms_of([[0.1, 0.2, 0.2]], [[0.1, 0.1, 0.1]], [[1.0, 1.0, -2.0]])
    config = SapoLossConfig(tau_positive=tau, tau_negative=2 * tau)
    # tau doubled: sigmoid(log 9) = 0.9.
    close(policy_loss(config, terms).loss, [[-2 / tau, -3 / tau, 2 * 0.9 * 4 / (2 * tau)]])
    close(gradient(config, terms), [[-1.0, -1.5, 4 * 0.9 * 0.1 * 2 * 2]])


def test_raft_trains_on_positive_samples_only() -> None:
    terms = terms_of([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [[0.5, 0.5]] * 3, [[2.0, 2.0], [-1.0, -1.0], [0.0, 0.0]])
    close(policy_loss(RaftLossConfig(), terms).loss, [[math.log(2), math.log(2)], [0.0, 0.0], [0.0, 0.0]])
    close(gradient(RaftLossConfig(), terms), [[-1.0, -1.0], [0.0, 0.0], [0.0, 0.0]])


def test_kimi_by_hand() -> None:
    """s = log 2 + log 4 = log 8 in the row of two tokens, A = 1: (1 - tau log 8)^2 / (2 tau) on both, gradient -2 * (1 - tau log 8)."""
    terms = terms_of([[0.2, NAN, 0.4]], [[0.1, 0.1, 0.1]], [[0.5, NAN, 1.5]])
    rest = 1 - 0.25 * math.log(8)
    close(policy_loss(KimiLossConfig(tau=0.25), terms).loss, [[rest**2 / 0.5, 0.0, rest**2 / 0.5]])
    close(gradient(KimiLossConfig(tau=0.25), terms), [[-2 * rest, 0.0, -2 * rest]])


def test_kimi_without_pull_is_the_policy_gradient() -> None:
    """tau -> 0, at any ratio: the gradient of the sequence is -A * grad log-prob of the sequence."""
    terms = terms_of([[0.2, 0.4, 0.1]], [[0.1, 0.1, 0.3]], [[-1.5, -1.5, -1.5]])
    torch.testing.assert_close(gradient(KimiLossConfig(tau=1e-9), terms) / 3, torch.full((1, 3), 1.5, dtype=torch.float64))


# ---------------------------------------------------------------- a user's own


def test_a_users_loss_gets_its_arguments_and_is_masked() -> None:
    terms = case().terms
    result = policy_loss(CustomLossConfig(function="user_losses.whole", args={"bound": 1.5}), terms)
    assert (result.loss[~terms.mask] == 0).all() and (result.ratio[~terms.mask] == 1).all()
    assert not result.ratio.requires_grad and result.clipped_high.any() and not result.clipped_high[~terms.mask].any()
    twice = policy_loss(CustomLossConfig(function="user_losses.bare", args={"scale": 2.0}), terms)
    torch.testing.assert_close(twice.loss, 2 * policy_loss(CustomLossConfig(function="user_losses.bare"), terms).loss)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("mean", r"loss is \(\), expected a tensor \(9, 12\)"),
        ("number", "returned float, expected a PolicyLoss"),
        ("infinite", r"the loss of row 0, token \d+ is -?(inf|nan)"),
        ("detached", "does not depend on terms.log_probs"),
        ("missing", "has no 'missing'"),
    ],
)
def test_a_users_mistake_is_named(function: str, message: str) -> None:
    terms = dataclasses.replace(case().terms, log_probs=case().terms.log_probs.requires_grad_())
    with pytest.raises(ValueError, match=rf"algorithm\.policy_loss\.function.*user_losses\.{function}.*{message}"):
        policy_loss(CustomLossConfig(function=f"user_losses.{function}"), terms)


def test_a_model_gone_wrong_is_not_blamed_on_the_users_loss() -> None:
    terms = case().terms
    broken = dataclasses.replace(terms, log_probs=torch.full_like(terms.log_probs, NAN))
    assert policy_loss(CustomLossConfig(function="user_losses.bare"), broken).loss.isnan().any()
