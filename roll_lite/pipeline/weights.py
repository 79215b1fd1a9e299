"""How the actor's weights reach the engines: a plan made once, then one call to either side per update."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from roll_lite.config.schema import WeightSyncConfig
from roll_lite.distributed.cluster import Cluster, Pending, gather
from roll_lite.distributed.strategy.base import ExportedTensor, ExportPlan
from roll_lite.distributed.weight_sync.plan import plan_transfers
from roll_lite.pipeline.clusters import Model
from roll_lite.pipeline.devices import FORWARD
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutWorker

TRANSPORT = "gloo"


@dataclass(frozen=True)
class Transfer:
    """One update that was carried out."""

    version: int
    megabytes: float
    seconds: float


class WeightSync:
    def __init__(
        self,
        actor: Model[ActorWorker],
        engines: Cluster[InferWorker],
        rollouts: Cluster[RolloutWorker],
        config: WeightSyncConfig,
        workers_per_engine: int,
    ) -> None:
        self._model = actor
        self._actor = actor.ranks
        self._engines = engines
        self._rollouts = rollouts
        self._config = config
        self._workers_per_engine = workers_per_engine
        self._plan: ExportPlan | None = None
        self._version: int | None = None
        """Of the weights in the engines; None: whatever they were started with."""

    def push(self, version: int) -> Transfer | None:
        """Weights and version to every engine; nothing where they are there already."""
        if version == self._version:
            return None
        started = time.monotonic()
        with self._model.loaded(FORWARD):
            plan = self._plan or self._connect()
            tensors: list[ExportedTensor] = list(plan.tensors)
            gather(
                self._engines.start_all(InferWorker.update_weights, tensors, version),
                self._actor.start_all(ActorWorker.send_weights, plan),
                timeout_s=2 * self._config.timeout_s,
            )
            if self._config.verify_weights:
                self._verify(plan, version)
        self._rollouts.one(RolloutWorker.set_version, version)
        self._version = version
        megabytes = sum(transfer.nbytes for transfer in plan_transfers(plan, self._engine_workers).transfers) / 2**20
        return Transfer(version, megabytes, time.monotonic() - started)

    @property
    def _engine_workers(self) -> list[int]:
        return [self._workers_per_engine] * self._engines.world_size

    def _connect(self) -> ExportPlan:
        """The owners of buckets and the workers of all engines join one group."""
        config = self._config
        plan = self._actor.all(ActorWorker.export_plan, config.bucket_mb << 20)[0]
        transfers = plan_transfers(plan, self._engine_workers)
        host, port = self._actor.one(ActorWorker.open_transfer, config.timeout_s)
        endpoints = [transfers.endpoint(engine, TRANSPORT, host, port, config.timeout_s) for engine in range(self._engines.world_size)]
        joining: list[Pending[Any]] = [
            self._actor.start_all(ActorWorker.join_transfer, host, port, transfers, config.timeout_s),
            self._engines.start_scatter(InferWorker.connect_weights, endpoints),
        ]
        gather(*joining, timeout_s=2 * config.timeout_s)
        self._plan = plan
        return plan

    def _verify(self, plan: ExportPlan, version: int) -> None:
        """Every tensor of every engine against the trainer's, by checksum."""
        sent: dict[str, str] = {}
        for owned in self._actor.all(ActorWorker.weight_checksums, plan):
            sent |= owned
        for engine, held in enumerate(self._engines.all(InferWorker.weight_checksums)):
            wrong = sorted(name for name, digest in sent.items() if held.get(name) != digest)
            if wrong:
                raise RuntimeError(
                    f"weight_sync: engine {engine} does not hold version {version} after its update: "
                    f"{len(wrong)} of {len(sent)} tensors differ, among them {', '.join(wrong[:5])}"
                )
