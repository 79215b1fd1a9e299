"""The tests of a sample, from its answer: in the forms that data sets use."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed


@dataclass(frozen=True)
class Test:
    """One of three kinds: with `function` a call, with `source` asserts, else a run with input."""

    stdin: str = ""
    expected: Any = None
    function: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    also: tuple[Any, ...] = ()
    """Other values that count."""
    source: str | None = None
    names: tuple[str, ...] = ()
    """Functions of the program that the asserts call, even where Python has one of that name."""


def tests_of(sample: RewardInput, column: str | None) -> list[Test]:
    """RewardFailed where the answer, or the column, holds no tests."""
    if column is not None and column not in sample.columns:
        raise RewardFailed(f"reward code: there is no column {column!r} with tests")
    given = sample.answer if column is None else sample.columns[column]
    try:
        tests = _read(given, sample.columns)
    except (KeyError, TypeError, ValueError, SyntaxError) as error:
        raise RewardFailed(f"reward code: the tests cannot be read: {type(error).__name__}: {error}; got {given!r:.120}") from error
    if not tests:
        raise RewardFailed(f"reward code: there are no tests in {given!r:.120}")
    return tests


def _read(given: Any, columns: Mapping[str, Any]) -> list[Test]:
    if isinstance(given, str):
        text = given.strip()
        if text.startswith(("{", "[")):
            return _read(json.loads(text), columns)
        return _asserts(given, columns.get("entry_point"))
    if isinstance(given, Mapping):
        return _of_mapping(given, columns)
    if isinstance(given, Sequence):
        return [test for one in given for test in _read(one, columns)]
    raise TypeError("expected text, a mapping or a list")


def _of_mapping(given: Mapping[str, Any], columns: Mapping[str, Any]) -> list[Test]:
    function = given.get("fn_name") or columns.get("fn_name")
    if "inputs" in given:
        inputs, outputs = given["inputs"], given["outputs"]
        if len(inputs) != len(outputs):
            raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs")
        return [_pair(one, other, function) for one, other in zip(inputs, outputs, strict=True)]
    if "test" in given:
        return _asserts(given["test"], given.get("entry_point") or columns.get("entry_point"))
    if "test_list" in given:
        setup = "\n".join([given.get("test_setup_code") or "", *given.get("test_imports", ())])
        return [Test(source=f"{setup}\n{one}") for one in given["test_list"]]
    if "args" in given or "kwargs" in given:
        if not function:
            raise KeyError("fn_name")
        expected = given["expected"] if "expected" in given else given["output"]
        return [Test(function=function, args=list(given.get("args", ())), kwargs=dict(given.get("kwargs", {})), expected=expected)]
    if "stdout" in given:
        return [Test(stdin=str(given.get("stdin", "")), expected=str(given["stdout"]))]
    return [_pair(given["input"], given["output"], function if given.get("testtype", "functional") == "functional" else None)]


def _pair(given: Any, expected: Any, function: str | None) -> Test:
    """APPS: a call's value may stand in a list of its own; its texts may be lists of lines. LiveCodeBench: JSON, one argument a line."""
    if function is None:
        return Test(stdin=_text(given), expected=_text(expected))
    if isinstance(given, str):
        return Test(
            function=function, args=[json.loads(line) for line in given.splitlines() if line.strip()], expected=json.loads(expected)
        )
    also = (expected[0],) if isinstance(expected, list) and len(expected) == 1 else ()
    return Test(function=function, args=list(given), expected=expected, also=also)


def _text(given: Any) -> str:
    return "\n".join(map(str, given)) if isinstance(given, list) else str(given)


def _asserts(source: str, entry_point: str | None) -> list[Test]:
    ast.parse(source)
    if entry_point and "def check(" in source:
        return [Test(source=f"{source}\ncheck({entry_point})\n", names=(entry_point,))]
    if "assert" not in source:
        raise ValueError("text without asserts")
    return [Test(source=source, names=(entry_point,) if entry_point else ())]
