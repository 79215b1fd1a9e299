"""The generate scheduler of one domain: prompts in, finished groups out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from roll_lite.data.prompts import PromptOrder
from roll_lite.data.samples import Prompt, Sample, SampleGroup, SampleId, Sampling
from roll_lite.scheduler.mix import MixedOrder
from roll_lite.scheduler.runner import RewardClient, SampleRunner
from roll_lite.scheduler.stats import Recorder, loss_of


class DomainFailed(RuntimeError):
    """A domain yields nothing but failures."""


class PromptSource(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Prompt: ...


@dataclass(frozen=True)
class Domain:
    """What the scheduler needs to know of a domain."""

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
    """One more, greedy sample of each prompt, which its group cannot do without."""

    @property
    def group_size(self) -> int:
        return self.samples_per_prompt + self.greedy_baseline


@dataclass
class Counts:
    """Of prompts, over the run. admitted == delivered + lost + pending at all times."""

    admitted: int = 0
    delivered: int = 0
    lost: int = 0


class DomainScheduler:
    """Runs groups of one domain. Every admitted prompt ends exactly once: taken into a batch, or reported as lost.

    `finished(group)` is called with every group that can train, `lost(domain)` for every one that has no surviving sample or lacks its
    greedy baseline.
    """

    def __init__(
        self,
        domain: Domain,
        runner: SampleRunner,
        recorder: Recorder,
        group_numbers: Callable[[], int],
        finished: Callable[[SampleGroup], None],
        lost: Callable[[str], None],
        broken: Callable[[BaseException], None],
    ) -> None:
        self.name = domain.name
        self.counts = Counts()
        self.running = 0
        """Groups in generation or scoring."""
        self.failure_limit = 8
        """Consecutive lost groups after which the domain counts as broken."""
        self._domain = domain
        self._runner = runner
        self._recorder = recorder
        self._group_numbers = group_numbers
        self._finished, self._lost, self._broken = finished, lost, broken
        self._pending: dict[int, tuple[int, int]] = {}
        self._requeued: deque[tuple[int, int]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures_in_a_row: list[str] = []

    def admit(self, groups: int) -> None:
        """Start the next prompts; those that a resumed run had in flight come first."""
        for _ in range(groups):
            epoch, index = self._requeued.popleft() if self._requeued else self._domain.order.next()
            number = self._group_numbers()
            self._pending[number] = (epoch, index)
            self.counts.admitted += 1
            self.running += 1
            task = asyncio.get_running_loop().create_task(self._run_group(number, self._start_samples(number, epoch, index)))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def delivered(self, group: SampleGroup) -> None:
        """The group went into a batch: its prompt is done."""
        del self._pending[group.group]
        self.counts.delivered += 1
        assert self.counts.admitted == self.counts.delivered + self.counts.lost + len(self._pending)

    def _start_samples(self, number: int, epoch: int, index: int) -> list[asyncio.Task[Any]]:
        prompt = self._domain.prompts[index]
        samplings = [self._domain.sampling] * self._domain.samples_per_prompt
        if self._domain.greedy_baseline:
            samplings.append(greedy(self._domain.sampling))
        return [
            self._runner.start(SampleId(self.name, prompt.uid, epoch, number, place), prompt, sampling, self._recorder)
            for place, sampling in enumerate(samplings)
        ]

    async def _run_group(self, number: int, samples: list[asyncio.Task[Any]]) -> None:
        try:
            group = self._group_of(number, await asyncio.gather(*samples))
        except Exception as error:  # not the sample's failure but the end of all (no engine left): whoever waits must hear of it
            for sample in samples:
                sample.cancel()
            self._broken(error)
            return
        self.running -= 1
        self._recorder.group(group)
        cause = loss_of(group)
        if cause is None:
            self._failures_in_a_row.clear()
            self._finished(group)
        else:
            self._lose(group, cause)

    def _group_of(self, number: int, samples: list[Sample]) -> SampleGroup:
        """The greedy sample is the last one."""
        end = self._domain.samples_per_prompt
        return SampleGroup(number, self.name, tuple(samples[:end]), samples[end] if self._domain.greedy_baseline else None)

    def _lose(self, group: SampleGroup, cause: str) -> None:
        del self._pending[group.group]
        self.counts.lost += 1
        self._failures_in_a_row.append(cause)
        if len(self._failures_in_a_row) >= self.failure_limit:
            self._broken(
                DomainFailed(
                    f"domain {self.name}: the last {len(self._failures_in_a_row)} prompts yielded no group that can train; "
                    f"first cause: {self._failures_in_a_row[0]}"
                )
            )
        else:
            self._lost(self.name)

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def state_dict(self) -> dict[str, Any]:
        """Prompts that are not delivered yet, in flight or finished, are started again by the run that goes on from this."""
        return {"order": self._domain.order.state_dict(), "unfinished": [*self._pending.values(), *self._requeued]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._domain.order.load_state_dict(state["order"])
        self._requeued = deque((epoch, index) for epoch, index in state["unfinished"])


def greedy(sampling: Sampling) -> Sampling:
    """The likeliest token at every place; lengths and stop texts stay."""
    return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, keep_mask=False)
