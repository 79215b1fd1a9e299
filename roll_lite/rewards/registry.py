"""From `reward: {type: ..., args: ...}` to a function."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter, ValidationError

from roll_lite.config.schema import RewardConfig
from roll_lite.data.user_function import did_you_mean, load_function
from roll_lite.rewards.base import RewardFunction, hints_of
from roll_lite.rewards.choice import choice
from roll_lite.rewards.code import check_code, code, warm_code
from roll_lite.rewards.combine import Reward, Term, labels_of
from roll_lite.rewards.exact import exact
from roll_lite.rewards.form import check_format_args
from roll_lite.rewards.form import format as format_reward
from roll_lite.rewards.http_client import warm_http
from roll_lite.rewards.instruction import instruction
from roll_lite.rewards.judge import judge
from roll_lite.rewards.length import check_length, length
from roll_lite.rewards.math import math, warm_math
from roll_lite.rewards.model import model
from roll_lite.rewards.remote import remote
from roll_lite.rewards.repetition import repetition

REWARDS: dict[str, Callable[..., Any]] = {
    "math": math,
    "exact": exact,
    "code": code,
    "choice": choice,
    "instruction": instruction,
    "length": length,
    "repetition": repetition,
    "format": format_reward,
    "model": model,
    "judge": judge,
    "remote": remote,
}
SECRET = "api_key_env"
WARM_UP: dict[str, Callable[[], None]] = {
    "math": warm_math,
    "judge": warm_http,
    "remote": warm_http,
}
WARM_UP_WITH_ARGUMENTS: dict[str, Callable[..., None]] = {
    "code": warm_code,
}
CHECKS: dict[str, Callable[..., None]] = {
    "code": check_code,
    "length": check_length,
    "format": check_format_args,
}
"""Of arguments together, where their types and ranges in the signature do not say all; ValueError that begins with the argument."""


def build_reward(config: RewardConfig, path: str = "reward") -> Reward:
    """`path` is the section's place in the configuration. What is wrong with it is a ValueError here, before a sample is scored."""
    base = _build_function(config.type, config.args, path)
    functions = [_build_function(term.type, term.args, f"{path}.terms.{i}") for i, term in enumerate(config.terms)]
    labels = labels_of([function.name for function in functions])
    return Reward(base, [Term(label, term.weight, one) for label, term, one in zip(labels, config.terms, functions, strict=True)])


def _build_function(name: str, args: Mapping[str, Any], path: str) -> RewardFunction:
    if "." in name:
        function = load_function(name, f"{path}.type", "sample -> score")
    elif name in REWARDS:
        function = REWARDS[name]
    else:
        raise ValueError(
            f"{path}.type: {name!r} is no reward{did_you_mean(name, list(REWARDS))}; "
            f"there are {', '.join(REWARDS)}, and dotted paths to functions of your own, package.module.function"
        )
    checked = _checked_args(name, function, args, f"{path}.args")
    if name in CHECKS:
        _check_together(CHECKS[name], checked, f"{path}.args")
    warm = partial(WARM_UP_WITH_ARGUMENTS[name], **checked) if name in WARM_UP_WITH_ARGUMENTS else WARM_UP.get(name)
    return RewardFunction(name, function, checked, warm)


def _checked_args(name: str, function: Callable[..., Any], args: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments, each turned into the type that the function's signature gives it."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    if not parameters or parameters[0].kind not in (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.VAR_POSITIONAL,
    ):
        raise ValueError(
            f"{path.removesuffix('.args')}.type: {name!r} must take the sample as its first argument, its signature is {signature}"
        )
    accepted = [p.name for p in parameters[1:] if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)
    for argument in args:
        if argument not in accepted and not (open_ended and argument != parameters[0].name):
            raise ValueError(
                f"{path}.{argument}: reward {name!r} takes no such argument{did_you_mean(argument, accepted)}; "
                f"it takes {', '.join(accepted) or 'none'}"
            )
    missing = [p.name for p in parameters[1:] if p.name in accepted and p.default is inspect.Parameter.empty and p.name not in args]
    if missing:
        raise ValueError(f"{path}: reward {name!r} needs {', '.join(missing)}")
    hints = hints_of(function)
    return {argument: _converted(value, hints.get(argument), f"{path}.{argument}") for argument, value in args.items()}


def _check_together(check: Callable[..., None], args: Mapping[str, Any], path: str) -> None:
    try:
        check(**args)
    except ValueError as error:
        raise ValueError(f"{path}.{error}") from error


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
        # Some write the key itself where its variable's name belongs.
        is_secret = path.endswith(f".{SECRET}") or (isinstance(value, Mapping) and SECRET in value)
        shown = "" if is_secret else f"{value!r}: "
        raise ValueError(f"{path}: {shown}{error.errors()[0]['msg']}") from (None if is_secret else error)
