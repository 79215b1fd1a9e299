"""Table of all metrics, the source of `docs/metrics.md`. With by="domain", a metric is reported as `domain/<domain>/<name>` for each domain
and as `<name>` for all; with another `by`, such as "phase", as `<name>/<phase>`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
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
    by: Literal["domain", "phase", "role", "role/phase", "transport"] | None = None
    denominators: tuple[str, ...] = ()
    """Metrics that count the items of a mean whose sum a loss function reports; the first one reported is used. Empty: one item per
    update."""
    shown: bool = True
    """False for metrics that are only inputs of derived metrics."""


MEAN, SUM, MAX, MIN, LAST = Reduction.MEAN, Reduction.SUM, Reduction.MAX, Reduction.MIN, Reduction.LAST
ACTOR, CREDIT = ("actor/tokens",), ("credit/tokens",)

BUSIEST_EXPERT = Metric(MEAN, "", "Tokens of a layer's busiest expert, as a multiple of its experts' mean; for models with experts.")
BALANCE_LOSS = Metric(MEAN, "", "Load-balancing loss of a layer, without its coefficient; 1 if experts are used equally.")

TFLOPS = Metric(MEAN, "TFLOP/s", "Model FLOPs per device and second, without loads and offloads.")
MFU = Metric(MEAN, "share", "Model FLOPs per second as a share of the device's peak; not reported if the peak is unknown.")
DEVICE_TOKENS = Metric(MEAN, "tokens/s", "Tokens per device and second, prompts included.")

by_domain = partial(Metric, by="domain")
domain_share = partial(Metric, MEAN, "share", by="domain")
group_count = partial(Metric, SUM, "groups", by="domain")
# Means over policy tokens.
actor_mean = partial(Metric, MEAN, by="domain", denominators=ACTOR)
critic_mean = partial(Metric, MEAN, by="domain", denominators=("critic/tokens",))
credit_mean = partial(Metric, MEAN, by="domain", denominators=CREDIT)

EPISODES: dict[str, Metric] = {
    "episode/turns": by_domain(MEAN, "turns", "Responses of an episode, in domains with an environment."),
    "episode/rows": by_domain(MEAN, "rows", "Rows of an episode in training: 1, and one for each branch of an agent's requests."),
    "episode/repeated_responses": by_domain(
        MEAN,
        "responses",
        "Responses that an agent's request repeated but could not continue, per episode: their text is context of another row.",
    ),
    "episode/overridden_parameters": by_domain(
        MEAN, "parameters", "Sampling parameters in an agent's requests that the run's own settings overrode, per episode."
    ),
    "episode/refused_requests": by_domain(
        MEAN, "requests", "Requests of an agent that got an error, per episode; those after the end of the episode do not count."
    ),
    "episode/environment_seconds": by_domain(MEAN, "s", "Time that an episode's environment took, all turns together."),
    "episode/waiting_seconds": by_domain(
        MEAN, "s", "Time that an episode waited for responses, all turns together: queues and generation."
    ),
    "episode/policy_tokens": by_domain(MEAN, "tokens", "Tokens that the policy sampled in an episode, all turns together."),
    "episode/environment_tokens": by_domain(
        MEAN, "tokens", "Tokens that follow the responses of an episode: messages of the environment or its tools, and the template's text."
    ),
    "episode/template_tokens": by_domain(
        MEAN, "tokens", "The part of episode/environment_tokens that the chat template adds around the messages' contents."
    ),
    "episode/tool_calls": by_domain(MEAN, "calls", "Tool calls of an episode, malformed ones included."),
    "episode/tool_errors": by_domain(
        MEAN,
        "calls",
        "Tool calls of an episode that were malformed or of unknown tools, or whose tool (not an agent's own) raised an exception.",
    ),
    "episode/metric": by_domain(MEAN, "", "A metric of the environment's own, per episode. Named `domain/<domain>/<name>/episode/metric`."),
}

METRICS: dict[str, Metric] = {
    # rewards of the training batch
    "reward/mean": by_domain(MEAN, "score", "Score of the accepted samples, before shaping and KL."),
    "reward/square": by_domain(MEAN, "score²", "Ingredient of reward/std.", shown=False),
    "reward/max": by_domain(MAX, "score", "Highest score."),
    "reward/min": by_domain(MIN, "score", "Lowest score."),
    "reward/accuracy": domain_share("Accepted samples that are correct."),
    "reward/flat_groups": domain_share("Sample groups whose rewards after shaping are all equal: they have no advantage under GRPO."),
    "reward/shaped": by_domain(MEAN, "score", "Reward of a sample after shaping, before KL."),
    "reward/workers_replaced": by_domain(SUM, "workers", "Reward workers replaced because they died or hung."),
    "reward/term": by_domain(
        MEAN,
        "score",
        "Contribution of one term to a sample's score, weight included; `base` is the reward itself. Named "
        "`domain/<domain>/<term>/reward/term`.",
    ),
    "reward/seconds": by_domain(MEAN, "s", "Time from requesting a score to receiving it."),
    # environments
    **EPISODES,
    "environment/workers_replaced": by_domain(SUM, "workers", "Environment workers replaced because they died or hung."),
    # sample groups by their share of correct samples
    "solved/none": domain_share("Groups without a correct sample."),
    "solved/quarter": domain_share("Groups with at least one and at most a quarter of the samples correct."),
    "solved/half": domain_share("Groups with more than a quarter and at most half of the samples correct."),
    "solved/three_quarters": domain_share("Groups with more than half and at most three quarters correct."),
    "solved/most": domain_share("Groups with more than three quarters of the samples correct, but not all."),
    "solved/all": domain_share("Groups with all samples correct."),
    # samples that do not train
    "masks/weight": by_domain(MEAN, "", "Weight of a sample in the loss; 0 for samples that do not train."),
    "masks/samples": domain_share("Samples that do not train, for any reason."),
    "masks/truncated": domain_share("Samples masked because they were cut at max_tokens or max_turns."),
    "masks/group_mean": domain_share("Samples masked because their group is too easy or too hard."),
    "masks/response_tokens": domain_share("Samples masked because of their length."),
    "masks/sample_weight": domain_share("Samples with weight 0 in the data."),
    "masks/function": domain_share("Samples with weight 0 by algorithm.masks.function."),
    # held-out prompts
    "validation/accuracy": domain_share("Held-out samples that are correct."),
    "validation/reward": by_domain(MEAN, "score", "Score of held-out samples."),
    "validation/pass@k": domain_share(
        "Probability that one of k samples of a held-out prompt is correct: 1 - C(n-c, k) / C(n, k), if c of its n samples are.",
    ),
    "validation/best@k": by_domain(
        MEAN, "score", "Expected highest score of k samples of a held-out prompt, over all choices of k among its n."
    ),
    "validation/maj@k": domain_share(
        "Share of votes of k samples of a held-out prompt whose most frequent answer is correct; ties count as their mean. A prompt has "
        "n // k votes, of its samples in order. Only for rewards that read an answer; samples without one do not vote.",
    ),
    "validation/accuracy_error": by_domain(
        LAST, "share", "Standard error of validation/accuracy; samples of a prompt count as one draw (clustered by prompt)."
    ),
    "validation/prompts": by_domain(SUM, "prompts", "Held-out prompts with a scored sample."),
    "validation/samples": by_domain(SUM, "samples", "Held-out samples with a score."),
    "validation/response_tokens": by_domain(MEAN, "tokens", "Response length of held-out samples."),
    "validation/truncated": domain_share("Held-out samples cut at max_tokens."),
    "validation/max_turns": domain_share("Held-out samples whose episode ended at max_turns."),
    **{name.replace("episode", "validation"): replace(one, description=f"{name} of held-out samples.") for name, one in EPISODES.items()},
    "validation/failed": by_domain(SUM, "samples", "Held-out samples that failed permanently; no mean includes them."),
    "validation/version_min": Metric(MIN, "", "Oldest weight version that sampled a token of held-out samples."),
    "validation/version_max": Metric(
        MAX, "", "Newest such version; above the oldest if weights were updated while validation ran in parallel with training."
    ),
    "validation/seconds": Metric(LAST, "s", "Time from the start of a validation to its last score."),
    "validation/tokens_per_second": Metric(LAST, "tokens/s", "Response tokens per second of a validation, over all engines."),
    # rollouts
    "rollout/requested": group_count("Sample groups planned for the batch, by the domains' shares."),
    "rollout/groups": group_count("Sample groups in the batch."),
    "rollout/admitted": group_count("Sample groups started since the last batch."),
    "rollout/filtered_groups": group_count("Sample groups dropped by rollout.filter and replaced by other prompts."),
    "rollout/filtered_low": group_count("Filtered groups not above the filter's `above`; for accuracy: all wrong."),
    "rollout/filtered_high": group_count("Filtered groups not below the filter's `below`; for accuracy: all correct."),
    "rollout/filtered_function": group_count("Filtered groups dropped by the user's function."),
    "rollout/stale_groups": group_count("Sample groups that became too old; their prompts were put back."),
    "rollout/stale_unfinished": group_count("Stale groups whose responses or scores were unfinished."),
    "rollout/stale_surplus": group_count("Stale groups that were finished but did not fit in any batch."),
    "rollout/rewards_behind_seconds": by_domain(
        SUM, "s", "Time without starts for later batches, because more samples than a batch holds waited for scores."
    ),
    "rollout/lost_groups": group_count("Sample groups without a surviving sample, replaced by other prompts."),
    "rollout/timed_out_groups": group_count("Sample groups that lost a sample to a time-out, most likely a long one."),
    "rollout/scored_samples": by_domain(SUM, "samples", "Samples scored since the last batch, before filters; includes greedy baselines."),
    "rollout/samples": by_domain(SUM, "samples", "Accepted samples in the batch."),
    "rollout/early_samples": Metric(
        SUM, "samples", "Samples whose log-probs and values were started before the batch was complete (rollout.stream_log_probs)."
    ),
    "rollout/failed": by_domain(SUM, "samples", "Samples that failed permanently; they do not train."),
    "rollout/engines_lost": Metric(SUM, "engines", "Engines that died or hung; the others continued their responses."),
    "rollout/engines_joined": Metric(SUM, "engines", "Engines that joined on free devices (actor_infer.most_replicas)."),
    "rollout/engines_left": Metric(SUM, "engines", "Engines that left because their node was drained."),
    "rollout/engines_returned": Metric(SUM, "engines", "Lost engines whose successors began to serve."),
    "rollout/engine_silent_seconds": Metric(
        MAX, "s", "Time from the last answer of a lost engine's process to its removal; the longest since the last batch."
    ),
    "rollout/retries": by_domain(SUM, "attempts", "Attempts that failed and were repeated."),
    "rollout/prompt_tokens": by_domain(
        SUM, "tokens", "Prompt tokens of completed requests; in later turns of a sample they include the earlier turns."
    ),
    "rollout/cached_tokens": by_domain(SUM, "tokens", "Prompt tokens found in the engines' prefix caches, which updates clear."),
    "rollout/drafted_tokens": by_domain(SUM, "tokens", "Tokens drafted by speculation (actor_infer.strategy.speculation)."),
    "rollout/draft_acceptance": domain_share("Drafted tokens that were accepted."),
    "rollout/response_tokens": by_domain(SUM, "tokens", "Tokens generated since the last batch, before filters."),
    "rollout/batch_tokens": by_domain(SUM, "tokens", "Response tokens of the accepted samples in the batch."),
    "rollout/response_length": by_domain(MEAN, "tokens", "Response length of a sample."),
    "rollout/response_length_max": by_domain(MAX, "tokens", "Longest response."),
    "rollout/response_length_min": by_domain(MIN, "tokens", "Shortest response."),
    "rollout/response_length_p50": by_domain(LAST, "tokens", "Median response length (nearest rank)."),
    "rollout/response_length_p95": by_domain(LAST, "tokens", "95th percentile of response lengths (nearest rank)."),
    "rollout/truncated": domain_share("Samples cut at max_tokens."),
    "rollout/max_turns": domain_share("Samples whose episode ended at max_turns."),
    "rollout/request_seconds": by_domain(MEAN, "s", "Time from sending a request to its completion."),
    "rollout/share_requested": by_domain(LAST, "share", "Domain's configured share of the prompts."),
    "rollout/share_generated": by_domain(LAST, "share", "Domain's share of the tokens generated in the run so far, before filters."),
    "rollout/share_realised": by_domain(LAST, "share", "Domain's share of the prompts delivered in the run so far."),
    "rollout/share_tokens": by_domain(LAST, "share", "Domain's share of the response tokens of batches in the run so far."),
    "rollout/epoch": by_domain(LAST, "epochs", "Epoch of the domain's newest prompt, counted from 0."),
    "rollout/generation_seconds": Metric(SUM, "s", "Time from the start of the batch to its last completion."),
    "rollout/reward_tail_seconds": Metric(
        SUM, "s", "Time from the last completion to the last score: reward time not hidden by generation."
    ),
    "rollout/tokens_per_second": Metric(MEAN, "tokens/s", "Generated tokens / time of the batch."),
    "rollout/staleness": Metric(MEAN, "versions", "Weight versions from a sample's oldest token to the batch."),
    "rollout/staleness_max": Metric(MAX, "versions", "Staleness of the batch's oldest token."),
    # credit
    "credit/tokens": by_domain(SUM, "tokens", "Policy tokens of samples that train."),
    "credit/rows": by_domain(SUM, "samples", "Samples that train."),
    "credit/reward": by_domain(MEAN, "score", "Reward of a sample that trains, after shaping and KL.", denominators=("credit/rows",)),
    "credit/advantage_mean": credit_mean("", "Advantage of a policy token."),
    "credit/advantage_square": credit_mean("", "Ingredient of credit/advantage_std.", shown=False),
    "credit/kl_in_reward": credit_mean("nats", "KL(policy || reference) of a token as subtracted from the reward, before its coefficient."),
    "credit/kl_ref": credit_mean("nats", "KL(policy || reference), k3, before the step's first update."),
    "credit/advantage_max": by_domain(MAX, "", "Largest advantage."),
    "credit/advantage_min": by_domain(MIN, "", "Smallest advantage."),
    "credit/kl_coef": Metric(LAST, "", "Weight of the KL in the reward."),
    # actor
    "actor/tokens": by_domain(SUM, "tokens", "Policy tokens trained on, over all epochs."),
    "actor/loss": Metric(
        MEAN, "", "Weighted sum of policy loss, KL, entropy bonus and ptx, without the load-balancing loss (balance_coef)."
    ),
    "actor/policy_loss": Metric(MEAN, "", "Policy loss of an optimizer step, mismatch correction included."),
    "actor/kl_loss": Metric(MEAN, "nats", "KL in the loss of an optimizer step, before its coefficient."),
    "actor/ptx_loss": Metric(MEAN, "nats", "Cross-entropy of a learned token of algorithm.ptx.", denominators=("actor/ptx_tokens",)),
    "actor/ptx_tokens": Metric(SUM, "tokens", "Learned tokens of algorithm.ptx."),
    "actor/entropy": actor_mean("nats", "Entropy of a token's distribution, in training."),
    "actor/entropy_before": credit_mean("nats", "Entropy of a token's distribution, before the step's first update."),
    "actor/ratio": actor_mean("", "New probability / old probability of a token; of a sequence under gspo, topr."),
    "actor/ratio_square": actor_mean("", "Ingredient of actor/ess.", shown=False),
    "actor/ratio_p01": by_domain(
        LAST, "", "1st percentile of the ratio over all updates of the step, as the centre of a bin 3% of its logarithm wide."
    ),
    "actor/ratio_p50": by_domain(LAST, "", "Median of the ratio, likewise."),
    "actor/ratio_p99": by_domain(LAST, "", "99th percentile of the ratio, likewise."),
    "actor/ratio_min": by_domain(MIN, "", "Smallest ratio."),
    "actor/ratio_max": by_domain(MAX, "", "Largest ratio."),
    "actor/approx_kl": actor_mean("nats", "KL(old || new), k3: change of the policy by a step's updates."),
    "actor/kl_ref": actor_mean("nats", "KL(policy || reference): k3, or the sum over the vocabulary if kl_in_loss uses `full`."),
    "actor/clip_low": actor_mean(
        "share", "Tokens without gradient because their ratio is below its range or clamp; under cispo, topr: weight raised to its bound."
    ),
    "actor/clip_high": actor_mean(
        "share", "Tokens without gradient because their ratio is above its range or clamp; under cispo, topr: weight lowered to its bound."
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
    "actor/tokens_per_second": DEVICE_TOKENS,
    "actor/tflops": TFLOPS,
    "actor/mfu": MFU,
    # mismatch of engine and trainer on the same tokens
    "mismatch/mean": by_domain(
        MEAN,
        "nats",
        "|log-prob of the engine - log-prob of the trainer| of a token; under old_log_probs rollout and current, in the step's first "
        "update.",
        denominators=(*CREDIT, *ACTOR),
    ),
    "mismatch/k3": by_domain(MEAN, "nats", "KL(engine || trainer), k3.", denominators=(*CREDIT, *ACTOR)),
    "mismatch/max": by_domain(MAX, "nats", "Largest difference of a token."),
    # correction of the mismatch
    "correction/weight": actor_mean("", "Weight of a token's policy loss."),
    "correction/weight_square": actor_mean("", "Ingredient of correction/ess.", shown=False),
    "correction/limited": actor_mean("share", "Tokens whose weight was outside its range."),
    "correction/filtered": actor_mean("share", "Tokens whose policy loss the filters removed."),
    # critic
    "critic/tokens": by_domain(SUM, "tokens", "Policy tokens that the critic trained on, over all epochs."),
    "critic/loss": Metric(MEAN, "", "Value loss of an optimizer step."),
    "critic/clip_fraction": critic_mean("share", "Tokens whose value changed by more than value_loss.clip."),
    "critic/value_mean": critic_mean("", "Value of a token, in training."),
    "critic/return_mean": critic_mean("", "Return of a token, the target of its value."),
    "critic/return_square": critic_mean("", "Ingredient of critic/explained_variance.", shown=False),
    "critic/error_mean": critic_mean("", "Return minus value."),
    "critic/error_square": critic_mean("", "Ingredient of critic/explained_variance.", shown=False),
    "critic/grad_norm": Metric(MEAN, "", "Gradient norm of an optimizer step before clipping."),
    "critic/busiest_expert": BUSIEST_EXPERT,
    "critic/balance_loss": BALANCE_LOSS,
    "critic/lr": Metric(LAST, "", "Learning rate."),
    "critic/updates": Metric(SUM, "updates", "Optimizer steps made."),
    "critic/skipped": Metric(SUM, "updates", "Optimizer steps left out because loss or gradient was not finite."),
    "critic/tokens_per_second": DEVICE_TOKENS,
    "critic/tflops": TFLOPS,
    "critic/mfu": MFU,
    # forward passes for log-probs and values
    "log_probs/tokens_per_second": replace(DEVICE_TOKENS, by="role"),
    "log_probs/tflops": replace(TFLOPS, by="role"),
    "log_probs/mfu": replace(MFU, by="role"),
    # memory
    "ranks/slowest_seconds": Metric(
        MAX,
        "s",
        "Time of the slowest training rank in a phase. `load` ends when the rank can continue; GPUs receive some state while computing.",
        by="role/phase",
    ),
    "ranks/fastest_seconds": Metric(
        MIN, "s", "Time of the fastest training rank in a phase; the others may wait for the slowest.", by="role/phase"
    ),
    "memory/allocated_megabytes": Metric(MAX, "MB", "Peak of the GPU memory allocated by torch, on the fullest rank.", by="role/phase"),
    "memory/device_megabytes": Metric(
        MAX, "MB", "Memory in use at the end of the phase, by all processes, on the fullest GPU.", by="role/phase"
    ),
    "memory/reserved_megabytes": Metric(
        MAX, "MB", "Peak of the GPU memory that torch has reserved, allocated or cached, on the fullest rank.", by="role/phase"
    ),
    "memory/resident_megabytes": Metric(
        MAX, "MB", "Resident host memory at the end of the phase, on the fullest rank. Includes what processes share.", by="role/phase"
    ),
    # weights
    "sync/version": Metric(LAST, "", "Weight version of the engines."),
    "sync/megabytes": Metric(SUM, "MB", "Weights sent to the engines, counted once for all engines."),
    "sync/transport_megabytes": Metric(
        SUM, "MB", "Weights sent by each transport, counted once for all engines that a trainer rank sends to.", by="transport"
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
        "Time of the slowest process in a phase of the update: trainer ranks `gather` tensors (and broadcast them to each other), `copy` "
        "them into buckets (and cast them) and `wait` for a free bucket; engine workers `receive` (and wait) and `load`. These overlap. "
        "`verify`: afterwards, both sides' checksums.",
        by="phase",
    ),
    # offloads and loads, from the end of the previous step to the end of this one
    "offload/freed_megabytes": Metric(SUM, "MB", "Device memory that a role's ranks freed.", by="role"),
    "offload/out_megabytes": Metric(
        SUM, "MB", "State copied to the host: without gradients, and without data unchanged since the last copy.", by="role"
    ),
    "offload/in_megabytes": Metric(SUM, "MB", "State copied back to the devices.", by="role"),
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
    """Effective sample size as a share, (sum w)² / (n sum w²)."""
    return 0.0 if square == 0 else mean * mean / square


def _explained_variance(return_mean: float, return_square: float, error_mean: float, error_square: float) -> float:
    variance = return_square - return_mean**2
    return 1 - (error_square - error_mean**2) / variance if variance > 1e-12 * max(1.0, return_square) else math.nan


DERIVED: dict[str, Derived] = {
    "rollout/tokens_per_pass": Derived(
        ("rollout/drafted_tokens", "rollout/draft_acceptance", "rollout/response_tokens"),
        "tokens",
        "Tokens that a response gains in a forward pass, with speculation; 1 if no draft is accepted.",
        lambda drafted, acceptance, generated: generated / (generated - drafted * acceptance),
    ),
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
