"""Scheduler of one domain: starts prompts, hands out finished groups (all samples of a prompt)."""

from __future__ import annotations

import asyncio
from collections import ChainMap, Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from roll_lite.data.prompts import PromptOrder
from roll_lite.data.samples import Prompt, Sample, SampleGroup, SampleId, SampleOutcome, Sampling
from roll_lite.scheduler.filters import GroupFilter, LeftOut
from roll_lite.scheduler.ledger import DELIVERED, DROPPED, FAILED, FILTERED, STALE, group_line
from roll_lite.scheduler.mix import MixedOrder
from roll_lite.scheduler.runner import Episode, RewardClient, SampleRunner, one_response
from roll_lite.scheduler.stats import SURPLUS, UNFINISHED, Recorder, commonest, loss_of
from roll_lite.scheduler.unfinished import SavedGroups, SavedSample, Unfinished

LEAST_LOSSES = 8
"""Consecutive lost groups (all samples or baseline failed) that end the run; or 3 times a batch's groups, if larger."""
LONG_WINDOW_FACTOR = 4
MAX_LOST_FRACTION = 7 / 8
"""Fraction of lost groups that ends the run, among LONG_WINDOW_FACTOR times the groups that LEAST_LOSSES counts."""


class DomainFailed(RuntimeError):
    """Error: too many groups of a domain were lost or filtered."""


class DataExhausted(RuntimeError):
    """Error: no domain has prompts left."""


class PromptSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


@dataclass(frozen=True)
class Domain:
    name: str
    prompts: PromptSource
    order: PromptOrder | MixedOrder
    sampling: Sampling
    samples_per_prompt: int
    share: float
    rewards: RewardClient
    reward_retries: int = 1
    validation: PromptSource | None = None
    greedy_baseline: bool = False
    """Add one greedy sample per prompt, for ReMax; if it fails, the group is lost."""
    filter: GroupFilter | None = None
    epochs: int | None = None
    least: int = 0
    episode: Episode = one_response

    @property
    def group_size(self) -> int:
        return self.samples_per_prompt + self.greedy_baseline


@dataclass(frozen=True)
class _PromptToStart:
    row: tuple[int, int]
    group: int | None = None
    """The prompt's group in the resumed checkpoint."""
    batches_requested: int | None = None
    """Batches requested at the admission of `group`."""
    saved: Mapping[int, SavedSample] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class _Live:
    number: int
    prompt: _PromptToStart
    batches_requested: int
    """Batches requested at the group's admission; its staleness counts from here."""
    tasks: list[asyncio.Task[Sample]] = field(default_factory=list)
    samples: asyncio.Future[list[Sample]] | None = None
    group: SampleGroup | None = None

    @property
    def row(self) -> tuple[int, int]:
        return self.prompt.row


def _age(live: _Live) -> tuple[int, int]:
    # A resumed group without saved samples is newer than its number says.
    return live.batches_requested, live.number


class DomainScheduler:
    """Runs one domain's groups. Calls `changed` when a group ends, `broken` on a fatal error, `left_out` for a lost or filtered group."""

    def __init__(
        self,
        domain: Domain,
        runner: SampleRunner,
        recorder: Recorder,
        group_numbers: Callable[[], int],
        changed: Callable[[], None],
        broken: Callable[[BaseException], None],
        left_out: Callable[[SampleGroup], None] = lambda group: None,
    ) -> None:
        self.name = domain.name
        self.owed = 0
        """Replacements to start for lost, filtered or stale groups."""
        self._domain = domain
        self._runner = runner
        self._recorder = recorder
        self._group_numbers = group_numbers
        self._changed, self._broken, self._on_left_out = changed, broken, left_out
        self._running: OrderedDict[int, _Live] = OrderedDict()
        self._finished: dict[int, _Live] = {}
        self._taken: dict[int, _Live] = {}
        self._delivered: dict[int, _Live] = {}
        """Groups of the last batch, whose step may be undone until the next is requested."""
        self._put_back: deque[_PromptToStart] = deque()
        self._digests: dict[int, int] = {}
        """{row number: digest} of undelivered groups, in the last state."""
        self._taken_up: dict[int, int] = {}
        """{group number in the resumed checkpoint: number of the group that continues it}."""
        self._ledger: list[dict[str, Any]] = []
        self._failure_limit = LEAST_LOSSES
        self._ends: deque[str | None] = deque(maxlen=LONG_WINDOW_FACTOR * LEAST_LOSSES)
        """Loss cause of each recent group, None if not lost; without stale groups."""
        self._given_up = 0
        """Filtered groups not replaced, since the batch's tries were used up (`when_short: continue`)."""
        self._tries_left = 0
        self._waits_for: int | None = None
        """Running group that the current batch waits for: it is too old for the next."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def epoch(self) -> int:
        return self._domain.order.epoch

    @property
    def finished(self) -> int:
        return len(self._finished)

    @property
    def waiting_for_scores(self) -> float:
        """Unscored samples minus the reward workers' capacity; negative if workers have room."""
        return self._runner.scoring - self._domain.rewards.capacity

    @property
    def _further_tries(self) -> int:
        return self._domain.filter.tries - 1 if self._domain.filter is not None else 0

    @property
    def exhausted(self) -> bool:
        return self._domain.epochs is not None and not self._put_back and self._domain.order.next_epoch >= self._domain.epochs

    def start_batch(self, count: int) -> None:
        self._failure_limit = max(LEAST_LOSSES, 3 * count)
        self._ends = deque(self._ends, maxlen=LONG_WINDOW_FACTOR * self._failure_limit)
        self._tries_left = (self.running + self.owed) * self._further_tries
        self._waits_for = None
        self._delivered = {}

    # ------------------------------------------------------------ admission

    def admit(self, batches_requested: int, replaces: bool = False) -> bool:
        """Start the next prompt; False if none is left. `replaces`: one of `owed`."""
        if replaces:
            self.owed -= 1
        else:
            self._tries_left += self._further_tries
        if self.exhausted:
            return False
        prompt = self._put_back.popleft() if self._put_back else _PromptToStart(self._domain.order.next())
        if prompt.saved and prompt.batches_requested is not None:
            batches_requested = prompt.batches_requested
        epoch, index = prompt.row
        row = self._domain.prompts[index]
        live = _Live(self._group_numbers(), prompt, batches_requested)
        self._running[live.number] = live
        self._recorder.domains[self.name].admitted += 1
        if prompt.group is not None:
            self._taken_up[prompt.group] = live.number
        samplings = [self._domain.sampling] * self._domain.samples_per_prompt
        if self._domain.greedy_baseline:
            samplings.append(greedy(self._domain.sampling))
        live.tasks = [
            self._runner.start(SampleId(self.name, row.uid, epoch, live.number, place), row, sampling, prompt.saved.get(place))
            for place, sampling in enumerate(samplings)
        ]
        live.samples = asyncio.gather(*live.tasks)
        live.samples.add_done_callback(partial(self._samples_done, live))
        return True

    def _samples_done(self, live: _Live, samples: asyncio.Future[list[Sample]]) -> None:
        if is_cancelled(samples) or live.number not in self._running:
            return
        try:
            sampled, end = samples.result(), self._domain.samples_per_prompt
            baseline = sampled[end] if self._domain.greedy_baseline else None
            self._judge(live, SampleGroup(live.number, self.name, tuple(sampled[:end]), baseline))
        except Exception as error:  # a failure of the run, not of a sample: no engine is left, or a filter raised
            for task in live.tasks:
                task.cancel()
            self._broken(error)
            return
        self._changed()

    # ------------------------------------------------------------ the ends of a group

    def _judge(self, live: _Live, group: SampleGroup) -> None:
        self._recorder.group(group)
        lost = loss_of(group)
        chosen = self._domain.filter
        filtered = chosen.cause(group) if lost is None and chosen is not None else None
        del self._running[live.number]
        if lost is not None:
            self._enter(live, FAILED, lost, group)
            self._on_left_out(ended(group, SampleOutcome.FAILED, lost))
            self._lose(lost)
        elif chosen is not None and filtered is not None:
            self._enter(live, FILTERED, filtered.text, group)
            self._on_left_out(ended(group, SampleOutcome.FILTERED, filtered.text))
            self._filter_out(chosen, filtered)
        else:
            self._ends.append(None)
            live.group = group
            self._finished[live.number] = live

    def _lose(self, cause: str) -> None:
        self.owed += 1
        self._ends.append(cause)
        for last, most in ((self._failure_limit, 1.0), (LONG_WINDOW_FACTOR * self._failure_limit, MAX_LOST_FRACTION)):
            causes = Counter(end for end in list(self._ends)[-last:] if end is not None)
            if len(self._ends) >= last and causes.total() >= most * last:
                why = f"of the last {last} prompts {causes.total()} yielded no group that can train, {commonest(causes)}"
                raise DomainFailed(f"domain {self.name}: {why}")

    def _filter_out(self, chosen: GroupFilter, cause: LeftOut) -> None:
        self._ends.append(None)
        self._recorder.domains[self.name].filtered[cause.word] += 1
        if self._tries_left > 0:
            self._tries_left -= 1
            self.owed += 1
        elif not chosen.fill:
            self._given_up += 1
        else:
            raise DomainFailed(
                f"domain {self.name}: {chosen.tries} prompts for each place of the batch were tried, and too many groups filtered "
                f"(the last one: {cause.text}); rollout.filter.tries allows more, "
                "rollout.filter.when_short: continue trains on what there is"
            )

    def take(self, count: int, minimum_admission_batch: int) -> list[SampleGroup] | None:
        """Return `count` groups for the current batch, oldest first; None if not ready.

        The batch waits for running groups admitted before `minimum_admission_batch`: they would be too old for the next, and
        dropping slow groups would favour short responses.
        """
        if self._waits_for is not None and self._waits_for in self._running:
            return None
        if len(self._finished) < count and (self._running or self.owed):
            return None
        oldest = min(self._running.values(), key=_age, default=None)
        finished = sorted(self._finished.values(), key=_age)
        if oldest and oldest.batches_requested < minimum_admission_batch and sum(_age(one) < _age(oldest) for one in finished) < count:
            self._waits_for = oldest.number
            return None
        groups = []
        for live in finished[:count]:
            assert live.group is not None
            self._taken[live.number] = self._finished.pop(live.number)
            groups.append(live.group)
            self._enter(live, DELIVERED, None, live.group)
        # Groups of later batches took some of the empty places; their own places need replacements.
        self.owed += max(0, self._given_up - (count - len(groups)))
        self._given_up = 0
        return groups

    def certain(self, count: int) -> list[SampleGroup]:
        return [live.group for live in sorted(self._groups, key=_age)[:count] if live.group is not None]

    def drop_stale(self, batches_requested: int, max_staleness: int) -> None:
        """End groups and drop saved samples too old for the next batch (counted in `batches_requested`); put the groups' prompts first in
        the queue."""
        oldest = batches_requested - max_staleness
        for place, waiting in enumerate(self._put_back):
            if waiting.batches_requested is not None and waiting.batches_requested < oldest:
                self._put_back[place] = replace(waiting, saved={})
        stale = [live for live in self._groups if live.batches_requested < oldest]
        for live in sorted(stale, key=lambda live: live.number, reverse=True):
            if live.group is not None:  # a finished group's tries are used up: its replacement gets new ones
                del self._finished[live.number]
                self._tries_left += self._further_tries
            else:
                del self._running[live.number]
                if live.samples is not None:
                    live.samples.cancel()
            self._put_back.appendleft(_PromptToStart(live.row))
            self.owed += 1
            cause = UNFINISHED if live.group is None else SURPLUS
            self._recorder.domains[self.name].stale_by_cause[cause] += 1
            self._enter(live, STALE, cause, live.group)

    def cancel(self) -> None:
        for live in self._running.values():
            if live.samples is not None:
                live.samples.cancel()

    # ------------------------------------------------------------ the ledger

    def _enter(self, live: _Live, end: str, cause: str | None = None, group: SampleGroup | None = None) -> None:
        self._ledger.append(self._line(live, end, cause, group))

    def _line(self, live: _Live, end: str, cause: str | None = None, group: SampleGroup | None = None) -> dict[str, Any]:
        return group_line(live.number, self.name, live.row, live.batches_requested, end, cause, group, live.prompt.group)

    @property
    def live(self) -> list[int]:
        return [live.number for live in self._groups]

    @property
    def _groups(self) -> list[_Live]:
        return [*self._running.values(), *self._finished.values()]

    def take_ledger(self) -> list[dict[str, Any]]:
        """Close the batch being handed out: remember its groups, return the ledger lines since the last."""
        self._delivered, self._taken = self._taken, {}
        lines, self._ledger = self._ledger, []
        return lines

    def ledger_if_dropped(self, cause: str, undo: bool) -> list[dict[str, Any]]:
        lost = [line for line in self._ledger if line["end"] != DELIVERED]
        return [*lost, *(self._line(one, DROPPED, cause) for one in self._undelivered(undo))]

    def _undelivered(self, undo: bool) -> list[_Live]:
        return [*self._groups, *self._taken.values(), *(self._delivered.values() if undo else ())]

    # ------------------------------------------------------------ checkpoints

    def state_dict(self, undo: bool) -> dict[str, Any]:
        undelivered = sorted(self._undelivered(undo), key=lambda live: live.number)
        live = [(one.row, one.number, one.batches_requested) for one in undelivered]
        groups = [*live, *((one.row, one.group, one.batches_requested) for one in self._put_back)]
        indices = {row[1] for row, *_ in groups}
        self._digests = {index: self._digests.get(index) or self._domain.prompts[index].digest for index in indices}
        unfinished = [{"row": row, "group": group, "asked": asked, "digest": self._digests[row[1]]} for row, group, asked in groups]
        return {"order": self._domain.order.state_dict(), "unfinished": unfinished}

    def load_state_dict(self, state: dict[str, Any], saved: SavedGroups, minimum_admission_batch: int) -> list[int]:
        """Restore the state and queue undelivered groups. Groups admitted at `minimum_admission_batch` or later, with unchanged
        rows, continue from `saved` samples, others from the prompt. Return those with changed rows."""
        self._domain.order.load_state_dict(state["order"])
        self._put_back.clear()
        changed = []
        for one in state["unfinished"]:
            samples = saved.get(one["group"], {}) if one["asked"] is not None and one["asked"] >= minimum_admission_batch else {}
            (epoch, index), digest = one["row"], one.get("digest")
            if samples and digest not in (None, self._domain.prompts[index].digest):
                changed.append(one["group"])
                samples = {}
            self._put_back.append(_PromptToStart((epoch, index), one["group"], one["asked"], samples))
        return changed

    def reached(self, number: int) -> dict[int, Unfinished]:
        """Return {index in the group: state} of undelivered group `number`, for a checkpoint."""
        groups = ChainMap(self._running, self._finished, self._taken, self._delivered)
        live = groups.get(self._taken_up.get(number, number))
        if live is None:
            waiting = [one.saved for one in self._put_back if one.group == number]
            return {index: Unfinished(sample) for saved in waiting for index, sample in saved.items()}
        if live.group is not None:
            samples = (*live.group.samples, live.group.baseline)
            return {one.id.index: Unfinished(SavedSample.of(one)) for one in samples if one is not None}
        found: dict[int, Unfinished | None] = {}
        for index, task in enumerate(live.tasks):
            if not task.done():
                found[index] = self._runner.reached(live.number, index)
            elif not task.cancelled() and task.exception() is None:
                found[index] = Unfinished(SavedSample.of(task.result()))
        return {index: one for index, one in found.items() if one is not None}


def is_cancelled(samples: asyncio.Future[list[Sample]]) -> bool:
    return samples.cancelled() or isinstance(samples.exception(), asyncio.CancelledError)


def ended(group: SampleGroup, outcome: SampleOutcome, cause: str) -> SampleGroup:
    """Mark accepted samples, not the greedy baseline, with `outcome` and failure `cause`."""
    samples = [replace(one, outcome=outcome, failure=cause) if one.outcome is SampleOutcome.ACCEPTED else one for one in group.samples]
    return replace(group, samples=tuple(samples))


def greedy(sampling: Sampling) -> Sampling:
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, keep_mask=False)
