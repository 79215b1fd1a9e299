"""What `roll-lite check` draws, against pictures drawn by hand from the table of phases."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.placement_picture import LEGEND, draw

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/placement.md"
PICTURE = r"^```\nroll-lite check --config-name (.+?)\n```\n\n```text\n(.+?)\n```$"
SPLIT = ("placement={name: split, nodes: 4}", "actor_train.devices=16", "actor_infer.devices=16", "rollout.supply=async")
MIXED = ("placement={name: pairs, nodes: 2}", "actor_infer.devices=[12,13,14,15]")
TWO_BESIDE_ONE = (
    "placement={name: by_role, nodes: 1}", "reference.devices=2", "critic.devices=[6,7]", "actor_train.devices=8", "actor_infer.devices=8",
    *(f"{role}.offload=true" for role in ("actor_train", "actor_infer", "reference", "critic")),
)  # fmt: skip

PICTURES = {
    ("tiny_grpo",): """
devices  role         sync weights        generate            log probs             train
--------------------------------------------------------------------------------------------------------
0        actor_train  all                 (all)               (all)                 all
         actor_infer  weights + KV cache  weights + KV cache  (weights + KV cache)  (weights + KV cache)
""",
    ("llama3.1_8b_ppo", "placement.nodes=1"): """
devices     role         sync weights  generate            log probs   train
-----------------------------------------------------------------------------
node0: 0-7  actor_train  weights                           2. weights  1. all
            actor_infer  weights       weights + KV cache
            reference                                      1. weights
            critic                                         3. weights  2. all
""",
    ("qwen2.5_32b_grpo", *SPLIT): """
devices             role         sync weights        generate            log probs           train
---------------------------------------------------------------------------------------------------------------
node0-1, each: 0-7  actor_train  all                 (all)               all                 all
node2-3, each: 0-7  actor_infer  weights + KV cache  weights + KV cache  weights + KV cache  weights + KV cache
""",
    ("llama3.1_8b_ppo", "critic.devices=[8,9,10,11,12,13]", *MIXED): """
devices     role         sync weights  generate            log probs   train
----------------------------------------------------------------------------
node0: 0-7  actor_train  weights                           2. weights  all
            reference                                      1. weights
node1: 0-3  critic                                         weights     all
node1: 4-5  actor_infer  weights       weights + KV cache
            critic                                         weights     all
node1: 6-7  actor_infer  weights       weights + KV cache
""",
    ("llama3.1_8b_ppo", *TWO_BESIDE_ONE): """
devices     role         sync weights  generate            log probs   train
-----------------------------------------------------------------------------
node0: 0-1  actor_train  weights                           2. weights  1. all
            actor_infer  weights       weights + KV cache
            reference                                      1. weights
node0: 2-5  actor_train  weights                           2. weights  1. all
            actor_infer  weights       weights + KV cache
node0: 6-7  actor_train  weights                           2. weights  1. all
            actor_infer  weights       weights + KV cache
            critic                                         1. weights  2. all
""",
}
SPANNING = ("placement={name: split, nodes: 6, devices_per_node: 2}", "actor_train.devices=4", "actor_infer.devices=8")


@pytest.mark.parametrize("run", PICTURES, ids=lambda run: run[0])
def test_who_is_where_when(run: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    name, *overrides = run
    config = load_config(name, ROOT / "examples/configs", overrides, files=False)
    lines = [line.rstrip() for line in draw(config).splitlines()]
    assert lines == [*PICTURES[run].strip().splitlines(), LEGEND]


def test_engines_that_span_nodes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_grpo", ROOT / "examples/configs", [*SPANNING, "actor_infer.strategy.tensor_parallel=4"], files=False)
    assert draw(config).splitlines()[-1] == "actor_infer spans nodes: engine 0 on node2-3; engine 1 on node4-5"
    config = load_config("tiny_grpo", ROOT / "examples/configs", [*SPANNING, "actor_infer.strategy.tensor_parallel=2"], files=False)
    assert draw(config).splitlines()[-1] == LEGEND


def test_the_pictures_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    blocks = re.findall(PICTURE, PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 7
    for command, picture in blocks:
        name, *overrides = shlex.split(command)
        assert draw(load_config(name, ROOT / "examples/configs", overrides)) == picture, command
