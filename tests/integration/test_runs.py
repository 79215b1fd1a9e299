"""Whole runs, started as a user starts them: the real Megatron-Core, the real vLLM, the real Ray, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from engine_harness import Make, require
from left_behind import Traces

from roll_lite.observability.view.runs import Run as ViewedRun
from roll_lite.pipeline.checkpoint_files import LIST_FILE, finished_checkpoints, read_list
from roll_lite.pipeline.checkpoint_files import record as record_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["rollout.prompts_per_step=6", "rollout.samples_per_prompt=4", "validation.enabled=false"]
START_SECONDS = 240
ENGINES = ("vllm", pytest.param("sglang", marks=pytest.mark.nightly))


class Run:
    """A run in a process of its own."""

    def __init__(
        self, folder: Path, config: str, *overrides: str, environment: dict[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """`prefix`: a command that executes the rest of its line."""
        self.run_dir = folder / "runs"
        script = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", config]
        command = [*prefix, *script, f"run_dir={self.run_dir}", *overrides]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | (environment or {}),
            start_new_session=True,
        )
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read)  # a full pipe would stop the run
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            self._output.extend(lines)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.finish(60)

    def finish(self, timeout: float = START_SECONDS) -> tuple[int, str]:
        """Exit code and everything it said, once no process of the run is left to say more."""
        self._reader.join(timeout)
        if self._reader.is_alive():
            raise subprocess.TimeoutExpired(self.process.args, timeout)
        return self.process.wait(), "".join(self._output)

    @property
    def folder(self) -> Path:
        return (self.run_dir / "latest").resolve()

    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def samples(self, step: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "samples" / f"step_{step:06d}.jsonl").read_text().splitlines()]

    def wait_for_step(self, step: int) -> None:
        deadline = time.monotonic() + START_SECONDS
        wanted = self.run_dir / "latest" / "samples" / f"step_{step:06d}.jsonl"
        while not wanted.exists():
            assert self.process.poll() is None, f"the run ended early:\n{self.finish()[1]}"
            assert time.monotonic() < deadline, f"no step {step} after {START_SECONDS} s"
            time.sleep(0.05)

    def tree(self) -> list[psutil.Process]:
        """Every process of the run, Ray's and the engines' too."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Make:
    """The name of one that is installed."""
    make: Make = request.param
    require(make)
    return make


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    with ExitStack() as runs:
        yield lambda *settings, **options: runs.enter_context(Run(tmp_path, *settings, **options))


def until_gone(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that still run after that time."""
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def command_of(process: psutil.Process) -> list[str]:
    """Empty where it has ended: the sandbox's programs come and go."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def worker(processes: list[psutil.Process], name: str) -> psutil.Process:
    found = [process for process in processes if name in " ".join(command_of(process))]
    assert found, f"no process {name}"
    return found[0]


def engine_core(processes: list[psutil.Process]) -> psutil.Process:
    """vLLM's own process, a child of the worker that hosts it: the one with the largest memory."""
    return max(worker(processes, "InferWorker").children(recursive=True), key=lambda process: process.memory_info().rss)


def test_grpo_runs_from_end_to_end_and_leaves_what_it_promises(start: Any) -> None:
    run = start(
        "tiny_grpo",
        *SMALL[:2],
        "steps=2",
        "validation.every=0",
        "validation={enabled: true, samples_per_prompt: 2, sampling: {temperature: 0.9, max_tokens: 10}}",
        "weight_sync.verify=full",
        "checkpoint.every=2",
        "checkpoint.asynchronous=true",
    )
    code, output = run.finish()
    assert code == 0, output
    summary = run.summary()
    assert summary["exit"] == "completed" and summary["steps"] == 2
    assert set(summary["accuracy"]) == {"overall", "add", "make", "repeat"}
    assert all(0 <= share <= 1 for entry in summary["accuracy"].values() for share in entry.values())
    held_out = summary["validation"]
    for name in ("overall", "add", "make", "repeat"):
        assert held_out[name]["accuracy"] == summary["accuracy"][name]
        assert all(held_out[name]["pass@2"][when] >= held_out[name]["accuracy"][when] for when in ("before", "after"))
        assert ("maj@2" in held_out[name]) is (name != "make"), "programs have no answers to compare"
    said = [json.loads(line) for line in (run.folder / "samples" / "validation_000000.jsonl").read_text().splitlines()]
    assert max(sample["response_tokens"] for sample in said) <= 10 and {sample["index"] for sample in said} == {0, 1}
    assert "pass@2" in output
    assert summary["tokens"]["trained"] > 0
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "report.html cannot be written" not in output
    command = [sys.executable, "-I", "-S", "examples/audit.py", run.folder]
    audit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert audit.returncode == 0 and "steps: 2; 2 actor trained, 2 updates" in audit.stdout, audit.stdout + audit.stderr
    assert_can_be_viewed(run.folder)
    assert (run.folder / "model" / "model.safetensors").stat().st_mode == (run.folder / "config.yaml").stat().st_mode
    (checkpoint,) = finished_checkpoints(run.folder)
    listed = read_list(checkpoint)
    files = {
        str(path.relative_to(checkpoint)): record_of(path) for path in checkpoint.rglob("*") if path.is_file() and path.name != LIST_FILE
    }
    assert listed == files, "processes wrote it, and everything of it is listed"
    steps = [record for record in run.metrics() if "time/step" in record]
    assert [record["step"] for record in steps] == [1, 2]
    for record in steps:
        phases = {name: s for name, s in record.items() if name.startswith("time/") and name not in ("time/step", "time/other")}
        assert sum(seconds for name, seconds in phases.items() if name.count("/") == 1) >= 0.95 * record["time/step"]
        assert 0 < phases["time/train/actor_train"] <= phases["time/train"]
        assert record["rollout/samples"] == 24 and record["rollout/failed"] == 0
        assert record["mismatch/max"] < 1e-4, "engine and trainer disagree about the same tokens in float32"
    assert steps[-1]["sync/transport_megabytes_per_second/shared_memory"] > 0
    assert len(run.samples(1)) == 24
    credit = [json.loads(line) for line in (run.folder / "credit/step_000001.jsonl").read_text().splitlines()]
    scores: dict[int, list[float]] = {}
    for sample in run.samples(1):
        assert sample["step"] == 1 and 0 < sample["asked_at"] <= sample["generated_at"] <= sample["scored_at"]
        scores.setdefault(sample["group"], []).append(sample["score"])
    assert len(credit) == 24
    for line in credit:
        own = scores[line["group"]]
        spread = statistics.stdev(own)
        expected = (own[line["index"]] - statistics.fmean(own)) / (spread + 1e-6) if spread else 0.0
        assert (line["score"], line["reward"], line["train_weight"]) == (own[line["index"]], own[line["index"]], 1.0)
        assert line["advantage"] == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def assert_can_be_viewed(folder: Path) -> None:
    """A report is there, every sample is indexed, and a group has its tokens."""
    assert 'id="content"' in (folder / "report.html").read_text(encoding="utf-8")
    viewed = ViewedRun("run", folder)
    viewed.index.refresh()
    lines = [line for file in (folder / "samples").glob("*.jsonl") for line in file.read_text().splitlines()]
    assert sum(one["count"] for one in viewed.index.counts({}, "kind")) == len(lines)
    (sample,) = viewed.index.page({"kind": ["step"], "advantage_min": ["0"]}, "step", 0, 1)
    (tokens,) = viewed.tokens(sample["step"], sample["group"])[sample["index"]]
    assert "".join(tokens["texts"]).startswith(sample["prompt"]) and len(tokens["advantages"]) == len(tokens["texts"])
    assert len(viewed.timeline(1)["spans"]) == len((folder / "samples/step_000001.jsonl").read_text().splitlines())


@pytest.mark.nightly
@pytest.mark.slow
def test_roles_that_leave_their_devices_when_idle_come_back_for_everything_that_needs_them(start: Any) -> None:
    """PPO: actor and critic, after a warm-up of the critic."""
    offload = [f"{role}.offload=true" for role in ("actor_train", "actor_infer", "reference", "critic")]
    extra = [
        "validation.enabled=true",
        "validation.every=1",
        "weight_sync.verify=full",
        "checkpoint.every=1",
        "checkpoint.asynchronous=true",
    ]
    run = start("tiny_ppo", *SMALL, *offload, *extra, "steps=3", "algorithm.critic_warmup_steps=1")
    code, output = run.finish()
    assert code == 0, output
    assert run.summary()["exit"] == "completed"
    first, second, _ = [record for record in run.metrics() if "time/step" in record]
    assert "critic/loss" in first and "actor/loss" not in first, "the critic's warm-up"
    assert "critic/loss" in second and "actor/loss" in second
    assert 0 < second["actor/approx_kl"] < 1, "the updates of a step move the policy, and do not throw it away"
    assert first["credit/kl_in_reward"] == pytest.approx(0, abs=1e-5), "the actor still is the reference"
    assert [folder.name for folder in finished_checkpoints(run.folder)] == ["step_000002", "step_000003"]
    for record in [record for record in run.metrics() if "time/step" in record][1:]:
        assert record["offload/freed_megabytes/reference"] == record["offload/in_megabytes/reference"] > 0
        assert record["offload/out_megabytes/reference"] == 0, "its weights have been on the host since the start"
        assert 0 < record["offload/out_megabytes/actor_train"] < record["offload/freed_megabytes/actor_train"]
    assert (run.folder / "critic" / "model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.nightly
def test_an_exported_critic_begins_another_run(start: Any) -> None:
    run = start("tiny_ppo", *SMALL, "steps=1", "algorithm.critic_warmup_steps=0")
    code, output = run.finish()
    assert code == 0, output
    exported = f"critic.path={run.folder / 'critic'}"
    again = start("tiny_ppo", *SMALL, "steps=1", "critic.init=path", exported, "algorithm.critic_warmup_steps=0")
    code, output = again.finish()
    assert code == 0, output


@pytest.mark.slow
@pytest.mark.nightly
def test_a_data_set_is_learned_beside_the_policys_samples(start: Any, tmp_path: Path) -> None:
    """The tiny model has never seen these answers."""
    data = tmp_path / "answers.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{number}+1=", "answer": "zzzz"}) + "\n" for number in range(10, 40)))
    ptx = f"algorithm.ptx={{data: {{train: {data}}}, coef: 1.0, samples: 8, max_tokens: 64}}"
    run = start("tiny_grpo", *SMALL, ptx, "steps=3", "actor_train.devices=2")
    code, output = run.finish()
    assert code == 0, output
    losses = [record["actor/ptx_loss"] for record in run.metrics() if "actor/ptx_loss" in record]
    assert len(losses) == 3 and losses[2] < losses[1] < losses[0]
    assert not (run.folder / "batches").exists(), "nothing could be computed from them"


@pytest.mark.slow
@pytest.mark.nightly
def test_a_reference_follows_the_actor_and_is_in_checkpoints(start: Any) -> None:
    """The KL to what the actor was two steps ago is 0 right after each renewal, also where the run was resumed in between."""
    settings = ["algorithm.critic_warmup_steps=0", "reference.refresh.every=2", "actor_train.ema.decay=0.5", "checkpoint.every=2"]
    kl: list[float] = []
    folder: Path | None = None
    for last in (2, 4):
        run = start("tiny_ppo", *SMALL, *settings, f"steps={last}", *([f"checkpoint.resume={folder}"] if folder is not None else []))
        code, output = run.finish()
        assert code == 0, output
        kl += [abs(record["credit/kl_in_reward"]) for record in run.metrics() if "credit/kl_in_reward" in record]
        folder = run.folder
        assert (folder / "model_ema" / "model.safetensors").is_file() and not (folder / "reference").exists()
    assert len(kl) == 4 and max(kl[0], kl[2]) < 1e-5 < min(kl[1], kl[3])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("old", ["rollout", "recompute"])
def test_kl_in_rewards_and_loss_entropy_bonus_and_mini_batches_go_together(start: Any, old: str) -> None:
    settings = [f"algorithm.old_log_probs={old}", "algorithm.critic_warmup_steps=0", "algorithm.kl_in_loss.coef=0.01"]
    run = start(
        "tiny_ppo", *SMALL, *settings, "algorithm.entropy_coef=0.01", "algorithm.mini_batches=2", "steps=2", "actor_train.devices=2"
    )
    code, output = run.finish()
    assert code == 0, output
    first, second = [record for record in run.metrics() if "actor/loss" in record]
    for name in ("actor/kl_loss", "actor/kl_ref", "credit/kl_in_reward", "mismatch/max"):
        assert name in first and name in second
    assert first["mismatch/max"] < 1e-4
    assert abs(first["credit/kl_in_reward"]) < 1e-5 < abs(second["credit/kl_in_reward"])


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_tensor_parallel_engine_serves_a_run(start: Any) -> None:
    layout = ["actor_infer.devices=2", "actor_infer.strategy.tensor_parallel=2"]
    run = start("tiny_grpo", *SMALL, *layout, "weight_sync.verify=full", "steps=2")
    code, output = run.finish(2 * START_SECONDS)
    assert code == 0, output
    assert all(record["mismatch/max"] < 1e-4 for record in run.metrics() if "time/step" in record)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "argument", "cause"),
    [
        ("vllm", "{kv_cache_dtype: odd}", "cache_dtype"),
        pytest.param("sglang", "{schedule_policy: odd}", "'odd' is not a valid", marks=pytest.mark.nightly),
    ],
    indirect=["engine"],
)
def test_an_engine_that_does_not_start_says_why(start: Any, engine: str, argument: str, cause: str) -> None:
    run = start("tiny_grpo", *SMALL, f"actor_infer.strategy={engine}", f"actor_infer.strategy.engine_args={argument}")
    code, output = run.finish()
    assert code == 1
    assert "actor_infer rank 0 failed in initialize" in output and cause in output.split("Traceback")[0], output


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ["vllm", "sglang"], indirect=True)
def test_deterministic_runs_repeat_sample_for_sample_and_a_resumed_run_goes_on_like_an_uninterrupted_one(start: Any, engine: str) -> None:
    settings = [*SMALL, f"actor_infer.strategy={engine}", "deterministic=true", "checkpoint.every=2", "checkpoint.export_model=false"]

    def content(run: Run, step: int) -> list[tuple[str, str, float]]:
        return [(sample["prompt"], sample["response"], sample["score"]) for sample in run.samples(step)]

    whole = start("tiny_grpo", *settings, "steps=3")
    code, output = whole.finish()
    assert code == 0, output
    uninterrupted = [content(whole, step) for step in (1, 2, 3)]
    losses = [record["actor/loss"] for record in whole.metrics() if "actor/loss" in record]
    assert [folder.name for folder in finished_checkpoints(whole.folder)] == ["step_000002", "step_000003"], "the last step writes one too"
    checkpoint = whole.folder / "checkpoints" / "step_000002"

    again = start("tiny_grpo", *settings, "steps=2")
    assert again.finish()[0] == 0
    assert [content(again, step) for step in (1, 2)] == uninterrupted[:2]
    assert [record["actor/loss"] for record in again.metrics() if "actor/loss" in record] == losses[:2]

    (whole.run_dir / "latest").unlink()
    (whole.run_dir / "latest").symlink_to(checkpoint.parents[1])
    resumed = start("tiny_grpo", *settings, "steps=3", f"checkpoint.resume={whole.run_dir / 'latest' / 'checkpoints' / checkpoint.name}")
    code, output = resumed.finish()
    assert code == 0, output
    assert resumed.summary()["resumed_after"] == 2 and "resumed after step 2" in output
    assert content(resumed, 3) == uninterrupted[2]
    assert [record["actor/loss"] for record in resumed.metrics() if "actor/loss" in record] == losses[2:]


LAYOUTS = {
    "one rank": [],
    "two data-parallel ranks": ["actor_train.devices=2", "critic.devices=2", "reference.devices=2"],
    "two engines, small micro-batches": ["actor_infer.devices=2", "actor_train.train_micro_batch_size=3"],
    "two tensor-parallel ranks": [
        f"{role}.{key}=2" for role in ("actor_train", "critic", "reference") for key in ("devices", "strategy.tensor_parallel")
    ],
}
_, TWO_RANKS, TWO_ENGINES, TENSOR_PARALLEL = LAYOUTS


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([TWO_RANKS], id="data-parallel"),
        pytest.param([TWO_ENGINES], id="engines", marks=pytest.mark.nightly),
        pytest.param([TENSOR_PARALLEL], id="tensor-parallel", marks=pytest.mark.nightly),
    ],
)
def test_the_layout_of_ranks_and_engines_changes_no_loss(start: Any, layouts: list[str]) -> None:
    settings = [*SMALL, "deterministic=true", "steps=1", "checkpoint.export_model=false", "algorithm.mini_batches=2"]
    steps = {}
    for name in ("one rank", *layouts):
        run = start("tiny_ppo", *settings, "algorithm.critic_warmup_steps=0", *LAYOUTS[name])
        code, output = run.finish()
        assert code == 0, f"{name}:\n{output}"
        (steps[name],) = [record for record in run.metrics() if "actor/loss" in record]
    for name, step in steps.items():
        for metric in ("actor/loss", "actor/grad_norm", "critic/loss", "critic/grad_norm", "credit/advantage_std", "actor/tokens"):
            assert step[metric] == pytest.approx(steps["one rank"][metric], rel=1e-4, abs=1e-6), f"{metric} under {name}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
def test_the_demo_learns_every_domain(start: Any, engine: str) -> None:
    run = start("tiny_grpo", f"actor_infer.strategy={engine}", "weight_sync.verify=full")
    code, output = run.finish(800)
    assert code == 0, output
    assert all(record["mismatch/max"] < 1e-4 for record in run.metrics() if "time/step" in record)
    assert_learned(run)


def assert_learned(run: Run) -> None:
    """The bars of the demo."""
    accuracy = run.summary()["accuracy"]
    assert accuracy["overall"]["after"] >= accuracy["overall"]["before"] + 0.20
    for domain in ("add", "make", "repeat"):
        assert accuracy[domain]["after"] >= accuracy[domain]["before"], domain


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("config", ["tiny_async", "tiny_dapo"])
def test_generation_beside_training_and_dynamic_sampling_learn_as_the_demo_does(start: Any, config: str) -> None:
    run = start(config, "weight_sync.verify=full")
    code, output = run.finish(800)
    assert code == 0, output
    assert_learned(run)
    held_out = [record for record in run.metrics() if "validation/accuracy" in record]
    assert [record["step"] for record in held_out] == [0, 10, 20, 30]
    assert [record["validation/version_min"] for record in held_out] == [0, 10, 20, 30]
    assert held_out[-1]["validation/version_max"] == 30, "the last one is waited for"
    steps = [record for record in run.metrics() if "time/step" in record]
    if config == "tiny_async":
        assert all(record["rollout/groups"] == 32 for record in steps)
        assert 0 < max(record["rollout/staleness_max"] for record in steps) <= 2
        assert sum(record["rollout/stale_groups"] for record in steps) == 0
    else:
        assert sum(record["rollout/filtered_groups"] for record in steps) > 0
        assert all(record["solved/all"] == record["solved/none"] == record["rollout/staleness_max"] == 0 for record in steps)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES, indirect=True)
@pytest.mark.parametrize(
    "how",
    [
        ["rollout.on_sync=abort"],
        pytest.param(["rollout.on_sync=pause", "actor_infer.devices=2"], marks=pytest.mark.nightly),
        pytest.param(["rollout.supply=one_step_off"], marks=pytest.mark.nightly),
    ],
    ids=["abort", "pause", "one step off"],
)
def test_responses_under_way_go_on_with_new_weights(start: Any, how: list[str], engine: str) -> None:
    """Engines are slower than the training, and responses do not end together: updates come in the middle of some."""
    lengths = {"add": 40, "make": 52, "repeat": 64}
    given = [
        "rollout.on_sync=null",
        "algorithm.mismatch_correction=null",
        *how,
        *(f"domains.{name}.sampling.{key}={tokens}" for name, tokens in lengths.items() for key in ("max_tokens", "min_tokens")),
        f"actor_infer.strategy={engine}",
        "actor_infer.strategy.max_running_requests=6",
    ]
    run = start("tiny_async", *given, *SMALL, "steps=6")
    code, output = run.finish()
    assert code == 0, output
    steps = [record for record in run.metrics() if "time/step" in record]
    assert max(record["rollout/staleness_max"] for record in steps) in (1, 2)
    assert all(record["rollout/failed"] == record["rollout/stale_groups"] == 0 for record in steps)
    samples = [sample for step in range(1, 7) for sample in run.samples(step)]
    assert all(sample["response_tokens"] == lengths[sample["domain"]] for sample in samples), "what was interrupted is whole, too"
    versions = [sample["versions"] for sample in samples]
    assert any(len(spans) > 1 for spans in versions) == ("one_step_off" not in how[0])
    assert all(spans == sorted(spans) and spans[0][0] == 0 for spans in versions)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_tensor_parallel_ranks_train_a_model_that_generates_with_transformers(start: Any) -> None:
    run = start("tiny_grpo", *SMALL, "steps=2", "actor_train.devices=2", "actor_train.strategy.tensor_parallel=2")
    code, output = run.finish()
    assert code == 0, output
    assert_generates_with_transformers(run.folder / "model", run.samples(1)[0]["prompt"])


def assert_generates_with_transformers(exported: Path, prompt: str) -> None:
    """The model is trained, from the tiny one."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(ROOT / "examples" / "models" / "tiny", dtype=torch.float32)
    moved = max(float((new - old).abs().max()) for new, old in zip(model.parameters(), base.parameters(), strict=True))
    assert 0 < moved < 0.1
    tokens = AutoTokenizer.from_pretrained(exported)(prompt, return_tensors="pt")
    assert model.generate(**tokens, max_new_tokens=8, do_sample=False).shape[1] > tokens["input_ids"].shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    ["ctrl-c", pytest.param("terminate", marks=pytest.mark.nightly), pytest.param("ctrl-c beside a validation", marks=pytest.mark.nightly)],
)
@pytest.mark.usefixtures("signals_arrive")
def test_an_interrupted_run_ends_within_seconds_and_leaves_no_process(start: Any, how: str) -> None:
    if "validation" in how:
        run = start("tiny_async", *SMALL[:2], "validation={samples_per_prompt: 32, every: 1000}", "steps=1000")
    else:
        run = start("tiny_grpo", *SMALL, "steps=1000")
    run.wait_for_step(2)
    assert not (run.folder / "samples" / "validation_000000.jsonl").exists(), "it is still under way"
    processes = run.tree()
    if how != "terminate":
        os.killpg(run.process.pid, signal.SIGINT)  # a terminal sends it to every process in the foreground
    else:
        run.process.terminate()
    code, output = run.finish(120)
    assert code == 130, output
    assert run.summary()["exit"] == "interrupted"
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("role", ["ActorWorker", "RolloutWorker", "EngineCore"])
def test_a_killed_worker_ends_the_run_with_its_role_and_the_cause(start: Any, role: str, tmp_path: Path) -> None:
    traces = Traces(tmp_path / "traces")
    run = start("tiny_grpo", *SMALL, "steps=1000", "actor_infer.restarts=0", "actor_train.restarts=0", "rollout.restarts=0")
    run.wait_for_step(2)
    processes = run.tree()
    victim = engine_core(processes) if role == "EngineCore" else worker(processes, role)
    victim.kill()
    code, output = run.finish(120)
    assert code == 1, output
    name = {"ActorWorker": "actor_train", "RolloutWorker": "rollouts", "EngineCore": "actor_infer"}[role]
    assert name in output and name in run.summary()["exit"]
    assert until_gone(processes, 60) == []
    traces.assert_nothing_shared()


@pytest.mark.nightly
@pytest.mark.parametrize("role", ["ActorWorker", "EngineCore"])
def test_a_stopped_process_ends_the_run_and_is_named(start: Any, role: str) -> None:
    """A rank by its silence, whatever is waited for; a process of the only engine by its own limit."""
    limits = ["limits.silence=10", "limits.engine_silence=5", "actor_infer.restarts=0", "actor_train.restarts=0"]
    run = start("tiny_grpo", *SMALL, "steps=100000", *limits)
    run.wait_for_step(2)
    processes = run.tree()
    victim = engine_core(processes) if role == "EngineCore" else worker(processes, role)
    victim.suspend()
    code, output = run.finish(120)
    assert code == 1, output
    if role == "ActorWorker":
        assert f"{victim.pid} is stopped, as by SIGSTOP" in output and f"stopped, as by SIGSTOP: {victim.pid} (" in output
    else:
        assert re.search(rf"its process {victim.pid} \(.+\) has been stopped, as by SIGSTOP, for 5 s \(limits.engine_silence\)", output)
    name = {"ActorWorker": "actor_train", "EngineCore": "actor_infer"}[role]
    assert f"{name} rank 0 failed in" in run.summary()["exit"]
    assert until_gone(processes, 60) == []


@pytest.mark.nightly
@pytest.mark.slow
def test_nothing_is_left_after_the_driver_was_killed(start: Any, tmp_path: Path) -> None:
    traces = Traces(tmp_path / "traces")
    run = start("tiny_grpo", *SMALL, "steps=1000")
    run.wait_for_step(1)
    processes = run.tree()
    assert len(processes) > 5
    run.process.kill()
    run.finish(30)
    assert until_gone(processes, 60) == []
    traces.assert_nothing_shared()
    assert run.summary()["exit"] == "failed: the driver was killed"


def test_a_wrong_configuration_ends_with_exit_code_2_before_anything_starts(start: Any) -> None:
    run = start("tiny_grpo", "actor_train.optimizer.learning_rate=1", "rollout.prompts_per_step=-1", "domains.add.reward.name=maths")
    code, output = run.finish(60)
    assert code == 2
    for path in ("actor_train.optimizer.learning_rate", "rollout.prompts_per_step", "domains.add.reward.name"):
        assert path in output
    assert not run.run_dir.exists()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_same_command_goes_on_after_its_driver_was_killed(tmp_path: Path) -> None:
    """In its own folder, each step once, bit for bit as a run that nobody disturbed."""
    settings = ["tiny_grpo", *SMALL[:2], "deterministic=true", "steps=6", "checkpoint.every=2", "checkpoint.resume=auto"]
    settings += ["validation.every=3", "validation.samples_per_prompt=1", "batches.write=always"]
    with Run(tmp_path / "quiet", *settings) as quiet:
        code, output = quiet.finish(400)
    assert code == 0 and "no checkpoint in" in output, output
    with Run(tmp_path / "killed", *settings) as first:
        first.wait_for_step(5)
        folder, processes = first.folder, first.tree()
        first.process.kill()
        first.finish()
    assert until_gone(processes, 60) == []
    with Run(tmp_path / "killed", *settings) as again:
        code, output = again.finish(400)
    assert code == 0 and again.folder == folder and "resumed after step 4" in output, output
    assert not (folder / "config-1.yaml").exists(), "the same command has the same configuration"
    ours, theirs = again.metrics(), quiet.metrics()
    kept = ("reward/score", "actor/grad_norm", "actor/loss", "validation/accuracy", "rollout/samples")
    assert [(line["step"], *(line.get(name) for name in kept)) for line in ours] == [
        (line["step"], *(line.get(name) for name in kept)) for line in theirs
    ]
    assert [line["step"] for line in ours if "time/step" in line] == list(range(1, 7))
    for name in ("model/model.safetensors", "updates.jsonl"):
        same = (folder / name).read_bytes() == (quiet.folder / name).read_bytes()
        assert same, name
    with Run(tmp_path / "killed", *settings) as over:
        code, output = over.finish(120)
    assert code == 0 and "all 6 steps are done" in output
