"""On a machine with a GPU (`make test-gpu`): the trainer against Hugging Face, memory that is let go, engines that get new weights.

Of the trainer the same functions run on a CPU in every test run; what engines do there is in tests/contracts.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import megatron_cases
import pytest
import torch
from engine_harness import PROMPT, Harness, Make, require
from gpu_checks import (
    TOLERANCES,
    as_ranks,
    attention_against_float64,
    gradients_against_float64,
    kernels_against_float64,
    offload_frees_memory,
    peaks_of_a_step,
    planned_peaks,
    step_against_hf,
    trainers_log_probs,
    without_gpu,
)
from megatron_cases import tiny
from support_models import Family, make_tiny_model
from test_contract_adapters import SOME
from test_contract_layouts import assert_follows
from test_megatron_lora import make_adapters
from test_megatron_oracle import check_many

from roll_lite.config.schema.models import LoraConfig
from roll_lite.distributed.strategy.base import TrainResult
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.weight_sync.update import checksum

CUDA = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="there is no GPU here")]
BOTH = [pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the GPU computes here")), pytest.param("cuda", marks=ON_GPU)]
ON_CPU = [pytest.mark.nightly, pytest.mark.skipif(CUDA, reason="the GPU computes here")]
FREED = 0.2
"""Of a tiny model's bytes at most so much stays: rotary tables, counters."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly if not CUDA else ())])
@pytest.mark.parametrize("device", BOTH)
def test_a_step_of_megatron_is_hugging_faces(tmp_path: Path, device: str, dtype: str) -> None:
    as_ranks(1, step_against_hf, tiny(tmp_path / "m", "qwen3"), device, dtype, {})


REAL = {"hidden": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
"""Qwen3-0.6B's sizes, in two layers."""
SMALL = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 3_003}
OTHER_STEPS: dict[str, tuple[Family, dict[str, Any]]] = {
    "recomputed in part": ("qwen2", {"recompute": "selective"}),
    "recomputed": ("llama", {"recompute": "full"}),
    "experts": ("qwen3_moe", {}),
    "experts, recomputed": ("qwen3_moe", {"recompute": "selective"}),
}


@pytest.mark.parametrize("device", BOTH)
def test_other_steps_are_hugging_faces(tmp_path: Path, device: str) -> None:
    """Recomputed, with experts, with adapters, and of real sizes: heads, grouped queries, vocabulary, rows longer than a kernel's tile. On
    a CPU with a small part of the vocabulary."""
    dtype = "bfloat16" if CUDA else "float32"
    cases: list[tuple[Any, ...]] = []
    for name, (family, layout) in OTHER_STEPS.items():
        cases.append((tiny(tmp_path / name, family), device, dtype, layout))
    for family in ("qwen3", "qwen3_moe"):
        path = tiny(tmp_path / f"adapted {family}", family, tied=False)
        cases.append((path, device, dtype, {}, make_adapters(path, tmp_path / f"adapters {family}")))
    shape, lengths = (REAL, (150, 400, 12, 300, 2, 90)) if CUDA else (SMALL, (150, 3, 40))
    cases.append((tiny(tmp_path / "real sizes", "qwen3", **shape), device, dtype, {}, None, lengths))
    as_ranks(1, check_many, [(step_against_hf, *case) for case in cases])


@pytest.mark.parametrize("device", BOTH)
def test_the_peak_of_a_step_is_what_plan_says(tmp_path: Path, device: str) -> None:
    """With more recomputed there is less of it. What kernels take beside their results is not planned."""
    given = tiny(tmp_path / "m", "qwen2", hidden=256, layers=4), device, "bfloat16" if CUDA else "float32"
    (peaks,) = as_ranks(1, peaks_of_a_step, *given)
    planned = without_gpu(planned_peaks, *given)
    assert peaks == pytest.approx(planned, rel=0.2 if CUDA else 0.1)
    assert peaks["none"] > peaks["selective"] > peaks["full"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("device", BOTH)
def test_a_checksum_is_the_same_wherever_the_tensor_lies(device: str, dtype: torch.dtype) -> None:
    tensor = (torch.randn(1000, 5000) * 100).to(dtype)  # more than a chunk
    assert checksum(tensor.to(device)) == checksum(tensor) != checksum(tensor.to(device).flip(0))


@pytest.mark.parametrize(("heads", "keys", "width"), [(4, 2, 64), (28, 4, 128), (16, 8, 128), (14, 2, 64), (8, 1, 128), (4, 4, 256)])
@pytest.mark.parametrize("device", BOTH)
def test_attention_of_packed_rows(device: str, heads: int, keys: int, width: int) -> None:
    """Of real models, and of a tensor rank of one; one row is longer than a kernel's tile."""
    attention_against_float64(device, heads, keys, width, (9, 300, 12, 40, 1, 129))


@pytest.mark.parametrize("device", BOTH)
def test_kernels_alone(device: str) -> None:
    """The output layer's log-probs and entropies, SwiGLU and its form for experts, the product of all experts."""
    kernels_against_float64(device)


CP2 = pytest.param({"context_parallel": 2}, id="CP2", marks=() if CUDA else pytest.mark.slow)


@pytest.mark.parametrize("layout", [pytest.param({}, id="one rank"), CP2])
@pytest.mark.parametrize("device", BOTH)
def test_gradients_of_each_parameter(tmp_path: Path, device: str, layout: dict[str, int]) -> None:
    """Also where two ranks share each row. On a GPU in both dtypes, whose attention kernels differ; experts in float32, since rounding
    sends some tokens to others."""
    ranks = layout.get("context_parallel", 1)
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"this wants {ranks} GPUs, and there is one")
    cases: list[tuple[Family, str]] = [("qwen3", "float32"), ("llama", "float32"), ("qwen3_moe", "float32")]
    cases += [("qwen3", "bfloat16"), ("llama", "bfloat16")] if device == "cuda" else []
    paths = {family: tiny(tmp_path / family, family, tied=family == "qwen3") for family, _ in cases}
    as_ranks(ranks, check_many, [(gradients_against_float64, paths[family], device, dtype, layout) for family, dtype in cases])


@pytest.mark.parametrize("device", BOTH)
def test_what_is_offloaded_is_free(tmp_path: Path, device: str) -> None:
    ((before, away, after),) = as_ranks(1, offload_frees_memory, tiny(tmp_path / "m"), device)
    # On a GPU a second strategy that stays is part of what is counted: half of the memory.
    assert away <= (FREED + (device == "cuda")) / (1 + (device == "cuda")) * before and after >= 0.9 * before


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")
@pytest.mark.parametrize("layout", [{"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}])
def test_two_gpus_over_nccl(tmp_path: Path, layout: dict[str, int]) -> None:
    as_ranks(2, step_against_hf, tiny(tmp_path / "m", "qwen3"), "cuda", "bfloat16", layout)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_computed_again_may_be_rounded_differently_on_a_gpu_alone(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_cases, "DEVICE", device)
    weight, result = torch.linspace(1, 2, 100), TrainResult({}, loss=1.5, grad_norm=2.5, lr=0.1)
    rounded, other = (replace(result, grad_norm=2.5 * (1 + by)) for by in (1e-6, 1e-2))
    with nullcontext() if device == "cuda" else pytest.raises(AssertionError):
        megatron_cases.assert_equal({"weight": weight * (1 + 1e-6)}, {"weight": weight})
    with nullcontext() if device == "cuda" else pytest.raises(AssertionError):
        megatron_cases.assert_repeats([rounded], [result])
    with pytest.raises(AssertionError):
        megatron_cases.assert_equal({"weight": weight.flip(0)}, {"weight": weight})
    with pytest.raises(AssertionError):
        megatron_cases.assert_repeats([other], [result])
    megatron_cases.assert_equal({"weight": weight}, {"weight": weight.clone()})
    megatron_cases.assert_repeats([result], [replace(result)])


def free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="there is no GPU here")
@pytest.mark.parametrize("lora", [None, SOME], ids=["whole weights", "adapters alone"])
@pytest.mark.parametrize("make", ["vllm", "sglang"])
async def test_an_engine_beside_a_trainer(tmp_path: Path, make: Make, lora: LoraConfig | None) -> None:
    """New weights by CUDA IPC, as `auto` chooses on one GPU, or adapters, which CUDA graphs then compute with; memory that is let go and
    taken again; log-probs of engine and trainer."""
    require(make)
    options: dict[str, Any] = {"gpu_memory_utilization": 0.3, "enforce_eager": lora is None}
    engine = await Harness.start(tmp_path / "m", make=make, dtype="bfloat16", lora=lora, **options)
    try:
        for seed in (101, 102):
            await engine.update(seed)
            assert engine.mean_difference(await engine.one(32)) < TOLERANCES["bfloat16"][0]
        before = free_bytes()
        await engine.strategy.offload(EngineMemory)
        assert free_bytes() > before + (256 << 20), "what an engine lets go is free for others"
        await engine.strategy.load(EngineMemory)
        assert engine.mean_difference(await engine.one(32)) < TOLERANCES["bfloat16"][0]
        sampled = await engine.one(64, temperature=1.0, seed=3)
        engine.save_reference()
        (trained,) = as_ranks(1, trainers_log_probs, engine.folder, "bfloat16", PROMPT, sampled.token_ids)
        mismatch = float((torch.tensor(sampled.log_probs) - trained).abs().mean())
        limit = TOLERANCES["bfloat16"][0] * (1 if lora is None else 2)  # merged for the trainer, adapters are rounded once more
        assert mismatch < limit, f"engine and trainer differ by {mismatch} nats on average"
    finally:
        await engine.stop()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=ON_CPU), pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize("make", ["vllm", "sglang"])
async def test_updates_come_while_an_engine_sleeps(tmp_path: Path, make: Make, device: str) -> None:
    """As in a run that shares its GPU, three times: all memory is let go without a copy, weights come, an update, the KV cache. On a GPU
    the CUDA graphs of the start compute with what came last, for batches of several sizes."""
    require(make)
    dtype, options = ("bfloat16", {"gpu_memory_utilization": 0.3, "enforce_eager": False}) if device == "cuda" else ("float32", {})
    engine = await Harness.start(tmp_path / "m", make=make, dtype=dtype, sleep="without_copy", **options)  # type: ignore[arg-type]
    try:
        for seed in (101, 102, 103):
            before = free_bytes() if CUDA else 0
            await engine.strategy.offload()
            assert not CUDA or free_bytes() > before + (256 << 20)
            with pytest.raises(RuntimeError, match="update them before"):
                await engine.strategy.load()
            await engine.strategy.load([EngineMemory.WEIGHTS])
            await engine.update(seed)
            assert await engine.strategy.weight_checksums() == engine.checksums()
            await engine.strategy.load([EngineMemory.KV_CACHE])
            for count in (1, 5):
                for completion in await engine.all([engine.request(32) for _ in range(count)]):
                    assert engine.mean_difference(completion) < TOLERANCES[dtype][0]
    finally:
        await engine.stop()


TWO = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("transport", "engines_gpu"),
    [pytest.param("cuda_ipc", "0", marks=ON_GPU), pytest.param("nccl", "1", marks=TWO), pytest.param("shared_memory", "", marks=ON_CPU)],
)
@pytest.mark.parametrize("make", ["vllm", "sglang"])
async def test_an_engine_follows_megatron(
    tmp_path: Path, make: Make, transport: str, engines_gpu: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates from a trainer of one rank, on the first GPU: the first bit for bit, the second, which it has computed, by log-probs."""
    require(make)
    with monkeypatch.context() as seen:
        if engines_gpu:
            seen.setenv("CUDA_VISIBLE_DEVICES", engines_gpu)
        engine = await Harness.start(tmp_path / "m", make=make, dtype="bfloat16", gpu_memory_utilization=0.3, enforce_eager=True)
    try:
        await assert_follows(engine, as_ranks, tmp_path, {}, transport)
        assert engine.mean_difference(await engine.one(32)) < TOLERANCES["bfloat16"][0]
    finally:
        await engine.stop()


@pytest.mark.nightly
@pytest.mark.skipif(CUDA, reason="the GPU computes here")
def test_log_probs_of_the_trainer_on_a_cpu(tmp_path: Path) -> None:
    """What an engine is compared with."""
    from megatron_cases import hf_log_probs
    from support_models import load_hf

    folder, response = make_tiny_model(tmp_path / "m"), [5, 9, 11]
    (found,) = as_ranks(1, trainers_log_probs, folder, "float32", PROMPT, response)
    with torch.no_grad():
        expected, _ = hf_log_probs(load_hf(folder), torch.tensor([*PROMPT, *response]), torch.tensor(1.0))
    torch.testing.assert_close(found, expected[len(PROMPT) - 1 :], rtol=1e-5, atol=1e-5)
