from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import ray
import torch
import torch.distributed as dist

from roll_lite.algorithms.token_metrics import SampleSums
from roll_lite.config.arithmetic import training_passes
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.models import ActorRoleConfig, CriticRoleConfig, ForwardRoleConfig, ModelConfig, TrainRoleConfig
from roll_lite.data.keys import Columns
from roll_lite.data.microbatch import MicroBatchOutputs, TokenBudget, padded
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.proto import Column, DataProto
from roll_lite.data.ragged import from_numpy
from roll_lite.data.supervised import append_supervised
from roll_lite.distributed.dataflow import BatchShard, Block, put_block
from roll_lite.distributed.place import Place
from roll_lite.distributed.strategy.base import GROUP_TIMEOUT, ModelSpec, RankLayout, StateCopy, StateGroup, TrainResult, TrainStrategy
from roll_lite.distributed.strategy.build import build_model
from roll_lite.distributed.worker import Worker, freeze_heap
from roll_lite.files import FileRecord, StoreUnreachable, download, keep_only, reaching, record, upload
from roll_lite.models.hf_config import read_hf_config
from roll_lite.observability.trace_recorder import RECORDER
from roll_lite.workers.objectives import ActorLoss, CriticLoss
from roll_lite.workers.phases import PhaseWork, RankPhases, RankWork

HISTORY_ENTRIES = 100_000
"""Latest allocations that profile.memory_history keeps, at several KB of host memory each."""


@dataclass(frozen=True)
class ModelRole:
    model: ModelConfig
    config: ForwardRoleConfig
    total_updates: int
    seed: int
    deterministic: bool
    snapshots: Path = Path("out_of_memory")
    memory_history: bool = False

    @property
    def model_spec(self) -> ModelSpec:
        value_init = self.config.init if isinstance(self.config, CriticRoleConfig) else None
        return ModelSpec(
            self.model,
            self.config.strategy,
            path_key="model.path" if value_init in (None, "actor") else "critic.path",
            optimizer=self.config.optimizer if isinstance(self.config, TrainRoleConfig) else None,
            total_updates=self.total_updates,
            balance_coef=self.config.balance_coef if isinstance(self.config, TrainRoleConfig) else 0.0,
            value_init=value_init,
            lora=self.config.lora if isinstance(self.config, ActorRoleConfig) else None,
            ema_decay=self.config.ema.decay if isinstance(self.config, ActorRoleConfig) and self.config.ema is not None else None,
            seed=self.seed,
            deterministic=self.deterministic,
        )


@dataclass(frozen=True)
class TrainShare:
    """Part of a training step for one data parallel rank: its rows (`shard`) and its samples by mini-batch."""

    shard: BatchShard
    mini_batches: list[MiniBatch]
    first_update: int
    """Planned updates of earlier steps."""
    supervised: list[DataProto] = field(default_factory=list)
    """Supervised rows by mini-batch; empty without algorithm.ptx."""


@dataclass(frozen=True)
class Update:
    epoch: int
    result: TrainResult
    peaks: dict[str, float] = field(default_factory=dict)
    ratios: np.ndarray | None = None
    """Histogram of the log-ratios of new to old policy, [domains, bins]; None for the critic."""
    mismatch: SampleSums = field(default_factory=dict)
    """Log-prob differences between engine and trainer: only in the first update, unless measured before it."""
    row_losses: dict[int, float] = field(default_factory=dict)
    """{sample number: loss} of this rank's rows, to find faulty rows; only in the first skipped update of a series."""


def training_columns(loss_columns: Sequence[str], if_there: Sequence[str] = ()) -> Columns:
    """Return the columns that optimizer steps read. `if_there`: columns read if the batch has them."""
    of_loss = [name for name in loss_columns if name != "loss_weight"]
    return Columns(reads=("input_ids", "response_mask", "domain_number", *of_loss), if_there=tuple(if_there))


class ModelWorker(Worker):
    computes: ClassVar[Mapping[str, str]] = {}
    """{batch column that this role can compute: model output that fills it}."""
    forward_columns: ClassVar[Columns] = Columns(reads=("input_ids",))
    strategy: TrainStrategy

    def __init__(self, role: ModelRole) -> None:
        super().__init__()
        self.spec = role
        self.phases = RankPhases(
            f"{self.role}-{self.rank}", role.snapshots, lambda: self.strategy.loaded if hasattr(self, "strategy") else ()
        )

    def initialize(self) -> RankLayout:
        torch.manual_seed(self.spec.seed)
        self.init_process_group()
        if self.spec.memory_history and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=HISTORY_ENTRIES)
        strategy = build_model(self.spec.model_spec)
        assert isinstance(strategy, TrainStrategy)
        with self.phases.explained("start"):
            strategy.initialize()
        self.strategy, self._architecture = strategy, read_hf_config(self.spec.model.path)
        layouts: list[RankLayout | None] = [None] * strategy.layout.world_size
        dist.all_gather_object(layouts, strategy.layout)
        heads = sorted((layout for layout in layouts if layout and layout.is_head), key=lambda layout: layout.data_rank)
        self._heads = dist.new_group([layout.rank for layout in heads], backend="gloo", timeout=GROUP_TIMEOUT)
        freeze_heap()
        return self.strategy.layout

    def load(self, groups: Sequence[StateGroup]) -> None:
        with self.phases.of("load") as work:
            work.moved.update(self.strategy.load(groups))

    def offload(self, groups: Sequence[StateGroup]) -> None:
        with self.phases.of("offload") as work:
            work.moved.update(self.strategy.offload(groups))

    def trace(self, folder: Path | None) -> str:
        return RECORDER.trace(folder and folder / f"{self.role}-{self.rank}.json.gz")

    def take_work(self) -> RankWork:
        return self.phases.take()

    def replica_checksums(self) -> dict[str, str]:
        return self.strategy.replica_checksums()

    def start_checkpoint(self, folder: Path, asynchronous: bool) -> None:
        self._checkpoint = self.strategy.save_checkpoint(folder, asynchronous)

    def checkpoint_is_written(self) -> bool:
        return self._checkpoint.is_done

    def finish_checkpoint(self) -> dict[str, FileRecord]:
        return self._checkpoint.finish()

    def upload_checkpoint(self, folder: Path, target: Path, names: Sequence[str]) -> str | None:
        try:
            with reaching(target):
                for name in self._share_of_node([name for name in names if (folder / name).is_file()]):
                    upload(folder / name, target / name)
        except (ValueError, StoreUnreachable) as error:
            return str(error)
        return None

    def download_checkpoint(self, source: Path, folder: Path, wanted: Mapping[str, FileRecord]) -> dict[str, FileRecord]:
        found = {}
        for name in self._share_of_node(list(wanted)):
            file = folder / name
            if not file.is_file() or record(file) != wanted[name]:
                with reaching(source):
                    download(source / name, file)
            found[name] = record(file)
        return found

    def keep_checkpoints(self, folder: Path, names: Sequence[str]) -> None:
        keep_only(folder, names)

    def _share_of_node(self, items: Sequence[str]) -> Sequence[str]:
        """Divide `items` among this node's ranks; return this rank's share. All ranks must call this, with equal `items` on a node."""
        nodes: list[str | None] = [None] * self.world_size
        dist.all_gather_object(nodes, Place.here().node)
        ranks = [rank for rank, node in enumerate(nodes) if node == nodes[self.rank]]
        return items[ranks.index(self.rank) :: len(ranks)]

    def load_checkpoint(self, folder: Path) -> None:
        self.strategy.load_checkpoint(folder)

    @ray.method(num_returns=2)
    def copy_state(self, room: float) -> tuple[int, StateCopy | None]:
        """Return the size of this rank's state in bytes, with a copy unless it exceeds `room`."""
        copy = self.strategy.copy_state()
        size = sum(array.nbytes for array in copy[0])
        return size, copy if size <= room else None

    def load_copy(self, copies: Sequence[ray.ObjectRef]) -> None:
        self.strategy.load_copy(ray.get(copies[self.rank]))

    def file_records(self, folder: Path, names: Sequence[str]) -> dict[str, FileRecord]:
        """Return sizes and checksums of every world_size-th file: this rank's share."""
        return {name: record(folder / name) for name in names[self.rank :: self.world_size]}

    def save_hf(self, folder: Path, average: bool = False) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in self.strategy.save_hf(folder, average)}

    def part_of_file(self, files: Sequence[Path | None], offset: int, nbytes: int, nodes: Collection[str]) -> bytes | None:
        file = files[self.rank]
        if file is None or Place.here().address not in nodes:
            return None
        with file.open("rb") as opened:
            opened.seek(offset)
            return opened.read(nbytes)

    def remove_files(self, folder: Path, names: Sequence[Collection[str]], nodes: Collection[str]) -> None:
        if Place.here().address in nodes:
            for name in names[self.rank]:
                (folder / name).unlink()
            with suppress(OSError):
                folder.rmdir()

    def load_hf(self, folder: Path) -> None:
        self.strategy.load_hf(folder)

    def compute(self, shard: BatchShard, columns: Sequence[str]) -> Block | None:
        """Compute columns of a shard. One rank per data-parallel replica returns them, the others None."""
        batch = shard.materialize()
        found = self.forward_pass(batch, columns)
        return None if found is None else put_block(DataProto({"sample": batch.tensor("sample"), **found}))

    def forward_pass(self, batch: DataProto, columns: Sequence[str]) -> dict[str, Column] | None:
        wanted = [self.computes[name] for name in columns]
        with self.phases.of("log_probs") as work:
            plan = self.strategy.plan(batch.lengths, self._forward_budget(wanted))
            outputs = self.strategy.forward(batch, wanted, plan)
            self._count(work, batch)
        return None if outputs is None else {name: outputs[self.computes[name]] for name in columns}

    def _train(self, share: TrainShare, loss_fn: ActorLoss | CriticLoss) -> Iterator[Update]:
        assert isinstance(self.spec.config, TrainRoleConfig)
        batch = share.shard.materialize()
        was_skipped = False
        passes = training_passes(self.spec.model_spec.lora)
        place = {int(sample): row for row, sample in enumerate(batch.tensor("sample").tolist())}
        with self.phases.of("train") as work:
            self.strategy.set_schedule(share.first_update)
            for number, mini_batch in enumerate(share.mini_batches):
                rows = batch.take(np.array([place[int(sample)] for sample in mini_batch.samples], dtype=np.int64))
                rows = rows.with_columns(loss_weight=from_numpy(mini_batch.weights))
                whole = append_supervised(rows, share.supervised[number]) if share.supervised else rows
                plan = self.strategy.plan(whole.lengths, self._budget(*self.spec.config.in_training, loss_fn.outputs))
                result = self.strategy.train_step(whole, loss_fn, loss_fn.outputs, plan)
                self._count(work, whole, passes)
                explained = self._row_losses(whole, loss_fn) if result.skipped and not was_skipped else {}
                was_skipped = result.skipped
                yield Update(mini_batch.epoch, result, row_losses=explained)

    def _count(self, work: PhaseWork, rows: DataProto, passes: int = 1) -> None:
        layout = self.strategy.layout
        part = layout.data_size / layout.world_size
        has_logits = "response_mask" in rows and not isinstance(self.spec.config, CriticRoleConfig)
        outputs = int(rows.ragged("response_mask").values.sum()) if has_logits else 0
        work.tokens += part * int(rows.lengths.sum())
        work.flops += part * self._architecture.flops(rows.lengths.tolist(), outputs, passes)

    def _row_losses(self, rows: DataProto, loss_fn: ActorLoss | CriticLoss) -> dict[int, float]:
        """Recompute each row's loss, by sample, after a skipped update; empty where `forward` returns None."""
        plan = self.strategy.plan(rows.lengths, self._forward_budget(loss_fn.outputs))
        found = self.strategy.forward(rows, loss_fn.outputs, plan)
        if found is None:
            return {}
        apart = replace(loss_fn)  # a copy: the original recorded ratios and peaks in training
        losses: dict[int, float] = {}
        for number, sample in enumerate(rows.tensor("sample").tolist()):
            of_row = MicroBatchOutputs(**{name: found.ragged(name).row(number)[None] for name in loss_fn.outputs})
            losses[sample] = float(apart(of_row, padded(rows.slice(number, number + 1)))[0])
        return losses

    def _forward_budget(self, outputs: Sequence[str]) -> TokenBudget:
        return self._budget(self.spec.config.micro_batch_tokens, self.spec.config.micro_batch_size, outputs)

    def _budget(self, tokens: int, rows: int | None, outputs: Sequence[str]) -> TokenBudget:
        return TokenBudget(tokens, rows, self.strategy.layout.attention_parity_tokens, with_padding="distribution" in outputs)

    def gather_from_heads(self, rows: torch.Tensor) -> list[torch.Tensor]:
        everyone: list[torch.Tensor | None] = [None] * self.strategy.layout.data_size
        dist.all_gather_object(everyone, rows, group=self._heads)
        return [part for part in everyone if part is not None]


class ReferenceWorker(ModelWorker):
    computes: ClassVar[Mapping[str, str]] = {"ref_log_probs": "log_probs", "ref_distribution": "distribution"}
    forward_columns = Columns(reads=("input_ids", "response_mask", "temperature"), if_there=("kept_ids",))


class CriticWorker(ModelWorker):
    computes: ClassVar[Mapping[str, str]] = {"values": "values", "final_value": "final_value"}

    def __init__(self, role: ModelRole, algorithm: AlgorithmConfig, domains: int) -> None:
        super().__init__(role)
        self.loss = CriticLoss(clip=algorithm.value_loss.clip, domains=domains)

    @staticmethod
    def training_reads(_: AlgorithmConfig) -> Columns:
        return training_columns(CriticLoss.columns)

    def train(self, share: TrainShare) -> list[Update]:
        return list(self._train(share, self.loss))
