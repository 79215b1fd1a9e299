"""Sources of batches and validations: engines and rewards, or a past run's dumps."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from roll_lite.config.arithmetic import generates_ahead, held_out_sampling
from roll_lite.config.device_phases import Phase
from roll_lite.config.schema.domains import SamplingConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.proto import DataProto
from roll_lite.distributed.cluster import Cluster, Pending
from roll_lite.distributed.failures import ClusterDead, RankFailed, RestartBudget
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.weight_sync.group import Pushed
from roll_lite.pipeline.clusters import Engines, states
from roll_lite.pipeline.engine_restarts import EngineRestarts
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.weights import WeightSync
from roll_lite.scheduler.domain import DataExhausted
from roll_lite.scheduler.stats import Progress, RolloutStats
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.judge import JudgeAddress, JudgeWorker
from roll_lite.workers.replay import ReplayWorker
from roll_lite.workers.reward_model import RewardModelWorker
from roll_lite.workers.rollout import RolloutBatch, RolloutWorker

T = TypeVar("T")
LAST_SECONDS = 60.0
"""Seconds to wait for the rollout service's last ledger lines."""
HeldOut = tuple[DataProto, RolloutStats]


class BatchSource(ABC):
    """Source of batches. Defaults suit a source without engines and state."""

    @abstractmethod
    def restart(self, state: dict[str, Any]) -> None:
        """Restart the rollout service from an earlier `state`: prompts started since then start again."""

    def loaded(self, phase: Phase, version: int) -> AbstractContextManager[None]:
        """Load the engine memory that a phase needs; offload it after the block. SYNC_WEIGHTS also loads the actor's weights if an engine
        lacks `version`."""
        return nullcontext()

    def sync(self, version: int) -> Pushed | None:
        """Send the actor's weights to the engines; None if nothing is sent."""
        return None

    @abstractmethod
    def next_batch(self, step: int, poll: Callable[[Cluster[RolloutWorker]], None]) -> RolloutBatch:
        """Wait for the batch of `step`. `poll` is called about once a second and must not block."""

    def start_validation(self, samples: int, sampling: Mapping[str, SamplingConfig], steps_done: int) -> Pending[HeldOut]:
        raise NotImplementedError("held-out prompts need engines")

    def finish_validation(self, validation: Pending[HeldOut], version: int) -> HeldOut:
        return validation.result()

    @property
    def judge_roles(self) -> Collection[str]:
        return ()

    def judge_lost(self, failure: RankFailed) -> bool:
        """Count the restart of a lost judge. False if `failure` is another role's."""
        return False

    def restart_judges(self) -> None:  # noqa: B027 (for a source with judges)
        """Restart lost judges."""

    def end_transfer(self) -> None:  # noqa: B027 (for a source with engines)
        """Interrupt a weight transfer in flight, and wait for its end."""

    def trainer_lost(self) -> None:  # noqa: B027 (for a source with engines)
        """Prepare for new training ranks: engines leave shared devices, and will get all weights."""

    def wait_for_files(self) -> None:  # noqa: B027 (for a source that writes files)
        """Wait until the samples and dump of the last batch are written."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any], unfinished: bytes) -> None:  # noqa: B027 (for a source with state)
        """Restore `state`. `unfinished`: checkpoint file of the samples in flight, which continue, or b""."""

    def unfinished(self, state: dict[str, Any], within_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        """Return `state` with the groups admitted since its last batch, and a checkpoint file of its samples in flight, or b""
        (`RolloutWorker.unfinished`). `within_s`: timeout in seconds."""
        return state, b""

    def abandon(self, within_s: float) -> None:  # noqa: B027 (for a source with engines)
        """Stop everything within seconds: the run ends and needs the devices to save its state."""

    def close(self) -> None:  # noqa: B027 (for a source with files or engines)
        """Write the last ledger lines, and shut down."""


@dataclass
class LiveRollouts(BatchSource):
    engines: Engines
    restarts: EngineRestarts
    rollouts: Cluster[RolloutWorker]
    reward_models: Mapping[str, Cluster[RewardModelWorker]]
    """Reward models by name; called and loaded by the rollout service, not the driver."""
    judges: Mapping[str, Cluster[JudgeWorker]]
    """Judges by name. These references keep their Ray actors alive."""
    judge_restarts: Mapping[str, int]
    """{judge: maximum restarts per hour}."""
    prompts_per_step: int
    journal: Journal
    weights: WeightSync | None = None
    """Sends weights to the engines; None in a run that does not train."""
    _batch: Pending[RolloutBatch | None] | None = None
    """Pending call for the next batch. It continues while training ranks are replaced."""
    _addresses: dict[str, list[JudgeAddress]] = field(default_factory=dict)
    _restarts: RestartBudget = field(default_factory=RestartBudget)
    _lost_judges: dict[str, float] = field(default_factory=dict)
    """{lost judge: time of its loss}, until it serves again."""

    def prepare_service(self) -> Pending[None]:
        """Wait until the rollout service has read its data and tested the rewards; start it and return the pending call."""
        self._addresses = {name: servers.all(JudgeWorker.address) for name, servers in self.judges.items()}
        # Processes of engines and models start meanwhile, but load no model before the rewards are tested.
        reward_models = {name: ranks.actors for name, ranks in self.reward_models.items()}
        self.rollouts.one(RolloutWorker.prepare, reward_models, _whole(self._addresses))
        return self.rollouts.start_one(RolloutWorker.initialize, self.engines.replicas.actors, self.restarts.absent)

    def restart(self, state: dict[str, Any]) -> None:
        self._batch = None
        self.rollouts.rebuild()
        self.engines.replicas.each(InferWorker.forget_requests)
        self.prepare_service().result()
        self.restarts.service_restarted()
        self.rollouts.one(RolloutWorker.load_state_dict, state)
        if self.weights is not None:
            self.weights.service_restarted()

    @property
    def judge_roles(self) -> Collection[str]:
        return [servers.name for servers in self.judges.values()]

    def judge_lost(self, failure: RankFailed) -> bool:
        found = [name for name, servers in self.judges.items() if servers.name == failure.role and failure.retryable]
        for name in found:
            if not self._restarts.allows(name, self.judge_restarts[name]):
                raise failure.final(self.judge_restarts[name], f"{failure.role}.restarts")
            cause = failure.cause.splitlines()[0]
            self.journal.console.message(f"{failure.role} rank {failure.rank}{failure.where} is lost and starts again: {cause}")
            self._lost_judges[name] = time.monotonic()
        return bool(found)

    def restart_judges(self) -> None:
        """Restart lost judges at their old addresses or, on another node, at new ones. Rewards retry samples meanwhile."""
        for name, since in list(self._lost_judges.items()):
            servers, before = self.judges[name], self._addresses[name]
            servers.rebuild()
            servers.all(JudgeWorker.initialize, before)
            self._addresses[name] = servers.all(JudgeWorker.address)
            del self._lost_judges[name]
            if self._addresses[name] != before and self.rollouts.group.end is None:
                self.rollouts.one(RolloutWorker.judges_moved, _whole(self._addresses))
            self.journal.console.message(f"judges.{name} is back, {time.monotonic() - since:.0f} s after its loss")

    def loaded(self, phase: Phase, version: int) -> AbstractContextManager[None]:
        if phase is Phase.SYNC_WEIGHTS:
            self.restarts.living(tuple(EngineMemory))  # started replacements get this version
        # `WeightSync` loads the sender again, without effect, and offloads it before the KV cache is loaded.
        sender = self.weights.sender(version) if phase is Phase.SYNC_WEIGHTS and self.weights is not None else None
        return self.engines.loaded(phase, also_loaded=[] if sender is None else [(sender, states(phase))])

    def sync(self, version: int) -> Pushed | None:
        pushed = self.weights.push(version) if self.weights is not None else None
        self.restarts.tell_losses()
        self.restarts.hand_over(None if self.weights is None else version)
        return pushed

    def next_batch(self, step: int, poll: Callable[[Cluster[RolloutWorker]], None]) -> RolloutBatch:
        version = 0 if self.weights is None else self.weights.version

        def poll_all() -> None:
            self.replace_engines(version)
            poll(self.rollouts)

        self._batch = self._batch or self.rollouts.start_one(RolloutWorker.next_batch, self.prompts_per_step, step)
        try:
            batch = self._complete(self._batch, f"step {step}", poll_all)
        except Exception as error:
            if not (isinstance(error, RankFailed) and error.retryable):
                with suppress(Exception):  # the batch's failure counts
                    self.end_ledger()
            raise
        if batch is None:
            self._batch = None
            raise DataExhausted
        self.restarts.tell_losses()
        self.restarts.settle()
        self._batch = None  # not earlier: a loss in these waits must not lose the batch
        self.journal.ledger.append(batch.ledger)
        self.journal.pools_worked(batch.work, batch.memory)
        return batch

    def start_validation(self, samples: int, sampling: Mapping[str, SamplingConfig], steps_done: int) -> Pending[HeldOut]:
        return self.rollouts.start_one(RolloutWorker.evaluate, samples, sampling, steps_done)

    def finish_validation(self, validation: Pending[HeldOut], version: int) -> HeldOut:
        poll = partial(self.replace_engines, version)
        held_out = self._complete(validation, "held-out", poll, held_out=True)
        self.restarts.settle()
        return held_out

    def _complete(self, rollouts: Pending[T], label: str, poll: Callable[[], None], held_out: bool = False) -> T:
        """Wait for a batch or validation. A training rank's death raises RankFailed: at once if engines stay loaded, else at the end or at
        another loss."""
        lost: RankFailed | None = None
        while True:
            try:
                result = self._shown(rollouts, label, poll, held_out)
            except RankFailed as failure:
                if self.judge_lost(failure):
                    self.restart_judges()
                    continue
                if failure.role == self.rollouts.name and failure.retryable:
                    self.engines.replicas.each(InferWorker.forget_requests)  # engines on shared devices are offloaded next
                if lost is not None:
                    lost.others = (failure,)
                    raise lost from None
                if not self.engines.offloads or failure.role in (self.rollouts.name, self.engines.replicas.name):
                    raise
                lost = failure
                continue
            except ClusterDead:
                if lost is None:
                    raise
                raise lost from None  # an engine started, and the lost rank has its weights: recover first
            if lost is not None:
                raise lost
            return result

    def _shown(self, rollouts: Pending[T], label: str, poll: Callable[[], None], held_out: bool) -> T:
        asked: Pending[dict[str, Progress]] | None = None

        def poll_all() -> None:
            nonlocal asked
            poll()
            if asked is None:
                asked = None if rollouts.done else self.rollouts.start_one(RolloutWorker.progress, held_out)
            elif (progress := asked.answer()) is not None:
                self.journal.console.progress(label, progress)
                asked = None

        try:
            with self.journal.console.watching():
                return rollouts.result(poll=poll_all)
        finally:
            if asked is not None:
                asked.settle()

    def end_transfer(self) -> None:
        if self.weights is not None:
            self.weights.end_transfer()

    def trainer_lost(self) -> None:
        if self.weights is not None:
            self.weights.trainer_lost()
        if self.engines.offloads:
            self.engines.replicas.each(InferWorker.leave_device)

    def replace_engines(self, version: int) -> None:
        """Report lost engines; send weights to started replacements and let them serve."""
        self.restarts.tell_losses()
        if not self.restarts.may_serve():
            return
        # On a shared device the trainer's weights take the place of the engine's KV cache.
        self.restarts.take((EngineMemory.KV_CACHE,))
        if self.weights is not None:
            self.weights.send_to_newcomers(version)
        self.restarts.hand_over(None if self.weights is None else version)
        if self.engines.offloads:
            self.engines.start_load(self.engines.parts(Phase.GENERATE)).result()

    def wait_for_files(self) -> None:
        self.rollouts.one(RolloutWorker.wait_for_files)

    def state_dict(self) -> dict[str, Any]:
        return self.rollouts.one(RolloutWorker.state_dict)

    def load_state_dict(self, state: dict[str, Any], unfinished: bytes) -> None:
        for message in self.rollouts.one(RolloutWorker.load_state_dict, state, unfinished):
            self.journal.console.message(message)

    def unfinished(self, state: dict[str, Any], within_s: float | None = None) -> tuple[dict[str, Any], bytes]:
        return self.rollouts.start_one(RolloutWorker.unfinished, state).result(within_s)

    def abandon(self, within_s: float) -> None:
        self.restarts.end()
        if self.weights is not None:
            self.weights.break_off()
        self.rollouts.shutdown()
        if self.engines.offloads:  # a killed engine's memory may be freed late
            with suppress(Exception):
                self.engines.replicas.start_each(InferWorker.leave_device).result(within_s)
        self.engines.replicas.shutdown()
        for ranks in self.reward_models.values():
            ranks.shutdown()

    def end_ledger(self) -> None:
        self.journal.ledger.append(self.rollouts.start_one(RolloutWorker.last_ledger).result(LAST_SECONDS))

    def close(self) -> None:
        self.restarts.end()
        self.end_ledger()
        self.rollouts.one(RolloutWorker.shutdown)
        self.engines.replicas.each(InferWorker.shutdown)

    def notes(self) -> list[str]:
        of_engines = dict.fromkeys(note for notes in self.engines.replicas.all(InferWorker.notes) for note in notes)
        return [*self.rollouts.one(RolloutWorker.notes), *(f"actor_infer: {note}" for note in of_engines)]


@dataclass(frozen=True)
class ReplayedRollouts(BatchSource):
    """Batches from another run's dumps, by step."""

    reader: Cluster[ReplayWorker]

    def restart(self, state: dict[str, Any]) -> None:
        self.reader.rebuild()

    def next_batch(self, step: int, poll: Callable[[Cluster[RolloutWorker]], None]) -> RolloutBatch:
        return self.reader.one(ReplayWorker.next_batch, step)


def _whole(addresses: Mapping[str, Sequence[JudgeAddress]]) -> dict[str, JudgeAddress]:
    return {name: JudgeAddress.of(servers) for name, servers in addresses.items()}


class Validations:
    def __init__(self, config: RunConfig, source: BatchSource, journal: Journal) -> None:
        self._config = config
        self._source = source
        self._journal = journal
        self._running: Pending[HeldOut] | None = None
        self.step: int | None = None
        """Step of the running or last validation."""

    @property
    def under_way(self) -> int | None:
        return None if self._running is None else self.step

    def begin(self, step: int, version: int) -> None:
        """Start a validation, reported for `step`. Wait for its end, unless it runs during training (see `wait`)."""
        assert self._running is None
        config = self._config
        sampling = {name: held_out_sampling(config, domain) for name, domain in config.domains.items()}
        self._running = self._source.start_validation(config.validation.samples_per_prompt, sampling, step)
        self.step = step
        self.wait(version)

    def wait(self, version: int) -> None:
        """Wait for the running validation, unless engines generate during training (`rollout.supply`) and steps remain."""
        if self.step is None or self.step >= self._config.steps or not generates_ahead(self._config):
            self.finish(version)

    def forget(self) -> int | None:
        """Abandon the running validation; return its step, if any."""
        step = self.under_way
        self._running = self.step = None
        return step

    def finish_if_complete(self, version: int) -> None:
        if self._running is not None and self._running.answer() is not None:
            self.finish(version)

    def finish(self, version: int) -> None:
        if self._running is not None and self.step is not None:
            held_out = self._source.finish_validation(self._running, version)
            self._running = None
            self._journal.validation(self.step, *held_out)
