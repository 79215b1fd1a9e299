"""Mistakes in a domain's environment are told with their places and remedies, all at once, before anything starts."""

from __future__ import annotations

import re

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.environments import FunctionEnvironmentConfig, ToolsEnvironmentConfig
from roll_lite.files import CONFIGS

GUESS, CALCULATOR = "domains.guess.environment", "domains.calculator.environment"
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
    ],
)
def test_mistakes(name: str, overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(name, CONFIGS, overrides)
    assert re.search(says, str(refused.value)), str(refused.value)
