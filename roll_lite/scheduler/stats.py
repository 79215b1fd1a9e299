"""What happened while a batch was made: counts and sums, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from roll_lite.data.samples import SampleGroup, SampleOutcome

UNFINISHED, SURPLUS = "unfinished", "surplus"
"""Why a group became too old: its responses or scores were not done, or it was, and no batch had a place for it."""


@dataclass
class DomainStats:
    requested: int = 0
    """Groups that the batch asked for."""
    admitted: int = 0
    """Prompts whose groups were started."""
    delivered: int = 0
    """Groups that the batch got."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Groups that the filter left out, by why (LOW, HIGH, FUNCTION), each replaced by another prompt."""
    stale_by_cause: Counter[str] = field(default_factory=Counter)
    """Groups that became too old, by cause (UNFINISHED, SURPLUS); their prompts are put back."""
    lost_groups: int = 0
    """Groups without a surviving sample or without their greedy baseline, each replaced by another prompt."""
    timed_out_groups: int = 0
    """Groups that lost a member to a time-out, delivered or not."""
    accepted: int = 0
    """Samples of the batch that can train."""
    batch_tokens: int = 0
    """Their response tokens."""
    scored: int = 0
    """Samples that got a score, greedy baselines and samples of lost groups among them."""
    failed: int = 0
    """Samples that failed for good, greedy baselines among them."""
    failures: Counter[str] = field(default_factory=Counter)
    """Samples that failed for good, by cause."""
    retries: Counter[str] = field(default_factory=Counter)
    """Attempts that failed and were repeated, by cause."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt tokens, those that the engines had in their prefix caches."""
    response_tokens: int = 0
    """Generated, whatever became of them."""
    generation_s: float = 0.0
    """Sum over successful requests of the time between sending and completion."""
    reward_s: float = 0.0
    """Sum over scored samples of the time between asking for the score and getting it."""
    behind_s: float = 0.0
    """Time in which prompts for later batches waited because its rewards were behind."""
    requested_share: float = 0.0
    """The domain's weight among all domains."""
    admitted_share: float = 0.0
    """Of all groups that were started in the run so far."""
    scored_share: float = 0.0
    """Of the samples that got a score in the run so far."""
    generated_share: float = 0.0
    """Of the response tokens generated in the run so far."""
    realised_share: float = 0.0
    """Of the groups in all batches so far."""
    sample_share: float = 0.0
    """Of the samples in them that can train."""
    token_share: float = 0.0
    """Of their response tokens."""
    epoch: int = 0
    """Of the newest prompt."""

    @property
    def filtered_groups(self) -> int:
        return self.filtered.total()

    @property
    def stale(self) -> int:
        return self.stale_by_cause.total()


@dataclass
class RolloutStats:
    domains: dict[str, DomainStats]
    version: int = 0
    """Weights that the engines had when the batch was complete."""
    wall_s: float = 0.0
    generation_s: float = 0.0
    """From the start to the last completion: rewards run beside it."""
    reward_tail_s: float = 0.0
    """From the last completion to the last score: reward time that generation did not hide."""

    @property
    def tokens(self) -> int:
        return sum(domain.prompt_tokens + domain.response_tokens for domain in self.domains.values())

    @property
    def response_tokens(self) -> int:
        return sum(domain.response_tokens for domain in self.domains.values())


class RunTotals:
    """What the mix has come to over the run, by domain: before filters, and in the batches."""

    COUNTS: ClassVar = {
        "scored_samples": "scored",
        "generated_tokens": "response_tokens",
        "delivered": "delivered",
        "delivered_samples": "accepted",
        "delivered_tokens": "batch_tokens",
    }
    """What they are called in checkpoints, and of which number in the statistics of a batch each is the sum."""

    def __init__(self, domains: Iterable[str]) -> None:
        names = list(domains)
        self._sums = {name: dict.fromkeys(names, 0) for name in self.COUNTS}

    def add(self, stats: RolloutStats) -> None:
        """Of one batch; its shares become those of the run."""
        for total, number in self.COUNTS.items():
            for name, domain in stats.domains.items():
                self._sums[total][name] += getattr(domain, number)
        for name, domain in stats.domains.items():
            domain.scored_share = self._share("scored_samples", name)
            domain.generated_share = self._share("generated_tokens", name)
            domain.realised_share = self._share("delivered", name)
            domain.sample_share = self._share("delivered_samples", name)
            domain.token_share = self._share("delivered_tokens", name)

    def _share(self, total: str, name: str) -> float:
        sums = self._sums[total]
        return sums[name] / max(1, sum(sums.values()))

    def state_dict(self) -> dict[str, dict[str, int]]:
        return {total: dict(sums) for total, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Domains and counts that the state does not know begin with nothing."""
        for total, sums in self._sums.items():
            sums.update({name: count for name, count in state.get(total, {}).items() if name in sums})


class Progress(NamedTuple):
    """Of one domain's samples, while a batch is made."""

    generated: int
    scored: int
    wanted: int
    """More than at first where groups are replaced."""


class Recorder:
    """Collects what happens between two batches. Long-lived: samples in flight write to it over a batch's border."""

    def __init__(self, domains: Iterable[str], now: float) -> None:
        self._names = list(domains)
        self.domains = {name: DomainStats() for name in self._names}
        self.start(now)

    def start(self, now: float) -> None:
        """A batch is begun."""
        self._started = self.last_completion = self.last_score = now

    def finish(self, now: float, version: int) -> RolloutStats:
        """It is there, and the next one begun."""
        domains, self.domains = self.domains, {name: DomainStats() for name in self._names}
        stats = RolloutStats(
            domains=domains,
            version=version,
            wall_s=now - self._started,
            generation_s=self.last_completion - self._started,
            reward_tail_s=max(0.0, self.last_score - self.last_completion),
        )
        self.start(now)
        return stats

    def progress(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, Progress]:
        """`wanted`: groups and samples in each, by domain."""
        found = {}
        for name, (groups, samples) in wanted.items():
            domain = self.domains[name]
            replaced = domain.lost_groups + domain.filtered_groups
            found[name] = Progress(sum(domain.finish_reasons.values()), domain.scored, (groups + replaced) * samples)
        return found

    def group(self, group: SampleGroup) -> None:
        """A group is finished: count its failures."""
        domain = self.domains[group.domain]
        failures = [sample.failure or "unknown" for sample in group.samples if sample.outcome is SampleOutcome.FAILED]
        domain.lost_groups += loss_of(group) is not None
        domain.timed_out_groups += group.timed_out
        if group.baseline is not None and group.baseline.outcome is SampleOutcome.FAILED:
            failures.append(f"greedy baseline: {group.baseline.failure or 'unknown'}")
        domain.failed += len(failures)
        domain.failures.update(failures)

    def delivered(self, group: SampleGroup) -> None:
        """A group is in the batch."""
        domain = self.domains[group.domain]
        domain.delivered += 1
        accepted = [sample for sample in group.samples if sample.outcome is SampleOutcome.ACCEPTED]
        domain.accepted += len(accepted)
        domain.batch_tokens += sum(sample.transcript.policy_tokens for sample in accepted)


def commonest(causes: Counter[str]) -> str:
    """The cause that came most often, and how often; in one line, however much a failure says."""
    cause, count = causes.most_common(1)[0]
    return f"{count} of them: {' '.join(cause.split())[:200]}"


def loss_of(group: SampleGroup) -> str | None:
    """Why a group cannot train, if it cannot. Without its baseline it cannot be judged: a missing score is not a score of 0."""
    if group.baseline is not None and group.baseline.outcome is SampleOutcome.FAILED:
        return f"greedy baseline: {group.baseline.failure or 'unknown'}"
    if all(sample.outcome is SampleOutcome.FAILED for sample in group.samples):
        return group.samples[0].failure or "unknown"
    return None
