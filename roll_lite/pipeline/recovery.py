"""Recover from the loss of a training rank, of the rollout service or of a judge.

If a trained model's rank is lost, all trained models load the newest checkpoint or in-memory copy, and repeat later updates on batches kept
by the driver. The rollout service restarts in its state after the last step if it is lost, or tokens on an engine's node that a rank needs.
The kept batches are then lost; if updates must be repeated, the run repeats whole steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import ray

from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.failures import RankFailed, RestartBudget
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.watchdog import WATCHDOG, Preempted, PreemptedUnsaved
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.checkpoint_files import DamagedCheckpoint
from roll_lite.pipeline.clusters import Model, Models, initialize, lengths
from roll_lite.pipeline.early_passes import EarlyPasses
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.sources import BatchSource, Validations
from roll_lite.workers.model import ModelWorker
from roll_lite.workers.rollout import RolloutBatch

SERVICES = ("rollouts", "replay")
BYTES_PER_TOKEN = 32
"""Estimated object store bytes per token, with log-prob and masks."""
STORE_SHARE = 0.5
"""Maximum fraction of Ray's object store for kept batches."""


class Recoverable(Protocol):
    steps_done: int
    version: int
    validation: Validations
    early: EarlyPasses

    @property
    def validation_is_due(self) -> bool: ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def repeat_update(self, rollouts: RolloutBatch) -> None: ...

    def validate(self, step: int | None = None) -> None: ...


class Recovery:
    def __init__(self, config: RunConfig, models: Models, source: BatchSource, checkpoints: Checkpoints, journal: Journal) -> None:
        self._config = config
        self._models = models
        self._source = source
        self._checkpoints = checkpoints
        self._journal = journal
        self._batches: dict[int, RolloutBatch] = {}
        self._restarts = RestartBudget()
        self._restarts_since_step = RestartBudget(math.inf)
        self._most_steps = 0
        self._start: dict[str, Any] = {}
        self._service_start: dict[str, Any] = {}
        self.reached: dict[str, Any] = {}
        """Driver state after the last complete step."""
        self.source_state: dict[str, Any] = {}
        self._next_source_state: dict[str, Any] = {}
        self._weights_are_known = True
        """False from the start of an update to its step's end: some weights may have changed."""
        self.service_is_lost = False
        """True until a restarted service has `source_state`."""
        self._rewinds = False
        self.lost_validation: int | None = None
        """Step whose validation was lost with the rollout service and starts again."""

    def begin(self, state: dict[str, Any]) -> None:
        self._start = self.reached = _saved(state)
        self._most_steps = self.reached["steps_done"]
        self._service_start = self.source_state = self._next_source_state = self._source.state_dict()

    def batch(self, step: int, take: Callable[[], RolloutBatch]) -> RolloutBatch:
        """Return a step's batch: kept if the step is repeated, else new from `take`."""
        if step not in self._batches:
            since = self._checkpoints.newest_step
            self._batches = {kept: batch for kept, batch in self._batches.items() if kept > since}
            self._batches[step] = take()
            while len(self._batches) > 1 and sum(map(_size, self._batches.values())) > _room():
                del self._batches[min(self._batches)]
        self._next_source_state = self._batches[step].state
        return self._batches[step]

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Mark weights as unknown until `step_is_done`. In the block, losses of rollout service and judges are ignored: the update
        completes."""
        if self._weights_are_known:
            self._source.wait_for_files()  # later, the service's loss would not generate the batch again
        self._weights_are_known = False
        with WATCHDOG.uninterrupted(), WATCH.overlooking((*SERVICES, *self._source.judge_roles)):
            yield

    def step_is_done(self, state: dict[str, Any]) -> None:
        self.reached, self._weights_are_known = _saved(state), True
        self.source_state = self._next_source_state
        if self.reached["steps_done"] > self._most_steps:
            self._most_steps, self._restarts_since_step = self.reached["steps_done"], RestartBudget(math.inf)

    def survive(self, pipeline: Recoverable, work: Callable[[], None]) -> None:
        """Call `work`. If a training rank, the rollout service or a judge is lost, recover and call it again. A SIGTERM ends a recovery:
        with Preempted if the state after the last step can be saved, else with PreemptedUnsaved."""
        losses: list[RankFailed] = []
        while True:
            try:
                if losses:
                    self._recover(pipeline, losses)
                    losses.clear()
                work()
                return
            except RankFailed as error:
                for failure in (*error.others, error):
                    if not self._source.judge_lost(failure):
                        self._require_restart(failure)
                    losses.append(failure)
            except Preempted:
                if self._weights_are_known:
                    raise
                raise PreemptedUnsaved from None
            except DamagedCheckpoint as error:
                if not losses:  # raised by the work itself, which loads no checkpoint
                    raise
                self._checkpoints.set_aside_newest(error)

    def _require_restart(self, failure: RankFailed) -> None:
        if failure.role in SERVICES:
            setting, allowed = "rollout.restarts", self._config.rollout.restarts
        else:
            setting = f"{failure.role}.restarts"
            allowed = next((model.role.restarts for model in self._models.all if model.ranks.name == failure.role), 0)
        if not failure.retryable or allowed == 0:
            raise failure
        for budget, when in ((self._restarts, "within an hour"), (self._restarts_since_step, "without a new step")):
            if not budget.allows(failure.role, allowed):
                raise failure.final(allowed, setting, when)

    def _recover(self, pipeline: Recoverable, losses: Sequence[RankFailed]) -> None:
        """Restart the lost roles and return to the state after the last step. `goes_back`: trained weights are lost or unknown. `_rewinds`:
        a kept batch is missing, so whole steps are repeated."""
        started, reached = time.monotonic(), self.reached["steps_done"]
        roles, phase = {loss.role for loss in losses}, self._journal.timers.phase
        with phase("recovery"):
            trained = list(self._checkpoints.stateful(self._models).values())
            lost = [model for model in self._models.all if model.ranks.name in roles]
            lost_tokens = any(loss.lost_object and loss.phase != ModelWorker.load_copy.__name__ for loss in losses)
            if roles.intersection(SERVICES) or lost_tokens:
                self._batches.clear()  # their tokens were lost with the service, or an engine's node
                self.service_is_lost = True
            goes_back = any(model in trained for model in lost) or not self._weights_are_known
            copied = self._checkpoints.copied_step if goes_back else 0
            since = max(self._checkpoints.newest_step, copied) if goes_back else reached
            if any(step not in self._batches for step in range(since + 1, reached + 1)):
                self._rewinds = self.service_is_lost = True
            for failure in (losses[-1], *losses[-1].others):
                self._journal.rank_lost(failure, since, reached, "steps" if self._rewinds else "the updates of steps", 0 < copied == since)
            self._weights_are_known = not goes_back
            with phase("start"):
                self._source.end_transfer()
                self._source.restart_judges()
                pipeline.early.forget()
                self._restart_models([*trained, *(model for model in lost if model not in trained)] if goes_back else lost, goes_back)
            driver = self.reached
            if goes_back:
                with phase("checkpoint"):
                    saved = self._checkpoints.go_back(self._models)
                driver, service = self._start, self._service_start
                if saved is not None:  # a checkpoint of other settings lacks what this run started anew
                    driver, service = {**self._start, **saved["pipeline"]}, saved["rollouts"]
                if self._rewinds:
                    self.reached, self.source_state = driver, service
            pipeline.restore(driver)
            while pipeline.steps_done < self.reached["steps_done"]:
                pipeline.repeat_update(self._batches[pipeline.steps_done + 1])
            self._weights_are_known = True
            if self.service_is_lost:
                self._restart_service(pipeline)
        self._journal.rank_returned(" and ".join(sorted(roles)), time.monotonic() - started, self.reached["steps_done"])

    def _restart_models(self, models: Sequence[Model[Any]], goes_back: bool) -> None:
        with WATCH.expecting_answers(None):
            for model in models:
                model.ranks.rebuild()
            if goes_back:
                self._source.trainer_lost()
            initialize(models)

    def _restart_service(self, pipeline: Recoverable) -> None:
        """Restart the rollout service from `source_state`; remove records of steps that repeat."""
        self._batches.clear()
        with self._journal.timers.phase("start"), WATCH.expecting_answers(None):
            self._source.restart(self.source_state)
        self._journal.ledger.start(pipeline.steps_done, pipeline.version, again=True)
        forgotten = pipeline.validation.forget()
        self.lost_validation = self.lost_validation if forgotten is None else forgotten
        if self._rewinds:
            self._journal.go_back(pipeline.steps_done)
        if self.lost_validation is not None and self.lost_validation <= pipeline.steps_done:  # otherwise its step is repeated
            pipeline.validate(self.lost_validation)
        if self._rewinds and pipeline.validation_is_due and self.lost_validation != pipeline.steps_done:
            pipeline.validate()
        self._rewinds = self.service_is_lost = False
        self.lost_validation = None


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a checkpoint would restore it."""
    copy: dict[str, Any] = json.loads(json.dumps(state))
    return copy


def _room() -> float:
    return STORE_SHARE * float(ray.cluster_resources().get("object_store_memory", 0))


def _size(batch: RolloutBatch) -> int:
    return BYTES_PER_TOKEN * int(lengths(batch.rows).sum())
