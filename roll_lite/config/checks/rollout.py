from __future__ import annotations

from roll_lite.config.arithmetic import (
    TRAINING_ROLES,
    adapters_of_engines,
    device_numbers,
    generates,
    group_size,
    replays_engines,
    validates,
)
from roll_lite.config.schema.base import Mistakes
from roll_lite.config.schema.environments import EndpointEnvironmentConfig
from roll_lite.config.schema.run import RunConfig


def _turns(config: RunConfig) -> Mistakes:
    rollout = config.rollout
    ahead, surplus = rollout.supply != "sync", rollout.oversample > 1
    if ahead and config.actor_infer.offload:
        message = f"with rollout.supply {rollout.supply} the engines generate while the actor trains, and cannot leave their devices"
        yield "actor_infer.offload", f"{message}; use placement: split (or false), or rollout.supply: sync"
    for name in [name for name, model in config.reward_models.items() if ahead and model.offload]:
        message = f"with rollout.supply {rollout.supply} something is generated all the time: batches would wait until nothing is"
        yield f"reward_models.{name}.offload", f"{message}; use false, or rollout.supply: sync"
    goes_on = not ahead and surplus and rollout.max_staleness and not config.actor_infer.offload
    for name in [name for name, model in config.reward_models.items() if goes_on and model.offload]:
        message = "what rollout.oversample leaves over is generated and scored while the actor trains"
        yield f"reward_models.{name}.offload", f"{message}; use false, or rollout.max_staleness: 0"
    if config.deterministic and ahead:
        yield "deterministic", "which weights generate what depends on timing; use rollout.supply: sync, or deterministic: false"
    elif config.deterministic and surplus:
        yield "rollout.oversample", "which groups come first depends on timing; use 1, or deterministic: false"
    if config.actor_infer.offload and surplus and rollout.on_sync not in (None, "abort"):
        message = "engines that leave their devices (actor_infer.offload) interrupt what oversample has left over"
        yield "rollout.on_sync", f"{message}; use abort, or leave it out"


def _early_passes(config: RunConfig) -> Mistakes:
    path = "rollout.stream_log_probs"
    if not config.rollout.stream_log_probs:
        return
    if config.mode != "full":
        yield path, f"mode: {config.mode} does not both generate and train; use false"
        return
    if config.deterministic:
        message = "which rows go through a pass together depends on timing, and with it the last bits"
        yield path, f"{message}; use false, or deterministic: false"
    engines = set(device_numbers(config.actor_infer.devices))
    for name in TRAINING_ROLES:
        role = getattr(config, name)
        if role is None:
            continue
        computes = f"with {path} {name} computes while the engines generate"
        if role.offload:
            yield f"{name}.offload", f"{computes}, and cannot leave its devices; use false, or {path}: false"
        elif shared := sorted(engines & set(device_numbers(role.devices))):
            message = f"{computes}, and cannot share device {', '.join(map(str, shared))} with them"
            yield f"{name}.devices", f"{message}; use others, or {path}: false"


def _group_filter(config: RunConfig) -> Mistakes:
    chosen = config.rollout.filter
    single = next((name for name, domain in config.domains.items() if group_size(config, domain) == 1), None)
    if chosen is not None and chosen.name in ("accuracy", "std") and single is not None:
        message = f"groups of domain {single!r} have one sample, whose {chosen.name} says nothing"
        yield "rollout.filter.name", f"{message}; use more samples_per_prompt, or another filter"


def _agents_depend_on_timing(config: RunConfig) -> Mistakes:
    for name, domain in config.domains.items():
        if config.deterministic and isinstance(domain.environment, EndpointEnvironmentConfig):
            message = f"which of an agent's requests comes first depends on timing (domains.{name}.environment); use false"
            yield "deterministic", message


def staleness_notes(config: RunConfig) -> list[str]:
    rollout, algorithm = config.rollout, config.algorithm
    stale = rollout.supply != "sync" if rollout.max_staleness is None else rollout.max_staleness > 0
    if not stale or algorithm.weighs_by_rollout:
        return []
    what = f"rollout.supply: {rollout.supply} trains on samples of older weights as if the newest had generated them"
    return [f"{what}; algorithm.mismatch_correction.weight, or old_log_probs: rollout, weighs them by the ratio of both"]


def _least_prompts(config: RunConfig) -> Mistakes:
    least = {name: domain.min_prompts for name, domain in config.domains.items() if domain.min_prompts}
    size = config.rollout.prompts_per_step
    others = [name for name in config.domains if name not in least]
    listed, place = ", ".join(f"{name}: {count}" for name, count in least.items()), f"domains.{next(iter(least), '')}.min_prompts"
    if sum(least.values()) > size:
        yield place, f"the domains' min_prompts ({listed}) are more than a batch has (rollout.prompts_per_step: {size})"
    elif sum(least.values()) == size and others and not any(config.domains[name].data.epochs for name in least):
        message = f"the domains' min_prompts ({listed}) fill a batch (rollout.prompts_per_step: {size}): {', '.join(others)} never train"
        yield place, f"{message}; use less, or remove these domains"


def _speculation(config: RunConfig) -> Mistakes:
    path = "actor_infer.strategy.speculation"
    if not generates(config) or config.actor_infer.strategy.speculation is None:
        return
    settings = {"validation.sampling": config.validation.sampling.min_p} if validates(config) else {}
    for name, domain in config.domains.items():
        settings |= {f"domains.{name}.sampling": domain.sampling.min_p}
        settings |= {f"domains.{name}.validation_sampling": domain.validation_sampling.min_p} if validates(config) else {}
    for place in [place for place, min_p in settings.items() if min_p]:
        yield f"{place}.min_p", f"vLLM has no min_p in speculation; use 0, or {path}: null"
    if replays_engines(config):
        yield path, "experts of drafted tokens could not be tested; use null, or algorithm.routing_replay: train or none"
    if adapters_of_engines(config) is not None:
        yield path, "engines with adapters could not be tested; use null, or actor_train.lora.engines: merged"


ROLLOUT_CHECKS = (_turns, _early_passes, _group_filter, _least_prompts, _agents_depend_on_timing, _speculation)
