"""Table of all metrics of a run: reduction over ranks and steps, unit, description; `docs/metrics.md` is generated from it.

A mean is kept as sum and count and divided when read: averages are never averaged. A metric `by` domain is read as `domain/<domain>/<name>`
and, over all domains, as `<name>`; one `by` phase, role or transport as `<name>/<phase>`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Reduction(StrEnum):
    MEAN = "mean"
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True)
class Metric:
    reduction: Reduction
    unit: str
    description: str
    by: Literal["domain", "phase", "role", "transport"] | None = None
    count: tuple[str, ...] = ()
    """For a mean whose sum losses report: metrics that may hold its count; the first present one is used. Empty: each optimizer step counts
    1."""
    shown: bool = True
    """False for inputs of derived metrics."""


MEAN, SUM, MAX, MIN, LAST = Reduction.MEAN, Reduction.SUM, Reduction.MAX, Reduction.MIN, Reduction.LAST
ACTOR, CRITIC, CREDIT, ROWS = ("actor/tokens",), ("critic/tokens",), ("credit/tokens",), ("credit/rows",)

BUSIEST_EXPERT = Metric(MEAN, "", "Tokens of a layer's busiest expert, as a multiple of its experts' mean; for models with experts.")
BALANCE_LOSS = Metric(MEAN, "", "Load-balancing loss of a layer, without its coefficient; 1 if experts are used equally.")

METRICS: dict[str, Metric] = {
    # rewards of the training batch
    "reward/mean": Metric(MEAN, "score", "Score of the accepted samples, before shaping and KL.", by="domain"),
    "reward/square": Metric(MEAN, "score²", "Ingredient of reward/std.", by="domain", shown=False),
    "reward/max": Metric(MAX, "score", "Highest score.", by="domain"),
    "reward/min": Metric(MIN, "score", "Lowest score.", by="domain"),
    "reward/accuracy": Metric(MEAN, "share", "Accepted samples that are correct.", by="domain"),
    "reward/flat_groups": Metric(
        MEAN, "share", "Sample groups whose rewards after shaping are all equal: they have no advantage under GRPO.", by="domain"
    ),
    "reward/shaped": Metric(MEAN, "score", "Reward of a sample after shaping, before KL.", by="domain"),
    "reward/workers_replaced": Metric(SUM, "workers", "Reward workers replaced because they died or hung.", by="domain"),
    "reward/term": Metric(
        MEAN,
        "score",
        "Contribution of one term to a sample's score, weight included; `base` is the reward itself. Named "
        "`domain/<domain>/<term>/reward/term`.",
        by="domain",
    ),
    "reward/seconds": Metric(MEAN, "s", "Time from requesting a score to receiving it.", by="domain"),
    # sample groups by their share of correct samples
    "solved/none": Metric(MEAN, "share", "Groups without a correct sample.", by="domain"),
    "solved/quarter": Metric(MEAN, "share", "Groups with at least one and at most a quarter of the samples correct.", by="domain"),
    "solved/half": Metric(MEAN, "share", "Groups with more than a quarter and at most half of the samples correct.", by="domain"),
    "solved/three_quarters": Metric(MEAN, "share", "Groups with more than half and at most three quarters correct.", by="domain"),
    "solved/most": Metric(MEAN, "share", "Groups with more than three quarters of the samples correct, but not all.", by="domain"),
    "solved/all": Metric(MEAN, "share", "Groups with all samples correct.", by="domain"),
    # samples that do not train
    "masks/weight": Metric(MEAN, "", "Weight of a sample in the loss; 0 for samples that do not train.", by="domain"),
    "masks/samples": Metric(MEAN, "share", "Samples that do not train, for any reason.", by="domain"),
    "masks/truncated": Metric(MEAN, "share", "Samples masked because they were cut at max_tokens.", by="domain"),
    "masks/group_mean": Metric(MEAN, "share", "Samples masked because their group is too easy or too hard.", by="domain"),
    "masks/response_tokens": Metric(MEAN, "share", "Samples masked because of their length.", by="domain"),
    "masks/sample_weight": Metric(MEAN, "share", "Samples with weight 0 in the data.", by="domain"),
    "masks/function": Metric(MEAN, "share", "Samples with weight 0 by algorithm.masks.function.", by="domain"),
    # held-out prompts
    "validation/accuracy": Metric(MEAN, "share", "Held-out samples that are correct.", by="domain"),
    "validation/reward": Metric(MEAN, "score", "Score of held-out samples.", by="domain"),
    "validation/pass@k": Metric(
        MEAN,
        "share",
        "Probability that one of k samples of a held-out prompt is correct: 1 - C(n-c, k) / C(n, k), if c of its n samples are.",
        by="domain",
    ),
    "validation/best@k": Metric(
        MEAN, "score", "Expected highest score of k samples of a held-out prompt, over all choices of k among its n.", by="domain"
    ),
    "validation/maj@k": Metric(
        MEAN,
        "share",
        "Share of votes of k samples of a held-out prompt whose most frequent answer is correct; ties count as their mean. A prompt has "
        "n // k votes, of its samples in order. Only for rewards that read an answer; samples without one do not vote.",
        by="domain",
    ),
    "validation/response_tokens": Metric(MEAN, "tokens", "Response length of held-out samples.", by="domain"),
    "validation/failed": Metric(SUM, "samples", "Held-out samples that failed permanently; no mean includes them.", by="domain"),
    "validation/version_min": Metric(MIN, "", "Oldest weight version that sampled a token of held-out samples."),
    "validation/version_max": Metric(
        MAX, "", "Newest such version; above the oldest if weights were updated while validation ran in parallel with training."
    ),
    "validation/seconds": Metric(LAST, "s", "Time from the start of a validation to its last score."),
    # rollouts
    "rollout/requested": Metric(SUM, "groups", "Sample groups planned for the batch, by the domains' shares.", by="domain"),
    "rollout/groups": Metric(SUM, "groups", "Sample groups in the batch.", by="domain"),
    "rollout/admitted": Metric(SUM, "groups", "Sample groups started since the last batch.", by="domain"),
    "rollout/filtered_groups": Metric(SUM, "groups", "Sample groups dropped by rollout.filter and replaced by other prompts.", by="domain"),
    "rollout/filtered_low": Metric(SUM, "groups", "Filtered groups not above the filter's `above`; for accuracy: all wrong.", by="domain"),
    "rollout/filtered_high": Metric(
        SUM, "groups", "Filtered groups not below the filter's `below`; for accuracy: all correct.", by="domain"
    ),
    "rollout/filtered_function": Metric(SUM, "groups", "Filtered groups dropped by the user's function.", by="domain"),
    "rollout/stale_groups": Metric(SUM, "groups", "Sample groups that became too old; their prompts were put back.", by="domain"),
    "rollout/stale_unfinished": Metric(SUM, "groups", "Stale groups whose responses or scores were unfinished.", by="domain"),
    "rollout/stale_surplus": Metric(SUM, "groups", "Stale groups that were finished but did not fit in any batch.", by="domain"),
    "rollout/rewards_behind_seconds": Metric(
        SUM,
        "s",
        "Time without starts for later batches, because more samples than a batch holds waited for scores.",
        by="domain",
    ),
    "rollout/lost_groups": Metric(SUM, "groups", "Sample groups without a surviving sample, replaced by other prompts.", by="domain"),
    "rollout/timed_out_groups": Metric(
        SUM,
        "groups",
        "Sample groups that lost a sample to a time-out, most likely a long one.",
        by="domain",
    ),
    "rollout/scored_samples": Metric(
        SUM, "samples", "Samples scored since the last batch, before filters; includes greedy baselines.", by="domain"
    ),
    "rollout/samples": Metric(SUM, "samples", "Accepted samples in the batch.", by="domain"),
    "rollout/early_samples": Metric(
        SUM, "samples", "Samples whose log-probs and values were started before the batch was complete (rollout.stream_log_probs)."
    ),
    "rollout/failed": Metric(SUM, "samples", "Samples that failed permanently; they do not train.", by="domain"),
    "rollout/engines_lost": Metric(SUM, "engines", "Engines that died or hung; the others continued their responses."),
    "rollout/engine_silent_seconds": Metric(
        MAX, "s", "Time from the last answer of a lost engine's process to its removal; the longest since the last batch."
    ),
    "rollout/retries": Metric(SUM, "attempts", "Attempts that failed and were repeated.", by="domain"),
    "rollout/prompt_tokens": Metric(
        SUM, "tokens", "Prompt tokens of completed requests; in later turns of a sample they include the earlier turns.", by="domain"
    ),
    "rollout/cached_tokens": Metric(SUM, "tokens", "Prompt tokens found in the engines' prefix caches, which updates clear.", by="domain"),
    "rollout/response_tokens": Metric(SUM, "tokens", "Tokens generated since the last batch, before filters.", by="domain"),
    "rollout/batch_tokens": Metric(SUM, "tokens", "Response tokens of the accepted samples in the batch.", by="domain"),
    "rollout/response_length": Metric(MEAN, "tokens", "Response length of a sample.", by="domain"),
    "rollout/response_length_max": Metric(MAX, "tokens", "Longest response.", by="domain"),
    "rollout/response_length_min": Metric(MIN, "tokens", "Shortest response.", by="domain"),
    "rollout/response_length_p50": Metric(LAST, "tokens", "Median response length (nearest rank).", by="domain"),
    "rollout/response_length_p95": Metric(LAST, "tokens", "95th percentile of response lengths (nearest rank).", by="domain"),
    "rollout/truncated": Metric(MEAN, "share", "Samples cut at max_tokens.", by="domain"),
    "rollout/request_seconds": Metric(MEAN, "s", "Time from sending a request to its completion.", by="domain"),
    "rollout/share_requested": Metric(LAST, "share", "Domain's configured share of the prompts.", by="domain"),
    "rollout/share_admitted": Metric(LAST, "share", "Domain's share of the prompts started in the run so far.", by="domain"),
    "rollout/share_scored": Metric(LAST, "share", "Domain's share of the samples scored in the run so far, before filters.", by="domain"),
    "rollout/share_generated": Metric(
        LAST, "share", "Domain's share of the tokens generated in the run so far, before filters.", by="domain"
    ),
    "rollout/share_realised": Metric(LAST, "share", "Domain's share of the prompts delivered in the run so far.", by="domain"),
    "rollout/share_samples": Metric(LAST, "share", "Domain's share of the accepted samples of batches in the run so far.", by="domain"),
    "rollout/share_tokens": Metric(LAST, "share", "Domain's share of the response tokens of batches in the run so far.", by="domain"),
    "rollout/epoch": Metric(LAST, "epochs", "Epoch of the domain's newest prompt, counted from 0.", by="domain"),
    "rollout/generation_seconds": Metric(SUM, "s", "Time from the start of the batch to its last completion."),
    "rollout/reward_tail_seconds": Metric(
        SUM, "s", "Time from the last completion to the last score: reward time not hidden by generation."
    ),
    "rollout/tokens_per_second": Metric(MEAN, "tokens/s", "Generated tokens / time of the batch."),
    "rollout/staleness": Metric(MEAN, "versions", "Weight versions from a sample's oldest token to the batch."),
    "rollout/staleness_max": Metric(MAX, "versions", "Staleness of the batch's oldest token."),
    # credit
    "credit/tokens": Metric(SUM, "tokens", "Policy tokens of samples that train.", by="domain"),
    "credit/rows": Metric(SUM, "samples", "Samples that train.", by="domain"),
    "credit/reward": Metric(MEAN, "score", "Reward of a sample that trains, after shaping and KL.", count=ROWS, by="domain"),
    "credit/advantage_mean": Metric(MEAN, "", "Advantage of a policy token.", count=CREDIT, by="domain"),
    "credit/advantage_square": Metric(MEAN, "", "Ingredient of credit/advantage_std.", count=CREDIT, shown=False, by="domain"),
    "credit/kl_in_reward": Metric(
        MEAN,
        "nats",
        "KL(policy || reference) of a token as subtracted from the reward, before its coefficient.",
        count=CREDIT,
        by="domain",
    ),
    "credit/kl_ref": Metric(MEAN, "nats", "KL(policy || reference), k3, before the step's first update.", count=CREDIT, by="domain"),
    "credit/advantage_max": Metric(MAX, "", "Largest advantage.", by="domain"),
    "credit/advantage_min": Metric(MIN, "", "Smallest advantage.", by="domain"),
    "credit/kl_coef": Metric(LAST, "", "Weight of the KL in the reward."),
    # actor
    "actor/tokens": Metric(SUM, "tokens", "Policy tokens trained on, over all epochs.", by="domain"),
    "actor/loss": Metric(
        MEAN, "", "Weighted sum of policy loss, KL, entropy bonus and ptx, without the load-balancing loss (balance_coef)."
    ),
    "actor/policy_loss": Metric(MEAN, "", "Policy loss of an optimizer step, mismatch correction included."),
    "actor/kl_loss": Metric(MEAN, "nats", "KL in the loss of an optimizer step, before its coefficient."),
    "actor/ptx_loss": Metric(MEAN, "nats", "Cross-entropy of a learned token of algorithm.ptx.", count=("actor/ptx_tokens",)),
    "actor/ptx_tokens": Metric(SUM, "tokens", "Learned tokens of algorithm.ptx."),
    "actor/entropy": Metric(MEAN, "nats", "Entropy of a token's distribution, in training.", count=ACTOR, by="domain"),
    "actor/entropy_before": Metric(
        MEAN, "nats", "Entropy of a token's distribution, before the step's first update.", count=CREDIT, by="domain"
    ),
    "actor/ratio": Metric(
        MEAN, "", "New probability / old probability of a token; of a sequence under gspo, topr.", count=ACTOR, by="domain"
    ),
    "actor/ratio_square": Metric(MEAN, "", "Ingredient of actor/ess.", count=ACTOR, by="domain", shown=False),
    "actor/ratio_p01": Metric(
        LAST,
        "",
        "1st percentile of the ratio over all updates of the step, as the centre of a bin 3% of its logarithm wide.",
        by="domain",
    ),
    "actor/ratio_p50": Metric(LAST, "", "Median of the ratio, likewise.", by="domain"),
    "actor/ratio_p99": Metric(LAST, "", "99th percentile of the ratio, likewise.", by="domain"),
    "actor/ratio_min": Metric(MIN, "", "Smallest ratio.", by="domain"),
    "actor/ratio_max": Metric(MAX, "", "Largest ratio.", by="domain"),
    "actor/approx_kl": Metric(MEAN, "nats", "KL(old || new), k3: change of the policy by a step's updates.", count=ACTOR, by="domain"),
    "actor/kl_ref": Metric(
        MEAN,
        "nats",
        "KL(policy || reference): k3, or the sum over the vocabulary if kl_in_loss uses `full`.",
        count=ACTOR,
        by="domain",
    ),
    "actor/clip_low": Metric(
        MEAN,
        "share",
        "Tokens without gradient because their ratio is below its range or clamp; under cispo, topr: weight raised to its bound.",
        count=ACTOR,
        by="domain",
    ),
    "actor/clip_high": Metric(
        MEAN,
        "share",
        "Tokens without gradient because their ratio is above its range or clamp; under cispo, topr: weight lowered to its bound.",
        count=ACTOR,
        by="domain",
    ),
    "actor/grad_norm": Metric(MEAN, "", "Gradient norm of an optimizer step before clipping."),
    "actor/busiest_expert": BUSIEST_EXPERT,
    "actor/balance_loss": BALANCE_LOSS,
    "actor/rerouted": Metric(
        MEAN, "share", "Replayed choices of experts (algorithm.routing_replay) that differ from the router's current choice."
    ),
    "actor/lr": Metric(LAST, "", "Learning rate."),
    "actor/kl_coef": Metric(LAST, "", "Weight of the KL in the loss."),
    "actor/updates": Metric(
        SUM, "updates", "Optimizer steps made; fewer than epochs x mini-batches if early_stop_kl, masks or skips omit some."
    ),
    "actor/skipped": Metric(SUM, "updates", "Optimizer steps left out because loss or gradient was not finite."),
    # mismatch of engine and trainer on the same tokens
    "mismatch/mean": Metric(
        MEAN,
        "nats",
        "|log-prob of the engine - log-prob of the trainer| of a token; under old_log_probs rollout and current, in the step's first "
        "update.",
        count=(*CREDIT, *ACTOR),
        by="domain",
    ),
    "mismatch/k3": Metric(MEAN, "nats", "KL(engine || trainer), k3.", count=(*CREDIT, *ACTOR), by="domain"),
    "mismatch/max": Metric(MAX, "nats", "Largest difference of a token.", by="domain"),
    # correction of the mismatch
    "correction/weight": Metric(MEAN, "", "Weight of a token's policy loss.", count=ACTOR, by="domain"),
    "correction/weight_square": Metric(MEAN, "", "Ingredient of correction/ess.", count=ACTOR, by="domain", shown=False),
    "correction/limited": Metric(MEAN, "share", "Tokens whose weight was outside its range.", count=ACTOR, by="domain"),
    "correction/filtered": Metric(MEAN, "share", "Tokens whose policy loss the filters removed.", count=ACTOR, by="domain"),
    # critic
    "critic/tokens": Metric(SUM, "tokens", "Policy tokens that the critic trained on, over all epochs.", by="domain"),
    "critic/loss": Metric(MEAN, "", "Value loss of an optimizer step."),
    "critic/clip_fraction": Metric(MEAN, "share", "Tokens whose value changed by more than value_loss.clip.", count=CRITIC, by="domain"),
    "critic/value_mean": Metric(MEAN, "", "Value of a token, in training.", count=CRITIC, by="domain"),
    "critic/return_mean": Metric(MEAN, "", "Return of a token, the target of its value.", count=CRITIC, by="domain"),
    "critic/return_square": Metric(MEAN, "", "Ingredient of critic/explained_variance.", count=CRITIC, shown=False, by="domain"),
    "critic/error_mean": Metric(MEAN, "", "Return minus value.", count=CRITIC, by="domain"),
    "critic/error_square": Metric(MEAN, "", "Ingredient of critic/explained_variance.", count=CRITIC, shown=False, by="domain"),
    "critic/grad_norm": Metric(MEAN, "", "Gradient norm of an optimizer step before clipping."),
    "critic/busiest_expert": BUSIEST_EXPERT,
    "critic/balance_loss": BALANCE_LOSS,
    "critic/lr": Metric(LAST, "", "Learning rate."),
    "critic/updates": Metric(SUM, "updates", "Optimizer steps made."),
    "critic/skipped": Metric(SUM, "updates", "Optimizer steps left out because loss or gradient was not finite."),
    # weights
    "sync/version": Metric(LAST, "", "Weight version of the engines."),
    "sync/megabytes": Metric(SUM, "MB", "Weights sent to the engines, counted once for all engines."),
    "sync/transport_megabytes": Metric(
        SUM,
        "MB",
        "Weights sent by each transport, counted once for all its engines.",
        by="transport",
    ),
    "sync/transport_megabytes_per_second": Metric(
        LAST,
        "MB/s",
        "Rate of a transport, by the time of the slowest trainer rank: writing buckets, waiting for free ones and for the last.",
        by="transport",
    ),
    "sync/megabytes_per_second": Metric(LAST, "MB/s", "Rate of a whole update, from its start to the last engine's new weights."),
    "sync/seconds": Metric(
        SUM,
        "s",
        "Time of the slowest process in a phase of the update: trainer ranks `gather` tensors, `copy` them into buckets (and cast them) "
        "and `wait` for a free bucket; engine workers `receive` (and wait) and `load`. These overlap. `verify`: afterwards, both sides' "
        "checksums.",
        by="phase",
    ),
    # offloads and loads, from the end of the previous step to the end of this one
    "offload/freed_megabytes": Metric(SUM, "MB", "Device memory that a role's ranks freed.", by="role"),
    "offload/out_megabytes": Metric(
        SUM, "MB", "State copied to the host: without gradients, and without data unchanged since the last copy.", by="role"
    ),
    "offload/in_megabytes": Metric(SUM, "MB", "State copied back to the devices.", by="role"),
    "offload/out_seconds": Metric(SUM, "s", "Time of the slowest rank to free memory.", by="role"),
    "offload/in_seconds": Metric(
        SUM, "s", "Time until the slowest rank could continue; GPUs receive some state while computing.", by="role"
    ),
    # time
    "time": Metric(
        SUM,
        "s",
        "Time of the driver in a phase; `other` is time outside all phases, `step` the total. `log_probs` and `train` also by role, as "
        "`train/critic`, including loads and offloads; roles on separate devices overlap.",
        by="phase",
    ),
}


@dataclass(frozen=True)
class Derived:
    inputs: tuple[str, ...]
    unit: str
    description: str
    compute: Callable[..., float]


def _std(mean: float, square: float) -> float:
    return math.sqrt(max(0.0, square - mean * mean))


def _ess(mean: float, square: float) -> float:
    """Effective sample size, (sum w)² / (n sum w²); 0 if all weights are 0."""
    return 0.0 if square == 0 else mean * mean / square


def _explained_variance(return_mean: float, return_square: float, error_mean: float, error_square: float) -> float:
    """1 - Var(error) / Var(return); NaN if all returns are equal."""
    variance = return_square - return_mean**2
    return 1 - (error_square - error_mean**2) / variance if variance > 1e-12 * max(1.0, return_square) else math.nan


DERIVED: dict[str, Derived] = {
    "reward/std": Derived(("reward/mean", "reward/square"), "score", "Standard deviation of the scores.", _std),
    "credit/advantage_std": Derived(
        ("credit/advantage_mean", "credit/advantage_square"), "", "Standard deviation of the advantages over policy tokens.", _std
    ),
    "actor/ess": Derived(
        ("actor/ratio", "actor/ratio_square"), "share", "Effective sample size of the tokens under their ratios: 1 on-policy.", _ess
    ),
    "correction/ess": Derived(
        ("correction/weight", "correction/weight_square"), "share", "Effective sample size of the tokens under the correction.", _ess
    ),
    "critic/explained_variance": Derived(
        ("critic/return_mean", "critic/return_square", "critic/error_mean", "critic/error_square"),
        "share",
        "1 - Var(return - value) / Var(return): 1 for a perfect critic, 0 for a constant one.",
        _explained_variance,
    ),
}
"""Functions of other metrics; by domain if their inputs are."""
