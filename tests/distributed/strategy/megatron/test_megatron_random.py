"""Random combinations of model, layout, micro-batches and recompute: log-probs, distributions, loss and every gradient are Hugging Face's,
whatever they are combined with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from megatron_cases import tiny
from megatron_ranks import RankPool
from support_models import Family
from support_passes import Cut
from test_megatron_lora import ATTENTION, expected_of, like_hugging_face, make_adapters
from test_megatron_oracle import check_forward, check_gradients, check_many
from test_megatron_outputs import check_forward as check_distributions
from test_megatron_values import check_values, reward_model
from test_routing_replay import check_replayed

from roll_lite.config.schema.models import LINEAR_LAYERS
from roll_lite.data.microbatch import TokenBudget

SEEDS = 4
CASES = 15
"""Of one seed; each takes a second or two."""


def drawn(draw: random.Random) -> tuple[int, Family, dict[str, Any], dict[str, Any], Cut]:
    """Ranks, family, its shape, layout, and how rows are cut into micro-batches; up to four ranks."""
    family: Family = draw.choice(["qwen2", "qwen3", "qwen3_moe", "llama", "mistral"])
    layers = draw.randint(2, 6)
    shape: dict[str, Any] = {"layers": layers, "tied": draw.random() < 0.5, "vocab_size": draw.choice([100, 101])}
    shape["num_key_value_heads"] = draw.choice([1, 2, 4])
    shape["head_dim"] = draw.choice([16, 32, 64])  # of four heads beside 128 hidden
    if family == "mistral":
        shape["sliding_window"] = draw.choice([3, 5])
    if family == "qwen3_moe":
        shape |= {"mlp_only_layers": sorted(draw.sample(range(layers), draw.randint(0, layers - 1))), "norm_topk_prob": draw.random() < 0.5}
    tensor, pipeline, context = draw.choice([one for one in _sizes() if one[1] <= layers])
    copies = draw.choice([one for one in (1, 2) if tensor * pipeline * context * one <= 4])
    layout: dict[str, Any] = {"tensor_parallel": tensor, "pipeline_parallel": pipeline, "context_parallel": context}
    layout["sequence_parallel"] = tensor > 1 and (family == "qwen3_moe" or draw.random() < 0.5)
    if pipeline > 1:
        layout |= _stages(draw, layers, pipeline)
    if family == "qwen3_moe":
        of_a_stage = tensor * context * copies
        layout["expert_parallel"] = draw.choice([one for one in (1, 2, 4) if of_a_stage % one == 0])
        left = of_a_stage // layout["expert_parallel"]
        layout["expert_tensor_parallel"] = draw.choice([one for one in (1, 2) if left % one == 0])
    layout["recompute"] = draw.choice(["none", "selective", "full"])
    if layout["recompute"] == "selective":
        layout["recompute_modules"] = draw.choice([None, ["core_attn"], ["core_attn", "moe" if family == "qwen3_moe" else "mlp"]])
    layout["overlap_grad_reduce"] = draw.random() < 0.3
    return tensor * pipeline * context * copies, family, shape, layout, draw.choice([1, 2, 6, TokenBudget(20), TokenBudget(13)])


def _sizes() -> list[tuple[int, int, int]]:
    sizes = (1, 2, 4)
    return [(tensor, pipeline, context) for tensor in sizes for pipeline in sizes for context in sizes if tensor * pipeline * context <= 4]


def _stages(draw: random.Random, layers: int, pipeline: int) -> dict[str, Any]:
    virtual = draw.choice([one for one in (1, 2, 3) if pipeline * one <= layers])
    parts = pipeline * virtual
    if draw.random() < 0.5:
        return {"virtual_pipeline_parallel": virtual}
    given = [0, *([1] * (parts - 2)), 0]
    for _ in range(layers - sum(given)):
        given[draw.randrange(parts)] += 1
    return {"virtual_pipeline_parallel": virtual, "pipeline_layers": given}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_combinations(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for number in range(CASES):
        world_size, family, shape, layout, cut = case = drawn(draw)
        path, vocab = tiny(tmp_path / str(number), family, **shape), shape["vocab_size"]
        cases: list[tuple[Any, ...]] = [(check, path, vocab, layout) for check in (check_forward, check_distributions)]
        cases.append((check_gradients, path, vocab, layout, None, [cut]))
        with named(number, seed, case):
            ranks(world_size, check_many, cases)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_combinations_of_critics_replay_and_adapters(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    draw = random.Random(1000 + seed)
    for number in range(CASES):
        world_size, family, shape, layout, _ = case = drawn(draw)
        folder, shape = tmp_path / str(number), {name: value for name, value in shape.items() if name != "vocab_size"}
        folder.mkdir()
        base = tiny(folder / "base", family, **shape)
        cases: list[tuple[Any, ...]] = [(check_values, *_critic(folder, base, family, shape), layout, "reward_model")]
        if family == "qwen3_moe":
            cases.append((check_replayed, base, tiny(folder / "new", family, seed=1, **shape), layout, None))
        with named(number, seed, case):
            ranks(world_size, check_many, cases)
        if _can_have_adapters(shape, layout):
            targets = LINEAR_LAYERS if layout.get("expert_tensor_parallel", 1) == 1 else ATTENTION
            adapters = make_adapters(base, folder / "adapters", targets)
            layout["distributed_optimizer"] = draw.random() < 0.5
            with named(number, seed, case):
                ranks(world_size, like_hugging_face, base, adapters, layout, expected_of(base, adapters), 1e-4)


def _critic(folder: Path, base: Path, family: Family, shape: dict[str, Any]) -> tuple[Path, Path, Any]:
    path, head = reward_model(folder / "critic", family, **shape)
    return path, base, head


def _can_have_adapters(shape: dict[str, Any], layout: dict[str, Any]) -> bool:
    """What the configuration's checks refuse has none."""
    layers, stages = layout.get("pipeline_layers"), layout["pipeline_parallel"]
    every_stage = layers is None or all(any(layers[stage::stages]) for stage in range(stages))
    return every_stage and shape["num_key_value_heads"] >= layout["tensor_parallel"]


@contextmanager
def named(number: int, seed: int, case: object) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"case {number} of seed {seed}: {case}") from error
