"""`tiny_grpo_run` and `tiny_guess_run` hold what runs of these recipes wrote in their first four steps, as far as it is read here."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import nullcontext
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import yaml

from roll_lite.config.loading import load_config
from roll_lite.config.schema.simulation import SimulationConfig
from roll_lite.files import CONFIGS
from roll_lite.simulator.calibration import MeasuredRun, answer_seconds, calibrated, fit, measured, passes, policy_tokens, read_run
from roll_lite.simulator.scenario import scenario_of
from roll_lite.simulator.simulation import simulate

RUN = Path(__file__).parent / "tiny_grpo_run"


def test_passes_of_responses_that_make_room_for_each_other() -> None:
    """Two slots: 5 and 3; 4 follows the 3 and ends at 7; 1 follows the 5 and ends at 6."""
    assert passes([5, 3, 4, 1], slots=2) == 7
    assert passes([5, 3, 4, 1], slots=8) == 5


def test_the_fit_finds_what_went_in() -> None:
    rows = [(10.0, 200.0), (12.0, 180.0), (8.0, 260.0)]
    assert fit(rows, [10 * 0.02 + 200 * 0.001, 12 * 0.02 + 180 * 0.001, 8 * 0.02 + 260 * 0.001]) == pytest.approx((0.02, 0.001))


def test_where_steps_do_not_tell_them_apart_passes_explain_everything() -> None:
    assert fit([(10.0, 200.0)], [0.5]) == pytest.approx((0.05, 0.0))
    assert fit([(10.0, 200.0), (20.0, 400.0)], [0.5, 1.0]) == pytest.approx((0.05, 0.0))
    pass_s, request_s = fit([(10.0, 300.0), (20.0, 100.0)], [0.4, 1.1])  # by least squares tokens would cost less than nothing
    assert request_s == 0 and pass_s == pytest.approx((10 * 0.4 + 20 * 1.1) / (100 + 400))


def test_a_run_that_the_model_has_made_is_found_again() -> None:
    """Two engines, one domain; the first step, which took longer, is left out."""
    samples = {
        step: [
            {
                "domain": "add",
                "group": index // 2,
                "epoch": 0,
                "correct": index < 2,
                "outcome": "accepted",
                "prompt_tokens": 6,
                "response_tokens": tokens,
            }
            for index, tokens in enumerate(lengths)
        ]
        for step, lengths in {1: [4, 4], 2: [10, 10, 10, 10], 3: [5, 5, 20, 20]}.items()
    }
    # Each engine has every second response: 10 and 10, side by side; 5 and 20.
    generation = {1: 99.0, 2: 10 * 0.1 + 20 * 0.01, 3: 20 * 0.1 + 25 * 0.01}
    metrics = {
        step: {
            "time/step": seconds + 0.5 + 0.25,
            "time/generate": seconds,
            "time/sync_weights": 0.25,
            "time/log_probs": 0.1,
            "rollout/generation_seconds": seconds,
            "domain/add/reward/seconds": 0.5,
            "rollout/reward_tail_seconds": 0.75,
        }
        for step, seconds in generation.items()
    }
    assumed = SimulationConfig.model_validate({"responses": {"prompts": 77}, "engine": {"cached_tokens": 5000, "failures_per_day": 2}})
    found = measured(MeasuredRun(2, 8, 4, metrics, samples), assumed, ["add", "make"])
    assert (found.engine.pass_ms, found.engine.request_us) == pytest.approx((100.0, 10_000.0))
    tokens = (4 * 6 + 40 + 4 * 6 + 50) / 2
    assert found.trainer.tokens_per_device_s == pytest.approx(tokens / 0.5 / 4, rel=1e-3)
    assert (found.trainer.sync_s, found.trainer.log_probs) == (0.25, pytest.approx(0.1 / 0.5))
    assert (found.domains["add"].prompts, found.engine.offload_s) == (77, assumed.engine.offload_s)
    assert (found.engine.cached_tokens, found.engine.failures_per_day) == (5000, 2), "what a run does not tell stays as it was assumed"
    other = measured(MeasuredRun(2, 8, 4, metrics, samples, offloads=True, streams=True), assumed, ["add"])
    assert other.engine.offload_s == 0, "it is in the trainer's time"
    assert other.trainer.log_probs == assumed.trainer.log_probs, "some were computed beside the generation"
    add = found.domains["add"]
    assert (add.prompt_tokens, add.reward_s, add.reward_p99_s) == (6, 0.5, 0.75)
    assert add.quantiles is not None and (add.quantiles[0], add.quantiles[-1]) == (5, 20)
    assert (add.all_right, add.all_wrong) == (0.5, 0.5)
    assert "make" not in found.domains


def test_turns_and_the_environments_time_are_measured() -> None:
    """Three episodes of 1, 2 and 2 responses with 10 tokens each, 4 tokens and 0.5 s of the environment after every response but the last;
    the engine's time is what is left of the generation's: 30 tokens one after the other."""
    turns = {0: 1, 1: 2, 2: 2}
    samples = [
        {
            "domain": "add",
            "group": index,
            "epoch": 0,
            "correct": True,
            "outcome": "accepted",
            "prompt_tokens": 6,
            "response_tokens": 10 * turns[index] + 4 * (turns[index] - 1),
            "episode": {
                "metrics": {
                    "turns": turns[index],
                    "environment_seconds": 0.5 * turns[index],
                    "environment_tokens": 4.0 * (turns[index] - 1),
                }
            },
        }
        for index in range(3)
    ]
    waits = 0.5 * 5 / 3
    metrics = {step: {"time/step": 3.0 + waits, "rollout/generation_seconds": 2.0 + waits} for step in (1, 2)}
    found = measured(MeasuredRun(1, 8, 1, metrics, {1: samples, 2: samples}), SimulationConfig(), ["add"])
    add = found.domains["add"]
    assert (add.turns, add.turns_p99, add.environment_s, add.environment_tokens) == (1.667, 2.0, 0.5, 4), "5 turns of 3 episodes"
    assert add.quantiles == [10.0] * 21
    assert found.engine.pass_ms == pytest.approx(1e3 * 2.0 / 20), "20 passes of the longest"


def test_the_spread_of_an_environments_answers_is_found_from_whole_episodes() -> None:
    """Log-normal answers around a median of 0.2 s, of which one in a hundred takes more than 2 s; a run records sums of one to eight."""
    drawn = np.random.default_rng(7)
    deviation = math.log(2 / 0.2) / NormalDist().inv_cdf(0.99)
    counts = drawn.integers(1, 9, size=40_000)
    seconds = [float(drawn.lognormal(math.log(0.2), deviation, size=count).sum()) for count in counts]
    assert answer_seconds(seconds, counts.astype(float).tolist()) == pytest.approx((0.2, 2.0), rel=0.05)
    assert answer_seconds([0.5, 1.5], [1.0, 3.0]) == pytest.approx((0.5, 0.5)), "all take as long"
    assert answer_seconds([0.7, 1.7], [1.0, 3.0]) == pytest.approx((0.6, 0.6)), "0.2 s for a reset, 0.5 s an answer"
    assert answer_seconds([0.0], [2.0]) == (0.0, 0.0)


def test_the_simulation_of_a_real_run_takes_as_long_as_the_run() -> None:
    run = read_run(RUN)
    config = calibrated(load_config("tiny_grpo", CONFIGS, []), RUN)
    outcome = simulate(scenario_of(config))
    steps = [run.metrics[step]["time/step"] for step in (2, 3, 4)]
    assert outcome.step_s == pytest.approx(sum(steps) / 3, rel=0.2)
    lengths = [sample["response_tokens"] for step in (2, 3, 4) for sample in run.samples[step]]
    tokens = sum(step.response_tokens for step in outcome.steps) / sum(step.samples for step in outcome.steps)
    assert tokens == pytest.approx(sum(lengths) / len(lengths), rel=0.05)


def test_the_simulation_of_a_real_run_of_several_turns_takes_as_long_as_the_run() -> None:
    folder = RUN.with_name("tiny_guess_run")
    run = read_run(folder)
    outcome = simulate(scenario_of(calibrated(load_config("tiny_guess", CONFIGS, []), folder)))
    steps = [run.metrics[step]["time/step"] for step in (2, 3, 4)]
    assert outcome.step_s == pytest.approx(sum(steps) / 3, rel=0.1)
    spoken = [policy_tokens(sample) for step in (2, 3, 4) for sample in run.samples[step]]
    tokens = sum(step.response_tokens for step in outcome.steps) / sum(step.samples for step in outcome.steps)
    assert tokens == pytest.approx(sum(spoken) / len(spoken), rel=0.05)


def test_a_validation_after_a_step_takes_nothing_from_it(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    with (tmp_path / "metrics.jsonl").open("a") as lines:
        lines.write('{"step": 3, "validation/accuracy": 0.5}\n')
    assert read_run(tmp_path) == read_run(RUN)


@pytest.mark.parametrize(
    ("rollout", "filtered", "told"),
    [
        ({"filter": {"name": "accuracy"}}, 3, r"rollout\.filter, which left out 3 groups"),
        ({"filter": {"name": "accuracy"}}, 0, None),
        ({"oversample": 1.5}, 0, r"rollout\.oversample: 1\.5, which generates more"),
    ],
)
def test_a_run_that_generated_more_than_its_samples_is_refused(
    rollout: dict[str, Any], filtered: int, told: str | None, tmp_path: Path
) -> None:
    """Its passes would be too long, and none of its groups all right or all wrong."""
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(yaml.safe_load((RUN / "config.yaml").read_text()) | {"rollout": rollout}))
    records = [json.loads(line) for line in (RUN / "metrics.jsonl").read_text().splitlines()]
    records[2] |= {"rollout/filtered_groups": float(filtered)}
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    with nullcontext() if told is None else pytest.raises(ValueError, match=rf"{told}.*rollout\.filter=null rollout\.oversample=1"):
        read_run(tmp_path)


def test_engines_that_share_a_device_are_counted(tmp_path: Path) -> None:
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    settings = yaml.safe_load((RUN / "config.yaml").read_text())
    settings["actor_infer"] |= {"devices": [0, 2], "replicas_per_device": 3}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert (read_run(RUN).engines, read_run(tmp_path).engines) == (1, 6)


def test_a_folder_that_is_none_of_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not the folder of a run: No such file or directory, metrics\.jsonl"):
        read_run(tmp_path)
    shutil.copytree(RUN, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.yaml").write_text(f"{(RUN / 'config.yaml').read_text()}\nrollout: {{supply: async}}\n")
    with pytest.raises(ValueError, match=r"with rollout\.supply: async, whose generation seconds are not those of a batch"):
        read_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    (tmp_path / "config.yaml").write_text("actor_infer: {}\n")
    with pytest.raises(ValueError, match="needs a run of at least one step"):
        read_run(tmp_path)
