"""A word in the place of a section that is chosen by its name."""

from __future__ import annotations

import pytest
from config_project import Project

from roll_lite.config.compose import compose
from roll_lite.config.schema import (
    CispoLossConfig,
    FixedKlConfig,
    GaeAdvantageConfig,
    HfStrategyConfig,
    MegatronStrategyConfig,
    SglangStrategyConfig,
    VllmStrategyConfig,
)
from roll_lite.config.short_form import is_short_form
from roll_lite.config.validation import validate

EVERYWHERE = """
actor_train: {strategy: megatron}
actor_infer: {strategy: sglang}
reference: {strategy: megatron}
critic: {strategy: megatron}
reward_models: {first: {path: model, strategy: hf}, second: {path: model, strategy: megatron}}
judges: {strict: {path: model, strategy: vllm}}
algorithm: {advantage: gae, policy_loss: cispo, kl_in_reward: {controller: fixed}, kl_in_loss: {controller: fixed}}
"""


def test_every_section_that_is_chosen_by_its_name(project: Project) -> None:
    project.write("configs/words.yaml", f"defaults: [run]{EVERYWHERE}")
    composed = compose("words", project.folder / "configs", [])
    validated = validate(composed.data)
    assert composed.problems == validated.problems == []
    config = validated.partial
    assert config.reference is not None
    assert config.critic is not None
    trained = (config.actor_train.strategy, config.reference.strategy, config.critic.strategy)
    assert trained == (MegatronStrategyConfig(),) * 3
    assert config.actor_infer.strategy == SglangStrategyConfig()
    assert config.reward_models["first"].strategy == HfStrategyConfig()
    assert config.reward_models["second"].strategy == MegatronStrategyConfig()
    assert config.judges["strict"].strategy == VllmStrategyConfig()
    assert (config.algorithm.advantage, config.algorithm.policy_loss) == (GaeAdvantageConfig(), CispoLossConfig())
    assert config.algorithm.kl_in_reward.controller == config.algorithm.kl_in_loss.controller == FixedKlConfig()


@pytest.mark.parametrize(
    "place", ["actor_infer.strategy", "reward_models.any.strategy", "judges.any.strategy", "algorithm.kl_in_loss.controller"]
)
def test_a_word_is_short_for_a_name(place: str) -> None:
    path = tuple(place.split("."))
    assert is_short_form("word", path)
    assert not any(is_short_form(value, path) for value in (3, None, True, "${other}", "???"))
    assert not is_short_form("word", path[:-1])
    assert not is_short_form("word", (*path, "name"))


@pytest.mark.parametrize(
    "place", ["experiment", "model.dtype", "domains.add.reward", "trackers.0", "actor_infer.strategy.engine_args.strategy"]
)
def test_a_word_elsewhere_is_itself(place: str) -> None:
    assert not is_short_form("word", tuple(place.split(".")))


def test_an_override_sets_the_name_only(project: Project) -> None:
    project.write("configs/engine.yaml", "defaults: [run]\nactor_infer: {strategy: {name: vllm, max_running_requests: 7}}\n")
    for override in ("actor_infer.strategy=sglang", "+actor_infer.strategy=sglang", "actor_infer={strategy: sglang}"):
        assert project.load(override, name="engine").actor_infer.strategy == SglangStrategyConfig(max_running_requests=7)
    assert project.load("actor_infer.strategy=sglang").actor_infer.strategy == SglangStrategyConfig()


def test_a_word_over_a_section_sets_the_name_only(project: Project) -> None:
    project.write("configs/engine.yaml", "defaults: [run]\nactor_infer: {strategy: {name: vllm, max_running_requests: 7}}\n")
    project.write("configs/other.yaml", "defaults: [engine]\nactor_infer: {strategy: sglang}\n")
    assert project.load(name="other").actor_infer.strategy == SglangStrategyConfig(max_running_requests=7)


def test_keys_can_be_set_under_a_word(project: Project) -> None:
    project.write("configs/engine.yaml", "defaults: [run]\nactor_infer: {strategy: sglang}\n")
    project.write("configs/busy.yaml", "defaults: [engine]\nactor_infer: {strategy: {max_running_requests: 7}}\n")
    assert project.load(name="busy").actor_infer.strategy == SglangStrategyConfig(max_running_requests=7)
    config = project.load("actor_infer.strategy.tensor_parallel=2", "actor_infer.devices=2", name="engine")
    assert config.actor_infer.strategy == SglangStrategyConfig(tensor_parallel=2)
    config = project.load("actor_infer.strategy=vllm", "actor_infer.strategy.max_running_requests=9", name="busy")
    assert config.actor_infer.strategy == VllmStrategyConfig(max_running_requests=9)


def test_a_word_in_a_group_file(project: Project) -> None:
    project.write("configs/actor_infer/fast.yaml", "strategy: sglang\n")
    project.write("configs/grouped.yaml", "defaults: [run, actor_infer: fast]\n")
    assert project.load(name="grouped").actor_infer.strategy == SglangStrategyConfig()


def test_an_interpolation_may_give_a_section_that_is_a_word(project: Project) -> None:
    project.write("configs/link.yaml", "defaults: [run]\nactor_infer: {strategy: '${judges.strict.strategy}'}\n")
    composed = compose("link", project.folder / "configs", ["judges.strict.strategy=vllm"])
    assert composed.data["actor_infer"] == {"strategy": {"name": "vllm"}}


def test_a_word_fills_in_what_is_left_open(project: Project) -> None:
    project.write("configs/open.yaml", "defaults: [run]\nactor_infer: {strategy: '???'}\n")
    assert [one.path for one in project.problems(name="open")] == ["actor_infer.strategy"]
    assert project.load("actor_infer.strategy=sglang", name="open").actor_infer.strategy == SglangStrategyConfig()


def test_mistakes_are_shown_where_they_were_written(project: Project) -> None:
    project.write("configs/engine.yaml", "defaults: [run]\nactor_infer:\n  strategy:\n    name: vllm\n    max_running_requests: 7\n")
    project.write("configs/wrong.yaml", "defaults: [engine]\n\n\nactor_infer:\n  strategy: sglnag\n")
    message = "actor_infer.strategy.name = \"sglnag\": expected one of vllm, sglang, scripted; did you mean 'sglang'?"
    assert [str(one) for one in project.problems(name="wrong")] == [f"{message}  [wrong.yaml:5]"]
    assert [str(one) for one in project.problems("actor_infer.strategy=sglnag", name="engine")] == [f"{message}  [command line]"]
    left_over = [
        one for one in project.problems("actor_infer.strategy=scripted", name="engine") if one.path.endswith("max_running_requests")
    ]
    assert [one.source for one in left_over] == ["engine.yaml:5"]
    assert "unknown key" in left_over[0].message
