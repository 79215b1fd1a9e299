"""A new type needs its class and one line of the table: the class of docs/add_a_domain.md is checked, documented and runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import rewards
from support_rewards import score_of

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput
from roll_lite.rewards.registry import REWARDS, build_reward, check_rewards

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/add_a_domain.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def vowels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = [one for one in re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE) if "RewardType" in one]
    (line,) = re.findall(r'^"(\w+)": "roll_lite\.rewards\.text\.vowels\.(\w+)",$', PAGE, re.MULTILINE)
    (tmp_path / "vowels_of_the_page.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(REWARDS, line[0], f"vowels_of_the_page.{line[1]}")
    monkeypatch.chdir(ROOT)


def mistakes(reward: str) -> dict[str, str]:
    try:
        load_config("tiny_grpo", ROOT / "examples/configs", [f"domains.add.reward={reward}"], further=[check_rewards])
    except ConfigError as error:
        return {problem.path.rpartition(".")[2]: problem.message for problem in error.problems}
    return {}


def test_it_is_checked() -> None:
    assert mistakes("{name: vowels, args: {least: 0.5}}") == {}
    assert mistakes("{name: exact, terms: [{name: vowels, args: {letters: aou}}]}") == {}
    assert "did you mean 'vowels'" in mistakes("{name: vowel}")["name"]
    told = mistakes("{name: vowels, args: {least: 2, letters: '', lest: 1}}")
    assert told["least"] == "expected number >= 0 and <= 1" and told["letters"] == "expected text, not empty"
    assert "did you mean 'least'" in told["lest"]


def test_it_is_documented() -> None:
    section = rewards().partition("## vowels\n")[2]
    assert section.startswith("\nThe share of letters that are vowels.")
    assert "| `least` | number >= 0 and <= 1 | `0.0` | A smaller share is worth nothing. |" in section
    assert "args: {least: 0.3}" in section


def test_it_runs() -> None:
    item = RewardInput("d", "p", "banana split", None, {}, "stop")
    assert score_of(build_reward(RewardConfig(name="vowels")), item).value == pytest.approx(4 / 11)
    assert score_of(build_reward(RewardConfig(name="vowels", args={"least": 0.5})), item).value == 0.0
