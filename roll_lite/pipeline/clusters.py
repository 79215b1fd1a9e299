"""Handles of models and engines for the pipeline."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from roll_lite.config.arithmetic import device_numbers
from roll_lite.config.device_phases import PHASES, Phase, startable
from roll_lite.config.schema.models import ForwardRoleConfig, InferRoleConfig
from roll_lite.data.keys import Columns
from roll_lite.data.minibatches import MiniBatch, balanced_partition, row_costs, spread
from roll_lite.data.proto import DataProto
from roll_lite.distributed.cluster import Cluster, ClusterDead, Pending, first_done, gather
from roll_lite.distributed.dataflow import Batch, BatchShard, Block
from roll_lite.distributed.place import Place
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.model import CriticWorker, ModelWorker, ReferenceWorker, TrainShare
from roll_lite.workers.phases import RankWork

W = TypeVar("W", bound=ModelWorker)
R = TypeVar("R")

CHUNK_BYTES = 32 << 20


class Movable(ABC):
    """Role (model or engines) whose state, in named parts, can be loaded onto devices and offloaded."""

    role: ForwardRoleConfig | InferRoleConfig

    @property
    def offloads(self) -> bool:
        return self.role.offload

    @property
    def devices(self) -> tuple[int, ...]:
        return device_numbers(self.role.devices)

    @abstractmethod
    def start_load(self, parts: Sequence[Any]) -> Pending[Any]: ...

    @abstractmethod
    def start_offload(self, parts: Sequence[Any]) -> Pending[Any]: ...

    def start_abandoning(self, parts: Sequence[Any]) -> Pending[Any]:
        return self.start_offload(parts)


@dataclass(frozen=True)
class Model(Movable, Generic[W]):
    ranks: Cluster[W]
    role: ForwardRoleConfig
    worker: type[W]

    def start_load(self, parts: Sequence[StateGroup]) -> Pending[list[None]]:
        return self.ranks.start_all(ModelWorker.load, parts)

    def start_offload(self, parts: Sequence[StateGroup]) -> Pending[list[None]]:
        return self.ranks.start_all(ModelWorker.offload, parts)

    def loaded(self, parts: Sequence[StateGroup]) -> AbstractContextManager[None]:
        return loaded(self, parts)

    def bring_home(self, folder: Path, names: Sequence[Collection[str]], nodes: Collection[str]) -> None:
        """Move files that ranks wrote in `folder` on `nodes` (addresses) to the driver. `names`: file names by rank."""
        if not nodes:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for files in zip_longest(*([folder / name for name in own] for own in names)):
            for offset in count(step=CHUNK_BYTES):
                parts = self.ranks.all(ModelWorker.part_of_file, files, offset, CHUNK_BYTES, nodes)
                sent = [(file, part) for file, part in zip(files, parts, strict=True) if part is not None]
                for file, part in sent:
                    with Path(f"{file}.partial").open("ab" if offset else "wb") as opened:
                        opened.write(part)
                if not any(parts):
                    break
            for file, _ in sent:
                Path(f"{file}.partial").rename(file)
        self.ranks.all(ModelWorker.remove_files, folder, names, nodes)

    def shards(self, batch: Batch, columns: Columns) -> list[BatchShard]:
        """Divide a batch into one shard per data parallel rank, of about equal cost."""
        parts = balanced_partition(self._costs(batch), self.ranks.data_size)
        return batch.shards(parts, columns.of(batch.keys()))

    def shares(self, batch: Batch, columns: Columns, mini_batches: Sequence[MiniBatch], first_update: int) -> list[TrainShare]:
        """Divide a batch for training: each data parallel rank gets a share of every mini-batch, but each row once."""
        samples = batch.rows.tensor("sample").tolist()
        row_of = {sample: row for row, sample in enumerate(samples)}
        spreads = spread(list(mini_batches), dict(zip(samples, self._costs(batch).tolist(), strict=True)), self.ranks.data_size)
        rows = [sorted({row_of[int(sample)] for part in own for sample in part.samples}) for own in spreads]
        shards = batch.shards([np.array(own, dtype=np.int64) for own in rows], columns.of(batch.keys()))
        return [TrainShare(shard, own, first_update) for shard, own in zip(shards, spreads, strict=True)]

    def _costs(self, batch: Batch) -> np.ndarray:
        return row_costs(lengths(batch.rows).numpy(), self.ranks.layouts[0].attention_parity_tokens)

    def start_forward(self, batch: Batch, columns: Sequence[str]) -> Pending[list[Block | None]]:
        return self.ranks.start_scatter(ModelWorker.compute, self.shards(batch, self.worker.forward_columns), columns)


@dataclass(frozen=True)
class Engines(Movable):
    """Engine replicas. Calls skip lost engines."""

    replicas: Cluster[InferWorker]
    role: InferRoleConfig
    turns: int = 1
    """Rounds in which engines start: engines on one GPU start in different rounds, since each measures free memory."""

    def start_first_ones(self) -> Pending[list[Place]]:
        return self.replicas.start_all(InferWorker.initialize, 0, self.turns)

    def initialize_later_ones(self) -> None:
        for turn in range(1, self.turns):
            self.replicas.all(InferWorker.initialize, turn, self.turns)

    def start_load(self, parts: Sequence[EngineMemory]) -> Pending[dict[int, None]]:
        return self.replicas.start_each(InferWorker.load, parts)

    def start_offload(self, parts: Sequence[EngineMemory]) -> Pending[dict[int, None]]:
        return self.replicas.start_each(InferWorker.offload, parts)

    def start_abandoning(self, parts: Sequence[EngineMemory]) -> Pending[dict[int, None]]:
        return self.replicas.start_each(InferWorker.leave_device, parts)

    def loaded(self, phase: Phase, also_loaded: Sequence[tuple[Model[Any], Sequence[StateGroup]]] = ()) -> AbstractContextManager[None]:
        """Call `loaded` with the engine memory that a phase needs."""
        return loaded(self, self.parts(phase), also_loaded)

    def parts(self, phase: Phase) -> tuple[EngineMemory, ...]:
        return tuple(EngineMemory(part) for part in PHASES[phase].parts["actor_infer"])


@dataclass(frozen=True)
class Models:
    policy: Model[ActorWorker] | None
    """None in a run that does not train."""
    reference: Model[ReferenceWorker] | None = None
    critic: Model[CriticWorker] | None = None
    engines: Engines | None = None
    """Engines on GPUs, whose memory is measured."""

    @property
    def actor(self) -> Model[ActorWorker]:
        assert self.policy is not None, "nothing trains in this run"
        return self.policy

    @property
    def all(self) -> list[Model[Any]]:
        return [model for model in (self.reference, self.policy, self.critic) if model is not None]

    def take_work(self) -> dict[str, list[RankWork]]:
        work = {model.ranks.name: model.ranks.all(ModelWorker.take_work) for model in self.all}
        if self.engines is not None and len(self.engines.replicas.lost) < self.engines.replicas.world_size:
            work[self.engines.replicas.name] = list(self.engines.replicas.each(InferWorker.take_work).values())
        return work

    @property
    def trained(self) -> dict[str, Model[ActorWorker] | Model[CriticWorker]]:
        named = {"actor_train": self.policy, "critic": self.critic}
        return {role: model for role, model in named.items() if model is not None}


def lengths(rows: DataProto) -> torch.Tensor:
    """Return tokens per row: prompt and response."""
    return rows.tensor("prompt_length") + rows.tensor("response_length")


def initialize(models: Sequence[Model[Any]], start_others: Callable[[], Sequence[Pending[Any]]] = tuple) -> None:
    """Initialize models that stay loaded, in parallel with the calls of `start_others`; then initialize and offload the others one by
    one."""
    gather(*(model.ranks.start_all(ModelWorker.initialize) for model in models if not model.offloads), *start_others())
    for model in models:
        if model.offloads:
            model.ranks.all(ModelWorker.initialize)
            model.ranks.all(ModelWorker.offload, tuple(StateGroup))


# ---------------------------------------------------------------- turns on devices


def states(phase: Phase) -> tuple[StateGroup, ...]:
    """Return the state groups (such as weights) that every model loads in a phase. ValueError for `generate`, where models differ."""
    (parts,) = {parts for role, parts in PHASES[phase].parts.items() if role != "actor_infer"}
    return tuple(StateGroup(part) for part in parts)


@dataclass(frozen=True)
class DeviceTurn(Generic[R]):
    role: Movable
    start: Callable[[], Pending[R]]
    took: Callable[[float], None] = lambda seconds: None
    """Called with the turn's duration in seconds, including load and offload."""


@contextmanager
def loaded(role: Movable, parts: Sequence[Any], also_loaded: Sequence[tuple[Movable, Sequence[Any]]] = ()) -> Iterator[None]:
    """Load `parts` of a role for the block; then offload them if the role offloads. `also_loaded`: further roles with parts, which the
    caller offloads. After an exception, all start to offload."""
    try:
        gather(*(one.start_load(its) for one, its in [(role, parts), *also_loaded] if one.offloads))
        yield
    except BaseException:
        for one, its in [(role, parts), *also_loaded]:
            _abandon([one], its)
        raise
    if role.offloads:
        role.start_offload(parts).result()


def take_turns(turns: Sequence[DeviceTurn[R]], parts: Sequence[Any]) -> list[R]:
    """Run each role's turn (load, work, offload); return results in the order of `turns`. Offloading roles that share devices run one by
    one, others in parallel."""
    waiting = list(range(len(turns)))
    present: dict[int, Generator[Pending[Any], Any, R]] = {}
    pending: dict[int, Pending[Any]] = {}
    begun: dict[int, float] = {}
    results: dict[int, R] = {}
    try:
        while waiting or present:
            for number in startable(waiting, list(present), lambda one, other: exclude_each_other(turns[one].role, turns[other].role)):
                waiting.remove(number)
                begun[number] = time.perf_counter()
                present[number] = _stages(turns[number], parts)
                pending[number] = next(present[number])
            done = first_done(list(pending.values()))
            for number in [number for number, one in pending.items() if one in done]:
                try:
                    pending[number] = present[number].send(pending[number].result())
                except StopIteration as end:
                    results[number] = end.value
                    turns[number].took(time.perf_counter() - begun[number])
                    del present[number], pending[number]
    except BaseException:
        for one in pending.values():
            one.settle()
        _abandon([turns[number].role for number in present], parts)
        raise
    return [results[number] for number in range(len(turns))]


def _stages(turn: DeviceTurn[R], parts: Sequence[Any]) -> Generator[Pending[Any], Any, R]:
    """Yield a turn's pending calls, receive their results by `send`, return the work's result."""
    if turn.role.offloads:
        yield turn.role.start_load(parts)
    result: R = yield turn.start()
    if turn.role.offloads:
        yield turn.role.start_offload(parts)
    return result


def exclude_each_other(one: Movable, other: Movable) -> bool:
    return one.offloads and other.offloads and not set(one.devices).isdisjoint(other.devices)


def _abandon(roles: Iterable[Movable], parts: Sequence[Any]) -> None:
    """Start offloading without waiting: after a failure, ranks may hang."""
    for role in roles:
        if role.offloads:
            with suppress(ClusterDead):
                role.start_abandoning(parts).settle()
