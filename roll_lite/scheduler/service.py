from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roll_lite.data.samples import SampleGroup, SampleOutcome, Sampling
from roll_lite.scheduler.admission import Admission
from roll_lite.scheduler.domain import DataExhausted, Domain, DomainScheduler
from roll_lite.scheduler.ledger import DELIVERED
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.runner import SampleRunner, no_seeds, seeds_from
from roll_lite.scheduler.stats import Progress, Recorder, RolloutStats, RunTotals
from roll_lite.scheduler.supply import SYNCHRONOUS, OnSync, Pacing
from roll_lite.scheduler.unfinished import NONE_SAVED, SavedGroups, Unfinished
from roll_lite.scheduler.validation import VALIDATION_EPOCH, Validation


@dataclass(frozen=True)
class RolloutResult:
    groups: list[SampleGroup]
    """Groups sorted by number, failed samples included."""
    stats: RolloutStats
    left_out: list[SampleGroup] = field(default_factory=list)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    """Ledger lines: one per group ended since the last batch, then one for this batch."""


class RolloutService:
    """Generates and scores training batches and validations, in a running event loop. Staleness counts requested batches."""

    def __init__(
        self,
        domains: Sequence[Domain],
        router: Router,
        retries: int,
        seed: int | None = None,
        pacing: Pacing = SYNCHRONOUS,
        batches: int | None = None,
        keep_left_out: bool = False,
    ) -> None:
        """`seed`: base seed of requests. `batches`: the run's length. `keep_left_out`: return lost and filtered groups with the next
        batch."""
        self._domains = {domain.name: domain for domain in domains}
        self._router = router
        self._supply = pacing.supply
        self._pacing = pacing
        self._left_out: list[SampleGroup] = []
        self._before: dict[str, Any] = {}
        """Counts and ledger lines before the latest `next_batch` call."""
        self._ledger: list[dict[str, Any]] = []
        """Ledger lines from a resumed checkpoint, returned with the first batch."""
        self._keep_left_out = keep_left_out
        self._loop = asyncio.get_running_loop()
        self._time = self._loop.time
        self._version = 0
        self._next_group = 0
        self._totals = RunTotals(self._domains)
        self._recorder = Recorder(self._domains, self._time())
        self._retries = retries
        self._seeds = no_seeds if seed is None else seeds_from(seed)
        self._runners = {name: self._runner(domain, self._recorder) for name, domain in self._domains.items()}
        self._validation: Validation | None = None
        self._next_held_out = 0
        self._draining = False
        """True while a weight update waits for running responses: no validation prompts start."""
        calls = self._number_group, self._group_ended, self._break_off, self._group_left_out
        self._schedulers = {
            name: DomainScheduler(domain, self._runners[name], self._recorder, *calls) for name, domain in self._domains.items()
        }
        self._admission = Admission(self._domains, self._schedulers, router, self._recorder, pacing, batches)
        self._progress: Callable[[], dict[str, Progress]] = dict
        self._making: dict[str, int] = {}
        self._taken: dict[str, list[SampleGroup]] = {}
        self._error: BaseException | None = None
        self._changed = asyncio.Event()
        self._admits_soon = False
        router.on_room, router.on_loss = self._admit_soon, self._changed.set

    def _runner(self, domain: Domain, recorder: Recorder, **how: Any) -> SampleRunner:
        retries = self._retries, domain.reward_retries
        return SampleRunner(domain.name, self._router, domain.rewards, *retries, self._seeds, recorder, domain.episode, **how)

    def _number_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _admit_soon(self) -> None:
        if not self._admits_soon and not self._loop.is_closed():
            self._admits_soon = True
            self._loop.call_soon(self._admit)

    def _admit(self) -> None:
        self._admits_soon = False
        if self._error is None:
            self._admission.admit()
        if self._validation is not None and not self._draining:
            self._validation.start(self._room_for_validation())

    def _room_for_validation(self) -> float:
        """Return how many validation samples may run: what training leaves free, but at least capacity / (1 + number of domains)."""
        assert self._validation is not None
        longest = self._validation.longest.items()
        capacity = self._router.takes(max((self._router.expected_tokens(_held_out(name), most) for name, most in longest), default=0.0))
        training = sum(self._router.under_way(name) for name in self._domains) + self._admission.announced
        return max(capacity / (1 + len(self._domains)), capacity - training)

    def _group_ended(self) -> None:
        self._admit_soon()
        self._changed.set()

    def _group_left_out(self, group: SampleGroup) -> None:
        if self._keep_left_out:
            self._left_out.append(group)

    def _break_off(self, error: BaseException) -> None:
        self._error = self._error or error
        self._changed.set()

    # ------------------------------------------------------------ batches

    async def next_batch(self, prompts: int) -> RolloutResult:
        """Wait for a batch of `prompts` groups in the domains' shares; smaller if filter tries or prompts run out."""
        if self._supply.max_staleness == 0:
            self._recorder.start(self._time())  # with other supplies it starts when the previous batch is handed out
        admission, self._before = self._admission, self._counts()
        assert admission.plan.size in (0, prompts), f"a batch of {prompts} prompts after batches of {admission.plan.size}"
        admission.batches_requested += 1
        admission.plan.size = prompts
        at_end = all(one.exhausted and not one.running and not one.finished for one in self._schedulers.values())
        if admission.drop_exhausted() and (at_end or not admission.plan.ahead):
            raise DataExhausted(f"no domain has prompts left after {admission.handed_out} batches (domains.*.data.epochs)")
        quota = admission.plan.next_quota()
        wanted = {name: (count, self._domains[name].group_size) for name, count in quota.items()}
        self._progress = lambda: self._recorder.progress(wanted)
        for name, count in quota.items():
            self._schedulers[name].start_batch(count)
        self._router.release()
        self._admit()
        groups = await self._take(quota)
        for group in groups:
            self._recorder.delivered(group)
        done = self._progress()
        self._progress = lambda: done
        admission.finish_batch()
        stats = self._recorder.finish(self._time(), self._version)
        for scheduler in self._schedulers.values():
            scheduler.drop_stale(admission.batches_requested + 1, self._supply.max_staleness)
        if self._pacing.engines_rest:
            await self._router.hold(interrupt=True)
        self._admit()
        self._totals.add(stats)
        for name, scheduler in self._schedulers.items():
            domain = stats.domains[name]
            domain.requested, domain.requested_share = quota[name], admission.plan.shares.get(name, 0.0)
            domain.epoch = scheduler.epoch
        left_out, self._left_out = self._left_out, []
        lines = [*self._ledger, *(line for scheduler in self._schedulers.values() for line in scheduler.take_ledger())]
        self._ledger, self._before["ledger"] = [], [line for line in lines if line["end"] != DELIVERED]
        batch = {"event": "batch", "version": stats.version, "wanted": quota, "shares": admission.plan.shares}
        open_groups = sorted(n for scheduler in self._schedulers.values() for n in scheduler.live)
        return RolloutResult(groups, stats, left_out, [*lines, {**batch, "admitted": self._next_group, "open": open_groups}])

    def last_ledger(self) -> list[dict[str, Any]]:
        return [*self._ledger, *self._ledger_if_dropped("the run ended"), {"event": "end", "admitted": self._next_group, "open": []}]

    def _ledger_if_dropped(self, cause: str, undo: bool = False) -> list[dict[str, Any]]:
        return [line for scheduler in self._schedulers.values() for line in scheduler.ledger_if_dropped(cause, undo)]

    async def _take(self, quota: dict[str, int]) -> list[SampleGroup]:
        self._making, self._taken = quota, {}
        while True:
            if self._error is not None:
                raise self._error
            for name, count in quota.items():
                if name not in self._taken and not self._admission.is_due(name):
                    groups = self._schedulers[name].take(count, self._admission.minimum_admission_batch(name))
                    if groups is not None:
                        self._taken[name] = groups
            if len(self._taken) == len(quota):
                taken, self._making, self._taken = self._taken, {}, {}
                return sorted((group for groups in taken.values() for group in groups), key=lambda group: group.group)
            self._changed.clear()
            await self._changed.wait()

    def finished(self) -> list[SampleGroup]:
        certain = {name: self._schedulers[name].certain(count) for name, count in self._making.items() if name not in self._taken}
        return [group for groups in (self._taken | certain).values() for group in groups]

    # ------------------------------------------------------------ weights

    async def hold(self) -> None:
        """Prepare for a weight update, which `set_version` ends. PAUSE only stops the timeout clock: engines pause at the first weight
        bucket. Without engines, do not wait for responses: replacements serve only after the update."""
        on_sync = self._pacing.on_sync
        self._draining = on_sync is OnSync.DRAIN
        if on_sync is OnSync.DRAIN and self._supply.whole_batches:
            while self._error is None and not self._router.waits_for_engine and any(one.running for one in self._schedulers.values()):
                self._changed.clear()
                await self._changed.wait()
        if on_sync is OnSync.PAUSE:
            self._router.clock.stop()
        else:
            await self._router.hold(interrupt=on_sync is OnSync.ABORT)

    def set_version(self, version: int) -> None:
        self._version = version
        self._draining = False
        self._router.clock.go_on()
        self._router.weights_changed()
        if not self._pacing.engines_rest:
            self._router.release()

    def progress(self, held_out: bool = False) -> dict[str, Progress]:
        if held_out:
            return {} if self._validation is None else self._validation.progress()
        return self._progress()

    # ------------------------------------------------------------ validation

    async def evaluate(self, samples_per_prompt: int, sampling: Mapping[str, Sampling]) -> RolloutResult:
        """Generate and score all validation prompts beside training batches. Failed samples are not replaced."""
        assert self._validation is None, "one validation at a time"
        recorder = Recorder(self._domains, self._time())
        domains = list(self._domains.values())
        runners = {one.name: self._runner(one, recorder, queue=_held_out(one.name), generated=self._admit_soon) for one in domains}
        self._validation = Validation(domains, runners, samples_per_prompt, sampling, recorder, self._admit_soon, self._next_held_out)
        self._next_held_out += sum(len(one.validation or ()) for one in domains)
        self._router.release()
        self._admit()
        try:
            groups = await self._validation.groups()
        finally:
            self._validation = None
        if self._pacing.engines_rest:
            await self._router.hold(interrupt=True)
        return RolloutResult(groups, recorder.finish(self._time(), self._version))

    def close(self) -> None:
        closed = RuntimeError("the rollout service is closed")
        self._break_off(closed)
        if self._validation is not None:
            self._validation.break_off(closed)
        for scheduler in self._schedulers.values():
            scheduler.cancel()

    def state_dict(self, batches: int | None = None) -> dict[str, Any]:
        """Return the state after `batches` batches: all handed out (default), or one fewer. Later batches' groups count as undelivered."""
        batches = self._admission.handed_out if batches is None else batches
        undo = batches < self._admission.handed_out
        counts = self._before if batches < self._admission.batches_requested else self._counts()
        return {
            **counts,
            "next_group": self._next_group,
            "ledger": [*counts["ledger"], *self._ledger_if_dropped("in flight at the checkpoint", undo)],
            "domains": {name: scheduler.state_dict(undo) for name, scheduler in self._schedulers.items()},
        }

    def _counts(self) -> dict[str, Any]:
        return {**self._admission.state_dict(), **self._totals.state_dict(), "ledger": self._ledger}

    def unfinished(self, state: Mapping[str, Any]) -> dict[int, dict[int, Unfinished]]:
        """Return {group: {index: state}} of samples undelivered in `state`, an earlier `state_dict`, with current tokens and scores."""
        found: dict[int, dict[int, Unfinished]] = {}
        for name, domain in state["domains"].items():
            for number in (one["group"] for one in domain["unfinished"] if one["group"] is not None):
                samples = self._schedulers[name].reached(number)
                done = sum(one.sample.outcome is not None for one in samples.values())
                if samples and (self._router.gate is None or done == self._domains[name].group_size):
                    found[number] = samples
        return found

    def load_state_dict(self, state: dict[str, Any], saved: SavedGroups = NONE_SAVED) -> dict[str, list[int]]:
        """Return {domain: saved groups with changed rows}."""
        self._next_group = state["next_group"]
        self._ledger = list(state["ledger"])
        self._totals.load_state_dict(state)
        oldest = state["batches"] + 1 - self._supply.max_staleness
        known = {name: domain for name, domain in state["domains"].items() if name in self._schedulers}
        changed = {name: self._schedulers[name].load_state_dict(domain, saved, oldest) for name, domain in known.items()}
        self._admission.load_state_dict(state)
        return changed


def _held_out(domain: str) -> str:
    return f"{domain}/{VALIDATION_EPOCH}"


def accepted(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """Drop failed samples and groups that become empty."""
    kept = [replace(group, samples=tuple(s for s in group.samples if s.outcome is SampleOutcome.ACCEPTED)) for group in groups]
    return [group for group in kept if group.samples]
