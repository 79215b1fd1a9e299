"""Interfaces of train strategies (training frameworks) and inference engines, independent of Ray."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from roll_lite.config.arithmetic import EngineOffload
from roll_lite.config.schema.models import (
    HfStrategyConfig,
    InferStrategyConfig,
    LoraConfig,
    MegatronStrategyConfig,
    ModelConfig,
    OptimizerConfig,
)
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs, MicroBatchPlan, MicroBatchPlanner
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import Completion, GenerationRequest
from roll_lite.distributed.numa import bind_to_gpu
from roll_lite.distributed.strategy.inference.life import EngineLife, EngineMemory
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, Membership, Route, by_bucket, tensors_of
from roll_lite.files import FileRecord, flush, record
from roll_lite.observability.device_memory import PeaksByPhase

GROUP_TIMEOUT = timedelta(days=7)
"""Longer than default `limits`, which find hangs."""

# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class RankLayout:
    """Parallel coordinates of a rank. Each data-parallel replica's head rank returns results: tensor and context rank 0 of the last
    pipeline stage."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    is_head: bool
    attention_parity_tokens: float = inf
    """Row length at which attention costs as much as the rest."""

    @staticmethod
    def of_copy(rank: int, world_size: int) -> RankLayout:
        return RankLayout(rank, world_size, rank, world_size, tensor_rank=0, pipeline_rank=0, context_rank=0, is_head=True)


def take_local_device() -> torch.device:
    """Make GPU number LOCAL_RANK current and bind this process near it; without GPUs, return the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        bind_to_gpu(torch.cuda.get_device_properties(current_device()))
    return current_device()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


ValueInit = Literal["actor", "reward_model", "path"]
"""Source of a value model's weights. "actor": the actor, with a zero value head; else: a checkpoint with value head."""


@dataclass(frozen=True)
class ModelSpec:
    model: ModelConfig
    strategy: MegatronStrategyConfig | HfStrategyConfig
    path_key: str
    optimizer: OptimizerConfig | None = None
    """None: forward passes only."""
    total_updates: int | None = None
    balance_coef: float = 0.0
    value_init: ValueInit | None = None
    """None: the model is a language model."""
    lora: LoraConfig | None = None
    """None: all weights train."""
    ema_decay: float | None = None
    seed: int = 1
    deterministic: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.model.dtype]


class StateGroup(StrEnum):
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


LossFn = Callable[[MicroBatchOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns (sum of weight * token loss, metric sums) of a micro-batch; both add up over micro-batches and ranks."""


@dataclass(frozen=True)
class ExpertUse:
    """Expert use in an optimizer step, averaged over expert layers."""

    busiest: float
    """Tokens of the busiest expert, relative to the average."""
    balance_loss: float | None
    """Load-balancing loss without its coefficient; None if the coefficient is 0."""
    rerouted: float | None = None
    """Fraction of replayed choices that the current router would change."""


@dataclass(frozen=True)
class TrainResult:
    """Result of an optimizer step, equal on every rank."""

    metrics: dict[str, float]
    """Sums over micro-batches and data-parallel ranks."""
    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    """True if loss or gradient was not finite: weights and optimizer stay."""
    experts: ExpertUse | None = None


class ForwardStrategy(ABC):
    """Model for forward passes, sharded over a cluster's ranks. All ranks must call methods in the same order."""

    needs_process_group: ClassVar[bool] = True
    pads_rows: ClassVar[bool] = False
    """True if rows are padded to the longest of their micro-batch instead of packed."""
    layout: RankLayout

    @abstractmethod
    def initialize(self) -> None:
        """Build this rank's part of the model and load its weights."""

    @abstractmethod
    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        """Divide this rank's rows into micro-batches. `lengths`: tokens per row. `together`: all data-parallel ranks call this, for
        equal micro-batch counts."""

    @abstractmethod
    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        """Run a forward pass without gradients.

        Head ranks return columns `outputs`; others, None. Columns: log_probs, entropy, distribution (language model); values, final_value
        (value model); experts (chosen ids). Batch columns, also in train_step: `temperature` divides a language model's logits. Optional:
        `kept_ids` restricts the softmax; `old_experts` or `rollout_experts` are replayed.
        """

    @abstractmethod
    def load(self, groups: Iterable[StateGroup]) -> Mapping[str, int]:
        """Load offloaded state groups. Return {"in": bytes copied}, or {} if not measured."""

    @abstractmethod
    def offload(self, groups: Iterable[StateGroup]) -> Mapping[str, int]:
        """Move state groups to the host and free device memory; drop gradients. Return {"freed": bytes, "out": bytes copied}, or {} if not
        measured."""


@dataclass
class CheckpointWrite:
    """Files that one rank adds to a checkpoint; a subclass may write them in the background."""

    folder: Path
    files: Sequence[Path] = ()

    @property
    def is_done(self) -> bool:
        return True

    def finish(self) -> dict[str, FileRecord]:
        """Wait until this rank's files are on disk (collective). Return {path: record}. RuntimeError if writing failed."""
        flush(self.files)
        return {str(file.relative_to(self.folder)): record(file) for file in self.files}


StateCopy = tuple[list[np.ndarray], list[dict[str, float]], dict[str, Any]]
"""(tensor bytes, learning rates and step counts, random state) of one rank."""


class TrainStrategy(ForwardStrategy):
    @abstractmethod
    def set_schedule(self, update: int) -> None:
        """Set the learning rate of planned update `update`, from 0."""

    @abstractmethod
    def train_step(self, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], plan: MicroBatchPlan) -> TrainResult:
        """Run an optimizer step on this data-parallel rank's rows. `loss_fn` is called for every micro-batch, even empty."""

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Disable LoRA adapters in the block."""

    @abstractmethod
    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        """Plan the tensors for engines, equal on every rank: weights with merged adapters, or adapters (lora.engines "adapter")."""

    @abstractmethod
    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, torch.Tensor] | None:
        """Gather one bucket (collective). Return it on the sending rank, None elsewhere. Tensors may share the model's memory: valid until
        training continues."""

    @abstractmethod
    def replica_checksums(self) -> dict[str, str]:
        """Return checksums of this rank's weights. A key names tensor, stage and shard: ranks with equal keys hold copies, which must
        agree."""

    @property
    @abstractmethod
    def loaded(self) -> Sequence[StateGroup]:
        """State groups on the device."""

    @abstractmethod
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> CheckpointWrite:
        """Save weights (or adapters), optimizer, schedule and random state. `asynchronous`: write while training continues."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None: ...

    @abstractmethod
    def copy_state(self) -> StateCopy:
        """Copy to the host what this rank would save in a checkpoint."""

    @abstractmethod
    def load_copy(self, copy: StateCopy) -> None:
        """Restore a `copy_state` of the same rank and configuration."""

    @abstractmethod
    def save_hf(self, folder: Path, average: bool = False) -> list[Path]:
        """Save weights, or their moving average, in Hugging Face format. Return this rank's files."""

    @abstractmethod
    def save_adapters(self, folder: Path) -> list[Path]:
        """Save LoRA adapters in PEFT format. Return this rank's files."""

    @abstractmethod
    def load_hf(self, folder: Path) -> None:
        """Load weights of `save_hf` into a model without optimizer."""


# ---------------------------------------------------------------- inference


class PauseMode(StrEnum):
    ABORT = "abort"
    KEEP = "keep"
    """Freeze running requests until resume."""


@dataclass(frozen=True)
class EngineHealth:
    alive: bool
    running: int
    waiting: int


@dataclass(frozen=True)
class EngineNode:
    """Node of a multi-node engine. Node 0 takes the requests."""

    nodes: int
    number: int
    address: str
    meeting: tuple[str, int]
    """(IP address, port) where workers meet, on node 0."""


@dataclass(frozen=True)
class EngineSpec:
    model: ModelConfig
    strategy: InferStrategyConfig
    max_model_len: int
    seed: int = 1
    threads: int = 1
    silence_s: float | None = None
    """Maximum seconds that a process may be stopped (SIGSTOP) before the engine counts as dead."""
    step_s: float | Literal["auto"] | None = None
    """Time limit of an engine step, raised after long steps. None: unlimited; "auto": by device."""
    columns: tuple[str, ...] = ()
    """Extra columns of completions (EXTRA_COLUMNS in token_blocks.py)."""
    node: EngineNode | None = None
    sharers: int = 1
    """Engine replicas on this engine's device, itself included."""
    lora: LoraConfig | None = None
    """Set if weight updates send adapters."""
    sleep: EngineOffload = "with_copy"

    @property
    def reports_experts(self) -> bool:
        return "rollout_experts" in self.columns


@dataclass(frozen=True, slots=True)
class RequestProgress:
    generated: int
    """Tokens so far; may lag slightly."""
    part: Completion | None = None
    """New tokens since the last report, except the newest: it may end the response, after which a retry must not continue."""


Report = Callable[[RequestProgress], None]


class InferenceStrategy(ABC):
    life: EngineLife
    notes: Sequence[str] = ()

    async def preload(self) -> None:  # noqa: B027 (only saves time)
        """Import the engine's package, which takes seconds, while other parts start."""

    @abstractmethod
    async def initialize(self) -> None: ...

    @abstractmethod
    def generate(self, request: GenerationRequest, report: Report = lambda progress: None) -> asyncio.Future[Completion]:
        """Start a request. The future returns a completion even after errors and aborts; cancelling it aborts the request. `report` is
        called soon after the start, then every few seconds with new tokens."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests (None: all); they complete with their tokens so far. Unknown ids are ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        """Move the engine's workers to a new transfer group (collective). `first_member`: the first worker's member number."""

    @abstractmethod
    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Announce a weight update. ValueError for wrong names or shapes; the engine is unchanged then."""

    @abstractmethod
    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        """Receive and load one bucket. `following`: routes of the next one, to receive it early."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> dict[str, float]:
        """Activate the new weights and clear prefix caches. Return {phase: seconds of its slowest worker}."""

    async def update_weights(self, routes: Sequence[Route], version: int) -> dict[str, float]:
        """Receive a whole weight update while trainers run `WeightSender.send`. After a TransferError, the engine keeps its old weights or,
        if some were overwritten, stays frozen until a complete update."""
        await self.begin_weight_update(tensors_of(routes))
        buckets = by_bucket(routes)
        for bucket, following in zip(buckets, [*buckets[1:], []], strict=True):
            await self.receive_bucket(bucket, following)
        return await self.finish_weight_update(version)

    @abstractmethod
    async def weight_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Return {Hugging Face name: checksum of the engine's weight}. `names`: None: all."""

    async def trace(self, prefix: str | None) -> list[str]:
        """Start torch's profiler in the workers or, with a prefix, write PREFIX-WORKER.json.gz. Return an error text per worker, empty on
        success."""
        return []

    async def take_memory(self) -> PeaksByPhase:
        """Return peak GPU memory by phase since the last call, maximum over workers."""
        return {}

    @abstractmethod
    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Load offloaded parts. A weight update needs the weights only."""

    @abstractmethod
    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Free device memory: weights move to the host or are dropped (EngineSpec.sleep), the KV cache is dropped. Running requests are
        aborted; new ones wait until everything is loaded."""

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

    def fail(self, why: str) -> None:
        """Declare the engine dead: something that it needs outside this process is gone."""
        raise NotImplementedError(f"{type(self).__name__} needs nothing outside of its process")
