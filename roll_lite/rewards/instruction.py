"""Reward `instruction`: the response follows instructions that a program can check (IFEval's 25)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import after_thinking
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.instruction_checks import CHECKS
from roll_lite.rewards.time_limit import TimeLimitExceeded, limited

Mode = Literal["strict", "loose"]
Counted = Literal["all", "fraction"]


def instruction(
    sample: RewardInput,
    *,
    mode: Mode = "strict",
    score: Counted = "all",
    ids: str = "instruction_id_list",
    arguments: str = "kwargs",
    cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0,
) -> Score:
    """1 where every instruction is followed by what stands behind the last </think>; with score: fraction, the share of those that are.

    The row's columns `ids` and `arguments` hold the instructions as IFEval's data does: a list of ids, and a list with the arguments of
    each. mode: loose also accepts a response that follows an instruction once its first or last line or its asterisks are taken away.
    An instruction that is not known, or whose arguments do not fit, is a failure; one whose check takes longer than cpu_limit_s is not
    followed, and named as `too_long` in the details.
    """
    asked = _list(sample, ids)
    given = _list(sample, arguments) if arguments in sample.columns else [None] * len(asked)
    if not asked or len(asked) != len(given):
        raise RewardFailed(f"reward instruction: {len(asked)} ids in column {ids!r}, {len(given)} arguments in column {arguments!r}")
    response = after_thinking(sample.response, sample.prompt)
    texts = [response] if mode == "strict" else _variants(response)
    too_long: list[str] = []

    def is_followed(name: Any, own: Any) -> bool:
        try:
            return limited(cpu_limit_s, lambda: _is_followed(name, _arguments(name, own), texts))
        except (TimeLimitExceeded, RecursionError, MemoryError):
            too_long.append(str(name))
            return False

    missed = [name for name, own in zip(asked, given, strict=True) if not is_followed(name, own)]
    followed = len(asked) - len(missed)
    value = followed / len(asked) if score == "fraction" else float(not missed)
    details: dict[str, float | str] = {"followed": float(followed), "instructions": float(len(asked)), "missed": ", ".join(missed)}
    return Score(value, not missed, details | ({"too_long": ", ".join(too_long)} if too_long else {}))


def _is_followed(name: Any, arguments: dict[str, Any], texts: list[str]) -> bool:
    check = CHECKS.get(name)
    if check is None:
        raise RewardFailed(f"reward instruction: there is no instruction {name!r:.80}; there are {', '.join(CHECKS)}")
    try:
        # Checked before the texts are, so that bad arguments show whatever the response is.
        verdicts = [check(text, **arguments) and bool(text.strip()) for text in texts]
    except (TypeError, ValueError, AttributeError) as error:
        raise RewardFailed(f"reward instruction: {name}: arguments {arguments!r:.200}: {error}") from error
    return any(verdicts)


def _arguments(name: Any, given: Any) -> dict[str, Any]:
    """The data set as a table has all names in every row, None where they are not meant; its numbers may have become floats."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise RewardFailed(f"reward instruction: {name}: arguments {given!r:.80} are no JSON: {error}") from error
    if given is not None and not isinstance(given, Mapping):
        raise RewardFailed(f"reward instruction: {name}: arguments must be a dict, got {given!r:.80}")
    values = {str(key): value for key, value in (given or {}).items() if value is not None}
    return {key: int(value) if isinstance(value, float) and value.is_integer() else value for key, value in values.items()}


def _list(sample: RewardInput, column: str) -> list[Any]:
    value = sample.columns.get(column)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise RewardFailed(f"reward instruction: column {column!r} is no JSON: {error}") from error
    if value is None or isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise RewardFailed(f"reward instruction: column {column!r} must hold a list, got {value!r:.80}")
    return list(value)


def _variants(response: str) -> list[str]:
    lines = response.split("\n")
    cut = [response, "\n".join(lines[1:]).strip(), "\n".join(lines[:-1]).strip(), "\n".join(lines[1:-1]).strip()]
    return [*cut, *(text.replace("*", "") for text in cut)]
