"""Mistakes in a domain's environment are told with their places and remedies, all at once, before anything starts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from roll_lite.config.checks import rollout
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.environments import AdapterSection, FunctionEnvironmentConfig, ToolsEnvironmentConfig
from roll_lite.files import CONFIGS

ROOT = Path(__file__).resolve().parents[2]
GUESS, CALCULATOR = "domains.guess.environment", "domains.calculator.environment"
GYM = f"{GUESS}={{name: gym, id: FrozenLake-v1}}"
OPENENV = f"{GUESS}={{name: openenv, url: 'http://127.0.0.1:8000', action: message}}"
TURNS = "roll_lite.examples.domains.turns"
CASES = "tests.workers.environment_cases"


def test_shipped_environments() -> None:
    guess, calculator = load_config("tiny_guess", CONFIGS), load_config("tiny_calculator", CONFIGS)
    assert isinstance(guess.domains["guess"].environment, FunctionEnvironmentConfig)
    assert guess.domains["guess"].reward.name == "environment"
    assert isinstance(calculator.domains["calculator"].environment, ToolsEnvironmentConfig)
    assert load_config("tiny_grpo", CONFIGS).domains["add"].environment is None


@pytest.mark.parametrize(
    ("name", "overrides", "says"),
    [
        ("tiny_guess", [f"{GUESS}.max_turn=3"], f"{GUESS}.max_turn = 3: unknown key; did you mean 'max_turns'"),
        ("tiny_guess", [f"{GUESS}.parallel=0"], f"{GUESS}.parallel = 0: expected integer > 0"),
        ("tiny_guess", [f"{GUESS}.name=tolls"], f"{GUESS}.name = .tolls.: expected one of function, tools"),
        ("tiny_guess", [f"{GUESS}={{type: tools}}"], f"{GUESS}.type = .tools.: is called name here"),
        ("tiny_guess", [f"{GUESS}.function={TURNS}.Gues"], f"{GUESS}.function = .*has no 'Gues'; did you mean 'Guess'"),
        ("tiny_guess", [f"{GUESS}.function={CASES}.second_chance", f"{GUESS}.args.tries=2"], f"{GUESS}.args.tries = 2: .*no such argument"),
        ("tiny_guess", [f"{GUESS}.function={TURNS}.calculate"], f"{GUESS}.function = .*take a task and the policy as its first arguments"),
        ("tiny_guess", [f"~{GUESS}"], "domains.guess.reward: is needed, since without `environment` nothing else scores"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[{TURNS}.calculat]"], f"{CALCULATOR}.tools.0 = .*did you mean 'calculate'"),
        ("tiny_calculator", [f"{CALCULATOR}.tools=[]"], f"{CALCULATOR}.tools = \\[\\]: expected"),
        ("tiny_calculator", ["~domains.calculator.reward"], "domains.calculator.reward: is needed, since tools give no rewards"),
        (
            "tiny_calculator",
            ["domains.calculator.template.name=plain"],
            "template.name = .plain.: tools are described to the model by a chat",
        ),
        ("tiny_guess", [GYM, f"{GUESS}.function={TURNS}.Guess"], f"{GUESS}.id = .*: name one environment: either its registered `id`"),
        ("tiny_guess", [f"{GUESS}={{name: gym}}"], f"{GUESS}.id = null: name one environment"),
        ("tiny_guess", [f"{GUESS}={{name: gym, function: {TURNS}.Gues}}"], f"{GUESS}.function = .*did you mean 'Guess'"),
        ("tiny_guess", [GYM, f"{GUESS}.action={TURNS}.calculat"], f"{GUESS}.action = .*did you mean 'calculate'"),
        ("tiny_guess", [OPENENV, f"{GUESS}.url=localhost:8000"], f"{GUESS}.url = .*: is no address of a server; write one such as http"),
        ("tiny_guess", [OPENENV, f"{GUESS}.observation={TURNS}.calculat"], f"{GUESS}.observation = .*did you mean 'calculate'"),
    ],
)
def test_mistakes(name: str, overrides: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "find_spec", lambda package: object())
    with pytest.raises(ConfigError) as refused:
        load_config(name, CONFIGS, overrides)
    assert re.search(says, str(refused.value)), str(refused.value)


@pytest.mark.parametrize(
    "section",
    [
        "{name: gym, id: FrozenLake-v1}",
        "{name: textarena, id: Mastermind-v0}",
        "{name: reasoning_gym, dataset: chain_sum}",
        "{name: openenv, url: 'http://127.0.0.1:8000', action: message}",
        "{name: verifiers, id: wordle}",
    ],
)
def test_a_missing_package_is_named_with_its_extra(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named like the section; with the package nothing is wrong, and the environment gives the rewards."""
    name = section.split(",")[0].removeprefix("{name: ")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    monkeypatch.setattr(rollout, "find_spec", lambda package: None)
    with pytest.raises(ConfigError) as refused:
        load_config("tiny_guess", CONFIGS, [f"{GUESS}={section}"])
    assert f'{GUESS}.name = "{name}": its package is not installed: pip install "roll_lite[{name}]"' in str(refused.value)
    monkeypatch.setattr(rollout, "find_spec", lambda package: object())
    settings = load_config("tiny_guess", CONFIGS, [f"{GUESS}={section}"]).domains["guess"].environment
    assert isinstance(settings, AdapterSection)
    assert extras[name][0].startswith(settings.package.replace("_", "-"))
