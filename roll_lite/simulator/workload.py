"""Simulated prompts, response lengths and scores. They depend only on a hash of the sample's id, so all scenarios share them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

from roll_lite.data.prompts import PromptOrder
from roll_lite.data.samples import GenerationRequest, Prompt, RewardInput, Sampling, Score
from roll_lite.data.stable_hash import stable_hash
from roll_lite.scheduler.domain import Domain
from roll_lite.scheduler.filters import GroupFilter
from roll_lite.scheduler.runner import Conversation, one_response

NORMAL = NormalDist()
P99 = NORMAL.inv_cdf(0.99)


def uniform(*parts: object) -> float:
    """Pseudo-random number in (0, 1) that depends only on `parts`."""
    return (stable_hash(*parts) + 0.5) / 2**63


class Distribution(Protocol):
    def draw(self, share: float) -> float:
        """Return the quantile at `share` (between 0 and 1)."""
        ...


@dataclass(frozen=True)
class LogNormal:
    median: float
    p99: float
    """99th percentile; if it equals the median, all values are equal."""

    def draw(self, share: float) -> float:
        return self.median * math.exp(math.log(self.p99 / self.median) / P99 * NORMAL.inv_cdf(share))


class Quantiles:
    """Distribution given by quantiles at even steps."""

    def __init__(self, values: Sequence[float]) -> None:
        self._values = tuple(values)

    def draw(self, share: float) -> float:
        place = share * (len(self._values) - 1)
        below = min(int(place), len(self._values) - 2)
        return self._values[below] + (place - below) * (self._values[below + 1] - self._values[below])


@dataclass(frozen=True)
class DomainModel:
    name: str
    lengths: Distribution
    max_tokens: int
    prompt_tokens: int = 512
    samples_per_prompt: int = 16
    share: float = 1.0
    reward_s: Distribution | None = None
    reward_most_s: float = math.inf
    reward_workers: int | None = None
    """Responses scored at a time; None: no limit."""
    all_right: float = 0.0
    all_wrong: float = 0.0
    turns: Distribution | None = None
    max_turns: int = 1
    environment_s: Distribution | None = None
    environment_tokens: int = 0
    greedy_baseline: bool = False
    prompts: int = 10_000
    epochs: int | None = None
    least: int = 0


class SimulatedPrompts:
    """Source of simulated prompts. A prompt's first two tokens are the domain's number and the prompt's index."""

    def __init__(self, model: DomainModel, number: int) -> None:
        self._model = model
        self._number = number
        self._rest = (0,) * max(0, model.prompt_tokens - 2)

    def __len__(self) -> int:
        return self._model.prompts

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt(self._model.name, index, str(index), (self._number, index, *self._rest))


class SimulatedReward:
    """Sleeps for a random time, then scores 0 or 1."""

    def __init__(self, model: DomainModel, seed: int) -> None:
        self.capacity = math.inf if model.reward_workers is None else model.reward_workers
        self._model = model
        self._seed = seed
        self._free = asyncio.Semaphore(model.reward_workers) if model.reward_workers is not None else nullcontext()

    async def score(self, item: RewardInput) -> Score:
        seconds = self._model.reward_s
        if seconds is not None:
            drawn = seconds.draw(uniform(self._seed, "reward seconds", item.response))
            async with self._free:
                await asyncio.sleep(min(drawn, self._model.reward_most_s))
        return Score(float(uniform(self._seed, "score", item.response) < self._chance(item.prompt)))

    def _chance(self, prompt: str) -> float:
        place = uniform(self._seed, "prompt", self._model.name, prompt)
        if place < self._model.all_right:
            return 1.0
        if place > 1 - self._model.all_wrong:
            return 0.0
        return (place - self._model.all_right) / (1 - self._model.all_right - self._model.all_wrong)


class SimulatedEnvironment:
    """Sleeps for a random time after each response, and adds tokens."""

    def __init__(self, model: DomainModel, turns: Distribution, seed: int) -> None:
        self._model = model
        self._turns = turns
        self._seed = seed

    async def play(self, prompt: Prompt, conversation: Conversation) -> None:
        model, sample = self._model, conversation.request_id
        turns = min(round(self._turns.draw(uniform(self._seed, "turns", sample))), model.max_turns)
        room = model.max_tokens - (await conversation.respond(prompt.token_ids)).length
        for turn in range(1, turns):
            if model.environment_s is not None:
                await asyncio.sleep(model.environment_s.draw(uniform(self._seed, "environment", sample, turn)))
            room -= model.environment_tokens
            if room < 1:
                return
            room -= (await conversation.respond((0,) * model.environment_tokens, turn, turn - 1)).length


def lengths(models: Sequence[DomainModel], seed: int) -> Callable[[GenerationRequest], int]:
    by_name = {model.name: model.lengths for model in models}

    def length(request: GenerationRequest) -> int:
        turn = request.request_id.partition("~")[0]  # the sample's id, with the number of a later turn
        return max(1, round(by_name[turn.partition("/")[0]].draw(uniform(seed, "length", turn))))

    return length


def domains(models: Sequence[DomainModel], seed: int, group_filter: GroupFilter | None) -> list[Domain]:
    return [
        Domain(
            name=model.name,
            prompts=SimulatedPrompts(model, number),
            order=PromptOrder(model.prompts, seed, model.name),
            sampling=Sampling(temperature=1.0, max_tokens=model.max_tokens),
            samples_per_prompt=model.samples_per_prompt,
            share=model.share,
            rewards=SimulatedReward(model, seed),
            greedy_baseline=model.greedy_baseline,
            epochs=model.epochs,
            least=model.least,
            filter=group_filter,
            episode=one_response if model.turns is None else SimulatedEnvironment(model, model.turns, seed).play,
        )
        for number, model in enumerate(models)
    ]
