"""From any layout of the trainer to any layout of an engine: what an engine generates and holds after updates is what Hugging Face
generates and holds. The trainers are Megatron's, in processes of their own."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import CLEAR, SHARPNESS, Harness, Make, assert_log_probs, log_probs_of, require
from megatron_ranks import RankPool
from support_models import Family, by_checkpoint, load_hf, make_tiny_model
from trainer_ranks import Ranks, Trainer, nudge

from roll_lite.config.schema.models import LoraConfig
from roll_lite.distributed.weight_sync.plan import ExportPlan, TransferPlan, plan_transfers
from roll_lite.distributed.weight_sync.update import checksum

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOKENS = 24


def nudged(path: Path, dtype: torch.dtype) -> Any:
    """Worked out without the trainer: every tensor of the checkpoint, changed as its ranks change their parts."""
    model = load_hf(path)
    with torch.no_grad():
        for parameter in model.parameters():
            nudge(parameter)
    return model.to(dtype)


async def assert_serves(engine: Harness, tolerance: float = 1e-4) -> None:
    completion = await engine.one(TOKENS)
    engine.assert_greedy(completion, TOKENS)
    assert_log_probs(completion, engine.hf_logits(completion.token_ids), tolerance)


async def assert_serves_rounded(engine: Harness) -> None:
    """In bfloat16, where two ways of adding up the same numbers differ: wherever Hugging Face's model leads clearly the engine has chosen
    its token, and the log-probs are near."""
    clear = 0
    for prompt in ((20, 7, 33, 41), (5, 60, 11), (80, 12, 12, 9, 31, 77)):
        completion = await engine.one(TOKENS, prompt, min_tokens=TOKENS)
        logits = engine.hf_logits(completion.token_ids, prompt, without_eos=True)
        (first, second), (best, _) = (found.unbind(1) for found in logits.topk(2))
        leads = first - second > CLEAR
        assert torch.equal(torch.tensor(completion.token_ids)[leads], best[leads])
        clear += int(leads.sum())
        told = torch.tensor(completion.log_probs)
        assert float((told - log_probs_of(engine.hf_logits(completion.token_ids, prompt), completion.token_ids)).abs().mean()) < 0.1
    assert clear > TOKENS, "a third of the places, at the least, are clear"


def ranks_of(
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    virtual_pipeline_parallel: int = 1,
    context_parallel: int = 1,
    expert_parallel: int = 1,
    expert_tensor_parallel: int = 1,
) -> int:
    """The smallest number of ranks that such a layout takes."""
    return pipeline_parallel * math.lcm(tensor_parallel * context_parallel, expert_parallel * expert_tensor_parallel)


async def assert_follows(
    engine: Harness, ranks: Ranks, folder: Path, layout: dict[str, int], transport: str = "auto", **options: Any
) -> TransferPlan:
    """Two updates from a trainer of this layout, of another model of the engine's shape."""
    layers = engine.reference.config.num_hidden_layers
    path = make_tiny_model(folder / "new", engine.family, engine.tied, layers=layers, seed=77, sharpness=SHARPNESS)
    size, options = ranks_of(**layout), layout | options
    trainer = Trainer(ranks, size, path, folder / "trainer", engine.strategy.options, transport, engine.dtype, **options)
    plan, membership = await trainer.plan()
    await engine.strategy.connect_weights(plan.first_member(0), membership)
    engine.version += 1
    seconds = await engine.strategy.update_weights(plan.routes, engine.version)
    assert seconds.keys() == {"receive", "load"} and min(seconds.values()) > 0
    engine.reference = load_hf(path).to(engine.dtype)
    held = {name: checksum(tensor) for name, tensor in by_checkpoint(engine.reference.state_dict()).items()}
    assert (await engine.strategy.weight_checksums()).items() <= held.items()
    await (assert_serves if engine.dtype == torch.float32 else assert_serves_rounded)(engine)
    engine.version += 1
    await engine.strategy.update_weights(plan.routes, engine.version)
    await asyncio.to_thread(trainer.done.result)
    if "lora" in options:
        engine.reference = load_hf(folder / "trainer" / "saved")
        weights = [model.model.layers[0].self_attn.q_proj.weight for model in (engine.reference, nudged(path, torch.float32))]
        assert not torch.equal(*weights), "the adapters are in it"
    else:
        engine.reference = nudged(path, engine.dtype)
    await (assert_serves if engine.dtype == torch.float32 else assert_serves_rounded)(engine)
    engine.plan = None  # the others' sender has to connect again
    return plan


@pytest.mark.one_in(2)
async def test_an_engine_follows_a_trainer_in_two_stages(engine: Harness, ranks: RankPool, tmp_path: Path) -> None:
    plan = await assert_follows(engine, ranks, tmp_path, {"pipeline_parallel": 2})
    assert plan.trainers == (0, 1)
    assert [route.sender for route in plan.routes][:4] == [0, 1, 0, 1], "the owners' buckets take turns: both send at once"


TP2, PP2, TP2_PP2 = {"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"tensor_parallel": 2, "pipeline_parallel": 2}
LAYOUTS = {"TP2": TP2, "PP2": PP2, "TP2 x PP2": TP2_PP2}
LORA = LoraConfig(rank=2, alpha=4, targets=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("other", ["vllm", "sglang"])
async def test_layouts(other: Make, workers: int, ranks: RankPool, tmp_path: Path) -> None:
    """Tied embeddings, and untied ones; adapters that are merged; both transports of the host."""
    require(other)
    families: dict[str, tuple[Family, bool]] = {"tied": ("qwen3", True), "untied": ("llama", False)}
    for name, (family, tied) in families.items():
        engine = await Harness.start(tmp_path / name, family, tied, make=other, tensor_parallel=workers)
        try:
            for number, (_, layout) in enumerate(LAYOUTS.items()):
                (tmp_path / f"{name}{number}").mkdir()
                await assert_follows(engine, ranks, tmp_path / f"{name}{number}", layout, ("auto", "gloo")[number % 2])
            (tmp_path / f"{name}lora").mkdir()
            await assert_follows(engine, ranks, tmp_path / f"{name}lora", PP2, lora=LORA)
        finally:
            await engine.stop()


VPP2 = PP2 | {"virtual_pipeline_parallel": 2}
CP2 = {"context_parallel": 2}
WIDE_LAYOUTS = {"PP2 x VPP2": VPP2, "CP2": CP2, "TP2 x PP2 x VPP2": TP2 | VPP2, "PP2 x VPP2 x CP2": VPP2 | CP2}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(("family", "tied"), [("qwen2", True), ("llama", False)])
@pytest.mark.parametrize("other", ["vllm", "sglang"])
async def test_interleaved_stages_and_ranks_that_share_tokens(
    other: Make, family: Family, tied: bool, workers: int, ranks: RankPool, tmp_path: Path
) -> None:
    """A rank's layers do not follow one another, and ranks have copies of what another one sends."""
    require(other)
    engine = await Harness.start(tmp_path / "model", family, tied, make=other, layers=4, tensor_parallel=workers)
    try:
        for number, (name, layout) in enumerate(WIDE_LAYOUTS.items()):
            (tmp_path / name).mkdir()
            plan = await assert_follows(engine, ranks, tmp_path / name, layout, ("auto", "gloo")[number % 2])
            assert len(plan.trainers) == layout.get("pipeline_parallel", 1), "one of the ranks that hold a tensor sends it"
    finally:
        await engine.stop()


EP2 = {"expert_parallel": 2}
EXPERT_LAYOUTS = {"EP2": EP2, "TP2": TP2, "PP2 x VPP2 x EP2": VPP2 | EP2, "TP2 x EP2": TP2 | EP2, "CP2 x EP2": CP2 | EP2}
EXPERT_LAYOUTS |= {"EP2 x ETP2": EP2 | {"expert_tensor_parallel": 2}}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine_layout", [{}, TP2, TP2 | EP2], ids=["one", "TP2", "EP2"])
@pytest.mark.parametrize("other", ["vllm", "sglang"])
async def test_experts_of_several_ranks(other: Make, engine_layout: dict[str, int], ranks: RankPool, tmp_path: Path) -> None:
    """To an engine of one worker, to two of which each has half of every expert, and to two of which each has half of the experts."""
    require(other)
    engine = await Harness.start(tmp_path / "model", "qwen3_moe", tied=False, make=other, layers=4, **engine_layout)
    try:
        for number, (name, layout) in enumerate(EXPERT_LAYOUTS.items()):
            (tmp_path / name).mkdir()
            options = {"sequence_parallel": True} if "tensor_parallel" in layout else {}
            await assert_follows(engine, ranks, tmp_path / name, layout, ("auto", "gloo")[number % 2], **options)
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("other", ["vllm", "sglang"])
async def test_a_float32_trainer_sends_bfloat16(other: Make, workers: int, ranks: RankPool, tmp_path: Path) -> None:
    """Half the bytes, bit for bit what the engine would have made of the whole ones, and served as Hugging Face does in bfloat16."""
    require(other)
    engine = await Harness.start(tmp_path / "model", dtype="bfloat16", make=other, tensor_parallel=workers)
    try:
        plan = await assert_follows(engine, ranks, tmp_path, TP2)
        assert plan.nbytes == plan_transfers(ExportPlan(tuple(one for route in plan.routes for one in route.tensors)), {0: workers}).nbytes
        assert {one.dtype for route in plan.routes for one in route.tensors} == {torch.bfloat16}
    finally:
        await engine.stop()
