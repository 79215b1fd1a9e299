from __future__ import annotations

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from roll_lite.config.arithmetic import (
    TRAINING_ROLES,
    adapters_of_engines,
    device_numbers,
    generates,
    group_size,
    replays_engines,
    validates,
)
from roll_lite.config.problems import Mistake
from roll_lite.config.schema.base import Mistakes, readable
from roll_lite.config.schema.environments import (
    AdapterSection,
    EndpointEnvironmentConfig,
    EnvironmentConfig,
    FunctionEnvironmentConfig,
    FunctionToolConfig,
    GymEnvironmentConfig,
    OpenEnvEnvironmentConfig,
    SearchToolConfig,
    ToolConfig,
    ToolsEnvironmentConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.user_function import check_function
from roll_lite.files import elsewhere, is_file

TOOL_PACKAGES = {"search": "bm25s", "mcp": "mcp"}


def _turns(config: RunConfig) -> Mistakes:
    rollout = config.rollout
    ahead, surplus = rollout.supply != "sync", rollout.oversample > 1
    if ahead and config.actor_infer.offload:
        message = f"with rollout.supply {rollout.supply} the engines generate while the actor trains, and cannot leave their devices"
        yield "actor_infer.offload", f"{message}; use placement: split (or false), or rollout.supply: sync"
    goes_on = ahead or (surplus and rollout.max_staleness and not config.actor_infer.offload)
    for name in [name for name, model in config.reward_models.items() if goes_on and model.offload]:
        message = "something is generated while the actor trains: batches would wait until nothing is"
        yield f"reward_models.{name}.offload", f"{message}; use false, or rollout.{'supply: sync' if ahead else 'max_staleness: 0'}"
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


def _group_filter(config: RunConfig) -> Iterator[Mistake]:
    chosen = config.rollout.filter
    if chosen is None:
        return
    if "." in chosen.name:
        yield from check_function("rollout.filter", "name", chosen.name, {}, inputs=("the sample group",))
    single = next((name for name, domain in config.domains.items() if group_size(config, domain) == 1), None)
    if single is not None and chosen.name in ("accuracy", "std"):
        message = f"groups of domain {single!r} have one sample, whose {chosen.name} says nothing"
        yield "rollout.filter.name", f"{message}; use more samples_per_prompt, or another filter"


def _environments(config: RunConfig) -> Iterator[Mistake]:
    for name, domain in config.domains.items():
        path = f"domains.{name}.environment"
        if isinstance(domain.environment, EndpointEnvironmentConfig) and config.deterministic:
            yield "deterministic", f"which of an agent's requests comes first depends on timing ({path}); use false"
        yield from environment_problems(path, domain.environment)


def environment_problems(path: str, environment: EnvironmentConfig | None) -> Iterator[Mistake]:
    """Yield the section's mistakes that can be found without making an environment or calling a user's code."""
    if isinstance(environment, FunctionEnvironmentConfig):
        inputs = ("a task", "the policy")
        yield from check_function(path, "function", environment.function, environment.args, or_class=True, inputs=inputs)
    elif isinstance(environment, EndpointEnvironmentConfig):
        if environment.function is not None:
            inputs = ("a task", "the endpoint")
            yield from check_function(path, "function", environment.function, environment.args, inputs=inputs)
        elif environment.command is not None and shutil.which(environment.command[0]) is None:
            yield f"{path}.command", "is no program on the PATH of this machine"
    elif isinstance(environment, ToolsEnvironmentConfig):
        for number, tool in enumerate(environment.tools):
            yield from readable(_tool(f"{path}.tools.{number}", tool))
    if isinstance(environment, AdapterSection) and find_spec(environment.package) is None:
        yield f"{path}.name", f'its package is not installed: pip install "roll_lite[{environment.name}]"'
    if isinstance(environment, GymEnvironmentConfig):
        if environment.function is not None:
            yield from check_function(path, "function", environment.function, environment.args, or_class=True, inputs=())
        if environment.action is not None:
            yield from check_function(path, "action", environment.action, {}, inputs=("the response",))
    if isinstance(environment, OpenEnvEnvironmentConfig):
        for key, given in (("action", "the response"), ("observation", "the observation")):
            if "." in (name := getattr(environment, key) or ""):
                yield from check_function(path, key, name, {}, inputs=(given,))


def _tool(path: str, tool: ToolConfig) -> Iterator[Mistake]:
    if isinstance(tool, FunctionToolConfig):
        yield from check_function(path, "name", tool.name, None)
    if isinstance(tool, SearchToolConfig) and not is_file(tool.corpus):
        yield f"{path}.corpus", f"there is no such file{elsewhere(tool.corpus)}"
    package = TOOL_PACKAGES.get(tool.name)
    if package is not None and find_spec(package) is None:
        yield f"{path}.name", f'its package is not installed: pip install "roll_lite[{tool.name}]"'


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


ROLLOUT_CHECKS = (_turns, _early_passes, _group_filter, _least_prompts, _environments, _speculation)
