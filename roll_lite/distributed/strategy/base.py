"""Interfaces of train strategies (training frameworks) and inference engines, independent of Ray."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from roll_lite.observability.device_memory import PhaseMemory

# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class RankLayout:
    """Parallel coordinates of a rank. Only head ranks return results: tensor rank 0 and context rank 0 of the last pipeline stage."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    is_head: bool
    attention_parity_tokens: float = inf
    """Row length at which attention costs as much as the rest of the model."""

    @staticmethod
    def of_copy(rank: int, world_size: int) -> RankLayout:
        return RankLayout(rank, world_size, rank, world_size, tensor_rank=0, pipeline_rank=0, context_rank=0, is_head=True)


def take_local_device() -> torch.device:
    """Make GPU number LOCAL_RANK the current device and bind this process near it. Without GPUs, return the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        bind_to_gpu(torch.cuda.get_device_properties(current_device()))
    return current_device()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


ValueInit = Literal["actor", "reward_model", "path"]
"""Source of a value model's weights: the actor's with a value head of zeros, or a checkpoint with a value head."""


@dataclass(frozen=True)
class ModelSpec:
    model: ModelConfig
    strategy: MegatronStrategyConfig | HfStrategyConfig
    path_key: str
    optimizer: OptimizerConfig | None = None
    """Optimizer settings; None: forward passes only."""
    total_updates: int | None = None
    balance_coef: float = 0.0
    value_init: ValueInit | None = None
    """Source of a value model's weights; None: the model is a language model."""
    lora: LoraConfig | None = None
    """LoRA settings; None: all weights train."""
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
"""Function that returns (sum of weight * token loss, metric sums) of a micro-batch; both are summed over micro-batches and ranks."""


@dataclass(frozen=True)
class ExpertUse:
    """Evenness of expert use in an optimizer step, averaged over expert layers."""

    busiest: float
    """Tokens of the busiest expert relative to the average."""
    balance_loss: float | None
    """Load-balancing loss without its coefficient; None if the coefficient is 0."""
    rerouted: float | None = None
    """Fraction of replayed expert choices that the current router would change."""


@dataclass(frozen=True)
class TrainResult:
    """Result of an optimizer step, equal on every rank."""

    metrics: dict[str, float]
    """Sums over micro-batches and data-parallel ranks."""
    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    """True if loss or gradient was not finite: weights, optimizer and schedule are unchanged."""
    experts: ExpertUse | None = None


class ForwardStrategy(ABC):
    """Model for forward passes, sharded over a cluster's ranks. All ranks must call its methods in the same order."""

    needs_process_group: ClassVar[bool] = True
    pads_rows: ClassVar[bool] = False
    """True if rows are padded to the longest of their micro-batch, not packed."""
    layout: RankLayout

    @abstractmethod
    def initialize(self) -> None:
        """Build this rank's part of the model and load its weights."""

    @abstractmethod
    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        """Divide this rank's rows into micro-batches. `lengths`: tokens of each row. `together`: all data-parallel ranks make this call and
        get equally many micro-batches."""

    @abstractmethod
    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        """Run a forward pass without gradients.

        Head ranks return the columns `outputs`, other ranks None: log_probs, entropy, distribution (language model); values, final_value
        (value model); experts (chosen ids). Batch columns, also in train_step: `temperature` (of language models) divides logits. Optional:
        `kept_ids` restricts the softmax; `old_experts` or `rollout_experts` are expert choices to replay."""

    @abstractmethod
    def load(self, groups: Iterable[StateGroup]) -> Mapping[str, int]:
        """Load offloaded state groups to the device. Return {"in": bytes copied}, or {} if not measured."""

    @abstractmethod
    def offload(self, groups: Iterable[StateGroup]) -> Mapping[str, int]:
        """Move state groups to host memory and free device memory; gradients are dropped.

        Return {"freed": bytes, "out": bytes copied}, or {} if not measured.
        """


@dataclass
class CheckpointWrite:
    """Files that one rank adds to a checkpoint. They are complete here; a subclass may write them in the background."""

    folder: Path
    files: Sequence[Path] = ()

    @property
    def is_done(self) -> bool:
        return True

    def finish(self) -> dict[str, FileRecord]:
        """Wait until this rank's files are on disk (collective). Return {path: record (size and checksum)}. RuntimeError if writing
        failed."""
        flush(self.files)
        return {str(file.relative_to(self.folder)): record(file) for file in self.files}


StateCopy = tuple[list[np.ndarray], list[dict[str, float]], dict[str, Any]]
"""(tensor bytes, learning rates and step counts, random state) of one rank."""


class TrainStrategy(ForwardStrategy):
    @abstractmethod
    def train_step(self, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], plan: MicroBatchPlan) -> TrainResult:
        """Run one optimizer step on this data-parallel rank's rows. `loss_fn` is called for every micro-batch, even empty ones."""

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Disable LoRA adapters inside the block."""

    @abstractmethod
    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        """Plan which tensors are sent to engines, equal on every rank: weights with adapters merged, or only adapters (lora.engines
        "adapter")."""

    @abstractmethod
    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, torch.Tensor] | None:
        """Gather one bucket of tensors (collective). Return them on the sending rank, None elsewhere. They may share the model's memory,
        and are valid only until training continues."""

    @abstractmethod
    def replica_checksums(self) -> dict[str, str]:
        """Return checksums of this rank's weights. Keys name tensor, stage and shard: ranks with the same key hold copies, whose checksums
        must agree."""

    @property
    @abstractmethod
    def loaded(self) -> Sequence[StateGroup]:
        """State groups on the device."""

    @abstractmethod
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> CheckpointWrite:
        """Save weights (or only adapters), optimizer, schedule and random state. `asynchronous`: write while training continues."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None: ...

    @abstractmethod
    def copy_state(self) -> StateCopy:
        """Copy to host memory what this rank would save in a checkpoint."""

    @abstractmethod
    def load_copy(self, copy: StateCopy) -> None:
        """Restore a `copy_state` of the same rank and configuration."""

    @abstractmethod
    def save_hf(self, folder: Path, average: bool = False) -> list[Path]:
        """Save weights, or their moving average, as a Hugging Face model. Return this rank's files."""

    @abstractmethod
    def save_adapters(self, folder: Path) -> list[Path]:
        """Save LoRA adapters in PEFT format. Return this rank's files."""

    @abstractmethod
    def load_hf(self, folder: Path) -> None:
        """Load weights written by `save_hf`, into a model without optimizer."""


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
    """Node of a multi-node engine. Only node 0 takes requests."""

    nodes: int
    number: int
    address: str
    meeting: tuple[str, int]
    """(IP address, port) of the workers' rendezvous on node 0."""


@dataclass(frozen=True)
class EngineSpec:
    model: ModelConfig
    strategy: InferStrategyConfig
    max_model_len: int
    seed: int = 1
    threads: int = 1
    silence_s: float | None = None
    """Maximum time that an engine process may be stopped (SIGSTOP) before the engine counts as dead."""
    step_s: float | Literal["auto"] | None = None
    """Time limit of an engine step, raised after long steps. None: unlimited; "auto": depends on the device."""
    columns: tuple[str, ...] = ()
    """Extra columns of completions (EXTRA_COLUMNS in workers/token_blocks.py)."""
    node: EngineNode | None = None
    sharers: int = 1
    """Engine replicas on this engine's device, itself included."""
    lora: LoraConfig | None = None
    """Set if weight updates send only adapters."""
    sleep: EngineOffload = "with_copy"

    @property
    def reports_experts(self) -> bool:
        return "rollout_experts" in self.columns


@dataclass(frozen=True, slots=True)
class RequestProgress:
    generated: int
    """Number of tokens so far; may lag slightly."""
    part: Completion | None = None
    """New tokens since the last report, except the newest: that token may end the response, and a retry must not continue after the end."""


Report = Callable[[RequestProgress], None]


class InferenceStrategy(ABC):
    life: EngineLife
    notes: Sequence[str] = ()

    async def preload(self) -> None:  # noqa: B027 (only saves time)
        """Import the engine's package, which takes seconds, while other components start."""

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
        """Move the engine's workers to the trainers' new transfer group (collective). `first_member`: the first worker's member number."""

    @abstractmethod
    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Announce a weight update. ValueError if names or shapes are wrong; the engine is then unchanged."""

    @abstractmethod
    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        """Receive and load one bucket. `following`: routes of the next bucket, which may already arrive."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> dict[str, float]:
        """Activate the new weights and clear prefix caches. Return the slowest worker's seconds by phase."""

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
        """Return {Hugging Face tensor name: checksum of the engine's weight}. `names`: tensors to include; None: all."""

    async def trace(self, prefix: str | None) -> list[str]:
        """Start torch's profiler in the workers or, with a prefix, write PREFIX-WORKER.json.gz. Return an error text per worker, empty on
        success."""
        return []

    async def take_memory(self) -> PhaseMemory:
        """Return the workers' GPU memory by phase since the last call: the largest of the workers."""
        return {}

    @abstractmethod
    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Load offloaded parts to the device. A weight update needs only the weights."""

    @abstractmethod
    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Free device memory: weights move to the host or are dropped (EngineSpec.sleep), the KV cache is dropped. Running requests are
        aborted; new ones wait until everything is loaded."""

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

    def fail(self, why: str) -> None:
        """Declare the engine dead, because something that the engine needs outside this process is gone."""
        raise NotImplementedError(f"{type(self).__name__} needs nothing outside of its process")
