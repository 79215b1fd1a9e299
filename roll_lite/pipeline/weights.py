"""Weight updates of the engines; `distributed/weight_sync/` moves the bytes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll_lite.config.device_phases import Phase
from roll_lite.config.schema.run import WeightSyncConfig
from roll_lite.distributed.cluster import Cluster, Pending, gather
from roll_lite.distributed.failures import RankFailed
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.distributed.weight_sync.group import Pushed, Transferred, interrupt, largest, rendezvous_client
from roll_lite.distributed.weight_sync.plan import ExportPlan, TransferPlan, plan_transfers
from roll_lite.distributed.weight_sync.update import require_equal, sample
from roll_lite.pipeline.clusters import Model, states
from roll_lite.pipeline.engine_restarts import EngineRestarts
from roll_lite.workers.actor import ActorWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.rollout import RolloutWorker

FULLY_VERIFIED = 3
"""Number of first updates per engine comparing all tensors even with `verify: sampled`: most faults show there."""
LOSS_SECONDS = 5.0
"""Seconds to wait after a failed transfer for news of a lost engine."""
ANSWER_SECONDS = 30.0
"""Seconds after which an engine that does not answer an interrupted transfer counts as hanging."""
END_SECONDS = 5.0
"""Seconds for a hanging engine to report its end; then it is killed, as it may be stopped (SIGSTOP)."""


class WeightSync:
    """Sends the actor's weights to all living engines, or to newcomers only."""

    def __init__(
        self,
        actor: Model[ActorWorker],
        restarts: EngineRestarts,
        rollouts: Cluster[RolloutWorker],
        config: WeightSyncConfig,
        workers_per_engine: int,
        dtype: str,
        expert_parallel: int = 1,
        drops_weights: bool = False,
        unreadable: str | None = None,
    ) -> None:
        """`drops_weights`: engines drop their weights between updates: every `push` must send them. `unreadable`: regular expression of
        tensor names not verified."""
        self._model = actor
        self._restarts = restarts
        self._engines = restarts.replicas
        self._rollouts = rollouts
        self._config = config
        self._workers_per_engine = workers_per_engine
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._expert_parallel = expert_parallel
        self._drops_weights = drops_weights
        self._unreadable = unreadable
        self._export: ExportPlan | None = None
        self._rendezvous: tuple[str, int] | None = None
        self._interrupts: TCPStore | None = None
        self._epoch = 0
        self._plan: TransferPlan | None = None
        self._verified: Counter[int] = Counter()
        self._version: int | None = None
        """Version last sent; None before the first `push` and after the loss of a training rank: the next `push` sends all."""
        self._transfer: list[Pending[Any]] = []
        """Calls of engines and trainers in the latest transfer; unfinished if another role was lost meanwhile."""

    @property
    def version(self) -> int:
        assert self._version is not None, "no weights were sent yet"
        return self._version

    def push(self, version: int) -> Pushed | None:
        """Send weights to all living engines or, if these have the version, to newcomers. None if no engine needs them."""
        if self._drops_weights or version != self._version:
            pushed = self._send(version, lambda: self._restarts.living((EngineMemory.KV_CACHE,)), holds_requests=True)
            self._rollouts.one(RolloutWorker.set_version, version)
            self._version = version
            return pushed
        return self.send_to_newcomers(version)

    def send_to_newcomers(self, version: int) -> Pushed | None:
        return self._send(version, lambda: self._restarts.newcomers, holds_requests=False) if self._restarts.newcomers else None

    def _send(self, version: int, engines: Callable[[], list[int]], holds_requests: bool) -> Pushed | None:
        with self._model.loaded(states(Phase.SYNC_WEIGHTS)):
            pushed = None
            while pushed is None and (receivers := engines()):
                pushed = self._update(version, receivers, holds_requests)  # None: an engine was lost; send all to the others
            if pushed is not None and self._config.verify != "none":
                started = time.monotonic()
                self._verify(version, receivers)
                pushed = replace(pushed, phases={**pushed.phases, "verify": time.monotonic() - started})
        return pushed

    def end_transfer(self) -> None:
        """Interrupt a transfer in flight; wait until living trainers and engines have left it. Silent engines are given up."""
        if in_flight := [calls for calls in self._transfer if not calls.done and calls.group.end is None]:
            self.break_off()
            self._plan = None
            give_up = partial(self._give_up_silent, self._transfer[-1], WATCHDOG.time(), "after the transfer had broken off")
            gather(*in_flight, poll=give_up)
        self._transfer = []

    def trainer_lost(self) -> None:
        """Make the next `push` connect to the new training ranks and send all weights."""
        self._export = self._rendezvous = self._interrupts = self._plan = self._version = None

    def break_off(self) -> None:
        """Interrupt a transfer in flight, so that engines and trainers stop waiting."""
        if self._interrupts is not None:
            self._epoch += 1
            interrupt(self._interrupts, self._epoch)

    def service_restarted(self) -> None:
        if self._version is not None:
            self._rollouts.one(RolloutWorker.set_version, self._version)

    def sender(self, version: int) -> Model[ActorWorker] | None:
        """Return the actor, to be loaded for `push`; None if nothing is to be sent."""
        return self._model if self._drops_weights or version != self._version or self._restarts.newcomers else None

    def _update(self, version: int, receivers: list[int], holds_requests: bool) -> Pushed | None:
        """Update the engines `receivers`. None if one was lost: others may then mix old and new weights."""
        if self._plan is not None and (list(self._plan.engines) != receivers or self._restarts.newcomers):
            self._plan = None
        plan = self._plan = self._plan or self._connect(receivers)
        if plan is None:
            return None
        if holds_requests and receivers != self._restarts.newcomers:  # some of them generate
            self._rollouts.one(RolloutWorker.hold)
        started = time.monotonic()
        engines = self._engines.start_each_own(InferWorker.update_weights, dict.fromkeys(plan.engines, plan.routes), version)
        said = self._await_both("update_weights", engines, self._model.ranks.start_all(ActorWorker.send_weights))
        if said is None:
            self._plan = None
            return None
        sent: Counter[str] = Counter()
        for one in said:
            sent.update(one.nbytes)
        by_transport = {name: nbytes / 2**20 for name, nbytes in sent.items()}
        seconds, phases = time.monotonic() - started, largest(one.seconds for one in said)
        return Pushed(version, plan.nbytes / 2**20, seconds, phases, by_transport, largest(one.by_transport for one in said))

    def _connect(self, receivers: list[int]) -> TransferPlan | None:
        timeout_s = self._config.timeout_s
        export = self._export = self._export or self._model.ranks.all(ActorWorker.export_plan, self._config.bucket_mb << 20)[0]
        if self._config.transport != "auto":
            export = replace(export, handing_on=())  # such a transport may not reach the other ranks
        if self._rendezvous is None:
            self._rendezvous = self._model.ranks.one(ActorWorker.host_weight_transfer, timeout_s)
            self._interrupts = rendezvous_client(*self._rendezvous)  # its host is up by now
        self._epoch += 1
        plan = plan_transfers(export, dict.fromkeys(receivers, self._workers_per_engine), self._dtype, self._expert_parallel)
        membership = plan.membership(self._epoch, self._config.transport, *self._rendezvous, timeout_s)
        first_members = {engine: plan.first_member(engine) for engine in plan.engines}
        engines = self._engines.start_each_own(InferWorker.connect_weights, first_members, membership)
        joined = self._await_both("connect_weights", engines, self._model.ranks.start_all(ActorWorker.connect_weights, plan, membership))
        return plan if joined is not None else None

    def _await_both(
        self, phase: str, engines: Pending[dict[int, Transferred]], trainers: Pending[list[Transferred]]
    ) -> list[Transferred] | None:
        """Wait for engines and trainers. None if an engine was lost: the caller retries with all others, which may have read data from it.
        Other failures raise RuntimeError with all causes."""
        interrupted: float | None = None
        failed: dict[str, str] = {}

        def poll() -> None:
            nonlocal interrupted
            broken = _broken(engines, trainers)
            failed.update({name: str(one.failure) for name, one in broken.items() if name not in failed and not one.stale})
            if interrupted is None and (broken or self._lost(engines)) and self._interrupts is not None:
                interrupted = WATCHDOG.time()
                self._epoch += 1
                interrupt(self._interrupts, self._epoch)  # otherwise the others wait for their timeout
            if interrupted is not None:
                first = next((f" ({name}: {text})" for name, text in failed.items()), "")
                self._give_up_silent(engines, interrupted, f"after others had broken off{first}")

        both: list[Pending[Any]] = [trainers, engines]  # trainers first: if all exceed the phase's limit, the first are blamed
        self._transfer = both
        of_trainers, said = gather(*both, poll=poll)
        if any(call.lost for call in engines.calls):
            return None
        if broken := _broken(engines, trainers):
            has_answered = any(call.value.failure is None for call in engines.calls)
            if self._lost(engines, LOSS_SECONDS if has_answered else 0.0):
                return None
            failed = failed or {name: str(one.failure) for name, one in broken.items()}
            raise RuntimeError(f"{phase} failed: {'; '.join(f'{name}: {why}' for name, why in failed.items())}")
        return [*said.values(), *of_trainers]

    def _give_up_silent(self, engines: Pending[dict[int, Transferred]], since: float, when: str) -> None:
        silent_s = WATCHDOG.time() - since
        if silent_s > ANSWER_SECONDS:
            for engine in (call.rank for call in engines.calls if not call.done and call.rank not in self._engines.lost):
                cause = f"it hangs in {engines.phase}: no answer for {ANSWER_SECONDS:g} s {when}"
                if silent_s < ANSWER_SECONDS + END_SECONDS:
                    self._engines.actors[engine].give_up.remote(cause)
                else:
                    self._engines.group.give_up(engine, cause)

    def _lost(self, engines: Pending[dict[int, Transferred]], within_s: float = 0.0) -> bool:
        deadline = time.monotonic() + within_s
        while not (lost := any(call.rank in self._engines.lost for call in engines.calls)) and time.monotonic() < deadline:
            time.sleep(0.1)
        return lost

    def _verify(self, version: int, receivers: list[int]) -> None:
        assert self._export is not None
        names = [one.name for one in self._export.tensors if self._unreadable is None or not re.search(self._unreadable, one.name)]
        for engine in self._restarts.newcomers:
            self._verified[engine] = 0
        if self._config.verify != "full" and min(self._verified[engine] for engine in receivers) >= FULLY_VERIFIED:
            names = sample(names, version)
        asked = self._engines.start_each_own(InferWorker.weight_checksums, dict.fromkeys(receivers, names))
        sent: dict[str, str] = {}
        try:
            for owned in self._model.ranks.all(ActorWorker.weight_checksums, names):
                sent |= owned
        except RankFailed:
            asked.settle()
            raise
        for engine, held in asked.result().items():
            require_equal(sent, held, f"actor_infer[{engine}]{WATCH.where('actor_infer', engine)}", version)
            self._verified[engine] += 1


def _broken(engines: Pending[dict[int, Transferred]], trainers: Pending[list[Transferred]]) -> dict[str, Transferred]:
    answered = {f"actor_infer[{call.rank}]{WATCH.where('actor_infer', call.rank)}": call.value for call in engines.calls if not call.lost}
    answered |= {f"actor_train rank {call.rank}{WATCH.where('actor_train', call.rank)}": call.value for call in trainers.calls}
    return {name: one for name, one in answered.items() if one is not None and one.failure is not None}
