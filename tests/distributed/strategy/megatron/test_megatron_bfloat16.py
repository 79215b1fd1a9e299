"""An update in bfloat16 under every kind of layout. The oracle is transformers in float32 with the same weights, which bfloat16 holds
exactly; how far bfloat16 may be off it, transformers in bfloat16 says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import batch_of, hf_log_probs, hf_loss, own_gradients, parameters_of, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from support_models import by_checkpoint, load_hf
from support_passes import forward, train_step
from test_megatron_oracle import INTERLEAVED, NO_CLIPPING, SHARED, STAGES

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "dense", {}),
    "TP2 SP": (2, "dense", SHARED),
    "CP2": (2, "dense", {"context_parallel": 2}),
    "VPP2": (2, "dense", INTERLEAVED),
    "EP2": (2, "experts", {"expert_parallel": 2}),
}
FURTHER: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank, experts": (1, "experts", {}),
    "DP2, overlapped": (2, "dense", {"overlap_grad_reduce": True}),
    "TP2 SP EP2": (2, "experts", {**SHARED, "expert_parallel": 2}),
    "TP2 SP PP2, recomputed": (4, "dense", {**SHARED, **STAGES, "recompute": "full"}),
    "CP2 VPP2": (4, "dense", {**INTERLEAVED, "context_parallel": 2}),
    "PP2 EP2, recomputed in part": (4, "experts", {**STAGES, "expert_parallel": 2, "recompute": "selective"}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All experts are chosen: bfloat16 rounds a router's input, which would decide otherwise here and there."""
    folder = tmp_path_factory.mktemp("models")
    shape: dict[str, Any] = {"layers": 4, "dtype": torch.bfloat16}
    experts = tiny(folder / "experts", "qwen3_moe", num_experts_per_tok=4, **shape)
    return {"dense": tiny(folder / "dense", "qwen3", **shape), "experts": experts}


def by_hugging_face(path: Path, dtype: torch.dtype) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Log-probs of all rows, and gradients of the loss, which are added up over the rows in `dtype`."""
    model, batch = load_hf(path, dtype), batch_of()
    rows = zip(batch.ragged("input_ids").rows(), batch.tensor("temperature"), strict=True)
    log_probs = torch.cat([hf_log_probs(model, ids, temperature)[0].detach() for ids, temperature in rows])
    hf_loss(model, batch).backward()
    gradients = {name: parameter.grad.float() for name, parameter in model.named_parameters() if parameter.grad is not None}
    return log_probs, by_checkpoint(gradients)


def update(path: Path, layout: dict[str, Any]) -> tuple[torch.Tensor | None, dict[str, torch.Tensor], float]:
    strategy = started(path, NO_CLIPPING, dtype="bfloat16", distributed_optimizer=False, **layout)
    for parameter in parameters_of(strategy):
        assert (parameter.dtype, parameter.main_grad.dtype) == (torch.bfloat16, torch.float32)
    own = shard(batch_of(), strategy)
    found = forward(strategy, own.select(["input_ids", "temperature"]), ["log_probs"], 2)
    result = train_step(strategy, own, weighted_loss, ["log_probs", "entropy"], 1)
    return None if found is None else found.ragged("log_probs").values, own_gradients(strategy), result.grad_norm


def off(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Length of the difference of all, as a share of theirs."""
    difference = torch.stack([(ours[name].float() - tensor).norm() for name, tensor in theirs.items()]).norm()
    return float(difference / torch.stack([tensor.norm() for tensor in theirs.values()]).norm())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=(pytest.mark.slow, pytest.mark.nightly)) for name in FURTHER)])
def test_an_update_in_bfloat16(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    world_size, model, layout = (LAYOUTS | FURTHER)[name]
    path = models[model]
    log_probs, gradients = by_hugging_face(path, torch.float32)
    rounded, of_bfloat16 = by_hugging_face(path, torch.bfloat16)
    found = ranks(world_size, update, path, layout)
    ours = {name: tensor for _, own, _ in found for name, tensor in own.items()}
    assert ours.keys() == gradients.keys()
    told = torch.cat([own for own, _, _ in found if own is not None])
    # Gradients are within bfloat16's rounding in one pass: they are added up in float32, over micro-batches and ranks.
    assert off(ours, gradients) < 1.25 * off(of_bfloat16, gradients)
    # Tensor ranks round their part of each sum.
    assert off({"": told}, {"": log_probs}) < 1.5 * off({"": rounded}, {"": log_probs})
    norm = float(torch.stack([tensor.float().norm() for tensor in ours.values()]).norm())
    assert [norm_told for _, _, norm_told in found] == pytest.approx([norm] * world_size, rel=1e-4)
