from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import fmean, quantiles

import pytest
from simulator_support import request

from roll_lite.data.samples import Prompt, RewardInput, Turn
from roll_lite.simulator.clock import run_virtual
from roll_lite.simulator.engine import sample_of
from roll_lite.simulator.workload import (
    DomainModel,
    LogNormal,
    Quantiles,
    SimulatedEnvironment,
    SimulatedPrompts,
    SimulatedReward,
    lengths,
    uniform,
)


def test_a_log_normal_has_its_median_and_its_99th_percentile() -> None:
    lengths = LogNormal(median=100, p99=1000)
    assert [lengths.draw(share) for share in (0.5, 0.99, 0.01)] == pytest.approx([100, 1000, 10])
    assert LogNormal(5, 5).draw(0.9) == 5


def test_quantiles_are_joined_by_lines() -> None:
    """Half of the values lie between 2 and 4, the other half between 4 and 10."""
    assert [Quantiles([2, 4, 10]).draw(share) for share in (0, 0.25, 0.5, 0.75, 1)] == [2, 3, 4, 7, 10]


def test_what_is_drawn_is_even_and_repeats() -> None:
    drawn = [uniform(1, "length", number) for number in range(20_000)]
    assert drawn == [uniform(1, "length", number) for number in range(20_000)]
    assert drawn[:5] != [uniform(2, "length", number) for number in range(5)]
    assert quantiles(drawn, n=10) == pytest.approx([place / 10 for place in range(1, 10)], abs=0.01)


def test_a_sample_has_one_length_whatever_becomes_of_its_requests() -> None:
    length = lengths([DomainModel("a", LogNormal(100, 1000), 10_000)], seed=1)
    assert sample_of("a/7/0/3/2/0/turn1~4") == sample_of("a/7/0/3/2/0~1") == "a/7/0/3/2/0"
    assert length(request("7")) == length(request("7", context=50, resumed=20)) != length(request("8"))


def test_prompts_differ_in_their_first_tokens_and_have_their_length() -> None:
    prompts = SimulatedPrompts(DomainModel("a", LogNormal(1, 1), 8, prompt_tokens=20), number=3)
    assert len(prompts[0].token_ids) == 20 and prompts[0].token_ids[:2] == (3, 0) != prompts[1].token_ids[:2]


def test_rewards_take_their_time_and_solve_as_many_prompts_as_they_should() -> None:
    model = DomainModel("a", LogNormal(1, 1), 8, reward_s=LogNormal(2, 2), all_right=0.2, all_wrong=0.3)

    async def main() -> tuple[float, list[float]]:
        reward = SimulatedReward(model, seed=1)
        items = [
            [RewardInput("a", str(prompt), f"a/{prompt}/0/0/{index}/0", None, {}, "stop") for index in range(8)] for prompt in range(2000)
        ]
        means = [fmean([score.value for score in await asyncio.gather(*map(reward.score, group))]) for group in items[:1]]
        first = asyncio.get_running_loop().time()
        rest = await asyncio.gather(*(reward.score(item) for group in items[1:] for item in group))
        means += [fmean(score.value for score in rest[place : place + 8]) for place in range(0, len(rest), 8)]
        return first, means

    first, means = run_virtual(main())
    assert first == 2
    # Beside the prompts that are always solved some are by chance: with p evenly spread, all of 8 in 1 case of 9.
    assert sum(mean == 1 for mean in means) / 2000 == pytest.approx(0.2 + 0.5 / 9, abs=0.03)
    assert sum(mean == 0 for mean in means) / 2000 == pytest.approx(0.3 + 0.5 / 9, abs=0.03)


def test_an_episode_takes_its_turns_and_stops_where_its_tokens_end() -> None:
    """Three turns of 10 tokens, between them 5 of the environment: 40 tokens. In 24 tokens there is room for two responses and those 5."""
    asked: list[tuple[float, int, int | None]] = []

    class Asked:
        request_id = "toy/0/0/0/0/0"

        async def respond(self, ids: Sequence[int], number: int = 0, after: int | None = None) -> Turn:
            asked.append((asyncio.get_running_loop().time(), len(ids), after))
            return Turn("", 10)

    async def play(max_tokens: int) -> list[tuple[float, int, int | None]]:
        asked.clear()
        three, wait = LogNormal(3, 3), LogNormal(2.0, 2.0)
        model = DomainModel("toy", LogNormal(10, 10), max_tokens, max_turns=9, environment_s=wait, environment_tokens=5)
        await SimulatedEnvironment(model, three, seed=1).play(Prompt("toy", 0, "0", (1, 2, 3)), Asked())  # type: ignore[arg-type]
        start = asked[0][0]
        return [(at - start, tokens, after) for at, tokens, after in asked]

    assert run_virtual(play(100)) == [(0.0, 3, None), (2.0, 5, 0), (4.0, 5, 1)]
    assert run_virtual(play(24)) == [(0.0, 3, None), (2.0, 5, 0)]
