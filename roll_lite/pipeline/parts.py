"""What a pipeline is made of: clusters of models, engines, the rollout service, the way for weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.distributed.cluster import Cluster
from roll_lite.pipeline.models import Engines, Model, RewardModels
from roll_lite.pipeline.weights import WeightSync
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.critic import CriticWorker
from roll_lite.workers.judge import JudgeWorker
from roll_lite.workers.reference import ReferenceWorker
from roll_lite.workers.rollout import RolloutWorker


@dataclass(frozen=True)
class Parts:
    actor: Model[ActorWorker]
    engines: Engines
    rollouts: Cluster[RolloutWorker]
    weights: WeightSync
    reference: Model[ReferenceWorker] | None = None
    critic: Model[CriticWorker] | None = None
    reward_models: RewardModels | None = None
    """Held here: a cluster that nobody holds ends."""
    judges: Sequence[Cluster[JudgeWorker]] = ()
    """As above."""

    @property
    def trained(self) -> dict[str, Model[ActorWorker] | Model[CriticWorker]]:
        """The models with an optimizer, by role."""
        return {"actor_train": self.actor} | ({"critic": self.critic} if self.critic else {})
