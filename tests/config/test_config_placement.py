"""From presets and lists to device numbers, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from config_project import Project
from support_cases import cases

from roll_lite.config.arithmetic import derive, device_numbers, roles
from roll_lite.config.checks import layout
from roll_lite.config.checks.layout import devices_are_there
from roll_lite.config.placement import describe, engines, nodes_of_engine
from roll_lite.config.schema.run import PlacementConfig, RunConfig

PPO = """
algorithm: {advantage: {name: gae}, kl_in_reward: {coef: 0.1}}
reference: {}
critic: {}
reward_models: {rm: {path: rm, dtype: float32}}
domains: {copy: {reward: {name: model, args: {model: rm}}}}
"""
ALL = ("actor_train", "actor_infer", "reference", "critic", "reward_models.rm")


@pytest.fixture
def ppo(project: Project) -> Project:
    scorer = {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1, "id2label": {"0": "score"}, "pad_token_id": 0}
    project.write_model("rm", **scorer)
    return project


def devices(config: RunConfig) -> dict[str, tuple[int, ...]]:
    return {name: device_numbers(role.devices) for name, role in roles(config).items()}


def offloaded(config: RunConfig) -> set[str]:
    return {name for name, role in roles(config).items() if getattr(role, "offload", False)}


def loaded(project: Project, text: str) -> RunConfig:
    project.write("configs/ppo.yaml", f"defaults: [run, _self_]\n{PPO}")
    project.write("configs/placed.yaml", f"defaults: [ppo, _self_]\n{text}")
    return project.load(name="placed")


@pytest.mark.parametrize(("yaml", "numbers", "in_turns"), cases("config/placements"))
def test_who_gets_which_devices(ppo: Project, yaml: str, numbers: dict[str, list[int]], in_turns: list[str]) -> None:
    config = loaded(ppo, yaml)
    assert ({role: list(own) for role, own in devices(config).items()}, offloaded(config)) == (numbers, set(in_turns))


def test_what_is_written_down_is_placed_and_stays_so(ppo: Project) -> None:
    config = loaded(ppo, "placement: split\nactor_train: {devices: 2}\nactor_infer: {devices: 2}")
    written: dict[str, Any] = config.model_dump(mode="json")
    assert (written["actor_train"]["devices"], written["actor_infer"]["devices"]) == (2, [2, 3])
    assert (written["critic"]["offload"], written["actor_infer"]["offload"]) == (True, False)
    ppo.write("configs/again.yaml", yaml.safe_dump(written))
    assert ppo.load(name="again") == config


def test_roles_that_take_no_part_need_no_devices(ppo: Project) -> None:
    config = loaded(ppo, "placement: colocated\nmode: rollout_only\nactor_train: {devices: 4}\nactor_infer: {devices: 2}")
    assert devices(config) == {"actor_infer": (0, 1), "reward_models.rm": (0, 1)}


def test_engines_larger_than_a_node_span_nodes(ppo: Project) -> None:
    spanning = "placement: {nodes: 4, devices_per_node: 2, fill: FILL}\nactor_infer: {devices: 8, strategy: {tensor_parallel: 4}}"
    for fill in ("pack", "spread"):
        role = loaded(ppo, spanning.replace("FILL", fill)).actor_infer
        assert [nodes_of_engine(PlacementConfig(devices_per_node=2), own) for own in engines(role)] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_replicas_that_share_devices(project: Project) -> None:
    arithmetic = derive(project.load("actor_infer.devices=[1,2]", "actor_infer.replicas_per_device=3"))
    assert (arithmetic.engine_replicas, arithmetic.clusters["actor_infer"].layout) == (6, "vllm: 6 replicas, 3 on each device")


def test_many_nodes_in_few_words() -> None:
    assert describe([("a", 8), ("b", 4)], "GPUs") == "2 nodes with 12 GPUs (a has 8, b has 4)"
    assert describe([(f"node{number}", 8) for number in range(32)]) == "32 nodes (node0 to node31) with 8 devices each"


def test_gpus_that_this_machine_has_not(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = project.load("actor_infer.devices=[0,1,2]")
    assert list(devices_are_there(config)) == [], "CPU slots"
    monkeypatch.setattr(layout, "gpus_visible", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    ((path, message),) = devices_are_there(config)
    assert path == "actor_infer.devices" and "devices 1-2 are not there: this machine has 1 GPU; use fewer" in message
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    assert list(devices_are_there(config)) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4")
    assert list(devices_are_there(project.load("actor_infer.devices=[0,1,2]", "ray.address=head:1"))) == []
    assert list(devices_are_there(project.load("actor_infer.devices=[0,1,2]", "placement.nodes=1"))) == []


def test_engines_that_join(ppo: Project) -> None:
    def told(text: str) -> str:
        found = ppo.problems_of(f"{PPO}\n{text}")
        return "\n".join(one.message for one in found if one.path == "actor_infer.most_replicas")

    settings = "placement: {nodes: 2, devices_per_node: 2}\nactor_infer: {devices: [3], most_replicas: 3}"
    assert loaded(ppo, settings).actor_infer.most_replicas == 3
    text = told(settings.replace("[3]", "[3], offload: true, replicas_per_device: 2, restarts: 0") + "\ndeterministic: true")
    for word in ("offload: false", "replicas_per_device: 1", "restarts is 0", "deterministic: false"):
        assert word in text
    assert "only replicas on one node can join" in told(settings.replace("[3]", "[0, 1, 2, 3], strategy: {tensor_parallel: 4}"))
    assert "1 is less than the 2 replicas that actor_infer.devices makes" in told(
        settings.replace("[3]", "[2, 3]").replace("as: 3", "as: 1")
    )
