from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import ceil, inf
from typing import Any

from roll_lite.scheduler.domain import Domain, DomainScheduler
from roll_lite.scheduler.mix import BatchPlan
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.stats import Recorder
from roll_lite.scheduler.supply import Pacing


class Admission:
    """Starts prompts in proportion to the domains' shares, within limits of staleness and of engine and reward queues."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        schedulers: Mapping[str, DomainScheduler],
        router: Router,
        recorder: Recorder,
        pacing: Pacing,
        batches: int | None,
    ) -> None:
        self.plan = BatchPlan({name: one.share for name, one in domains.items()}, {name: one.least for name, one in domains.items()})
        self.batches_requested = self.handed_out = self._resumed_at = 0
        self.announced, self._announced_tokens = 0, 0.0
        """Number and expected tokens of admitted requests not yet in the router."""
        self._domains, self._schedulers = domains, schedulers
        self._router = router
        self._recorder = recorder
        self._pacing = pacing
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._behind: set[str] = set()
        """Domains with too many unscored samples: they start no prompts for later batches."""
        self._looked = 0.0

    def admit(self) -> None:
        """Start prompts while there is room, in deterministic runs only when no group runs."""
        if self._router.gate is not None and any(one.running for one in self._schedulers.values()):
            return
        if self.batches_requested == self.handed_out and self._pacing.supply.max_staleness == 0:
            return  # a prompt started now would be too old for the next batch
        for scheduler in self._schedulers.values():
            while scheduler.owed and self._has_room():
                if scheduler.admit(self.batches_requested, replaces=True):
                    self._announce(scheduler.name)
        most, due = self._most_places(), self._requested_places()
        room = self._room_in_rewards() if self.plan.charged < most else {}
        self._note_behind({name for name, samples in room.items() if samples <= 0})
        # Domains whose finished groups fill three batches: further groups would become stale.
        enough = {name for name in room if self._schedulers[name].finished >= 3 * self._of_a_batch(self._domains[name])}
        while room and self._has_room() and not self.drop_exhausted():
            found = self.plan.admit({name: due if samples <= 0 or name in enough else most for name, samples in room.items()})
            if found is None:
                return
            name, place = found
            if self._schedulers[name].admit(self.batches_requested):
                self._announce(name)
                if place >= due:
                    room[name] -= self._domains[name].group_size

    def _announce(self, name: str) -> None:
        """Count a new group's requests as load until the router counts them, on the event loop's next turn."""
        domain = self._domains[name]
        requests = domain.group_size
        tokens = requests * self._router.expected_tokens(name, domain.sampling.max_tokens)
        self.announced += requests
        self._announced_tokens += tokens
        self._loop.call_soon(self._have_come, requests, tokens)

    def _have_come(self, requests: int, tokens: float) -> None:
        self.announced -= requests
        self._announced_tokens -= tokens

    def _has_room(self) -> bool:
        return self._router.has_room(self.announced, self._announced_tokens)

    def drop_exhausted(self) -> bool:
        """Drop domains without further prompts from the plan. Return True if none is left."""
        for name, scheduler in self._schedulers.items():
            if scheduler.exhausted:
                self.plan.drop(name)
        return self.plan.exhausted

    def is_due(self, domain: str) -> bool:
        return self.plan.has_open(domain, self._requested_places()) and not self._schedulers[domain].exhausted

    def minimum_admission_batch(self, domain: str) -> int:
        """Least `batches_requested` at admission of groups fresh enough for the domain's next batch."""
        most = self._pacing.supply.max_staleness
        return self.batches_requested + self.plan.turns_until(domain, most) - most

    def _most_places(self) -> int:
        batches = self._pacing.supply.batches(self.batches_requested, self.handed_out)
        ahead = ceil((self._pacing.oversample - 1) * self.plan.size)
        if self._batches is not None:
            batches, ahead = min(batches, self._batches), min(ahead, max(0, self._batches - batches) * self.plan.size)
        return (batches - self._resumed_at) * self.plan.size + ahead if batches else 0

    def _requested_places(self) -> int:
        return (self.batches_requested - self._resumed_at) * self.plan.size

    # ------------------------------------------------------------ rewards that lag

    def _room_in_rewards(self) -> dict[str, float]:
        """Return {domain: samples it may start for later batches}; at most one batch may wait for scores."""
        if self._pacing.supply.whole_batches:
            return dict.fromkeys(self._domains, inf)
        groups = {name: self._of_a_batch(one) * one.group_size for name, one in self._domains.items()}
        return {name: samples - self._schedulers[name].waiting_for_scores for name, samples in groups.items()}

    def _of_a_batch(self, domain: Domain) -> int:
        return max(1, domain.least, ceil(self.plan.shares.get(domain.name, 0.0) * self.plan.size))

    def _note_behind(self, behind: set[str]) -> None:
        if self._behind or behind:
            now = self._loop.time()
            for name in self._behind:
                self._recorder.domains[name].behind_s += now - self._looked
            self._behind, self._looked = behind, now

    def finish_batch(self) -> None:
        self._note_behind(self._behind)
        self.handed_out = self.batches_requested

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"mix": self.plan.state_dict(), "batches": self.handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, scheduler in self._schedulers.items():
            if scheduler.exhausted and name not in state["mix"]["weights"]:
                self.plan.drop(name)
        self.plan.load_state_dict(state["mix"])
        self.batches_requested = self.handed_out = self._resumed_at = state["batches"]
