"""On a machine with a GPU (`make test-gpu`): the trainer against Hugging Face, memory that is let go, engines that get new weights.

Of the trainer the same functions run on a CPU in every test run; what engines do there is in tests/contracts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import PROMPT, Harness, Make, require
from gpu_checks import TOLERANCES, as_ranks, attention_against_float64, offload_frees_memory, step_against_hf, trainers_log_probs
from megatron_cases import tiny
from support_models import make_tiny_model
from test_contract_adapters import SOME
from test_contract_layouts import assert_follows

from roll_lite.config.schema.models import LoraConfig
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.weight_sync.update import checksum

CUDA = torch.cuda.is_available()
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="there is no GPU here")]
BOTH = [pytest.param("cpu", marks=pytest.mark.skipif(CUDA, reason="the GPU computes here")), pytest.param("cuda", marks=ON_GPU)]
FREED = 0.2
"""Of a tiny model's bytes at most so much stays: rotary tables, counters."""


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("device", BOTH)
def test_a_step_of_megatron_is_hugging_faces(tmp_path: Path, device: str, dtype: str) -> None:
    as_ranks(1, step_against_hf, tiny(tmp_path / "m", "qwen3"), device, dtype, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("device", BOTH)
def test_a_checksum_is_the_same_wherever_the_tensor_lies(device: str, dtype: torch.dtype) -> None:
    tensor = (torch.randn(1000, 5000) * 100).to(dtype)  # more than a chunk
    assert checksum(tensor.to(device)) == checksum(tensor) != checksum(tensor.to(device).flip(0))


@pytest.mark.parametrize("device", BOTH)
def test_attention_of_packed_rows(device: str) -> None:
    attention_against_float64(device)


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
        before, said = free_bytes(), await engine.one(32)
        await engine.strategy.offload(EngineMemory)
        assert free_bytes() > before + (256 << 20), "what an engine lets go is free for others"
        await engine.strategy.load(EngineMemory)
        assert (await engine.one(32)).token_ids == said.token_ids
        sampled = await engine.one(64, temperature=1.0, seed=3)
        engine.save_reference()
        (trained,) = as_ranks(1, trainers_log_probs, engine.folder, "bfloat16", PROMPT, sampled.token_ids)
        mismatch = float((torch.tensor(sampled.log_probs) - trained).abs().mean())
        limit = TOLERANCES["bfloat16"][0] * (1 if lora is None else 2)  # merged for the trainer, adapters are rounded once more
        assert mismatch < limit, f"engine and trainer differ by {mismatch} nats on average"
    finally:
        await engine.stop()


TWO = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs here")]
ON_CPU = [pytest.mark.nightly, pytest.mark.skipif(CUDA, reason="the GPU computes here")]


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
