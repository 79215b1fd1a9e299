from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.names import Asserts, asserts_of, uncalled_tests


@dataclass(frozen=True)
class Test:
    """Test of a program: a function call, asserts, or a run with `stdin`. `also`: further accepted results."""

    stdin: str = ""
    expected: Any = None
    function: str | None = None
    args: list[Any] = field(default_factory=list)
    kwargs: dict[str, Any] = field(default_factory=dict)
    also: tuple[Any, ...] = ()
    asserts: Asserts | None = None

    def needs(self) -> tuple[str, ...]:
        return (self.function.rpartition(".")[2],) if self.function else self.asserts.names if self.asserts else ()


def tests_of(sample: RewardInput, column: str | None) -> list[Test]:
    """Tests of a sample, from `column` or, if None, its answer; RewardFailed without any."""
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
        return _asserts([given], columns.get("entry_point"))
    if isinstance(given, Sequence):
        if given and all(isinstance(one, str) and not one.lstrip().startswith(("{", "[")) for one in given):
            return _asserts(given, columns.get("entry_point"))
        return [test for one in given for test in _read(one, columns)]
    if not isinstance(given, Mapping):
        raise TypeError("expected text, a mapping or a list")
    function = _function(given, columns)
    entry_point = given.get("entry_point") or columns.get("entry_point")
    if "inputs" in given:
        return _inputs_and_outputs(given["inputs"], given["outputs"], function)
    if "test" in given:
        return _asserts([given["test"]], entry_point)
    if "test_list" in given:
        setup = "\n".join([given.get("test_setup_code") or "", *(given.get("test_imports") or ())])
        return _asserts([f"{setup}\n{one}" for one in given["test_list"]], entry_point)
    if "args" in given or "kwargs" in given:
        expected = given["expected"] if "expected" in given else given["output"]
        return [Test(function=_needed(function), args=list(given.get("args", ())), kwargs=dict(given.get("kwargs", {})), expected=expected)]
    if "stdout" in given:
        return [Test(stdin=str(given.get("stdin", "")), expected=str(given["stdout"]))]
    kind = given.get("testtype", "functional" if function else "stdin")
    return [_pair(given["input"], given["output"], _needed(function) if kind == "functional" else None)]


def _function(given: Mapping[str, Any], columns: Mapping[str, Any]) -> str | None:
    metadata = columns.get("metadata")
    if isinstance(metadata, str) and metadata.strip().startswith("{"):
        metadata = json.loads(metadata)
    places = [given, columns, *([metadata] if isinstance(metadata, Mapping) else [])]
    return next((place[name] for place in places for name in ("fn_name", "func_name") if place.get(name)), None)


def _needed(function: str | None) -> str:
    if not function:
        raise KeyError("fn_name")
    return function


def _inputs_and_outputs(inputs: Sequence[Any], outputs: Sequence[Any], function: str | None) -> list[Test]:
    """Read parallel lists of inputs and outputs (APPS, TACO). If every output of a function is a list of one item, accept the bare item
    too."""
    if len(inputs) != len(outputs):
        raise ValueError(f"{len(inputs)} inputs, {len(outputs)} outputs")
    tests = [_pair(one, other, function) for one, other in zip(inputs, outputs, strict=True)]
    if function and all(isinstance(one, list) and len(one) == 1 for one in outputs):
        return [replace(test, also=(test.expected[0],)) for test in tests]
    return tests


def _pair(given: Any, expected: Any, function: str | None) -> Test:
    """Read an input and an output. Without `function`: stdin and stdout, as texts or lists of lines. With it, `given` is a list of
    arguments, or a text with one JSON value per line (LiveCodeBench)."""
    if function is None:
        stdin, stdout = ("\n".join(map(str, text)) if isinstance(text, list) else str(text) for text in (given, expected))
        return Test(stdin=stdin, expected=stdout)
    if isinstance(given, str):
        args = [json.loads(line) for line in given.splitlines() if line.strip()]
        return Test(function=function, args=args, expected=json.loads(expected))
    return Test(function=function, args=list(given), expected=expected)


def _asserts(sources: Sequence[str], entry_point: str | None) -> list[Test]:
    if not any(word in source for source in sources for word in ("assert", "raises")):
        raise ValueError("text without asserts")
    return [Test(asserts=one) for one in asserts_of([whole for source in sources for whole in _complete(source, entry_point)], entry_point)]


def _complete(source: str, entry_point: str | None) -> list[str]:
    """Append missing calls that run the tests, such as `check(f)`: one copy of the source per call, each a test."""
    functions = {node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    if "check" in functions and "\ncheck(" not in source:
        if not entry_point:
            raise KeyError("entry_point")
        return [f"{source}\ncheck({entry_point})\n"]
    return [f"{source}\n{call}\n" for call in uncalled_tests(source)] or [source]
