"""Compute the advantages of one rank's rows. Group baselines need the whole batch: all ranks, even without rows, all-gather rewards and
group numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from roll_lite.algorithms import advantages as formulas
from roll_lite.algorithms.kernels import Whitening, row_moments
from roll_lite.algorithms.kl import full_kl, kl_estimate
from roll_lite.algorithms.token_metrics import Peaks, RowSums, SampleSums, mismatch_of_tokens, sums_by_domain
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.data.branches import sample_rows
from roll_lite.data.keys import Columns
from roll_lite.data.microbatch import MicroBatch
from roll_lite.workers.credit_inputs import CreditInputs, SampleTable, users_advantages
from roll_lite.workers.objectives import OLD_COLUMN, OldLogProbs

Gather = Callable[[torch.Tensor], list[torch.Tensor]]
"""Function that all-gathers over data-parallel ranks: from this rank's [rows, n] to all ranks' tensors in rank order. Row counts may
differ."""


@dataclass(frozen=True)
class Credit:
    """Result of credit assignment. Token tensors are [B, T-1], 0 where masked."""

    advantages: torch.Tensor
    returns: torch.Tensor | None
    kl: torch.Tensor | None
    """KL(policy || reference) per token, without coefficient; None without KL in the reward."""
    rewards_per_row: torch.Tensor
    """[B] float64: score (in the sample's first row only) minus coef * KL, so a sample's rows add up to its reward."""


def compared_before_training(algorithm: AlgorithmConfig) -> bool:
    """True if a forward pass before the updates measures entropy and engine mismatch."""
    return OLD_COLUMN[algorithm.old_log_probs] == "old_log_probs"


def credit_columns(algorithm: AlgorithmConfig) -> Columns:
    reads = ["response_mask", "reward", "group", "train_weight", "truncated", "domain_number"]
    if compared_before_training(algorithm):
        reads += ["rollout_log_probs", "old_log_probs", "old_entropy"]
    if algorithm.kl_in_reward.coef > 0:
        full = algorithm.kl_in_reward.estimator == "full"
        reads += ["old_distribution", "ref_distribution"] if full else [*_old_column(algorithm), "ref_log_probs"]
    reads += ESTIMATOR_READS.get(algorithm.advantage.name, ())
    if algorithm.advantage.parameters.get("bootstrap_truncated"):
        reads += ["cut", "final_value"]
    if_there = ("index", "branch", "turn_rewards", "ref_log_probs", "values", *_old_column(algorithm))
    return Columns(tuple(dict.fromkeys(reads)), if_there, writes=("advantages", "returns"))


def _old_column(algorithm: AlgorithmConfig) -> list[str]:
    column = OLD_COLUMN[algorithm.old_log_probs]
    return [] if column is None else [column]


def assign_credit(rows: MicroBatch, data_rank: int, algorithm: AlgorithmConfig, kl_coef: float, gather: Gather) -> Credit:
    """Compute advantages and the critic's targets from `credit_columns`. Collective over `gather`."""

    def whitening(moments: torch.Tensor) -> tuple[float, float]:
        """Return (mean, 1 / standard deviation) over all ranks' training tokens, without rows with non-finite moments. `moments`: of this
        rank's rows."""
        mine = formulas.merged_moments(moments[(rows.columns["train_weight"] > 0) & moments.isfinite().all(1)])
        return formulas.mean_and_scale(formulas.merged_moments(torch.cat(gather(mine[None]))))

    config = algorithm.advantage
    kl = _kl(rows, algorithm) if kl_coef > 0 else None
    whitened = algorithm.whiten_advantages or config.name in ALWAYS_WHITENED
    task = CreditTask(rows, kl, kl_coef, algorithm.reward.scale, data_rank, gather, whitening if whitened else None)
    advantages, returns = ESTIMATORS[config.name](task, **config.parameters)
    return Credit(advantages, returns, kl, torch.where(task.branch == 0, task.score, 0.0) - task.penalty)


def _kl(rows: MicroBatch, algorithm: AlgorithmConfig) -> torch.Tensor:
    columns, mask, estimator = rows.columns, rows.mask, algorithm.kl_in_reward.estimator
    if len(mask) == 0:
        return torch.zeros(mask.shape)
    if estimator == "full":
        kl = full_kl(columns["old_distribution"], columns["ref_distribution"])
    else:
        old = OLD_COLUMN[algorithm.old_log_probs]
        assert old is not None, "under `current` there are no log-probs before the update"
        kl = kl_estimate(columns[old], columns["ref_log_probs"], estimator)
    return kl.masked_fill(~mask, 0.0)


Estimate = tuple[torch.Tensor, torch.Tensor | None]
"""(advantages [B, T-1] float32, critic's targets [B, T-1] or None)."""


class Turns(NamedTuple):
    """Responses of this rank's rows, ordered by row and position."""

    rows: torch.Tensor
    """Row of each response, [turns] int64."""
    starts: list[int]
    """Index in the mask of each response's first token; `ends`: index after its last token."""
    ends: list[int]
    states: torch.Tensor
    """[turns] float64: hash of the tokens since the previous response, or the start."""
    rewards: torch.Tensor
    """[turns] float64: reward of each turn, without KL."""


class CreditTask:
    """Inputs of the advantage estimators. Scores and KL are summed in float64: they may differ by a factor of millions."""

    def __init__(
        self,
        rows: MicroBatch,
        kl: torch.Tensor | None,
        kl_coef: float,
        scale: float,
        data_rank: int,
        gather: Gather,
        whitening: Whitening | None,
    ) -> None:
        self.mask, self.columns = rows.mask, rows.columns
        self.score = rows.columns["reward"].double()
        """[B] float64: reward of each row's sample, without KL."""
        self.subtracts_kl = kl is not None
        self.dense_rewards = None if kl is None else kl * -kl_coef
        """[B, T-1] float32: rewards of all turns but the last, minus coef * KL; None without turn rewards and KL."""
        self.turn_rewards: torch.Tensor | None = None
        """[B, T-1]: rewards of all turns but the last; None without turn rewards."""
        self.last_token_reward = self.score
        """[B]: the score minus the rewards of earlier turns."""
        if "turn_rewards" in rows.columns:
            paid = rows.columns["turn_rewards"].masked_fill(~rows.mask, 0.0) * scale
            last = formulas.last_policy_token(rows.mask)
            paid[last >= 0, last[last >= 0]] = 0.0
            self.turn_rewards = paid
            self.last_token_reward = self.score - paid.sum(1, dtype=torch.float64)
            self.dense_rewards = paid if self.dense_rewards is None else self.dense_rewards + paid
        self.penalty = torch.zeros_like(self.score) if kl is None else kl_coef * row_moments(kl, rows.mask)[:, 1]
        self.branch = rows.columns.get("branch", torch.zeros_like(self.score, dtype=torch.int64))
        self.whitening = whitening
        self.groups = rows.columns["group"].long()
        self._data_rank, self._gather = data_rank, gather

    @cached_property
    def policy_tokens(self) -> torch.Tensor:
        return formulas.policy_token_counts(self.mask)

    def global_samples(self) -> SampleTable:
        trains = self.columns["train_weight"] > 0
        own = [self.score, self.penalty, self.groups.double(), self.policy_tokens.double(), trains.double()]
        if branched := "branch" in self.columns:
            own += [self.columns["index"].double(), self.branch.double()]
        of_all, local = self.gather(torch.stack(own, dim=1))
        score, penalty, groups, policy_tokens, trains, *names = of_all.unbind(1)
        if branched:
            of = sample_rows(groups, *names)
            penalty, policy_tokens = of.total(penalty), of.total(policy_tokens)
            score, groups, trains = score[of.first], groups[of.first], trains[of.first]
            local = torch.from_numpy(of.sample)[local]
        return SampleTable(score - penalty, score, groups.long(), policy_tokens.long(), trains.bool(), local)

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self._gather(own)
        before = sum(len(part) for part in parts[: self._data_rank])
        return torch.cat(parts), torch.arange(before, before + len(own))

    def turns(self) -> Turns:
        rows, starts, ends, states, rewards = [], [], [], [], []
        for row, mask in enumerate(self.mask.numpy()):
            edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
            ids, before = self.columns["input_ids"][row].numpy(), 0
            for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
                rows.append(row)
                starts.append(start)
                ends.append(end)
                text = np.ascontiguousarray(ids[before : start + 1], np.int64)  # entry t of the mask belongs to token t + 1
                states.append(int.from_bytes(blake2b(text.tobytes(), digest_size=6).digest(), "big"))
                paid = 0.0 if self.turn_rewards is None else float(self.turn_rewards[row, start:end].sum(dtype=torch.float64))
                rewards.append(paid + (float(self.last_token_reward[row]) if end == edges[-1] else 0.0))
                before = end + 1
        whole = torch.tensor(rows, dtype=torch.int64)
        return Turns(whole, starts, ends, torch.tensor(states, dtype=torch.float64), torch.tensor(rewards, dtype=torch.float64))

    def before_kl(self, samples: SampleTable) -> torch.Tensor | None:
        return samples.scores if self.subtracts_kl else None

    def spread_samples(self, advantages: torch.Tensor) -> Estimate:
        if self.whitening is not None:
            advantages = formulas.whiten_samples(advantages, self.policy_tokens, self.whitening)
        return formulas.spread_over_tokens(advantages, self.mask, torch.float32), None


# ---------------------------------------------------------------- estimators


def _gae(
    task: CreditTask,
    gamma: float,
    discount: str,
    lam: float,
    lam_critic: float | None,
    length_adaptive: float | None,
    bootstrap_truncated: bool,
) -> Estimate:
    columns = task.columns
    of_actor = lam if length_adaptive is None else formulas.length_adaptive_lambda(task.policy_tokens, length_adaptive)
    of_critic = lam if lam_critic is None else lam_critic
    bootstrap = torch.where(columns["cut"].bool(), columns["final_value"], 0.0) if bootstrap_truncated else None
    rewards, of_rows = task.dense_rewards, (of_actor, of_critic, bootstrap, task.last_token_reward)
    return formulas.gae(rewards, columns["values"], task.mask, gamma, *of_rows, task.whitening, discount == "turn")


def _reinforce(task: CreditTask, gamma: float, discount: str) -> Estimate:
    return formulas.reinforce(task.dense_rewards, task.mask, gamma, task.last_token_reward, task.whitening, discount == "turn"), None


def _reinforce_plus_plus(task: CreditTask, gamma: float, discount: str, baseline: str) -> Estimate:
    last_token_reward = task.last_token_reward
    if baseline == "group":
        samples = task.global_samples()
        last_token_reward = last_token_reward - task.score + formulas.minus_group_mean(samples.scores, samples.groups)[samples.local]
    return formulas.reinforce(task.dense_rewards, task.mask, gamma, last_token_reward, task.whitening, discount == "turn"), None


def _grpo(task: CreditTask, normalize_std: bool) -> Estimate:
    samples = task.global_samples()
    return task.spread_samples(formulas.grpo(samples.rewards, samples.groups, normalize_std, task.before_kl(samples))[samples.local])


def _rloo(task: CreditTask) -> Estimate:
    samples = task.global_samples()
    return task.spread_samples(formulas.rloo(samples.rewards, samples.groups)[samples.local])


def _opo(task: CreditTask) -> Estimate:
    samples = task.global_samples()
    return task.spread_samples(formulas.opo(samples.rewards, samples.groups, samples.policy_tokens)[samples.local])


def _gpg(task: CreditTask) -> Estimate:
    samples = task.global_samples()
    return task.spread_samples(formulas.gpg(samples.rewards, samples.groups, task.before_kl(samples), samples.trains)[samples.local])


def _remax(task: CreditTask) -> Estimate:
    samples = task.global_samples()
    return task.spread_samples(formulas.remax(samples.rewards[samples.local], task.columns["baseline_score"]))


def _gigpo(task: CreditTask, gamma: float, step_weight: float, normalize_std: bool) -> Estimate:
    samples, turns = task.global_samples(), task.turns()
    of_episodes = formulas.grpo(samples.rewards, samples.groups, normalize_std, task.before_kl(samples))[samples.local]
    advantages = formulas.spread_over_tokens(of_episodes, task.mask, torch.float32)
    returns = formulas.discounted_turns(turns.rewards, turns.rows, gamma)
    of_all, local = task.gather(torch.stack([task.groups[turns.rows].double(), turns.states, returns], dim=1))
    _, answers = torch.unique(of_all[:, :2], dim=0, return_inverse=True)
    of_turns = step_weight * formulas.grpo(of_all[:, 2], answers, normalize_std)[local]
    for row, start, end, value in zip(turns.rows.tolist(), turns.starts, turns.ends, of_turns.tolist(), strict=True):
        advantages[row, start:end] += value
    return (advantages if task.whitening is None else formulas.whiten_tokens(advantages, task.mask, task.whitening)), None


def _custom(task: CreditTask, function: str, args: dict[str, Any]) -> Estimate:
    columns = task.columns
    inputs = CreditInputs(
        token_rewards=formulas.token_rewards(task.last_token_reward, task.mask, task.dense_rewards),
        mask=task.mask,
        values=columns.get("values"),
        reward=columns["reward"],
        groups=task.groups,
        policy_tokens=task.policy_tokens,
        truncated=columns["truncated"].bool(),
        train_weight=columns["train_weight"],
        everyone=task.global_samples(),
    )
    if task.whitening is None:
        return users_advantages(inputs, function, args, torch.float32)
    advantages, returns = users_advantages(inputs, function, args, torch.float64)
    return formulas.whiten_tokens(advantages, task.mask, task.whitening), returns


ESTIMATORS: dict[str, Callable[..., Estimate]] = {
    "gae": _gae,
    "reinforce": _reinforce,
    "reinforce_plus_plus": _reinforce_plus_plus,
    "grpo": _grpo,
    "rloo": _rloo,
    "opo": _opo,
    "gpg": _gpg,
    "gigpo": _gigpo,
    "remax": _remax,
    "custom": _custom,
}
"""Advantage estimators by `name` in the configuration. Other settings become keyword arguments."""

ESTIMATOR_READS = {"gae": ("values",), "remax": ("baseline_score",), "gigpo": ("input_ids",)}
ALWAYS_WHITENED = ("reinforce_plus_plus",)


# ---------------------------------------------------------------- metrics


def credit_metrics(
    rows: MicroBatch, credit: Credit, old_log_probs: OldLogProbs, domains: int
) -> tuple[dict[str, float], dict[str, float], SampleSums]:
    """Return (metric sums, peaks, log-prob differences between engine and trainer by sample)."""
    mask = rows.mask & (rows.columns["train_weight"] > 0)[:, None]

    def column(name: str) -> torch.Tensor:
        return rows.columns[name].masked_fill(~mask, 0.0)

    advantages = credit.advantages.masked_fill(~mask, 0.0).double()
    tokens = {"credit/tokens": mask, "credit/advantage_mean": advantages, "credit/advantage_square": advantages.square()}
    numbers = rows.columns["domain_number"].long()
    peaks, mismatch = Peaks(domains), RowSums()
    peaks.record("credit/advantage_max", credit.advantages, mask, numbers)
    peaks.record("credit/advantage_min", credit.advantages, mask, numbers, smallest=True)
    old = OLD_COLUMN[old_log_probs]
    if credit.kl is not None:
        tokens["credit/kl_in_reward"] = credit.kl.masked_fill(~mask, 0.0)
    if old is not None and "ref_log_probs" in rows.columns:
        tokens["credit/kl_ref"] = kl_estimate(column(old), column("ref_log_probs"), "k3")
    if "old_entropy" in rows.columns:
        tokens["actor/entropy_before"] = column("old_entropy")
    if "old_log_probs" in rows.columns:
        difference, k3 = mismatch_of_tokens(column("rollout_log_probs"), column("old_log_probs"))
        tokens |= {"mismatch/mean": difference, "mismatch/k3": k3}
        peaks.record("mismatch/max", difference, mask, numbers)
        mismatch.record(rows.columns["sample"], difference, mask)
    trains = mask.any(1, keepdim=True)
    samples = trains & (rows.columns["branch"][:, None] == 0) if "branch" in rows.columns else trains
    per_row = {"credit/rows": samples, "credit/reward": credit.rewards_per_row[:, None].masked_fill(~trains, 0.0)}
    sums = sums_by_domain(tokens, numbers, domains) | sums_by_domain(per_row, numbers, domains)
    return {name: float(value) for name, value in sums.items()}, peaks.collect(), mismatch.collect()
