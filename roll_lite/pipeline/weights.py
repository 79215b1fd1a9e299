"""When the engines get the actor's weights; how they travel is `distributed/weight_sync/`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from roll_lite.config.schema.run import WeightSyncConfig
from roll_lite.distributed.cluster import Cluster, Pending, gather
from roll_lite.distributed.weight_sync.checksum import require_equal
from roll_lite.distributed.weight_sync.endpoints import DEFAULT_TRANSPORT
from roll_lite.distributed.weight_sync.plan import ExportPlan, TransferPlan, plan_transfers
from roll_lite.pipeline.clusters import Model
from roll_lite.pipeline.devices import FORWARD
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Pushed:
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
        self._export: ExportPlan | None = None
        self._rendezvous: tuple[str, int] | None = None
        self._epoch = 0
        self._plan: TransferPlan | None = None
        """Of the engines that are connected."""
        self._version: int | None = None
        """Of the weights in the engines; None: whatever they were started with."""

    def push(self, version: int) -> Pushed | None:
        """Weights and version to every engine; nothing where they are there already."""
        if version == self._version:
            return None
        started = time.monotonic()
        with self._model.loaded(FORWARD):
            plan = self._plan or self._connect()
            self._rollouts.one(RolloutWorker.hold)
            gather(
                self._engines.start_all(InferWorker.update_weights, plan.routes, version),
                self._actor.start_all(ActorWorker.send_weights),
                timeout_s=2 * self._config.timeout_s,
            )
            if self._config.verify_weights:
                self._verify(version)
        self._rollouts.one(RolloutWorker.set_version, version)
        self._version = version
        return Pushed(version, plan.nbytes / 2**20, time.monotonic() - started)

    def engines_changed(self) -> None:
        """One has left or joined, or was replaced: before the next update all that are there connect again."""
        self._plan = self._version = None

    def _connect(self) -> TransferPlan:
        """The owners of tensors and the workers of all engines join a new epoch of the transfer group."""
        timeout_s = self._config.timeout_s
        export = self._export = self._export or self._actor.all(ActorWorker.export_plan, self._config.bucket_mb << 20)[0]
        self._rendezvous = self._rendezvous or self._actor.one(ActorWorker.host_weight_transfer, timeout_s)
        self._epoch += 1
        plan = plan_transfers(export, dict.fromkeys(range(self._engines.world_size), self._workers_per_engine))
        membership = plan.membership(self._epoch, DEFAULT_TRANSPORT, *self._rendezvous, timeout_s)
        joining: list[Pending[Any]] = [
            self._actor.start_all(ActorWorker.connect_weights, plan, membership),
            self._engines.start_scatter(InferWorker.connect_weights, [plan.first_member(engine) for engine in plan.engines], membership),
        ]
        gather(*joining, timeout_s=2 * timeout_s)
        self._plan = plan
        return plan

    def _verify(self, version: int) -> None:
        """Every tensor of every engine against the trainer's, by checksum."""
        sent: dict[str, str] = {}
        for owned in self._actor.all(ActorWorker.weight_checksums):
            sent |= owned
        for engine, held in enumerate(self._engines.all(InferWorker.weight_checksums)):
            require_equal(sent, held, engine, version)
