"""Engines on the trainer's GPUs: each worker gets the whole model from the rank on its own GPU, whichever rank gathers a tensor.

GPUs are said to be there. Instead of CUDA IPC, shared memory crosses between the processes; instead of NCCL, gloo broadcasts.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron_cases import started, tiny
from megatron_ranks import RankPool
from safetensors.torch import load_file

from roll_lite.distributed.weight_sync import memory
from roll_lite.distributed.weight_sync.endpoints import TRANSPORTS, WeightReceiver, WeightSender
from roll_lite.distributed.weight_sync.group import Home, StaleEpoch, TransferError
from roll_lite.distributed.weight_sync.plan import TransferPlan, by_bucket, plan_transfers

BUCKET = 1 << 16


@contextmanager
def own_gpu(rank: int) -> Iterator[None]:
    """A GPU for this rank and for its engine's worker, which sees no other."""
    home = Home("one machine", f"GPU-{rank}", (f"GPU-{rank}",), rank)
    with (
        patch.object(Home, "here", staticmethod(lambda: home)),
        patch.object(memory, "GPU", "cpu"),
        patch.dict(TRANSPORTS, cuda_ipc=TRANSPORTS["shared_memory"]),
    ):
        TRANSPORTS.pop("nccl")
        yield


def connected(sender: WeightSender, receiver: WeightReceiver, epoch: int, dtype: torch.dtype, pool: ThreadPoolExecutor) -> TransferPlan:
    """Trainer and engines of one worker each, as many as ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with patch("torch.cuda.is_available", return_value=True):
        export = sender.export_plan(BUCKET)
    port = [sender.host("127.0.0.1", 60.0) if rank == 0 and epoch == 1 else getattr(sender._store, "port", 0)]
    dist.broadcast_object_list(port, 0)
    plan = plan_transfers(export, dict.fromkeys(range(world), 1), dtype)
    membership = plan.membership(epoch, "auto", "127.0.0.1", port[0], 60.0)
    joining = pool.submit(receiver.connect, membership.plain(), plan.first_member(rank))
    sender.connect(plan, membership)
    joining.result(60)
    return plan


def take_all(receiver: WeightReceiver, plan: TransferPlan, broken: bool = False) -> dict[str, torch.Tensor]:
    model: dict[str, torch.Tensor] = {}

    def load(arrived: Any) -> None:
        if broken and model:
            raise IndexError("no such expert")
        model.update({name: tensor.clone() for name, tensor in arrived})

    buckets = [[route.plain() for route in routes] for routes in by_bucket(plan.routes)]
    for routes, following in zip(buckets, [*buckets[1:], []], strict=True):
        receiver.load(routes, lambda again: None, load, following)
    receiver.finish(lambda: None)
    return model


def update(path: Path, layout: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Two updates; what this rank's engine has then, and what this rank has sent."""
    strategy, rank = started(path, **layout), dist.get_rank()
    sender, receiver = WeightSender(strategy, rank), WeightReceiver()
    with own_gpu(rank), ThreadPoolExecutor(2) as pool:
        plan = connected(sender, receiver, 1, dtype, pool)
        for _ in range(2):
            taking: Future[dict[str, torch.Tensor]] = pool.submit(take_all, receiver, plan)
            sender.send()
            model = taking.result(60)
        buffers = sender._transport._transports["cuda_ipc"]._buffers  # type: ignore[union-attr]
        dist.barrier()  # rank 0 has the store
        readers = [plan.members[reader] for _, readers in buffers for reader in readers]
        receiver.leave()
        sender.leave()
    return {"model": model, "nbytes": sender.nbytes, "readers": readers, "all": plan.nbytes, "plan": plan}


CASES = {
    "TP2": ("qwen2", {"tensor_parallel": 2}),
    "PP2": ("llama", {"pipeline_parallel": 2}),
    "DP2": ("qwen3", {}),
    "EP2": ("qwen3_moe", {"expert_parallel": 2}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_engine_gets_the_whole_model_from_the_rank_on_its_gpu(ranks: RankPool, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    family, layout = CASES[name]
    path = tiny(tmp_path / "model", family)
    expected = {key: tensor.to(dtype) for file in path.glob("*.safetensors") for key, tensor in load_file(file).items()}
    for rank, found in enumerate(ranks(2, update, path, layout, dtype)):
        assert found["model"].keys() == expected.keys()
        assert all(torch.equal(found["model"][key], tensor) for key, tensor in expected.items())
        assert found["nbytes"] == {"cuda_ipc": found["all"]} and found["readers"] == [f"engine {rank} worker 0"]


def break_off(path: Path) -> dict[str, torch.Tensor]:
    """Rank 1's engine fails in the middle of an update; all get the whole of the next one."""
    strategy, rank = started(path, tensor_parallel=2), dist.get_rank()
    sender, receiver = WeightSender(strategy, rank), WeightReceiver()
    with own_gpu(rank), ThreadPoolExecutor(2) as pool:
        plan = connected(sender, receiver, 1, torch.float32, pool)
        taking = pool.submit(take_all, receiver, plan, rank == 1)
        with pytest.raises(TransferError):
            sender.send()
        with pytest.raises(IndexError if rank == 1 else StaleEpoch):
            taking.result(60)
        plan = connected(sender, receiver, 2, torch.float32, pool)
        taking = pool.submit(take_all, receiver, plan)
        sender.send()
        model = taking.result(60)
        dist.barrier()
    return model


def test_ranks_whose_engines_break_off_keep_in_step(ranks: RankPool, tmp_path: Path) -> None:
    """Handing on is a collective of all ranks: one that stopped in the middle would leave the others waiting."""
    path = tiny(tmp_path / "model", "qwen2")
    expected = load_file(path / "model.safetensors")
    for model in ranks(2, break_off, path):
        assert all(torch.equal(model[key], tensor) for key, tensor in expected.items())
