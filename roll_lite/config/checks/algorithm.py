from __future__ import annotations

from roll_lite.config.arithmetic import group_size, kl_terms, longest_sequence
from roll_lite.config.checks.layout import known_shape
from roll_lite.config.keep_mask import is_truncated, keep_mask_available
from roll_lite.config.problems import show
from roll_lite.config.schema.base import Mistakes
from roll_lite.config.schema.domains import ENVIRONMENT_REWARD, DomainConfig, rewards_turns
from roll_lite.config.schema.losses import ReinforcePlusPlusAdvantageConfig
from roll_lite.config.schema.run import RunConfig

COMPARES_GROUPS = ("grpo", "rloo", "opo", "gpg", "gigpo")
REWARDS_TURNS = ("gae", "reinforce", "reinforce_plus_plus", "gigpo", "custom")
TRUNCATION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
"""{sampling setting that can exclude tokens: value that excludes none}."""


def compares_groups(config: RunConfig) -> bool:
    advantage = config.algorithm.advantage
    return advantage.name in COMPARES_GROUPS or (isinstance(advantage, ReinforcePlusPlusAdvantageConfig) and advantage.baseline == "group")


def _routing_replay(config: RunConfig) -> Mistakes:
    replay = config.algorithm.routing_replay
    if replay == "rollout" and config.mode == "train_only":
        yield "algorithm.routing_replay", "dumps of past rollouts do not say which experts the engine used; use train or none"
    elif replay != "none" and known_shape(config.model.path).experts is None:
        yield "algorithm.routing_replay", "the model has no experts to choose; use none"


def _mismatch_correction(config: RunConfig) -> Mistakes:
    truncated = [name for name, domain in config.domains.items() if is_truncated(domain.sampling)]
    if config.algorithm.mismatch_correction is not None and truncated and not config.rollout.keep_mask:
        message = (
            f"domain {truncated[0]!r} samples from a truncated distribution, so that every weight would hold the truncation as well; "
            "set rollout.keep_mask: true, or sample without top_p, top_k, min_p and min_tokens"
        )
        yield "algorithm.mismatch_correction", message


def _turn_rewards(config: RunConfig) -> Mistakes:
    algorithm = config.algorithm
    for name in [name for name, domain in config.domains.items() if rewards_turns(domain) and config.mode != "evaluate"]:
        path = f"domains.{name}.environment.rewards"
        if config.domains[name].reward.name != ENVIRONMENT_REWARD or config.domains[name].reward.terms:
            yield path, "needs the environment's rewards as the score, without a reward or terms of the domain; leave those out, or use sum"
        if algorithm.advantage.name not in REWARDS_TURNS:
            estimators = ", ".join(REWARDS_TURNS)
            yield path, f"makes no difference to algorithm.advantage {algorithm.advantage.name}; use one of {estimators}, or sum"
        if algorithm.reward.clip is not None or algorithm.reward.normalize is not None:
            yield path, "needs rewards that add up: leave out algorithm.reward.clip and normalize, or use sum"


def _full_kl(config: RunConfig) -> Mistakes:
    """Check that the object store has room for what KL estimator `full` needs: each token's log-probs of the whole vocabulary."""
    full = [name for name, term in kl_terms(config).items() if term.estimator == "full"]
    shape, longest = known_shape(config.model.path), longest_sequence(config)
    samples = config.rollout.prompts_per_step * max(group_size(config, domain) for domain in config.domains.values())
    megabytes = samples * longest * shape.vocab_size * 4 * (1 + ("kl_in_reward" in full)) / 2**20
    if megabytes > config.ray.object_store_mb / 2:
        message = (
            f"{samples} samples x {longest} tokens x {shape.vocab_size} words are up to {megabytes:,.0f} MB a step, more than half of "
            f"ray.object_store_mb ({config.ray.object_store_mb}); use k3, or a larger object store"
        )
        for name in full:
            yield f"algorithm.{name}.estimator", message


def _something_can_train(config: RunConfig) -> Mistakes:
    lengths = config.algorithm.masks.response_tokens
    longest = max(domain.sampling.max_tokens for domain in config.domains.values())
    if lengths is not None and lengths[0] > longest:
        yield "algorithm.masks.response_tokens", f"no response is that long: the longest max_tokens is {longest}"


def _remax(config: RunConfig) -> Mistakes:
    """Refuse reward shaping with ReMax, whose baseline is the unshaped score of a greedy sample."""
    if config.algorithm.advantage.name != "remax":
        return
    reward = config.algorithm.reward
    terms = {f"algorithm.reward.{name}": getattr(reward, name) for name in ("length_penalty", "overlong", "normalize")}
    terms |= {f"domains.{name}.reward.format": domain.reward.format for name, domain in config.domains.items()}
    terms["algorithm.masks.truncated"] = config.algorithm.masks.truncated == "penalize" or None
    for path, term in terms.items():
        if term is not None:
            message = "remax compares with the score of a greedy sample, which has no such term; remove it, or use another estimator"
            yield path, message


def _validation_stop_tokens(config: RunConfig) -> Mistakes:
    yield from _no_tokens(config, "validation.sampling.stop_token_ids", config.validation.sampling.stop_token_ids or [])


def _no_tokens(config: RunConfig, path: str, tokens: list[int]) -> Mistakes:
    size = known_shape(config.model.path).vocab_size
    if beyond := [token for token in tokens if token >= size]:
        yield path, f"{beyond[0]} is no token of the model, whose vocabulary has {size} (0 to {size - 1})"


ALGORITHM_CHECKS = (
    _turn_rewards,
    _routing_replay,
    _mismatch_correction,
    _full_kl,
    _something_can_train,
    _remax,
    _validation_stop_tokens,
)


# ---------------------------------------------------------------- one domain


def _groups_have_a_baseline(config: RunConfig, path: str, domain: DomainConfig) -> Mistakes:
    normalize = config.algorithm.reward.normalize
    by_group = normalize is not None and normalize.over == "group" and normalize.mean
    if group_size(config, domain) == 1 and (compares_groups(config) or by_group):
        place = f"{path}.samples_per_prompt" if domain.samples_per_prompt else "rollout.samples_per_prompt"
        what = config.algorithm.advantage.name if compares_groups(config) else "algorithm.reward.normalize.over: group"
        yield place, f"{what} compares the samples of a prompt; with one of them every advantage is 0; use at least 2"


def _keep_mask(config: RunConfig, path: str, domain: DomainConfig) -> Mistakes:
    sampling = domain.sampling
    if not is_truncated(sampling):
        return
    name = next(name for name, off in TRUNCATION.items() if getattr(sampling, name) != off)
    if config.rollout.keep_mask:
        if (reason := keep_mask_available(sampling, known_shape(config.model.path).vocab_size)) is not None:
            yield f"{path}.sampling.{name}", f"rollout.keep_mask: {reason}"
    elif config.algorithm.old_log_probs == "rollout":
        message = (
            "old_log_probs: rollout takes the engine's log-probs, which then belong to a truncated distribution; "
            f"use {show(TRUNCATION[name])}, or rollout.keep_mask: true, or algorithm.old_log_probs: recompute"
        )
        yield f"{path}.sampling.{name}", message


def _stop_tokens(config: RunConfig, path: str, domain: DomainConfig) -> Mistakes:
    yield from _no_tokens(config, f"{path}.sampling.stop_token_ids", domain.sampling.stop_token_ids)
    yield from _no_tokens(config, f"{path}.validation_sampling.stop_token_ids", domain.validation_sampling.stop_token_ids or [])


def _overlong(config: RunConfig, path: str, domain: DomainConfig) -> Mistakes:
    overlong, longest = config.algorithm.reward.overlong, domain.sampling.max_tokens
    if overlong is not None and overlong.buffer_tokens > longest:
        message = f"is more than {path}.sampling.max_tokens ({longest}), so that every response would be penalised"
        yield "algorithm.reward.overlong.buffer_tokens", message


DOMAIN_ALGORITHM_CHECKS = (_groups_have_a_baseline, _keep_mask, _stop_tokens, _overlong)
