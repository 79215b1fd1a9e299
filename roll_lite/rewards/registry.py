from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter, ValidationError

from roll_lite.config.problems import NO_VALUE, Mistake, Problem, did_you_mean
from roll_lite.config.schema.base import readable
from roll_lite.config.schema.domains import DomainConfig, RewardConfig, RewardTermConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.user_function import check_function, load_function, nearest_aside
from roll_lite.config.validation import section_from
from roll_lite.data.check import columns_missing
from roll_lite.rewards.base import RewardFunction, RewardType, hints_of
from roll_lite.rewards.terms import Reward, Term, labels_of

REWARDS = {
    "math": "roll_lite.rewards.math.reward.MathReward",
    "exact": "roll_lite.rewards.text.exact.ExactReward",
    "code": "roll_lite.rewards.code.reward.CodeReward",
    "choice": "roll_lite.rewards.text.choice.ChoiceReward",
    "instruction": "roll_lite.rewards.text.instruction.InstructionReward",
    "length": "roll_lite.rewards.terms.LengthReward",
    "repetition": "roll_lite.rewards.terms.RepetitionReward",
    "format": "roll_lite.rewards.text.format.FormatReward",
    "model": "roll_lite.rewards.model.ModelReward",
    "judge": "roll_lite.rewards.http.judge.JudgeReward",
    "remote": "roll_lite.rewards.http.remote.RemoteReward",
    "environment": "roll_lite.rewards.environment.EnvironmentReward",
}


def reward_type(name: str) -> type[RewardType]:
    module, _, attribute = REWARDS[name].rpartition(".")
    found: type[RewardType] = getattr(import_module(module), attribute)
    return found


def read_arguments(name: str, args: Mapping[str, Any], place: str) -> RewardType | list[Problem]:
    cls = reward_type(name)
    read, problems = section_from(cls, dict(args), (place,))
    unshown = tuple(f"{place}.{argument}" for argument in cls.unshown)
    return [replace(one, value=NO_VALUE) if one.path.startswith(unshown) else one for one in problems] or read


def typed_reward(name: str, args: Mapping[str, Any], path: str) -> RewardType:
    read = read_arguments(name, args, f"{path}.args")
    if isinstance(read, RewardType):
        return read
    raise ValueError("\n".join(map(str, read)))


def build_reward(config: RewardConfig, path: str = "reward") -> Reward:
    base = _build_function(config.name, config.args, path)
    functions = [_build_function(term.name, term.args, f"{path}.terms.{i}") for i, term in enumerate(config.terms)]
    labels = labels_of([function.name for function in functions])
    return Reward(base, [Term(label, term.weight, one) for label, term, one in zip(labels, config.terms, functions, strict=True)])


def _build_function(name: str, args: Mapping[str, Any], path: str) -> RewardFunction:
    if name in REWARDS:
        return RewardFunction(name, typed_reward(name, args, path), {})
    if "." not in name:
        raise ValueError(
            f"{path}.name: {name!r} is no reward{nearest_aside(name, list(REWARDS))}; "
            f"there are {', '.join(REWARDS)}, and dotted paths to functions of your own, package.module.function"
        )
    function = load_function(name, f"{path}.name")
    signature = inspect.signature(function)
    try:
        signature.bind(None, **args)
    except TypeError as error:
        raise ValueError(f"{path}: {name!r} takes a sample and `args`: {error}; its signature is {signature}") from None
    hints = hints_of(function)
    checked = {argument: _converted(value, hints.get(argument), f"{path}.args.{argument}") for argument, value in args.items()}
    return RewardFunction(name, function, checked)


def _converted(value: Any, hint: Any, path: str) -> Any:
    if hint is None:
        return value
    try:
        adapter = TypeAdapter(hint)
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation):
        return value
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{path}: {value!r}: {error.errors()[0]['msg']}") from error


def check_rewards(config: RunConfig) -> Iterator[Mistake]:
    for name, domain in config.domains.items():
        yield from readable(_reward(config, f"domains.{name}.reward", domain))


def _reward(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Mistake]:
    yield from readable(_part(config, path, domain, domain.reward))
    for index, term in enumerate(domain.reward.terms):
        yield from readable(_part(config, f"{path}.terms.{index}", domain, term))


def _part(config: RunConfig, place: str, domain: DomainConfig, part: RewardConfig | RewardTermConfig) -> Iterator[Mistake]:
    if "." in part.name:
        for key, message in check_function("name", part.name, part.args, inputs=("the sample",)):
            yield f"{place}.{key}", message
        return
    if part.name not in REWARDS:
        message = f"no such reward; {did_you_mean(part.name, REWARDS)} A function of your own is a dotted path, package.module.function"
        yield f"{place}.name", message
        return
    read = read_arguments(part.name, part.args, f"{place}.args")
    if isinstance(read, list):
        yield from read
        return
    if part is not domain.reward and read.within_a_run:
        message = f"{part.name} gives a domain's reward itself, not a further term of it; make it the reward's type"
        yield f"{place}.name", message
    yield from readable(read.in_run(config, place, domain.reward.timeout_s))
    if read.needs_answer() and domain.data.answer is None:
        message = f"{part.name} ({place}) reads the reference answer: name its column"
        yield f"{place.partition('.reward')[0]}.data.answer", message
    for argument, columns in read.named_columns().items():
        for column, message in columns_missing(domain.data, columns):
            yield Problem(f"{place}.args.{argument}", message, column)
