"""The rollout service: domains, mix, router and rewards behind `next_batch` and `evaluate`."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roll_lite.data.samples import SampleGroup, SampleId, SampleOutcome
from roll_lite.scheduler.domain import Domain, DomainFailed, DomainScheduler
from roll_lite.scheduler.episode import Episode, one_response
from roll_lite.scheduler.mix import DomainMix
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.runner import Retries, SampleRunner, no_seeds, seeds_from
from roll_lite.scheduler.stats import Progress, Recorder, RolloutStats
from roll_lite.scheduler.supply import GroupStream, Supply

VALIDATION_EPOCH = -1


@dataclass(frozen=True)
class RolloutResult:
    groups: list[SampleGroup]
    """In the order of their numbers. Failed samples are among them, for dumps; only accepted ones train."""
    stats: RolloutStats


class RolloutService:
    """Must be made inside a running event loop, whose clock is the only clock."""

    def __init__(
        self, domains: Sequence[Domain], router: Router, retries: int, seed: int | None = None, episode: Episode = one_response
    ) -> None:
        """`seed`: each request gets a seed of its own, derived from this one. `episode`: what happens in a sample."""
        self._domains = {domain.name: domain for domain in domains}
        self._mix = DomainMix({domain.name: domain.share for domain in domains})
        self._router = router
        self._clock = asyncio.get_running_loop().time
        self._version = 0
        self._next_group = 0
        self._delivered = dict.fromkeys(self._domains, 0)
        self._stream = GroupStream(self._domains)
        self._recorder = Recorder(self._domains, self._clock())
        seeds = no_seeds if seed is None else seeds_from(seed)
        self._runners = {
            domain.name: SampleRunner(domain.name, router, domain.rewards, Retries(retries, domain.reward_retries), seeds, episode)
            for domain in domains
        }
        self._schedulers = {domain.name: self._scheduler(domain) for domain in domains}
        self._watched: tuple[Recorder, dict[str, tuple[int, int]]] = (self._recorder, {})
        """What is being made: groups by domain, and samples in each."""
        self._supply = Supply(self._schedulers, self._stream, in_waves=router.gate is not None)

    def _scheduler(self, domain: Domain) -> DomainScheduler:
        return DomainScheduler(
            domain,
            self._runners[domain.name],
            self._recorder,
            group_numbers=self._number_group,
            finished=self._group_finished,
            lost=lambda name: self._supply.group_ended(name, lost=True),
            broken=self._stream.fail,
        )

    def _number_group(self) -> int:
        self._next_group += 1
        return self._next_group - 1

    def _group_finished(self, group: SampleGroup) -> None:
        self._stream.put(group)
        self._supply.group_ended(group.domain, lost=False)

    def set_version(self, version: int) -> None:
        """The engines have new weights."""
        self._version = version

    async def next_batch(self, prompts: int) -> RolloutResult:
        """Groups of `prompts` prompts, in exactly the mix's proportions."""
        quota = self._mix.quota(prompts)
        self._recorder.start(self._clock())
        self._watched = (self._recorder, {name: (count, self._domains[name].group_size) for name, count in quota.items()})
        for name, count in quota.items():
            self._schedulers[name].failure_limit = max(8, 3 * count)
        self._supply.want(quota)
        groups = await self._stream.take(quota)
        for group in groups:
            self._schedulers[group.domain].delivered(group)
            self._delivered[group.domain] += 1
        stats = self._recorder.finish(self._clock(), self._version)
        total = sum(self._delivered.values())
        for name, share in self._mix.shares.items():
            domain = stats.domains[name]
            domain.requested = quota[name]
            domain.requested_share, domain.realised_share = share, self._delivered[name] / max(1, total)
        return RolloutResult(groups, stats)

    def progress(self) -> dict[str, Progress]:
        """How far the batch is that is being made."""
        recorder, wanted = self._watched
        return recorder.progress(wanted)

    async def evaluate(self, samples_per_prompt: int, temperature: float) -> RolloutResult:
        """Every validation prompt of every domain. What fails is reported, not replaced."""
        recorder = Recorder(self._domains, self._clock())
        held_out = {name: len(domain.validation) for name, domain in self._domains.items() if domain.validation is not None}
        self._watched = (recorder, {name: (count, samples_per_prompt) for name, count in held_out.items()})
        numbers = itertools.count()
        waiting: list[asyncio.Future[SampleGroup]] = []
        for domain in self._domains.values():
            if domain.validation is not None:
                waiting += [
                    asyncio.ensure_future(self._validate(domain, index, next(numbers), samples_per_prompt, temperature, recorder))
                    for index in range(len(domain.validation))
                ]
        try:
            groups = await asyncio.gather(*waiting)
        except BaseException:
            for group in waiting:
                group.cancel()
            raise
        for name, stats in recorder.domains.items():
            if stats.lost_groups and not stats.delivered:
                raise DomainFailed(f"domain {name}: every sample of the validation failed; first cause: {next(iter(stats.failures))}")
        return RolloutResult(groups, recorder.finish(self._clock(), self._version))

    async def _validate(self, domain: Domain, index: int, number: int, samples: int, temperature: float, recorder: Recorder) -> SampleGroup:
        assert domain.validation is not None
        prompt = domain.validation[index]
        sampling = replace(domain.sampling, temperature=temperature, keep_mask=False)
        runner = self._runners[domain.name]
        tasks = [
            runner.start(SampleId(domain.name, prompt.uid, VALIDATION_EPOCH, number, place), prompt, sampling, recorder)
            for place in range(samples)
        ]
        try:
            group = SampleGroup(number, domain.name, tuple(await asyncio.gather(*tasks)))
        except BaseException:
            for task in tasks:
                task.cancel()
            raise
        recorder.group(group)
        return group

    def close(self) -> None:
        """Drop everything in flight; requests are aborted."""
        for scheduler in self._schedulers.values():
            scheduler.cancel()

    def state_dict(self) -> dict[str, Any]:
        return {
            "mix": self._mix.state_dict(),
            "next_group": self._next_group,
            "delivered": dict(self._delivered),
            "domains": {name: scheduler.state_dict() for name, scheduler in self._schedulers.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Domains that the state does not know start from their beginning."""
        self._mix.load_state_dict(state["mix"])
        self._next_group = state["next_group"]
        self._delivered.update({name: count for name, count in state["delivered"].items() if name in self._delivered})
        for name, domain in state["domains"].items():
            if name in self._schedulers:
                self._schedulers[name].load_state_dict(domain)


def accepted(groups: Sequence[SampleGroup]) -> list[SampleGroup]:
    """The groups without their failed samples; groups that have none left are dropped."""
    kept = [replace(group, samples=tuple(s for s in group.samples if s.outcome is SampleOutcome.ACCEPTED)) for group in groups]
    return [group for group in kept if group.samples]
