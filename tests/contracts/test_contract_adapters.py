"""Adapters that come alone, beside the weights that the engine has read: what holds of whole weights holds of them (the tests are the
same), and every layout of a trainer leads to every layout of an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from engine_harness import Harness, Make, add_adapters, require
from megatron_ranks import RankPool
from safetensors.torch import load_file
from support_models import Family, load_hf
from test_contract_layouts import EP2, PP2, TP2, TP2_PP2, assert_serves, assert_serves_rounded, ranks_of
from test_contract_weights import (  # noqa: F401 (collected here once more, for another engine)
    test_a_response_goes_on_under_new_weights,
    test_an_update_is_not_finished_before_all_has_arrived,
    test_checksums_are_of_what_the_engine_holds,
    test_generates_what_the_new_weights_say,
    test_new_weights_come_while_the_cache_is_away,
    test_nothing_leaves_in_the_middle_of_an_update,
    test_nothing_of_the_old_weights_stays_in_the_prefix_cache,
    test_nothing_runs_on_half_loaded_weights,
    test_refusals_leave_the_engine_as_it_was,
    test_trainer_that_does_not_come_is_named_and_the_engine_goes_on,
)
from trainer_ranks import Trainer

from roll_lite.config.schema.models import LoraConfig
from roll_lite.distributed.weight_sync.group import TransferError
from roll_lite.distributed.weight_sync.update import checksum

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.slow]

SOME = LoraConfig(rank=3, alpha=5.0, targets=["k_proj", "o_proj", "up_proj"], engines="adapter")
"""Of each fused layer a part alone, of a rank between those that vLLM makes room for."""
ALL = LoraConfig(rank=6, alpha=13.0, engines="adapter", export="adapter")
"""With a scale that no binary number is."""
WIDE = {"hidden": 128}
"""Two key/value heads."""
ATTENTION = LoraConfig(rank=2, alpha=6.0, engines="adapter", export="adapter", targets=["q_proj", "v_proj", "o_proj"])


@pytest.fixture(scope="module", params=["vllm", pytest.param("sglang", marks=pytest.mark.nightly)])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    require(chosen)
    return chosen


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def adapted_engine(make: Make, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    harness = await Harness.start(
        tmp_path_factory.mktemp("adapted") / "m", max_model_len=1024, make=make, max_batched_tokens=1024, lora=SOME
    )
    yield harness
    await harness.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(adapted_engine: Harness) -> AsyncIterator[Harness]:
    yield adapted_engine
    await adapted_engine.strategy.resume()


async def assert_follows(engine: Harness, ranks: RankPool, folder: Path, layout: dict[str, int], **options: object) -> None:
    """Two updates from a trainer of this layout that has the engine's model: adapters that change nothing, and changed ones."""
    assert engine.lora is not None
    engine.reference = load_hf(engine.folder).to(engine.dtype)
    given: dict[str, Any] = {**layout, **options, "lora": engine.lora}
    trainer = Trainer(ranks, ranks_of(**layout), engine.folder, folder, engine.strategy.options, "auto", engine.dtype, **given)
    plan, membership = await trainer.plan()
    await engine.strategy.connect_weights(plan.first_member(0), membership)
    serves = assert_serves if engine.dtype == torch.float32 else assert_serves_rounded
    for sent in range(2):
        engine.version += 1
        await engine.strategy.update_weights(plan.routes, engine.version)
        if sent:
            await asyncio.to_thread(trainer.done.result)
            adapters = load_file(folder / "saved" / "adapter_model.safetensors")
            scale = engine.lora.alpha / engine.lora.rank
            engine.reference = load_hf(engine.folder)
            add_adapters(engine.reference, adapters, scale)
            engine.reference.to(engine.dtype)
            expected = {name: tensor * scale if ".lora_B." in name else tensor for name, tensor in adapters.items()}
            sums = {name: checksum(tensor.to(engine.dtype)) for name, tensor in expected.items()}
            assert await engine.strategy.weight_checksums() == sums
        await serves(engine)


async def test_an_update_that_breaks_off_half_way_changes_nothing(engine: Harness) -> None:
    await engine.connect(timeout_s=1.0)
    assert engine.plan is not None
    await engine.update(seed=171)
    held, said = await engine.strategy.weight_checksums(), await engine.one(24)
    await engine.strategy.begin_weight_update(engine.tensors)
    await engine.transfer(0, seed=172)
    with pytest.raises(TransferError, match="trainer rank 0 did not take part in bucket"):
        await engine.strategy.receive_bucket(engine.plan.routes[1:2])
    engine.assert_as_before(await engine.one(24), said)
    assert await engine.strategy.weight_checksums() == held
    await engine.connect()
    await engine.update(seed=173)
    assert await engine.strategy.weight_checksums() == engine.checksums() != held
    await assert_serves(engine)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("other", "workers"),
    [("vllm", 2), *(pytest.param(*case, marks=pytest.mark.nightly) for case in (("vllm", 1), ("sglang", 1), ("sglang", 2)))],
)
async def test_an_engine_follows_a_trainer(other: Make, workers: int, ranks: RankPool, tmp_path: Path) -> None:
    require(other)
    engine = await Harness.start(tmp_path / "model", "qwen3", make=other, shape=WIDE, lora=ALL, tensor_parallel=workers)
    try:
        await assert_follows(engine, ranks, tmp_path / "trainer", TP2_PP2 if workers == 1 else PP2)
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("other", ["vllm", "sglang"])
async def test_layouts(other: Make, workers: int, ranks: RankPool, tmp_path: Path) -> None:
    """Tied embeddings, and untied ones; bfloat16 engines of trainers in float32 and bfloat16."""
    require(other)
    families: dict[str, tuple[Family, bool]] = {"tied": ("qwen2", True), "untied": ("llama", False)}
    layouts = {"TP2": TP2, "PP2": PP2, "VPP2": PP2 | {"virtual_pipeline_parallel": 2}, "CP2": {"context_parallel": 2}, "one": {}}
    for name, (family, tied) in families.items():
        engine = await Harness.start(tmp_path / name, family, tied, make=other, layers=4, shape=WIDE, lora=ALL, tensor_parallel=workers)
        try:
            for layout, sizes in layouts.items():
                await assert_follows(engine, ranks, tmp_path / f"{name}{layout}", sizes)
        finally:
            await engine.stop()
    engine = await Harness.start(tmp_path / "half", dtype="bfloat16", make=other, shape=WIDE, lora=ALL, tensor_parallel=workers)
    try:
        await assert_follows(engine, ranks, tmp_path / "float32", TP2)
        await assert_follows(engine, ranks, tmp_path / "bfloat16", TP2, dtype="bfloat16")
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.parametrize(("workers", "shape"), [(2, {"hidden": 64}), (1, {"intermediate_size": 100}), (2, {"intermediate_size": 200})])
async def test_what_does_not_divide(make: Make, workers: int, shape: dict[str, int], tmp_path: Path) -> None:
    """Fewer key/value heads than workers, and feed-forward rows: on a CPU SGLang fills up with zeros."""
    engine = await Harness.start(tmp_path / "m", make=make, lora=ALL, tensor_parallel=workers, shape=shape)
    try:
        await engine.update(seed=5)
        await assert_serves(engine)
        assert await engine.strategy.weight_checksums() == engine.checksums()
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("engine_layout", [{}, TP2, TP2 | EP2], ids=["one", "TP2", "EP2"])
@pytest.mark.parametrize("other", ["vllm", "sglang"])
async def test_attention_beside_experts(other: Make, engine_layout: dict[str, int], ranks: RankPool, tmp_path: Path) -> None:
    require(other)
    engine = await Harness.start(tmp_path / "m", "qwen3_moe", False, make=other, shape=WIDE, lora=ATTENTION, **engine_layout)
    try:
        for name, layout in {"EP2": EP2, "TP2": TP2, "PP2": PP2}.items():
            options = {"sequence_parallel": True} if "tensor_parallel" in layout else {}
            await assert_follows(engine, ranks, tmp_path / name, layout, **options)
    finally:
        await engine.stop()
