"""Whole runs in which an engine dies, hangs or raises in a weight update: the other one gets all of it, and the run goes on."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from engine_harness import Make, require
from left_behind import Traces

from tests.integration.test_lost_engines import GROUPS, SAMPLES, SETTINGS, told
from tests.integration.test_runs import Run, until_gone

DIES = Path(__file__).parents[1] / "chaos/dies_between_buckets"
STEPS = 4
UPDATES = 2


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("make", "transport", "victim", "says"),
    [
        pytest.param("vllm", "auto", "engine", "died|gone", id="vllm-it is killed"),
        pytest.param("vllm", "gloo", "host", "died|gone", id="vllm-its host is killed"),
        pytest.param("sglang", "auto", "host", "died|gone", id="sglang-its host is killed"),
        pytest.param("sglang", "gloo", "engine", "died|gone", id="sglang-it is killed"),
        pytest.param("vllm", "gloo", "engine that has answered", "died|gone", id="vllm-it is killed while another one reads from it"),
        pytest.param("vllm", "auto", "nobody, it raises", "ValueError: a bucket that it cannot load", id="vllm-it raises"),
        pytest.param("sglang", "gloo", "nobody, it raises", "ValueError: a bucket that it cannot load", id="sglang-it raises"),
        pytest.param("vllm", "auto", "nobody", "it hangs in update_weights", id="vllm-it hangs"),
        pytest.param("sglang", "auto", "nobody", "it hangs in update_weights", id="sglang-it hangs"),
    ],
)
def test_the_other_engine_gets_all_of_the_update(make: Make, transport: str, victim: str, says: str, tmp_path: Path) -> None:
    require(make)
    path = os.pathsep.join([str(DIES), *filter(None, [os.environ.get("PYTHONPATH")])])
    died = {"DIES_MARK": str(tmp_path / "died"), "DIES_AFTER_UPDATES": str(UPDATES), "DIES_VICTIM": victim, "PYTHONPATH": path}
    bucket_mb = 64 if "answered" in victim else 1  # all in one
    sync = [f"weight_sync.transport={transport}", f"weight_sync.bucket_mb={bucket_mb}", f"actor_infer.strategy={make}", f"steps={STEPS}"]
    sync.append("weight_sync.timeout_s=15")
    traces = Traces(tmp_path / "traces")
    with Run(tmp_path, "tiny_grpo", *SETTINGS, *sync, environment=died) as run:
        run.wait_for_step(1)
        processes = run.tree()
        code, output = run.finish(400)
    assert code == 0, output
    assert (tmp_path / "died").exists(), "the engine was killed where this test wants it"
    (line,) = told(output)
    assert line.endswith("1 of 2 engines are left") and re.search(says, line), line
    steps = [record for record in run.metrics() if "time/step" in record]
    assert [record["step"] for record in steps] == list(range(1, STEPS + 1))
    assert [record["rollout/engines_lost"] for record in steps] == [0, 0, 1, 0]
    for record in steps:
        assert (record["rollout/samples"], record["rollout/failed"]) == (GROUPS * SAMPLES, 0), "no sample is missing"
        assert record["mismatch/max"] < 1e-4, "the engine that is left computes with the trainer's weights"
    assert steps[-1]["sync/version"] == STEPS - 1
    assert until_gone(processes, 60) == []
    traces.assert_nothing_shared()
