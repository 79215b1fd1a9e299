from __future__ import annotations

import asyncio
from functools import cached_property
from itertools import chain
from typing import Annotated, Any

from pydantic import BaseModel, FiniteFloat, PositiveInt, Strict, StrictBool, ValidationError

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.http.client import Addresses, AskingReward, HttpClient, ServiceRefused, several

CORRECT = 1 - 1e-6


class RemoteReward(AskingReward):
    """Score from a reward model behind HTTP, with the protocol of OpenRLHF's remote reward models.

    Request: `POST {"query": [prompt + response, ...], "prompts": [prompt, ...], "labels": [answer, ...]}`, and `"columns": {name: [...]}`
    for `columns`. Answer: `{"rewards": [number, ...]}`, and optionally `"scores"` (0 to 1 each; 1 is correct) and `"extra_logs"` (by name,
    a number or string per sample, or one for all; kept in the samples' details).

    Requests go to the URL with the fewest in flight; a failed URL is skipped for a while. If the service refuses a batch, or its
    answer does not fit, the batch is halved until the sample at fault is alone. That sample scores `refused` if the service can score a
    harmless response.

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
    columns: tuple[str, ...] = ()
    """Data columns to send; the prompt's column holds the question without the chat template."""
    concurrency: PositiveInt = 16
    """Concurrent requests per worker."""

    refused: FiniteFloat = 0.0
    """Score of a refused response; below usual rewards, or the policy learns to be refused."""

    def lowest(self) -> float:
        return self.refused

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"columns": self.columns}

    def at_once(self) -> int:
        return self.batch_size

    @cached_property
    def _client(self) -> HttpClient:
        return HttpClient("remote", several(self.url), self)

    async def __call__(self, samples: list[RewardInput], retries: int | None = None) -> list[Score | RewardFailed]:
        request: dict[str, Any] = {
            "query": [sample.prompt + sample.response for sample in samples],
            "prompts": [sample.prompt for sample in samples],
            "labels": [sample.answer for sample in samples],
        }
        if self.columns:
            request["columns"] = {name: [sample.columns.get(name) for sample in samples] for name in self.columns}
        try:
            answer, url = await self._client.post(request, retries)
            return _scores(answer, len(samples), f"reward remote: {url}")
        except ServiceRefused as refusal:
            if len(samples) == 1:
                return [refusal]
            middle = len(samples) // 2
            return list(chain(*await asyncio.gather(self(samples[:middle], 0), self(samples[middle:], 0))))
        except RewardFailed as failure:  # not raised, or each sample would be sent again
            return [failure] * len(samples)


Number = Annotated[FiniteFloat, Strict()] | StrictBool


class _Answer(BaseModel):
    rewards: list[Number]
    scores: list[Number | None] | None = None
    extra_logs: dict[str, Any] | None = None


def _scores(answer: Any, samples: int, place: str) -> list[Score | RewardFailed]:
    try:
        read = _Answer.model_validate(answer)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"][:2])) or "the answer"
        raise ServiceRefused(f"{place}: {where}: {first['msg']}, got {first['input']!r:.80}") from None
    scores, logs = [None] * samples if read.scores is None else read.scores, read.extra_logs or {}
    for name, values in (("rewards", read.rewards), ("scores", scores)):
        if len(values) != samples:
            raise ServiceRefused(f"{place}: {len(values)} {name} for {samples} samples")
    found: list[Score | RewardFailed] = []
    for row, (reward, score) in enumerate(zip(read.rewards, scores, strict=True)):
        told = {name: one[row] if isinstance(one, list) and len(one) == samples else one for name, one in {"score": score, **logs}.items()}
        details = {name: one if isinstance(one, str) else float(one) for name, one in told.items() if isinstance(one, str | int | float)}
        found.append(Score(float(reward), None if score is None else score >= CORRECT, details))
    return found
