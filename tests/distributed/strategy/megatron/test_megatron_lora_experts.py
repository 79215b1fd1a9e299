"""LoRA on experts, each of which has adapters of its own: Hugging Face's model with merged weights is the oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import assert_same, tiny
from megatron_ranks import RankPool
from safetensors.torch import load_file
from support_models import by_checkpoint, load_hf
from test_megatron_lora import (
    ALPHA,
    ATTENTION,
    RANK,
    REPLICATED,
    Cases,
    expected_of,
    fresh,
    in_every,
    make_adapters,
    resume_elsewhere,
    save_adapters,
    save_and_resume,
)

SOME = ("k_proj", "o_proj", "up_proj", "down_proj")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    """A dense layer among those with experts."""
    folder = tmp_path_factory.mktemp("lora_experts")
    path = tiny(folder / "model", "qwen3_moe", layers=2, mlp_only_layers=[0])
    adapters = {"all": make_adapters(path, folder / "all"), "some": make_adapters(path, folder / "some", SOME)}
    adapters["attention"] = make_adapters(path, folder / "attention", ATTENTION)
    return Cases(path, adapters, {name: expected_of(path, one) for name, one in adapters.items()})


def check(ranks: RankPool, cases: Cases, world_size: int, layouts: list[tuple[str, dict[str, Any]]]) -> None:
    given = [(cases.adapters[which], layout, cases.expected[which]) for which, layout in layouts]
    found = ranks(world_size, in_every, cases.path, given)
    for (_, _, expected), owned in zip(given, zip(*found, strict=True), strict=True):
        assert set().union(*owned) == {*expected.merged, *expected.trained}


def test_adapters_of_experts_train_as_in_hugging_face(ranks: RankPool, cases: Cases) -> None:
    """Log-probs with and without adapters, merged weights, every gradient, the gradient norm, and three optimizer steps."""
    names = [name for name in cases.expected["all"].trained if ".mlp.experts.3.down_proj." in name]
    assert len(names) == 2, "they are of single experts"
    check(ranks, cases, 1, [("all", REPLICATED)])
    check(ranks, cases, 2, [("all", {"expert_parallel": 2, **REPLICATED})])


TP2 = {"tensor_parallel": 2, "sequence_parallel": True}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (1, [("some", {}), ("attention", REPLICATED)]),
        (2, [("some", {"expert_parallel": 2}), ("attention", {"expert_parallel": 2})]),
        (2, [("all", {**TP2, **REPLICATED}), ("some", TP2)]),
        (2, [("all", {**TP2, "expert_parallel": 2, **REPLICATED}), ("some", {**TP2, "expert_parallel": 2})]),
        (2, [("all", {"pipeline_parallel": 2, **REPLICATED})]),
        (2, [("all", {"context_parallel": 2, **REPLICATED})]),
        (2, [("some", {"recompute": "full"})]),
        (4, [("all", {**TP2, "expert_parallel": 2}), ("all", {**TP2, "expert_parallel": 2, **REPLICATED})]),
    ],
    ids=["one rank", "EP2", "TP2", "TP2 EP2", "PP2", "CP2", "DP2", "TP2 EP2 DP2"],
)
def test_they_train_so_in_further_layouts(
    ranks: RankPool, cases: Cases, world_size: int, layouts: list[tuple[str, dict[str, Any]]]
) -> None:
    check(ranks, cases, world_size, layouts)


def test_they_come_out_as_they_went_in_and_merged(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    ranks(2, save_adapters, cases.path, cases.adapters["some"], tmp_path / "out", {"expert_parallel": 2})
    before, after = (load_file(one / "adapter_model.safetensors") for one in (cases.adapters["some"], tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, sorted(SOME))
    merged = dict(load_hf(tmp_path / "out" / "merged").named_parameters())
    assert_same(by_checkpoint(merged), cases.expected["some"].merged, 1e-6)


def test_a_checkpoint_goes_on_under_another_expert_parallel(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    given = cases.path, cases.adapters["all"]
    saved = ranks(2, save_and_resume, *given, tmp_path, {"expert_parallel": 2})
    weights = {name: one for _, own in saved for name, one in own.items()}
    (found,) = ranks(1, resume_elsewhere, *given, tmp_path, {})
    assert found[0] == pytest.approx(saved[0][0], rel=1e-5)
    assert_same(found[1], weights)


@pytest.mark.slow
@pytest.mark.nightly
def test_experts_begin_with_the_same_adapters_under_every_layout(ranks: RankPool, cases: Cases) -> None:
    (whole,) = ranks(1, fresh, cases.path, {})
    parts = {name: one for own in ranks(2, fresh, cases.path, {"expert_parallel": 2}) for name, one in own.items()}
    assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
