"""What is checked on a GPU, as functions of one rank: they run on the device that there is, so that a CPU proves all but its kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TOLERANCES = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.05)}
"""Mean difference of log-probs from Hugging Face in float32, in nats; relative difference of the gradient norm."""
LENGTHS = (9, 40, 12, 40, 7, 25)


def as_ranks(count: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(*arguments) in fresh processes, the ranks of a group."""
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(count, get_context("spawn")) as pool:
        running = [pool.submit(_as_rank, rank, count, f"{folder}/store", function, arguments) for rank in range(count)]
        return [each.result(timeout=300) for each in running]


def _as_rank(rank: int, count: int, store: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=dist.FileStore(store, count), rank=rank, world_size=count)
    try:
        return function(*arguments)
    finally:
        dist.destroy_process_group()


# ---------------------------------------------------------------- the trainer


def step_against_hf(folder: Path, device: str, dtype: str, layout: dict[str, int]) -> None:
    """Log-probs of packed rows, and the gradient norm of a training step."""
    from megatron_cases import batch_of, hf_gradients, hf_log_probs, started, weighted_loss
    from support_models import load_hf
    from support_passes import forward, train_step

    from roll_lite.config.schema.models import OptimizerConfig
    from roll_lite.data.microbatch import TokenBudget

    strategy = started(folder, OptimizerConfig(lr=1e-30, clip_grad=0.0), dtype, **layout)
    assert strategy.device.type == device
    batch = batch_of(LENGTHS)
    found = forward(strategy, batch.select(["input_ids", "temperature"]), ["log_probs"], TokenBudget(60))
    result = train_step(strategy, batch, weighted_loss, ["log_probs"], TokenBudget(60))
    _, gradients = hf_gradients(folder, batch, entropy=False)
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    of_log_probs, of_norm = TOLERANCES[dtype]
    assert abs(result.grad_norm / norm - 1) < of_norm, f"gradient norm {result.grad_norm}, Hugging Face's is {norm}"
    if found is None:
        return
    oracle = load_hf(folder)
    for row in range(len(batch)):
        with torch.no_grad():
            expected, _ = hf_log_probs(oracle, batch.ragged("input_ids").row(row), batch.tensor("temperature")[row])
        difference = float((found.ragged("log_probs").row(row) - expected).abs().mean())
        assert difference < of_log_probs, f"row {row}: log-probs are off by {difference} nats on average"


def attention_against_float64(device: str) -> None:
    """Packed rows, grouped queries, with and without a window: what the device uses against SDPA in float64 on the host."""
    from test_packed_attention import HEADS, KEYS, attention

    from roll_lite.distributed.strategy.megatron.packed_rows import PackedRows, on_device

    width, dtype, tolerance = (64, torch.bfloat16, 2e-2) if device == "cuda" else (64, torch.float32, 1e-5)
    rows = PackedRows.of(torch.tensor(LENGTHS))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(sum(LENGTHS), 1, heads, width, generator=generator, dtype=torch.float64) for heads in (HEADS, KEYS, KEYS)]
    for window in (None, 6):
        results = []
        for where, kind in ((torch.device(device), dtype), (torch.device("cpu"), torch.float64)):
            parts = [part.to(where, kind).requires_grad_() for part in whole]
            packed = on_device(rows, lambda tensor, where=where: tensor.to(where))  # type: ignore[misc]
            output = attention(window)(*parts, None, packed_seq_params=packed)
            results.append([output, *torch.autograd.grad(output.float().square().sum(), parts)])
        for found, expected in zip(*results, strict=True):
            difference = float((found.cpu().double() - expected).norm() / expected.norm())
            assert difference < tolerance, f"window {window}: relative difference {difference}"


def offload_frees_memory(folder: Path, device: str) -> tuple[int, int, int]:
    """Bytes on the device before, while all is away, and after; training goes on as if nothing had been moved."""
    from megatron_cases import batch_of, started, weighted_loss
    from support_passes import train_step

    from roll_lite.config.schema.models import OptimizerConfig
    from roll_lite.distributed.strategy.base import StateGroup

    dtype = "bfloat16" if device == "cuda" else "float32"
    moved, stays = (started(folder, OptimizerConfig(lr=1e-3), dtype) for _ in range(2))
    for strategy in (moved, stays):
        train_step(strategy, batch_of(LENGTHS), weighted_loss, ["log_probs"], 6)
    before = held_by(moved, device)
    moved.offload(StateGroup)
    away = held_by(moved, device)
    moved.load(StateGroup)
    losses = [train_step(strategy, batch_of(LENGTHS, seed=4), weighted_loss, ["log_probs"], 6).loss for strategy in (moved, stays)]
    assert losses[0] == losses[1], "what came back is what went"
    return before, away, held_by(moved, device)


def held_by(strategy: Any, device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()  # as large as a tiny model, and no state of it
        return int(torch.cuda.memory_allocated())
    tensors = [part for parameter in strategy._model.parameters() for part in (parameter.data, parameter.main_grad)]
    return sum({part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in tensors}.values())


def trainers_log_probs(folder: Path, dtype: str, prompt: Sequence[int], response: Sequence[int]) -> torch.Tensor:
    from megatron_cases import started
    from support_passes import forward

    from roll_lite.data.proto import DataProto
    from roll_lite.data.ragged import Ragged

    ids = torch.tensor([*prompt, *response])
    batch = DataProto({"input_ids": Ragged.from_rows([ids]), "temperature": torch.ones(1)})
    found = forward(started(folder, None, dtype), batch, ["log_probs"], 1)
    assert found is not None
    return found.ragged("log_probs").row(0)[len(prompt) - 1 :]
