"""The grammar of overrides, on a tree and in a whole configuration."""

from __future__ import annotations

import re
from copy import deepcopy
from typing import Any

import pytest
from config_project import Project

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

CHANGES = {
    "a.b=2": ("a.b", 2),
    "a.b=text": ("a.b", "text"),
    "a.b='2'": ("a.b", "2"),
    "a.b=1e-6": ("a.b", 1e-6),
    "a.b=-.5": ("a.b", -0.5),
    "a.b=true": ("a.b", True),
    "a.b=null": ("a.b", None),
    "a.b=": ("a.b", None),
    "a.b=x=y": ("a.b", "x=y"),
    "a.b=2026-08-01": ("a.b", "2026-08-01"),
    "a.b=[1,2]": ("a.b", [1, 2]),
    "a.c.d=[]": ("a.c.d", []),
    "a={x: 1}": ("a", {"b": 1, "c": {"d": [1, 2]}, "x": 1}),
    "+a.new.deep=1": ("a.new", {"deep": 1}),
    "++a.b=3": ("a.b", 3),
    "fresh.one=1": ("fresh", {"one": 1}),
    "none.x=1": ("none", {"x": 1}),
    "open.x=1": ("open", {"x": 1}),
    "open=1": ("open", 1),
    "list.0.name=z": ("list", [{"name": "z"}, {"name": "y"}]),
    "list[1].name=z": ("list", [{"name": "x"}, {"name": "z"}]),
    "a.c.d.1=5": ("a.c.d", [1, 5]),
    "a=[1]": ("a", [1]),
    "list={x: 1}": ("list", {"x": 1}),
    "link=1": ("link", 1),
    "link={x: 1}": ("link", {"x": 1}),
    "list.0={z: 1}": ("list", [{"name": "x", "z": 1}, {"name": "y"}]),
    "~link": ("link", "absent"),
    "~a.c": ("a", {"b": 1}),
    "~list.0": ("list", [{"name": "y"}]),
    "~none": ("none", "absent"),
    "~open": ("open", "absent"),
}

REFUSED = {
    "a.b": "not an override; write key=value",
    "": "not an override",
    "=1": "not an override",
    "a..b=1": "not an override",
    "a b=1": "not an override",
    "~a.b=1": "write ~a.b",
    "a.b=[1": "not valid YAML",
    "a.b={x: 1, x: 2}": "written twice",
    "a.b=${x": "not a valid interpolation",
    "a.b=!!binary aGk=": "only text, numbers",
    "link.x=1": 'link is "${gone}", not a section',
    "text.x=1": 'text is "t", not a section',
    "a.b.c=1": "a.b is 1, not a section",
    "list.x=1": "list is a list; after it comes a number, not 'x'",
    "list.2.name=z": "list has 2 entries, numbered from 0; there is no entry 2",
    "fresh.0=1": "give the whole list: fresh=[...]",
    "~a.bb": "nothing to delete at a.bb; did you mean 'b'?",
    "~x.y": "nothing to delete at x",
    "~list.7": "there is no entry 7",
}


@pytest.mark.parametrize("text", CHANGES)
def test_what_an_override_changes(text: str) -> None:
    tree = deepcopy(TREE)
    override = parse_override(text)
    assert isinstance(override, Override)
    assert apply_override(tree, override) == []
    path, expected = CHANGES[text]
    after: Any = tree
    for key in path.split("."):
        after = after.get(key, "absent")
    assert after == expected
    assert type(after) is type(expected)


@pytest.mark.parametrize("text", REFUSED)
def test_what_an_override_may_not_be(text: str) -> None:
    tree = deepcopy(TREE)
    override = parse_override(text)
    problems = [override] if isinstance(override, Problem) else apply_override(tree, override)
    assert len(problems) == 1
    assert REFUSED[text] in problems[0].message
    assert problems[0].source == "command line"
    assert tree == TREE


def test_later_overrides_win_and_see_earlier_ones(project: Project) -> None:
    project.write("configs/tracked.yaml", "defaults: [run]\ntrackers: [{name: jsonl}, {name: tensorboard}]\n")
    config = project.load("steps=1", "steps=2", "~trackers.0", "trackers.0.name=jsonl", "critic.devices=[1]", "~critic", name="tracked")
    assert (config.steps, config.critic) == (2, None)
    assert [tracker.name for tracker in config.trackers] == ["jsonl"]


def test_an_override_may_refer_to_other_values(project: Project) -> None:
    assert project.load("seed=${steps}", "steps=5").seed == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.b=1,2", ["a.b=1", "a.b=2"]),
        ("a=x, y", ["a=x", "a=y"]),
        ("a=[1,2],[3]", ["a=[1,2]", "a=[3]"]),
        ("a={name: x, k: 1},z", ["a={name: x, k: 1}", "a=z"]),
        ("a='1,2'", ["a='1,2'"]),
        ("a=[1,2]", ["a=[1,2]"]),
        ("a=", ["a="]),
        ("~a", ["~a"]),
        ("a=[1", ["a=[1"]),
        ("a=1e-6,3.0e-5", ["a=1e-6", "a=3.0e-5"]),
        ("a=choice(x, y,[1,2])", ["a=x", "a=y", "a=[1,2]"]),
        ("a=choice(x)", ["a=x"]),
        ("a=range(3)", ["a=0", "a=1", "a=2"]),
        ("a=range(1,4)", ["a=1", "a=2", "a=3"]),
        ("a=range(4, 0, -2)", ["a=4", "a=2"]),
        ("a=range(0.1,0.4,0.1)", ["a=0.1", "a=0.2", "a=0.3"]),
        ("a=f(x, y)", ["a=f(x, y)"]),
        ("a=f(x,g(y,z)),u", ["a=f(x,g(y,z))", "a=u"]),
        ("a='(',x", ["a='('", "a=x"]),
    ],
)
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


def test_values_of_a_sweep_outside_of_one_say_how_it_is_started(project: Project) -> None:
    for override in ("steps=1,2", "steps=range(1,4)", "actor_infer.strategy=vllm,sglang", "+steps=choice(1,2)"):
        (problem,) = project.problems(override)
        assert problem.message.startswith("expected ") and "roll-lite run -m" in problem.message
    for override in ("steps=none", "steps=[1,2]", "domains.add.template.text='{promt}, please'"):
        assert all("run -m" not in problem.message for problem in project.problems(override))
