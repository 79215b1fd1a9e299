"""Built-in reward types by name, and construction of a section's reward functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter, ValidationError

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.user_function import load_function, nearest_aside
from roll_lite.rewards.arguments import read_arguments
from roll_lite.rewards.base import RewardFunction, hints_of
from roll_lite.rewards.reward_type import RewardType
from roll_lite.rewards.terms.combine import Reward, Term, labels_of

REWARDS = {
    "math": "roll_lite.rewards.math.MathReward",
    "exact": "roll_lite.rewards.text.exact.ExactReward",
    "code": "roll_lite.rewards.code.reward.CodeReward",
    "choice": "roll_lite.rewards.text.choice.ChoiceReward",
    "instruction": "roll_lite.rewards.text.instruction.InstructionReward",
    "length": "roll_lite.rewards.terms.length.LengthReward",
    "repetition": "roll_lite.rewards.terms.repetition.RepetitionReward",
    "format": "roll_lite.rewards.text.format.FormatReward",
    "model": "roll_lite.rewards.model.ModelReward",
    "judge": "roll_lite.rewards.http.judge.JudgeReward",
    "remote": "roll_lite.rewards.http.remote.RemoteReward",
}
"""Built-in types by name, imported on first use."""


def reward_type(name: str) -> type[RewardType]:
    module, _, attribute = REWARDS[name].rpartition(".")
    found: type[RewardType] = getattr(import_module(module), attribute)
    return found


def typed_reward(name: str, args: Mapping[str, Any], path: str) -> RewardType:
    """A built-in type with its arguments; ValueError with all problems."""
    read = read_arguments(name, reward_type(name), args, f"{path}.args")
    if isinstance(read, RewardType):
        return read
    raise ValueError("\n".join(map(str, read)))


def build_reward(config: RewardConfig, path: str = "reward") -> Reward:
    """Build the whole reward of the section at `path`; ValueError for any mistake in it."""
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
    function = load_function(name, f"{path}.name", "sample -> score")
    return RewardFunction(name, function, _checked_args(name, function, args, f"{path}.args"))


def _checked_args(name: str, function: Callable[..., Any], args: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments, converted to the types of the function's signature."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    ):
        raise ValueError(
            f"{path.removesuffix('.args')}.name: {name!r} must take the sample as its first argument, its signature is {signature}"
        )
    accepted = [p.name for p in parameters[1:] if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for argument in args:
        if argument not in accepted and not (open_ended and argument != parameters[0].name):
            raise ValueError(
                f"{path}.{argument}: reward {name!r} takes no such argument{nearest_aside(argument, accepted)}; "
                f"it takes {', '.join(accepted) or 'none'}"
            )
    missing = [p.name for p in parameters[1:] if p.name in accepted and p.default is inspect.Parameter.empty and p.name not in args]
    if missing:
        raise ValueError(f"{path}: reward {name!r} needs {', '.join(missing)}")
    hints = hints_of(function)
    return {argument: _converted(value, hints.get(argument), f"{path}.{argument}") for argument, value in args.items()}


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
