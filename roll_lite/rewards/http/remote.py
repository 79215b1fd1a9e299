from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import ResponseSuspected, RewardFailed
from roll_lite.rewards.http.client import Addresses, AskingReward, HttpClient, ServiceRefused, several

CORRECT = 1 - 1e-6
Batch = dict[asyncio.Future[Score], RewardInput]


class RemoteReward(AskingReward):
    """Score from a reward model behind HTTP, with the protocol of OpenRLHF's remote reward models.

    Request: `POST {"query": [prompt + response, ...], "prompts": [prompt, ...], "labels": [answer, ...]}`, and `"columns": {name: [...]}`
    for `columns`. Answer: `{"rewards": [number, ...]}`, and optionally `"scores"` (0 to 1 each; 1 is correct) and `"extra_logs"` (by name,
    a number or string per sample, or one for all; kept in the samples' details).

    Requests go to the URL with the fewest in flight; a failed URL is skipped for a while. If the service refuses a batch, or answers
    without rewards, the batch is halved until the sample at fault is alone. That sample scores 0 if the service can score a harmless
    response.

    ```yaml
    reward:
      name: remote
      args:
        url: [http://node1:5000/get_reward, http://node2:5000/get_reward]
        batch_size: 16
      timeout_s: 60
    ```
    """

    url: Addresses
    """URL of the service, or several."""
    batch_size: PositiveInt = 32
    """Samples per request."""
    batch_wait_ms: NonNegativeFloat = 5.0
    """Maximum milliseconds that a sample waits for others to share its request."""
    columns: tuple[str, ...] = ()
    """Data columns to send; the prompt's column holds the question without the chat template."""
    concurrency: PositiveInt = 16
    """Concurrent requests per worker."""

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"columns": self.columns}

    async def __call__(self, sample: RewardInput) -> Score:
        return await self._batcher.score(sample)

    @cached_property
    def _batcher(self) -> Batcher:
        return Batcher(self)


class Batcher:
    def __init__(self, reward: RemoteReward) -> None:
        self._reward = reward
        self._client = HttpClient("remote", several(reward.url), reward)
        self._waiting: Batch = {}
        self._timer: asyncio.TimerHandle
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, sample: RewardInput) -> Score:
        loop = asyncio.get_running_loop()
        if not self._waiting:
            self._timer = loop.call_later(self._reward.batch_wait_ms / 1000, self._send)
        answer: asyncio.Future[Score] = loop.create_future()
        self._waiting[answer] = sample
        if len(self._waiting) == self._reward.batch_size:
            self._timer.cancel()
            self._send()
        return await answer

    def _send(self) -> None:
        batch, self._waiting = self._waiting, {}
        task = asyncio.get_running_loop().create_task(self._score(batch))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _score(self, batch: Batch, retries: int | None = None) -> None:
        batch = {waiting: sample for waiting, sample in batch.items() if not waiting.done()}
        samples, results = list(batch.values()), list[Score | RewardFailed]()
        try:
            if samples:
                request: dict[str, Any] = {
                    "query": [sample.prompt + sample.response for sample in samples],
                    "prompts": [sample.prompt for sample in samples],
                    "labels": [sample.answer for sample in samples],
                }
                if self._reward.columns:
                    request["columns"] = {name: [sample.columns.get(name) for sample in samples] for name in self._reward.columns}
                answer, url = await self._client.post(request, retries)
                results = _scores(answer, len(samples), f"reward remote: {url}")
        except ServiceRefused as refusal:
            if len(batch) > 1:
                parts, middle = list(batch.items()), len(batch) // 2
                await asyncio.gather(self._score(dict(parts[:middle]), retries=0), self._score(dict(parts[middle:]), retries=0))
                return
            results = [refusal]
        except Exception as error:  # otherwise the samples would wait forever
            failure = error if isinstance(error, RewardFailed) else RewardFailed(f"reward remote: {type(error).__name__}: {error}")
            results = [failure] * len(batch)
        for waiting, result in zip(batch, results, strict=True):
            if not waiting.done():
                waiting.set_exception(result) if isinstance(result, RewardFailed) else waiting.set_result(result)


def _scores(answer: Any, samples: int, place: str) -> list[Score | RewardFailed]:
    if not isinstance(answer, Mapping) or "rewards" not in answer:
        keys = f"the keys {', '.join(map(str, answer)) or '(none)'}" if isinstance(answer, Mapping) else f"a {type(answer).__name__}"
        raise ServiceRefused(f'{place}: the answer must be an object with "rewards", got {keys}')
    rewards, scores, logs = answer["rewards"], answer.get("scores"), answer.get("extra_logs") or {}
    scores = [None] * samples if scores is None else scores
    for name, values in (("rewards", rewards), ("scores", scores)):
        if not isinstance(values, list) or len(values) != samples:
            got = f"{len(values)} for {samples}" if isinstance(values, list) else f"{values!r:.80}"
            raise RewardFailed(f"{place}: {name} must be a list with one number for each sample, got {got}")
    if not isinstance(logs, Mapping):
        raise RewardFailed(f"{place}: extra_logs must be an object, got {logs!r:.80}")
    rows = [
        {name: one[row] if isinstance(one, list) and len(one) == samples else one for name, one in logs.items()} for row in range(samples)
    ]
    return [_scored(*one, place) for one in zip(range(samples), rewards, scores, rows, strict=True)]


def _scored(row: int, reward: Any, score: Any, logs: Mapping[str, Any], place: str) -> Score | RewardFailed:
    for name, value in (("rewards", reward), ("scores", 0 if score is None else score)):
        if not (isinstance(value, int | float) and math.isfinite(value)):
            return ResponseSuspected(f"{place}: {name}[{row}] is {value!r:.80}, expected a finite number")
    details: dict[str, float | str] = {
        str(name): value if isinstance(value, str) else float(value)
        for name, value in {"score": score, **logs}.items()
        if isinstance(value, str | int | float)
    }
    return Score(float(reward), None if score is None else float(score) >= CORRECT, details)
