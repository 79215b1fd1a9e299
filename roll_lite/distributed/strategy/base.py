"""The two interfaces behind which training frameworks and inference engines stand.

Neither knows Ray: a train strategy runs wherever RANK, WORLD_SIZE and a rendezvous are given (a Ray worker, torchrun,
a spawned process), an inference strategy wherever an asyncio loop runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from roll_lite.config.checkpoint_files import FileRecord
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
from roll_lite.distributed.weight_sync.plan import ExportedTensor, ExportPlan, Membership, Route, by_bucket, tensors_of

# ---------------------------------------------------------------- training


@dataclass(frozen=True)
class RankLayout:
    """Where a rank stands. Head ranks (tensor rank 0, context rank 0, last pipeline stage) return results, one per data-parallel rank."""

    rank: int
    world_size: int
    data_rank: int
    data_size: int
    tensor_rank: int
    pipeline_rank: int
    context_rank: int
    is_head: bool
    attention_par: float = inf
    """Tokens of a row at which attention costs as much as everything else in the model (RowCosts)."""


ValueInit = Literal["actor", "reward_model", "path"]
"""Where a value model's weights come from (CriticRoleConfig.init): a base model, whose head starts at zero, so that all values start at
0; or a checkpoint with its own head, be it a reward model's or one that save_hf wrote."""


@dataclass(frozen=True)
class ModelSpec:
    """The model that a strategy is to hold, and what for."""

    model: ModelConfig
    strategy: MegatronStrategyConfig | HfStrategyConfig
    path_key: str
    """Where the YAML names the model's folder."""
    optimizer: OptimizerConfig | None = None
    """None: forward passes only."""
    total_updates: int | None = None
    """Optimizer steps of the whole run, for a learning rate that decays."""
    balance_coef: float = 0.0
    """Weight of the load-balancing loss of a model with experts (TrainRoleConfig.balance_coef)."""
    value_init: ValueInit | None = None
    """With a value head in the place of the language model's."""
    lora: LoraConfig | None = None
    """Only adapters train."""
    ema_decay: float | None = None
    """With an average of the weights."""
    seed: int = 1
    deterministic: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.model.dtype]


class StateGroup(StrEnum):
    """What can be moved out of device memory, each on its own."""

    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Moved:
    """What a rank has moved out of device memory and back."""

    freed_bytes: int = 0
    out_bytes: int = 0
    """Of what was freed, what had to be copied to the host; gradients are dropped, and what has not changed is there already."""
    in_bytes: int = 0
    out_seconds: float = 0.0
    in_seconds: float = 0.0
    """Until the rank could go on. What a GPU still receives while it computes is not in it."""

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(own + new for own, new in zip(astuple(self), astuple(other), strict=True)))


LossFn = Callable[[MicroBatchOutputs, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]
"""Returns the micro-batch's share of the loss, sum(weight * token loss), with weights from global counts, so that shares
add up over micro-batches and ranks; and metric sums, each a tensor that adds up the same way."""


@dataclass(frozen=True)
class ExpertUse:
    """How evenly the tokens of an optimizer step chose their experts; means over the layers that have some."""

    busiest: float
    """Tokens of the busiest expert, as a multiple of what all of them have on average."""
    balance_loss: float | None
    """Without its coefficient; None where that is 0."""
    rerouted: float | None = None
    """Share of the replayed choices that the router would have made otherwise by now; None where nothing was replayed."""


@dataclass(frozen=True)
class TrainResult:
    """Of one optimizer step. The same on every rank."""

    metrics: dict[str, float]
    """Metric sums over all micro-batches and data-parallel ranks."""
    loss: float
    grad_norm: float
    lr: float
    skipped: bool = False
    """The loss or the gradient was not finite, weights, moments and schedule were left alone."""
    experts: ExpertUse | None = None
    """None for a model without experts."""


class ForwardStrategy(ABC):
    """A model spread over the ranks of one cluster, for forward passes. Every method is called on every rank, in the same order."""

    needs_process_group: ClassVar[bool] = True
    """The ranks work together: the caller makes a process group of them before `initialize`."""
    pads_rows: ClassVar[bool] = False
    """Each row of a micro-batch takes as much as the longest; elsewhere they lie one behind the other."""
    layout: RankLayout

    @abstractmethod
    def initialize(self) -> None:
        """Build this rank's part of the model, load its weights."""

    @abstractmethod
    def plan(self, lengths: torch.Tensor, planner: MicroBatchPlanner, together: bool = True) -> MicroBatchPlan:
        """How this rank's rows, of `lengths` tokens, go through the model in one pass.

        `together`: every data-parallel rank plans its part of the same pass now, and all run equally many micro-batches; otherwise the
        ranks that hold this copy of the model make a pass of their own."""

    @abstractmethod
    def forward(self, batch: DataProto, outputs: Sequence[str], plan: MicroBatchPlan) -> DataProto | None:
        """`outputs`: of log_probs, entropy, distribution; with a value head of values, final_value; with experts also `experts`. Columns
        under those names on head ranks, None elsewhere. No gradient.

        Here and in train_step a softmax is that of logits / temperature, a column of the batch. Where the batch has the column kept_ids,
        it goes over those tokens only (and the target). A model with experts uses those of the column old_experts or rollout_experts
        where the batch has one."""

    @abstractmethod
    def load(self, groups: Iterable[StateGroup]) -> None:
        """Bring state groups back to the device; groups that are there already are left alone."""

    @abstractmethod
    def offload(self, groups: Iterable[StateGroup]) -> None:
        """Free the device memory of state groups, keeping their contents in host memory (gradients are dropped)."""


class CheckpointWrite(ABC):
    """This rank's part of a checkpoint that is being written beside its next steps."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """It has been written, or has failed: `finish` does not wait."""

    @abstractmethod
    def finish(self) -> dict[str, FileRecord]:
        """On every rank, in the same order as everything else. Waits; RuntimeError where the part could not be written. Of every file of
        the checkpoint one rank says what it is, by its path in it."""


class TrainStrategy(ForwardStrategy):
    """One that can train as well."""

    @abstractmethod
    def train_step(self, batch: DataProto, loss_fn: LossFn, outputs: Sequence[str], plan: MicroBatchPlan) -> TrainResult:
        """One optimizer step on this data-parallel rank's rows of a mini-batch, possibly none. loss_fn is called on every micro-batch of
        the plan, also on those without rows."""

    @abstractmethod
    def adapters_off(self) -> AbstractContextManager[None]:
        """Inside it passes are those of the model without the adapters that train beside its weights (ModelSpec.lora)."""

    @abstractmethod
    def export_plan(self, bucket_bytes: int) -> ExportPlan:
        """What the model looks like as a Hugging Face checkpoint, adapters merged. The same on every rank; made once."""

    @abstractmethod
    def export_bucket(self, plan: ExportPlan, bucket: int) -> dict[str, torch.Tensor] | None:
        """Gather one bucket: the tensors that this rank owns; None where it owns none of them. They may lie in the model's own memory, and
        change when training goes on."""

    @abstractmethod
    def take_moved(self) -> Moved:
        """All that `load` and `offload` have moved since it was asked last."""

    @abstractmethod
    def save_checkpoint(self, folder: Path) -> None:
        """Weights, optimizer, learning-rate schedule, RNG; of a model with adapters theirs alone."""

    @abstractmethod
    def start_checkpoint(self, folder: Path) -> CheckpointWrite:
        """The same as it is now, while the steps go on."""

    @abstractmethod
    def load_checkpoint(self, folder: Path) -> None: ...

    @abstractmethod
    def save_hf(self, folder: Path, average: bool = False) -> None:
        """The weights as Hugging Face safetensors with config and tokenizer. `average`: theirs (ModelSpec.ema_decay)."""

    @abstractmethod
    def load_hf(self, folder: Path) -> None:
        """Other weights of the same model, as save_hf has written them. Only where nothing trains."""


# ---------------------------------------------------------------- inference


class PauseMode(StrEnum):
    ABORT = "abort"
    """End running requests with what they have."""
    KEEP = "keep"
    """Freeze running requests; they go on after resume."""
    WAIT = "wait"
    """Admit nothing new and let running requests finish."""


class EngineMemory(StrEnum):
    """What of an engine can be moved out of device memory, each on its own."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


@dataclass(frozen=True)
class EngineHealth:
    alive: bool
    version: int
    running: int
    waiting: int
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class EngineNode:
    """One of the nodes that an engine spans. Node 0 takes the requests and calls the workers of all; the others only have workers."""

    nodes: int
    number: int
    address: str
    """Of this one."""
    meeting: tuple[str, int]
    """Address and port on node 0 where the workers find each other. Engines take nothing but a number for it."""


@dataclass(frozen=True)
class EngineSpec:
    """What an engine replica needs to know."""

    model: ModelConfig
    strategy: InferStrategyConfig
    max_model_len: int
    seed: int = 1
    threads: int = 1
    """CPU threads of each of the engine's processes."""
    silence_s: float | None = None
    """How long one of them may stay stopped; None: for ever."""
    step_s: float | Literal["auto"] | None = None
    """How long a step of the engine may take at least; None: for ever."""
    experts: bool = False
    """Completions say where their tokens went (Completion.experts)."""
    node: EngineNode | None = None
    """None: all of the engine is on one."""
    sharers: int = 1
    """Replicas that share its device; their ranks follow one another."""
    lora: LoraConfig | None = None
    """Updates are these adapters, which the engine adds to the model's own weights; None: all weights."""


class InferenceStrategy(ABC):
    """One engine replica."""

    @property
    def notes(self) -> Sequence[str]:
        """What of the user's settings the engine does not get, to be said at the start."""
        return ()

    @abstractmethod
    async def initialize(self) -> None: ...

    @abstractmethod
    def generate(self, requests: Sequence[GenerationRequest]) -> AsyncIterator[Completion]:
        """Completions in the order in which they finish, one for each request, also for failed and aborted ones."""

    @abstractmethod
    def generated(self, request_ids: Collection[str]) -> Mapping[str, int]:
        """How many tokens it has generated of those in flight that it has begun with, as far as it is known; perhaps a moment late."""

    @abstractmethod
    async def grown(self, since: Mapping[str, int]) -> list[Completion]:
        """Of requests in flight what has been generated beyond so many tokens, where there is something, as far as it is known. Without
        text and finish reason, and without the newest token: it may end the response, and whoever goes on from these must not go past
        its end."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        """End requests with the tokens they have (all where None); unknown ones are ignored."""

    @abstractmethod
    async def pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        """Join an epoch of the transfer group, in place of any earlier one. Collective with the trainers. `first_member`: number of the
        engine's first worker in the group; the others follow."""

    @abstractmethod
    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        """Check every name and shape against the model (ValueError before anything is touched) and get ready to receive."""

    @abstractmethod
    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        """Take part in the transfer of one bucket, over all its routes, and load it. `following`: of the bucket that comes next, which may
        travel meanwhile."""

    @abstractmethod
    async def finish_weight_update(self, version: int) -> dict[str, float]:
        """Make the new weights the ones that generate; clear prefix caches. The update's seconds by phase, of the slowest worker."""

    async def update_weights(self, routes: Sequence[Route], version: int) -> dict[str, float]:
        """A whole update, bucket by bucket, beside the trainers' `WeightSender.send`. Where that raises TransferError the engine goes on
        with the old weights or, if it has part of the new ones, generates nothing until another update has come."""
        await self.begin_weight_update(tensors_of(routes))
        buckets = by_bucket(routes)
        for bucket, following in zip(buckets, [*buckets[1:], []], strict=True):
            await self.receive_bucket(bucket, following)
        return await self.finish_weight_update(version)

    @abstractmethod
    async def weight_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        """Checksum by Hugging Face name, of all tensors or some, comparable with `weight_sync.checksum` of what was sent."""

    @abstractmethod
    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Bring parts back; those that are there are left alone. The weights alone are enough to receive an update."""

    @abstractmethod
    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """Free the device memory of parts: weights move to host memory, keys and values are dropped. Running requests end as aborted;
        from then on requests wait until every part is back. Where an engine cannot free memory, all but that is the same."""

    @abstractmethod
    async def health(self) -> EngineHealth: ...

    @abstractmethod
    async def shutdown(self) -> None: ...

    def fail(self, why: str) -> None:
        """What it needs outside of this process is gone: from now on it is dead."""
        raise NotImplementedError(f"{type(self).__name__} needs nothing outside of its process")
