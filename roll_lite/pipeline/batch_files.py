"""Files from which examples/recompute.py repeats updates (docs/recompute.md): start weights, inputs of losses, samples of skipped
updates."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from roll_lite.config.arithmetic import group_size, longest_sequence, trains
from roll_lite.config.checks.notes import without_formula
from roll_lite.config.device_phases import Phase
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.columns_file import as_table, write_rows, write_table
from roll_lite.data.keys import Columns
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import DataProto
from roll_lite.distributed.dataflow import Batch
from roll_lite.files import FileRecord, record, write_json
from roll_lite.pipeline.clusters import Model, Models, states
from roll_lite.pipeline.skipped_updates import Skipped
from roll_lite.workers.actor import ActorWorker

SMALL_STEP_TOKENS = 2**18
"""Maximum tokens of a step that `batches.write: auto` writes: some megabytes on disk."""
AUTO_STEPS = 500
"""Last step that `batches.write: auto` writes, to limit disk usage."""
WHOLE_VOCABULARY = ("ref_distribution", "old_distribution")
"""Columns not written: thousands of numbers per token, which a forward pass recomputes."""
SUPERVISED = ("sample", "input_ids", "response_mask", "ptx_weight")


class BatchFiles:
    def __init__(self, config: RunConfig, run_folder: Path, nodes_without_run_folder: Collection[str] = ()) -> None:
        self._config = config
        self._folder = run_folder
        self._nodes_without_run_folder = nodes_without_run_folder
        self.are_written = batches_are_written(config)
        self._until = AUTO_STEPS if config.batches.write == "auto" else sys.maxsize

    def writes(self, step: int) -> bool:
        return self.are_written and step <= self._until

    def keep_start(self, models: Models) -> None:
        """Save the start weights: copies of adapters and small models, path and checksums of large models."""
        if not self.are_written:
            return
        start = self._folder / "start"
        if start.exists():  # the run continues in its folder
            return
        start.mkdir()
        resumed = self._config.checkpoint.source
        described: dict[str, Any] = {"resumed_from": None if resumed is None else str(resumed)}
        model, critic = self._config.model.path, self._config.critic
        paths = {"actor_train": model, **({} if critic is None else {"critic": critic.path or model})}
        described["models"] = {role: self._keep(path.resolve(), start / role) for role, path in paths.items()}
        write_json(start / "models.json", described)
        if self._config.actor_train.lora is not None:
            with models.actor.loaded(states(Phase.FINAL_MODEL)):
                folder = (start / "adapters").resolve()
                written = models.actor.ranks.all(ActorWorker.save_adapters, folder)
                models.actor.bring_home(folder, written, self._nodes_without_run_folder)

    def _keep(self, source: Path, copy: Path) -> dict[str, Any]:
        files = _files_of(source)
        described = {"path": str(source), "files": {name: asdict(known) for name, known in files.items()}}
        if sum(known.bytes for known in files.values()) <= self._config.batches.copy_models_mb << 20:
            shutil.copytree(source, copy, ignore=lambda folder, names: [name for name in names if not (Path(folder) / name).is_file()])
            described["path"] = str(copy.relative_to(self._folder))
        return described

    def write(
        self, step: int, actor: Model[ActorWorker], batch: Batch, mini_batches: Sequence[MiniBatch], kl_coefs: Mapping[str, float]
    ) -> None:
        self._write(f"batches/step_{step:06d}", actor, batch, _as_table(mini_batches), {"step": step, "kl_coefs": dict(kl_coefs)})

    def write_supervised(self, step: int, updates: Sequence[DataProto]) -> None:
        if self.writes(step) and updates:
            table = as_table(DataProto.concat(updates).select(SUPERVISED))
            numbers = np.repeat(np.arange(1, len(updates) + 1), [len(rows) for rows in updates])
            write_table(self._folder / f"batches/step_{step:06d}" / "supervised.parquet", table.append_column("update", pa.array(numbers)))

    def write_skipped(
        self,
        skipped: Skipped,
        actor: Model[ActorWorker],
        batch: Batch,
        mini_batch: MiniBatch,
        kl_coefs: Mapping[str, float],
        supervised: DataProto | None,
    ) -> None:
        """Write the samples of an update skipped as not finite, even with `batches.write: never`."""
        table = _with_losses(_as_table([mini_batch], first=skipped.update), skipped)
        facts = {"step": skipped.step, "role": skipped.role, "update": skipped.update, "kl_coefs": dict(kl_coefs)}
        facts |= {"loss": str(skipped.loss), "grad_norm": str(skipped.grad_norm)}  # JSON has no NaN
        own = np.flatnonzero(np.isin(batch.rows.tensor("sample").numpy(), mini_batch.samples))
        self._write(skipped.folder, actor, batch.take(own), table, facts)
        if supervised is not None:
            table = _with_losses(as_table(supervised.select(SUPERVISED)), skipped)
            write_table(self._folder / skipped.folder / "supervised.parquet", table)

    def _write(self, name: str, actor: Model[ActorWorker], batch: Batch, mini_batches: pa.Table, facts: Mapping[str, Any]) -> None:
        folder, keys = (self._folder / name).resolve(), batch.keys()
        columns = Columns(reads=tuple(key for key in keys if key not in WHOLE_VOCABULARY))
        shards = actor.shards(batch, columns)
        if not self._nodes_without_run_folder:
            actor.ranks.heads_scatter(ActorWorker.write_rows, shards, folder)
        else:  # in turns: the driver never holds a whole batch
            for rank, shard in enumerate(shards):
                write_rows(folder, rank, shard.materialize())
        write_table(folder / "mini_batches.parquet", mini_batches)
        write_json(folder / "step.json", facts)


def batches_are_written(config: RunConfig) -> bool:
    if not trains(config):
        return False
    if config.batches.write == "auto":
        samples = config.rollout.prompts_per_step * max(group_size(config, domain) for domain in config.domains.values())
        return samples * longest_sequence(config) <= SMALL_STEP_TOKENS and not without_formula(config)
    return config.batches.write == "always"


@cache
def _files_of(model: Path) -> dict[str, FileRecord]:
    return {file.name: record(file) for file in sorted(model.iterdir()) if file.is_file()}


def _as_table(mini_batches: Sequence[MiniBatch], first: int = 1) -> pa.Table:
    sizes = [len(mini_batch.samples) for mini_batch in mini_batches]
    return pa.table(
        {
            "update": np.repeat(np.arange(first, first + len(sizes)), sizes),
            "epoch": np.repeat([mini_batch.epoch + 1 for mini_batch in mini_batches], sizes),
            "sample": np.concatenate([np.zeros(0, dtype=np.int64), *(mini_batch.samples for mini_batch in mini_batches)]),
            "loss_weight": np.concatenate([np.zeros(0, dtype=np.float32), *(mini_batch.weights for mini_batch in mini_batches)]),
        }
    )


def _with_losses(table: pa.Table, skipped: Skipped) -> pa.Table:
    losses = [skipped.row_losses.get(sample) for sample in table["sample"].to_pylist()]
    return table.append_column("loss", pa.array(losses, pa.float64()))
