"""The generated pages are what the code says, every field, argument and metric is explained, every example would be accepted."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import docs_pages
import pytest
import yaml

from roll_lite.config.validation import sections
from roll_lite.distributed.strategy.base import InferenceStrategy
from roll_lite.rewards.registry import REWARDS, reward_type, typed_reward

ROOT = Path(__file__).resolve().parents[1]


def test_the_script_writes_the_pages_as_they_are(tmp_path: Path) -> None:
    for folder in ("docs", "tools"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for page in docs_pages.PAGES:
        kept, marker, _ = (tmp_path / "docs" / page).read_text(encoding="utf-8").partition(docs_pages.MARKER)
        (tmp_path / "docs" / page).write_text(f"{kept}{marker}old", encoding="utf-8")
    subprocess.run([sys.executable, tmp_path / "tools/docs_pages.py"], check=True)
    for page in docs_pages.PAGES:
        assert (tmp_path / "docs" / page).read_text() == (ROOT / "docs" / page).read_text(), f"docs/{page} is stale: make docs"


def test_a_page_without_its_marker_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docs_pages, "DOCS", tmp_path)
    (tmp_path / "metrics.md").write_text("# Metrics\n")
    with pytest.raises(ValueError, match="docs/metrics.md lacks the line"):
        docs_pages.render("metrics.md")


def test_every_field_is_described_and_listed() -> None:
    text = docs_pages.configuration()
    for path, cls in sections():
        assert f"## {cls.__name__}" in text
        for name, info in cls.model_fields.items():
            assert info.description or name == "name", f"{'.'.join(path)}.{name} has no description"
            assert f"| `{name}` |" in text
    assert "| `devices` | integer > 0 or list of (integer >= 0 or text) | `1` |" in text
    assert "| `domains` | mapping of name to [DomainConfig](#domainconfig) | required |" in text


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_and_argument_is_explained(name: str) -> None:
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
def test_every_reward_has_an_example_that_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "key")
    _, example = docs_pages.documentation(reward_type(name))
    used = rewards_in(yaml.safe_load(example.strip("`").removeprefix("yaml")))
    assert name in [one["name"] for one in used]
    for one in used:
        typed_reward(one["name"], one.get("args", {}), "reward")  # type: ignore[arg-type]


def test_the_table_of_rewards_has_types_and_defaults_in_words() -> None:
    text = docs_pages.render("rewards.md")
    assert "| `strip` | true or false | `true` | Ignore white space at both ends. |" in text
    assert "| `extract` | one of auto, boxed, tagged" in text
    assert "| **`model`** | text | required |" in text
    assert not re.search(r"<class|typing\.|object at 0x|functools", text)
    for link in re.findall(r"\]\(([\w./]+\.md)", text):
        assert (ROOT / "docs" / link).is_file(), link


def test_the_interface_of_an_engine_is_described_as_it_is() -> None:
    table = (ROOT / "docs/add_a_strategy.md").read_text(encoding="utf-8").partition("## The interface\n")[2].partition("\n\nBesides")[0]
    described = dict(re.findall(r"`(\w+)\(([\w, ]*)\)`", "".join(row.split("|")[1] for row in table.splitlines() if row.startswith("| `"))))
    methods = {name: getattr(InferenceStrategy, name) for name in InferenceStrategy.__abstractmethods__}
    assert described == {name: ", ".join(list(inspect.signature(method).parameters)[1:]) for name, method in methods.items()}
