"""Runs whose processes are killed at random, again and again: the same command goes on, and the result is an undisturbed run's."""

from __future__ import annotations

import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from roll_lite.files import record
from roll_lite.pipeline.checkpoint_files import check_sums, finished_checkpoints, read_list, read_state
from roll_lite.pipeline.checkpoint_files import steps_of as checkpoint_step
from tests.chaos.test_engine_restarts import wait_until
from tests.chaos.test_training_ranks import SETTINGS, assert_equal
from tests.integration.test_runs import Run, command_of, until_gone

KILLS = 10
SAVES = 50
RANK_KILLS = 6
BACK = "actor_train is back at step"
RECORDED = ["rollout.prompts_per_step=4", "rollout.samples_per_prompt=2", "validation.enabled=false"]
MANY_RESTARTS = [f"{role}.restarts=100" for role in ("actor_train", "actor_infer", "rollout")]


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_run_killed_ten_times_ends_with_the_same_bits(tmp_path: Path, seed: int, undisturbed: Any) -> None:
    overrides = [*SETTINGS, *MANY_RESTARTS, "actor_train.devices=2", "actor_infer.devices=2", "steps=60", "checkpoint.resume=auto"]
    quiet = undisturbed("tiny_grpo", *overrides)
    draw = random.Random(seed)
    killed: list[str] = []
    while True:
        with Run(tmp_path / "disturbed", "tiny_grpo", *overrides) as run:
            family: list[psutil.Process] = []
            while len(killed) < KILLS and waited(run, draw):
                family = run.tree()
                victim = family[0] if draw.random() < 0.2 else draw.choice(family)
                with suppress(psutil.NoSuchProcess):
                    name = " ".join(command_of(victim))
                    victim.kill()
                    killed.append(name)
                    print(time.strftime("%X"), f"step {steps_of(run)}: killed {name[:100]}")
            code, output = run.finish(900)
        print(time.strftime("%X"), f"ended with {code}")
        if code == 0:
            break
        assert until_gone(family, 60) == [], output
    assert len(killed) == KILLS
    assert_equal(run, quiet)


def waited(run: Run, draw: random.Random) -> bool:
    """Wait until the run has trained a step more, and a random time; False if it ends before."""
    steps = steps_of(run)
    end: float | None = None
    while end is None or time.monotonic() < end:
        if run.process.poll() is not None:
            return False
        if end is None and steps_of(run) > steps:
            end = time.monotonic() + draw.expovariate(0.5)
        time.sleep(0.05)
    return True


def steps_of(run: Run) -> int:
    file = run.folder / "metrics.jsonl"
    return file.read_text().count("time/step") if file.exists() else 0


@pytest.fixture(scope="session")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rollouts of enough steps to train on, made once: runs without engines start in seconds."""
    with Run(tmp_path_factory.mktemp("dumps"), "tiny_grpo", *RECORDED, "mode=rollout_only", "steps=200") as run:
        code, output = run.finish(600)
    assert code == 0, output
    return run.folder


@pytest.mark.nightly
@pytest.mark.timeout(3000)
def test_after_each_of_fifty_kills_during_saves_the_last_good_checkpoint_loads(tmp_path: Path, dumps: Path) -> None:
    draw = random.Random(5)
    settings = [*saving(dumps), "steps=200"]
    newest, hit = 0, 0
    for number in range(SAVES):
        asynchronous = f"checkpoint.asynchronous={'true' if number % 2 else 'false'}"
        with Run(tmp_path, "tiny_gspo", *settings, asynchronous, "checkpoint.resume=auto") as run:
            partial = until_saving(run, newest + draw.randrange(1, 4))
            time.sleep(draw.random() * 0.3)
            family = run.tree()
            victims = [family[0], *(one for one in family if "ActorWorker" in " ".join(command_of(one)))]
            draw.choice(victims).kill()
            family[0].kill()
            run.finish(60)
        assert until_gone(family, 60) == []
        hit += partial.exists()
        newest = whole_checkpoint(run.folder, newest)
    assert hit >= SAVES / 4, "most kills came when nothing was being saved"
    with Run(tmp_path, "tiny_gspo", *settings, f"steps={newest + 1}", "checkpoint.resume=auto") as run:
        code, output = run.finish(200)
    assert code == 0, output


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("asynchronous", ["false", "true"])
def test_a_run_whose_ranks_are_killed_one_at_a_time_during_saves_goes_on(
    tmp_path: Path, dumps: Path, undisturbed: Any, asynchronous: str
) -> None:
    """Each time its last good checkpoint is whole, and it ends with the bits of a run that nobody disturbs."""
    settings = ["tiny_gspo", *saving(dumps), f"checkpoint.asynchronous={asynchronous}", "deterministic=true", "steps=40"]
    settings += ["actor_train.devices=2", "actor_train.restarts=100"]
    quiet = undisturbed(*settings)
    draw = random.Random(6)
    newest, hit, killed = 1, 0, 0.0
    with Run(tmp_path, *settings) as run:
        for kills in range(RANK_KILLS):
            partial = until_saving(run, newest + draw.randrange(1, 4), killed)
            time.sleep(draw.random() * 0.3)
            rank = draw.choice([one for one in run.tree() if "ActorWorker" in " ".join(command_of(one))])
            hit += partial.exists()
            rank.kill()
            killed = time.time()
            newest = whole_checkpoint(run.folder, newest)
            wait_until(run, lambda: sum(BACK in line for line in run._output) > kills)  # noqa: B023
        code, output = run.finish(400)
    assert code == 0 and output.count(BACK) == RANK_KILLS, output
    assert hit >= RANK_KILLS / 4, "most kills came when nothing was being saved"
    assert_equal(run, quiet)


def saving(dumps: Path) -> list[str]:
    checkpoints = ["checkpoint.every=1", "checkpoint.keep=3"]
    return [*RECORDED, "mode=train_only", "algorithm.old_log_probs=rollout", f"replay.path={dumps}", *checkpoints]


def whole_checkpoint(folder: Path, least: int) -> int:
    """Step of the last complete checkpoint, whose files are what was saved; at least that step."""
    checkpoint = finished_checkpoints(folder)[-1]
    step: int = read_state(checkpoint)["pipeline"]["steps_done"]
    assert step == checkpoint_step(checkpoint) >= least, "a complete checkpoint was lost"
    wanted = read_list(checkpoint)
    assert wanted is not None
    check_sums(checkpoint, wanted, [(name, record(checkpoint / name)) for name in wanted])
    return step


def until_saving(run: Run, step: int, since: float = 0.0) -> Path:
    """Wait until the checkpoint of this step, or a later one, is being written. One unchanged `since` then is left of a killed save."""
    while True:
        for found in sorted(run.run_dir.glob("*/*/checkpoints/*.partial"))[-1:]:
            with suppress(FileNotFoundError):
                if int(found.name[5:11]) >= step and found.stat().st_mtime > since:
                    return found
        assert run.process.poll() is None, run.finish()[1]
        time.sleep(0.002)
