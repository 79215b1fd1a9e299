from __future__ import annotations

import pytest

from roll_lite.config.checks.across import simulated_domains
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.files import CONFIGS


def problems(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config("tiny_grpo", CONFIGS, overrides, further=[simulated_domains])
    return str(error.value)


def test_domains_of_the_simulation_are_domains_of_the_run() -> None:
    assert "simulation.domains.ad: no such domain; did you mean 'add'?" in problems("simulation.domains.ad.median=5")


def test_a_run_reads_no_domains_of_the_simulation() -> None:
    config = load_config("tiny_grpo", CONFIGS, ["~domains.make"])
    assert "make" in config.simulation.domains and "make" not in config.domains


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (["simulation.responses.median=10", "simulation.responses.p99=5"], "simulation.responses.p99 = 5.0: is less than the median, 10"),
        (
            ["simulation.domains.add.reward_s=2", "simulation.domains.add.reward_p99_s=1"],
            "simulation.domains.add.reward_p99_s = 1.0: is less than the median, 2",
        ),
        (["simulation.domains.add.reward_p99_s=1"], "simulation.domains.add.reward_s = 0.0: a median of 0 leaves no room"),
        (["simulation.domains.add.quantiles=[3,2]"], "simulation.domains.add.quantiles = [3.0, 2.0]: go from the shortest to the longest"),
        (["simulation.domains.add={quantiles: [2,3], median: 2}"], "simulation.domains.add.median = 2.0: the quantiles say how long"),
        (
            ["simulation.domains.add={all_right: 0.7, all_wrong: 0.4}"],
            "simulation.domains.add.all_wrong = 0.4: with all_right 0.7 that is more than all prompts",
        ),
    ],
)
def test_distributions_fit_together(settings: list[str], expected: str) -> None:
    assert expected in problems(*settings)
