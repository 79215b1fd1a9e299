from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from roll_lite.data.samples import Sample, SampleGroup, SampleId, Sampling
from roll_lite.scheduler.domain import Domain, DomainFailed, is_cancelled
from roll_lite.scheduler.runner import SampleRunner
from roll_lite.scheduler.stats import Progress, Recorder, loss_of

VALIDATION_EPOCH = -1


class Validation:
    def __init__(
        self,
        domains: Sequence[Domain],
        runners: Mapping[str, SampleRunner],
        samples: int,
        sampling: Mapping[str, Sampling],
        recorder: Recorder,
        ended: Callable[[], None],
        first_group: int = 0,
    ) -> None:
        """`ended()` is called when a group ends. `samples`: per prompt. `first_group`: first group number, unique over validations."""
        self._domains = {domain.name: domain for domain in domains if domain.validation is not None}
        self._runners = runners
        self._samples = samples
        self._sampling = sampling
        self._recorder = recorder
        self._ended = ended
        self._wanted = {name: len(domain.validation or ()) for name, domain in self._domains.items()}
        prompts = ((name, index) for name, count in self._wanted.items() for index in range(count))
        self._left = deque(enumerate(prompts, first_group))
        self._groups: dict[int, SampleGroup] = {}
        self._total = len(self._left)
        self._running: set[asyncio.Future[list[Sample]]] = set()
        self._unfinished = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, most: float) -> None:
        """Start prompts until `most` samples run or wait for a reward worker; at least one if no sample is unfinished."""
        while self._left and (not self._unfinished or self._with_engines + self._samples <= most):
            number, (name, index) = self._left.popleft()
            domain = self._domains[name]
            assert domain.validation is not None
            prompt = domain.validation[index]
            ids = [SampleId(name, prompt.uid, VALIDATION_EPOCH, number, place) for place in range(self._samples)]
            samples = [self._runners[name].start(one, prompt, self._sampling[name]) for one in ids]
            self._unfinished += len(samples)
            for sample in samples:
                sample.add_done_callback(self._sample_over)
            group = asyncio.gather(*samples)
            self._running.add(group)
            group.add_done_callback(partial(self._samples_done, number, name, samples))

    @property
    def longest(self) -> dict[str, int]:
        return {name: self._sampling[name].max_tokens for name in self._domains}

    @property
    def _with_engines(self) -> float:
        scored_now = (min(self._runners[name].scoring, domain.rewards.capacity) for name, domain in self._domains.items())
        return self._unfinished - sum(scored_now)

    def _sample_over(self, _: object) -> None:
        self._unfinished -= 1

    def _samples_done(self, number: int, name: str, tasks: Sequence[asyncio.Task[Sample]], samples: asyncio.Future[list[Sample]]) -> None:
        self._running.discard(samples)
        if is_cancelled(samples):
            return
        error = samples.exception()
        if error is not None:  # a failure of the run, not of a sample: no engine is left
            for task in tasks:
                task.cancel()
            self.break_off(error)
            return
        group = SampleGroup(number, name, tuple(samples.result()))
        self._recorder.group(group)
        if loss_of(group) is None:
            self._recorder.delivered(group)
        self._groups[number] = group
        if len(self._groups) == self._total and not self._over.done():
            self._over.set_result(None)
        self._ended()

    def break_off(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def groups(self) -> list[SampleGroup]:
        """Return all groups in order. DomainFailed if a domain has no accepted sample."""
        try:
            if self._total:
                await self._over
        finally:
            self._left.clear()
            for samples in [*self._running]:
                samples.cancel()
        for name, stats in self._recorder.domains.items():
            if stats.lost_groups and not stats.delivered:
                raise DomainFailed(f"domain {name}: every sample of the validation failed; first cause: {next(iter(stats.failures))}")
        return [group for _, group in sorted(self._groups.items())]

    def progress(self) -> dict[str, Progress]:
        return self._recorder.progress({name: (count, self._samples) for name, count in self._wanted.items()})
