"""A word in the place of a section that is chosen by its name."""

from __future__ import annotations

import pytest
from config_project import Project

from roll_lite.config.compose.layers import compose
from roll_lite.config.compose.merging import is_short_form
from roll_lite.config.schema.algorithm import FixedKlConfig
from roll_lite.config.schema.losses import (
    CispoLossConfig,
    GaeAdvantageConfig,
    GmpoLossConfig,
    GspoLossConfig,
    PpoLossConfig,
    ReinforceAdvantageConfig,
)
from roll_lite.config.schema.models import HfStrategyConfig, MegatronStrategyConfig, SglangStrategyConfig, VllmStrategyConfig
from roll_lite.config.validation import validate

EVERYWHERE = """
actor_train: {strategy: megatron}
actor_infer: {strategy: sglang}
reference: {strategy: megatron}
critic: {strategy: megatron}
reward_models: {first: {path: model, strategy: hf}, second: {path: model, strategy: megatron}}
judges: {strict: {path: model, strategy: vllm}}
placement: colocated
rollout: {filter: accuracy}
trackers: [jsonl]
domains: {add: {template: chat, reward: {terms: [length]}}, copy: {reward: choice}}
algorithm: {advantage: gae, policy_loss: cispo, kl_in_reward: {controller: fixed}, kl_in_loss: {controller: fixed}}
"""


def test_every_section_that_is_chosen_by_its_name(project: Project) -> None:
    project.write("configs/words.yaml", f"defaults: [run]{EVERYWHERE}")
    composed = compose("words", project.folder / "configs", [])
    config, problems = validate(composed.data)
    assert composed.problems == problems == []
    assert config.reference is not None
    assert config.critic is not None
    trained = (config.actor_train.strategy, config.reference.strategy, config.critic.strategy)
    assert trained == (MegatronStrategyConfig(),) * 3
    assert config.actor_infer.strategy == SglangStrategyConfig()
    assert config.reward_models["first"].strategy == HfStrategyConfig()
    assert config.reward_models["second"].strategy == MegatronStrategyConfig()
    assert config.judges["strict"].strategy == VllmStrategyConfig()
    assert (config.placement.name, [one.name for one in config.trackers]) == ("colocated", ["jsonl"])
    assert config.rollout.filter is not None and config.rollout.filter.name == "accuracy"
    add, copy = config.domains.values()
    assert (add.template.name, add.reward.name, [one.name for one in add.reward.terms]) == ("chat", "math", ["length"])
    assert (copy.template.name, copy.reward.name) == ("plain", "choice")
    assert (config.algorithm.advantage, config.algorithm.policy_loss) == (GaeAdvantageConfig(), CispoLossConfig())
    assert config.algorithm.kl_in_reward.controller == config.algorithm.kl_in_loss.controller == FixedKlConfig()


@pytest.mark.parametrize(
    "place",
    [
        "actor_infer.strategy",
        "reward_models.any.strategy",
        "judges.any.strategy",
        "algorithm.kl_in_loss.controller",
        "domains.any.reward",
        "trackers.0",
    ],
)
def test_a_word_is_short_for_a_name(place: str) -> None:
    path = tuple(place.split("."))
    assert is_short_form("word", path)
    assert not any(is_short_form(value, path) for value in (3, None, True, "${other}", "???"))
    assert not is_short_form("word", path[:-1])
    assert not is_short_form("word", (*path, "name"))


@pytest.mark.parametrize(
    "place",
    [
        "experiment",
        "model.dtype",
        "domains.add",
        "trackers",
        "domains.add.reward.args.strategy",
        "actor_infer.strategy.engine_args.strategy",
    ],
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
    message = "actor_infer.strategy.name = \"sglnag\": expected one of vllm, sglang; did you mean 'sglang'?"
    assert [str(one) for one in project.problems(name="wrong")] == [f"{message}  [wrong.yaml:5]"]
    assert [str(one) for one in project.problems("actor_infer.strategy=sglnag", name="engine")] == [f"{message}  [command line]"]


def test_another_member_has_none_of_the_former_ones_keys(project: Project) -> None:
    """But for those that mean the same in both."""
    project.write("configs/ppo.yaml", "defaults: [run]\nalgorithm: {policy_loss: {name: ppo, clip_low: 0.1, dual_clip: 3.0}}\n")
    project.write("configs/gmpo.yaml", "defaults: [ppo]\nalgorithm: {policy_loss: {name: gmpo, log_clip_low: 0.3}}\n")
    assert project.load(name="gmpo").algorithm.policy_loss == GmpoLossConfig(log_clip_low=0.3)
    for override in ("algorithm.policy_loss=gspo", "algorithm.policy_loss={name: gspo}", "algorithm={policy_loss: gspo}"):
        assert project.load(override, name="ppo").algorithm.policy_loss == GspoLossConfig(), "whose clip is a thousand times narrower"
    kept = project.problems("algorithm.policy_loss.clip_low=0.1", "steps=3", "algorithm.policy_loss=gmpo", name="ppo")
    assert [one.path for one in kept] == ["algorithm.policy_loss.clip_low"], "told, wherever the word stands"
    assert project.load("algorithm.policy_loss=ppo", name="ppo").algorithm.policy_loss == PpoLossConfig(clip_low=0.1, dual_clip=3.0)
    project.write("configs/gae.yaml", "defaults: [run]\ncritic: {}\nalgorithm: {advantage: {name: gae, gamma: 0.9, lam: 0.5}}\n")
    config = project.load("algorithm.advantage=reinforce", "~critic", name="gae")
    assert config.algorithm.advantage == ReinforceAdvantageConfig(gamma=0.9)
    assert project.problems("algorithm.policy_loss=gmpo", "algorithm.policy_loss.clip_low=0.1", name="ppo")[0].path.endswith("clip_low")


def test_another_name_has_none_of_the_former_ones_arguments(project: Project) -> None:
    project.write("configs/timed.yaml", "defaults: [run]\ndomains: {add: {reward: {name: math, workers: 3, args: {extract: boxed}}}}\n")
    for override in ("domains.add.reward=exact", "domains={add: {reward: exact}}"):
        reward = project.load(override, name="timed").domains["add"].reward
        assert (reward.name, reward.args, reward.workers) == ("exact", {}, 3)
    assert project.load("domains.add.reward=math", name="timed").domains["add"].reward.args == {"extract": "boxed"}
    reward = project.load("domains.add.reward.args.strip=false", "domains.add.reward=exact", name="timed").domains["add"].reward
    assert reward.args == {"strip": False}


REMOVED = {
    "an entry": ("domains.copy=null", "domains: {copy: null}"),
    "an entry of several": ("domains={copy: null}", "domains:\n  copy:\n  add: {share: 1.0}"),
    "a section": ("algorithm.reward=null", "algorithm: {reward: null}"),
    "a key": ("rollout.retries=null", "rollout: {retries: null}"),
    "a list": ("trackers=null", "trackers: null"),
    "a choice": ("algorithm.policy_loss=null", "algorithm: {policy_loss: null}"),
    "arguments": ("domains.add.reward.args=null", "domains: {add: {reward: {args: null}}}"),
}
INHERITED = """
defaults: [run]
domains: {add: {reward: {args: {extract: boxed}}}, copy: {share: 3.0}}
trackers: [tensorboard]
rollout: {retries: 7}
algorithm: {policy_loss: gspo, reward: {scale: 0.5}}
"""


@pytest.mark.parametrize("case", REMOVED.values(), ids=REMOVED)
def test_null_removes_what_is_inherited(project: Project, case: tuple[str, str]) -> None:
    """On the command line and in a file; what was never set is no less wrong than before."""
    override, yaml = case
    project.write("configs/inherited.yaml", INHERITED)
    project.write("configs/less.yaml", f"defaults: [inherited]\n{yaml}\n")
    deleted = "domains.copy" if "copy" in override else override.partition("=")[0]
    expected = project.load(f"~{deleted}", name="inherited")
    assert project.load(override, name="inherited") == project.load(name="less") == expected != project.load(name="inherited")
    assert project.problems(override.replace("copy", "cpoy")) != []


def test_null_stays_where_it_has_a_meaning(project: Project) -> None:
    project.write("configs/inherited.yaml", "defaults: [run]\nrollout: {max_mismatch: 0.5}\nvalidation: {every: 3}\n")
    config = project.load("rollout.max_mismatch=null", "validation=null", name="inherited")
    assert config.rollout.max_mismatch is None
    assert not config.validation.enabled
