"""Tokens per second of the generate phase (scheduler, Ray, rewards, object store) against a bare `LLM.generate`.

Both sides run in one program, in turns, on engines with the same arguments: ours answers a batch of prompts with lengths as the
model chooses them; the bare engine then gets the very same prompts at once, with those lengths prescribed. `ratio` is that of the
25M-parameter model, where compute dominates; the shipped tiny model, where Python does, is reported beside it.

    .venv/bin/python bench/rollout.py [--rounds 4] [--prompts 32] [--samples 8]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "models" / "tiny"


@dataclass(frozen=True)
class Case:
    name: str
    model: Path
    max_tokens: int
    aim: float


def random_model(folder: Path) -> Path:
    """About 25M parameters, the tiny model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = AutoConfig.from_pretrained(TINY)
    config.update(
        {
            "hidden_size": 512,
            "intermediate_size": 1536,
            "num_hidden_layers": 8,
            "layer_types": ["full_attention"] * 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 1024,
        }
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def configuration(case: Case, prompts: int, samples: int) -> Any:
    from roll_lite.config.loading import load_config

    return load_config(
        "tiny_base",
        ROOT / "examples" / "configs",
        [
            f"model.path={case.model}",
            f"rollout.prompts_per_step={prompts}",
            f"rollout.samples_per_prompt={samples}",
            f"actor_infer.strategy.max_running_requests={prompts * samples}",
            *(f"domains.{domain}.sampling.max_tokens={case.max_tokens}" for domain in ("add", "make", "repeat")),
            # A random model's answers make no terms: a cheap comparison stands for the sandbox.
            "~domains.make.reward.args",
            "domains.make.reward.name=exact",
        ],
    )


class Ours:
    """The generate phase as a pipeline runs it."""

    def __init__(self, config: Any, samples_folder: Path) -> None:
        from roll_lite.config.arithmetic import max_model_len
        from roll_lite.distributed.cluster import ClusterSpec, start_cluster
        from roll_lite.distributed.placement import Placement, beside_driver
        from roll_lite.distributed.strategy.base import EngineSpec
        from roll_lite.workers.infer import InferWorker
        from roll_lite.workers.rollout import RolloutSpec, RolloutWorker

        self.config = config
        slots = Placement({"actor_infer": 1}, 60).slots("actor_infer")
        spec = EngineSpec(config.model, config.actor_infer.strategy, max_model_len(config), config.seed)
        self.engines = start_cluster(ClusterSpec("actor_infer", slots), InferWorker, spec)
        engines = config.actor_infer.model_copy(update={"offload": False, "restarts": 0})
        service = RolloutSpec(config.model_copy(update={"deterministic": False, "steps": None, "actor_infer": engines}), samples_folder)
        self.rollouts = start_cluster(ClusterSpec("rollouts", [beside_driver()]), RolloutWorker, service)
        self.engines.all(InferWorker.initialize)
        self.rollouts.one(RolloutWorker.prepare, {}, {})
        self.rollouts.one(RolloutWorker.initialize, self.engines.actors)
        self.steps = 0

    def generate(self) -> tuple[float, list[tuple[list[int], int]]]:
        """Seconds, and (prompt, response length) of each sample. The clock stops when the driver has its rows."""
        import numpy as np

        from roll_lite.distributed.dataflow import Batch
        from roll_lite.workers.rollout import RolloutWorker

        self.steps += 1
        started = time.perf_counter()
        batch = self.rollouts.one(RolloutWorker.next_batch, self.config.rollout.prompts_per_step, self.steps)
        seconds = time.perf_counter() - started
        work = []
        (shard,) = Batch(batch.rows, batch.blocks).shards([np.arange(len(batch.rows))], ["input_ids", "response_mask"])
        columns = shard.materialize()
        for row in range(len(columns)):
            mask = columns.ragged("response_mask").row(row)
            work.append((columns.ragged("input_ids").row(row)[~mask].tolist(), int(mask.sum())))
        return seconds, work

    def close(self) -> None:
        self.rollouts.shutdown()
        self.engines.shutdown()


def bare_engine(model: str, arguments: dict[str, Any], pipe: Connection) -> None:
    """In a process of its own: an engine inside the process, requests given to it all at once."""
    from roll_lite.distributed.strategy.vllm.compat.settings import engine_environment

    os.environ.update(engine_environment(1, cuda=arguments["enable_sleep_mode"]).variables())
    from vllm import LLM, SamplingParams

    llm = LLM(**arguments)
    pipe.send("ready")
    while (work := pipe.recv()) is not None:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        sampling = [SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, logprobs=0) for _, length in work]
        started = time.perf_counter()
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - started
        assert [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in work]
        pipe.send(seconds)


def bare_arguments(config: Any) -> dict[str, Any]:
    """Those of our engine, without its weight transfer."""
    from roll_lite.config.arithmetic import max_model_len
    from roll_lite.distributed.strategy.vllm.compat.settings import engine_arguments

    arguments = engine_arguments(config.model, config.actor_infer.strategy, max_model_len(config), config.seed, cuda=False)
    for ours in ("worker_extension_cls", "enable_log_requests"):
        arguments.pop(ours)
    return arguments


def measure(case: Case, rounds: int, prompts: int, samples: int, folder: Path) -> dict[str, float]:
    config = configuration(case, prompts, samples)
    pipe, far_end = multiprocessing.get_context("spawn").Pipe()
    bare = multiprocessing.get_context("spawn").Process(target=bare_engine, args=(str(case.model), bare_arguments(config), far_end))
    bare.start()
    ours = Ours(config, folder / case.name)
    assert pipe.recv() == "ready"
    pairs: list[tuple[float, float]] = []
    try:
        for number in range(rounds + 1):
            seconds, work = ours.generate()
            pipe.send(work)
            bare_seconds = pipe.recv()
            tokens = sum(length for _, length in work)
            if number:  # the first round warms both sides up
                pairs.append((tokens / seconds, tokens / bare_seconds))
    finally:
        pipe.send(None)
        bare.join(30)
        ours.close()
    return {
        "ours": statistics.median(mine for mine, _ in pairs),
        "peer": statistics.median(theirs for _, theirs in pairs),
        "ratio": statistics.median(mine / theirs for mine, theirs in pairs),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    chosen = parser.parse_args()
    os.chdir(ROOT)
    from roll_lite.config.schema.run import RayConfig
    from roll_lite.distributed.ray_session import ray_session

    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        cases = [Case("25M", random_model(Path(scratch) / "random"), 128, 0.9), Case("tiny", TINY, 16, 0.65)]
        with ray_session(RayConfig(), None):
            for case in cases:
                results[case.name] = measure(case, chosen.rounds, chosen.prompts, chosen.samples, Path(scratch))
                print(case.name, {name: round(value, 3) for name, value in results[case.name].items()}, f"aim {case.aim}", flush=True)
    large, tiny = results["25M"], results["tiny"]
    report = {
        "name": "rollout",
        "ours": round(large["ours"], 1),
        "peer": round(large["peer"], 1),
        "unit": "generated tokens/s",
        "ratio": round(large["ratio"], 3),
        "tiny_ours": round(tiny["ours"], 1),
        "tiny_peer": round(tiny["peer"], 1),
        "tiny_ratio": round(tiny["ratio"], 3),
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
