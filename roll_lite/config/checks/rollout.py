"""Checks of how generation and training alternate, and of the group filter."""

from __future__ import annotations

from collections.abc import Iterator

from roll_lite.config.arithmetic import TRAINING_ROLES, actor_is_reference, device_numbers, group_size
from roll_lite.config.checks.functions import check_function
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.domains import GROUP_MEASURES
from roll_lite.config.schema.run import RunConfig


def _turns(config: RunConfig) -> Iterator[Problem]:
    rollout = config.rollout
    ahead = rollout.supply != "sync"
    if ahead and config.actor_infer.offload:
        message = f"with rollout.supply {rollout.supply} the engines generate while the actor trains, and cannot leave their devices"
        yield Problem("actor_infer.offload", f"{message}; use placement: split (or false), or rollout.supply: sync", True)
    for name in [name for name, model in config.reward_models.items() if ahead and model.offload]:
        message = f"with rollout.supply {rollout.supply} something is generated all the time: batches would wait until nothing is"
        yield Problem(f"reward_models.{name}.offload", f"{message}; use false, or rollout.supply: sync", True)
    if ahead and config.deterministic:
        message = "which weights generate what depends on timing; use rollout.supply: sync, or deterministic: false"
        yield Problem("deterministic", message, True)
    if ahead and rollout.oversample > 1:
        message = f"rollout.supply {rollout.supply} generates ahead as far as its staleness allows; what is more would become too old"
        yield Problem("rollout.oversample", f"{message}; use 1, or rollout.supply: sync", rollout.oversample)
    elif rollout.oversample > 1 and config.deterministic:
        message = "which groups come first depends on timing; use 1, or deterministic: false"
        yield Problem("rollout.oversample", message, rollout.oversample)
    if config.actor_infer.offload and rollout.oversample > 1 and rollout.on_sync not in (None, "abort"):
        message = (
            "engines that leave their devices (actor_infer.offload) interrupt what oversample has left over; use abort, or leave it out"
        )
        yield Problem("rollout.on_sync", message, rollout.on_sync)


def _staleness(config: RunConfig) -> Iterator[Problem]:
    rollout, given = config.rollout, config.rollout.max_staleness
    if given == 0 and rollout.supply == "one_step_off":
        yield Problem("rollout.max_staleness", "a batch is generated one step before it is trained; use 1 or more, or supply: sync", given)
    if given and rollout.supply == "sync" and rollout.oversample > given + 1:
        message = f"surplus is kept for max_staleness: {given} further batches, and what is more would be generated again and again"
        yield Problem("rollout.oversample", f"{message}; use at most {given + 1}, or a higher max_staleness", rollout.oversample)
    if given and rollout.supply == "sync" and rollout.oversample == 1:
        message = "nothing is generated ahead by supply: sync without oversample; use 0, or supply: async"
        yield Problem("rollout.max_staleness", message, given)


def _early_passes(config: RunConfig) -> Iterator[Problem]:
    path = "rollout.stream_log_probs"
    if not config.rollout.stream_log_probs:
        return
    if config.mode != "full":
        yield Problem(path, f"mode: {config.mode} does not both generate and train; use false", True)
        return
    others = config.reference is not None or config.critic is not None or actor_is_reference(config)
    if not others and config.algorithm.old_log_probs != "recompute":
        message = f"old_log_probs: {config.algorithm.old_log_probs} without reference and critic needs no pass before the training"
        yield Problem(path, f"{message}; use false", True)
        return
    if config.deterministic:
        message = "which rows go through a pass together depends on timing, and with it the last bits"
        yield Problem(path, f"{message}; use false, or deterministic: false", True)
    engines = set(device_numbers(config.actor_infer.devices))
    for name in TRAINING_ROLES:
        role = getattr(config, name)
        if role is None:
            continue
        computes = f"with {path} {name} computes while the engines generate"
        if role.offload:
            yield Problem(f"{name}.offload", f"{computes}, and cannot leave its devices; use false, or {path}: false", True)
        elif shared := sorted(engines & set(device_numbers(role.devices))):
            message = f"{computes}, and cannot share device {', '.join(map(str, shared))} with them"
            yield Problem(f"{name}.devices", f"{message}; use others, or {path}: false", role.devices)


def _group_filter(config: RunConfig) -> Iterator[Problem]:
    chosen = config.rollout.filter
    if chosen is None:
        return
    path = "rollout.filter"
    if chosen.name not in GROUP_MEASURES:
        if "." in chosen.name:
            yield from check_function(path, "name", chosen.name, {})
        else:
            message = f"no such filter; {did_you_mean(chosen.name, GROUP_MEASURES)}, or a dotted path to a function of your own"
            yield Problem(f"{path}.name", message, chosen.name)
        for name in ("above", "below"):
            if getattr(chosen, name) is not None:
                message = f"belongs to {', '.join(GROUP_MEASURES)}: {chosen.name!r} decides by itself"
                yield Problem(f"{path}.{name}", message, getattr(chosen, name))
        return
    above, below = chosen.bounds
    if above is not None and below is not None and above >= below:
        yield Problem(f"{path}.above", f"no group is above it and below {below:g}", above)
    single = next((name for name, domain in config.domains.items() if group_size(config, domain) == 1), None)
    if single is not None and chosen.name in ("accuracy", "std"):
        message = f"groups of domain {single!r} have one sample, whose {chosen.name} says nothing"
        yield Problem(f"{path}.name", f"{message}; use more samples_per_prompt, or another filter", chosen.name)


def staleness_notes(config: RunConfig) -> list[str]:
    """Note if samples of older weights train without a correction."""
    rollout, algorithm = config.rollout, config.algorithm
    stale = rollout.supply != "sync" if rollout.max_staleness is None else rollout.max_staleness > 0
    if not stale or algorithm.weighs_by_rollout:
        return []
    what = f"rollout.supply: {rollout.supply} trains on samples of older weights as if the newest had generated them"
    return [f"{what}; algorithm.mismatch_correction.weight, or old_log_probs: rollout, weighs them by the ratio of both"]


def _least_prompts(config: RunConfig) -> Iterator[Problem]:
    least = {name: domain.min_prompts for name, domain in config.domains.items() if domain.min_prompts}
    size = config.rollout.prompts_per_step
    if sum(least.values()) > size:
        listed = ", ".join(f"{name}: {count}" for name, count in least.items())
        message = f"the domains' min_prompts ({listed}) are more than a batch has (rollout.prompts_per_step: {size})"
        yield Problem(f"domains.{next(iter(least))}.min_prompts", message, next(iter(least.values())))


ROLLOUT_CHECKS = (_turns, _staleness, _early_passes, _group_filter, _least_prompts)
