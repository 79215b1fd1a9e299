"""What the rollout service has promised, kept in plain counters: told of what happens at its edges (prompts that start, samples that end,
groups that the filter sees, batches), never of what it thinks itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil

from roll_lite.data.samples import Sample, SampleGroup, SampleId, SampleOutcome
from roll_lite.scheduler.filters import GroupFilter
from roll_lite.scheduler.runner import UNCOUNTED_LOSSES
from roll_lite.scheduler.service import RolloutResult
from roll_lite.scheduler.supply import Asynchronous, OneStepOff, OnSync, Pacing

Row = tuple[str, int, int]
"""Domain, epoch, uid."""


@dataclass(frozen=True)
class DomainPlan:
    share: int
    samples: int
    """Of a group, with the greedy baseline."""
    baseline: bool = False
    least: int = 0
    """Groups in each batch."""
    prompts: int = 1000
    epochs: int | None = None
    filter: GroupFilter | None = None


@dataclass(frozen=True)
class House:
    """What a schedule runs in."""

    domains: dict[str, DomainPlan]
    pacing: Pacing
    size: int
    """Prompts of a batch."""
    engines: int
    slots: int
    retries: int
    reward_retries: int
    waves: bool
    rest: bool
    """Engines are away between two batches."""
    doomed: bool
    """In the end all engines die."""
    tokens: int | None = None
    """In flight to an engine; None: without a bound."""
    turns: int = 1
    """Of domain a's episodes."""
    branches: bool = False
    """Episodes ask twice more after their first response, at the same time."""


@dataclass
class Group:
    row: Row
    clock: int
    """Batches that had been asked for when it was admitted."""
    started: int = 0
    ended: list[Sample] = field(default_factory=list)


@dataclass
class Remembered:
    """What a checkpoint must bring back."""

    delivered: Counter[str] = field(default_factory=Counter)
    wanted: Counter[str] = field(default_factory=Counter)
    """Groups, by the batches' quotas."""
    ended: dict[Row, str] = field(default_factory=dict)
    asked: int = 0
    handed_out: int = 0
    again: Counter[Row] = field(default_factory=Counter)
    """Rows that must start again before any new one: stale, or in flight in the run before."""

    def copy(self, live: Iterable[Row]) -> Remembered:
        again = self.again + Counter(live)
        return Remembered(Counter(self.delivered), Counter(self.wanted), dict(self.ended), self.asked, self.handed_out, again)


class Model:
    def __init__(self, house: House, since: Remembered | None = None) -> None:
        self.house = house
        self.past = since or Remembered()
        self.ways: dict[str, Counter[str]] = {name: Counter() for name in house.domains}
        """In this life of the service."""
        self.live: dict[int, Group] = {}
        self.lost: dict[str, list[bool]] = {name: [] for name in house.domains}
        """Of each group whose samples have all ended: was it?"""
        self.wanted: Counter[str] = Counter()
        self.replaced: dict[int, int] = {}
        """By version: the clock of batches when the next one came."""

    # ------------------------------------------------------------ what happens

    def starts(self, sample: SampleId) -> None:
        row = (sample.domain, sample.epoch, sample.prompt_uid)
        if sample.group not in self.live:
            again = [one for one in self.past.again if one[0] == sample.domain]
            assert not again or row in again, f"{row} is new, and {again} were there before"
            self.past.again -= Counter([row])
            plan = self.house.domains[sample.domain]
            assert plan.epochs is None or sample.epoch < plan.epochs
            self.live[sample.group] = Group(row, self.past.asked)
            self.ways[sample.domain]["admitted"] += 1
        group = self.live[sample.group]
        assert group.row == row and sample.index == group.started
        group.started += 1
        assert group.started <= self.house.domains[sample.domain].samples

    def ends(self, sample: Sample) -> None:
        """Of groups that were given up meanwhile nothing is expected."""
        uncounted = UNCOUNTED_LOSSES if sample.id.domain == "a" and self.house.turns > 1 else 0
        assert sample.id.attempt <= self.house.retries + uncounted
        group = self.live.get(sample.id.group)
        if group is None:
            return
        group.ended.append(sample)
        name = sample.id.domain
        plan = self.house.domains[name]
        if len(group.ended) < plan.samples:
            return
        failed = [one.id.index for one in group.ended if one.outcome is SampleOutcome.FAILED]
        responses = plan.samples - plan.baseline
        lost = len([index for index in failed if index < responses]) == responses or (plan.baseline and plan.samples - 1 in failed)
        self.lost[name].append(lost)
        if lost:
            self._end(sample.id.group, "lost")

    def rejects(self, group: SampleGroup) -> None:
        """The filter has seen it: all of its samples have ended, and some of them well."""
        assert len(self.live[group.group].ended) == self.house.domains[group.domain].samples
        self._end(group.group, "filtered")

    def _end(self, number: int, way: str) -> Row:
        group = self.live.pop(number)
        assert group.row not in self.past.ended, f"{group.row} was {self.past.ended[group.row]} and is {way} now"
        self.past.ended[group.row] = way
        self.ways[group.row[0]][way] += 1
        return group.row

    def hands_out(self, result: RolloutResult) -> None:
        clock, most = self.past.asked, self.house.pacing.supply.max_staleness
        self.past.handed_out = clock
        for group in result.groups:
            mine = self.live[group.group]
            assert mine.row == (group.domain, group.samples[0].id.epoch, group.samples[0].id.prompt_uid)
            assert clock - mine.clock <= most, f"group {group.group} is {clock - mine.clock} batches old"
            self.check_group(group, clock - most)
            self._end(group.group, "delivered")
        delivered = Counter(group.domain for group in result.groups)
        self.past.delivered.update(delivered)
        for name, stats in result.stats.domains.items():
            self.past.wanted[name] += stats.requested
            self.wanted[name] += stats.requested
            assert stats.requested >= self.house.domains[name].least or self.short, name
            assert delivered[name] == stats.requested or (delivered[name] < stats.requested and self.short), name
        for number, group in list(self.live.items()):
            if group.clock < clock + 1 - most:
                assert self.house.pacing.oversample > 1, f"group {number} is too old, and there was room for no more than what trains"
                del self.live[number]
                self.ways[group.row[0]]["stale"] += 1
                if group.row not in {other.row for other in self.live.values()}:  # else it has started again already
                    self.past.again[group.row] += 1

    def check_group(self, group: SampleGroup, oldest: int) -> None:
        plan = self.house.domains[group.domain]
        samples = [*group.samples, *([group.baseline] if group.baseline is not None else [])]
        assert [sample.id.index for sample in samples] == list(range(plan.samples))
        for sample in samples:
            assert (sample.score is not None) == (sample.outcome is SampleOutcome.ACCEPTED)
            if sample.outcome is not SampleOutcome.ACCEPTED:
                continue
            several_turns = group.domain == "a" and self.house.turns > 1
            spans = [span.version for span in sample.transcript.versions]
            versions = sorted(set(spans))
            assert spans == (sorted(spans) if several_turns else versions)
            assert self.replaced.get(versions[0], oldest) >= oldest, f"{sample.id} has tokens of version {versions[0]}"
            pacing = self.house.pacing
            if pacing.on_sync is OnSync.DRAIN and pacing.supply.whole_batches and not self.house.rest and not several_turns:
                assert len(versions) == 1

    # ------------------------------------------------------------ what must hold

    def check(self) -> None:
        """Everything that happened at this moment has been told."""
        assert len(self.live) <= self.most_live()
        rows = Counter(group.row for group in self.live.values()) + self.past.again
        assert all(count == 1 for count in rows.values()), [row for row, count in rows.items() if count > 1]
        assert not rows.keys() & self.past.ended.keys()

    @property
    def short(self) -> bool:
        """Batches may be smaller, and shares be missed: a domain has no more prompts, or its filter gives places up."""
        rows = Counter(row[0] for row in {*self.past.ended, *self.past.again, *(group.row for group in self.live.values())})
        return any(
            (plan.filter is not None and not plan.filter.fill) or (plan.epochs is not None and rows[name] >= plan.prompts * plan.epochs)
            for name, plan in self.house.domains.items()
        )

    def most_live(self) -> int:
        """Prompts that may be admitted and not have ended."""
        pacing, past, size = self.house.pacing, self.past, self.house.size
        ahead = past.asked - past.handed_out
        if isinstance(pacing.supply, Asynchronous):
            return (ahead + pacing.supply.max_staleness) * size
        if isinstance(pacing.supply, OneStepOff):
            return size
        return ahead * size + ceil((pacing.oversample - 1) * size)

    def check_quotas(self) -> None:
        """After a batch. Where a domain has had all of its prompts, the others have its share."""
        total, places = sum(plan.share for plan in self.house.domains.values()), sum(self.past.wanted.values())
        for name, plan in self.house.domains.items():
            ways = self.ways[name]
            if plan.filter is not None and self.house.pacing == Pacing():
                assert ways["admitted"] - ways["lost"] <= plan.filter.tries * self.wanted[name]
            if not self.short and not any(other.least for other in self.house.domains.values()):
                assert abs(self.past.delivered[name] - Fraction(plan.share * places, total)) < 1, (name, self.past.delivered)
