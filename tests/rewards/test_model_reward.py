"""The domain's side of the reward `model`: what the model reads, and what becomes of its output."""

from __future__ import annotations

import math
from typing import Any

import pytest

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.model import ModelReward, ScoredText
from roll_lite.rewards.registry import build_reward


def sample(given: Any = None, **columns: Any) -> RewardInput:
    return RewardInput("toy", "Q: 1+1?\nA:", " 2", 2, columns, "stop", given)


def scored_text(read: RewardInput, **args: Any) -> ScoredText:
    return ModelReward(model="helpful", **args).model_input(read)


def score_of(output: float, **args: Any) -> Score:
    return ModelReward(model="helpful", **args).score_of(output)


def test_the_text_is_the_prompt_and_the_response_unless_a_template_says_otherwise() -> None:
    assert scored_text(sample()) == "Q: 1+1?\nA: 2"
    assert scored_text(sample(topic="sums"), template="[{topic}] {prompt}{response} ({answer}){{}}") == "[sums] Q: 1+1?\nA: 2 (2){}"


def test_chat_makes_messages_for_the_reward_models_own_template() -> None:
    assert scored_text(sample(question="1+1?"), template="chat", question="{question}") == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": " 2"},
    ]
    talk = [{"role": "system", "content": "Short."}, {"role": "user", "content": "1+1?"}]
    assert scored_text(sample("1+1?"), template="chat")[0] == {"role": "user", "content": "1+1?"}
    assert scored_text(sample(talk), template="chat") == [*talk, {"role": "assistant", "content": " 2"}]
    assert scored_text(sample(talk), template="chat", question="Is it so? {question}")[0] == {
        "role": "user",
        "content": "Is it so? system: Short.\n\nuser: 1+1?",
    }
    assert scored_text(sample(talk=talk), template="chat", question="{talk}") == [*talk, {"role": "assistant", "content": " 2"}]


def test_the_question_is_the_prompt_without_the_policys_template() -> None:
    template = "{question} ->{response}"
    assert scored_text(sample("1+1?"), template=template) == "1+1? -> 2"
    assert scored_text(sample([{"role": "user", "content": "1+1?"}]), template=template) == "1+1? -> 2"
    assert scored_text(sample("<b>1+1?</b>", question="1+1?"), template=template) == "1+1? -> 2", "the data's own column of this name"


def test_a_placeholder_that_the_sample_has_not_is_a_failure() -> None:
    with pytest.raises(RewardFailed, match=r"reward model: the template has \{topic\}, which this sample has not"):
        scored_text(sample(), template="{topic}{response}")
    assert scored_text(sample(topic=["a"]), template="{topic}{response}") == '["a"] 2'


def test_outputs_become_scores() -> None:
    plain = score_of(-1.5)
    assert (plain.value, plain.correct, plain.details) == (-1.5, False, {"reward_model": -1.5})
    squashed = score_of(math.log(3), scale="sigmoid")  # 3 / (1 + 3)
    assert squashed.value == pytest.approx(0.75)
    assert squashed.correct is True
    assert score_of(-1000.0, scale="sigmoid").value == 0.0
    assert score_of(1000.0, scale="sigmoid").value == 1.0
    assert score_of(0.4, threshold=0.5).correct is False


@pytest.mark.parametrize("output", [math.nan, math.inf])
def test_an_output_that_is_no_number_is_a_failure(output: float) -> None:
    with pytest.raises(RewardFailed, match="not finite"):
        score_of(output)


def test_outside_of_a_run_there_is_no_model() -> None:
    function = build_reward(RewardConfig(name="model", args={"model": "helpful"}))
    with pytest.raises(RewardFailed, match="'helpful' scores within a run only"):
        function.base.run(function.base.score(sample()))


def test_arguments_are_checked_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"reward\.args\.model: is missing; expected text"):
        build_reward(RewardConfig(name="model"))
    with pytest.raises(ValueError, match=r'reward\.args\.scale = "sigmoidal": expected one of none, sigmoid; did you mean .sigmoid'):
        build_reward(RewardConfig(name="model", args={"model": "m", "scale": "sigmoidal"}))
