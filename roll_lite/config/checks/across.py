from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from roll_lite.config.arithmetic import (
    generates,
    group_size,
    held_out_path,
    held_out_sampling,
    kl_terms,
    loss_reads_reference,
    planned_updates,
    requests,
    roles,
    trains,
    uses_reference,
    validates,
)
from roll_lite.config.checks.algorithm import ALGORITHM_CHECKS, DOMAIN_ALGORITHM_CHECKS
from roll_lite.config.checks.files import MODEL_FILE_CHECKS
from roll_lite.config.checks.gpu_only import GPU_CHECKS
from roll_lite.config.checks.layout import LAYOUT_CHECKS, ROLE_CHECKS
from roll_lite.config.checks.lora import LORA_CHECKS, LORA_FILE_CHECKS
from roll_lite.config.checks.rollout import ROLLOUT_CHECKS
from roll_lite.config.checks.scoring_models import JUDGE_CHECKS, NAME, REWARD_MODEL_CHECKS, SCORING_FILE_CHECKS
from roll_lite.config.problems import Mistake, Problem, close_names, did_you_mean, secret_in_address
from roll_lite.config.schema.base import Mistakes, readable
from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.models import TrainRoleConfig
from roll_lite.config.schema.run import ChaosConfig, RunConfig
from roll_lite.config.validation import texts_in, value_at

OVERALL = "overall"
SEARCHED = 100_000

Check = Callable[[RunConfig], Iterable[Mistake]]
SectionCheck = Callable[[RunConfig, str, Any], Iterable[Mistake]]


def check(config: RunConfig, *, further: Sequence[Check] = (), files: bool = True) -> list[Problem]:
    """Return problems that checks of single sections cannot find. `further`: additional checks. `files`: False skips files and GPUs."""
    run_checks = (*RUN_CHECKS, *FILE_CHECKS, *further) if files else (*RUN_CHECKS, *further)
    found = [mistake for one in run_checks for mistake in readable(one(config))]
    for kind, checks in SECTION_CHECKS.items():
        valid = vars(config).get(kind)  # without invalid sections
        sections = {f"{kind}.{name}": one for name, one in valid.items()} if isinstance(valid, dict) else {kind: valid} if valid else {}
        for path, section in sections.items():
            for each in checks if files else [one for one in checks if one not in SCORING_FILE_CHECKS]:
                found += readable(each(config, path, section))
    return [one if isinstance(one, Problem) else Problem(*one, value_at(config, one[0])) for one in found]


def _addresses_without_secrets(config: RunConfig) -> Iterator[Problem]:
    for path, text in texts_in(config):
        if (what := secret_in_address(text)) is not None:
            # without the value: a password may hold characters that masking does not expect
            yield Problem(path, f"holds {what}, which would be written into logs; remove it, and name a key's variable in api_key_env")


def _mini_batches_divide(config: RunConfig) -> Mistakes:
    prompts, parts = config.rollout.prompts_per_step, config.algorithm.mini_batches
    sizes = {name: group_size(config, domain) for name, domain in config.domains.items()}
    first = next(iter(sizes.values()))
    if all(size == first for size in sizes.values()):
        samples = prompts * first
        if samples % parts:
            below = next((one for one in range(min(parts, samples), 0, -1)[:SEARCHED] if samples % one == 0), 1)
            above = next((one for one in range(parts, samples + 1)[:SEARCHED] if samples % one == 0), None)
            nearest = f"use {below}" + (f" or {above}" if above is not None else "")
            message = f"{prompts} prompts x {first} samples = {samples} samples per step cannot be cut into {parts} equal mini-batches"
            yield "algorithm.mini_batches", f"{message}; {nearest}"
    elif prompts * first % parts or any((size - first) % parts for size in sizes.values()):
        listed = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        message = f"with differing samples per prompt ({listed}) a step's samples cannot always be cut into {parts} equal mini-batches"
        yield "algorithm.mini_batches", f"{message}; make every domain's samples_per_prompt a multiple of {parts}"


def _critic_and_gae_belong_together(config: RunConfig) -> Mistakes:
    name = config.algorithm.advantage.name
    if name == "gae" and config.critic is None:
        yield "algorithm.advantage.name", "gae needs values; add a `critic` section, or use grpo"
    if name not in ("gae", "custom") and config.critic is not None:
        unused = f"algorithm.advantage.name {name} does not use values, the critic would train for nothing"
        yield "critic", f"{unused}; remove the section (critic: null) or use gae"


def _critic_warmup(config: RunConfig) -> Mistakes:
    warmup = config.algorithm.critic_warmup_steps
    if warmup and config.critic is None:
        yield "algorithm.critic_warmup_steps", "there is no critic to warm up; use 0"
    if warmup and trains(config) and warmup >= config.steps:
        yield "algorithm.critic_warmup_steps", f"the actor would never train; use less than steps ({config.steps})"


def _kl_and_reference_belong_together(config: RunConfig) -> Mistakes:
    if config.reference is None and config.actor_train.lora is None:
        for name in kl_terms(config):
            yield f"algorithm.{name}.coef", "KL is measured against the reference; add a `reference` section, or use 0"
        if loss_reads_reference(config):
            message = "the loss has a parameter ref_log_probs; add a `reference` section, or rename the parameter"
            yield "algorithm.policy_loss.function", message
    elif config.reference is not None and not uses_reference(config):
        message = "nothing uses the reference: algorithm.kl_in_reward.coef and algorithm.kl_in_loss.coef are 0"
        yield "reference", f"{message}; set one of them, or remove the section (reference: null)"


def _average_for_the_reference(config: RunConfig) -> Mistakes:
    refresh = config.reference.refresh if config.reference is not None else None
    if refresh is not None and refresh.weights == "ema" and config.actor_train.ema is None:
        yield "reference.refresh.weights", "there is no average of the actor's weights; add actor_train.ema, or use actor"


def _validation_sampling(config: RunConfig) -> Mistakes:
    for name, domain in config.domains.items():
        used = held_out_sampling(config, domain)
        if used.min_tokens > used.max_tokens and not domain.sampling.mistakes():
            least, most = (held_out_path(config, name, key) for key in ("min_tokens", "max_tokens"))
            message = f"of domain {name!r} held-out responses have at least {used.min_tokens} tokens and at most {used.max_tokens}"
            yield most if least.startswith(f"domains.{name}.sampling.") else least, message


def _validation_has_data(config: RunConfig) -> Mistakes:
    if validates(config) and all(domain.data.validation is None for domain in config.domains.values()):
        data = f"domains.{next(iter(config.domains))}.data.validation"
        if config.mode == "evaluate":
            yield data, "mode: evaluate needs held-out prompts; name their file, or a data set of the hub"
        else:
            yield "validation.enabled", f"no domain has held-out prompts; set {data}, or validation.enabled: false"


def _max_model_len(config: RunConfig) -> Mistakes:
    given, longest = config.actor_infer.strategy.max_model_len, max(requests(config), key=lambda one: one.tokens)
    if given is not None and given < longest.tokens:
        sizes = f"max_prompt_tokens {longest.sampling.max_prompt_tokens} + max_tokens {longest.sampling.max_tokens} = {longest.tokens}"
        message = f"domain {longest.domain!r} needs {sizes} ({longest.path}); use at least {longest.tokens}, or leave it out"
        yield "actor_infer.strategy.max_model_len", message


def _copies_in_memory(config: RunConfig) -> Mistakes:
    if config.checkpoint.in_memory_every and not trains(config):
        yield "checkpoint.in_memory_every", f"in mode: {config.mode} nothing trains that could be copied; use 0"


def _chaos_targets(config: RunConfig) -> Mistakes:
    if config.chaos is None or config.chaos.targets == ChaosConfig().targets:
        return
    there = {name.partition(".")[0] for name in roles(config)}
    if generates(config):
        there |= {"rollouts", "rewards", *("environments" for domain in config.domains.values() if domain.environment is not None)}
    if missing := [target for target in config.chaos.targets if target not in there]:
        yield "chaos.targets", f"the run has no {', '.join(missing)}; it has {', '.join(sorted(there))}"


def _domain_name(config: RunConfig, path: str, domain: DomainConfig) -> Mistakes:
    name = path.removeprefix("domains.")
    if not NAME.fullmatch(name):
        yield path, "a domain's name is part of metric names: a letter, then letters, digits, '_' and '-'"
    elif name == OVERALL:
        yield path, f"summary.json keeps {OVERALL!r} for all domains together; choose another name"


def _decay(config: RunConfig, name: str, role: TrainRoleConfig) -> Mistakes:
    if not trains(config):
        return
    path, optimizer, total = f"{name}.optimizer", role.optimizer, planned_updates(config, name, config.steps)
    warmup, steps = optimizer.warmup_steps, optimizer.decay_steps
    if warmup >= total and optimizer.decay != "constant":
        message = f"leaves nothing of the run's {total} optimizer steps to the {optimizer.decay} decay; use less, or decay: constant"
        yield f"{path}.warmup_steps", message
    elif optimizer.decay == "wsd" and steps is not None and warmup + steps > total:
        message = f"is more than the run's {total} optimizer steps have left after {warmup} of warm-up; use {total - warmup} or less"
        yield f"{path}.decay_steps", message


def simulated_domains(config: RunConfig) -> Mistakes:
    """Report unknown names in `simulation.domains` that resemble a domain of the run; others may belong to removed domains."""
    for name in config.simulation.domains.keys() - config.domains.keys():
        if close_names(name, config.domains.keys() - config.simulation.domains.keys()):
            yield f"simulation.domains.{name}", f"no such domain; {did_you_mean(name, config.domains)}"


RUN_CHECKS: Sequence[Check] = (
    _addresses_without_secrets,
    _mini_batches_divide,
    _critic_and_gae_belong_together,
    _critic_warmup,
    _kl_and_reference_belong_together,
    _average_for_the_reference,
    _copies_in_memory,
    _chaos_targets,
    _validation_sampling,
    _validation_has_data,
    _max_model_len,
    *ROLLOUT_CHECKS,
    *LORA_CHECKS,
    *ALGORITHM_CHECKS,
    *LAYOUT_CHECKS,
)
FILE_CHECKS = (*GPU_CHECKS, *MODEL_FILE_CHECKS, *LORA_FILE_CHECKS)
SECTION_CHECKS: dict[str, Sequence[SectionCheck]] = {
    "domains": (_domain_name, *DOMAIN_ALGORITHM_CHECKS),
    "reward_models": (*ROLE_CHECKS, *REWARD_MODEL_CHECKS),
    "judges": (*ROLE_CHECKS, *JUDGE_CHECKS),
    "actor_infer": ROLE_CHECKS,
    "actor_train": (*ROLE_CHECKS, _decay),
    "reference": ROLE_CHECKS,
    "critic": (*ROLE_CHECKS, _decay),
}
