"""Statistics of generation: counts and sums of each batch, for metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from roll_lite.data.samples import SampleGroup, SampleOutcome

UNFINISHED, SURPLUS = "unfinished", "surplus"
"""Causes of staleness: responses or scores were unfinished; or the group was finished, and no batch had a place for it."""


@dataclass
class DomainStats:
    """Statistics of one domain in one batch."""

    requested: int = 0
    """Groups asked for."""
    admitted: int = 0
    """Prompts whose groups were started."""
    delivered: int = 0
    """Groups in the batch."""
    filtered: Counter[str] = field(default_factory=Counter)
    """Filtered groups by cause (LOW, HIGH, FUNCTION), each replaced by another prompt."""
    stale_by_cause: Counter[str] = field(default_factory=Counter)
    """Stale groups by cause (UNFINISHED, SURPLUS); their prompts are put back in the queue."""
    lost_groups: int = 0
    """Groups without a surviving sample or without their greedy baseline, each replaced by another prompt."""
    timed_out_groups: int = 0
    """Groups with a sample that timed out, delivered or not."""
    accepted: int = 0
    """Samples of the batch that can train."""
    batch_tokens: int = 0
    """Response tokens of the accepted samples."""
    terms: dict[str, float] = field(default_factory=dict)
    """Sums over the accepted samples of what each term adds to their scores, where the reward has several."""
    scored: int = 0
    """Samples with a score, including greedy baselines and samples of lost groups."""
    failed: int = 0
    """Samples that failed after all retries, including greedy baselines."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed samples by cause."""
    retries: Counter[str] = field(default_factory=Counter)
    """Retried attempts by cause."""
    finish_reasons: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the engines' prefix caches."""
    response_tokens: int = 0
    """All generated tokens, used or not."""
    generation_s: float = 0.0
    """Sum over successful requests of the time between sending and completion."""
    reward_s: float = 0.0
    """Sum over scored samples of the time between asking for the score and getting it."""
    behind_s: float = 0.0
    """Seconds in which prompts for later batches waited because rewards lagged."""
    requested_share: float = 0.0
    """The domain's weight among all domains."""
    admitted_share: float = 0.0
    """Share of all groups started in the run so far."""
    scored_share: float = 0.0
    """Share of the samples scored in the run so far."""
    generated_share: float = 0.0
    """Share of the response tokens generated in the run so far."""
    realised_share: float = 0.0
    """Share of the groups in all batches so far."""
    sample_share: float = 0.0
    """Share of the accepted samples in all batches so far."""
    token_share: float = 0.0
    """Share of the response tokens in all batches so far."""
    epoch: int = 0
    """Epoch of the newest prompt."""

    @property
    def filtered_groups(self) -> int:
        return self.filtered.total()

    @property
    def stale(self) -> int:
        return self.stale_by_cause.total()


@dataclass
class RolloutStats:
    """Statistics of one batch."""

    domains: dict[str, DomainStats]
    version: int = 0
    """Weight version of the engines when the batch was complete."""
    wall_s: float = 0.0
    generation_s: float = 0.0
    """Seconds from the start to the last response; rewards run meanwhile."""
    reward_tail_s: float = 0.0
    """Seconds from the last response to the last score: reward time that generation did not hide."""

    @property
    def tokens(self) -> int:
        return sum(domain.prompt_tokens + domain.response_tokens for domain in self.domains.values())

    @property
    def response_tokens(self) -> int:
        return sum(domain.response_tokens for domain in self.domains.values())


class RunTotals:
    """Totals of the run by domain, before filters and in the batches; shares are computed from them."""

    TOTALS: ClassVar = (
        ("scored_samples", "scored", "scored_share"),
        ("generated_tokens", "response_tokens", "generated_share"),
        ("delivered", "delivered", "realised_share"),
        ("delivered_samples", "accepted", "sample_share"),
        ("delivered_tokens", "batch_tokens", "token_share"),
    )
    """Name in checkpoints, field of DomainStats that is summed, field for the domain's share of the sum."""

    def __init__(self, domains: Iterable[str]) -> None:
        names = list(domains)
        self._sums = {total: dict.fromkeys(names, 0) for total, _, _ in self.TOTALS}

    def add(self, stats: RolloutStats) -> None:
        """Add one batch, and fill its shares with those of the run."""
        for total, number, share in self.TOTALS:
            sums = self._sums[total]
            for name, domain in stats.domains.items():
                sums[name] += getattr(domain, number)
            for name, domain in stats.domains.items():
                setattr(domain, share, sums[name] / max(1, sum(sums.values())))

    def state_dict(self) -> dict[str, dict[str, int]]:
        return {total: dict(sums) for total, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore totals; domains and counts that the state lacks start at zero."""
        for total, sums in self._sums.items():
            sums.update({name: count for name, count in state.get(total, {}).items() if name in sums})


class Progress(NamedTuple):
    """Progress of one domain in the current batch, in samples."""

    generated: int
    scored: int
    wanted: int
    """Grows when groups are replaced."""


class Recorder:
    """Collects statistics. Samples in flight keep their recorder across batches."""

    def __init__(self, domains: Iterable[str], now: float) -> None:
        self._names = list(domains)
        self.domains = {name: DomainStats() for name in self._names}
        self.start(now)

    def start(self, now: float) -> None:
        """Begin a batch."""
        self._started = self.last_completion = self.last_score = now

    def finish(self, now: float, version: int) -> RolloutStats:
        """End the batch and begin the next one; returns the statistics."""
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
        """Progress by domain. `wanted`: number of groups and of samples per group, by domain."""
        found = {}
        for name, (groups, samples) in wanted.items():
            domain = self.domains[name]
            replaced = domain.lost_groups + domain.filtered_groups
            found[name] = Progress(sum(domain.finish_reasons.values()), domain.scored, (groups + replaced) * samples)
        return found

    def group(self, group: SampleGroup) -> None:
        """Count the failures of a finished group."""
        domain = self.domains[group.domain]
        failures = [sample.failure or "unknown" for sample in group.samples if sample.outcome is SampleOutcome.FAILED]
        domain.lost_groups += loss_of(group) is not None
        domain.timed_out_groups += group.timed_out
        if group.baseline is not None and group.baseline.outcome is SampleOutcome.FAILED:
            failures.append(f"greedy baseline: {group.baseline.failure or 'unknown'}")
        domain.failed += len(failures)
        domain.failures.update(failures)

    def delivered(self, group: SampleGroup) -> None:
        """Count a group that the batch contains."""
        domain = self.domains[group.domain]
        domain.delivered += 1
        accepted = [sample for sample in group.samples if sample.outcome is SampleOutcome.ACCEPTED]
        domain.accepted += len(accepted)
        domain.batch_tokens += sum(sample.transcript.policy_tokens for sample in accepted)
        for score in (sample.score for sample in accepted):
            for term, value in (score.terms if score is not None else {}).items():
                domain.terms[term] = domain.terms.get(term, 0.0) + value


def commonest(causes: Counter[str]) -> str:
    """The commonest cause and its count, on one line of limited length."""
    cause, count = causes.most_common(1)[0]
    return f"{count} of them: {' '.join(cause.split())[:200]}"


def loss_of(group: SampleGroup) -> str | None:
    """Cause for which a group is lost, or None. A group without its baseline is lost: a missing score is not a score of 0."""
    if group.baseline is not None and group.baseline.outcome is SampleOutcome.FAILED:
        return f"greedy baseline: {group.baseline.failure or 'unknown'}"
    if all(sample.outcome is SampleOutcome.FAILED for sample in group.samples):
        return group.samples[0].failure or "unknown"
    return None
