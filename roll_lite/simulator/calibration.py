"""Replace the simulator's assumptions by measurements of a run."""

from __future__ import annotations

import heapq
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import yaml

from roll_lite.config.schema.run import RunConfig
from roll_lite.config.schema.simulation import (
    SimulatedEngineConfig,
    SimulatedResponsesConfig,
    SimulatedTrainerConfig,
    SimulationConfig,
)
from roll_lite.simulator.workload import P99

QUANTILES = 21


@dataclass(frozen=True)
class MeasuredRun:
    engines: int
    slots: int
    trainer_devices: int
    metrics: dict[int, dict[str, float]]
    samples: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    offloads: bool = False
    streams: bool = False


def calibrated(config: RunConfig, folder: Path) -> RunConfig:
    simulation = measured(read_run(folder), config.simulation, list(config.domains))
    return config.model_copy(update={"simulation": simulation})


def read_run(folder: Path) -> MeasuredRun:
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        settings = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{folder} is not the folder of a run: {error.strerror}, {Path(error.filename).name}") from error
    records = [json.loads(line) for line in lines]
    steps = {one["step"]: one for one in records if "time/train" in one and "rollout/generation_seconds" in one}
    samples = {}
    for step in steps:
        path = folder / "samples" / f"step_{step:06d}.jsonl"
        if path.exists():
            samples[step] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if not samples:
        raise ValueError(f"{folder}: no step with metrics and samples; the simulator needs a run of at least one step")
    rollout, infer = settings.get("rollout", {}), settings["actor_infer"]
    if (supply := rollout.get("supply", "sync")) != "sync":
        raise ValueError(
            f"{folder} is a run with rollout.supply: {supply}, whose generation seconds are not those of a batch; measure a sync one"
        )
    # Lengths of filtered and surplus samples are not recorded.
    filtered = round(sum(record.get("rollout/filtered_groups", 0.0) for record in steps.values()))
    oversample = rollout.get("oversample", 1)
    if filtered or oversample > 1:
        what = f"rollout.oversample: {oversample:g}, which generates more than its samples/ hold of a batch"
        if filtered:
            what = f"rollout.filter, which left out {filtered} groups that its samples/ do not hold"
        raise ValueError(
            f"{folder} is a run with {what}; measure one with rollout.filter=null rollout.oversample=1: the simulator filters and "
            "oversamples as the configuration says that is simulated"
        )
    engines = _count(infer["devices"]) // infer["strategy"].get("tensor_parallel", 1) * infer.get("replicas_per_device", 1)
    return MeasuredRun(
        max(1, engines),
        infer["strategy"].get("max_running_requests", 256),
        _count(settings["actor_train"]["devices"]),
        steps,
        samples,
        infer.get("offload", False),
        rollout.get("stream_log_probs", False),
    )


def _count(devices: Any) -> int:
    return len(devices) if isinstance(devices, list) else int(devices)


def measured(run: MeasuredRun, assumed: SimulationConfig, domains: Iterable[str]) -> SimulationConfig:
    usual = sorted(run.samples)[1:] or sorted(run.samples)  # the first step is a warm-up
    by_domain: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for step in usual:
        for sample in run.samples[step]:
            if sample["outcome"] == "accepted":
                by_domain[sample["domain"]].append(sample)
    responses = {name: _responses(name, by_domain[name], run, usual, assumed) for name in domains if by_domain[name]}
    # A batch waits for the slowest domain's rewards, so its 99th percentile is at least the mean wait for a batch's last rewards.
    slowest = max(responses, key=lambda name: responses[name].reward_s)
    tail = rounded(fmean(run.metrics[step].get("rollout/reward_tail_seconds", 0.0) for step in usual))
    if tail > responses[slowest].reward_s > 0:
        responses[slowest] = responses[slowest].model_copy(update={"reward_p99_s": tail})
    return assumed.model_copy(
        update={
            "engine": _engine(run, usual, assumed.engine),
            "trainer": _trainer(run, usual, assumed.trainer),
            "domains": assumed.domains | responses,
        }
    )


def _engine(run: MeasuredRun, steps: Sequence[int], assumed: SimulatedEngineConfig) -> SimulatedEngineConfig:
    rows, seconds = [], []
    for step in steps:
        generated = [sample for sample in run.samples[step] if sample["response_tokens"]]
        lengths = [round(policy_tokens(sample)) for sample in generated]
        own = lengths[:: run.engines]
        rows.append((passes(own, run.slots), sum(lengths) / run.engines))
        waits = fmean(sample["episode"]["metrics"]["environment_seconds"] if "episode" in sample else 0.0 for sample in generated)
        seconds.append(max(0.1 * (whole := run.metrics[step]["rollout/generation_seconds"]), whole - waits))
    pass_s, request_s = fit(rows, seconds)  # both include the costs of cache and prefill
    elsewhere = {"offload_s": 0.0} if run.offloads else {}  # already included in the trainer's time
    in_these_two = {"cached_token_ns": 0.0, "prefill_tokens_per_s": None}
    return assumed.model_copy(
        update={"pass_ms": rounded(1e3 * pass_s), "request_us": rounded(1e6 * request_s), **in_these_two, **elsewhere}
    )


def passes(lengths: Sequence[int], slots: int) -> int:
    """Count the forward passes for responses of these lengths, `slots` at a time."""
    ends = [0] * min(slots, len(lengths))
    for tokens in lengths:
        heapq.heapreplace(ends, ends[0] + tokens)
    return max(ends)


def fit(rows: Sequence[tuple[float, float]], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit `seconds` of steps as passes * pass_s + tokens * request_s; neither rate is negative. `rows`: (passes, tokens) by step."""
    work, time = np.array(rows, dtype=float), np.array(seconds)
    if len(rows) > 1:
        (pass_s, request_s), _, rank, _ = np.linalg.lstsq(work, time, rcond=1e-6)
        if rank == 2 and pass_s > 0 and request_s >= 0:
            return float(pass_s), float(request_s)
    return float(work[:, 0] @ time / (work[:, 0] @ work[:, 0])), 0.0


def _trainer(run: MeasuredRun, steps: Sequence[int], assumed: SimulatedTrainerConfig) -> SimulatedTrainerConfig:
    records = [run.metrics[step] for step in steps]
    other = [record.get("time/step", 0.0) - record.get("time/generate", 0.0) - record.get("time/sync_weights", 0.0) for record in records]
    tokens = [sum(sample["prompt_tokens"] + sample["response_tokens"] for sample in run.samples[step]) for step in steps]
    rate = fmean(tokens) / max(1e-9, fmean(other)) / run.trainer_devices
    sync_s = fmean(record.get("time/sync_weights", 0.0) for record in records)
    passes = sum(record.get("time/log_probs", 0.0) for record in records) / max(1e-9, sum(other))
    log_probs = assumed.log_probs if run.streams else rounded(min(1.0, passes))
    return SimulatedTrainerConfig(overhead_s=0.0, tokens_per_device_s=rounded(rate), log_probs=log_probs, sync_s=rounded(sync_s))


def _responses(
    name: str, samples: Sequence[Mapping[str, Any]], run: MeasuredRun, steps: Sequence[int], assumed: SimulationConfig
) -> SimulatedResponsesConfig:
    """Measure a domain's responses. `assumed` gives the number of prompts in the data, which runs do not record."""
    turns = [float(sample["episode"]["metrics"]["turns"]) if "episode" in sample else 1.0 for sample in samples]
    lengths = [policy_tokens(sample) / count for sample, count in zip(samples, turns, strict=True) if sample["response_tokens"]]
    episodes: dict[str, Any] = {}
    if played := [sample["episode"]["metrics"] for sample in samples if "episode" in sample]:
        counts = [one["turns"] for one in played]
        further = max(1.0, sum(counts) - len(counts))
        answer_s, answer_p99_s = answer_seconds([one["environment_seconds"] for one in played], counts)
        episodes = {
            "turns": rounded(min(float(np.median(counts)), fmean(counts))),  # a limit of turns leaves the mean below the median
            "turns_p99": rounded(float(np.quantile(counts, 0.99))),
            "environment_s": rounded(answer_s),
            "environment_p99_s": rounded(answer_p99_s) or None,
            "environment_tokens": max(1, round(sum(one["environment_tokens"] for one in played) / further)),
        }
    groups: dict[tuple[int, int], list[bool]] = defaultdict(list)
    for sample in samples:
        groups[sample["epoch"], sample["group"]].append(bool(sample["correct"]))
    seconds = [run.metrics[step].get(f"domain/{name}/reward/seconds") for step in steps]
    known = [one for one in seconds if one is not None]
    return SimulatedResponsesConfig(
        prompts=assumed.domains.get(name, assumed.responses).prompts,
        prompt_tokens=max(1, round(fmean(sample["prompt_tokens"] for sample in samples))),
        quantiles=[rounded(float(value)) for value in np.quantile(lengths, np.linspace(0, 1, QUANTILES))],
        reward_s=rounded(fmean(known)) if known else 0.0,
        **episodes,
        all_right=rounded(sum(all(ones) for ones in groups.values()) / len(groups)),
        all_wrong=rounded(sum(not any(ones) for ones in groups.values()) / len(groups)),
    )


def answer_seconds(seconds: Sequence[float], answers: Sequence[float]) -> tuple[float, float]:
    """Fit a log-normal distribution to the environment's answer times, assumed independent; return median and 99th percentile.
    `seconds`, `answers`: each episode's environment time and number of answers. Constant time (a reset) adds to the mean, not the
    spread."""
    counts = np.array(answers)
    line = np.stack((np.ones_like(counts), counts), axis=1)
    left = np.array(seconds) - line @ np.linalg.lstsq(line, np.array(seconds), rcond=None)[0]
    mean = sum(seconds) / counts.sum()
    deviation = math.sqrt(math.log1p(left @ left / counts.sum() / mean**2)) if mean else 0.0
    median = mean * math.exp(-(deviation**2) / 2)
    return median, median * math.exp(P99 * deviation)


def policy_tokens(sample: Mapping[str, Any]) -> float:
    """Count the policy's tokens; `response_tokens` also includes the environment's tokens."""
    others = sample["episode"]["metrics"]["environment_tokens"] if "episode" in sample else 0.0
    return float(sample["response_tokens"] - others)


def rounded(value: float) -> float:
    return float(f"{value:.4g}")
