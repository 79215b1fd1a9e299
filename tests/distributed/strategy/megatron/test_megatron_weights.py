"""Hugging Face weights in and out: bit for bit the same, under every layout; and what is said of checkpoints that do not fit."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_cases import FAMILIES, batch_of, hf_log_probs, own_weights, started, tiny
from megatron_ranks import RankPool
from safetensors.torch import load_file, save_file
from support_models import load_hf
from transformers import AutoTokenizer

from roll_lite.distributed.strategy.megatron.hf_export import _in_buckets, _in_turns
from roll_lite.distributed.strategy.megatron.hf_mapping import LAYER, Layout, join, take_apart
from roll_lite.models.hf_config import read_hf_config


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def round_trip(path: Path, target: Path, layout: dict[str, Any], dtype: str) -> dict[str, Any]:
    strategy = started(path, dtype=dtype, **layout)
    plan = strategy.export_plan(1 << 16)
    exported = own_weights(strategy)
    strategy.save_hf(target)
    for tensor in plan.tensors:
        if tensor.owner == strategy.layout.rank:
            assert exported[tensor.name].shape == tensor.shape
            assert exported[tensor.name].dtype == tensor.dtype
            assert exported[tensor.name].is_contiguous()
    return {"plan": plan, "names": sorted(exported), "layout": strategy.layout}


@pytest.mark.parametrize(
    "layout", [{}, {"tensor_parallel": 2}, {"data": 2}, {"pipeline_parallel": 2}], ids=["one rank", "TP2", "DP2", "PP2"]
)
def test_what_comes_out_is_what_went_in(ranks: RankPool, tmp_path: Path, layout: dict[str, int]) -> None:
    world_size = max([1, *layout.values()])
    options = {name: size for name, size in layout.items() if name != "data"}
    for family in FAMILIES:
        path = tiny(tmp_path / family, family, vocab_size=101)
        returned = ranks(world_size, round_trip, path, tmp_path / f"{family}_out", options, "float32")
        plans = [one["plan"] for one in returned]
        assert all(plan == plans[0] for plan in plans), "the plan is the same on every rank"
        before, after = tensors_of(path), tensors_of(tmp_path / f"{family}_out")
        assert set(before) == set(after) == {tensor.name for tensor in plans[0].tensors}
        assert all(torch.equal(before[name], after[name]) for name in before)
        for bucket in plans[0].buckets():
            assert len({tensor.owner for tensor in bucket}) == 1
            assert len(bucket) == 1 or sum(before[tensor.name].nbytes for tensor in bucket) <= 1 << 16
        owners = {tensor.owner for tensor in plans[0].tensors}
        assert owners == ({0, 1} if "pipeline_parallel" in layout else {0})
        first = [bucket[0].owner for bucket in plans[0].buckets()][:4]
        assert first == ([0, 1, 0, 1] if "pipeline_parallel" in layout else [0] * 4), "owners take turns"
        load_hf(tmp_path / f"{family}_out")
        assert AutoTokenizer.from_pretrained(tmp_path / f"{family}_out").encode("a1") == AutoTokenizer.from_pretrained(path).encode("a1")


def test_bfloat16_goes_through_unchanged(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", dtype=torch.bfloat16)
    ranks(1, round_trip, path, tmp_path / "out", {}, "bfloat16")
    before, after = tensors_of(path), tensors_of(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_checkpoint_in_several_files(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "qwen3")
    load_hf(path).save_pretrained(tmp_path / "several", max_shard_size="200KB")
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 2
    ranks(2, round_trip, tmp_path / "several", tmp_path / "out", {"tensor_parallel": 2}, "float32")
    before, after = tensors_of(path), tensors_of(tmp_path / "out")
    assert all(torch.equal(before[name], after[name]) for name in before)


def save_in_pieces(path: Path, target: Path) -> None:
    from roll_lite.distributed.strategy.megatron import hf_export

    with patch.object(hf_export, "FILE_BYTES", 200_000):
        started(path).save_hf(target)


def test_a_large_model_is_saved_in_several_files(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "llama")
    ranks(1, save_in_pieces, path, tmp_path / "out")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    ids = batch_of().ragged("input_ids").row(0)
    assert torch.equal(hf_log_probs(load_hf(tmp_path / "out"), ids, 1.0)[0], hf_log_probs(load_hf(path), ids, 1.0)[0])


def error_of(path: Path, layout: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        started(path, **layout)
    return str(error.value)


def changed(path: Path, target: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of a checkpoint with some tensors replaced, added or (None) taken away; dots in names are written as double underscores."""
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    kept = tensors_of(path)
    for name, tensor in tensors.items():
        if tensor is None:
            del kept[name.replace("__", ".")]
        else:
            kept[name.replace("__", ".")] = tensor
    save_file(kept, target / "model.safetensors")
    return target


def test_checkpoints_that_do_not_fit(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "qwen2")
    missing = changed(path, tmp_path / "missing", model__layers__1__self_attn__k_proj__bias=None, model__norm__weight=None)
    unknown = changed(path, tmp_path / "unknown", model__layers__7__mlp__up_proj__weight=torch.zeros(2, 2))
    own_head = changed(path, tmp_path / "own_head", lm_head__weight=torch.zeros(100, 128))
    empty = tmp_path / "empty"
    empty.mkdir()
    no_weights = tmp_path / "no_weights"
    no_weights.mkdir()
    (no_weights / "config.json").write_text((path / "config.json").read_text())
    cases = [
        (missing, {}, "lacks model.layers.1.self_attn.k_proj.bias, model.norm.weight"),
        (unknown, {}, "has tensors that a qwen2 model has no place for: model.layers.7.mlp.up_proj.weight"),
        (own_head, {}, "lm_head.weight in model.safetensors is another tensor than model.embed_tokens.weight"),
        (empty, {}, "no config.json in"),
        (no_weights, {}, "holds neither model.safetensors nor model.safetensors.index.json"),
    ]
    for folder, layout, message in cases:
        assert message in ranks(1, error_of, folder, layout)[0]


MISFITS = {
    "model.embed_tokens.weight": (torch.zeros(90, 128), "has the shape [90, 128] in its safetensors; by config.json it is [100, 128]"),
    "model.layers.0.self_attn.q_proj.weight": (torch.zeros(121, 128), "has the shape [121, 128]"),
    "model.layers.0.self_attn.k_proj.bias": (torch.zeros(59), "has the shape [59]"),
    "model.layers.0.self_attn.o_proj.weight": (torch.zeros(128), "has the shape [128] in its safetensors; by config.json it is [128, 128]"),
    "model.layers.0.input_layernorm.weight": (torch.ones(()), "has the shape []"),
    "model.layers.0.mlp.gate_proj.weight": (torch.zeros(254, 128), "has the shape [254, 128]"),
    "model.layers.1.mlp.down_proj.weight": (
        torch.zeros(128, 96),
        "has the shape [128, 96] in its safetensors; by config.json it is [128, 256]",
    ),
    "model.layers.1.mlp.up_proj.weight": (torch.zeros(256, 128, dtype=torch.int8), "holds I8 in its safetensors"),
    "model.layers.1.self_attn.v_proj.weight": (torch.zeros(64, 128).to(torch.float8_e4m3fn), "holds F8_E4M3 in its safetensors"),
}


def test_a_tensor_that_is_no_such_weight_is_told_by_its_name(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model", "qwen2")
    for number, (name, (tensor, message)) in enumerate(MISFITS.items()):
        folder = changed(path, tmp_path / str(number), **{name.replace(".", "__"): tensor})
        for said in ranks(1 + number % 2, error_of, folder, {"tensor_parallel": 1 + number % 2}):
            assert said.startswith(f"model.path: {folder}: {name} {message}")


def test_grouped_layout_puts_each_group_together(tmp_path: Path) -> None:
    """Worked out by hand: 4 query heads, 2 key/value heads: q0 q1 k0 v0 q2 q3 k1 v1."""
    hf = read_hf_config(tiny(tmp_path / "model", "qwen2"))
    entry = next(entry for entry in LAYER if entry.layout is Layout.GROUPED and entry.megatron.endswith("bias"))
    numbers = {"q": [0, 1, 2, 3], "k": [10, 11], "v": [20, 21]}
    cuts = [torch.tensor(heads).repeat_interleave(hf.head_dim) for heads in numbers.values()]
    joined = join(entry, cuts, hf)
    assert joined[:: hf.head_dim].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]
    assert all(torch.equal(back, cut) for back, cut in zip(take_apart(entry, joined, hf), cuts, strict=True))


def test_a_bucket_has_one_dtype() -> None:
    """What is gathered as one tensor would be made the widest of several."""
    tensors = [("a", (4,), torch.bfloat16, 0), ("b", (4,), torch.float32, 0), ("c", (4,), torch.float32, 0), ("d", (9,), torch.float32, 0)]
    buckets = [[name for name, *_ in bucket] for bucket in _in_buckets(tensors, 32)]
    assert buckets == [["a"], ["b", "c"], ["d"]]


@pytest.mark.parametrize(("bucket_bytes", "most"), [(1000, 1280), (5000, 5120), (100, 1280 + 3 * 100)])
def test_engines_keep_a_layers_experts_until_the_last_owner_has_sent_its_part_and_no_more(bucket_bytes: int, most: int) -> None:
    """Eight owners of two experts each in six layers of 1,280 bytes, and what has no experts, with the first of them. As vLLM: what is kept
    is loaded as soon as a layer is complete."""
    owned: list[list[Any]] = [[(f"model.layers.{n}.self_attn.o_proj.weight", (20,), torch.float32, 0) for n in range(6)]]
    parts = ("gate_proj", "up_proj")
    for rank in range(8):
        names = [f"model.layers.{n}.mlp.experts.{2 * rank + one}.{part}" for n in range(6) for one in range(2) for part in parts]
        owned.append([(name, (10,), torch.float32, rank) for name in names])
    buckets = _in_turns(owned, bucket_bytes, 8)
    assert sorted(tensor for bucket in buckets for tensor in bucket) == sorted(tensor for own in owned for tensor in own)
    assert all(len({tensor[3] for tensor in bucket}) == 1 and 40 * len(bucket) <= max(bucket_bytes, 80) for bucket in buckets)
    kept: dict[str, int] = {}
    highest = 0
    for bucket in buckets:
        for name, *_ in bucket:
            if ".experts." in name:
                layer = name.partition(".mlp.")[0]
                kept[layer] = kept.get(layer, 0) + 40
        highest = max(highest, sum(kept.values()))
        kept = {layer: size for layer, size in kept.items() if size < 32 * 40}
    assert highest <= most and kept == {}
    assert max(40 * len(bucket) for bucket in _in_turns(owned, bucket_bytes)) == min(bucket_bytes // 40 * 40, 960), "files stay as large"
