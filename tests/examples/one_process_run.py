"""A run without Ray and engines, for tests of what a run leaves behind: the real pipeline, models and files, all in one process.

    python one_process_run.py FOLDER RECIPE [key=value ...]

Rollouts are random tokens with the log-probs that the actor gives them, at two temperatures; with rollout.keep_mask those among six random
tokens, and with a mismatch_correction beside those of another policy. Clusters are called directly.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import yaml

from roll_lite.config.arithmetic import actor_is_reference, planned_updates
from roll_lite.config.loading import load_config
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.microbatch import RowsAtATime
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged
from roll_lite.distributed import dataflow
from roll_lite.distributed.dataflow import Batch, put_block
from roll_lite.distributed.worker import ROLE, Worker
from roll_lite.models.hf_config import read_model_shape
from roll_lite.pipeline import clusters
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.build import supervised_rows
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.clusters import Model, Models
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.workers.actor import ActorWorker, AdaptedActorWorker
from roll_lite.workers.model import CriticWorker, ModelRole, ReferenceWorker

SAMPLES, GROUP, PROMPT = 24, 4, 5
TEMPERATURES = (1.0, 0.6)
"""Of one group and the next."""


class Answer:
    def __init__(self, value: Any) -> None:
        self.value = value

    def result(self) -> Any:
        return self.value


class Local:
    """A cluster of one rank, in this process."""

    data_size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker
        self.name = type(worker).__name__
        self.layouts = [worker.initialize()]

    def start_all(self, method: Any, *arguments: Any) -> Answer:
        return Answer([getattr(self.worker, method.__name__)(*arguments)])

    def all(self, method: Any, *arguments: Any) -> Any:
        return self.start_all(method, *arguments).result()

    def start_scatter(self, method: Any, shards: list[Any], *arguments: Any) -> Answer:
        return self.start_all(method, shards[0], *arguments)

    def heads_scatter(self, method: Any, shards: list[Any], *arguments: Any) -> Any:
        return self.all(method, shards[0], *arguments)


def rollouts(actor: Any, config: RunConfig, generator: torch.Generator) -> Batch:
    domains, vocabulary = list(config.domains), read_model_shape(config.model.path).vocab_size
    lengths = torch.randint(10, 20, (SAMPLES,), generator=generator)
    ids = [torch.randint(0, vocabulary, (int(length),), generator=generator) for length in lengths]
    numbers, zeros = torch.arange(SAMPLES), torch.zeros(SAMPLES)
    rows = {
        "sample": numbers,
        "group": numbers // GROUP,
        "index": numbers % GROUP,
        "prompt_uid": numbers // GROUP,
        "epoch": torch.zeros(SAMPLES, dtype=torch.int64),
        "domain": object_column([domains[number // GROUP % len(domains)] for number in range(SAMPLES)]),
        "finish_reason": object_column(["stop", "length"] * (SAMPLES // 2)),
        "prompt_length": torch.full((SAMPLES,), PROMPT),
        "response_length": lengths - PROMPT,
        "policy_tokens": lengths - PROMPT,
        "score": torch.rand(SAMPLES, generator=generator).round(),
        "correct": zeros,
        "format_ok": zeros,
        "sample_weight": torch.ones(SAMPLES),
        "temperature": torch.tensor(TEMPERATURES).repeat_interleave(GROUP).repeat(SAMPLES)[:SAMPLES],
    }
    mask = [torch.arange(len(row)) >= PROMPT for row in ids]
    tokens = DataProto({"sample": numbers, "input_ids": Ragged.from_rows(ids), "response_mask": Ragged.from_rows(mask)})
    if config.rollout.keep_mask:
        kept = [torch.randint(0, vocabulary, (len(row) - 1, 6), generator=generator, dtype=torch.int32) for row in ids]
        kept = [torch.where(place[1:, None], one, -1) for one, place in zip(kept, mask, strict=True)]
        tokens = tokens.with_columns(kept_ids=Ragged.from_rows(kept))
    asked = tokens.with_columns(temperature=rows["temperature"])
    plan = actor.strategy.plan(tokens.lengths, RowsAtATime(GROUP))
    said = actor.strategy.forward(asked, ["log_probs"], plan)
    told = said["log_probs"]
    if config.algorithm.mismatch_correction is not None:
        told = Ragged.from_rows([row + 0.3 * torch.randn(len(row), generator=generator) for row in told.rows()])
    return Batch(DataProto(rows), [put_block(tokens.with_columns(rollout_log_probs=told))])


def run(folder: Path, recipe: str, overrides: list[str]) -> None:
    unwatched = "rollout.max_mismatch=null"  # log-probs of the rollouts are made up
    config = load_config(recipe, Path("examples/configs"), [*overrides, unwatched])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))

    def model(name: str, worker: Any, *arguments: Any) -> Model[Any] | None:
        role = getattr(config, name)
        if role is None:
            return None
        settings = ModelRole(config.model, role, planned_updates(config, name, config.steps), seed=1, deterministic=False)
        return Model(Local(worker(settings, *arguments)), role, worker)  # type: ignore[arg-type]

    policy = AdaptedActorWorker if actor_is_reference(config) else ActorWorker
    actor = model("actor_train", policy, config.algorithm, len(config.domains))
    assert actor is not None
    models: Any = Models(actor, model("reference", ReferenceWorker), model("critic", CriticWorker, config.algorithm, len(config.domains)))
    journal, files = Journal(config, folder), BatchFiles(config, folder)
    journal.connect()
    files.keep_start(models)
    generator = torch.Generator().manual_seed(3)
    source: Any = SimpleNamespace(judge_roles=(), loaded=lambda *_: nullcontext(), sync=lambda version: None, wait_for_files=lambda: None)
    pipeline: Any = RLVRPipeline(config, models, source, journal, Checkpoints(config, folder), files, supervised_rows(config))
    pipeline.generate = lambda: rollouts(actor.ranks.worker, config, generator)  # type: ignore[attr-defined]
    while pipeline.steps_done < config.steps:
        with journal.step(pipeline.steps_done + 1):
            pipeline.step()
        if pipeline.refresh is not None and pipeline.due(pipeline.refresh.every):
            pipeline.refresh_reference()
    pipeline.export_model()
    journal.close("completed")


if __name__ == "__main__":
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", ROLE: "all"})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Worker.init_process_group = lambda self: None  # type: ignore[method-assign]
    dataflow.ray = SimpleNamespace(put=lambda value: value, get=lambda references: references)  # type: ignore[attr-defined]
    clusters.gather = lambda *pendings: [pending.result() for pending in pendings]  # type: ignore[attr-defined]
    clusters.first_done = lambda pendings: pendings[:1]  # type: ignore[attr-defined]
    run(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
