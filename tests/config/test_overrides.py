"""The grammar of overrides, on a tree and in a whole configuration."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
from config_project import Project
from support_cases import cases

from roll_lite.config.compose.overrides import Override, alternatives, apply_override, parse_override
from roll_lite.config.problems import Problem

TREE = {
    "a": {"b": 1, "c": {"d": [1, 2]}},
    "list": [{"name": "x"}, {"name": "y"}],
    "text": "t",
    "none": None,
    "open": "???",
    "link": "${gone}",
}


@pytest.mark.parametrize(("text", "path", "expected"), cases("config/overrides"))
def test_what_an_override_changes(text: str, path: str, expected: Any) -> None:
    tree = deepcopy(TREE)
    override = parse_override(text)
    assert isinstance(override, Override)
    assert apply_override(tree, override) == []
    after: Any = tree
    for key in path.split("."):
        after = after.get(key, "absent")
    assert after == expected
    assert type(after) is type(expected)


@pytest.mark.parametrize(("text", "says"), cases("config/overrides_refused"))
def test_what_an_override_may_not_be(text: str, says: str) -> None:
    tree = deepcopy(TREE)
    override = parse_override(text)
    problems = [override] if isinstance(override, Problem) else apply_override(tree, override)
    assert len(problems) == 1
    assert says in problems[0].message
    assert problems[0].source == "command line"
    assert tree == TREE


def test_later_overrides_win_and_see_earlier_ones(project: Project) -> None:
    project.write("configs/tracked.yaml", "defaults: [run]\ntrackers: [{name: jsonl}, {name: tensorboard}]\n")
    config = project.load("steps=1", "steps=2", "~trackers.0", "trackers.0.name=jsonl", "critic.devices=[1]", "~critic", name="tracked")
    assert (config.steps, config.critic) == (2, None)
    assert [tracker.name for tracker in config.trackers] == ["jsonl"]


def test_an_override_may_refer_to_other_values(project: Project) -> None:
    assert project.load("seed=${steps}", "steps=5").seed == 5


@pytest.mark.parametrize(("text", "expected"), cases("config/sweeps"))
def test_what_a_sweep_makes_of_an_override(text: str, expected: list[str]) -> None:
    assert alternatives(text) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a=range(x)", "range(x) takes numbers"),
        ("a=range()", "takes numbers"),
        ("a=range(1,4,0)", "takes numbers"),
        ("a=range(1,2,3,4)", "takes numbers"),
        ("a=range(4,1)", "has no value"),
        ("a=range(1000000000)", "1000000000 values, more than 1000"),
        ("a=interval(0,1)", "does not know interval(); write a=a,b or a=choice(a,b) or a=range("),
        ("a=glob(*)", "does not know glob()"),
    ],
)
def test_what_no_sweep_is_made_of(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        alternatives(text)
