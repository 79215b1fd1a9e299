from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, NamedTuple, get_origin, get_type_hints

from roll_lite.data.samples import SampleGroup, SampleOutcome

UNFINISHED, SURPLUS = "unfinished", "surplus"
"""Causes of staleness: the group was unfinished, or no batch had a place for it."""


@dataclass
class DomainStats:
    """Statistics of one domain in one batch. Annotations: the metric's name and, for a mean, the field to divide by."""

    requested: Annotated[int, "rollout/requested"] = 0
    delivered: Annotated[int, "rollout/groups"] = 0
    admitted: Annotated[int, "rollout/admitted"] = 0
    filtered: Annotated[Counter[str], "rollout/filtered_groups"] = field(default_factory=Counter)
    """Groups by cause: LOW, HIGH, FUNCTION (filters.py)."""
    stale_by_cause: Annotated[Counter[str], "rollout/stale_groups"] = field(default_factory=Counter)
    behind_s: Annotated[float, "rollout/rewards_behind_seconds"] = 0.0
    lost_groups: Annotated[int, "rollout/lost_groups"] = 0
    """Groups of which all samples, or the greedy baseline, failed."""
    timed_out_groups: Annotated[int, "rollout/timed_out_groups"] = 0
    scored: Annotated[int, "rollout/scored_samples"] = 0
    accepted: Annotated[int, "rollout/samples"] = 0
    failed: Annotated[int, "rollout/failed"] = 0
    retries: Annotated[Counter[str], "rollout/retries"] = field(default_factory=Counter)
    prompt_tokens: Annotated[int, "rollout/prompt_tokens"] = 0
    cached_tokens: Annotated[int, "rollout/cached_tokens"] = 0
    drafted: Annotated[int, "rollout/drafted_tokens"] = 0
    accepted_drafts: Annotated[int, "rollout/draft_acceptance", "drafted"] = 0
    response_tokens: Annotated[int, "rollout/response_tokens"] = 0
    batch_tokens: Annotated[int, "rollout/batch_tokens"] = 0
    generation_s: Annotated[float, "rollout/request_seconds", "requests"] = 0.0
    requested_share: Annotated[float, "rollout/share_requested"] = 0.0
    generated_share: Annotated[float, "rollout/share_generated"] = 0.0
    realised_share: Annotated[float, "rollout/share_realised"] = 0.0
    token_share: Annotated[float, "rollout/share_tokens"] = 0.0
    epoch: Annotated[int, "rollout/epoch"] = 0
    reward_s: Annotated[float, "reward/seconds", "scored"] = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    terms: dict[str, float] = field(default_factory=dict)
    episodes: int = 0
    """Accepted samples generated in an environment."""
    of_episodes: dict[str, float] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return self.finish_reasons.total()

    def metrics(self) -> Iterator[tuple[str, float, float]]:
        """Yield (metric name, sum, divisor); the divisor is 1 except for means."""
        for name, hint in get_type_hints(DomainStats, include_extras=True).items():
            if get_origin(hint) is Annotated:
                value, (row, *counted) = getattr(self, name), hint.__metadata__
                yield row, value.total() if isinstance(value, Counter) else value, getattr(self, counted[0]) if counted else 1.0
        for cause in (UNFINISHED, SURPLUS):
            yield f"rollout/stale_{cause}", self.stale_by_cause[cause], 1.0


@dataclass
class RolloutStats:
    domains: dict[str, DomainStats]
    version: int = 0
    """Weight version when the batch was complete."""
    wall_s: float = 0.0
    generation_s: float = 0.0
    """Time from the start of the batch to the last response."""
    reward_tail_s: float = 0.0
    """Time from the last response to the last score."""

    @property
    def response_tokens(self) -> int:
        return sum(domain.response_tokens for domain in self.domains.values())


class RunTotals:
    TOTALS: ClassVar = (
        ("generated_tokens", "response_tokens", "generated_share"),
        ("delivered", "delivered", "realised_share"),
        ("delivered_tokens", "batch_tokens", "token_share"),
    )
    """Rows of (name in checkpoints, DomainStats field to sum over the run, field for the domain's share of the sum)."""

    def __init__(self, domains: Iterable[str]) -> None:
        names = list(domains)
        self._sums = {total: dict.fromkeys(names, 0) for total, _, _ in self.TOTALS}

    def add(self, stats: RolloutStats) -> None:
        for total, number, share in self.TOTALS:
            sums = self._sums[total]
            for name, domain in stats.domains.items():
                sums[name] += getattr(domain, number)
            for name, domain in stats.domains.items():
                setattr(domain, share, sums[name] / max(1, sum(sums.values())))

    def state_dict(self) -> dict[str, dict[str, int]]:
        return {total: dict(sums) for total, sums in self._sums.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for total, sums in self._sums.items():
            sums.update({name: count for name, count in state[total].items() if name in sums})


class Progress(NamedTuple):
    generated: int
    scored: int
    wanted: int
    """Samples needed; grows when groups are replaced."""


class Recorder:
    """Collects statistics per batch. Events count for the batch generated at the time: a slow sample may count in several."""

    def __init__(self, domains: Iterable[str], now: float) -> None:
        self._names = list(domains)
        self.domains = {name: DomainStats() for name in self._names}
        self.start(now)

    def start(self, now: float) -> None:
        self._started = self.last_completion = self.last_score = now

    def finish(self, now: float, version: int) -> RolloutStats:
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
        found = {}
        for name, (groups, samples) in wanted.items():
            domain = self.domains[name]
            replaced = domain.lost_groups + domain.filtered.total()
            found[name] = Progress(domain.requests, domain.scored, (groups + replaced) * samples)
        return found

    def group(self, group: SampleGroup) -> None:
        domain = self.domains[group.domain]
        failures = [sample.failure or "unknown" for sample in group.samples if sample.outcome is SampleOutcome.FAILED]
        domain.lost_groups += loss_of(group) is not None
        domain.timed_out_groups += group.timed_out
        if group.baseline is not None and group.baseline.outcome is SampleOutcome.FAILED:
            failures.append(f"greedy baseline: {group.baseline.failure or 'unknown'}")
        domain.failed += len(failures)
        domain.failures.update(failures)

    def delivered(self, group: SampleGroup) -> None:
        domain = self.domains[group.domain]
        domain.delivered += 1
        accepted = [sample for sample in group.samples if sample.outcome is SampleOutcome.ACCEPTED]
        domain.accepted += len(accepted)
        domain.batch_tokens += sum(row.policy_tokens for sample in accepted for row in sample.transcript.rows)
        for score in (sample.score for sample in accepted):
            for term, value in (score.terms if score is not None else {}).items():
                domain.terms[term] = domain.terms.get(term, 0.0) + value
        for episode in (sample.transcript.episode for sample in accepted):
            domain.episodes += episode is not None
            for name, number in (episode.metrics if episode is not None else {}).items():
                domain.of_episodes[name] = domain.of_episodes.get(name, 0.0) + number


def commonest(causes: Counter[str]) -> str:
    cause, count = causes.most_common(1)[0]
    return f"{count} of them: {' '.join(cause.split())[:200]}"


def loss_of(group: SampleGroup) -> str | None:
    """Return why a group is lost (all samples, or the greedy baseline, failed), if so."""
    if group.baseline is not None and group.baseline.outcome is SampleOutcome.FAILED:
        return f"greedy baseline: {group.baseline.failure or 'unknown'}"
    if all(sample.outcome is SampleOutcome.FAILED for sample in group.samples):
        return group.samples[0].failure or "unknown"
    return None
