from __future__ import annotations

import pytest
from support_cases import cases

from roll_lite.config.checks.across import simulated_domains
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.files import CONFIGS


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config("tiny_grpo", CONFIGS, overrides, further=[simulated_domains])
    return str(error.value)


def test_domains_of_the_simulation_are_domains_of_the_run() -> None:
    told = problems("simulation.domains.ad.median=5", "~simulation.domains.add")
    assert "simulation.domains.ad: no such domain; did you mean 'add'?" in told


def test_a_run_reads_no_domains_of_the_simulation() -> None:
    config = load_config("tiny_grpo", CONFIGS, ["~domains.make"])
    assert "make" in config.simulation.domains and "make" not in config.domains
    assert load_config("tiny_grpo", CONFIGS, ["~domains.make"], further=[simulated_domains]) == config, "nor does a simulation"


@pytest.mark.parametrize(("settings", "expected"), cases("config/distributions"))
def test_distributions_fit_together(settings: list[str], expected: str) -> None:
    assert expected in problems(*settings)


def test_models_that_score_need_not_be_here() -> None:
    judge = ["judges={big: {path: /not/here, devices: 1}}", "domains.make.reward={name: judge, args: {server: big}}"]
    model = ["reward_models={rm: {path: /not/here, devices: 1}}", "domains.repeat.reward={name: model, args: {model: rm}}"]
    assert load_config("tiny_grpo", CONFIGS, [*judge, *model], files=False).judges["big"].path.name == "here"
    told = problems(*judge, *model)
    assert "judges.big.path" in told and "reward_models.rm.path" in told
