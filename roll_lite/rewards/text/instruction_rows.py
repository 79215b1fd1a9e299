"""Instructions of a row, in the layouts of common data sets."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.text.instruction_checks.parts import visible

Asked = tuple[str, dict[str, Any]]
"""Id of an instruction and its arguments."""
GROUND_TRUTH = "ground_truth"
FUNCTION = "func_name"
IDS = ("instruction_id", "instruction_id_list")


def asked_of(sample: RewardInput, ids: str, arguments: str) -> list[Asked]:
    """Instructions from the columns `ids` and `arguments`; without ids, from the reference answer or the column ground_truth."""
    columns = sample.columns
    if columns.get(ids) is not None:
        return _paired(columns[ids], columns.get(arguments), f"column {ids!r}", f"column {arguments!r}")
    together = sample.answer if sample.answer is not None else columns.get(GROUND_TRUTH)
    if together is None:
        raise RewardFailed(
            f"reward instruction: column {ids!r} must hold a list, got None; nor is there a reference answer with instructions"
        )
    asked = _together(together)
    if not asked:
        raise RewardFailed("reward instruction: the reference answer holds no instruction")
    return asked


def _together(value: Any) -> list[Asked]:
    """Read {"func_name": ..., arguments}, {"instruction_id": [...], "kwargs": [...]}, or a list of these, as values or text."""
    value = _parsed(value, "the reference answer")
    if isinstance(value, Mapping):
        if FUNCTION in value:
            return [_asked(value[FUNCTION], {key: own for key, own in value.items() if key != FUNCTION})]
        for key in IDS:
            if key in value:
                return _paired(value[key], value.get("kwargs"), repr(key), "'kwargs'")
    elif hasattr(value, "__iter__"):
        return [one for each in value for one in _together(each)]
    raise RewardFailed(f"reward instruction: the reference answer has neither {FUNCTION!r} nor {IDS[0]!r}: {value!r:.200}")


def _paired(ids: Any, arguments: Any, where_ids: str, where_arguments: str) -> list[Asked]:
    names = _list(ids, where_ids)
    given = _list(arguments, where_arguments) if arguments is not None else [None] * len(names)
    if not names or len(names) != len(given):
        raise RewardFailed(f"reward instruction: {len(names)} ids in {where_ids}, {len(given)} arguments in {where_arguments}")
    return [_asked(name, own) for name, own in zip(names, given, strict=True)]


def _asked(name: Any, given: Any) -> Asked:
    """Read an instruction's arguments. Data sets stored as tables have every name in every row, None if unused, and integers as floats."""
    given = _parsed(given, f"{name}: arguments") if isinstance(given, str) else given
    if given is not None and not isinstance(given, Mapping):
        raise RewardFailed(f"reward instruction: {name}: arguments must be a dict, got {given!r:.80}")
    return str(name), {str(key): _argument(value) for key, value in (given or {}).items() if value is not None}


def _argument(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return visible(value) if isinstance(value, str) else value


def _list(value: Any, where: str) -> list[Any]:
    value = _parsed(value, where)
    if value is None or isinstance(value, Mapping) or not hasattr(value, "__iter__"):
        raise RewardFailed(f"reward instruction: {where} must hold a list, got {value!r:.80}")
    return list(value)


def _parsed(value: Any, what: str) -> Any:
    """Parse a text as JSON or as a Python literal."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            raise RewardFailed(f"reward instruction: {what} {value!r:.80} is no JSON: {error}") from error
