"""A house of domains over scripted engines, for scheduler tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from support_local_engine import LocalEngine
from support_scripted import Response, Script, ScriptedEngine

from roll_lite.data.prompts import PromptOrder
from roll_lite.data.samples import GenerationRequest, Prompt, RewardInput, Sample, Sampling, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.scheduler.domain import Domain, DomainScheduler, PromptSource
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.runner import RewardClient
from roll_lite.scheduler.service import RolloutService
from roll_lite.scheduler.stats import RolloutStats
from roll_lite.scheduler.supply import Pacing


class Prompts:
    """Prompts that tell their domain and uid: the first two tokens."""

    def __init__(self, name: str, number: int, count: int, tokens: int = 4) -> None:
        self.name, self.number, self.count, self.tokens = name, number, count, tokens

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int, /) -> Prompt:
        ids = (self.number, index, *range(self.tokens - 2))
        return Prompt(self.name, index, f"{self.name} {index}", ids, answer=str(index))


class TimedReward:
    """Scores 1 after a while; `fails(item, how often it was asked)` decides about failures."""

    capacity = inf

    def __init__(self, seconds: float = 0.0, fails: Callable[[RewardInput, int], bool] = lambda item, asked: False) -> None:
        self.seconds, self.fails = seconds, fails
        self.asked: dict[tuple[str, str], int] = {}
        self.started: list[float] = []

    async def score(self, item: RewardInput) -> Score:
        loop = asyncio.get_running_loop()
        self.started.append(loop.time())
        key = (item.prompt, item.response)
        self.asked[key] = self.asked.get(key, 0) + 1
        await asyncio.sleep(self.seconds)
        if self.fails(item, self.asked[key]):
            raise RewardFailed("the judge is away")
        return Score(1.0)


def by_tokens(tokens: int, seconds_per_token: float = 0.01) -> Script:
    return lambda request: Response(tokens, seconds_per_token)


def make_domain(
    name: str,
    number: int = 0,
    prompts: int = 1000,
    share: float = 1.0,
    samples: int = 4,
    rewards: RewardClient | None = None,
    reward_retries: int = 1,
    validation: PromptSource | None = None,
    max_tokens: int = 64,
    prompt_tokens: int = 4,
    greedy_baseline: bool = False,
    **how: Any,
) -> Domain:
    return Domain(
        name=name,
        prompts=Prompts(name, number, prompts, prompt_tokens),
        order=PromptOrder(prompts, 7, name),
        sampling=Sampling(temperature=1.0, max_tokens=max_tokens),
        samples_per_prompt=samples,
        share=share,
        rewards=rewards or TimedReward(),
        reward_retries=reward_retries,
        validation=validation,
        greedy_baseline=greedy_baseline,
        **how,
    )


def make_service(
    domains: Sequence[Domain],
    scripts: Sequence[Script] | Mapping[str, Script] = (),
    slots: int | None = None,
    retries: int = 2,
    timeout_s: float = 1e6,
    seed: int | None = None,
    deterministic: bool = False,
    engine_slots: int | None = None,
    engine_tokens: int | None = None,
    **how: Any,
) -> tuple[RolloutService, Router, list[ScriptedEngine]]:
    engines = [ScriptedEngine(script, slots=slots) for script in (scripts or [by_tokens(8)])]
    clients = [LocalEngine(f"engine {i}", engine, frozen_admission=deterministic) for i, engine in enumerate(engines)]
    router = Router(clients, timeout_s, deterministic, engine_slots, engine_tokens)
    pacing = Pacing(**{key: how.pop(key) for key in ("supply", "on_sync", "oversample", "engines_rest") if key in how})
    service = RolloutService(domains, router, retries, seed, pacing=pacing, **how)
    keep_stats(service)
    return service, router, engines


def schedulers_of(service: RolloutService) -> dict[str, DomainScheduler]:
    return service._schedulers


@dataclass(frozen=True)
class Counts:
    """Number of prompts since the start, by outcome; `admitted`: all that were started."""

    admitted: int
    delivered: int
    filtered: int
    stale: int
    lost: int

    @property
    def ended(self) -> int:
        return self.delivered + self.filtered + self.stale + self.lost


def keep_stats(service: Any) -> None:
    """Keep the statistics of all batches, for `counts_of`."""
    past, finish = [], service._recorder.finish

    def kept(*when: Any) -> RolloutStats:
        past.append(finish(*when))
        return past[-1]

    service._recorder.finish, service.past_stats = kept, past


def counts_of(service: Any, domain: str) -> Counts:
    stats = [*(one.domains[domain] for one in service.past_stats), service._recorder.domains[domain]]
    filtered, stale = sum(one.filtered.total() for one in stats), sum(one.stale_by_cause.total() for one in stats)
    return Counts(
        sum(one.admitted for one in stats), sum(one.delivered for one in stats), filtered, stale, sum(one.lost_groups for one in stats)
    )


def all_counts(service: Any) -> list[Counts]:
    return [counts_of(service, name) for name in schedulers_of(service)]


def prompt_of(request: GenerationRequest) -> tuple[int, int]:
    """(domain number, uid)"""
    return request.prompt_ids[0], request.prompt_ids[1]


def tokens_of(sample: Sample) -> list[int]:
    """Prompt and response, out of the sample's token block."""
    place = sample.transcript.tokens
    return place.block.ragged("input_ids").row(place.row).tolist() if place is not None else []


def attempt_of(request: GenerationRequest) -> int:
    return int(request.request_id.rsplit("/", 1)[1])
