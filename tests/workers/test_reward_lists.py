"""Reward functions for lists, and rewards of several terms, on real reward workers: who is blamed, what it costs the neighbours."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import ray

from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.workers.reward import RewardPool

pytestmark = pytest.mark.usefixtures("ray_local")
USER = "tests.workers.reward_functions"


def item(response: str = "abc") -> RewardInput:
    return RewardInput("toy", "prompt", response, "answer", {}, "stop")


@asynccontextmanager
async def pool(reward: str, timeout_s: float = 30.0, terms: dict[str, float] | None = None, **args: Any) -> AsyncIterator[RewardPool]:
    further = [RewardTermConfig(name=f"{USER}.{name}", weight=weight) for name, weight in (terms or {}).items()]
    rewards = RewardPool("toy", RewardConfig(name=f"{USER}.{reward}", timeout_s=timeout_s, args=args, terms=further))
    await rewards.start()
    try:
        yield rewards
    finally:
        rewards.close()


async def outcomes(rewards: RewardPool, *responses: str) -> list[Score | str]:
    async def one(response: str) -> Score | str:
        try:
            return await rewards.score(item(response))
        except RewardFailed as failure:
            return failure.cause

    return list(await asyncio.gather(*map(one, responses)))


@pytest.mark.parametrize("function", ["listed", "listed_async"])
async def test_lists_reach_functions_that_take_lists(function: str) -> None:
    async with pool(function) as rewards:
        await rewards.score(item())  # tells how long a sample takes
        results = await outcomes(rewards, *["a"] * 40)
    assert sum(isinstance(result, Score) and result.value >= 20 for result in results) >= 20


@pytest.mark.parametrize("function", ["listed", "listed_async"])
async def test_a_sample_that_raises_is_blamed_alone(function: str) -> None:
    async with pool(function) as rewards:
        await rewards.score(item())
        results = await outcomes(rewards, "a", "b", "raise", "c", "d")
        assert rewards.replaced == 0
    assert [type(result) for result in results] == [Score, Score, str, Score, Score]
    assert "KeyError" in str(results[2])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", ["listed", "listed_async"])
async def test_a_sample_that_hangs_a_list_is_blamed_alone(function: str) -> None:
    async with pool(function, timeout_s=1.0) as rewards:
        await rewards.score(item())
        results = await outcomes(rewards, "a", "b", "hang", "c", "d")
    assert [type(result) for result in results] == [Score, Score, str, Score, Score]
    assert "time-out: no score within 1 s" in str(results[2])


async def test_lists_with_dead_and_failing_samples() -> None:
    async with pool("listed") as rewards:
        await rewards.score(item())
        results = await outcomes(rewards, "a", "fail", "die", "c")
        assert len(rewards.newly_replaced()) == rewards.replaced >= 1
        assert rewards.newly_replaced() == []
    assert [type(result) for result in results] == [Score, str, str, Score]
    assert results[1] == "no score for this one" and "its process died" in str(results[2])


async def test_too_few_scores_are_a_failure() -> None:
    async with pool("short") as rewards:
        assert await outcomes(rewards, "a") == [f"reward {USER}.short: returned 0 scores for 1 samples"]


@pytest.mark.nightly
async def test_a_hanging_sample_costs_its_neighbours_one_time_out() -> None:
    async with pool("tricky", timeout_s=4.0) as rewards:
        await rewards.score(item())
        started = time.monotonic()
        ended: dict[str, float] = {}

        async def one(response: str) -> Score | str:
            [result] = await outcomes(rewards, response)
            ended[response] = time.monotonic() - started
            return result

        results = await asyncio.gather(*map(one, ["a", "hang", "c"]))
        assert rewards.replaced == 1
    assert [type(result) for result in results] == [Score, str, Score]
    assert ended["a"] < 2 * 4.0, "was scored before, and came back with the call"
    assert ended["hang"] < 2 * 4.0


@pytest.mark.nightly
async def test_what_cannot_be_interrupted_ends_with_its_process() -> None:
    async with pool("deaf", timeout_s=0.5) as rewards:
        await rewards.score(item())
        worker = rewards._fleet.serving[0].actor
        results = await outcomes(rewards, "a", "hang", "c")
        assert rewards.replaced >= 1
        with pytest.raises(ray.exceptions.RayActorError):
            await worker.place.remote()
    assert [type(result) for result in results] == [Score, str, Score]


@pytest.mark.parametrize("base", ["length", "listed", "waiting"])
async def test_terms_add_up_and_show_in_the_details(base: str) -> None:
    async with pool(base, terms={"half": -2.0, "waiting": 1.0, "marked": 0.25}) as rewards:
        [score] = await outcomes(rewards, "abc")
        assert isinstance(score, Score)
        alone = {"length": 3.0, "listed": 1.0, "waiting": 0.5}[base]
        assert score.value == pytest.approx(alone - 1.0 + 0.5 + 0.5)
        assert score.details == {"base": alone, "half": 0.5, "half.kind": "half", "waiting": 0.5, "marked": 2.0}
        assert score.correct is (alone >= 1)


async def test_a_failing_term_fails_the_sample_and_is_named() -> None:
    async with pool("length", timeout_s=1.0, terms={"half": 1.0}) as rewards:
        failed, hung, fine = await outcomes(rewards, "half fails", "half hangs", "abc")
    assert isinstance(failed, str) and failed.startswith(f"term half: reward {USER}.half: ValueError: no half")
    assert "time-out: no score within 1 s" in str(hung)
    assert isinstance(fine, Score) and fine.value == 3.5
