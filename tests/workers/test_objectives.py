"""The oracle is a loop over single tokens in Python floats, and invariance under everything that must not matter."""

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from policy_cases import LOSSES
from reference_losses import kl_full, mismatch_weights

from roll_lite.algorithms.kl import kl_loss
from roll_lite.algorithms.losses import row_weights
from roll_lite.algorithms.token_metrics import Peaks, ratio_percentiles
from roll_lite.config.schema.losses import CorrectionWeightConfig, CustomLossConfig, MismatchCorrectionConfig, PpoLossConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs
from roll_lite.workers.objectives import ActorLoss, CriticLoss, OldLogProbs

NAN = math.nan
Loss = Callable[[MicroBatchOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
MODES = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


def batch(mode: str = "token_mean", rows: int = 6, columns: int = 9, seed: int = 0) -> tuple[MicroBatchOutputs, MicroBatch]:
    """A whole mini-batch: ragged rows, one with a gap, one without any policy token, NaN wherever the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, columns + 1, (rows,), generator=generator)
    mask = (torch.arange(columns)[None, :] < lengths[:, None]) & (torch.arange(columns)[None, :] >= 1)
    mask[0, 2] = False
    mask[1] = False

    def column(shift: float = 0.0, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator, dtype=torch.float64) * scale + shift).masked_fill(~mask, NAN)

    def distribution() -> torch.Tensor:
        logits = torch.randn(rows, columns, 4, generator=generator, dtype=torch.float64)
        return logits.log_softmax(-1).masked_fill(~mask[..., None], NAN)

    log_probs = column(-2.0, 0.3)
    columns_ = {
        "advantages": column(),
        "old_log_probs": log_probs + column(0.0, 0.2),
        "rollout_log_probs": log_probs + column(0.0, 0.01),
        "ref_log_probs": log_probs + column(0.0, 0.5),
        "values": column(),
        "returns": column(),
        "loss_weight": row_weights(mask.sum(1), mode, 5).double(),  # type: ignore[arg-type]
        "domain_number": torch.arange(rows) % 3,
        "ref_distribution": distribution(),
    }
    outputs = MicroBatchOutputs(
        log_probs=log_probs, entropy=column(1.0, 0.1).abs(), values=column(), distribution=distribution(), final_value=torch.zeros(rows)
    )
    return outputs, MicroBatch(columns=columns_, mask=mask)


def pick(outputs: MicroBatchOutputs, micro: MicroBatch, rows: list[int]) -> tuple[MicroBatchOutputs, MicroBatch]:
    return (
        MicroBatchOutputs(**{f.name: getattr(outputs, f.name)[rows] for f in dataclasses.fields(outputs)}),
        MicroBatch({k: v[rows] for k, v in micro.columns.items()}, micro.mask[rows]),
    )


def pad(outputs: MicroBatchOutputs, micro: MicroBatch, left: int, right: int) -> tuple[MicroBatchOutputs, MicroBatch]:
    def widen(x: torch.Tensor) -> torch.Tensor:
        sides = (0,) * 2 * (x.dim() - 2) + (left, right)
        return torch.nn.functional.pad(x, sides, value=False if x.dtype == torch.bool else NAN) if x.dim() > 1 else x

    return (
        MicroBatchOutputs(**{f.name: widen(getattr(outputs, f.name)) for f in dataclasses.fields(outputs)}),
        MicroBatch({k: widen(v) for k, v in micro.columns.items()}, widen(micro.mask)),
    )


def run(loss: Loss, outputs: MicroBatchOutputs, micro: MicroBatch) -> tuple[float, dict[str, float], torch.Tensor]:
    """Loss, metric sums, gradient [rows, columns] of what the model said."""
    name = "log_probs" if isinstance(loss, ActorLoss) else "values"
    leaf = getattr(outputs, name).clone().requires_grad_()
    share, metrics = loss(dataclasses.replace(outputs, **{name: leaf}), micro)
    (gradient,) = torch.autograd.grad(share, leaf)
    return share.item(), {key: float(value) for key, value in metrics.items()}, gradient


OVERALL = ("actor/loss", "actor/policy_loss", "actor/kl_loss")


def by_hand(outputs: MicroBatchOutputs, micro: MicroBatch, low: float, high: float, kl: float, entropy: float) -> dict[str, float]:
    """Token by token, from the papers: PPO's surrogate, Schulman's k3, Shannon entropy given, TIS up to 1.005. Three domains."""
    sums = dict.fromkeys(OVERALL, 0.0)
    peak = 0.0
    assert outputs.log_probs is not None and outputs.entropy is not None
    for i, j in micro.mask.nonzero().tolist():
        new, h = float(outputs.log_probs[i, j]), float(outputs.entropy[i, j])
        old, ref, engine, adv = (
            float(micro.columns[k][i, j]) for k in ("old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
        )
        weight, ratio, to_ref = float(micro.columns["loss_weight"][i]), math.exp(new - old), math.exp(ref - new) - 1 - (ref - new)
        ((correction, limited),) = mismatch_weights([old], [engine], "token", "truncate", 0.0, 1.005)
        surrogate = min(ratio * adv, min(max(ratio, 1 - low), 1 + high) * adv) * correction
        sums["actor/policy_loss"] += -weight * surrogate
        sums["actor/kl_loss"] += weight * to_ref
        sums["actor/loss"] += weight * (-surrogate + kl * to_ref - entropy * h)
        token = {
            "actor/tokens": 1,
            "actor/ratio": ratio,
            "actor/ratio_square": ratio**2,
            "actor/approx_kl": math.exp(new - old) - 1 - (new - old),
            "actor/clip_low": ratio < 1 - low and adv < 0,
            "actor/clip_high": ratio > 1 + high and adv > 0,
            "actor/kl_ref": to_ref,
            "actor/entropy": h,
            "mismatch/mean": abs(engine - old),
            "mismatch/k3": math.exp(old - engine) - 1 - (old - engine),
            "correction/weight": correction,
            "correction/weight_square": correction**2,
            "correction/limited": limited,
        }
        for name, value in token.items():
            for domain in range(3):
                sums[f"{name}#{domain}"] = sums.get(f"{name}#{domain}", 0.0) + value * (domain == i % 3)
        peak = max(peak, abs(engine - old))
    return sums | {"peak": peak}


@pytest.mark.parametrize("mode", MODES)
def test_actor_loss_and_metrics_token_by_token(mode: str) -> None:
    """Of three domains; the correction multiplies the policy loss and neither KL nor entropy."""
    outputs, micro = batch(mode)
    loss = ActorLoss(
        policy_loss=PpoLossConfig(clip_low=0.1, clip_high=0.15),
        mismatch_correction=MismatchCorrectionConfig(weight=CorrectionWeightConfig(high=1.005)),
        kl_coef=0.3,
        entropy_coef=0.05,
        domains=3,
    )
    share, metrics, _ = run(loss, outputs, micro)
    expected = by_hand(outputs, micro, 0.1, 0.15, 0.3, 0.05)
    peak = expected.pop("peak")
    assert share == pytest.approx(expected["actor/loss"], rel=1e-9)
    assert all(sum(expected[f"{name}#{d}"] for d in range(3)) > 0 for name in ("actor/clip_low", "actor/clip_high", "correction/limited"))
    assert metrics == pytest.approx(expected, rel=1e-9)
    peaks = loss.peaks.collect()
    assert max(peaks[f"mismatch/max#{domain}"] for domain in range(3)) == pytest.approx(peak)


def test_without_domain_numbers_everything_is_domain_0() -> None:
    outputs, micro = batch()
    _, apart, _ = run(ActorLoss(domains=3), outputs, micro)
    single = run(ActorLoss(), outputs, micro)[1]
    nameless = MicroBatch({k: v for k, v in micro.columns.items() if k != "domain_number"}, micro.mask)
    together = run(ActorLoss(domains=3), outputs, nameless)[1]
    assert together.keys() == apart.keys(), "the same names on every call"
    for name, value in single.items():
        if name.endswith("#0"):
            assert together[name] == pytest.approx(value, rel=1e-12)
            assert together[name[:-1] + "1"] == together[name[:-1] + "2"] == 0
            assert sum(apart[f"{name[:-1]}{domain}"] for domain in range(3)) == pytest.approx(value, rel=1e-12)


def test_an_unknown_domain_is_an_error() -> None:
    outputs, micro = batch()
    with pytest.raises(RuntimeError, match="out of bounds|smaller than num_classes"):
        run(ActorLoss(domains=2), outputs, micro)


def test_ratio_histogram_of_the_actor() -> None:
    outputs, micro = batch()
    loss = ActorLoss(domains=3)
    run(loss, outputs, micro)
    assert outputs.log_probs is not None
    log_ratios = (outputs.log_probs - micro.columns["old_log_probs"])[micro.mask]
    counts = loss.ratios.collect()
    assert counts.sum(1).tolist() == [int(micro.mask[d::3].sum()) for d in range(3)]
    (median,) = ratio_percentiles(counts.sum(0), (50,))
    assert math.log(median) == pytest.approx(float(log_ratios.quantile(0.5, interpolation="lower")), rel=0.03)
    peaks = loss.peaks.collect()
    for domain in range(3):
        own = (outputs.log_probs - micro.columns["old_log_probs"])[domain::3][micro.mask[domain::3]]
        assert peaks[f"actor/ratio_min#{domain}"] == pytest.approx(math.exp(own.min()))
        assert peaks[f"actor/ratio_max#{domain}"] == pytest.approx(math.exp(own.max()))


def test_a_copy_with_another_kl_coefficient_sees_for_itself() -> None:
    outputs, micro = batch()
    loss = ActorLoss(kl_coef=0.1)
    changed = dataclasses.replace(loss, kl_coef=0.2)
    first, second = run(loss, outputs, micro), run(changed, outputs, micro)
    assert second[0] - first[0] == pytest.approx(0.1 * first[1]["actor/kl_loss"])
    assert loss.kl_coef == 0.1 and loss.ratios.collect().sum() == changed.ratios.collect().sum() == micro.mask.sum()


def test_full_kl_in_the_loss() -> None:
    """Value and gradient over the whole distribution; measured exactly instead of by k3."""
    outputs, micro = batch()
    loss = ActorLoss(kl_coef=0.5, kl_estimator="full")
    assert loss.outputs == ("log_probs", "entropy", "distribution")
    assert loss.columns == ("advantages", "loss_weight", "old_log_probs", "ref_distribution")
    assert outputs.distribution is not None
    total, measured = 0.0, 0.0
    for i, j in micro.mask.nonzero().tolist():
        kl = kl_full(outputs.distribution[i, j].tolist(), micro.columns["ref_distribution"][i, j].tolist())
        total += float(micro.columns["loss_weight"][i]) * kl
        measured += kl
    share, metrics, _ = run(loss, outputs, micro)
    assert metrics["actor/kl_loss"] == pytest.approx(total) and metrics["actor/kl_ref#0"] == pytest.approx(measured)
    assert share == pytest.approx(metrics["actor/policy_loss"] + 0.5 * total)
    leaf = outputs.distribution.nan_to_num(0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(dataclasses.replace(outputs, distribution=x), micro)[0], (leaf,))


def test_unbiased_kl_gradient_is_weighted_with_the_policy_ratio() -> None:
    """FINDINGS 6.7: the option reaches the loss, with the old log-probs."""
    outputs, micro = batch()
    mask, weight = micro.mask, micro.columns["loss_weight"][:, None]
    new, old, ref = (
        x.masked_fill(~mask, 0.0)
        for x in (outputs.log_probs, micro.columns["old_log_probs"], micro.columns["ref_log_probs"])  # type: ignore[union-attr]
    )
    leaf = new.clone().requires_grad_()
    (weight * 0.7 * kl_loss(leaf, ref, "k3", unbiased_gradient=True, old=old)).sum().backward()
    with_kl = run(ActorLoss(kl_coef=0.7, kl_unbiased_gradient=True), outputs, micro)[2]
    torch.testing.assert_close(with_kl - run(ActorLoss(), outputs, micro)[2], leaf.grad)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_mismatch_correction_weighs_against_the_old_log_probs(level: str) -> None:
    """Under `current` those are the training forward's."""
    outputs, micro = batch()
    correction = MismatchCorrectionConfig(weight=CorrectionWeightConfig(level=level))  # type: ignore[arg-type]
    corrected = run(ActorLoss(old_log_probs="current", mismatch_correction=correction), outputs, micro)
    assert "rollout_log_probs" in ActorLoss(old_log_probs="current", mismatch_correction=correction).columns
    same = MicroBatch({**micro.columns, "old_log_probs": outputs.log_probs.clone()}, micro.mask)  # type: ignore[union-attr]
    assert corrected[0] == run(ActorLoss(mismatch_correction=correction), outputs, same)[0]
    assert corrected[0] != run(ActorLoss(old_log_probs="current"), outputs, micro)[0]


@pytest.mark.parametrize("old_log_probs", ["recompute", "current", "rollout"])
def test_filters_take_the_policy_loss_of_what_trainer_and_engine_see_differently(old_log_probs: OldLogProbs) -> None:
    """All of them have to be passed, and the weight is multiplied. Under `rollout` the training forward is the trainer's side. An infinite
    loss of weight 0 is 0."""
    outputs, micro = batch()
    assert outputs.log_probs is not None
    low, high = {"estimator": "ratio", "low": 0.985}, {"estimator": "k3", "high": 1e-4}
    correction = MismatchCorrectionConfig.model_validate({"filters": [low, high]})
    weighted = MismatchCorrectionConfig.model_validate({"filters": [low, high], "weight": {"high": 1.005}})
    plain = run(ActorLoss(old_log_probs=old_log_probs), outputs, micro)
    trained = micro.columns["old_log_probs"] if old_log_probs == "recompute" else outputs.log_probs
    ratio = (trained - micro.columns["rollout_log_probs"]).exp()
    kept = micro.mask & (ratio >= 0.985) & (ratio - 1 - ratio.log() <= 1e-4)
    assert kept.any() and (micro.mask & (ratio < 0.985)).any() and (micro.mask & (ratio > 1.015)).any()
    loss = ActorLoss(old_log_probs=old_log_probs, mismatch_correction=correction)
    found = run(loss, outputs, micro)
    torch.testing.assert_close(found[2], torch.where(kept, plain[2], 0.0))
    assert found[1]["correction/filtered#0"] == int((micro.mask & ~kept).sum()) and found[1]["correction/weight#0"] == int(kept.sum())
    assert "correction/limited#0" not in found[1] and found[1]["actor/tokens#0"] == plain[1]["actor/tokens#0"]
    both = run(ActorLoss(old_log_probs=old_log_probs, mismatch_correction=weighted), outputs, micro)
    torch.testing.assert_close(both[2], torch.where(kept, plain[2] * ratio.clamp(max=1.005), 0.0))
    row, token = (micro.mask & ~kept).nonzero()[0].tolist()
    broken = micro.columns["advantages"].clone()
    broken[row, token] = math.inf
    assert math.isfinite(run(loss, outputs, MicroBatch({**micro.columns, "advantages": broken}, micro.mask))[0])


def test_a_users_loss_gets_what_it_has_parameters_for() -> None:
    """By hand: A * (new + 2 rollout + 3 ref) and the entropy off it; the entropy has a gradient. Nothing that is masked reaches it."""
    outputs, micro = batch()
    loss = ActorLoss(policy_loss=CustomLossConfig(function="user_losses.asks", args={"scale": 0.5}), measure_entropy=False)
    assert loss.outputs == ("log_probs", "entropy") and {"rollout_log_probs", "ref_log_probs"} <= set(loss.columns)
    assert outputs.entropy is not None and outputs.log_probs is not None
    entropy = outputs.entropy.clone().requires_grad_()
    share, metrics = loss(dataclasses.replace(outputs, log_probs=outputs.log_probs.clone().requires_grad_(), entropy=entropy), micro)
    expected = 0.0
    for i, j in micro.mask.nonzero().tolist():
        advantage, rollout, ref, weight = (
            float(micro.columns[name][i, j] if micro.columns[name].dim() == 2 else micro.columns[name][i])
            for name in ("advantages", "rollout_log_probs", "ref_log_probs", "loss_weight")
        )
        new, h = float(outputs.log_probs[i, j]), float(outputs.entropy[i, j])
        expected += weight * (-advantage * (new + 2 * rollout + 3 * ref) - 0.5 * h)
    assert share.item() == pytest.approx(expected, rel=1e-9) == float(metrics["actor/policy_loss"])
    (gradient,) = torch.autograd.grad(share, entropy)
    torch.testing.assert_close(gradient, -0.5 * micro.mask * micro.columns["loss_weight"][:, None])
    fewer = CustomLossConfig(function="user_losses.bare")
    assert ActorLoss(policy_loss=fewer, measure_entropy=False).outputs == ("log_probs",)
    assert ActorLoss(policy_loss=fewer).columns == ActorLoss().columns
    own = CustomLossConfig(function="user_losses.asks", args={"ref_log_probs": 1.0})
    assert "ref_log_probs" not in ActorLoss(policy_loss=own).columns, "the configuration has given it"


def test_critic_loss_and_metrics_token_by_token() -> None:
    outputs, micro = batch("sequence_mean_token_mean")
    share, metrics, _ = run(CriticLoss(clip=0.4), outputs, micro)
    assert outputs.values is not None
    total, clipped, values, returns, errors = 0.0, 0, [], [], []
    for i, j in micro.mask.nonzero().tolist():
        v, old, target = float(outputs.values[i, j]), float(micro.columns["values"][i, j]), float(micro.columns["returns"][i, j])
        near = min(max(v, old - 0.4), old + 0.4)
        total += float(micro.columns["loss_weight"][i]) * 0.5 * max((v - target) ** 2, (near - target) ** 2)
        clipped += near != v
        values.append(v)
        returns.append(target)
        errors.append(target - old)
    assert share == pytest.approx(total, rel=1e-9) and clipped > 0
    assert metrics == pytest.approx(
        {
            "critic/loss": total,
            "critic/tokens#0": len(values),
            "critic/clip_fraction#0": clipped,
            "critic/value_mean#0": sum(values),
            "critic/return_mean#0": sum(returns),
            "critic/return_square#0": sum(x * x for x in returns),
            "critic/error_mean#0": sum(errors),
            "critic/error_square#0": sum(x * x for x in errors),
        },
        rel=1e-9,
    )


ACTOR = ActorLoss(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.05, domains=3)
CORRECTIONS = [
    None,
    MismatchCorrectionConfig.model_validate({"weight": {"level": "sequence"}, "filters": [{"level": "sequence_min", "low": 0.9}]}),
    MismatchCorrectionConfig(weight=CorrectionWeightConfig(level="geometric", mode="mask", low=0.999, high=1.001)),
]
ACTORS = [
    ActorLoss(policy_loss=LOSSES[name][0], mismatch_correction=CORRECTIONS[number % 3], domains=1 + 2 * (number % 2))
    for number, name in enumerate(LOSSES)
]
EVERY_LOSS = pytest.mark.parametrize(
    "loss", [ACTOR, *ACTORS, ActorLoss(kl_coef=0.2, kl_estimator="full"), CriticLoss()], ids=["actor", *LOSSES, "full_kl", "critic"]
)


@pytest.mark.parametrize("mode", MODES)
@EVERY_LOSS
@pytest.mark.parametrize(
    "cut", [[[0, 1, 2, 3, 4, 5]], [[5, 3], [1], [0, 2, 4]], [[i] for i in range(6)]], ids=["whole", "uneven", "single"]
)
def test_cutting_and_padding_do_not_matter(loss: Loss, mode: str, cut: list[list[int]]) -> None:
    """FINDINGS 6.3: sums over one global count. Any micro-batches, any order, any padding: the same loss, gradient, metrics.
    The critic's too."""
    outputs, micro = batch(mode)
    whole, whole_metrics, whole_gradient = run(loss, outputs, micro)
    shares, sums, gradient = 0.0, dict.fromkeys(whole_metrics, 0.0), torch.zeros_like(whole_gradient)
    for number, rows in enumerate(cut):
        share, metrics, part = run(loss, *pad(*pick(outputs, micro, rows), left=0, right=3 * number))
        shares += share
        sums = {key: sums[key] + metrics[key] for key in sums}
        gradient[rows] = part[:, : gradient.shape[1]]
    assert shares == pytest.approx(whole, rel=1e-9)
    assert sums == pytest.approx(whole_metrics, rel=1e-9)
    torch.testing.assert_close(gradient, whole_gradient)


@EVERY_LOSS
def test_spreading_over_ranks_does_not_matter(loss: Loss) -> None:
    """FINDINGS 6.3: two ranks with rows of their own, in an order of their own; the mean of their means would be another number."""
    outputs, micro = batch("token_mean")
    whole, whole_metrics, whole_gradient = run(loss, outputs, micro)
    ranks = [[4, 0, 2], [5, 3, 1]]
    shares = [run(loss, *pick(outputs, micro, rows)) for rows in ranks]
    assert sum(share for share, _, _ in shares) == pytest.approx(whole, rel=1e-9)
    assert {key: sum(metrics[key] for _, metrics, _ in shares) for key in whole_metrics} == pytest.approx(whole_metrics, rel=1e-9)
    for rows, (_, _, gradient) in zip(ranks, shares, strict=True):
        torch.testing.assert_close(gradient, whole_gradient[rows])


@pytest.mark.parametrize("garbage", [NAN, math.inf, -math.inf])
@EVERY_LOSS
def test_masked_entries_never_contribute(loss: Loss, garbage: float) -> None:
    """FINDINGS 6.2: what the mask takes out is out of sum and count, whatever stands there."""
    outputs, micro = batch()
    clean, clean_metrics, clean_gradient = run(loss, *_fill(outputs, micro, 0.0))
    share, metrics, gradient = run(loss, *_fill(outputs, micro, garbage))
    assert share == clean and metrics == clean_metrics
    assert torch.equal(gradient, clean_gradient) and (gradient[~micro.mask] == 0).all()
    tokens = [value for name, value in metrics.items() if name.partition("#")[0] in ("actor/tokens", "critic/tokens")]
    assert sum(tokens) == int(micro.mask.sum())


def _fill(outputs: MicroBatchOutputs, micro: MicroBatch, value: float) -> tuple[MicroBatchOutputs, MicroBatch]:
    def fill(x: torch.Tensor) -> torch.Tensor:
        return x if x.dim() == 1 else x.masked_fill(~(micro.mask if x.dim() == 2 else micro.mask[..., None]), value)

    return (
        MicroBatchOutputs(**{f.name: fill(getattr(outputs, f.name)) for f in dataclasses.fields(outputs)}),
        MicroBatch({k: fill(v) for k, v in micro.columns.items()}, micro.mask),
    )


def test_token_mean_of_a_filtered_row_is_one_not_six() -> None:
    """FINDINGS 6.2: losses 1 over two tokens, a filtered row of 10s beside it: the token mean is 1.0, not 6.0 or 5.5."""
    mask = torch.tensor([[True, True], [False, False]])
    columns = {"advantages": torch.tensor([[-1.0, -1.0], [-10.0, -10.0]]), "loss_weight": row_weights(mask.sum(1), "token_mean")}
    micro = MicroBatch(columns, mask)
    share, metrics = ActorLoss(old_log_probs="current")(MicroBatchOutputs(log_probs=torch.full((2, 2), -1.0)), micro)
    assert share.item() == 1.0 and metrics["actor/tokens#0"] == 2


def test_a_micro_batch_without_policy_tokens_has_a_zero_loss_with_a_graph() -> None:
    log_probs = torch.full((2, 3), NAN, requires_grad=True)
    garbage = torch.full((2, 3), NAN)
    micro = MicroBatch(
        {"advantages": garbage, "old_log_probs": garbage, "loss_weight": torch.zeros(2)}, torch.zeros(2, 3, dtype=torch.bool)
    )
    share, metrics = ActorLoss()(MicroBatchOutputs(log_probs=log_probs), micro)
    share.backward()
    assert share.item() == 0 and log_probs.grad is not None and (log_probs.grad == 0).all()
    assert all(value.item() == 0 for value in metrics.values())


def test_old_log_probs_current_detaches_the_training_forward() -> None:
    """Ratio 1 everywhere, gradient -weight * advantage; equals `recompute` with the same numbers in the column."""
    outputs, micro = batch()
    share, metrics, gradient = run(ActorLoss(old_log_probs="current"), outputs, micro)
    assert metrics["actor/ratio#0"] == metrics["actor/tokens#0"] and metrics["actor/approx_kl#0"] == 0
    expected = (-micro.columns["loss_weight"][:, None] * micro.columns["advantages"]).masked_fill(~micro.mask, 0.0)
    torch.testing.assert_close(gradient, expected)
    same = MicroBatch({**micro.columns, "old_log_probs": outputs.log_probs.clone()}, micro.mask)  # type: ignore[union-attr]
    again = run(ActorLoss(old_log_probs="recompute"), outputs, same)
    assert again[0] == share and again[1] == metrics and torch.equal(again[2], gradient)


def test_old_log_probs_rollout_takes_the_engines() -> None:
    outputs, micro = batch()
    swapped = MicroBatch({**micro.columns, "old_log_probs": micro.columns["rollout_log_probs"]}, micro.mask)
    ours, reference = run(ActorLoss(old_log_probs="rollout"), outputs, micro), run(ActorLoss(), outputs, swapped)
    assert ours[0] == reference[0] and torch.equal(ours[2], reference[2])
    assert ours[1]["mismatch/mean#0"] > 0, "compared with the training forward, not with itself"


@pytest.mark.parametrize(
    "loss",
    [
        ActorLoss(policy_loss=PpoLossConfig(clip_low=0.1, clip_high=0.3), kl_coef=0.3, entropy_coef=0.1),
        ActorLoss(policy_loss=LOSSES["gspo"][0], mismatch_correction=CORRECTIONS[1], kl_coef=0.1),
        CriticLoss(),
    ],
    ids=["actor", "gspo", "critic"],
)
def test_gradient_equals_finite_differences(loss: Loss) -> None:
    outputs, micro = batch()
    name = "log_probs" if isinstance(loss, ActorLoss) else "values"
    leaf = getattr(outputs, name).masked_fill(~micro.mask, 0.0).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss(dataclasses.replace(outputs, **{name: x}), micro)[0], (leaf,))


def test_entropy_bonus_pulls_entropy_up() -> None:
    outputs, micro = batch()
    assert outputs.entropy is not None
    entropy = outputs.entropy.clone().requires_grad_()
    share, _ = ActorLoss(entropy_coef=0.2)(dataclasses.replace(outputs, entropy=entropy), micro)
    (gradient,) = torch.autograd.grad(share, entropy)
    torch.testing.assert_close(gradient, -0.2 * micro.mask * micro.columns["loss_weight"][:, None])


def test_what_the_losses_ask_for() -> None:
    assert ActorLoss().outputs == ("log_probs", "entropy")
    assert ActorLoss(measure_entropy=False).outputs == ("log_probs",)
    assert ActorLoss(measure_entropy=False, entropy_coef=0.1).outputs == ("log_probs", "entropy")
    assert ActorLoss().columns == ("advantages", "loss_weight", "old_log_probs")
    assert ActorLoss(old_log_probs="current", kl_coef=0.1).columns == ("advantages", "loss_weight", "ref_log_probs")
    assert CriticLoss().outputs == ("values",) and CriticLoss().columns == ("values", "returns", "loss_weight")


def test_peaks_are_of_unmasked_tokens_by_domain_until_they_are_read() -> None:
    """Masked entries are no candidates: the smallest advantage of a row of ones is 1, not the 0 that fills its padding."""
    peaks = Peaks(3)
    mask = torch.tensor([[True, False], [True, True], [False, False]])
    numbers = torch.tensor([0, 2, 1])
    for values in ([[1.0, 9.0], [2.0, 3.0], [7.0, 7.0]], [[1.5, -9.0], [2.5, 2.5], [7.0, 7.0]]):
        peaks.record("credit/advantage_max", torch.tensor(values), mask, numbers)
        peaks.record("credit/advantage_min", torch.tensor(values), mask, numbers, smallest=True)
    assert peaks.collect() == {
        "credit/advantage_max#0": 1.5,
        "credit/advantage_max#2": 3.0,
        "credit/advantage_min#0": 1.0,
        "credit/advantage_min#2": 2.0,
    }
    assert peaks.collect() == {}
    peaks.record("mismatch/max", torch.zeros(0, 2), mask[:0], numbers[:0])
    assert peaks.collect() == {}


def test_metric_sums_are_float64_scalars() -> None:
    outputs, micro = batch()
    for loss in (ACTOR, CriticLoss()):
        metrics = loss(outputs, micro)[1]
        assert all(value.shape == () and value.dtype == torch.float64 and not value.requires_grad for value in metrics.values())
