"""A whole run whose judge the pipeline starts, and what a run writes about keys: nothing."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tests.integration.test_runs import SMALL, Run, until_gone

KEY = "sk-a-key-that-nobody-may-see"
JUDGE = "judges={main: {path: examples/models/tiny, dtype: float32, strategy: {max_model_len: 64, max_running_requests: 16}}}"
ARGS = (
    "{server: main, api: completions, template: '{prompt}{response}', pattern: '^.*?(7|$)', "
    "choices: {'7': 1, '': 0}, max_tokens: 32, api_key_env: JUDGE_KEY}"
)


def run_with_judge(folder: Path, steps: int, **reward: int) -> Run:
    """A run in which a judge scores both domains."""
    settings = "".join(f", {name}: {value}" for name, value in reward.items())
    rewards = [f"domains.{name}.reward={{name: judge, args: {ARGS}, timeout_s: 60{settings}}}" for name in ("add", "repeat")]
    return Run(folder, "tiny_grpo", *SMALL, f"steps={steps}", JUDGE, *rewards, environment={"JUDGE_KEY": KEY})


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_run_starts_its_judge_and_shares_it_among_domains(tmp_path: Path) -> None:
    with run_with_judge(tmp_path, steps=2) as run:
        run.wait_for_step(1)
        processes = run.tree()
        servers = [one for one in processes if is_server(one)]
        assert len(servers) == 1, "one for both domains"
        code, output = run.finish(400)
    assert code == 0, output
    judged = [sample for step in (1, 2) for sample in run.samples(step) if sample["domain"] in ("add", "repeat")]
    assert judged and all(sample["score"] in (0.0, 1.0) and sample["details"]["extracted"] in ("7", "") for sample in judged)
    assert [record["rollout/failed"] for record in run.metrics() if "rollout/failed" in record] == [0, 0]
    assert until_gone(processes, 5) == []
    assert KEY not in output
    for file in run.folder.rglob("*"):
        assert not file.is_file() or KEY.encode() not in file.read_bytes(), file


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_judge_whose_worker_is_killed_starts_again_at_its_address_and_no_sample_is_lost(tmp_path: Path) -> None:
    with run_with_judge(tmp_path, steps=4, retries=5) as run:
        run.wait_for_step(1)
        (server,) = (one for one in run.tree() if is_server(one))
        (worker,) = (one for one in server.parents() if "JudgeWorker" in one.name() or "JudgeWorker" in " ".join(one.cmdline()))
        worker.kill()
        code, output = run.finish(500)
    assert code == 0, output
    told = output.replace("\n", " ")
    assert "judges.main rank 0 is lost and starts again" in told and "judges.main is back" in told, output
    assert [record["rollout/failed"] for record in run.metrics() if "rollout/failed" in record] == [0] * 4
    assert not server.is_running()


def is_server(process: psutil.Process) -> bool:
    try:
        command = process.cmdline()
    except psutil.Error:
        return False
    return "roll_lite.distributed.strategy.vllm.compat.judge_server" in command
