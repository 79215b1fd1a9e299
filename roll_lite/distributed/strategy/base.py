"""Interfaces of training frameworks (train strategies) and inference engines (inference strategies). Neither depends on Ray: a train
strategy needs RANK, WORLD_SIZE and a rendezvous, an inference strategy an asyncio loop."""

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
from typing import Any, ClassVar, Literal

import numpy as np
import torch

from roll_lite.config.arithmetic import Sleep
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
    """Coordinates of a rank in the parallel groups. In each data-parallel replica, only the head rank (tensor rank 0, context rank 0, last
    pipeline stage) returns results. It is unrelated to the LM head."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    is_head: bool
    attention_par: float = inf
    """Row length in tokens at which attention costs as much as the rest of the model (`row_costs` in data/minibatches.py)."""

    @staticmethod
    def of_copy(rank: int, world_size: int) -> RankLayout:
        """Layout for a rank that holds the whole model."""
        return RankLayout(rank, world_size, rank, world_size, tensor_rank=0, pipeline_rank=0, context_rank=0, is_head=True)


def take_local_device() -> torch.device:
    """Make GPU number LOCAL_RANK the current device and return it. Return the CPU if there are no GPUs."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return current_device()


def current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


ValueInit = Literal["actor", "reward_model", "path"]
"""Where a value model's weights come from (CriticRoleConfig.init). "actor": the actor's model with a new head of zeros, so values start at
0. Otherwise a checkpoint with a value head."""


@dataclass(frozen=True)
class ModelSpec:
    model: ModelConfig
    strategy: MegatronStrategyConfig | HfStrategyConfig
    path_key: str
    optimizer: OptimizerConfig | None = None
    """None if the model only runs forward passes."""
    total_updates: int | None = None
    """Optimizer steps of the whole run; needed for a decaying learning rate."""
    balance_coef: float = 0.0
    """Weight of the expert load-balancing loss."""
    value_init: ValueInit | None = None
    """Where the value head's weights come from; None for a language model."""
    lora: LoraConfig | None = None
    """LoRA adapters to train; None to train all weights."""
    ema_decay: float | None = None
    """Decay of the weights' moving average; None to keep no average."""
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
    """Bytes of state that a rank moved between device and host memory, and the seconds that took."""

    freed_bytes: int = 0
    out_bytes: int = 0
    """Bytes copied to the host. State that is dropped, or whose host copy is still valid, does not count."""
    in_bytes: int = 0
    out_seconds: float = 0.0
    in_seconds: float = 0.0
    """Seconds for which the rank waited while state was loaded back to the device. Copies in the background do not count."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(own + new for own, new in zip(astuple(self), astuple(other), strict=True)))


LossFn = Callable[[MicroBatchOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Loss of a micro-batch. Returns sum(weight * token loss) and sums of metrics. The weights are already normalized over the whole
mini-batch, so both results add up over micro-batches and ranks."""


@dataclass(frozen=True)
class ExpertUse:
    """Evenness of expert use in an optimizer step; values are means over the expert layers."""

    busiest: float
    """Tokens of the busiest expert relative to the average."""
    balance_loss: float | None
    """Load-balancing loss without its coefficient; None if the coefficient is 0."""
    rerouted: float | None = None
    """Fraction of replayed expert choices that the router would now make differently; None if nothing was replayed."""


@dataclass(frozen=True)
class TrainResult:
    """Result of one optimizer step, equal on every rank."""

    metrics: dict[str, float]
    """Metrics, summed over all micro-batches and data-parallel ranks."""
    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    """True if loss or gradient was not finite; weights, moments and schedule are unchanged."""
    experts: ExpertUse | None = None


class ForwardStrategy(ABC):
    """Model sharded over the ranks of one cluster, for forward passes. All ranks must call its methods in the same order."""

    needs_process_group: ClassVar[bool] = True
    """True if ranks need a process group before `initialize`."""
    pads_rows: ClassVar[bool] = False
    """True if rows are padded to the longest of their micro-batch; False if they are packed."""
    layout: RankLayout

    @abstractmethod
    def initialize(self) -> None:
        """Build this rank's part of the model and load its weights."""

    @abstractmethod
    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        """Divide this rank's rows, of `lengths` tokens, into micro-batches.

        `together`: all data-parallel ranks make this call, and get the same number of micro-batches. Otherwise each model replica plans
        alone."""

    @abstractmethod
    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        """Run a forward pass without gradients. Head ranks return the columns `outputs`, other ranks None. Possible outputs: log_probs,
        entropy, distribution; with a value head also values and final_value; with experts also `experts`, the ids that routers chose.

        Here and in train_step, logits are divided by the column `temperature` before the softmax. If the batch has a column `kept_ids`, the
        softmax covers only these ids and the target token. If it has a column `old_experts` or `rollout_experts`, routers replay the
        choices in it."""

    @abstractmethod
    def load(self, groups: Iterable[StateGroup]) -> None:
        """Load offloaded state groups back to the device."""

    @abstractmethod
    def offload(self, groups: Iterable[StateGroup]) -> None:
        """Free the device memory of state groups. Their contents stay in host memory; gradients are dropped."""


@dataclass
class CheckpointWrite:
    """Handle for saving this rank's part of a checkpoint. In this class, the files are already written; a subclass may write them during
    the next steps."""

    folder: Path
    files: Sequence[Path] = ()

    @property
    def is_done(self) -> bool:
        """True if the files are written or writing has failed, so `finish` returns at once."""
        return True

    def finish(self) -> dict[str, FileRecord]:
        """Wait until this rank's files are on disk. Collective. Returns their records by path; no two ranks record the same file. Raises
        RuntimeError if writing failed."""
        flush(self.files)
        return {str(file.relative_to(self.folder)): record(file) for file in self.files}


StateCopy = tuple[list[np.ndarray], list[dict[str, float]], dict[str, Any]]
"""Bytes of a rank's tensors, its learning rates and step counts, and its random state."""


class TrainStrategy(ForwardStrategy):
    @abstractmethod
    def train_step(self, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], plan: MicroBatchPlan) -> TrainResult:
        """Run one optimizer step on this data-parallel rank's rows of a mini-batch. loss_fn is called for every micro-batch of the plan,
        even those without rows."""

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Switch LoRA adapters off inside the block."""

    @abstractmethod
    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        """Describe the tensors that engines get: the model's, with adapters merged, or only the adapters if lora.engines is "adapter".
        Equal on every rank."""

    @abstractmethod
    def export_bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, torch.Tensor] | None:
        """Gather one bucket of the plan; collective. Returns the tensors on the rank that sends them, None on others. They may share the
        model's memory, so they are valid only until training continues."""

    @abstractmethod
    def replica_checksums(self) -> dict[str, str]:
        """Checksums of this rank's weights. A key names a tensor and this rank's shard of it. Ranks with an equal key hold replicas, so
        their checksums must be equal."""

    @property
    @abstractmethod
    def loaded(self) -> Sequence[StateGroup]:
        """State groups of this rank that are on the device."""

    @abstractmethod
    def take_moved(self) -> Moved:
        """Return how much `load` and `offload` moved since the last call."""

    @abstractmethod
    def save_checkpoint(self, folder: Path, asynchronous: bool = False) -> CheckpointWrite:
        """Save weights (or only adapters), optimizer, schedule and random state. `asynchronous`: write the files while training
        continues."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None: ...

    @abstractmethod
    def copy_state(self) -> StateCopy:
        """Copy to host memory the state that this rank would save in a checkpoint."""

    @abstractmethod
    def load_copy(self, copy: StateCopy) -> None:
        """Load the result of `copy_state` from the same rank of a strategy with the same configuration."""

    @abstractmethod
    def save_hf(self, folder: Path, average: bool = False) -> list[Path]:
        """Save the weights, or their moving `average` (ModelSpec.ema_decay), as Hugging Face safetensors with config and tokenizer. Returns
        the files that this rank wrote."""

    @abstractmethod
    def save_adapters(self, folder: Path) -> list[Path]:
        """Save the LoRA adapters in PEFT's format. Returns the files that this rank wrote."""

    @abstractmethod
    def load_hf(self, folder: Path) -> None:
        """Load weights that save_hf wrote for the same model. Only for a model without an optimizer."""


# ---------------------------------------------------------------- inference


class PauseMode(StrEnum):
    ABORT = "abort"
    """End running requests; they return the tokens generated so far."""
    KEEP = "keep"
    """Freeze running requests; they continue after resume."""


@dataclass(frozen=True)
class EngineHealth:
    alive: bool
    running: int
    waiting: int


@dataclass(frozen=True)
class EngineNode:
    """One node of a multi-node engine. Node 0 takes requests and calls all workers; other nodes only run workers."""

    nodes: int
    number: int
    address: str
    meeting: tuple[str, int]
    """IP address and port on node 0 at which the workers connect."""


@dataclass(frozen=True)
class EngineSpec:
    model: ModelConfig
    strategy: InferStrategyConfig
    max_model_len: int
    seed: int = 1
    threads: int = 1
    """CPU threads of each engine process."""
    silence_s: float | None = None
    """Seconds that an engine process may be stopped (SIGSTOP) before the engine counts as dead; None: no limit."""
    step_s: float | Literal["auto"] | None = None
    """Minimum time limit for one engine step, in seconds; long steps raise the limit. None: no limit; "auto": depends on the device."""
    columns: tuple[str, ...] = ()
    """Extra columns that completions must include (keys of EXTRA_COLUMNS in workers/token_blocks.py)."""
    node: EngineNode | None = None
    sharers: int = 1
    """Number of engine replicas on this engine's device; they have consecutive ranks among all replicas."""
    lora: LoraConfig | None = None
    """LoRA adapters, if weight updates send only these; None if they send all weights."""
    sleep: Sleep = "with_copy"

    @property
    def reports_experts(self) -> bool:
        """True if completions carry expert choices (Completion.experts)."""
        return "rollout_experts" in self.columns


@dataclass(frozen=True, slots=True)
class RequestProgress:
    generated: int
    """Number of tokens generated so far; may lag slightly."""
    part: Completion | None = None
    """Tokens since the last report with new tokens, without text and finish reason.

    The newest token is left out: it may end the response, and a retry must not continue after the end."""


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
        """Start a request. The future returns its completion, even if the request fails or is aborted. Cancelling the future aborts the
        request.

        `report` is called soon after the engine has begun with the request, and then every few seconds with new tokens
        (inference/requests.py)."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """Abort requests (None: all); they return the tokens generated so far. Unknown ids are ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        """Connect the engine's workers to the trainers' current transfer group, which sends weights; close earlier connections. Collective
        with the trainers. `first_member`: number of the engine's first worker among the members."""

    @abstractmethod
    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Prepare to receive a weight update of these tensors. ValueError if names or shapes are wrong; nothing has changed then."""

    @abstractmethod
    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        """Receive one bucket of tensors and load it. `following`: routes of the next bucket, which may be received while this one loads."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> dict[str, float]:
        """Use the new weights from now on, and clear prefix caches. Returns the slowest worker's seconds by phase."""

    async def update_weights(self, routes: Sequence[Route], version: int) -> dict[str, float]:
        """Receive a whole weight update while the trainers run `WeightSender.send`. After a TransferError, the engine continues with the
        old weights; if it already has some new ones, it stays frozen until a complete update."""
        await self.begin_weight_update(tensors_of(routes))
        buckets = by_bucket(routes)
        for bucket, following in zip(buckets, [*buckets[1:], []], strict=True):
            await self.receive_bucket(bucket, following)
        return await self.finish_weight_update(version)

    @abstractmethod
    async def weight_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Checksums of the named tensors (None: all), by Hugging Face name; see `checksum` in weight_sync/update.py."""

    async def trace(self, prefix: str | None) -> list[str]:
        """Start to record the engine's workers with torch's profiler or, with a prefix, let each write its recording to
        PREFIX-NUMBER.json.gz. Returns what failed, by worker; empty texts if nothing."""
        return []

    @abstractmethod
    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Load offloaded parts back to the device. The weights alone are enough to receive an update."""

    @abstractmethod
    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Free the device memory of parts: weights move to host memory or are dropped (EngineSpec.sleep), the KV cache is dropped. Running
        requests are aborted. New requests wait until every part is loaded again, even if the device could not free its memory."""

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

    def fail(self, why: str) -> None:
        """Declare the engine dead because a part of it outside of this process is gone."""
        raise NotImplementedError(f"{type(self).__name__} needs nothing outside of its process")
