"""docs/rewards.md is what the functions say, every argument is explained, every example would be accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roll_lite.config.reward_reference import check_reward
from roll_lite.rewards.docs import PAGE, arguments, description, render
from roll_lite.rewards.docs_text import ARGUMENTS, EXAMPLES
from roll_lite.rewards.registry import REWARDS

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m roll_lite.rewards.docs"


@pytest.mark.parametrize("name", REWARDS)
def test_every_argument_is_explained(name: str) -> None:
    function = REWARDS[name]
    assert function.__doc__
    for argument, _ in arguments(function):
        named = re.search(rf"\b{argument.name}\b", function.__doc__)
        assert description(name, argument.name) or named, f"say in {function.__qualname__}'s docstring what {argument.name} does"


@pytest.mark.parametrize("name", [name for name in ARGUMENTS if name in REWARDS])
def test_explained_arguments_exist(name: str) -> None:
    assert ARGUMENTS[name].keys() <= {argument.name for argument, _ in arguments(REWARDS[name])}


def rewards_in(part: object) -> list[dict[str, object]]:
    if isinstance(part, list):
        return [one for item in part for one in rewards_in(item)]
    if not isinstance(part, dict):
        return []
    here = [part] if isinstance(part.get("type"), str) else []
    return here + [one for item in part.values() for one in rewards_in(item)]


@pytest.mark.parametrize("name", REWARDS)
def test_every_type_has_an_example_that_is_accepted(name: str) -> None:
    used = rewards_in(yaml.safe_load(EXAMPLES[name]))
    assert name in [one["type"] for one in used]
    for one in used:
        assert list(check_reward("reward", one["type"], one.get("args", {}))) == []  # type: ignore[arg-type]


def test_its_table_has_types_and_defaults_in_words() -> None:
    text = render()
    assert "| `strip` | true or false | `true` | Ignore white space at both ends. |" in text
    assert "| `extract` | one of auto, boxed, tagged" in text
    assert "| **`model`** | text | required |" in text
    assert not re.search(r"<class|typing\.|object at 0x|functools", text)
    for link in re.findall(r"\]\(([\w./]+\.md)", text):
        assert (ROOT / "docs" / link).is_file(), link
