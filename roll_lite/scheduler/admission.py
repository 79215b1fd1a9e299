"""Which prompts are started, and when."""

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
    """As many prompts as the supply and the queues of engines and rewards allow, in the proportions of the mix."""

    def __init__(
        self,
        domains: Mapping[str, Domain],
        schedulers: Mapping[str, DomainScheduler],
        router: Router,
        recorder: Recorder,
        pacing: Pacing,
        batches: int | None,
    ) -> None:
        """`batches`: nothing is admitted for later ones."""
        self.plan = BatchPlan({name: one.share for name, one in domains.items()}, {name: one.least for name, one in domains.items()})
        self.size = 0
        """Prompts of a batch."""
        self.asked = self.handed_out = self._resumed_at = 0
        """Batches."""
        self.announced, self._announced_tokens = 0, 0.0
        """Requests of groups that were started, and whose tasks have not run yet."""
        self._domains, self._schedulers = domains, schedulers
        self._router = router
        self._recorder = recorder
        self._pacing = pacing
        self._batches = batches
        self._loop = asyncio.get_running_loop()
        self._behind: set[str] = set()
        """Domains that start nothing for later batches, because their rewards are behind."""
        self._looked = 0.0

    def admit(self) -> None:
        """In waves replacements wait until nothing runs any more, so that which prompt follows which does not depend on timing."""
        if self._router.gate is not None and any(one.running for one in self._schedulers.values()):
            return
        if self.asked == self.handed_out and self._pacing.supply.max_staleness == 0:
            return  # it would be too old for the batch that comes next
        for scheduler in self._schedulers.values():
            while scheduler.owed and self._has_room():
                if scheduler.replace(self.asked):
                    self._announce(scheduler.name)
        most, due = self._most_places(), self._due_places()
        room = self._room_in_rewards() if self.plan.charged < most else {}
        self._note_behind({name for name, samples in room.items() if samples <= 0})
        enough = {name for name in room if self._has_enough(name)}
        while room and self._has_room() and not self.drop_exhausted():
            found = self.plan.admit(self.size, {name: due if samples <= 0 or name in enough else most for name, samples in room.items()})
            if found is None:
                return
            name, place = found
            if self._schedulers[name].admit(self.asked):
                self._announce(name)
                if place >= due:
                    room[name] -= self._domains[name].group_size

    def _announce(self, name: str) -> None:
        """Until the tasks of a group of this domain have run, which were made just now: then the router knows of its requests."""
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
        """Domains without further prompts leave the mix; True: all have left it."""
        for name, scheduler in self._schedulers.items():
            if scheduler.exhausted:
                self.plan.drop(name)
        return self.plan.exhausted

    def is_due(self, domain: str) -> bool:
        """A prompt of this domain is still to be started for a batch that was asked for."""
        return self.plan.has_open(domain, self._due_places()) and not self._schedulers[domain].exhausted

    def oldest_at_next_turn(self, domain: str) -> int:
        """When groups of this domain must have been admitted, on the clock of batches, to train in the next batch that has some of it."""
        most = self._pacing.supply.max_staleness
        return self.asked + self.plan.turns_until(domain, self.size, most) - most

    def _has_enough(self, domain: str) -> bool:
        """What two batches hold of it is finished behind the next one: what was started for later ones would only grow old. One would not
        carry it over the time in which a long response keeps the next batch waiting. Others, with longer responses, go on."""
        return self._schedulers[domain].finished >= 3 * self._of_a_batch(self._domains[domain])

    def _most_places(self) -> int:
        """Places of batches that may have been charged by now."""
        batches = self._pacing.supply.batches(self.asked, self.handed_out)
        ahead = ceil((self._pacing.oversample - 1) * self.size)
        if self._batches is not None:
            batches, ahead = min(batches, self._batches), min(ahead, max(0, self._batches - batches) * self.size)
        return (batches - self._resumed_at) * self.size + ahead if batches else 0

    def _due_places(self) -> int:
        """Those of batches that were asked for."""
        return (self.asked - self._resumed_at) * self.size

    # ------------------------------------------------------------ rewards that are behind

    def _room_in_rewards(self) -> dict[str, float]:
        """How many samples of each domain may be started for later batches.

        As many may wait for their scores as a batch holds, beside those that its rewards score at a time. More would only grow old, while
        engines could work for other domains. What was asked for is always started, so every batch is completed; and where batches are
        generated one after the other, that is bound enough.
        """
        if self._pacing.supply.whole_batches:
            return dict.fromkeys(self._domains, inf)
        groups = {name: self._of_a_batch(one) * one.group_size for name, one in self._domains.items()}
        return {name: samples - self._schedulers[name].waiting_for_scores for name, samples in groups.items()}

    def _of_a_batch(self, domain: Domain) -> int:
        """Groups."""
        return max(1, domain.least, ceil(self.plan.shares.get(domain.name, 0.0) * self.size))

    def _note_behind(self, behind: set[str]) -> None:
        """Counts the time since this was last called, for the domains that were behind by then."""
        if self._behind or behind:
            now = self._loop.time()
            for name in self._behind:
                self._recorder.domains[name].behind_s += now - self._looked
            self._behind, self._looked = behind, now

    def finish_batch(self) -> None:
        """It is complete: its statistics end here."""
        self._note_behind(self._behind)
        self.handed_out = self.asked

    # ------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        return {"mix": self.plan.state_dict(), "batches": self.handed_out}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Once the domains know what they have left: those that had left the mix by then are not in its account."""
        for name, scheduler in self._schedulers.items():
            if scheduler.exhausted and name not in state["mix"]["weights"]:
                self.plan.drop(name)
        self.plan.load_state_dict(state["mix"])
        self.asked = self.handed_out = self._resumed_at = state["batches"]
