"""`roll-lite reward --episodes`: episodes played by transformers, as a person sees them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from roll_lite.cli import main

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_a_game_is_shown_with_its_rewards(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "--config-name", "tiny_guess", "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    heads = re.findall(r"--- prompt (\d): score ([\d.]+), (?:not )?correct.*turns (\d)", shown)
    assert [uid for uid, _, _ in heads] == ["0", "1"]
    assert shown.count("assistant: ") == sum(int(turns) for *_, turns in heads)
    assert [float(score) for _, score, _ in heads if score != "0"] == [float(one) for one in re.findall(r"\[\+([\d.]+)\]", shown)]


def test_a_stop_string_ends_a_response(capsys: pytest.CaptureFixture[str]) -> None:
    stop = "domains.guess.sampling.stop=[' ', '1', '2', '3', '4', '5', '6', '7', '8', '9', '0']"
    assert main(["reward", "--config-name", "tiny_guess", "--episodes", "1", stop]) == 0
    for said in re.findall(r"assistant: (.*?)(?:  \[|$)", capsys.readouterr().out, re.MULTILINE):
        assert len(re.findall(r"\d", said)) <= 1, said


def test_an_agents_calls_are_shown_and_the_domains_reward_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reward", "--config-name", "tiny_agent", "--episodes", "3", "--split", "validation"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r'assistant:  calculate\(\{"expression": "[^"]+"\}\)\n +tool: ', shown) and "score 1, correct" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["tiny_base", "--domain", "add"], 2, "--episodes: domains.add has no environment; leave it out to score responses"),
        (["tiny_guess", "domains.guess.environment.function=tests.workers.environment_cases.troubled"], 1, ""),
    ],
)
def test_what_cannot_be_played(arguments: list[str], code: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *rest = arguments
    if code == 1:
        rest += ["domains.guess.data={train: tests/environments/troubled.jsonl}"]
    assert main(["reward", "--config-name", name, "--episodes", "1", *rest]) == code
    told = capsys.readouterr()
    assert says in told.err and ("failed: OSError: no service" in told.out) == (code == 1)
