"""The arguments of every built-in type: wrong types and bounds as the models' own schema has them, names, contradictions, places."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.problems import NO_VALUE, ConfigError, Problem
from roll_lite.rewards.registry import REWARDS, check_rewards, read_arguments, reward_type

ROOT = Path(__file__).resolve().parents[2]
SAMPLES: dict[str, Any] = {
    "string": "zzz",
    "integer": 7,
    "number": 1.5,
    "boolean": True,
    "array": [{"zz": []}],
    "object": {"zz": []},
    "null": None,
}
"""A value of each type of JSON."""


def problems(name: str, args: dict[str, Any]) -> list[Problem]:
    found = read_arguments(name, args, "reward.args")
    return found if isinstance(found, list) else []


def branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [inner for one in schema["anyOf"] for inner in branches(one)] if "anyOf" in schema else [schema]


def wrong_values(schema: dict[str, Any]) -> Iterator[Any]:
    """Of other types than the schema allows, and just beyond its bounds."""
    allowed = {"string" if "enum" in one else one.get("type", "object") for one in branches(schema)}
    allowed |= {"integer"} if "number" in allowed else set()
    yield from (value for kind, value in SAMPLES.items() if kind not in allowed)
    for one in branches(schema):
        yield from (f"{choice}x" for choice in one.get("enum", ()))
        yield from (one[bound] for bound in ("exclusiveMinimum", "exclusiveMaximum") if bound in one)
        yield from (one[bound] + step for bound, step in (("minimum", -1), ("maximum", 1)) if bound in one)
        if one.get("type") in ("number", "integer"):
            yield from (float("nan"), float("inf"), "7")
        if one.get("minItems"):
            yield []
        if one.get("type") == "array" and one.get("items", {}).get("type") == "string":
            yield ["a", 3]


def cases() -> Iterator[tuple[str, dict[str, Any], str]]:
    """(type, arguments, place)."""
    for name in REWARDS:
        schema = reward_type(name).model_json_schema()
        for argument, one in schema["properties"].items():
            for value in wrong_values(one):
                yield name, {argument: value}, argument
            for branch in branches(one):
                named = branch.get("additionalProperties")
                is_named = isinstance(named, dict) and "$ref" in named
                reference = named["$ref"] if isinstance(named, dict) and is_named else branch.get("$ref", "")
                for key, inner in schema.get("$defs", {}).get(reference.rpartition("/")[2], {}).get("properties", {}).items():
                    for value in wrong_values(inner):
                        section = {key: value}
                        place = f"{argument}.own.{key}" if is_named else f"{argument}.{key}"
                        yield name, {argument: {"own": section} if is_named else section}, place


CASES = list(cases())


def test_there_are_cases_of_every_argument() -> None:
    tried = {(name, next(iter(args))) for name, args, _ in CASES}
    assert tried == {(name, argument) for name in REWARDS for argument in reward_type(name).model_fields}
    assert {place for name, _, place in CASES if name == "code"} >= {"backend.concurrency", "backend.url", "commands.own.run"}
    assert len(CASES) > 500


@pytest.mark.parametrize("name", REWARDS)
def test_values_of_a_wrong_type_and_out_of_bounds(name: str) -> None:
    for one, args, place in CASES:
        if one == name:
            told = [problem for problem in problems(name, args) if problem.path == f"reward.args.{place}"]
            assert len(told) == 1, (args, problems(name, args))
            assert told[0].message.startswith("expected ") or place.endswith(("url", "api_key_env")), (args, told)


@pytest.mark.parametrize("name", REWARDS)
def test_defaults_are_of_their_own_types(name: str) -> None:
    """A default that `check` would refuse could not be written down."""
    defaults = {name: field.get_default(call_default_factory=True) for name, field in reward_type(name).model_fields.items()}
    for argument, value in defaults.items():
        told = problems(name, {argument: value}) if not reward_type(name).model_fields[argument].is_required() else []
        assert not [one for one in told if one.path == f"reward.args.{argument}" and one.message.startswith("expected")], told


@pytest.mark.parametrize(("name", "argument"), [(name, argument) for name in REWARDS for argument in reward_type(name).model_fields])
def test_a_misspelt_argument_is_told_with_the_nearest(name: str, argument: str) -> None:
    (told,) = [one for one in problems(name, {f"{argument}z": 1}) if one.path == f"reward.args.{argument}z"]
    assert told.message.startswith("unknown key; ")
    assert repr(argument) in told.message


ADDRESS = {"url": "http://h/v1", "model": "m"}
CONTRADICTIONS: list[tuple[str, dict[str, Any], str, str]] = [
    ("length", {"target": 5, "limit": 6}, "reward.args.limit", "not both"),
    ("format", {}, "reward.args", "either pattern or preset"),
    ("format", {"pattern": "x", "preset": "think"}, "reward.args", "either pattern or preset"),
    ("model", {"model": "m", "question": "{prompt}"}, "reward.args.question", "only used with template: chat"),
    ("judge", {"url": "http://h"}, "reward.args", "needs model"),
    ("judge", {**ADDRESS, "choices": {"good": 1}, "scale": [1, 5]}, "reward.args.scale", "remove one"),
    ("code", {"languages": ["own"], "commands": {"other": {"file": "f", "run": ["x"]}}}, "reward.args.languages", "'own' is unknown"),
    ("code", {"backend": {"url": "http://h", "urll": 1}}, "reward.args.backend.urll", "did you mean 'url'?"),
    ("code", {"backend": {}}, "reward.args.backend.url", "is missing"),
    ("remote", {}, "reward.args.url", "is missing"),
    ("remote", {"url": "http://h", "batch_wait_ms": 5}, "reward.args.batch_wait_ms", "share requests; leave it out"),
]


@pytest.mark.parametrize(("name", "args", "path", "message"), CONTRADICTIONS)
def test_arguments_that_contradict_each_other(name: str, args: dict[str, Any], path: str, message: str) -> None:
    (told,) = problems(name, args)
    assert told.path == path and message in told.message


def test_a_mistake_invents_no_other_and_hides_none() -> None:
    assert [one.path for one in problems("format", {"pattren": "x"})] == ["reward.args.pattren"]
    found = problems("length", {"target": 5, "limit": 6, "unit": "wrods", "wdith": 3})
    assert {one.path.rpartition(".")[2] for one in found} == {"limit", "unit", "wdith"}
    unknown = problems("code", {"languages": ["own"], "commands": {"own": {"file": 3}}})
    assert {one.path for one in unknown} == {"reward.args.commands.own.run", "reward.args.commands.own.file"}


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("judge", {"url": ["me:sk-1@h"], "model": "m"}),
        ("judge", {"url": 5}),
        ("judge", {"api_key_env": "sk-1"}),
        ("judge", {"extra_body": "sk-1"}),
        ("remote", {"url": {"sk-1": 1}}),
        ("code", {"backend": "http://me:sk-1@h"}),
        ("code", {"backend": {"url": "me:sk-1@h"}}),
    ],
)
def test_values_that_may_hold_a_secret_are_not_repeated(name: str, args: dict[str, Any]) -> None:
    found = problems(name, args)
    assert found and all(one.value is NO_VALUE for one in found) and "sk-1" not in "".join(map(str, found))


def test_all_mistakes_of_a_configuration_come_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    overrides = [
        "domains.add.reward={name: math, args: {extract: boxd, cpu_limit_s: fast, extrct: auto}}",
        "domains.add.reward.terms=[{name: judge, args: {url: 'http://h/v1', model: m, temperature: hot}}, {name: lenght}]",
        "domains.make.reward={name: examples.domains.reverse.score, args: {partial_credi: 1}}",
        "rollout.prompts_per_step=many",
    ]
    with pytest.raises(ConfigError) as caught:
        load_config("tiny_grpo", ROOT / "examples/configs", overrides, further=[check_rewards])
    told = str(caught.value)
    for place, said in {
        "rollout.prompts_per_step": "expected integer > 0",
        "domains.add.reward.args.extract": "did you mean 'boxed'?",
        "domains.add.reward.args.cpu_limit_s": "expected number > 0",
        "domains.add.reward.args.extrct": "did you mean 'extract'",
        "domains.add.reward.terms.0.args.temperature": "expected number >= 0",
        "domains.add.reward.terms.1.name": "did you mean 'length'?",
        "domains.make.reward.args.partial_credi": "did you mean 'partial_credit'?",
    }.items():
        (line,) = [one for one in told.splitlines() if f"- {place} " in one]
        assert said in line and "[command line]" in line


FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "examples").rglob("*.yaml") if "starters" not in path.parts)
"""Those of starters have rewards in their own folders: tests/test_init.py."""


@pytest.mark.parametrize("file", FILES, ids=str)
def test_rewards_of_shipped_configurations_are_right(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else they miss here, such as a model of seven billion weights."""
    monkeypatch.chdir(ROOT)
    try:
        load_config(file.stem, ROOT / file.parent, further=[check_rewards])
    except ConfigError as error:
        assert not [one for one in error.problems if ".reward" in one.path and one.path.startswith("domains.")], error
