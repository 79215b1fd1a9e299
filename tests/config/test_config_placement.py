"""From presets and lists to device numbers, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from config_project import Project

from roll_lite.config.arithmetic import derive, device_numbers, roles
from roll_lite.config.checks import layout
from roll_lite.config.checks.layout import devices_are_there
from roll_lite.config.placement import describe, engines, nodes_of_engine
from roll_lite.config.schema.placement import PlacementConfig
from roll_lite.config.schema.run import RunConfig

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


CASES: dict[str, tuple[str, dict[str, tuple[int, ...]], set[str]]] = {
    "by role": (
        "actor_train: {devices: 2}\nactor_infer: {devices: [1, 2]}",
        dict.fromkeys(ALL, (0,)) | {"actor_train": (0, 1), "actor_infer": (1, 2)},
        set(),
    ),
    "colocated": ("placement: colocated\nactor_train: {devices: 4}", dict.fromkeys(ALL, (0, 1, 2, 3)), set(ALL)),
    "colocated, of which one role takes fewer and one stays": (
        "placement: colocated\nactor_train: {devices: 4}\ncritic: {devices: 2}\nreference: {offload: false}",
        dict.fromkeys(ALL, (0, 1, 2, 3)) | {"critic": (0, 1)},
        {*ALL} - {"reference"},
    ),
    "colocated, on all that there is": (
        "placement: {name: colocated, nodes: 2, devices_per_node: 3}",
        dict.fromkeys(ALL, tuple(range(6))),
        {*ALL},
    ),
    "split": (
        "placement: split\nactor_train: {devices: 4}\nactor_infer: {devices: 2}",
        dict.fromkeys(ALL, (0, 1, 2, 3)) | {"actor_infer": (4, 5)},
        {*ALL} - {"actor_infer"},
    ),
    "split, where rewards are asked for all the time": (
        "placement: split\nrollout: {supply: async}\nactor_train: {devices: 2}",
        dict.fromkeys(ALL, (0, 1)) | {"actor_infer": (2,)},
        {"actor_train", "reference", "critic"},
    ),
    "pairs": (
        "placement: pairs\nactor_train: {devices: 2}\ncritic: {devices: 3}\nactor_infer: {devices: 2}",
        {"actor_train": (0, 1), "reference": (0, 1), "critic": (2, 3, 4), "reward_models.rm": (2, 3, 4), "actor_infer": (5, 6)},
        {*ALL} - {"actor_infer"},
    ),
    "apart": (
        "placement: apart\nactor_train: {devices: 2}",
        {"actor_train": (0, 1), "actor_infer": (2,), "reference": (3,), "critic": (4,), "reward_models.rm": (5,)},
        set(),
    ),
    "a list is left where it is, and its devices are nobody else's": (
        "placement: apart\nactor_train: {devices: 2}\nactor_infer: {devices: [1, 3]}",
        {"actor_train": (0, 2), "actor_infer": (1, 3), "reference": (4,), "critic": (5,), "reward_models.rm": (6,)},
        set(),
    ),
    "mixed: some engines on the trainer's devices, others apart": (
        "actor_train: {devices: 2, offload: true}\nactor_infer: {devices: [0, 1, 2, 3], offload: true}",
        dict.fromkeys(ALL, (0,)) | {"actor_train": (0, 1), "actor_infer": (0, 1, 2, 3)},
        {"actor_train", "actor_infer"},
    ),
    "devices of a node": (
        "placement: {nodes: 2, devices_per_node: 4}\n"
        "actor_train: {devices: [node0:0-1, node1:0-1]}\nactor_infer: {devices: ['node1:3', 2]}",
        dict.fromkeys(ALL, (0,)) | {"actor_train": (0, 1, 4, 5), "actor_infer": (7, 2)},
        set(),
    ),
    "spread over nodes, one of each in turn": (
        "placement: {name: split, nodes: 2, devices_per_node: 4, fill: spread}\nactor_train: {devices: 4}\nactor_infer: {devices: 2}",
        dict.fromkeys(ALL, (0, 4, 1, 5)) | {"actor_infer": (2, 6)},
        {*ALL} - {"actor_infer"},
    ),
    "spread, but for what has to be on one node": (
        "placement: {name: split, nodes: 2, devices_per_node: 4, fill: spread}\nactor_train: {devices: 2}\n"
        "actor_infer: {devices: 4, strategy: {tensor_parallel: 2}}",
        dict.fromkeys(ALL, (0, 4)) | {"actor_infer": (1, 2, 5, 6)},
        {*ALL} - {"actor_infer"},
    ),
    "what has to be on one node goes to the next one that has room": (
        "placement: {name: split, nodes: 2, devices_per_node: 2}\nactor_infer: {devices: 2, strategy: {tensor_parallel: 2}}",
        dict.fromkeys(ALL, (0,)) | {"actor_infer": (2, 3)},
        {*ALL} - {"actor_infer"},
    ),
    "spread beside a device that is left over": (
        "placement: {name: apart, nodes: 3, devices_per_node: 2, fill: spread}\nactor_train: {devices: [node0:0]}\n"
        "actor_infer: {devices: 2, strategy: {tensor_parallel: 2}}\nreward_models: {rm: {devices: [node2:0]}}\n"
        "critic: {devices: [node2:1]}\nreference: {devices: [node2:1]}",
        {"actor_train": (0,), "reference": (5,), "critic": (5,), "reward_models.rm": (4,), "actor_infer": (2, 3)},
        {"critic", "reference"},
    ),
    "an engine larger than a node has whole nodes": (
        "placement: {name: split, nodes: 3, devices_per_node: 2, fill: pack}\nactor_train: {devices: 1}\n"
        "actor_infer: {devices: 4, strategy: {tensor_parallel: 4}}",
        dict.fromkeys(ALL, (0,)) | {"actor_infer": (2, 3, 4, 5)},
        {*ALL} - {"actor_infer"},
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_who_gets_which_devices(ppo: Project, case: tuple[str, dict[str, tuple[int, ...]], set[str]]) -> None:
    text, numbers, in_turns = case
    config = loaded(ppo, text)
    assert (devices(config), offloaded(config)) == (numbers, in_turns)


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


IMPOSSIBLE = {
    "too many": (
        "placement: {name: split, nodes: 1, devices_per_node: 4}\nactor_train: {devices: 3}\nactor_infer: {devices: 2}",
        "actor_infer.devices",
        "device 4 is not there: the cluster has 1 node with 4 devices (node0 has 4); use fewer, or more nodes (placement.nodes)",
    ),
    "too many to spread": (
        "placement: {name: apart, nodes: 2, devices_per_node: 1, fill: spread}\nactor_train: {devices: 3}\nactor_infer: {devices: [0]}",
        "actor_train.devices",
        "devices 2-3 are not there: the cluster has 2 nodes with 2 devices (node0 has 1, node1 has 1)",
    ),
    "no such node": (
        "placement: {nodes: 1}\nactor_train: {devices: [node1:0]}",
        "actor_train.devices",
        "is not there: the cluster has 1 node with 8 devices (node0 has 8), numbered from 0",
    ),
    "nodes that nobody has told of": ("actor_train: {devices: [node1:0]}", "actor_train.devices", "how many there are: placement.nodes"),
    "the wrong way round": ("placement: {nodes: 1}\nactor_train: {devices: [node0:3-0]}", "actor_train.devices", "write node0:0-3"),
    "no name of devices": ("actor_train: {devices: [nod0:1]}", "actor_train.devices", "write node0:3, or node0:0-3 for several"),
    "nothing to spread over": ("placement: {name: split, fill: spread}", "placement.fill", "say how many there are: placement.nodes"),
    "an engine on two nodes": (
        "placement: {nodes: 2, devices_per_node: 3}\nactor_infer: {devices: [0, 1, 2, 3], strategy: {tensor_parallel: 2}}",
        "actor_infer.devices",
        "an engine of 2 devices needs them on one node, but devices 2-3 lie on node0 and node1",
    ),
    "an engine with more of one node than of another": (
        "placement: {nodes: 2, devices_per_node: 3}\nactor_infer: {devices: 4, strategy: {tensor_parallel: 4}}",
        "actor_infer.devices",
        "spans nodes and needs as many of each, one node after the other, but has 3 of node0, 1 of node1; list others",
    ),
    "an engine to and fro between nodes": (
        "placement: {nodes: 2, devices_per_node: 2}\nactor_infer: {devices: [0, 2, 1, 3], strategy: {tensor_parallel: 4}}",
        "actor_infer.devices",
        "one node after the other, but has 1 of node0, 1 of node1, 1 of node0, 1 of node1",
    ),
    "a judge that no node has room for": (
        "placement: {nodes: 2, devices_per_node: 2}\njudges: {main: {path: model, devices: 4, strategy: {tensor_parallel: 4}}}\n"
        "domains: {add: {reward: {name: judge, args: {server: main, api: completions}}}}",
        "judges.main.strategy.tensor_parallel",
        "a judge's devices are on one node, which has 2; use at most as many",
    ),
    "no such preset": ("placement: collocated", "placement.name", "did you mean 'colocated'?"),
    "replicas of several devices": (
        "actor_infer: {devices: 2, replicas_per_device: 2, strategy: {tensor_parallel: 2}}",
        "actor_infer.replicas_per_device",
        "has 2 devices of its own (tensor_parallel); use 1",
    ),
    "in turns, side by side": (
        "placement: colocated\nrollout: {supply: async}",
        "actor_infer.offload",
        "and cannot leave their devices; use placement: split (or false), or rollout.supply: sync",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_what_cannot_be_is_told_with_what_there_is(project: Project, case: tuple[str, str, str]) -> None:
    text, path, message = case
    (problem,) = project.problems_of(text)
    assert problem.path == path and message in problem.message, problem


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
