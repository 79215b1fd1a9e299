"""Recovery from dead and hanging training ranks. Their groups start anew, load the newest checkpoint, and train once more on the batches
since then. Engines, rollout service and rewards stay up, and no sample is generated again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from roll_lite.distributed.failures import RankFailed
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.clusters import Models, initialize, lengths
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.sources import BatchSource
from roll_lite.workers.rollout import RolloutBatch

if TYPE_CHECKING:
    from roll_lite.pipeline.rlvr import RLVRPipeline

BUDGET_SECONDS = 3600.0
"""Time in which a role may be restarted `restarts` times."""
BYTES_PER_TOKEN = 32
"""Estimate for a token in the object store, with its log-prob and masks."""
STORE_SHARE = 0.5
"""Largest share of Ray's object store for kept batches."""


class Recovery:
    def __init__(self, models: Models, source: BatchSource, checkpoints: Checkpoints, journal: Journal) -> None:
        self._models = models
        self._source = source
        self._checkpoints = checkpoints
        self._journal = journal
        self._batches: dict[int, RolloutBatch] = {}
        """Batches by step, since the newest checkpoint."""
        self._restarted: dict[str, list[float]] = {}
        """Times of restarts, by role."""
        self._start: dict[str, Any] = {}
        self.reached: dict[str, Any] = {}
        """State of the driver at the run's start and after the last step."""
        self.source_state: dict[str, Any] = {}
        """State of the batch source after the last step."""
        self._next_source_state: dict[str, Any] = {}
        """State of the batch source after the batch of the step in progress."""
        self._weights_are_known = True
        """False while the trained weights may be others than those after the last step."""

    def begin(self, state: dict[str, Any]) -> None:
        """Remember the driver's state at the start, for runs without a checkpoint."""
        self._start = self.reached = _saved(state)
        self.source_state = self._next_source_state = self._source.state_dict()

    def batch(self, step: int, take: Callable[[], RolloutBatch]) -> RolloutBatch:
        """Batch of a step: the kept one if the step is repeated, otherwise the result of `take`, which is kept."""
        if step not in self._batches:
            since = self._checkpoints.newest_step
            self._batches = {kept: batch for kept, batch in self._batches.items() if kept > since}
            self._batches[step] = take()
            while len(self._batches) > 1 and sum(map(_size, self._batches.values())) > _room():
                del self._batches[min(self._batches)]
        self._next_source_state = self._batches[step].state
        return self._batches[step]

    def trains(self) -> None:
        """Note that updates begin: their outcome is unknown until `step_is_done`."""
        self._weights_are_known = False

    def step_is_done(self, state: dict[str, Any]) -> None:
        self.reached, self._weights_are_known = _saved(state), True
        self.source_state = self._next_source_state

    def survive(self, pipeline: RLVRPipeline, work: Callable[[], None]) -> None:
        """Do the work; if a training rank is lost meanwhile, recover and repeat it."""
        failure: RankFailed | None = None
        while True:
            try:
                if failure is not None:
                    self._recover(pipeline, failure)
                work()
                return
            except RankFailed as error:
                self._require_restart(error)
                failure = error

    def _require_restart(self, failure: RankFailed) -> None:
        """Raise the failure if no restart helps, or no further one is allowed."""
        role = next((model.role for model in self._models.all if model.ranks.name == failure.role), None)
        if role is None or not failure.is_loss or role.restarts == 0:
            raise failure
        now = time.monotonic()
        times = self._restarted[failure.role] = [at for at in self._restarted.get(failure.role, []) if now - at < BUDGET_SECONDS]
        if len(times) == role.restarts:
            raise _final(failure, f"after {len(times)} restarts within an hour, {failure.role}.restarts")
        times.append(now)

    def _recover(self, pipeline: RLVRPipeline, failure: RankFailed) -> None:
        """Start the lost role anew, and bring all trained weights and the driver to the state after the last step."""
        started, reached = time.monotonic(), self.reached["steps_done"]
        with self._journal.timers.phase("recovery"), WATCH.expecting_answers(None), WATCHDOG.uninterrupted():
            lost = next(model for model in self._models.all if model.ranks.name == failure.role)
            trained = list(self._checkpoints.stateful(self._models).values())
            goes_back = lost in trained or not self._weights_are_known
            since = self._checkpoints.newest_step if goes_back else reached
            if missing := [step for step in range(since + 1, reached + 1) if step not in self._batches]:
                why = f"the batches of steps {missing[0]} to {missing[-1]} do not fit into half of Ray's object store"
                raise _final(failure, f"{why}; write checkpoints more often (checkpoint.every) to survive this")
            self._journal.rank_lost(failure, since, reached)
            self._weights_are_known = not goes_back
            again = [*trained, *([] if lost in trained else [lost])] if goes_back else [lost]
            for model in again:
                model.ranks.rebuild()
            if goes_back:
                self._source.trainer_lost()
            initialize(again)
            pipeline.restore((self._checkpoints.go_back(self._models) or self._start) if goes_back else self.reached)
            while pipeline.steps_done < reached:
                pipeline.repeat_update(self._batches[pipeline.steps_done + 1])
            self._weights_are_known = True
        self._journal.rank_returned(failure.role, time.monotonic() - started, reached)


def _final(failure: RankFailed, why: str) -> RankFailed:
    """The failure as the end of the run. `why`: reason that the rank gets no successor."""
    first, _, rest = failure.cause.partition("\n")
    return RankFailed(failure.role, failure.rank, failure.phase, f"{first} ({why})\n{rest}".rstrip())


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """Deep copy, as a checkpoint would give it back."""
    copy: dict[str, Any] = json.loads(json.dumps(state))
    return copy


def _room() -> float:
    """Bytes of the object store that kept batches may take."""
    return STORE_SHARE * float(ray.cluster_resources().get("object_store_memory", 0))


def _size(batch: RolloutBatch) -> int:
    """Estimated bytes in the object store."""
    return BYTES_PER_TOKEN * int(lengths(batch.rows).sum())
