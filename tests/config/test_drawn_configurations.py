"""Shipped configurations changed at random, in every way that a setting can be written: accepted, or told with their places."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_lite.config.compose.layers import compose
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import sections_at
from roll_lite.files import CONFIGS

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
VALUES: list[Any] = [None, True, -1, 0, 3, 1.5, 1e400, 10**30, "", "word", "a: b", "{x}", "${seed}", "${gone}", "???", "node0:1", "ü\u2028"]
VALUES += [[], [1, "x"], [None], [[]], [{}], {}, {"x": 1}, {"name": "word"}, {"name": None}, {"name": ["x"]}, {"": 1}, {"a.b": {"c": []}}]
TEXTS = ["{x:1}", "{name:gspo}", "{x}", "[1", "'", '"', "${x", "${oc.env:HOME}", "${oc.env:NONE,3}", "!!python/object:os.x y", "&a [*a]"]
TEXTS += ["\0", "a: b", "a, b", "a=b", "=", "~", "#", "%", "@", "- x", "? x", "1e-4", ".nan", "0x1F", "2026-01-01", "x" * 5000, "[" * 2000]
FORMS = ["{path}={text}", "+{path}={text}", "++{path}={text}", "~{path}", "~{path}={text}", "{path}", "{path}: {text}", "--{path}={text}"]
FORMS += ["{path}.more={text}", "{path}[0]={text}", "{path}.0={text}", "{path}..x={text}", "{path}.name={text}", "{path}.type={text}"]


def paths_in(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield (*path, str(key))
        yield from paths_in(value, (*path, str(key)))


def place(draw: random.Random, tree: dict[str, Any]) -> tuple[str, ...]:
    """Of a setting that is there, that the schema has beside it, or that is misspelt."""
    path = draw.choice(list(paths_in(tree)))
    beside = [name for cls in sections_at(path[:-1]) for name in cls.model_fields]
    if beside and draw.random() < 0.5:
        path = (*path[:-1], draw.choice(beside))
    if draw.random() < 0.2:
        word = list(path[-1])
        draw.shuffle(word)
        path = (*path[:-1], "".join(word))
    return path


def change(draw: random.Random, tree: dict[str, Any], folder: Path) -> tuple[str, str]:
    """The name of a configuration, and an override; one of them is changed."""
    path = place(draw, tree)
    if draw.random() < 0.3:
        nested: Any = draw.choice(VALUES)
        for key in reversed(path):
            nested = {key: nested}
        text = yaml.safe_dump(nested, allow_unicode=True)
        (folder / "drawn.yaml").write_text(f"defaults: [{draw.choice(NAMES)}, _self_]\n{text}", encoding="utf-8")
        if draw.random() < 0.2:
            content = (folder / "drawn.yaml").read_bytes()
            cut = draw.randrange(len(content))
            (folder / "drawn.yaml").write_bytes(content[:cut] + draw.choice([b"", b"\xff", b"{", b":", b"\t", b"\n"]) + content[cut + 1 :])
        return "drawn", "seed=1"
    text = draw.choice(TEXTS) if draw.random() < 0.5 else json.dumps(draw.choice(VALUES))
    if draw.random() < 0.3:
        cut = draw.randrange(len(path))
        nested = {path[cut]: text}
        return "", f"{'.'.join(path[:cut]) or path[0]}={json.dumps(nested)}"
    return "", draw.choice(FORMS).format(path=".".join(path), text=text)


SLOW = [pytest.param(seed, marks=[pytest.mark.slow, pytest.mark.nightly]) for seed in range(1, 5)]


@pytest.mark.parametrize("seed", [0, *SLOW])
def test_a_changed_configuration_is_accepted_or_told(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    draw = random.Random(seed)
    for _ in range(25 if seed == 0 else 100):
        name = draw.choice(NAMES)
        tree = compose(name, CONFIGS, [], may_be_left_out=True).data
        drawn, override = change(draw, tree, tmp_path)
        written = f"{drawn or name} {override!r:.200}"
        try:
            config = load_config(drawn or name, tmp_path, [override], files=draw.random() < 0.3)
        except ConfigError as error:
            for problem in error.problems:
                root = problem.path.partition(".")[0].strip("~+")
                known = root in RunConfig.model_fields or root in override or problem.source or problem.path.startswith("drawn.yaml")
                assert problem.path and problem.message and known, f"{written}: {problem}"
                assert str(problem).isprintable(), f"{written}: {problem}"
        else:
            again = RunConfig.model_validate(config.model_dump(mode="json"))
            assert again.model_dump() == config.model_dump(), written


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_configuration_is_right_and_so_are_its_own_values(name: str) -> None:
    """Each of its settings written once more, as an override, changes nothing."""
    expected = load_config(name, CONFIGS, files=False)
    tree = compose(name, CONFIGS, [], may_be_left_out=True).data
    overrides = []
    for path in paths_in(tree):
        value = tree
        for key in path:
            value = value[int(key)] if isinstance(value, list) else value[key]
        if not isinstance(value, dict):
            overrides.append(f"{'.'.join(path)}={json.dumps(value)}")
    draw = random.Random(name)
    draw.shuffle(overrides)
    assert load_config(name, CONFIGS, overrides, files=False) == expected
