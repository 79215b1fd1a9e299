"""Whole runs with two engines, of which one is lost on the way: the run goes on with the other one, and learns from whole batches."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from engine_harness import Make, require

from tests.integration.test_runs import Run, command_of, until_gone

STEPS = 8
GROUPS, SAMPLES = 8, 4
SETTINGS = [
    f"rollout.prompts_per_step={GROUPS}",
    f"rollout.samples_per_prompt={SAMPLES}",
    "validation.enabled=false",
    "actor_infer.devices=2",
    "weight_sync.verify=full",
    "actor_infer.restarts=0",
]
NOTICED_S = 10.0
"""By the clock of whoever listens, which counts little of the time in which a busy machine does not let it."""
NIGHTLY = pytest.mark.nightly


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as runs:

        def begin(make: Make, *overrides: str) -> Run:
            require(make)
            run = runs.enter_context(Run(tmp_path, "tiny_grpo", *SETTINGS, f"actor_infer.strategy={make}", *overrides))
            run.wait_for_step(2)
            return run

        yield begin


def hosts(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if "InferWorker" in " ".join(command_of(process))]


def victim_of(run: Run, of_engine: bool) -> psutil.Process:
    """An engine's host, or the largest process of the engine's own."""
    host = hosts(run.tree())[0]
    return max(host.children(recursive=True), key=lambda process: process.memory_info().rss) if of_engine else host


def told(output: str) -> list[str]:
    return re.findall(r"actor_infer\[\d\] is lost: .*", output)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "how", "of_engine"),
    [
        pytest.param("vllm", "kill", False, id="vllm-its host is killed", marks=NIGHTLY),
        pytest.param("vllm", "kill", True, id="vllm-it is killed", marks=NIGHTLY),
        pytest.param("vllm", "suspend", False, id="vllm-its host is stopped", marks=NIGHTLY),
        pytest.param("vllm", "suspend", True, id="vllm-it is stopped", marks=NIGHTLY),
        pytest.param("sglang", "kill", False, id="sglang-its host is killed", marks=NIGHTLY),
        pytest.param("sglang", "kill", True, id="sglang-it is killed", marks=NIGHTLY),
        pytest.param("sglang", "suspend", True, id="sglang-it is stopped", marks=NIGHTLY),
    ],
)
def test_a_run_goes_on_without_an_engine_that_is_lost(begun: Any, make: Make, how: str, of_engine: bool) -> None:
    goes_on(begun(make, f"steps={STEPS}"), how, of_engine)


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_a_run_whose_engines_get_adapters_alone_goes_on(begun: Any, make: Make) -> None:
    run = begun(make, f"steps={STEPS}", "actor_train.lora={rank: 4, engines: adapter}", "actor_train.optimizer.lr=1e-3")
    goes_on(run, "kill", of_engine=make == "sglang")
    assert max(record["sync/megabytes"] for record in run.metrics() if "time/step" in record) < 0.2


def goes_on(run: Run, how: str, of_engine: bool) -> str:
    """What the run said, once it has ended without the engine."""
    processes, victim = run.tree(), victim_of(run, of_engine)
    getattr(victim, how)()
    code, output = run.finish(400)
    assert code == 0, output
    (line,) = told(output)
    assert line.endswith("1 of 2 engines are left")
    assert re.search({"kill": "died|gone", "suspend": r"limits\.engine_silence"}[how], line), line
    steps = [record for record in run.metrics() if "time/step" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert sum(record["rollout/engines_lost"] for record in steps) == 1
    (silent_s,) = (record["rollout/engine_silent_seconds"] for record in steps if "rollout/engine_silent_seconds" in record)
    assert 0 < silent_s <= NOTICED_S
    for record in steps:
        assert (record["rollout/samples"], record["rollout/failed"]) == (GROUPS * SAMPLES, 0), "no sample is missing"
        assert record["actor/grad_norm"] > 0 and record["mismatch/max"] < 1e-4
        assert record["time/step"] < NOTICED_S + 110.0
    assert steps[-1]["sync/version"] == STEPS - 1, "the engine that is left has got every update"
    assert until_gone(processes, 60) == []
    return output


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_with_the_last_engine_the_run_ends_with_the_cause(begun: Any, make: Make) -> None:
    run = begun(make, "steps=100000")
    processes = run.tree()
    first, second = hosts(processes)
    first.kill()
    time.sleep(5.0)
    assert run.process.poll() is None
    second.suspend()
    code, output = run.finish(240)
    assert code == 1 and len(told(output)) >= 1, output
    silence = r"nothing was heard of its process for ([\d.]+) s \(limits.engine_silence: 7 s\)"
    found = re.search(rf"actor_infer rank \d failed in \w+: {silence}", output)
    assert found is not None and 7.0 < float(found.group(1)) <= NOTICED_S, output
    assert "actor_infer rank" in run.summary()["exit"]
    assert until_gone(processes, 60) == []
