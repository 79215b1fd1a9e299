"""`roll-lite simulate`, from outside."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from roll_lite.cli import main
from roll_lite.config.loading import load_config
from roll_lite.files import CONFIGS
from roll_lite.simulator.command import ALTERNATIVES, alternatives
from roll_lite.simulator.report import advice, table_of_runs
from roll_lite.simulator.scenario import Failures, scenario_of
from roll_lite.simulator.simulation import SimulatedRun, Step, simulate

RUN = Path(__file__).parent / "tiny_grpo_run"
SHORT = ["simulation.steps=3", "rollout.prompts_per_step=6"]


def rows(text: str) -> list[list[str]]:
    """Of the table, cell by cell."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith("---"))
    return [line.split("  ") for line in lines[start + 1 : lines.index("", start)]]


def test_the_configured_run_is_one_row(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--config-name", "tiny_grpo", *SHORT]) == 0
    printed = capsys.readouterr().out
    assert "1 engine of 256 requests" in printed and "domain add: 33.3% of the groups, 33.3% wanted" in printed
    ((policy, *_),) = rows(printed)
    assert policy.strip() == "sync"


@pytest.mark.nightly
def test_every_policy_and_other_numbers_of_engines_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["actor_infer.devices=2", "rollout.supply=async", "rollout.max_staleness=2", *SHORT]
    assert main(["simulate", "--config-name", "tiny_grpo", "--compare", *settings]) == 0
    printed = capsys.readouterr().out
    assert "within 5% of the fastest step" in printed.splitlines()[-1]
    found = rows(printed)
    assert len(found) == 1 + 3 * len(ALTERNATIVES)
    assert found[0][0].strip() == "async 2"


def test_policies_that_cannot_be_are_left_out_and_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--config-name", "tiny_grpo", "--compare", "actor_infer.devices=2", "deterministic=true", *SHORT]) == 0
    printed = capsys.readouterr().out
    assert [row[0].strip() for row in rows(printed)] == ["sync"] * 3
    assert "with actor_infer.offload: false and deterministic: false they are compared as well" in printed


def test_a_domains_minimum_and_its_epochs_are_those_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("add", "make", "repeat")
    few = [f"+simulation.domains.{name}.prompts=4" for name in names] + [f"domains.{name}.data.epochs=1" for name in names]
    assert main(["simulate", "--config-name", "tiny_grpo", *SHORT, *few, "domains.add.min_prompts=2"]) == 0
    printed = capsys.readouterr().out
    assert "33.3% wanted and 2 in each batch at least" in printed
    assert "ends after 2 steps of 3: no domain has prompts left (data.epochs, simulation.*.prompts)" in printed


def test_a_run_that_cannot_go_on_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = ["rollout.filter=std", "rollout.filter.tries=2", "simulation.responses={all_right: 0.1, all_wrong: 0.9}", "~simulation.domains"]
    assert main(["simulate", "--config-name", "tiny_grpo", *SHORT, *wrong]) == 1
    output, said = capsys.readouterr()
    assert output == "" and said.startswith("ends after 0 steps of 3: domain ") and "rollout.filter.tries allows more" in said
    two = replace(scenario_of(load_config("tiny_grpo", CONFIGS, ["simulation.steps=30"])), failures=Failures(((3.0, 0),), start_s=None))
    outcomes = [simulate(two), simulate(replace(two, failures=Failures()))]
    assert 0 < len(outcomes[0].steps) < 30 and "no engine is left to generate" in table_of_runs(outcomes)
    assert advice(outcomes).endswith(f"{outcomes[1].step_s:.2f} s")


def test_offloading_and_early_passes_are_those_of_the_configuration() -> None:
    settings = ["simulation.engine.offload_s=7", "simulation.trainer.log_probs=0.5"]
    chosen = scenario_of(load_config("qwen2.5_7b_grpo", CONFIGS, settings, further=(), files=False))
    assert (chosen.offload_s, chosen.trainer.log_probs, chosen.takes_turns) == (7.0, 0.5, True)
    assert scenario_of(load_config("tiny_grpo", CONFIGS)).offload_s is None


def test_a_measured_run_takes_the_place_of_assumptions_and_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--config-name", "tiny_grpo", "--from", str(RUN), *SHORT]) == 0
    assert "\nsimulation:\n  steps: 3\n  engine: {pass_ms: " in capsys.readouterr().out


def test_what_is_no_run_is_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["simulate", "--config-name", "tiny_grpo", "--from", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err


def test_the_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "engines.png"
    assert main(["simulate", "--config-name", "tiny_grpo", "--picture", str(picture), "--color", "domain", *SHORT]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_mistakes_of_the_configuration_are_told_before_anything_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--config-name", "tiny_grpo", "simulation.engine.pass_s=1"]) == 2
    assert "simulation.engine.pass_s = 1: unknown key; did you mean 'pass_ms'?" in capsys.readouterr().err


def test_neither_model_nor_data_have_to_be_there(capsys: pytest.CaptureFixture[str]) -> None:
    """qwen2.5_7b_grpo leaves their paths out; what is wrong beside them is told all the same."""
    assert main(["simulate", "--config-name", "qwen2.5_7b_grpo", "simulation.steps=3", "rollout.prompts_per_step=16"]) == 0
    assert "8 engines of 256 requests" in capsys.readouterr().out
    assert main(["simulate", "--config-name", "qwen2.5_7b_grpo", "model.path=/nowhere", "algorithm.mini_batches=7"]) == 2
    assert [line.split(" ")[3] for line in capsys.readouterr().err.splitlines()[1:]] == ["algorithm.mini_batches"]


def test_the_advice_is_the_cheapest_of_the_fast_ones() -> None:
    def outcome(engines: int, step_s: float, staleness: int) -> SimulatedRun:
        chosen = replace(scenario_of(load_config("tiny_grpo", CONFIGS)), engines=engines)
        steps = [Step(end, 0.0, 1.0, 1, 1, 1.0, 1, {}, staleness, staleness, 1) for end in (step_s, 2 * step_s, 3 * step_s)]
        return SimulatedRun(chosen, steps)

    outcomes = [outcome(8, 100.0, 4), outcome(4, 104.0, 2), outcome(4, 104.5, 1), outcome(2, 110.0, 0)]
    assert advice(outcomes).endswith("(100.0 s): sync, 4 engines, 104.5 s")


def test_what_the_configuration_says_is_what_is_simulated() -> None:
    settings = [
        "actor_infer.devices=4",
        "actor_infer.strategy.tensor_parallel=2",
        "actor_train.devices=2",
        "domains.add.share=2",
        "domains.add.samples_per_prompt=16",
        "simulation.engine={pass_ms: 20, request_us: 50, cached_token_ns: 5, prefill_tokens_per_s: 1000, failures_per_day: 24, "
        "hangs_per_day: 48, hang_s: 9}",
        "simulation.trainer={overhead_s: 1, tokens_per_device_s: 500, sync_s: 2}",
        "simulation.responses={median: 4, p99: 9, prompt_tokens: 100, reward_s: 1, reward_workers: 3}",
    ]
    scenario = scenario_of(load_config("tiny_grpo", CONFIGS, settings))
    rates = scenario.rates
    assert (rates.pass_s, rates.request_s, rates.cached_token_s, rates.prefill_token_s) == pytest.approx((0.02, 50e-6, 5e-9, 1e-3))
    assert (scenario.engines, scenario.limits.slots, scenario.failures.mean_s) == (2, 256, 3600.0)
    assert (scenario.failures.mean_hang_s, scenario.failures.hang_s) == (1800.0, 9.0)
    assert scenario.trainer.seconds(2000) == pytest.approx(1 + 2000 / 1000)
    add, make, _ = scenario.domains
    assert (add.share, add.samples_per_prompt, add.prompt_tokens, add.lengths.draw(0.5)) == (2, 16, 12, pytest.approx(4))
    assert (add.reward_workers, make.reward_workers) == (3, None)
    assert (make.samples_per_prompt, make.lengths.draw(0.5)) == (8, pytest.approx(6)), "tiny_base describes this one by itself"


def test_alternatives_keep_what_is_not_compared() -> None:
    chosen = scenario_of(load_config("tiny_grpo", CONFIGS, ["rollout={filter: {name: std}, oversample: 2}", "actor_infer.devices=3"]))
    found = list(alternatives(chosen))
    assert {one.engines for one in found} == {1, 3, 6}
    assert all(one.rollout.filter == chosen.rollout.filter for one in found)
    assert {one.policy for one in found} >= {"sync, 2x prompts", "one step off", "async 4, abort"}
