"""Where trainer and engine share a device, the state of one is there at a time: resident memory of a real run's processes.

On a CPU what can be seen of the trainer is all that Megatron-Core has on "the device" (its copies on the host stay), and of vLLM the KV
cache (its weights would move to where they are); SGLang frees nothing there. Shared memory, which both map, is that of buckets of weights:
never all weights.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from engine_harness import Make, require
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
KV_CACHE_MB = 256
BUCKET_MB = 8
BUFFERS_MB = 64
"""Room for two of them, for one that an engine keeps something of, for tensors larger than a bucket, and for what Ray shares."""
STEPS = 4
ROLES = ("trainer", "engine")


def larger_model(folder: Path) -> float:
    """The shipped one's architecture and tokenizer, random weights. Returns their size in MB."""
    shipped = ROOT / "examples/models/tiny"
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6, "layer_types": ["full_attention"] * 6}
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shipped, **sizes)).float()
    model.save_pretrained(folder)
    for file in shipped.glob("tokenizer*"):
        shutil.copy(file, folder)
    return sum(parameter.numel() for parameter in model.parameters()) * 4 / MIB


class Resident(NamedTuple):
    """MB of a process."""

    own: float
    shared: float


def resident(process: psutil.Process) -> Resident | None:
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
        return Resident(*(int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssShmem")))
    except (OSError, KeyError):
        return None


def names(root: psutil.Process) -> dict[str, psutil.Process]:
    """Every process of the run: "trainer" is the rank, "engine" the process in which it computes, of those below its worker the largest."""
    found = {"driver 0": root}
    for process in root.children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            if "ActorWorker" in command:
                found["trainer"] = process
            elif "InferWorker" in command and (below := process.children(recursive=True)):
                found["engine"] = max(below, key=lambda one: resident(one) or (0.0, 0.0))
            found[f"{command[:60]} {process.pid}"] = process
        except psutil.Error:
            continue
    known = {process.pid for name, process in found.items() if name in ROLES}
    return {name: process for name, process in found.items() if name in ROLES or process.pid not in known}


def falls(samples: Sequence[dict[str, Resident]]) -> dict[str, float]:
    """MB by which the memory of each process fell at most: states that come and go do, what is made once does not."""
    found: dict[str, float] = {}
    peaks: dict[str, float] = {}
    for there in samples:
        for name, (own, shared) in there.items():
            peaks[name] = max(peaks.get(name, 0.0), own + shared)
            found[name] = max(found.get(name, 0.0), peaks[name] - own - shared)
    return found


def rises(there: Sequence[bool]) -> int:
    return sum(now and not before for before, now in zip([False, *there], there, strict=False))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("make", ["vllm", "sglang"])
def test_trainer_and_engine_are_never_there_together(tmp_path: Path, make: Make) -> None:
    require(make)
    weights_mb = larger_model(tmp_path / "model")
    assert 90 < weights_mb < 110
    settings = [
        "placement=colocated",
        f"model.path={tmp_path / 'model'}",
        f"run_dir={tmp_path / 'runs'}",
        f"steps={STEPS}",
        "rollout.prompts_per_step=6",
        "rollout.samples_per_prompt=4",
        "validation.enabled=false",
        "checkpoint.export_model=false",
        "algorithm.old_log_probs=recompute",
        f"weight_sync.bucket_mb={BUCKET_MB}",
        f"actor_infer.strategy.name={make}",
        f"actor_infer.strategy.kv_cache_mb={KV_CACHE_MB}",
    ]
    command = [sys.executable, "examples/start_rlvr_pipeline.py", "--config-name", "tiny_grpo", *settings]
    latest = tmp_path / "runs" / "latest"
    seen: list[tuple[float, Resident, Resident]] = []
    others: list[tuple[float, dict[str, Resident]]] = []
    first, processes, looked = latest / "samples" / "step_000001.jsonl", dict[str, psutil.Process](), 0.0
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=os.environ.copy()) as run:
        while run.poll() is None:
            time.sleep(0.02)
            if time.monotonic() > looked + 2 and not first.exists():
                processes, looked = names(psutil.Process(run.pid)), time.monotonic()
            there = {name: found for name, process in processes.items() if (found := resident(process))}
            if set(ROLES) <= set(there):
                now = time.time()
                seen.append((now, there.pop("trainer"), there.pop("engine")))
                others.append((now, there))
    assert run.returncode == 0, (tmp_path / "log").read_text()
    records = [json.loads(line) for line in (latest / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "time/step" in record] == list(range(1, STEPS + 1))

    # From the first samples on, when what is made once is made, to the end, where processes go one after the other.
    last = max(file.stat().st_mtime for file in latest.glob("metrics.jsonl"))
    times, *both = zip(*(sample for sample in seen if first.stat().st_mtime < sample[0] < last), strict=True)
    trainers, engines = ([one.own for one in each] for each in both)
    shared = [max(one.shared for one in each) for each in both]
    figures = f"trainer {min(trainers):.0f} to {max(trainers):.0f} MB, engine {min(engines):.0f} to {max(engines):.0f} MB"
    figures += f", shared at most {shared[0]:.0f} and {shared[1]:.0f} MB"
    print(f"{figures}, {len(times)} samples")
    assert max(trainers) > min(trainers) + 3.5 * weights_mb, f"weights, gradients, two moments: {figures}"
    trainer_there = [rss > min(trainers) + 0.6 * weights_mb for rss in trainers]
    assert rises(trainer_there) >= 2, f"two steps: {figures}"
    away = sum(after - before for (before, after), there in zip(pairwise(times), trainer_there, strict=False) if not there)
    assert away > 0.5 * sum(record["time/generate"] for record in records[1:] if "time/step" in record), f"the engine's turns: {figures}"
    assert max(shared) < BUFFERS_MB < weights_mb, figures
    fallen = falls([there for now, there in others if first.stat().st_mtime < now < last])
    print({name: f"{most:.0f}" for name, most in sorted(fallen.items(), key=lambda item: -item[1])[:5]}, f"of {len(fallen)} others")
    assert len(fallen) > 5 and max(fallen.values()) < 0.5 * weights_mb, f"no other process has states of either in turns: {fallen}"
    if make == "vllm":
        engine_there = [rss > min(engines) + 0.5 * KV_CACHE_MB for rss in engines]
        assert rises(engine_there) >= 2, f"two steps: {figures}"
        together = [sample for *sample, one, other in zip(trainers, engines, trainer_there, engine_there, strict=True) if one and other]
        assert not together, f"{len(together)} of {len(times)} samples: {together[:5]}; {figures}"
