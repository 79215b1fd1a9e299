"""What becomes of what reward functions return."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from support_rewards import score_of

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import ResponseSuspected, RewardFailed, RewardFunction, RewardType, to_score
from roll_lite.rewards.running.batch_scorer import BatchScorer
from roll_lite.rewards.terms import Reward, Term

HUGE = 10**400
"""More than a float can hold."""


@pytest.mark.parametrize("result", [HUGE, -HUGE, {"value": HUGE}])
def test_a_number_beyond_floats_is_a_failure_as_infinity_is(result: Any) -> None:
    function = RewardFunction("mine", lambda _: result, {})
    with pytest.raises(RewardFailed, match="which is not finite"):
        score_of(function, RewardInput("maths", "prompt", "response", "answer", {}, "stop"))


def test_a_number_beyond_float32_is_a_failure_of_its_function_or_of_the_sum() -> None:
    """Scores train as float32, in which 1e39 is infinite and 3.4028235e38, the largest, is not."""
    sample = RewardInput("maths", "prompt", "response", "answer", {}, "stop")
    assert to_score(-3.4028234663852886e38, "mine").value == -3.4028234663852886e38
    with pytest.raises(RewardFailed, match=r"reward mine: returned 1e\+39, which is beyond float32, whose largest number is 3.4028e\+38"):
        to_score(1e39, "mine")
    whole = Reward(RewardFunction("mine", lambda _: 3e38, {}), [Term("short", 1.0, RewardFunction("s", lambda _: 3e38, {}))])
    with pytest.raises(RewardFailed, match=r"reward mine with its terms: returned 6e\+38"):
        score_of(whole, sample)


def test_a_huge_number_among_the_details_is_infinite() -> None:
    assert to_score({"value": 1, "details": {"length": -HUGE}}, "mine").details == {"length": float("-inf")}


def test_a_reward_may_say_which_answer_it_has_read() -> None:
    assert to_score({"value": 1, "answer": "B"}, "mine").answer == to_score(Score(1.0, answer="B"), "mine").answer == "B"
    assert to_score(1.0, "mine").answer is None
    with pytest.raises(RewardFailed, match="answer must be a string or None, got 5"):
        to_score({"value": 1, "answer": 5}, "mine")
    whole = Reward(
        RewardFunction("mine", lambda _: Score(1.0, answer="B"), {}), [Term("short", -0.5, RewardFunction("s", lambda _: 1.0, {}))]
    )
    score = score_of(whole, RewardInput("maths", "prompt", "response", "answer", {}, "stop"))
    assert (score.value, score.correct, score.answer) == (0.5, True, "B")
    assert score.terms == {"base": 1.0, "short": -0.5}, "what each adds"


class Fragile(RewardType):
    """Fails as a whole on an attack, and on every response to a prompt that is broken."""

    says: bool = False
    """Name the sample that it fails on."""

    def __call__(self, samples: list[RewardInput]) -> list[float | RewardFailed]:
        bad = ["attack" in one.response or "broken" in one.prompt for one in samples]
        if any(bad) and not self.says:
            raise RecursionError("too deep")
        return [ResponseSuspected("too deep") if is_bad else 1.0 for is_bad in bad]


class FragileAsync(Fragile):
    async def __call__(self, samples: list[RewardInput]) -> list[float | RewardFailed]:  # type: ignore[override]
        return super().__call__(samples)


@pytest.mark.parametrize("says", [False, True])
@pytest.mark.parametrize("kind", [Fragile, FragileAsync])
def test_a_response_on_which_a_function_for_lists_fails_scores_lowest_and_others_theirs(kind: type[Fragile], says: bool) -> None:
    scoring = BatchScorer(Reward(RewardFunction("fragile", kind(says=says), {})), 60.0)
    samples = [RewardInput("toy", prompt, response, None, {}, "stop") for prompt in ("fine", "broken") for response in ("4", "attack")]
    results: dict[int, Any] = {}
    scored = scoring(dict(enumerate(samples)), 1.0)
    while len(results) < len(samples):
        results |= scored.results
        scored = scoring({}, 1.0)
    assert results[0].value == 1.0
    assert isinstance(results[1], Score) and (results[1].value, results[1].correct) == (0.0, False)
    assert "too deep" in str(results[1].details["verdict"])
    assert all(isinstance(results[n], str) and "too deep" in results[n] for n in (2, 3)), "the prompt's fault"


def test_a_request_in_flight_is_not_late_because_another_sample_computes() -> None:
    async def asks(sample: RewardInput) -> float:
        async with asyncio.timeout(0.8):
            await asyncio.sleep(0.3)
        return 1.0

    def computes(sample: RewardInput) -> float:
        time.sleep(1.2 if sample.response == "long" else 0.0)
        return 0.0

    asking = [Term("asks", 1.0, RewardFunction("asks", asks, {}))]
    scoring = BatchScorer(Reward(RewardFunction("computes", computes, {}), asking), 2.0)
    results: dict[int, Any] = {}
    for number, response in enumerate(["short", "long"]):
        results |= scoring({number: RewardInput("toy", "prompt", response, None, {}, "stop")}, 1.0).results
    while len(results) < 2:
        results |= scoring({}, 1.0).results
    assert [results[number].value for number in range(2)] == [1.0, 1.0], results
