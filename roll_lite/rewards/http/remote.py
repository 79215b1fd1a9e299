"""Reward `remote`: a reward model's score."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import ResponseSuspected, RewardFailed
from roll_lite.rewards.http.client import Addresses, AskingReward, HttpClient, ServiceRefused, several

CORRECT = 1 - 1e-6
ONE_FOR_EACH = "must be a list with one number for each sample"


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
        score: Score = await self.of_loop(lambda: Batcher(self)).score(sample)
        return score


@dataclass
class _Waiting:
    sample: RewardInput
    answer: asyncio.Future[Score]


class Batcher:
    """Batches the samples of one event loop into requests."""

    def __init__(self, reward: RemoteReward) -> None:
        self._reward = reward
        self._client = HttpClient("remote", several(reward.url), reward)
        self._waiting: list[_Waiting] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sending: set[asyncio.Task[None]] = set()

    async def score(self, sample: RewardInput) -> Score:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(sample, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) >= self._reward.batch_size:
            self._send()
        elif self._timer is None:
            self._timer = loop.call_later(self._reward.batch_wait_ms / 1000, self._send)
        return await waiting.answer

    def _send(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [waiting for waiting in self._waiting if not waiting.answer.done()]
        self._waiting.clear()
        if batch:
            task = asyncio.get_running_loop().create_task(self._finish(batch))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _finish(self, batch: list[_Waiting], retries: int | None = None) -> None:
        batch = [waiting for waiting in batch if not waiting.answer.done()]
        if not batch:
            return
        try:
            results = await self._ask([waiting.sample for waiting in batch], retries)
        except ServiceRefused as refusal:
            if len(batch) > 1:
                middle = len(batch) // 2
                await asyncio.gather(self._finish(batch[:middle], retries=0), self._finish(batch[middle:], retries=0))
                return
            results = [refusal]
        except RewardFailed as failure:
            results = [failure] * len(batch)
        except Exception as error:  # otherwise the samples would wait forever
            results = [RewardFailed(f"reward remote: {type(error).__name__}: {error}")] * len(batch)
        for waiting, result in zip(batch, results, strict=True):
            if waiting.answer.done():
                continue
            if isinstance(result, RewardFailed):
                waiting.answer.set_exception(result)
            else:
                waiting.answer.set_result(result)

    async def _ask(self, samples: list[RewardInput], retries: int | None) -> Sequence[Score | RewardFailed]:
        """Send one request; return a score or failure for each sample."""
        request: dict[str, Any] = {
            "query": [sample.prompt + sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.answer for sample in samples],
        }
        if self._reward.columns:
            request["columns"] = {name: [sample.columns.get(name) for sample in samples] for name in self._reward.columns}
        answer, url = await self._client.post(request, retries)
        return scores_of(answer, len(samples), f"reward remote: {url}")


def scores_of(answer: Any, samples: int, place: str) -> list[Score | RewardFailed]:
    """Scores in a service's answer. ServiceRefused if it has no "rewards" ({"error": ...}); RewardFailed if its lists do not fit the
    samples."""
    if not isinstance(answer, Mapping) or "rewards" not in answer:
        keys = f"the keys {', '.join(map(str, answer)) or '(none)'}" if isinstance(answer, Mapping) else f"a {type(answer).__name__}"
        raise ServiceRefused(f'{place}: the answer must be an object with "rewards", got {keys}')
    rewards = _column(answer["rewards"], samples, f"{place}: rewards")
    scores = [None] * samples if answer.get("scores") is None else _column(answer["scores"], samples, f"{place}: scores")
    logs = answer.get("extra_logs") or {}
    if not isinstance(logs, Mapping):
        raise RewardFailed(f"{place}: extra_logs must be an object, got {logs!r:.80}")
    return [_score(index, reward, scores[index], logs, samples, place) for index, reward in enumerate(rewards)]


def _column(values: Any, samples: int, place: str) -> list[Any]:
    if not isinstance(values, list):
        raise RewardFailed(f"{place} {ONE_FOR_EACH}, got {values!r:.80}")
    if len(values) != samples:
        raise RewardFailed(f"{place} {ONE_FOR_EACH}, got {len(values)} for {samples}")
    return values


def _score(index: int, reward: Any, score: Any, logs: Mapping[str, Any], samples: int, place: str) -> Score | RewardFailed:
    for name, value in (("rewards", reward), ("scores", score)):
        if (name == "rewards" or value is not None) and not _is_finite(value):
            return ResponseSuspected(f"{place}: {name}[{index}] is {value!r:.80}, expected a finite number")
    details = {str(name): one for name, value in logs.items() if (one := _detail(value, index, samples)) is not None}
    if score is None:
        return Score(float(reward), None, details)
    return Score(float(reward), float(score) >= CORRECT, {"score": float(score), **details})


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _detail(value: Any, index: int, samples: int) -> float | str | None:
    """One sample's entry in a value of `extra_logs`; None unless it is a number or string."""
    if isinstance(value, list):
        value = value[index] if len(value) == samples else None
    if isinstance(value, str):
        return value
    return float(value) if isinstance(value, int | float) else None
