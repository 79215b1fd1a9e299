"""Interfaces of training frameworks and inference engines.

Neither knows Ray: a train strategy runs wherever RANK, WORLD_SIZE and a rendezvous are given, an inference strategy wherever an asyncio
loop runs.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import ClassVar, Literal

import torch

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
from roll_lite.distributed.strategy.inference.life import EngineLife, EngineMemory
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, Membership, Route, by_bucket, tensors_of
from roll_lite.files import FileRecord, flush, record

# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class RankLayout:
    """Place of a rank among the parallel groups. Head ranks (tensor rank 0, context rank 0, last pipeline stage), one per data-parallel
    rank, return results; the name is unrelated to the LM head."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    is_head: bool
    attention_par: float = inf
    """Row length at which attention costs as much as the rest of the model (`row_costs` in data/minibatches.py)."""

    @staticmethod
    def of_copy(rank: int, world_size: int) -> RankLayout:
        """Layout of a rank with a copy of the whole model."""
        return RankLayout(rank, world_size, rank, world_size, tensor_rank=0, pipeline_rank=0, context_rank=0, is_head=True)


def take_local_device() -> torch.device:
    """Make GPU number LOCAL_RANK the current device; without GPUs, the CPU."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return current_device()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


ValueInit = Literal["actor", "reward_model", "path"]
"""Source of a value model's weights (CriticRoleConfig.init): the actor's model with a new head of zeros (values start at 0), or a
checkpoint with a head."""


@dataclass(frozen=True)
class ModelSpec:
    model: ModelConfig
    strategy: MegatronStrategyConfig | HfStrategyConfig
    path_key: str
    optimizer: OptimizerConfig | None = None
    """None: forward passes only."""
    total_updates: int | None = None
    """Optimizer steps of the whole run, for a decaying learning rate."""
    balance_coef: float = 0.0
    """Weight of the load-balancing loss."""
    value_init: ValueInit | None = None
    """Source of a value head in place of the language model's head."""
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights."""
    ema_decay: float | None = None
    """Decay of a moving average of the weights."""
    seed: int = 1
    deterministic: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.model.dtype]


class StateGroup(StrEnum):
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Moved:
    """State that a rank moved out of device memory and back, in bytes and seconds."""

    freed_bytes: int = 0
    out_bytes: int = 0
    """Bytes copied to the host; dropped state, or state already there, does not count."""
    in_bytes: int = 0
    out_seconds: float = 0.0
    in_seconds: float = 0.0
    """Seconds until the rank could continue; copies that overlap its computation do not count."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(own + new for own, new in zip(astuple(self), astuple(other), strict=True)))


LossFn = Callable[[MicroBatchOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's share of the loss, sum(weight * token loss) with weights from global counts, and metric sums. Both add up over
micro-batches and ranks."""


@dataclass(frozen=True)
class ExpertUse:
    """Balance of the expert choices in an optimizer step; means over the expert layers."""

    busiest: float
    """Tokens of the busiest expert relative to the average."""
    balance_loss: float | None
    """Loss without its coefficient; None if the coefficient is 0."""
    rerouted: float | None = None
    """Share of replayed choices that the router would now make differently; None if nothing was replayed."""


@dataclass(frozen=True)
class TrainResult:
    """Result of one optimizer step, equal on every rank."""

    metrics: dict[str, float]
    """Sums over all micro-batches and data-parallel ranks."""
    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    """True if loss or gradient was not finite; weights, moments and schedule are unchanged."""
    experts: ExpertUse | None = None


class ForwardStrategy(ABC):
    """Model spread over the ranks of one cluster, for forward passes. Every method is called on every rank, in the same order."""

    needs_process_group: ClassVar[bool] = True
    """True if ranks need a process group before `initialize`."""
    pads_rows: ClassVar[bool] = False
    """True if each row of a micro-batch costs as much as the longest; otherwise rows are packed."""
    layout: RankLayout

    @abstractmethod
    def initialize(self) -> None:
        """Build this rank's part of the model and load its weights."""

    @abstractmethod
    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        """Plan one pass over this rank's rows, of `lengths` tokens.

        `together`: all data-parallel ranks make this call and run equally many micro-batches; otherwise each model copy plans alone.
        """

    @abstractmethod
    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        """Forward pass without gradients. Head ranks return the columns `outputs`, others None. Possible outputs: log_probs, entropy,
        distribution; with a value head values, final_value; with experts `experts`, the chosen ids.

        Here and in train_step, logits are divided by the column temperature before the softmax. A column kept_ids restricts the softmax to
        these tokens and the target. A model with experts replays the column old_experts or rollout_experts, if there is one.
        """

    @abstractmethod
    def load(self, groups: Iterable[StateGroup]) -> None:
        """Bring offloaded state groups back to the device."""

    @abstractmethod
    def offload(self, groups: Iterable[StateGroup]) -> None:
        """Free the device memory of state groups. Their contents stay in host memory; gradients are dropped."""


@dataclass
class CheckpointWrite:
    """This rank's part of a checkpoint. In this class it is already written; a subclass may write it during the next steps."""

    folder: Path
    files: Sequence[Path] = ()

    @property
    def is_done(self) -> bool:
        """True if the part is written or has failed: `finish` will not wait."""
        return True

    def finish(self) -> dict[str, FileRecord]:
        """Wait, on every rank, until the files are on the disk. Returns records of this rank's files by path; each file is recorded by one
        rank. RuntimeError if this part failed."""
        flush(self.files)
        return {str(file.relative_to(self.folder)): record(file) for file in self.files}


class TrainStrategy(ForwardStrategy):
    @abstractmethod
    def train_step(self, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], plan: MicroBatchPlan) -> TrainResult:
        """Run one optimizer step on this data-parallel rank's rows of a mini-batch, possibly none. loss_fn is called on every micro-batch
        of the plan, even without rows."""

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Switch LoRA adapters off inside the block."""

    @abstractmethod
    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        """Describe what engines get: the model with merged adapters or, with lora.engines: adapter, the adapters alone. Equal on every
        rank."""

    @abstractmethod
    def export_bucket(self, plan: ExportPlan, bucket: int) -> dict[str, torch.Tensor] | None:
        """Gather one bucket. Returns what this rank sends, or None. Tensors may share the model's memory: valid until training
        continues."""

    @abstractmethod
    def replica_checksums(self) -> dict[str, str]:
        """Checksums of this rank's weights. A key names a tensor and the shard of it that the rank holds, so that ranks with equal keys
        are data-parallel replicas and must have equal checksums."""

    @abstractmethod
    def take_moved(self) -> Moved:
        """Return what `load` and `offload` moved since the last call."""

    @abstractmethod
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> CheckpointWrite:
        """Save weights (or only adapters), optimizer, schedule and random state. `asynchronous`: write while steps continue."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None: ...

    @abstractmethod
    def save_hf(self, folder: Path, average: bool = False) -> list[Path]:
        """Save the weights, or their `average` (ModelSpec.ema_decay), as Hugging Face safetensors with config and tokenizer. Returns this
        rank's files."""

    @abstractmethod
    def save_adapters(self, folder: Path) -> list[Path]:
        """Save the adapters in PEFT's format. Returns this rank's files."""

    @abstractmethod
    def load_hf(self, folder: Path) -> None:
        """Load weights that save_hf wrote for the same model. Only for a model that does not train."""


# ---------------------------------------------------------------- inference


class PauseMode(StrEnum):
    ABORT = "abort"
    """End running requests with the tokens they have."""
    KEEP = "keep"
    """Freeze running requests; they continue after resume."""
    WAIT = "wait"
    """Admit nothing new and let running requests finish."""


@dataclass(frozen=True)
class EngineHealth:
    alive: bool
    running: int
    waiting: int


@dataclass(frozen=True)
class EngineNode:
    """One node of an engine that spans several nodes. Node 0 takes requests and calls all workers; other nodes only run workers."""

    nodes: int
    number: int
    address: str
    meeting: tuple[str, int]
    """Numeric address and port on node 0 where the workers meet."""


@dataclass(frozen=True)
class EngineSpec:
    model: ModelConfig
    strategy: InferStrategyConfig
    max_model_len: int
    seed: int = 1
    threads: int = 1
    """CPU threads of each engine process."""
    silence_s: float | None = None
    """Seconds that a process may stay stopped; None: no limit."""
    step_s: float | Literal["auto"] | None = None
    """Minimum limit for one engine step in seconds; None: no limit. "auto": by device."""
    columns: tuple[str, ...] = ()
    """Additional columns of token blocks (EXTRA_COLUMNS in workers/token_blocks.py)."""
    node: EngineNode | None = None
    sharers: int = 1
    """Replicas that share its device; their ranks are consecutive."""
    lora: LoraConfig | None = None
    """Adapters that updates bring; None: all weights."""

    @property
    def reports_experts(self) -> bool:
        """True if completions carry expert choices (Completion.experts)."""
        return "rollout_experts" in self.columns


@dataclass(frozen=True, slots=True)
class RequestProgress:
    generated: int
    """Tokens so far; may lag slightly."""
    part: Completion | None = None
    """Tokens since the last part, without text and finish reason.

    The newest token is left out: it may end the response, and a continuation must not go beyond that.
    """


Report = Callable[[RequestProgress], None]


class InferenceStrategy(ABC):
    life: EngineLife

    @property
    def notes(self) -> Sequence[str]:
        """Start-up messages about user settings that the engine overrides."""
        return ()

    @abstractmethod
    async def initialize(self) -> None: ...

    @abstractmethod
    def generate(self, request: GenerationRequest, report: Report = lambda progress: None) -> asyncio.Future[Completion]:
        """Admit a request. The future yields its completion, also if it failed or was aborted; cancelling it aborts the request.

        `report` is called soon after the engine has begun with the request, and with its tokens every few seconds (inference/requests.py).
        """

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests (None: all) with the tokens they have; unknown ones are ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        """Join an epoch of the transfer group and leave the previous one, together with the trainers. `first_member`: member number of the
        engine's first worker."""

    @abstractmethod
    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Check names and shapes (ValueError before anything changes) and prepare to receive."""

    @abstractmethod
    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        """Take part in one bucket's transfer and load it. `following`: the next bucket, which may travel meanwhile."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> dict[str, float]:
        """Use the new weights from now on; clear prefix caches. Returns seconds by phase, of the slowest worker."""

    async def update_weights(self, routes: Sequence[Route], version: int) -> dict[str, float]:
        """Run a whole update while the trainers run `WeightSender.send`. After a TransferError the engine continues with the old weights
        or, if it has some new ones, generates nothing until another update."""
        await self.begin_weight_update(tensors_of(routes))
        buckets = by_bucket(routes)
        for bucket, following in zip(buckets, [*buckets[1:], []], strict=True):
            await self.receive_bucket(bucket, following)
        return await self.finish_weight_update(version)

    @abstractmethod
    async def weight_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Checksums (`checksum` in weight_sync/update.py) of some or all tensors, by Hugging Face name."""

    @abstractmethod
    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Bring offloaded parts back. The weights alone are enough to receive an update."""

    @abstractmethod
    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Free the device memory of parts: weights move to host memory, the KV cache is dropped. Running requests end as aborted; new ones
        wait until every part is back, even if the engine cannot free memory."""

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

    def fail(self, why: str) -> None:
        """Declare the engine dead: something that it needs outside of this process is gone."""
        raise NotImplementedError(f"{type(self).__name__} needs nothing outside of its process")
