"""Losses of actor and critic: a micro-batch's sum(loss_weight * token loss), and metric sums, which add up over micro-batches and ranks.
Masked entries, even NaN, count as 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import torch

from roll_lite.algorithms.kl import KlEstimator, clamped_log_ratio, full_kl, kl_estimate, kl_loss
from roll_lite.algorithms.losses import (
    POLICY_LOSSES,
    PolicyLoss,
    PolicyTerms,
    clipped_value_loss,
    entropy_loss,
    mismatch_weights,
    unclipped,
    within,
)
from roll_lite.algorithms.token_metrics import Peaks, RatioHistogram, RowSums, mismatch_of_tokens, sums_by_domain
from roll_lite.config.schema.losses import GIVEN_TO_LOSSES, CustomLossConfig, MismatchCorrectionConfig, PolicyLossConfig, PpoLossConfig
from roll_lite.config.user_function import load_function, parameters_of
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs

OldLogProbs = Literal["recompute", "current", "rollout"]

OLD_COLUMN: dict[OldLogProbs, str | None] = {"recompute": "old_log_probs", "current": None, "rollout": "rollout_log_probs"}
"""{algorithm.old_log_probs: column with the policy ratio's denominator}. None: detached log-probs of the training forward."""


@dataclass(eq=False)
class ActorLoss:
    """Policy loss with mismatch correction, KL to the reference and entropy bonus; cross-entropy for supervised rows (ptx_weight > 0)."""

    policy_loss: PolicyLossConfig = field(default_factory=PpoLossConfig)
    mismatch_correction: MismatchCorrectionConfig | None = None
    """Correction whose weights multiply the policy loss, not KL and entropy."""
    kl_coef: float = 0.0
    kl_estimator: KlEstimator | Literal["full"] = "k3"
    kl_unbiased_gradient: bool = False
    entropy_coef: float = 0.0
    old_log_probs: OldLogProbs = "recompute"
    measure_entropy: bool = True
    domains: int = 1
    """Number of domains; rows without domain_number belong to domain 0."""
    given: tuple[str, ...] = field(init=False)
    mismatch: RowSums = field(init=False)
    peaks: Peaks = field(init=False)
    """Extremes over micro-batches: mismatch/max, largest and smallest ratio of new to old policy."""
    ratios: RatioHistogram = field(init=False)

    def __post_init__(self) -> None:
        self.given = optional_loss_inputs(self.policy_loss)
        self.mismatch = RowSums()
        self.peaks = Peaks(self.domains)
        self.ratios = RatioHistogram(self.domains)

    @property
    def outputs(self) -> tuple[str, ...]:
        entropy = ["entropy"] if self.entropy_coef > 0 or self.measure_entropy or "entropy" in self.given else []
        return ("log_probs", *entropy, *(["distribution"] if self._full_kl else []))

    @property
    def columns(self) -> tuple[str, ...]:
        old = OLD_COLUMN[self.old_log_probs]
        names = ["advantages", "loss_weight", *([old] if old else [])]
        if self.mismatch_correction is not None:
            names.append("rollout_log_probs")
        if self.kl_coef > 0:
            names.append("ref_distribution" if self._full_kl else "ref_log_probs")
        names += [name for name in self.given if name != "entropy"]
        return tuple(dict.fromkeys(names))

    @property
    def _full_kl(self) -> bool:
        return self.kl_coef > 0 and self.kl_estimator == "full"

    def __call__(self, outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if "ptx_weight" not in micro_batch.columns:
            return self._of_policy(outputs, micro_batch)
        assert outputs.log_probs is not None
        weight = micro_batch.columns["ptx_weight"][:, None]
        loss, metrics = self._of_policy(outputs, replace(micro_batch, mask=micro_batch.mask & (weight == 0)))
        learned = micro_batch.mask & (weight > 0)
        cross_entropy = -outputs.log_probs.masked_fill(~learned, 0.0)
        supervised = weight * cross_entropy
        measured = {"actor/ptx_loss": _total(cross_entropy), "actor/ptx_tokens": _total(learned)}
        return loss + supervised.sum(), {**metrics, "actor/loss": metrics["actor/loss"] + _total(supervised), **measured}

    def _of_policy(self, outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.log_probs is not None
        mask = micro_batch.mask
        log_probs = outputs.log_probs.masked_fill(~mask, 0.0)
        old_column = OLD_COLUMN[self.old_log_probs]
        old = log_probs.detach() if old_column is None else _column(micro_batch, old_column)
        weight = _token_weights(micro_batch)

        terms = PolicyTerms(log_probs, old, _column(micro_batch, "advantages"), mask)
        policy = policy_loss(self.policy_loss, terms, **self._given_columns(outputs, micro_batch))
        tokens = _policy_diagnostics(policy, log_probs.detach(), old, mask)
        # Under `rollout` the old log-probs are the engine's own, so the mismatch is measured with those of the training forward.
        trained = log_probs.detach() if self.old_log_probs == "rollout" else old
        corrected, measured = self._corrected(policy.loss, trained, micro_batch)
        tokens |= measured
        loss = weight * corrected
        metrics = {"actor/policy_loss": _total(loss)}
        kl, measured = self._kl(outputs, log_probs, old, micro_batch)
        tokens |= measured
        if kl is not None:
            weighted_kl = weight * kl
            loss = loss + self.kl_coef * weighted_kl
            metrics["actor/kl_loss"] = _total(weighted_kl)
        if outputs.entropy is not None:
            entropy = entropy_loss(outputs.entropy, mask)
            tokens["actor/entropy"] = -entropy
            if self.entropy_coef > 0:
                loss = loss + self.entropy_coef * (weight * entropy)
        numbers = domain_numbers(micro_batch, self.domains)
        if "rollout_log_probs" in micro_batch.columns:
            tokens |= self._mismatch(trained, micro_batch, numbers)
        metrics |= {"actor/loss": _total(loss), **sums_by_domain(tokens, numbers, self.domains)}
        self._record_ratios(log_probs.detach(), old, mask, numbers)
        return loss.sum(), metrics

    def _given_columns(self, outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> dict[str, torch.Tensor]:
        """Return the optional arguments of the user's loss, {name: [B, T-1]}, 0 where masked. Only the entropy has a gradient."""
        columns = micro_batch.columns if outputs.entropy is None else {**micro_batch.columns, "entropy": outputs.entropy}
        return {name: columns[name].masked_fill(~micro_batch.mask, 0.0) for name in self.given}

    def _record_ratios(self, current: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, numbers: torch.Tensor) -> None:
        self.ratios.record(current - old, mask, numbers)
        ratios = torch.exp(clamped_log_ratio(current, old))
        self.peaks.record("actor/ratio_max", ratios, mask, numbers)
        self.peaks.record("actor/ratio_min", ratios, mask, numbers, smallest=True)

    def _corrected(
        self, loss: torch.Tensor, trained: torch.Tensor, micro_batch: MicroBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if self.mismatch_correction is None:
            return loss, {}
        mask, rollout = micro_batch.mask, _column(micro_batch, "rollout_log_probs")
        of_weight, filters = self.mismatch_correction.weight, self.mismatch_correction.filters
        weight, measured = mask.to(loss.dtype), {}
        if of_weight is not None:
            weight, measured["correction/limited"] = mismatch_weights(trained, rollout, mask, **of_weight.parameters)
        if filters:
            passed = torch.stack([within(trained, rollout, mask, **one.parameters) for one in filters]).all(0)
            measured["correction/filtered"] = mask & ~passed
            weight = weight.masked_fill(~passed, 0.0)
        measured |= {"correction/weight": weight, "correction/weight_square": weight.double().square()}
        # 0 * infinity is NaN: a token of weight 0 has loss 0.
        return (loss * weight).masked_fill(weight == 0, 0.0), measured

    def _kl(
        self, outputs: MicroBatchOutputs, log_probs: torch.Tensor, old: torch.Tensor, micro_batch: MicroBatch
    ) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        masked = ~micro_batch.mask
        if self.kl_coef > 0 and self.kl_estimator == "full":
            assert outputs.distribution is not None
            new, ref = (x.masked_fill(masked[..., None], 0.0) for x in (outputs.distribution, micro_batch.columns["ref_distribution"]))
            kl = full_kl(new, ref).masked_fill(masked, 0.0)
            return kl, {"actor/kl_ref": kl}
        if "ref_log_probs" not in micro_batch.columns:
            return None, {}
        reference = _column(micro_batch, "ref_log_probs")
        measured = {"actor/kl_ref": kl_estimate(log_probs.detach(), reference, "k3")}
        if self.kl_coef == 0:
            return None, measured
        assert self.kl_estimator != "full"
        return kl_loss(log_probs, reference, self.kl_estimator, self.kl_unbiased_gradient, old), measured

    def _mismatch(self, trained: torch.Tensor, micro_batch: MicroBatch, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
        difference, k3 = mismatch_of_tokens(_column(micro_batch, "rollout_log_probs"), trained)
        self.peaks.record("mismatch/max", difference, micro_batch.mask, numbers)
        if "sample" in micro_batch.columns:
            self.mismatch.record(micro_batch.columns["sample"], difference, micro_batch.mask)
        return {"mismatch/mean": difference, "mismatch/k3": k3}


def domain_numbers(micro_batch: MicroBatch, domains: int) -> torch.Tensor:
    """Return each row's domain number, [B]; 0 without the column."""
    if domains > 1 and "domain_number" in micro_batch.columns:
        return micro_batch.columns["domain_number"]
    return torch.zeros(len(micro_batch.mask), dtype=torch.int64, device=micro_batch.mask.device)


@dataclass(frozen=True)
class CriticLoss:
    """Clipped value loss. The column `values` holds the values before the updates."""

    clip: float | None = 0.2
    domains: int = 1

    outputs: ClassVar[tuple[str, ...]] = ("values",)
    columns: ClassVar[tuple[str, ...]] = ("values", "returns", "loss_weight")

    def __call__(self, outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.values is not None
        mask = micro_batch.mask
        old, returns = _column(micro_batch, "values"), _column(micro_batch, "returns")
        value = clipped_value_loss(outputs.values, old, returns, mask, self.clip)
        weighted = _token_weights(micro_batch) * value.loss
        predicted = outputs.values.detach().masked_fill(~mask, 0.0)
        # Measured with the values before the updates: later ones have been trained on these returns.
        errors = returns.double() - old.double()
        tokens = {
            "critic/tokens": mask,
            "critic/clip_fraction": value.clipped,
            "critic/value_mean": predicted,
            "critic/return_mean": returns,
            "critic/return_square": returns.double().square(),
            "critic/error_mean": errors,
            "critic/error_square": errors.square(),
        }
        numbers = domain_numbers(micro_batch, self.domains)
        return weighted.sum(), {"critic/loss": _total(weighted), **sums_by_domain(tokens, numbers, self.domains)}


def _policy_diagnostics(policy: PolicyLoss, current: torch.Tensor, old: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    ratio = policy.ratio.double().masked_fill(~mask, 0.0)
    return {
        "actor/tokens": mask,
        "actor/ratio": ratio,
        "actor/ratio_square": ratio.square(),
        "actor/approx_kl": kl_estimate(old, current, "k3"),
        "actor/clip_low": policy.clipped_low,
        "actor/clip_high": policy.clipped_high,
    }


def _column(micro_batch: MicroBatch, name: str) -> torch.Tensor:
    return micro_batch.columns[name].masked_fill(~micro_batch.mask, 0.0)


def _token_weights(micro_batch: MicroBatch) -> torch.Tensor:
    return micro_batch.mask * micro_batch.columns["loss_weight"][:, None]


def _total(x: torch.Tensor) -> torch.Tensor:
    return x.detach().sum(dtype=torch.float64)


USERS_LOSS = "algorithm.policy_loss.function"


def optional_loss_inputs(config: PolicyLossConfig) -> tuple[str, ...]:
    """Return the entries of GIVEN_TO_LOSSES that the user's function has as parameters."""
    if not isinstance(config, CustomLossConfig):
        return ()
    named = parameters_of(_users_function(config)) - config.args.keys()
    return tuple(name for name in GIVEN_TO_LOSSES if name in named)


def _users_function(config: CustomLossConfig) -> Callable[..., Any]:
    return load_function(config.function, USERS_LOSS)


def policy_loss(config: PolicyLossConfig, terms: PolicyTerms, **given: torch.Tensor) -> PolicyLoss:
    """Compute each token's loss, 0 where masked. `given`: further arguments of the user's function."""
    terms = terms.filled()
    if isinstance(config, CustomLossConfig):
        return _users_policy_loss(config, terms, given)
    return POLICY_LOSSES[config.name](terms, **config.parameters)


def _users_policy_loss(config: CustomLossConfig, terms: PolicyTerms, given: Mapping[str, torch.Tensor]) -> PolicyLoss:
    where = USERS_LOSS
    result = _users_function(config)(terms, **given, **config.args)
    if isinstance(result, torch.Tensor):
        result = unclipped(result, terms)
    if not isinstance(result, PolicyLoss):
        raise ValueError(f"{where}: {config.function} returned {type(result).__name__}, expected a PolicyLoss or a tensor [B, T-1]")
    for name in ("loss", "ratio", "clipped_low", "clipped_high"):
        field = getattr(result, name)
        if not isinstance(field, torch.Tensor) or field.shape != terms.mask.shape:
            shape = tuple(field.shape) if isinstance(field, torch.Tensor) else type(field).__name__
            raise ValueError(f"{where}: {config.function}: {name} is {shape}, expected a tensor {tuple(terms.mask.shape)}")
    if terms.log_probs.requires_grad and torch.is_grad_enabled() and not result.loss.requires_grad:
        raise ValueError(f"{where}: {config.function}: the loss does not depend on terms.log_probs; without a gradient nothing is learned")
    # If log-probs are not finite, the model is at fault, not the function: the strategy skips such a step.
    broken = ~torch.isfinite(result.loss) & torch.isfinite(terms.log_probs) & terms.mask
    if bool(broken.any()):
        row, token = broken.nonzero()[0].tolist()
        raise ValueError(f"{where}: {config.function}: the loss of row {row}, token {token} is {float(result.loss[row, token].detach())}")
    return PolicyLoss(
        torch.where(terms.mask, result.loss, 0.0),
        torch.where(terms.mask, result.ratio.detach(), 1.0),
        terms.mask & result.clipped_low.bool(),
        terms.mask & result.clipped_high.bool(),
    )
