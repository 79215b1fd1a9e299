"""Every metric of a run, declared once: how it is reduced over ranks and steps, its unit, what it says.

Averages are never averaged: a mean travels as sum and count and is divided when it is read. An undeclared name is refused.
A metric `by` domain is added under a domain and read as `domain/<domain>/<name>` beside `<name>`, which covers all of them;
one `by` phase, role or transport is added under that and read as `<name>/<phase>`. `docs/metrics.md` is generated from this table.
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
    """Sum that holds the count of a mean computed from loss sums; the first one present counts. Empty: the count is one optimizer step."""
    shown: bool = True
    """False: only an ingredient of a derived metric."""


MEAN, SUM, MAX, MIN, LAST = Reduction.MEAN, Reduction.SUM, Reduction.MAX, Reduction.MIN, Reduction.LAST
ACTOR, CRITIC, CREDIT, ROWS = ("actor/tokens",), ("critic/tokens",), ("credit/tokens",), ("credit/rows",)

BUSIEST_EXPERT = Metric(MEAN, "", "Tokens of a layer's busiest expert, as a multiple of its experts' mean; of a model that has some.")
BALANCE_LOSS = Metric(MEAN, "", "Load-balancing loss of a layer, without its coefficient: 1 where experts are chosen alike.")

METRICS: dict[str, Metric] = {
    # rewards of the training batch
    "reward/mean": Metric(MEAN, "score", "Score of the accepted samples, before shaping and KL.", by="domain"),
    "reward/square": Metric(MEAN, "score²", "Ingredient of reward/std.", by="domain", shown=False),
    "reward/max": Metric(MAX, "score", "Highest score.", by="domain"),
    "reward/min": Metric(MIN, "score", "Lowest score.", by="domain"),
    "reward/accuracy": Metric(MEAN, "share", "Accepted samples that are correct.", by="domain"),
    "reward/flat_groups": Metric(
        MEAN, "share", "Sample groups whose rewards, as shaping left them, are all equal: without advantage under GRPO.", by="domain"
    ),
    "reward/shaped": Metric(MEAN, "score", "Reward of a sample as shaping left it, before KL.", by="domain"),
    "reward/workers_replaced": Metric(SUM, "workers", "Reward workers that died or hung, and were replaced.", by="domain"),
    "reward/term": Metric(
        MEAN,
        "score",
        "What a term of a reward of several adds to a sample's score, weight included; `base` is the reward itself. As "
        "`domain/<domain>/<term>/reward/term`.",
        by="domain",
    ),
    "reward/seconds": Metric(MEAN, "s", "From asking for a score to getting it.", by="domain"),
    # how hard the prompts were: shares of the sample groups by the share of their samples that are correct
    "solved/none": Metric(MEAN, "share", "Groups without a correct sample.", by="domain"),
    "solved/quarter": Metric(MEAN, "share", "Groups with more than none and at most a quarter of the samples correct.", by="domain"),
    "solved/half": Metric(MEAN, "share", "Groups with more than a quarter and at most half of the samples correct.", by="domain"),
    "solved/three_quarters": Metric(MEAN, "share", "Groups with more than half and at most three quarters correct.", by="domain"),
    "solved/most": Metric(MEAN, "share", "Groups with more than three quarters of the samples correct, but not all.", by="domain"),
    "solved/all": Metric(MEAN, "share", "Groups with nothing but correct samples.", by="domain"),
    # what does not train
    "masks/weight": Metric(MEAN, "", "Weight of a sample in the loss, 0 for those that do not train.", by="domain"),
    "masks/samples": Metric(MEAN, "share", "Samples that do not train, for whatever reason.", by="domain"),
    "masks/truncated": Metric(MEAN, "share", "Samples masked because they were cut at max_tokens.", by="domain"),
    "masks/group_mean": Metric(MEAN, "share", "Samples masked because their group is too easy or too hard.", by="domain"),
    "masks/response_tokens": Metric(MEAN, "share", "Samples masked because of their length.", by="domain"),
    "masks/sample_weight": Metric(MEAN, "share", "Samples to which the data gives the weight 0.", by="domain"),
    "masks/function": Metric(MEAN, "share", "Samples to which algorithm.masks.function gives the weight 0.", by="domain"),
    # held-out prompts
    "validation/accuracy": Metric(MEAN, "share", "Held-out samples that are correct.", by="domain"),
    "validation/reward": Metric(MEAN, "score", "Score of held-out samples.", by="domain"),
    "validation/pass@k": Metric(
        MEAN,
        "share",
        "Probability that of k samples of a held-out prompt one is correct: 1 - C(n-c, k) / C(n, k), c of its n samples being so.",
        by="domain",
    ),
    "validation/best@k": Metric(
        MEAN, "score", "Expected highest score of k samples of a held-out prompt, over all choices of k among its n.", by="domain"
    ),
    "validation/maj@k": Metric(
        MEAN,
        "share",
        "How often the most frequent answer of k samples of a held-out prompt is correct; where several are, their mean. Over the n // k "
        "votes of its samples in their order. Only of rewards that read an answer; samples without one do not vote.",
        by="domain",
    ),
    "validation/response_tokens": Metric(MEAN, "tokens", "Response length of held-out samples.", by="domain"),
    "validation/failed": Metric(SUM, "samples", "Held-out samples that failed for good; they count in no mean.", by="domain"),
    "validation/version_min": Metric(MIN, "", "Oldest weights that sampled a token of them."),
    "validation/version_max": Metric(
        MAX, "", "Newest: more than the oldest where new weights came while held-out prompts were answered beside training."
    ),
    "validation/seconds": Metric(LAST, "s", "From the start of a validation to its last score."),
    # rollouts
    "rollout/requested": Metric(SUM, "groups", "Sample groups that the batch was to have, by the domains' shares.", by="domain"),
    "rollout/groups": Metric(SUM, "groups", "Sample groups in the batch.", by="domain"),
    "rollout/admitted": Metric(SUM, "groups", "Sample groups started since the last batch.", by="domain"),
    "rollout/filtered_groups": Metric(SUM, "groups", "Sample groups that rollout.filter left out, replaced by other prompts.", by="domain"),
    "rollout/filtered_low": Metric(
        SUM, "groups", "Of these, those whose value was not above the filter's `above`: by accuracy, all wrong.", by="domain"
    ),
    "rollout/filtered_high": Metric(
        SUM, "groups", "Of these, those whose value was not below the filter's `below`: by accuracy, all right.", by="domain"
    ),
    "rollout/filtered_function": Metric(SUM, "groups", "Of these, those that the user's function left out.", by="domain"),
    "rollout/stale_groups": Metric(SUM, "groups", "Sample groups that became too old; their prompts were put back.", by="domain"),
    "rollout/stale_unfinished": Metric(SUM, "groups", "Of these, those whose responses or scores were not done.", by="domain"),
    "rollout/stale_surplus": Metric(SUM, "groups", "Of these, those that were done, and for which no batch had a place.", by="domain"),
    "rollout/rewards_behind_seconds": Metric(
        SUM,
        "s",
        "Time in which nothing was started for later batches, because more samples than a batch holds waited for their scores.",
        by="domain",
    ),
    "rollout/lost_groups": Metric(SUM, "groups", "Sample groups without a surviving sample, replaced by other prompts.", by="domain"),
    "rollout/timed_out_groups": Metric(
        SUM,
        "groups",
        "Sample groups that lost a member to a time-out, a long one most likely.",
        by="domain",
    ),
    "rollout/scored_samples": Metric(
        SUM, "samples", "Samples that got a score since the last batch, before filters; greedy baselines among them.", by="domain"
    ),
    "rollout/samples": Metric(SUM, "samples", "Accepted samples in the batch.", by="domain"),
    "rollout/early_samples": Metric(
        SUM, "samples", "Samples whose log-probs and values were begun before the batch was complete (rollout.stream_log_probs)."
    ),
    "rollout/failed": Metric(SUM, "samples", "Samples that failed for good; they do not train.", by="domain"),
    "rollout/engines_lost": Metric(SUM, "engines", "Engines that died or hung. What they were generating went on in the others."),
    "rollout/engine_silent_seconds": Metric(
        MAX, "s", "From the last answer of the process of an engine that was lost to its being taken out: the longest since the last batch."
    ),
    "rollout/retries": Metric(SUM, "attempts", "Attempts that failed and were repeated.", by="domain"),
    "rollout/prompt_tokens": Metric(
        SUM, "tokens", "Prompt tokens of completed requests; in a later turn of a sample all that was said before.", by="domain"
    ),
    "rollout/cached_tokens": Metric(
        SUM, "tokens", "Of the prompt tokens, those found in the engines' prefix caches, which updates clear.", by="domain"
    ),
    "rollout/response_tokens": Metric(SUM, "tokens", "Tokens generated since the last batch, before filters.", by="domain"),
    "rollout/batch_tokens": Metric(SUM, "tokens", "Response tokens of the accepted samples in the batch.", by="domain"),
    "rollout/response_length": Metric(MEAN, "tokens", "Response length of a sample.", by="domain"),
    "rollout/response_length_max": Metric(MAX, "tokens", "Longest response.", by="domain"),
    "rollout/response_length_min": Metric(MIN, "tokens", "Shortest response.", by="domain"),
    "rollout/response_length_p50": Metric(
        LAST, "tokens", "Length that half of the responses do not exceed: one that occurs (nearest rank).", by="domain"
    ),
    "rollout/response_length_p95": Metric(
        LAST, "tokens", "Length that 95% of the responses do not exceed: one that occurs (nearest rank).", by="domain"
    ),
    "rollout/truncated": Metric(MEAN, "share", "Samples that were cut at max_tokens.", by="domain"),
    "rollout/request_seconds": Metric(MEAN, "s", "From sending a request to its completion.", by="domain"),
    "rollout/share_requested": Metric(LAST, "share", "The domain's share of the prompts as configured.", by="domain"),
    "rollout/share_admitted": Metric(LAST, "share", "The domain's share of the prompts started in the run so far.", by="domain"),
    "rollout/share_scored": Metric(
        LAST, "share", "The domain's share of the samples scored in the run so far, before filters.", by="domain"
    ),
    "rollout/share_generated": Metric(
        LAST, "share", "The domain's share of the tokens generated in the run so far, before filters.", by="domain"
    ),
    "rollout/share_realised": Metric(LAST, "share", "The domain's share of the prompts delivered in the run so far.", by="domain"),
    "rollout/share_samples": Metric(LAST, "share", "The domain's share of the accepted samples of batches in the run so far.", by="domain"),
    "rollout/share_tokens": Metric(LAST, "share", "The domain's share of the response tokens of batches in the run so far.", by="domain"),
    "rollout/epoch": Metric(LAST, "epochs", "Epoch of the domain's data that the newest prompt belongs to, from 0 on.", by="domain"),
    "rollout/generation_seconds": Metric(SUM, "s", "From the start of the batch to its last completion."),
    "rollout/reward_tail_seconds": Metric(SUM, "s", "From the last completion to the last score: reward time not hidden by generation."),
    "rollout/tokens_per_second": Metric(MEAN, "tokens/s", "Generated tokens over the time the batch took."),
    "rollout/staleness": Metric(MEAN, "versions", "Weight versions between a sample's oldest token and the batch."),
    "rollout/staleness_max": Metric(MAX, "versions", "Oldest token of the batch."),
    # credit
    "credit/tokens": Metric(SUM, "tokens", "Policy tokens of samples that train.", by="domain"),
    "credit/rows": Metric(SUM, "samples", "Samples that train.", by="domain"),
    "credit/reward": Metric(MEAN, "score", "Reward of a sample that trains, after shaping and KL.", count=ROWS, by="domain"),
    "credit/advantage_mean": Metric(MEAN, "", "Advantage of a policy token.", count=CREDIT, by="domain"),
    "credit/advantage_square": Metric(MEAN, "", "Ingredient of credit/advantage_std.", count=CREDIT, shown=False, by="domain"),
    "credit/kl_in_reward": Metric(
        MEAN,
        "nats",
        "KL(policy || reference) of a token as taken off the reward, before its coefficient.",
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
        MEAN, "", "Policy loss, KL, entropy bonus and ptx with their weights, without the load-balancing loss (balance_coef)."
    ),
    "actor/policy_loss": Metric(MEAN, "", "Policy loss of an optimizer step, mismatch correction included."),
    "actor/kl_loss": Metric(MEAN, "nats", "KL in the loss of an optimizer step, before its coefficient."),
    "actor/ptx_loss": Metric(MEAN, "nats", "Cross-entropy of a learned token of algorithm.ptx.", count=("actor/ptx_tokens",)),
    "actor/ptx_tokens": Metric(SUM, "tokens", "Tokens of algorithm.ptx that were learned."),
    "actor/entropy": Metric(MEAN, "nats", "Entropy of the distribution a token is chosen from, in training.", count=ACTOR, by="domain"),
    "actor/entropy_before": Metric(MEAN, "nats", "The same before the step's first update.", count=CREDIT, by="domain"),
    "actor/ratio": Metric(MEAN, "", "Probability of a token over its old one; of a sequence under gspo, topr.", count=ACTOR, by="domain"),
    "actor/ratio_square": Metric(MEAN, "", "Ingredient of actor/ess.", count=ACTOR, by="domain", shown=False),
    "actor/ratio_p01": Metric(
        LAST,
        "",
        "Ratio that 1% of the tokens do not exceed, over all updates of the step; as the centre of a bin, 3% of its logarithm wide.",
        by="domain",
    ),
    "actor/ratio_p50": Metric(LAST, "", "Ratio that half of the tokens do not exceed, likewise.", by="domain"),
    "actor/ratio_p99": Metric(LAST, "", "Ratio that 99% of the tokens do not exceed, likewise.", by="domain"),
    "actor/ratio_min": Metric(MIN, "", "Smallest ratio.", by="domain"),
    "actor/ratio_max": Metric(MAX, "", "Largest ratio.", by="domain"),
    "actor/approx_kl": Metric(
        MEAN, "nats", "KL(old || new), k3: how far the updates of a step moved the policy.", count=ACTOR, by="domain"
    ),
    "actor/kl_ref": Metric(
        MEAN,
        "nats",
        "KL(policy || reference): k3, or the sum over the vocabulary where kl_in_loss takes `full`.",
        count=ACTOR,
        by="domain",
    ),
    "actor/clip_low": Metric(
        MEAN,
        "share",
        "Tokens without gradient because their ratio is below its range or clamp; under cispo, topr: with a weight raised to its bound.",
        count=ACTOR,
        by="domain",
    ),
    "actor/clip_high": Metric(
        MEAN,
        "share",
        "Tokens without gradient because their ratio is above its range or clamp; under cispo, topr: with a weight lowered to its bound.",
        count=ACTOR,
        by="domain",
    ),
    "actor/grad_norm": Metric(MEAN, "", "Gradient norm of an optimizer step before clipping."),
    "actor/busiest_expert": BUSIEST_EXPERT,
    "actor/balance_loss": BALANCE_LOSS,
    "actor/rerouted": Metric(
        MEAN, "share", "Replayed choices of experts (algorithm.routing_replay) that the router would have made otherwise by then."
    ),
    "actor/lr": Metric(LAST, "", "Learning rate."),
    "actor/kl_coef": Metric(LAST, "", "Weight of the KL in the loss."),
    "actor/updates": Metric(
        SUM, "updates", "Optimizer steps made: less than epochs x mini-batches where early_stop_kl, masks or a skip left some out."
    ),
    "actor/skipped": Metric(SUM, "updates", "Optimizer steps left out because loss or gradient was not finite."),
    # what engine and trainer think of the same tokens
    "mismatch/mean": Metric(
        MEAN,
        "nats",
        "|log-prob of the engine - log-prob of the trainer| of a token; under old_log_probs rollout and current, of the step's first "
        "update.",
        count=(*CREDIT, *ACTOR),
        by="domain",
    ),
    "mismatch/k3": Metric(MEAN, "nats", "KL(engine || trainer), k3.", count=(*CREDIT, *ACTOR), by="domain"),
    "mismatch/max": Metric(MAX, "nats", "Largest difference of a token.", by="domain"),
    # the correction for it
    "correction/weight": Metric(MEAN, "", "Weight of a token's policy loss.", count=ACTOR, by="domain"),
    "correction/weight_square": Metric(MEAN, "", "Ingredient of correction/ess.", count=ACTOR, by="domain", shown=False),
    "correction/limited": Metric(MEAN, "share", "Tokens whose weight was outside of its range.", count=ACTOR, by="domain"),
    "correction/filtered": Metric(MEAN, "share", "Tokens whose policy loss the filters took.", count=ACTOR, by="domain"),
    # critic
    "critic/tokens": Metric(SUM, "tokens", "Policy tokens the critic trained on, over all epochs.", by="domain"),
    "critic/loss": Metric(MEAN, "", "Value loss of an optimizer step."),
    "critic/clip_fraction": Metric(MEAN, "share", "Tokens whose value moved further than value_loss.clip.", count=CRITIC, by="domain"),
    "critic/value_mean": Metric(MEAN, "", "Value of a token, in training.", count=CRITIC, by="domain"),
    "critic/return_mean": Metric(MEAN, "", "Return of a token: what the value should have been.", count=CRITIC, by="domain"),
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
    "sync/megabytes": Metric(SUM, "MB", "Weights sent to the engines, once for all of them."),
    "sync/transport_megabytes": Metric(
        SUM,
        "MB",
        "What each transport took of them, once for all engines that it leads to.",
        by="transport",
    ),
    "sync/transport_megabytes_per_second": Metric(
        LAST,
        "MB/s",
        "The same over the time that the slowest trainer rank spent on it: it writes buckets, waits for free ones and for the last.",
        by="transport",
    ),
    "sync/megabytes_per_second": Metric(LAST, "MB/s", "Of a whole update, from its start to the last engine's new weights."),
    "sync/seconds": Metric(
        SUM,
        "s",
        "Time of the slowest in a phase of the update: trainer ranks `gather` tensors, `copy` them into buckets (and cast them), `wait` "
        "for a free bucket; engine workers `receive` (and wait), `load`. Phases overlap.",
        by="phase",
    ),
    # state that leaves the devices and comes back, between the end of the step before and this one's
    "offload/freed_megabytes": Metric(SUM, "MB", "Device memory that a role's ranks have given back.", by="role"),
    "offload/out_megabytes": Metric(
        SUM, "MB", "Of it, what was copied to the host: neither gradients nor what had not changed since it was copied last.", by="role"
    ),
    "offload/in_megabytes": Metric(SUM, "MB", "State that was copied back to the devices.", by="role"),
    "offload/out_seconds": Metric(SUM, "s", "Time in which the slowest rank gave memory back.", by="role"),
    "offload/in_seconds": Metric(SUM, "s", "Time until the slowest rank could go on; GPUs receive some of it as they compute.", by="role"),
    # time
    "time": Metric(
        SUM,
        "s",
        "Time of the driver in a phase; `other` is what no phase covers, `step` all of it. `log_probs` and `train` also by role, as "
        "`train/critic`, loads and offloads included: roles on separate devices overlap.",
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
    """(sum w)² / (n sum w²); 0 where all weights are 0, NaN where one is."""
    return 0.0 if square == 0 else mean * mean / square


def _explained_variance(return_mean: float, return_square: float, error_mean: float, error_square: float) -> float:
    """1 - Var(error) / Var(return); without spread in the returns there is nothing to explain."""
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
        "1 - Var(return - value) / Var(return): 1 is a perfect critic, 0 one that says the same of everything.",
        _explained_variance,
    ),
}
"""Functions of other metrics; by domain where their inputs are."""
