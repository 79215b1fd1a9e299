"""Checks of the algorithm's settings, also against the domains and the roles."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from roll_lite.config.arithmetic import group_size
from roll_lite.config.checks.functions import check_function
from roll_lite.config.keep_mask import is_truncated, keep_mask_available
from roll_lite.config.problems import Problem, show
from roll_lite.config.schema.algorithm import (
    GIVEN_TO_LOSSES,
    AdaptiveKlConfig,
    CustomAdvantageConfig,
    CustomLossConfig,
    ReinforcePlusPlusAdvantageConfig,
    RemaxAdvantageConfig,
    ToprLossConfig,
)
from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import read_model_shape

COMPARES_GROUPS = ("grpo", "rloo", "opo", "gpg")
TRUNCATION = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_tokens": 0}
"""Sampling settings, with the value that turns each off."""


def compares_groups(config: RunConfig) -> bool:
    """True if the estimator computes a sample's advantage from the other samples of its prompt."""
    advantage = config.algorithm.advantage
    return advantage.name in COMPARES_GROUPS or (isinstance(advantage, ReinforcePlusPlusAdvantageConfig) and advantage.baseline == "group")


def _old_log_probs(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    updates = algorithm.ppo_epochs * algorithm.mini_batches
    if algorithm.old_log_probs == "current" and updates > 1:
        message = f"needs one update per batch, but ppo_epochs {algorithm.ppo_epochs} x mini_batches {algorithm.mini_batches} are {updates}"
        yield Problem("algorithm.old_log_probs", f"{message}; use recompute", "current")
    if algorithm.old_log_probs == "current" and algorithm.kl_in_reward.coef > 0:
        message = "kl_in_reward needs log-probs before the update, `current` has them only in it; use recompute or rollout"
        yield Problem("algorithm.old_log_probs", message, "current")


def _routing_replay(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if algorithm.routing_replay == "none":
        return
    with suppress(ValueError):  # the file checks report it
        if read_model_shape(config.model.path).experts is None:
            yield Problem("algorithm.routing_replay", "the model has no experts to choose; use none", algorithm.routing_replay)
            return
    if algorithm.routing_replay == "train" and algorithm.old_log_probs != "recompute":
        message = f"replays the pass that takes the old log-probs, which old_log_probs: {algorithm.old_log_probs} leaves out; use recompute"
        yield Problem("algorithm.routing_replay", message, algorithm.routing_replay)
    if algorithm.routing_replay == "rollout" and config.mode == "train_only":
        message = "dumps of past rollouts do not say which experts the engine used; use train or none"
        yield Problem("algorithm.routing_replay", message, algorithm.routing_replay)


def _mismatch_correction(config: RunConfig) -> Iterator[Problem]:
    correction = config.algorithm.mismatch_correction
    if correction is None:
        return
    path = "algorithm.mismatch_correction"
    if correction.weight is None and not correction.filters:
        yield Problem(path, "neither weighs nor filters; set weight (weight: {high: 2.0}) or filters, or remove it")
    if config.algorithm.old_log_probs == "rollout" and correction.weight is not None:
        message = (
            "with old_log_probs: rollout the policy loss's own ratio is against the engine; use recompute or current, or filters alone"
        )
        yield Problem(f"{path}.weight", message)
    truncated = [name for name, domain in config.domains.items() if is_truncated(domain.sampling)]
    if truncated and not config.rollout.keep_mask:
        message = (
            f"domain {truncated[0]!r} samples from a truncated distribution, so that every weight would hold the truncation as well; "
            "set rollout.keep_mask: true, or sample without top_p, top_k, min_p and min_tokens"
        )
        yield Problem(path, message)
    for place, one in ((f"{path}.weight", correction.weight), *((f"{path}.filters.{i}", one) for i, one in enumerate(correction.filters))):
        if one is not None and one.low is not None and one.high is not None and one.low >= one.high:
            yield Problem(f"{place}.low", f"is not below high ({one.high})", one.low)
    for number, one in enumerate(correction.filters):
        if one.low is None and one.high is None:
            yield Problem(f"{path}.filters.{number}", "has no range, everything passes; set low or high, or remove it")
            continue
        agreement = 1.0 if one.estimator == "ratio" else 0.0
        message = f"takes tokens on which trainer and engine agree: their {one.estimator} is {agreement:g}"
        if one.low is not None and one.low > agreement:
            yield Problem(f"{path}.filters.{number}.low", message, one.low)
        elif one.high is not None and one.high < agreement and (one.low is None or one.low < one.high):
            yield Problem(f"{path}.filters.{number}.high", message, one.high)


def _topr_ranges(config: RunConfig) -> Iterator[Problem]:
    loss = config.algorithm.policy_loss
    if isinstance(loss, ToprLossConfig):
        for name in ("positive", "negative"):
            low, high = getattr(loss, name)
            if low > high:
                yield Problem(f"algorithm.policy_loss.{name}", "write the lower end first", [low, high])


def _own_functions(config: RunConfig) -> Iterator[Problem]:
    algorithm = config.algorithm
    if isinstance(algorithm.advantage, CustomAdvantageConfig):
        yield from check_function("algorithm.advantage", "function", algorithm.advantage.function, algorithm.advantage.args)
    if isinstance(algorithm.policy_loss, CustomLossConfig):
        loss = algorithm.policy_loss
        yield from check_function("algorithm.policy_loss", "function", loss.function, loss.args, given=GIVEN_TO_LOSSES)
    if algorithm.masks.function is not None:
        yield from check_function("algorithm.masks", "function", algorithm.masks.function, {})


def _controllers_have_something_to_control(config: RunConfig) -> Iterator[Problem]:
    for name in ("kl_in_reward", "kl_in_loss"):
        term = getattr(config.algorithm, name)
        if isinstance(term.controller, AdaptiveKlConfig) and term.coef == 0:
            yield Problem(f"algorithm.{name}.controller.name", f"multiplies algorithm.{name}.coef, which is 0; set it", "adaptive")


def _full_kl(config: RunConfig) -> Iterator[Problem]:
    """Check that the object store holds a step's distributions: `full` sends one per token."""
    algorithm = config.algorithm
    terms = {name: getattr(algorithm, name) for name in ("kl_in_reward", "kl_in_loss")}
    full = [name for name, term in terms.items() if term.coef > 0 and term.estimator == "full"]
    if "kl_in_reward" in full and algorithm.old_log_probs != "recompute":
        message = "needs the policy's whole distribution before the update; use old_log_probs: recompute, or another estimator"
        yield Problem("algorithm.kl_in_reward.estimator", message, "full")
    try:
        vocabulary = read_model_shape(config.model.path).vocab_size
    except ValueError:  # the file checks report it
        return
    longest = max(domain.sampling.max_prompt_tokens + domain.sampling.max_tokens for domain in config.domains.values())
    samples = config.rollout.prompts_per_step * max(group_size(config, domain) for domain in config.domains.values())
    megabytes = samples * longest * vocabulary * 4 * (1 + ("kl_in_reward" in full)) / 2**20
    if full and megabytes > config.ray.object_store_mb / 2:
        message = (
            f"{samples} samples x {longest} tokens x {vocabulary} words are up to {megabytes:,.0f} MB a step, more than half of "
            f"ray.object_store_mb ({config.ray.object_store_mb}); use k3, or a larger object store"
        )
        for name in full:
            yield Problem(f"algorithm.{name}.estimator", message, "full")


def _unbiased_full_kl(config: RunConfig) -> Iterator[Problem]:
    term = config.algorithm.kl_in_loss
    if term.unbiased_gradient and term.estimator == "full":
        yield Problem("algorithm.kl_in_loss.unbiased_gradient", "the gradient of `full` is exact as it is; remove it", True)


def _normalize_does_something(config: RunConfig) -> Iterator[Problem]:
    normalize = config.algorithm.reward.normalize
    if normalize is not None and not normalize.mean and not normalize.std:
        yield Problem("algorithm.reward.normalize", "neither takes the mean off nor divides; set mean or std, or remove it")


def _something_can_train(config: RunConfig) -> Iterator[Problem]:
    lengths = config.algorithm.masks.response_tokens
    longest = max(domain.sampling.max_tokens for domain in config.domains.values())
    if lengths is not None and lengths[0] > longest:
        yield Problem("algorithm.masks.response_tokens", f"no response is that long: the longest max_tokens is {longest}", list(lengths))


def _keep_mask_has_a_use(config: RunConfig) -> Iterator[Problem]:
    if config.rollout.keep_mask and not any(is_truncated(domain.sampling) for domain in config.domains.values()):
        message = "no domain samples from a truncated distribution (top_p, top_k, min_p, min_tokens); every token is kept; remove it"
        yield Problem("rollout.keep_mask", message, True)


def _remax(config: RunConfig) -> Iterator[Problem]:
    """Refuse reward terms beside the score: the greedy sample has a score only."""
    if not isinstance(config.algorithm.advantage, RemaxAdvantageConfig):
        return
    reward, masks = config.algorithm.reward, config.algorithm.masks
    message = "remax compares with the score of a greedy sample, which has no such term; remove it, or use another estimator"
    for name in ("length_penalty", "overlong", "normalize"):
        if getattr(reward, name) is not None:
            yield Problem(f"algorithm.reward.{name}", message)
    if masks.truncated == "penalize":
        yield Problem("algorithm.masks.truncated", message, "penalize")
    for name, domain in config.domains.items():
        if domain.reward.format is not None:
            yield Problem(f"domains.{name}.reward.format", message)


def _mask_ranges(config: RunConfig) -> Iterator[Problem]:
    for name in ("group_mean", "response_tokens"):
        given = getattr(config.algorithm.masks, name)
        if given is not None and given[0] > given[1]:
            yield Problem(f"algorithm.masks.{name}", "write the lower end first", list(given))


def _validation_stop_tokens(config: RunConfig) -> Iterator[Problem]:
    yield from _no_tokens(config, "validation.sampling.stop_token_ids", config.validation.sampling.stop_token_ids or [])


def _no_tokens(config: RunConfig, path: str, tokens: list[int]) -> Iterator[Problem]:
    try:
        vocabulary = read_model_shape(config.model.path).vocab_size
    except ValueError:  # the file checks report it
        return
    beyond = [token for token in tokens if token >= vocabulary]
    if beyond:
        message = f"{beyond[0]} is no token of the model, whose vocabulary has {vocabulary} (0 to {vocabulary - 1})"
        yield Problem(path, message, tokens)


def _ptx(config: RunConfig) -> Iterator[Problem]:
    if config.algorithm.ptx is None:
        return
    if config.algorithm.kl_in_loss.coef > 0 and config.algorithm.kl_in_loss.estimator == "full":
        message = "would take the whole distribution of the rows of algorithm.ptx too; use another estimator, or no ptx"
        yield Problem("algorithm.kl_in_loss.estimator", message, "full")


ALGORITHM_CHECKS = (
    _ptx,
    _old_log_probs,
    _routing_replay,
    _mismatch_correction,
    _topr_ranges,
    _own_functions,
    _controllers_have_something_to_control,
    _full_kl,
    _unbiased_full_kl,
    _normalize_does_something,
    _something_can_train,
    _keep_mask_has_a_use,
    _remax,
    _mask_ranges,
    _validation_stop_tokens,
)


# ---------------------------------------------------------------- one domain


def _groups_have_a_baseline(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    normalize = config.algorithm.reward.normalize
    by_group = normalize is not None and normalize.over == "group" and normalize.mean
    if group_size(config, domain) == 1 and (compares_groups(config) or by_group):
        place = f"{path}.samples_per_prompt" if domain.samples_per_prompt else "rollout.samples_per_prompt"
        what = config.algorithm.advantage.name if compares_groups(config) else "algorithm.reward.normalize.over: group"
        yield Problem(place, f"{what} compares the samples of a prompt; with one of them every advantage is 0; use at least 2", 1)


def _keep_mask(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    """Check that engine and trainer use the same distribution with old_log_probs: rollout."""
    sampling = domain.sampling
    if not is_truncated(sampling):
        return
    name, value = next((name, getattr(sampling, name)) for name, off in TRUNCATION.items() if getattr(sampling, name) != off)
    if config.rollout.keep_mask:
        try:
            reason = keep_mask_available(sampling, read_model_shape(config.model.path).vocab_size)
        except ValueError:  # the file checks report it
            return
        if reason is not None:
            yield Problem(f"{path}.sampling.{name}", f"rollout.keep_mask: {reason}", value)
    elif config.algorithm.old_log_probs == "rollout":
        message = (
            "old_log_probs: rollout takes the engine's log-probs, which then belong to a truncated distribution; "
            f"use {show(TRUNCATION[name])}, or rollout.keep_mask: true, or algorithm.old_log_probs: recompute"
        )
        yield Problem(f"{path}.sampling.{name}", message, value)


def _stop_tokens(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    yield from _no_tokens(config, f"{path}.sampling.stop_token_ids", domain.sampling.stop_token_ids)
    yield from _no_tokens(config, f"{path}.validation_sampling.stop_token_ids", domain.validation_sampling.stop_token_ids or [])


def _overlong(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    overlong = config.algorithm.reward.overlong
    if overlong is not None and overlong.buffer_tokens > domain.sampling.max_tokens:
        message = f"is more than {path}.sampling.max_tokens ({domain.sampling.max_tokens}), so that every response would be penalised"
        yield Problem("algorithm.reward.overlong.buffer_tokens", message, overlong.buffer_tokens)


DOMAIN_ALGORITHM_CHECKS = (_groups_have_a_baseline, _keep_mask, _stop_tokens, _overlong)
