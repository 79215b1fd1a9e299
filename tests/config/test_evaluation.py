"""What `mode: evaluate` reads of a configuration, and what it leaves out."""

from __future__ import annotations

import pytest

from roll_lite.config.arithmetic import max_model_len, roles
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.run import RunConfig
from roll_lite.environments.check import check_environments
from roll_lite.files import CONFIGS
from roll_lite.rewards.registry import check_rewards


def evaluation(name: str, *overrides: str) -> RunConfig:
    return load_config(name, CONFIGS, ["mode=evaluate", *overrides])


def mistakes(name: str, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        evaluation(name, *overrides)
    return [str(problem) for problem in error.value.problems]


def test_settings_of_training_are_not_read_however_wrong_they_are() -> None:
    wrong = (
        "actor_train.strategy.tensor_parallel=7",
        "algorithm={mini_batches: 7, advantage: grpo}",
        "steps=0",
        "checkpoint.keep=0",
        "chaos.targets=[actor_train]",
    )
    config = evaluation("tiny_ppo", *wrong, "rollout={dump: true, prompts_per_step: 3, retries: 5}", "domains.add.samples_per_prompt=1")
    assert config.critic is None and list(roles(config)) == ["actor_infer"]
    assert (config.rollout.retries, config.rollout.prompts_per_step, config.rollout.dump) == (5, 32, False)
    assert all(domain.data.train is None for domain in config.domains.values())


def test_training_prompts_are_not_asked_for_but_held_out_ones_are() -> None:
    asked = mistakes("qwen2.5_7b_grpo")
    assert [text.partition(":")[0] for text in asked] == ["model.path", "domains.math.data.validation"]
    assert "domains.add.data.train = null: there is nothing to train on" in str(wrong_training("~domains.add.data.train"))


def wrong_training(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        load_config("tiny_grpo", CONFIGS, overrides)
    return error.value


def test_domains_without_held_out_prompts_are_left_out_unless_there_are_no_others() -> None:
    without = [f"domains.{name}.data.validation=null" for name in ("add", "make", "repeat")]
    assert list(evaluation("tiny_grpo", *without[:2]).domains) == ["repeat"]
    needs = "mode: evaluate needs held-out prompts; name their file, or a data set of the hub"
    assert mistakes("tiny_grpo", *without) == [f"domains.add.data.validation = null: {needs}  [command line]"]


@pytest.mark.parametrize(
    ("section", "reward"),
    [
        ("reward_models", "{name: model, args: {model: %s}}"),
        ("judges", "{name: judge, args: {server: %s}}"),
        ("judges", "{name: exact, terms: [{name: judge, args: {server: %s}}]}"),
    ],
)
def test_scoring_models_of_domains_that_are_left_out_are_left_out_too(section: str, reward: str) -> None:
    models, chat = "{one: {path: one}, two: {path: two}}", f"{{data: {{train: rows.jsonl}}, reward: {reward % 'two'}}}"
    given = ["mode=evaluate", f"{section}={models}", f"domains.chat={chat}"]
    scored = f"domains.add.reward={reward}"
    kept = [getattr(load_config("tiny_grpo", CONFIGS, [*given, *more], files=False), section) for more in ([], [scored % "one"])]
    assert list(map(list, kept)) == [[], ["one"]]
    with pytest.raises(ConfigError, match="no such .*; valid here: one, two"):
        load_config("tiny_grpo", CONFIGS, [*given, scored % "three"], files=False, further=[check_rewards])


def test_a_validation_that_training_has_switched_off_is_on() -> None:
    assert evaluation("tiny_grpo", "validation=null").validation.enabled
    assert evaluation("tiny_grpo", "validation.enabled=false").validation.enabled


def test_lengths_are_those_of_held_out_prompts() -> None:
    """12 tokens of a prompt, and 30 of a response."""
    held_out = "validation.sampling.max_tokens=30"
    assert max_model_len(evaluation("tiny_grpo", held_out, "domains.add.sampling.max_tokens=200")) == 42
    assert max_model_len(load_config("tiny_grpo", CONFIGS, [held_out, "domains.add.sampling.max_tokens=200"])) == 212


def test_mistakes_in_what_is_read_are_told() -> None:
    assert mistakes("tiny_grpo", "validation.samples=3", "algorithm.nothing=3") == [
        "validation.samples = 3: unknown key; did you mean 'sampling'?  [command line]"
    ]


def test_environments_are_read_and_checked_as_in_training() -> None:
    """Rewards of turns need an advantage estimator of training's, which is not read."""
    config = evaluation("tiny_guess", "domains.guess.environment.rewards=per_turn")
    trained = load_config("tiny_guess", CONFIGS, ["domains.guess.environment.rewards=per_turn", "algorithm.advantage=reinforce"])
    assert config.domains["guess"].environment == trained.domains["guess"].environment
    assert config.domains["guess"].reward.name == "environment" and max_model_len(config) == 240
    misspelt = "domains.guess.environment.function=roll_lite.examples.domains.turns.Gues"
    with pytest.raises(ConfigError, match="did you mean 'Guess'"):
        load_config("tiny_guess", CONFIGS, ["mode=evaluate", misspelt], further=[check_environments])
