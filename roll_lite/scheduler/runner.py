"""One sample from its request to its score, with everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

from roll_lite.data.samples import Completion, GenerationRequest, Outcome, Prompt, RewardInput, Sample, SampleId, Sampling, Score
from roll_lite.data.stable_hash import stable_hash
from roll_lite.rewards.base import RewardFailed
from roll_lite.scheduler.clients import RequestFailed, RewardClient
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.stats import Recorder

Seeds = Callable[[SampleId], int | None]


def seeds_from(run_seed: int) -> Seeds:
    """A seed for each attempt at each sample. The group's number is left out: a replaced or repeated prompt keeps its samples."""

    def seed(sample: SampleId) -> int:
        return stable_hash(run_seed, sample.domain, sample.prompt_uid, sample.epoch, sample.index, sample.attempt)

    return seed


def no_seeds(_: SampleId) -> None:
    """The engine draws as it likes."""


@dataclass(frozen=True)
class Retries:
    """How often each half of a sample's way is repeated."""

    generation: int
    reward: int


class SampleRunner:
    """Generates and scores samples of one domain. A sample that runs out of retries comes back as failed, with the cause."""

    def __init__(self, domain: str, router: Router, rewards: RewardClient, retries: Retries, seeds: Seeds) -> None:
        self._domain = domain
        self._router = router
        self._rewards = rewards
        self._retries = retries
        self._seeds = seeds

    def start(self, sample_id: SampleId, prompt: Prompt, sampling: Sampling, recorder: Recorder) -> asyncio.Task[Sample]:
        task = asyncio.get_running_loop().create_task(self._run(sample_id, prompt, sampling, recorder))
        gate = self._router.gate
        if gate is not None:
            gate.join()
            task.add_done_callback(lambda _: gate.leave())
        return task

    async def _run(self, first: SampleId, prompt: Prompt, sampling: Sampling, recorder: Recorder) -> Sample:
        cause = ""
        for attempt in range(self._retries.generation + 1):
            sample_id = replace(first, attempt=attempt) if attempt else first
            if attempt:
                recorder.domains[self._domain].retries[cause] += 1
            try:
                completion = await self._generate(sample_id, prompt, sampling, recorder)
            except RequestFailed as failure:
                cause = f"generation: {failure.cause}"
                continue
            return await self._score(sample_id, prompt, completion, recorder)
        return Sample(sample_id, prompt, Completion(sample_id.request_id()), Outcome.FAILED, failure=cause)

    async def _generate(self, sample_id: SampleId, prompt: Prompt, sampling: Sampling, recorder: Recorder) -> Completion:
        seed = self._seeds(sample_id)
        if seed is not None:
            sampling = replace(sampling, seed=seed)
        clock = asyncio.get_running_loop().time
        sent = clock()
        completion = await self._router.generate(self._domain, GenerationRequest(sample_id.request_id(), prompt.token_ids, sampling))
        recorder.last_completion = clock()
        stats = recorder.domains[self._domain]
        stats.generation_s += recorder.last_completion - sent
        stats.prompt_tokens += len(prompt.token_ids)
        stats.cached_tokens += completion.cached_tokens
        stats.response_tokens += len(completion.token_ids)
        stats.finish_reasons[str(completion.finish_reason)] += 1
        return completion

    async def _score(self, sample_id: SampleId, prompt: Prompt, completion: Completion, recorder: Recorder) -> Sample:
        item = RewardInput.of(prompt, completion.text, str(completion.finish_reason))
        clock = asyncio.get_running_loop().time
        cause = ""
        for attempt in range(self._retries.reward + 1):
            if attempt:
                recorder.domains[self._domain].retries[cause] += 1
            asked = clock()
            try:
                score: Score = await self._rewards.score(item)
            except RewardFailed as failure:
                cause = failure.cause
                continue
            recorder.last_score = clock()
            recorder.domains[self._domain].reward_s += recorder.last_score - asked
            recorder.domains[self._domain].scored += 1
            return Sample(sample_id, prompt, completion, Outcome.ACCEPTED, score=score)
        return Sample(sample_id, prompt, completion, Outcome.FAILED, failure=cause)
