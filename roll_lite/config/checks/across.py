"""Checks across fields. Every check yields the problems it finds and changes nothing.

The schema may have refused some fields: reading one raises Refused, which ends that check only. So one mistake neither hides others nor
causes false ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from roll_lite.config.arithmetic import (
    group_size,
    held_out_path,
    held_out_sampling,
    kl_terms,
    loss_reads_reference,
    requests,
    trains,
    updates,
    uses_reference,
    validates,
)
from roll_lite.config.checks.algorithm import ALGORITHM_CHECKS, DOMAIN_ALGORITHM_CHECKS
from roll_lite.config.checks.files import FILE_CHECKS
from roll_lite.config.checks.gpu_only import GPU_CHECKS
from roll_lite.config.checks.judges import JUDGE_CHECKS
from roll_lite.config.checks.layout import LAYOUT_CHECKS, ROLE_CHECKS
from roll_lite.config.checks.lora import LORA_CHECKS, LORA_FILE_CHECKS
from roll_lite.config.checks.replay import REPLAY_CHECKS
from roll_lite.config.checks.reward_models import REWARD_MODEL_CHECKS
from roll_lite.config.checks.rewards import REWARD_CHECKS
from roll_lite.config.checks.rollout import ROLLOUT_CHECKS
from roll_lite.config.checks.secrets import addresses_without_secrets
from roll_lite.config.checks.trackers import TRACKER_CHECKS
from roll_lite.config.problems import Problem
from roll_lite.config.schema.base import Refused
from roll_lite.config.schema.domains import LEAST_TEMPERATURE, DomainConfig, PlainTemplateConfig
from roll_lite.config.schema.models import ForwardRoleConfig, InferRoleConfig, OptimizerConfig, ScriptedStrategyConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.text_templates import placeholders

OVERALL = "overall"
DOMAIN_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
SEARCHED = 100_000
EXPERIMENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LONGEST_NAME = 200
"""File systems allow 255 bytes."""


Check = Callable[[RunConfig], Iterable[Problem]]
SectionCheck = Callable[[RunConfig, str, Any], Iterable[Problem]]


def check(config: RunConfig, *, allow_scripted: bool = False, further: Sequence[Check] = (), files: bool = True) -> list[Problem]:
    """Find all problems beyond the schema. `further`: checks that other packages add. `files`: also look at the files that paths name, and
    at this machine."""
    of_run = (
        *RUN_CHECKS,
        _ptx_template,
        *ALGORITHM_CHECKS,
        *LAYOUT_CHECKS,
        *((*GPU_CHECKS, *FILE_CHECKS, *LORA_FILE_CHECKS, *REPLAY_CHECKS) if files else ()),
        *further,
    )
    found = [problem for one in of_run for problem in readable(one(config))]
    for sections, checks in SECTION_CHECKS.items():
        found += readable(_each(config, sections, checks))
    found += [problem for role in ("actor_train", "actor_infer", "reference", "critic") for problem in readable(_role(config, role))]
    if not allow_scripted:
        found += readable(_no_scripted_engine(config))
    return found


def readable(problems: Iterable[Problem]) -> list[Problem]:
    """Problems that a check finds before it reads a refused field."""
    found: list[Problem] = []
    with suppress(Refused):
        found.extend(problems)  # keeps the problems before the exception
    return found


def _each(config: RunConfig, sections: str, checks: Sequence[SectionCheck]) -> Iterator[Problem]:
    for name, section in getattr(config, sections).items():
        for one in checks:
            yield from readable(one(config, f"{sections}.{name}", section))


def _role(config: RunConfig, name: str) -> Iterator[Problem]:
    role: ForwardRoleConfig | InferRoleConfig | None = getattr(config, name)
    if role is not None:
        for one in ROLE_CHECKS:
            yield from readable(one(config, name, role))
        if hasattr(role, "optimizer") and trains(config):
            yield from readable(_optimizer(f"{name}.optimizer", role.optimizer, updates(config, name)))


# ---------------------------------------------------------------- the whole run


def _experiment_name(config: RunConfig) -> Iterator[Problem]:
    if not EXPERIMENT_NAME.fullmatch(config.experiment):
        yield Problem("experiment", "names a folder: use letters, digits, '.', '_' and '-'", config.experiment)
    elif len(config.experiment) > LONGEST_NAME:
        message = f"names a folder, and has {len(config.experiment)} letters; use at most {LONGEST_NAME}"
        yield Problem("experiment", message, config.experiment)
    elif config.experiment == "latest":
        yield Problem("experiment", "run_dir/latest is the link to the newest run; choose another name", config.experiment)


def _mini_batches_divide(config: RunConfig) -> Iterator[Problem]:
    """Check that every step's samples divide into equal mini-batches; group sizes may differ between domains, and quotas between steps."""
    prompts, parts = config.rollout.prompts_per_step, config.algorithm.mini_batches
    sizes = {name: group_size(config, domain) for name, domain in config.domains.items()}
    first = next(iter(sizes.values()))
    if all(size == first for size in sizes.values()):
        samples = prompts * first
        if samples % parts:
            message = f"{prompts} prompts x {first} samples = {samples} samples per step cannot be cut into {parts} equal mini-batches"
            yield Problem("algorithm.mini_batches", f"{message}; {_nearest_divisors(samples, parts)}", parts)
    elif prompts * first % parts or any((size - first) % parts for size in sizes.values()):
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        message = f"with differing samples per prompt ({listed}) a step's samples cannot always be cut into {parts} equal mini-batches"
        yield Problem("algorithm.mini_batches", f"{message}; make every domain's samples_per_prompt a multiple of {parts}", parts)


def _nearest_divisors(number: int, wanted: int) -> str:
    below = next((one for one in range(min(wanted, number), 0, -1)[:SEARCHED] if number % one == 0), 1)
    above = next((one for one in range(wanted, number + 1)[:SEARCHED] if number % one == 0), None)
    return f"use {below}" + (f" or {above}" if above is not None else "")


def _critic_and_gae_belong_together(config: RunConfig) -> Iterator[Problem]:
    name = config.algorithm.advantage.name
    if name == "gae" and config.critic is None:
        yield Problem("algorithm.advantage.name", "gae needs values; add a `critic` section, or use grpo", name)
    if name not in ("gae", "custom") and config.critic is not None:
        message = f"{name} does not use values, the critic would train for nothing; remove the section (critic: null) or use gae"
        yield Problem("critic", f"algorithm.advantage.name {message}")


def _critic_warmup(config: RunConfig) -> Iterator[Problem]:
    warmup = config.algorithm.critic_warmup_steps
    if warmup and config.critic is None:
        yield Problem("algorithm.critic_warmup_steps", "there is no critic to warm up; use 0", warmup)
    if warmup and trains(config) and warmup >= config.steps:
        yield Problem("algorithm.critic_warmup_steps", f"the actor would never train; use less than steps ({config.steps})", warmup)


def _kl_and_reference_belong_together(config: RunConfig) -> Iterator[Problem]:
    active = kl_terms(config)
    if config.reference is None and config.actor_train.lora is None:
        for name, term in active.items():
            message = "KL is measured against the reference; add a `reference` section, or use 0"
            yield Problem(f"algorithm.{name}.coef", message, term.coef)
        if loss_reads_reference(config):
            message = "the loss has a parameter ref_log_probs; add a `reference` section, or rename the parameter"
            yield Problem("algorithm.policy_loss.function", message, config.algorithm.policy_loss.parameters["function"])
    elif config.reference is not None and not uses_reference(config):
        message = "nothing uses the reference: algorithm.kl_in_reward.coef and algorithm.kl_in_loss.coef are 0"
        yield Problem("reference", f"{message}; set one of them, or remove the section (reference: null)")


def _average_for_the_reference(config: RunConfig) -> Iterator[Problem]:
    refresh = config.reference.refresh if config.reference is not None else None
    if refresh is not None and refresh.weights == "ema" and config.actor_train.ema is None:
        yield Problem("reference.refresh.weights", "there is no average of the actor's weights; add actor_train.ema, or use actor", "ema")


def _validation_sampling(config: RunConfig) -> Iterator[Problem]:
    own = {f"domains.{name}.validation_sampling": domain.validation_sampling for name, domain in config.domains.items()}
    for path, sampling in {"validation.sampling": config.validation.sampling, **own}.items():
        if sampling.temperature is not None and 0 < sampling.temperature < LEAST_TEMPERATURE:
            message = f"engines sample at {LEAST_TEMPERATURE:g} and above, and greedily at 0; use {LEAST_TEMPERATURE:g} or 0"
            yield Problem(f"{path}.temperature", message, sampling.temperature)
    for name, domain in config.domains.items():
        used = held_out_sampling(config, domain)
        if used.min_tokens > used.max_tokens and domain.sampling.min_tokens <= domain.sampling.max_tokens:
            least, most = (held_out_path(config, name, key) for key in ("min_tokens", "max_tokens"))
            path, value = (most, used.max_tokens) if least.startswith(f"domains.{name}.sampling.") else (least, used.min_tokens)
            message = f"of domain {name!r} held-out responses have at least {used.min_tokens} tokens and at most {used.max_tokens}"
            yield Problem(path, message, value)


def _validation_has_data(config: RunConfig) -> Iterator[Problem]:
    if validates(config) and all(domain.data.validation is None for domain in config.domains.values()):
        message = f"no domain has held-out prompts; set domains.{next(iter(config.domains))}.data.validation, or validation.enabled: false"
        yield Problem("validation.enabled", message, True)


def _kept_checkpoints(config: RunConfig) -> Iterator[Problem]:
    every, kept = config.checkpoint.every, config.checkpoint.keep_every
    if kept and every and kept % every:
        yield Problem("checkpoint.keep_every", f"is no multiple of checkpoint.every ({every}): some would never be written", kept)


def _max_model_len(config: RunConfig) -> Iterator[Problem]:
    given = getattr(config.actor_infer.strategy, "max_model_len", None)
    longest = max(requests(config), key=lambda one: one.tokens)
    if given is not None and given < longest.tokens:
        message = (
            f"domain {longest.domain!r} needs max_prompt_tokens {longest.sampling.max_prompt_tokens} + max_tokens "
            f"{longest.sampling.max_tokens} = {longest.tokens} ({longest.path}); use at least {longest.tokens}, or leave it out"
        )
        yield Problem("actor_infer.strategy.max_model_len", message, given)


def _no_scripted_engine(config: RunConfig) -> Iterator[Problem]:
    if isinstance(config.actor_infer.strategy, ScriptedStrategyConfig):
        yield Problem(
            "actor_infer.strategy.name", "the scripted engine makes up its answers and is for tests only; use vllm or sglang", "scripted"
        )


RUN_CHECKS = (
    addresses_without_secrets,
    _experiment_name,
    _mini_batches_divide,
    _critic_and_gae_belong_together,
    _critic_warmup,
    _kl_and_reference_belong_together,
    _average_for_the_reference,
    _validation_sampling,
    _validation_has_data,
    *TRACKER_CHECKS,
    _kept_checkpoints,
    _max_model_len,
    *ROLLOUT_CHECKS,
    *LORA_CHECKS,
)


# ---------------------------------------------------------------- one domain


def _domain_name(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    name = path.removeprefix("domains.")
    if not DOMAIN_NAME.fullmatch(name):
        yield Problem(path, "a domain's name is part of metric names: a letter, then letters, digits, '_' and '-'")
    elif name == OVERALL:
        yield Problem(path, f"summary.json keeps {OVERALL!r} for all domains together; choose another name")


def _token_limits(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    sampling = domain.sampling
    if sampling.min_tokens > sampling.max_tokens:
        yield Problem(f"{path}.sampling.min_tokens", f"is more than max_tokens ({sampling.max_tokens})", sampling.min_tokens)


def _template(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    template = domain.template
    if not isinstance(template, PlainTemplateConfig):
        return
    try:
        if not placeholders(template.text):
            yield Problem(f"{path}.template.text", "never shows the prompt; put {prompt} where it belongs", template.text)
    except ValueError as error:
        yield Problem(f"{path}.template.text", str(error), template.text)


def _ptx_template(config: RunConfig) -> Iterator[Problem]:
    if (ptx := config.algorithm.ptx) is not None:
        yield from _template(config, "algorithm.ptx", ptx.as_domain)


SECTION_CHECKS: dict[str, Sequence[SectionCheck]] = {
    "domains": (_domain_name, _token_limits, _template, *REWARD_CHECKS, *DOMAIN_ALGORITHM_CHECKS),
    "reward_models": (*ROLE_CHECKS, *REWARD_MODEL_CHECKS),
    "judges": (*ROLE_CHECKS, *JUDGE_CHECKS),
}
"""Checks of the sections that the user names."""


# ---------------------------------------------------------------- one optimizer


def _optimizer(path: str, optimizer: OptimizerConfig, total: int) -> Iterator[Problem]:
    """Check one optimizer. `total`: optimizer steps of the whole run."""
    if optimizer.warmup_steps >= total and optimizer.decay != "constant":
        message = f"leaves nothing of the run's {total} optimizer steps to the {optimizer.decay} decay; use less, or decay: constant"
        yield Problem(f"{path}.warmup_steps", message, optimizer.warmup_steps)
    yield from _wsd(path, optimizer, total)
    if optimizer.min_lr > optimizer.lr:
        yield Problem(f"{path}.min_lr", f"is more than lr ({optimizer.lr})", optimizer.min_lr)
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield Problem(f"{path}.betas", "both have to be at least 0 and less than 1", list(optimizer.betas))


def _wsd(path: str, optimizer: OptimizerConfig, total: int) -> Iterator[Problem]:
    steps, warmup = optimizer.decay_steps, optimizer.warmup_steps
    if optimizer.decay != "wsd":
        return
    if steps is None:
        yield Problem(f"{path}.decay_steps", "decay: wsd needs the number of optimizer steps at the end of the run that it falls over")
    elif warmup < total < warmup + steps:
        message = f"is more than the run's {total} optimizer steps have left after {warmup} of warm-up; use {total - warmup} or less"
        yield Problem(f"{path}.decay_steps", message, steps)
