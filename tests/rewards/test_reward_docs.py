"""docs/rewards.md is what the types say, every argument is explained, every example would be accepted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from roll_lite.rewards.docs import PAGE, example, render
from roll_lite.rewards.registry import REWARDS, reward_type, typed_reward

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m roll_lite.rewards.docs"


@pytest.mark.parametrize("name", REWARDS)
def test_every_type_and_argument_is_explained(name: str) -> None:
    cls = reward_type(name)
    assert cls.__doc__ and "__doc__" in vars(cls)
    assert [argument for argument, info in cls.model_fields.items() if not info.description] == []


def rewards_in(part: object) -> list[dict[str, object]]:
    if isinstance(part, list):
        return [one for item in part for one in rewards_in(item)]
    if not isinstance(part, dict):
        return []
    here = [part] if isinstance(part.get("name"), str) else []
    return here + [one for item in part.values() for one in rewards_in(item)]


@pytest.mark.parametrize("name", REWARDS)
def test_every_type_has_an_example_that_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "key")
    used = rewards_in(yaml.safe_load(example(reward_type(name)).strip("`").removeprefix("yaml")))
    assert name in [one["name"] for one in used]
    for one in used:
        typed_reward(one["name"], one.get("args", {}), "reward")  # type: ignore[arg-type]


def test_its_table_has_types_and_defaults_in_words() -> None:
    text = render()
    assert "| `strip` | true or false | `true` | Ignore white space at both ends. |" in text
    assert "| `extract` | one of auto, boxed, tagged" in text
    assert "| **`model`** | text | required |" in text
    assert not re.search(r"<class|typing\.|object at 0x|functools", text)
    for link in re.findall(r"\]\(([\w./]+\.md)", text):
        assert (ROOT / "docs" / link).is_file(), link
