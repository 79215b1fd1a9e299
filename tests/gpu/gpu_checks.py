"""What is checked on a GPU, as functions of one rank: they run on the device that there is, so that a CPU proves all but its kernels."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

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


def step_against_hf(
    folder: Path, device: str, dtype: str, layout: dict[str, Any], adapters: Path | None = None, lengths: Sequence[int] = LENGTHS
) -> None:
    """Log-probs of packed rows, and the gradient norm of a training step; with adapters of what they train."""
    from megatron_cases import batch_of, hf_log_probs, hf_loss, started, weighted_loss
    from support_models import load_hf
    from support_passes import forward, train_step

    from roll_lite.config.schema.models import OptimizerConfig
    from roll_lite.data.microbatch import TokenBudget

    oracle, options = load_hf(folder), dict(layout)
    if adapters is not None:
        from test_megatron_lora import hf_adapted, lora_of

        oracle, options = hf_adapted(folder, adapters)[0], layout | {"lora": lora_of(adapters)}
    strategy = started(folder, OptimizerConfig(lr=1e-30, clip_grad=0.0), dtype, **options)
    assert strategy.device.type == device
    batch, budget = batch_of(lengths, vocab=oracle.config.vocab_size), TokenBudget(max(lengths) * 3 // 2)
    found = forward(strategy, batch.select(["input_ids", "temperature"]), ["log_probs"], budget)
    result = train_step(strategy, batch, weighted_loss, ["log_probs"], budget)
    hf_loss(oracle, batch, entropy=False).backward()
    norm = float(torch.stack([one.grad.norm() for one in oracle.parameters() if one.grad is not None]).norm())
    of_log_probs, of_norm = TOLERANCES[dtype]
    assert abs(result.grad_norm / norm - 1) < of_norm, f"{folder.name}: gradient norm {result.grad_norm}, Hugging Face's is {norm}"
    if found is None:
        return
    for row in range(len(batch)):
        with torch.no_grad():
            expected, _ = hf_log_probs(oracle, batch.ragged("input_ids").row(row), batch.tensor("temperature")[row])
        difference = float((found.ragged("log_probs").row(row) - expected).abs().mean())
        assert difference < of_log_probs, f"{folder.name}, row {row}: log-probs are off by {difference} nats on average"


def attention_against_float64(device: str, heads: int, keys: int, width: int, lengths: Sequence[int] = LENGTHS) -> None:
    """Packed rows, grouped queries, with and without a window: what the device uses against SDPA in float64 on the host."""
    from test_packed_attention import attention

    from roll_lite.distributed.strategy.megatron.packed_rows import PackedRows, on_device

    dtype, tolerance = (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 1e-5)
    rows = PackedRows.of(torch.tensor(lengths))
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(sum(lengths), 1, count, width, generator=generator, dtype=torch.float64) for count in (heads, keys, keys)]
    for window in (None, 6):
        results = []
        for where, kind in ((torch.device(device), dtype), (torch.device("cpu"), torch.float64)):
            parts = [part.to(where, kind).requires_grad_() for part in whole]
            packed = on_device(rows, lambda tensor, where=where: tensor.to(where))  # type: ignore[misc]
            output = attention(window, heads, keys, width)(*parts, None, packed_seq_params=packed)
            results.append([output, *torch.autograd.grad(output.float().square().sum(), parts)])
        for found, expected in zip(*results, strict=True):
            difference = float((found.cpu().double() - expected).norm() / expected.norm())
            assert difference < tolerance, f"window {window}: relative difference {difference}"


GRADIENTS = {("cpu", "float32"): 1e-5, ("cuda", "float32"): 1e-4, ("cuda", "bfloat16"): 5e-2}
"""Relative difference of each parameter's gradient; relative to the largest of all where one is next to nothing."""


def gradients_against_float64(folder: Path, device: str, dtype: str, layout: dict[str, Any], lengths: Sequence[int] = LENGTHS) -> None:
    """Of each parameter, from a training step over packed rows; Hugging Face's model has one row at a time, in float64 on the host."""
    from megatron_cases import assert_same, batch_of, expected_of, hf_loss, own_gradients, started, weighted_loss
    from support_models import by_checkpoint, load_hf
    from support_passes import train_step

    from roll_lite.config.schema.models import OptimizerConfig
    from roll_lite.data.microbatch import TokenBudget

    oracle, batch = load_hf(folder, torch.float64), batch_of(lengths)
    oracle.set_experts_implementation("eager")  # grouped products have no float64
    hf_loss(oracle, batch).backward()
    expected = by_checkpoint({name: one.grad.float() for name, one in oracle.named_parameters() if one.grad is not None})
    strategy = started(folder, OptimizerConfig(lr=1e-30, clip_grad=0.0), dtype, distributed_optimizer=False, **layout)
    assert strategy.device.type == device
    train_step(strategy, batch, weighted_loss, ["log_probs", "entropy"], TokenBudget(max(lengths) * 3 // 2))
    own = own_gradients(strategy)
    if own:
        assert_same(own, expected_of(own, expected, layout), GRADIENTS[device, dtype])


def kernels_against_float64(device: str) -> None:
    """Values and gradients of each kernel alone, against its formula in float64 on the host."""
    from test_fused_kernels import fused, swiglu

    from roll_lite.distributed.strategy.megatron.experts import _GroupedProduct
    from roll_lite.distributed.strategy.megatron.log_probs import log_probs_and_entropy
    from roll_lite.distributed.strategy.megatron.vocabulary import Vocabulary

    generator, (dtype, tolerance) = torch.Generator().manual_seed(0), (torch.bfloat16, 2e-2) if device == "cuda" else (torch.float32, 1e-5)
    counts, targets, temperatures = [70, 0, 122, 8], torch.randint(0, 3000, (200,), generator=generator), torch.linspace(0.5, 1.5, 200)

    def head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        where = hidden.device
        vocabulary = Vocabulary(3000, 3000, None, targets.to(where), temperatures.to(where), block_words=1000)
        return torch.stack(log_probs_and_entropy(hidden, weight, vocabulary, entropy=True))  # type: ignore[arg-type]

    def plain_head(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        log_probs = (hidden @ weight.T / temperatures[:, None]).log_softmax(-1)
        return torch.stack([log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(-1)])

    def grouped(tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return _GroupedProduct.apply(tokens, torch.tensor(counts).cumsum(0).int().to(tokens.device), *weights)

    def one_by_one(tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([part @ weight.T for part, weight in zip(tokens.split(counts), weights, strict=True)])

    def of_experts(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fused(x, weights.float())

    cases: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor], list[tuple[int, ...]]]] = {
        "output layer": (head, plain_head, [(200, 64), (3000, 64)]),
        "SwiGLU": (lambda x: fused(x[:, None], None)[:, 0], lambda x: swiglu(x, None), [(200, 128)]),
        "SwiGLU of experts": (of_experts, swiglu, [(200, 128), (200, 1)]),
        "product of experts": (grouped, one_by_one, [(200, 64), *[(48, 64)] * 4]),
    }
    for name, (kernel, plain, shapes) in cases.items():
        whole = [torch.randn(shape, generator=generator).mul(shape[-1] ** -0.25).to(dtype) for shape in shapes]
        results = []
        for function, where, kind in ((kernel, device, dtype), (plain, "cpu", torch.float64)):
            parts = [part.to(where, kind).requires_grad_() for part in whole]
            value = function(*parts)
            slope = torch.linspace(-1, 1, value.numel(), device=where).view_as(value)
            results.append([value, *torch.autograd.grad((value.float() * slope).sum() if kind == dtype else (value * slope).sum(), parts)])
        for found, expected in zip(*results, strict=True):
            difference = float(((found.cpu().double() - expected).norm() / expected.norm().clamp(min=1e-9)).detach())
            assert difference < tolerance, f"{name}: relative difference {difference}"


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
    # What came back is what went; a GPU's kernels add up in any order.
    assert losses[0] == (pytest.approx(losses[1], rel=2e-2) if device == "cuda" else losses[1])
    return before, away, held_by(moved, device)


RECOMPUTE: tuple[Any, ...] = ("none", "selective", "full")


def peaks_of_a_step(folder: Path, device: str, dtype: str) -> dict[str, int]:
    """Bytes beyond weights, gradients and moments at the peak of a step of one micro-batch, by what is recomputed."""
    from megatron_cases import started

    from roll_lite.config.schema.models import OptimizerConfig
    from roll_lite.data.microbatch import RowsAtATime

    batch, loss = rows_and_loss()
    found = {}
    for recompute in RECOMPUTE:
        strategy = started(folder, OptimizerConfig(lr=1e-3), dtype, recompute=recompute)

        def step(strategy: Any = strategy) -> None:
            strategy.train_step(batch, loss, loss.outputs, strategy.plan(batch.lengths, RowsAtATime(len(batch))))

        step()  # moments are made
        # cuBLAS keeps its workspaces, which a first step has made.
        before = int(torch.cuda.memory_allocated()) if device == "cuda" else held_by(strategy, device)
        found[recompute] = peak_of(step, before, device)
    return found


def peak_of(work: Callable[[], None], before: int, device: str) -> int:
    """Bytes beyond `before`, which are held already."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        work()
        return int(torch.cuda.max_memory_allocated()) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(event.nbytes() for event in sorted(changes, key=lambda one: one.start_ns())))


def planned_peaks(folder: Path, device: str, dtype: Any) -> dict[str, int]:
    """What `roll-lite plan` counts for the same steps, on tensors without contents."""
    from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
    from roll_lite.distributed.strategy.base import ModelSpec
    from roll_lite.distributed.strategy.megatron.traced import trace
    from roll_lite.models.hf_config import read_config

    batch, loss = rows_and_loss()
    planned = {}
    for recompute in RECOMPUTE:
        layout = MegatronStrategyConfig(recompute=recompute)
        spec = ModelSpec(ModelConfig(path=folder, dtype=dtype), layout, "model.path", OptimizerConfig(lr=1e-3))
        found = trace(spec, read_config(folder), 1, 0, batch, loss, loss.outputs, on_gpu=device == "cuda")
        planned[recompute] = max(found.training + found.inputs, found.update)
    return planned


def rows_and_loss() -> tuple[Any, Any]:
    from roll_lite.planning.memory import rows
    from roll_lite.workers.objectives import ActorLoss

    loss = ActorLoss()
    return rows(16, 64, 256, loss.columns), loss


def without_gpu(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments) in a process that sees no GPU."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_hide_gpus) as pool:
        return pool.submit(function, *arguments).result(timeout=300)


def _hide_gpus() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


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
