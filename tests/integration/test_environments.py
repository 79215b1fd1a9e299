"""Whole runs with an environment: every row is recomputed from its tokens, and a killed worker costs an attempt."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet as pq
import pytest
from engine_harness import require

from roll_lite.data.dumps import load_dump
from tests.integration.test_lost_engines import hosts
from tests.integration.test_replay import checksums
from tests.integration.test_runs import ROOT, Run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(590)]

DOMAIN = (
    "domains.add={data: {train: examples/data/add_train.jsonl}, sampling: {max_prompt_tokens: 12, max_tokens: 40}, "
    "environment: {name: function, function: tests.workers.environment_cases.second_chance, max_turns: 2}}"
)
SMALL = ("~domains.make", "~domains.repeat", "rollout.prompts_per_step=8", "validation.enabled=false", DOMAIN)

EPS = "actor_train.optimizer.eps=1e-6"
"""Else Adam turns rounding of a gradient that is almost 0 into a whole step."""


def says(script: str, folder: Path) -> str:
    done = subprocess.run([sys.executable, f"examples/{script}", folder], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def test_two_turns_from_yaml_to_recomputed_weights(engine: str, tmp_path: Path) -> None:
    require(engine)
    with Run(tmp_path, "tiny_grpo", *SMALL, "steps=2", f"actor_infer.strategy={engine}", EPS) as run:
        code, output = run.finish(400)
    assert code == 0, output
    samples = [sample for step in (1, 2) for sample in run.samples(step)]
    for sample in samples:
        said = [message["content"] for message in sample["episode"]["messages"]]
        responses, turns = said[1::2], len(sample["episode"]["rewards"])
        assert said[0::2] == [sample["prompt"]] * turns and sample["response"] == "\n".join(responses)
        assert (turns == 2) == (responses[0] != sample["answer"]), "the first right answer ends the episode"
        assert sample["correct"] == (responses[-1] == sample["answer"]) == (sample["score"] == 1.0)
    assert 0 < sum(len(sample["episode"]["rewards"]) == 2 for sample in samples) < len(samples)
    assert all(step["mismatch/max"] < 1e-4 for step in run.metrics() if "mismatch/max" in step)
    assert "actor weights" in says("recompute.py", run.folder)
    assert "the ledger adds up" in says("audit.py", run.folder)


@pytest.mark.nightly
def test_a_deterministic_run_with_fewer_places_than_samples(tmp_path: Path) -> None:
    """It waits until all samples have asked, so each has a place; the number of places changes nothing."""
    require("vllm")
    told = []
    for places in (1, 64):
        settings = (
            "deterministic=true",
            "steps=2",
            "rollout.samples_per_prompt=4",
            DOMAIN.replace("max_turns", f"parallel: {places}, max_turns"),
        )
        with Run(tmp_path / str(places), "tiny_grpo", *SMALL[:-1], *settings) as run:
            code, output = run.finish(400)
        assert code == 0, output
        told.append([(one["prompt_uid"], one["index"], one["response"]) for step in (1, 2) for one in run.samples(step)])
    assert len(told[0]) == 64 and sorted(told[0]) == sorted(told[1])


AGENT = (
    "domains.add={data: {train: examples/data/add_train.jsonl, validation: examples/data/add_validation.jsonl}, "
    "sampling: {max_prompt_tokens: 12, max_tokens: 60}, "
    "environment: {name: endpoint, function: tests.workers.environment_cases.branching, max_turns: 12}}"
)
BRANCHES = (
    "rollout.samples_per_prompt=8",
    "algorithm.old_log_probs=recompute",
    "algorithm.mini_batches=2",
    "algorithm.aggregation=sequence_mean_token_mean",
)


@pytest.mark.parametrize("engine", ["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "settings",
    [("steps=2",), pytest.param(("steps=3", "rollout.supply=async", "rollout.max_staleness=1"), marks=pytest.mark.nightly)],
    ids=["sync", "async"],
)
def test_an_agents_branches_from_its_requests_to_recomputed_weights(engine: str, settings: tuple[str, ...], tmp_path: Path) -> None:
    """Every row's log-probs are the engine's: so each response trains behind the tokens that it was sampled behind."""
    require(engine)
    chosen = (
        *SMALL[:-1],
        "~domains.add.reward",
        AGENT,
        *BRANCHES,
        *settings,
        f"actor_infer.strategy={engine}",
        "rollout.dump=true",
        "batches.write=always",
        EPS,
    )
    with Run(tmp_path, "tiny_grpo", *chosen) as run:
        code, output = run.finish(500)
    assert code == 0, output
    metrics = [step for step in run.metrics() if "mismatch/max" in step]
    assert metrics and (len(settings) > 1 or all(step["mismatch/max"] < 1e-4 for step in metrics)), "without samples of older weights"
    assert all(step["episode/rows"] > 1.2 for step in metrics)
    dumped = load_dump(Path(run.folder) / "dumps/step_000001.parquet")
    rows = Counter(zip(dumped.tensor("group").tolist(), dumped.tensor("index").tolist(), strict=True))
    told = {(sample["group"], sample["index"]): len(sample["episode"]["branches"]) + 1 for sample in run.samples(1)}
    assert rows == told and len(told) == 64
    credit = [json.loads(line) for line in (run.folder / "credit/step_000001.jsonl").read_text().splitlines()]
    lines = {(line["group"], line["index"], line["branch"]) for line in credit}
    assert len(credit) == len(lines) and lines == {(*name, row) for name, count in told.items() for row in range(count)}
    assert "actor weights" in says("recompute.py", run.folder)
    assert "the ledger adds up" in says("audit.py", run.folder)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_turns_after_an_update_in_mid_episode_have_the_trainers_log_probs(engine: str, tmp_path: Path) -> None:
    """The engine's cache holds the first turns as the old weights read them: what follows must not be sampled from it."""
    require(engine)
    ahead = ("rollout.supply=one_step_off", "rollout.on_sync=pause", "algorithm.old_log_probs=recompute", "batches.write=always")
    with Run(
        tmp_path, "tiny_guess", *ahead, "rollout.prompts_per_step=8", "steps=4", "validation=null", f"actor_infer.strategy={engine}"
    ) as run:
        code, output = run.finish(500)
    assert code == 0, output
    lines = [json.loads(line) for line in (run.folder / "ledger.jsonl").read_text().splitlines()]
    turns_of = {line["group"]: line["turns"] for line in lines if line["event"] == "group" and line["end"] == "delivered"}
    differences: list[float] = []
    for version in range(4):
        for row in pq.read_table(run.folder / f"batches/step_{version + 1:06}/rows_0000.parquet").to_pylist():
            turns = turns_of[row["group"]][row["index"]]
            mask = np.array([False, *row["response_mask"][1:], False])  # as log-probs, which begin with the second token
            starts, ends = np.flatnonzero(mask[1:] & ~mask[:-1]), np.flatnonzero(mask[:-1] & ~mask[1:])
            gap = np.abs(np.subtract(row["rollout_log_probs"], row["old_log_probs"]))
            for (_, first, last), start, end in zip(turns, starts, ends, strict=True):
                if first == last == version > turns[0][1]:
                    differences += gap[start:end].tolist()
    assert len(differences) > 50 and max(differences) < 1e-4


PROGRAM = """
import json, os, sys, urllib.request
def ask(messages):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
messages = json.load(sys.stdin)["messages"]
for _ in range(2):
    messages += [ask(messages), {"role": "user", "content": "Again."}]
print("thinking aloud")
print("answer:", messages[-2]["content"].split())
"""


@pytest.mark.nightly
def test_a_program_is_trained_by_its_command(tmp_path: Path) -> None:
    """A process of its own in each episode, without any package. Its last line of output is scored."""
    require("vllm")
    (tmp_path / "agent.py").write_text(PROGRAM)
    environment = f"{{name: endpoint, function: null, command: [{sys.executable}, {tmp_path / 'agent.py'}], max_turns: 3}}"
    settings = (f"domains.calculator.environment={environment}", "rollout.prompts_per_step=4", "steps=2", "validation=null")
    with Run(tmp_path / "run", "tiny_agent", *settings, "batches.write=always", EPS) as run:
        code, output = run.finish(500)
    assert code == 0, output
    for sample in (sample for step in (1, 2) for sample in run.samples(step)):
        said = sample["episode"]["messages"]
        assert [message["role"] for message in said] == ["user", "assistant", "user", "assistant"]
        assert sample["episode"]["answer"] == f"answer: {said[-1]['content'].split()}"
    assert all(step["rollout/failed"] == 0 and step["mismatch/max"] < 1e-4 for step in run.metrics() if "time/step" in step)
    assert "actor weights" in says("recompute.py", run.folder)
    assert "the ledger adds up" in says("audit.py", run.folder)


@pytest.mark.nightly
@pytest.mark.parametrize("sequence", ["sample", "row"])
def test_branches_with_a_critic_and_their_replay(sequence: str, tmp_path: Path) -> None:
    """Recomputed by plain transformers, and repeated from their dump with the same weights bit for bit."""
    require("vllm")
    settings = (*BRANCHES, "rollout.samples_per_prompt=4", f"algorithm.sequence={sequence}", "algorithm.critic_warmup_steps=0", "steps=2")
    settings += ("algorithm.advantage.bootstrap_truncated=true",)
    chosen = (*SMALL[:-1], "~domains.add.reward", AGENT, *settings, EPS, "critic.optimizer.eps=1e-6")
    with Run(tmp_path / "whole", "tiny_ppo", *chosen, "rollout.dump=true", "batches.write=always") as run:
        code, output = run.finish(500)
    assert code == 0, output
    assert all(step["episode/rows"] > 1.2 for step in run.metrics() if "time/step" in step)
    told = says("recompute.py", run.folder)
    assert "actor weights" in told and "critic weights" in told
    assert "the ledger adds up" in says("audit.py", run.folder)
    with Run(tmp_path / "again", "tiny_ppo", *chosen, "mode=train_only", f"replay.path={run.folder}") as again:
        code, output = again.finish(300)
    assert code == 0, output
    assert checksums(again.folder) == checksums(run.folder)


PER_TURN = (
    "domains.add={data: {train: examples/data/add_train.jsonl, validation: examples/data/add_validation.jsonl}, "
    "sampling: {max_prompt_tokens: 12, max_tokens: 40}, environment: {name: function, "
    "function: tests.workers.environment_cases.each_counts, max_turns: 2, rewards: per_turn}}"
)

SUMMED = PER_TURN.replace(", rewards: per_turn", "")


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_rewards_of_turns_with_a_critic_a_validation_and_a_replay(engine: str, tmp_path: Path) -> None:
    """PPO over two turns: recomputed by plain transformers, and repeated from its dump with the same weights bit for bit."""
    require(engine)
    settings = ("rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation.every=1", "deterministic=true", "steps=2")
    chosen = (*SMALL[:2], "~domains.add.reward", PER_TURN, *settings, "algorithm.critic_warmup_steps=0")
    whole = (*chosen, f"actor_infer.strategy={engine}", "rollout.dump=true", "batches.write=always")
    with Run(tmp_path / "whole", "tiny_ppo", *whole, EPS, "critic.optimizer.eps=1e-6") as run:
        code, output = run.finish(500)
    assert code == 0, output
    for sample in run.samples(1):
        assert len(sample["episode"]["rewards"]) == 2 and sample["score"] == pytest.approx(sum(sample["episode"]["rewards"]))
    assert all(step["mismatch/max"] < 1e-4 for step in run.metrics() if "mismatch/max" in step)
    validations = [line for line in run.metrics() if "validation/accuracy" in line]
    assert len(validations) == 3 and all(line["validation/samples"] > 0 for line in validations), "before the first step, and after each"
    told = says("recompute.py", run.folder)
    assert "actor weights" in told and "critic weights" in told
    assert "the ledger adds up" in says("audit.py", run.folder)
    replayed = (*chosen, "mode=train_only", f"replay.path={run.folder}", "validation.enabled=false")
    with Run(tmp_path / "again", "tiny_ppo", *replayed, EPS, "critic.optimizer.eps=1e-6") as again:
        code, output = again.finish(300)
    assert code == 0, output
    assert checksums(again.folder) == checksums(run.folder)


@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engine_that_dies_in_mid_episode(engine: str, tmp_path: Path) -> None:
    """Its conversations continue at the other engine, with the tokens that they have."""
    require(engine)
    settings = ("steps=6", "actor_infer.devices=2", "actor_infer.restarts=0", f"actor_infer.strategy={engine}")
    with Run(tmp_path, "tiny_grpo", *SMALL[:2], "~domains.add.reward", "validation=null", SUMMED, *settings) as run:
        run.wait_for_step(2)
        hosts(run.tree())[0].kill()
        code, output = run.finish(400)
    assert code == 0 and "1 of 2 engines are left" in output, output
    steps = [step for step in run.metrics() if "time/step" in step]
    assert len(steps) == 6 and all((step["rollout/samples"], step["rollout/failed"]) == (256, 0) for step in steps)
    assert all(step["mismatch/max"] < 1e-4 for step in steps)
    assert "the ledger adds up" in says("audit.py", run.folder)


@pytest.mark.nightly
def test_a_killed_worker_in_an_asynchronous_run(tmp_path: Path) -> None:
    require("vllm")
    settings = ("steps=12", "rollout.supply=async", "rollout.max_staleness=2", "rollout.on_sync=abort")
    with Run(tmp_path, "tiny_grpo", *SMALL, *settings) as run:
        while not (file := run.run_dir / "latest/metrics.jsonl").exists() or "time/step" not in file.read_text():
            assert run.process.poll() is None, run.finish()[1]
        killed = 0
        for process in run.tree():
            with suppress(psutil.NoSuchProcess):
                if "EnvironmentWorker" in " ".join(process.cmdline()):
                    process.kill()
                    killed += 1
        code, output = run.finish(400)
    assert killed == 1
    assert code == 0, output
    assert sum(step.get("environment/workers_replaced", 0) for step in run.metrics()) == 1
    assert sum(step.get("rollout/failed", 0) for step in run.metrics()) == 0, "an attempt more, and no sample less"
    assert "the ledger adds up" in says("audit.py", run.folder)
