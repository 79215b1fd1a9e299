"""What a sample costs the rollout service and the driver on its way from an engine to a training rank: CPU time and bytes.

Tokens are written by the workers beside the engines and read by training ranks; service and driver see numbers, texts and references, so
that their cost does not depend on a response's length. Scripted engines answer at once, with a text of the same length for every
response; everything between them and the ranks is the real thing: Ray, router, reward workers, sample dumps, shards for two ranks.
`ratio` is 200 microseconds of the service's CPU per sample, the aim, over the worst case's. `with_dumps_us` is the worst case's with
`rollout.dump: true`, whose thread works beside the training, `dump_bytes` what a sample then leaves on the disk (scripted engines say the
same all the time, so that bench/dumps.py has the truer size).

    .venv/bin/python bench/dataflow.py [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # support_scripted; ray_session hands the path on to its workers
TINY = ROOT / "examples" / "models" / "tiny"
AIM_US = 200
GROUP, ENGINES, RUNNING, RANKS = 8, 2, 256, 2
COLUMNS = ("input_ids", "response_mask", "rollout_log_probs", "reward")


@dataclass(frozen=True)
class Cost:
    """Per sample."""

    service_us: float
    driver_us: float
    service_bytes: float
    driver_bytes: float


def make_worker() -> Any:
    """A rollout worker that knows what it has used: CPU seconds, and on request bytes sent and received."""
    from ray import cloudpickle

    from roll_lite.workers import rollout
    from roll_lite.workers.infer import RemoteEngine

    class CountingEngine(RemoteEngine):
        counting = False
        bytes = 0

        def count(self, thing: Any) -> None:
            if CountingEngine.counting:
                CountingEngine.bytes += len(cloudpickle.dumps(thing))

        async def _submit(self, requests: Any, frozen: bool) -> None:
            self.count(requests)
            await super()._submit(requests, frozen)

        async def _collect(self) -> Any:
            collected = await super()._collect()
            self.count(collected)
            return collected

    class MeasuredRollouts(rollout.RolloutWorker):
        async def initialize(self, engines: Any, *further: Any) -> None:
            rollout.RemoteEngine = CountingEngine  # type: ignore[misc]
            await super().initialize(engines, *further)

        async def cpu_seconds(self) -> float:
            """Of all threads, Ray's own among them; the sample dumps are written."""
            if self._writing is not None:
                await self._writing
            return time.process_time()

        async def count_bytes(self, counting: bool) -> int:
            CountingEngine.counting, counted, CountingEngine.bytes = counting, CountingEngine.bytes, 0
            return counted

    return MeasuredRollouts


class Dataflow:
    """Engines and service for one length of responses and one number of samples in a batch."""

    def __init__(self, tokens: int, folder: Path, dumps: bool = False) -> None:
        from support_scripted import ScriptedWorker, scripted_spec

        from roll_lite.config.loading import load_config
        from roll_lite.config.schema.domains import DataConfig, DomainConfig, RewardConfig, RolloutConfig, SamplingConfig
        from roll_lite.config.schema.models import ModelConfig
        from roll_lite.distributed.cluster import ClusterSpec, start_cluster
        from roll_lite.distributed.placement import anywhere
        from roll_lite.files import CONFIGS
        from roll_lite.workers.infer import InferWorker
        from roll_lite.workers.rollout import RolloutSpec
        from roll_lite.workers.rollout_output import DumpSpec

        self.dumps = folder / "dumps"
        (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(2000)))
        model = ModelConfig(path=TINY, dtype="float32")
        domain = DomainConfig(
            data=DataConfig(train=folder / "train.jsonl"), sampling=SamplingConfig(max_tokens=tokens), reward=RewardConfig(name="exact")
        )
        settings = RolloutConfig(samples_per_prompt=GROUP)
        engine = scripted_spec(model, max_model_len=tokens + 64, response_tokens=tokens)
        self.engines = start_cluster(ClusterSpec("actor_infer", anywhere(ENGINES)), ScriptedWorker, engine)
        dump = DumpSpec(self.dumps, {}, "") if dumps else None
        own = {"model": model, "domains": {"toy": domain}, "rollout": settings, "deterministic": False, "steps": None}
        engines = [f"actor_infer.strategy.max_running_requests={RUNNING}", "actor_infer.offload=false", "actor_infer.restarts=0"]
        config = load_config("tiny_grpo", CONFIGS, ["seed=1", *engines], files=False)
        spec = RolloutSpec(config.model_copy(update=own), folder / "samples", dump)
        self.worker = make_worker()
        self.service = start_cluster(ClusterSpec("rollouts", anywhere(1)), self.worker, spec)
        self.engines.all(InferWorker.initialize)
        self.service.one(self.worker.prepare, {}, {})
        self.service.one(self.worker.initialize, self.engines.actors)
        self.steps = 0

    def step(self, samples: int) -> tuple[float, float, int]:
        """CPU seconds of service and driver, bytes through the driver."""
        import numpy as np
        from ray import cloudpickle

        from roll_lite.distributed.dataflow import Batch
        from roll_lite.workers.rollout import RolloutWorker

        self.steps += 1
        before, own = self.service.one(self.worker.cpu_seconds), time.process_time()
        rollouts = self.service.one(RolloutWorker.next_batch, samples // GROUP, self.steps)
        batch = Batch(rollouts.rows, rollouts.blocks).with_rows(reward=rollouts.rows.tensor("score"))
        shards = batch.shards([np.arange(rank, len(batch), RANKS) for rank in range(RANKS)], COLUMNS)
        own = time.process_time() - own
        used = self.service.one(self.worker.cpu_seconds) - before
        assert len(batch) == samples
        return used, own, len(cloudpickle.dumps(rollouts)) + sum(len(cloudpickle.dumps(shard)) for shard in shards)

    def measure(self, samples: int, rounds: int) -> Cost:
        self.step(samples)  # warm
        measured = [self.step(samples) for _ in range(rounds)]
        self.service.one(self.worker.count_bytes, True)
        self.step(samples)
        through = self.service.one(self.worker.count_bytes, False)
        service, driver, driver_bytes = (statistics.median(values) / samples for values in zip(*measured, strict=True))
        return Cost(service * 1e6, driver * 1e6, through / samples + driver_bytes, driver_bytes)

    def bytes_of_a_dumped_sample(self, samples: int) -> float:
        return max(file.stat().st_size for file in self.dumps.iterdir()) / samples

    def close(self) -> None:
        self.service.shutdown()
        self.engines.shutdown()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one small case of either length, one round")
    chosen = parser.parse_args()
    os.chdir(ROOT)
    from roll_lite.config.schema.run import RayConfig
    from roll_lite.distributed.ray_session import ray_session

    costs: dict[tuple[int, int], Cost] = {}
    with ray_session(RayConfig(object_store_mb=200 if chosen.quick else 1500), None):
        for tokens in (64, 4096):
            for samples in (64,) if chosen.quick else (256, 8192):
                with tempfile.TemporaryDirectory() as folder:
                    flow = Dataflow(tokens, Path(folder))
                    cost = costs[samples, tokens] = flow.measure(samples, 1 if chosen.quick else chosen.rounds)
                    flow.close()
                print(f"{samples} samples of {tokens} tokens:", {name: round(value) for name, value in vars(cost).items()}, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            samples = 64 if chosen.quick else 8192
            flow = Dataflow(4096, Path(folder), dumps=True)
            dumping = flow.measure(samples, 1 if chosen.quick else chosen.rounds)
            dump_bytes = flow.bytes_of_a_dumped_sample(samples)
            flow.close()
    worst = max(cost.service_us for cost in costs.values())
    growth = max(costs[samples, 4096].driver_bytes / costs[samples, 64].driver_bytes for samples, _ in costs)
    report = {
        "name": "dataflow",
        "ours": round(worst, 1),
        "peer": AIM_US,
        "peer_is": "the aim",
        "unit": "microseconds of the rollout service's CPU per sample",
        "ratio": round(AIM_US / worst, 3),
        "driver_us": round(max(cost.driver_us for cost in costs.values()), 1),
        "service_bytes": round(max(cost.service_bytes for cost in costs.values())),
        "driver_bytes": round(max(cost.driver_bytes for cost in costs.values())),
        "with_dumps_us": round(dumping.service_us, 1),
        "dump_bytes": round(dump_bytes),
        "driver_bytes_4096_over_64": round(growth, 3),
        "cases": {
            f"{samples}x{tokens}": {name: round(value, 1) for name, value in vars(cost).items()}
            for (samples, tokens), cost in costs.items()
        },
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
