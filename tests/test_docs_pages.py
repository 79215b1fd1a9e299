"""The generated pages are what the code says, every field, argument and metric is explained, every example would be accepted; settings,
metrics and messages that a page names exist; the site has every page."""

from __future__ import annotations

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import docs_pages
import pytest
import yaml

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError, Missing
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.validation import NAMES_IN_OTHER_TRAINERS, sections, sections_at
from roll_lite.distributed.strategy.base import InferenceStrategy
from roll_lite.files import CONFIGS
from roll_lite.observability.metric_table import DERIVED, METRICS
from roll_lite.rewards.registry import REWARDS, reward_type, typed_reward

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


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


def configurations() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if language != "yaml" or text.startswith((" ", "#")):  # a part of a section, a table
                continue
            data = yaml.safe_load(text)
            if isinstance(data, dict) and data.keys() <= {"defaults", *RunConfig.model_fields}:
                yield f"{page.name}: {' '.join(text.split())[:50]}", text


NOT_HERE = ("is needed, since", "add a `reference` section", "its package is not installed", "there is no module", "there is no such file")
"""Messages about what an example leaves out: another section, a package, a module or file of the reader's own."""


@pytest.mark.parametrize("text", [pytest.param(text, id=name) for name, text in configurations()])
def test_a_configuration_on_a_page_is_accepted(text: str, tmp_path: Path) -> None:
    built_on = "" if text.startswith("defaults:") else "defaults: [qwen2.5_0.5b_grpo, _self_]\n"
    (tmp_path / "page.yaml").write_text(built_on + text, encoding="utf-8")
    wrong = []
    try:
        load_config("page", tmp_path, files=False)
    except ConfigError as error:
        wrong = [str(one) for one in error.problems if not isinstance(one, Missing) and not any(word in one.message for word in NOT_HERE)]
    assert wrong == []


@pytest.mark.parametrize(
    ("old", "new", "section"),
    [(old, new, path) for old, new in NAMES_IN_OTHER_TRAINERS.items() for path, cls in sections() if new in cls.model_fields],
)
def test_an_old_name_is_told_with_the_new_one(old: str, new: str, section: tuple[str, ...]) -> None:
    keys = tuple("main" if key == "<name>" else key for key in section)
    with pytest.raises(ConfigError) as refused:
        load_config("tiny_ppo", CONFIGS, [f"+{'.'.join((*keys, old))}=1"], files=False)
    assert f"{'.'.join((*keys, old))} = 1: unknown key; there is {'.'.join((*keys, new))}" in str(refused.value)


def parts_of_configurations() -> Iterator[tuple[str, str]]:
    """Sections of a domain, which are indented, and algorithms in one line each behind their names."""
    domain = "domains:\n  page:\n    data: {train: a.jsonl}\n    template: {name: chat}\n"
    for page in PAGES:
        for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
            if language == "yaml" and text.startswith(" "):
                yield from ((page.name, f"{domain}    {part}") for part in re.split(r"^    (?! )", text, flags=re.MULTILINE)[1:])
            elif language == "yaml" and text.startswith("#"):
                lines = [re.fullmatch(r"# .+?  +(\{.+\})(.*)", line) for line in text.splitlines()]
                yield from ((page.name, f"algorithm: {line[1]}{CRITIC * ('critic' in line[2])}\n") for line in lines if line is not None)
                assert all(lines), f"{page.name}: a line without an algorithm"


CRITIC = "\ncritic: {init: actor}"
PARTS = [pytest.param(text, id=f"{name}: {' '.join(text.split())[-50:]}") for name, text in parts_of_configurations()]


@pytest.mark.parametrize("text", PARTS)
def test_a_part_of_a_configuration_on_a_page_is_accepted(text: str, tmp_path: Path) -> None:
    test_a_configuration_on_a_page_is_accepted(text, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_of_a_page_is_of_a_kind_that_is_checked(page: Path) -> None:
    """Commands: tests/test_commands.py; rendered files: tests/test_launch.py; rewards: above. Python and JSON can be read."""
    for language, text in FENCE.findall(page.read_text(encoding="utf-8")):
        assert language in ("", "bash", "sh", "text", "shell", "python", "json", "yaml"), language
        if language == "python":
            ast.parse(text)
        elif language == "json":
            json.loads(text)
        elif language == "shell":
            assert page.name == "multi_node.md" and text.startswith("#!/bin/bash")
        elif language == "yaml" and not text.startswith((" ", "#")):
            data = yaml.safe_load(text)
            assert set(data) <= {"defaults", *RunConfig.model_fields} or set(data) == {"reward"} or data.get("kind") == "RayJob"


def is_setting(path: tuple[str, ...]) -> bool:
    """True if `path`, or a mapping that it leads into, is a field of the schema. `*` stands for any name."""
    for end in range(len(path), 0, -1):
        fields = [section.model_fields[path[end - 1]] for section in sections_at(path[: end - 1]) if path[end - 1] in section.model_fields]
        if fields:
            return end == len(path) or any("dict" in str(info.annotation) for info in fields)
    return False


NO_SETTINGS = {"rollout.prompts_per_stp", "rollout.lr", "model.layers.0.mlp.experts.3.gate_proj"}
"""Mistakes that a page explains, a name of a weight."""


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "coming_from.md"], ids=lambda page: page.name)
def test_settings_and_metrics_on_a_page_exist(page: Path) -> None:
    metrics = {*METRICS, *DERIVED}
    groups = {name.partition("/")[0] for name in metrics if "/" in name}
    unknown = []
    for span in SPAN.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.fullmatch(r"[a-z_]+/[a-z_@]+", span) and span.partition("/")[0] in groups and span not in metrics:
            unknown.append(span)
        found = re.fullmatch(r"([a-z_]+(?:\.[a-z_*0-9]+)+)(?:[:=].*)?", span)
        if found is None or found[1].endswith((".json", ".py", ".yaml", ".md")) or found[1] in NO_SETTINGS:
            continue
        path = tuple(found[1].split("."))
        inside = [("domains", "*", *path)] if path[0] in ("sampling", "data", "environment", "template") else []
        if (path[0] in RunConfig.model_fields or inside) and not any(map(is_setting, [path, *inside])):
            unknown.append(span)
    assert unknown == []


@cache
def texts_of_the_code() -> str:
    """All texts in roll_lite/ without docstrings; what an f-string fills in is a control character."""

    def text(node: ast.expr) -> str:
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "\0"

    found: list[str] = []
    for file in (ROOT / "roll_lite").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        found += ["".join(map(text, node.values)) for node in nodes if isinstance(node, ast.JoinedStr)]
        found += [text(node) for node in nodes if isinstance(node, ast.Constant) and id(node) not in docstrings]
    return "\n".join(found)


@pytest.mark.parametrize("page", ["troubleshooting.md", "versioning.md"])
def test_messages_on_a_page_are_those_of_the_code(page: str) -> None:
    prose = FENCE.sub("", (ROOT / "docs" / page).read_text(encoding="utf-8"))
    quoted = re.findall(r'"([^"\n]+)"', SPAN.sub("", prose))
    parts = [part.strip() for message in quoted for part in re.split(r"\.\.\.|'[^']*'", message)]
    unknown = [part for part in parts if part.rstrip(".") not in texts_of_the_code()]
    assert len(parts) > 10 and unknown == []


class SiteLoader(yaml.SafeLoader):
    """Reads mkdocs.yml, whose tags name functions of packages that are not here."""


SiteLoader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def test_the_site_has_every_page_once() -> None:
    site: dict[str, Any] = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), SiteLoader)
    assert site["theme"]["font"] is False and site["plugins"] == ["search"], "nothing is loaded from elsewhere"

    def pages(part: object) -> list[str]:
        if isinstance(part, str):
            return [part]
        return [page for one in (part.values() if isinstance(part, dict) else part) for page in pages(one)]  # type: ignore[attr-defined]

    assert sorted(pages(site["nav"])) == [page.name for page in PAGES[1:]]
