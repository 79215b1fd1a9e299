"""Credit assignment on one rank's rows: reward and KL become token rewards, token rewards become advantages.

Group baselines and whitening need numbers of the whole global batch; the caller supplies the two exchanges that fetch them. Every
rank takes part in them, those without rows or tokens too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from roll_lite.algorithms import group_advantages as of_groups
from roll_lite.algorithms.advantages import (
    gae,
    length_adaptive_lambda,
    masked_moments,
    mean_and_variance,
    reinforce,
    spread_over_tokens,
    whiten,
)
from roll_lite.algorithms.kernels import row_moments, token_counts
from roll_lite.algorithms.kl import full_kl, kl_estimate
from roll_lite.algorithms.objectives import OLD_COLUMN
from roll_lite.algorithms.rewards import token_rewards
from roll_lite.config.schema import (
    AlgorithmConfig,
    CustomAdvantageConfig,
    GaeAdvantageConfig,
    GpgAdvantageConfig,
    GrpoAdvantageConfig,
    OpoAdvantageConfig,
    ReinforceAdvantageConfig,
    ReinforcePlusPlusAdvantageConfig,
    RemaxAdvantageConfig,
    RlooAdvantageConfig,
)
from roll_lite.data.keys import Columns
from roll_lite.data.microbatch import MicroBatch
from roll_lite.workers.credit_inputs import CreditInputs, RowTable, custom_advantages


@dataclass(frozen=True)
class Exchange:
    """What ranks tell each other about the global batch. On one rank both are the identity."""

    gather: Callable[[torch.Tensor], list[torch.Tensor]]
    """Tensors [rows, n] of all data-parallel ranks, in rank order; rows may differ and may be 0."""
    sum: Callable[[torch.Tensor], torch.Tensor]
    """Element-wise sum over the data-parallel ranks, also over those without rows."""


ALONE = Exchange(gather=lambda x: [x], sum=lambda x: x)


@dataclass(frozen=True)
class Credit:
    """Token tensors are [B, T-1], 0 where masked."""

    advantages: torch.Tensor
    returns: torch.Tensor | None
    """The critic's targets, with GAE."""
    token_rewards: torch.Tensor
    kl: torch.Tensor | None
    """KL(policy || reference) of each token before its coefficient, where it is part of the reward."""
    rewards_per_row: torch.Tensor
    """[B] float64: the reward minus what the sample pays for KL."""
    policy_tokens: torch.Tensor
    """[B] int64."""


def compared_before_training(algorithm: AlgorithmConfig) -> bool:
    """The actor has a forward pass of its own before the updates: entropy and mismatch with the engine are taken from that."""
    return OLD_COLUMN[algorithm.old_log_probs] == "old_log_probs"


def credit_columns(algorithm: AlgorithmConfig) -> Columns:
    """What assign_credit, and the metrics taken beside it, read and write."""
    advantage = algorithm.advantage
    reads = ["response_mask", "reward", "group", "train_weight", "truncated", "domain_number"]
    if compared_before_training(algorithm):
        reads += ["rollout_log_probs", "old_log_probs", "old_entropy"]
    if algorithm.kl_in_reward.coef > 0:
        full = algorithm.kl_in_reward.estimator == "full"
        reads += ["old_distribution", "ref_distribution"] if full else [*_old_column(algorithm), "ref_log_probs"]
    if isinstance(advantage, GaeAdvantageConfig):
        reads += ["values", *(["final_value"] if advantage.bootstrap_truncated else [])]
    if isinstance(advantage, RemaxAdvantageConfig):
        reads.append("baseline_score")
    if_there = ("ref_log_probs", "values", *_old_column(algorithm))
    return Columns(tuple(dict.fromkeys(reads)), if_there, writes=("advantages", "returns"))


def _old_column(algorithm: AlgorithmConfig) -> list[str]:
    column = OLD_COLUMN[algorithm.old_log_probs]
    return [] if column is None else [column]


def assign_credit(rows: MicroBatch, data_rank: int, algorithm: AlgorithmConfig, kl_coef: float, exchange: Exchange) -> Credit:
    """Of rows with the columns of credit_columns."""
    columns, mask = rows.columns, rows.mask
    kl = _kl(rows, algorithm) if kl_coef > 0 else None
    rewards = token_rewards(columns["reward"], mask, kl, kl_coef)
    per_row = columns["reward"].double()
    if kl is not None:
        per_row = per_row - kl_coef * row_moments(kl, mask)[:, 1]
    task = _Task(rows, rewards, per_row, kl is not None, token_counts(mask), data_rank, exchange)
    advantages, returns = _advantages(task, algorithm)
    if algorithm.whiten_advantages or isinstance(algorithm.advantage, ReinforcePlusPlusAdvantageConfig):
        moments = masked_moments(advantages, mask, columns["train_weight"] > 0)
        advantages = whiten(advantages, mask, *mean_and_variance(exchange.sum(moments)), in_place=True)
    return Credit(advantages, returns, rewards, kl, per_row, task.policy_tokens)


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


@dataclass(frozen=True)
class _Task:
    """What the estimators choose from."""

    rows: MicroBatch
    token_rewards: torch.Tensor
    rewards: torch.Tensor
    """[B] float64, KL included."""
    kl_in_reward: bool
    policy_tokens: torch.Tensor
    data_rank: int
    exchange: Exchange

    @property
    def mask(self) -> torch.Tensor:
        return self.rows.mask

    @property
    def groups(self) -> torch.Tensor:
        return self.rows.columns["group"].long()

    def everyone(self, rewards: torch.Tensor) -> RowTable:
        """A group's rows may sit on several ranks: every rank gets the table of all rows. Numbers of groups fit into a float64."""
        mine = torch.stack([rewards.double(), self.groups.double(), self.policy_tokens.double()], dim=1)
        parts = self.exchange.gather(mine)
        before = sum(len(part) for part in parts[: self.data_rank])
        together, groups, policy_tokens = torch.cat(parts).unbind(1)
        return RowTable(together, groups.long(), policy_tokens.long(), slice(before, before + len(mine)))


def _advantages(task: _Task, algorithm: AlgorithmConfig) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(advantages, returns of the critic if there is one), before whitening."""
    config = algorithm.advantage
    if isinstance(config, GaeAdvantageConfig):
        return _gae(task, config)
    if isinstance(config, ReinforceAdvantageConfig):
        return reinforce(task.token_rewards, task.mask, config.gamma), None
    if isinstance(config, ReinforcePlusPlusAdvantageConfig):
        return _reinforce_plus_plus(task, config), None
    if isinstance(config, CustomAdvantageConfig):
        return custom_advantages(_custom_inputs(task), config)
    return spread_over_tokens(_row_advantages(task, config), task.mask, torch.float32), None


def _gae(task: _Task, config: GaeAdvantageConfig) -> tuple[torch.Tensor, torch.Tensor]:
    columns = task.rows.columns
    lam: float | torch.Tensor = config.lam
    if config.length_adaptive is not None:
        lam = length_adaptive_lambda(task.policy_tokens, config.length_adaptive)
    lam_critic = config.lam if config.lam_critic is None else config.lam_critic
    bootstrap = torch.where(columns["truncated"].bool(), columns["final_value"], 0.0) if config.bootstrap_truncated else None
    return gae(task.token_rewards, columns["values"], task.mask, config.gamma, lam, lam_critic, bootstrap)


def _reinforce_plus_plus(task: _Task, config: ReinforcePlusPlusAdvantageConfig) -> torch.Tensor:
    """With the group as baseline, its mean is taken off the rewards first; what a token pays for KL stays that token's own."""
    minus_baseline = None
    if config.baseline == "group":
        rewards = task.rows.columns["reward"]
        everyone = task.everyone(rewards)
        minus_baseline = of_groups.minus_group_mean(everyone.rewards, everyone.groups)[everyone.local] - rewards.double()
    return reinforce(task.token_rewards, task.mask, config.gamma, minus_baseline)


def _row_advantages(
    task: _Task, config: GrpoAdvantageConfig | RlooAdvantageConfig | OpoAdvantageConfig | GpgAdvantageConfig | RemaxAdvantageConfig
) -> torch.Tensor:
    """One advantage per row of this rank, [B] float64."""
    if isinstance(config, RemaxAdvantageConfig):
        return of_groups.remax(task.rewards, task.rows.columns["baseline_score"])
    everyone = task.everyone(task.rewards)
    rewards, groups = everyone.rewards, everyone.groups
    if isinstance(config, GrpoAdvantageConfig):
        before_kl = task.everyone(task.rows.columns["reward"]).rewards if task.kl_in_reward else None
        advantages = of_groups.grpo(rewards, groups, config.normalize_std, before_kl)
    elif isinstance(config, RlooAdvantageConfig):
        advantages = of_groups.rloo(rewards, groups)
    elif isinstance(config, OpoAdvantageConfig):
        advantages = of_groups.opo(rewards, groups, everyone.policy_tokens)
    else:
        advantages = of_groups.gpg(rewards, groups)
    return advantages[everyone.local]


def _custom_inputs(task: _Task) -> CreditInputs:
    columns = task.rows.columns
    return CreditInputs(
        token_rewards=task.token_rewards,
        mask=task.mask,
        values=columns.get("values"),
        reward=columns["reward"],
        groups=task.groups,
        policy_tokens=task.policy_tokens,
        truncated=columns["truncated"].bool(),
        train_weight=columns["train_weight"],
        everyone=task.everyone(task.rewards),
    )
