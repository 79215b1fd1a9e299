"""Megatron trainers in processes of their own that make two updates, and what they send worked out without them."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from roll_lite.config.schema.models import EngineStrategyConfig
from roll_lite.distributed.weight_sync.endpoints import WeightSender
from roll_lite.distributed.weight_sync.group import rendezvous_store
from roll_lite.distributed.weight_sync.plan import Membership, TransferPlan, plan_transfers

Ranks = Callable[..., list[Any]]
"""Of so many ranks a function, with arguments: what each returns."""

HOST, TIMEOUT_S = "127.0.0.1", 60.0


def nudge(tensor: torch.Tensor) -> None:
    """The same for a part of a tensor as for all of it."""
    tensor.add_(0.05 * torch.cos(50 * tensor))


def train(
    path: Path, folder: Path, workers: int, experts: int, port: int, transport: str, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """A rank: sends what it has loaded, changes all parameters, sends again, and saves what it has sent last."""
    from megatron_cases import started

    strategy = started(path, **options)
    rank = int(os.environ["RANK"])
    sender = WeightSender(strategy, rank)
    plan = plan_transfers(sender.export_plan(1 << 15), {0: workers}, dtype, experts)
    if rank == 0:
        (folder / "writing").write_bytes(pickle.dumps(plan))
        (folder / "writing").rename(folder / "plan")
    sender.connect(plan, plan.membership(1, transport, HOST, port, TIMEOUT_S))
    sender.send()
    with torch.no_grad():
        for parameter in {id(one): one for chunk in strategy._chunks for one in chunk.parameters()}.values():
            nudge(parameter)
    sender.send()
    sender.leave()
    strategy.save_hf(folder / "saved")


class Trainer:
    """Ranks that make two updates."""

    def __init__(
        self,
        ranks: Ranks,
        size: int,
        path: Path,
        folder: Path,
        engine: EngineStrategyConfig,
        transport: str,
        engine_dtype: torch.dtype,
        **options: Any,
    ) -> None:
        """`engine`: of the one that follows it."""
        folder.mkdir()
        self._store = rendezvous_store(HOST)
        self._folder = folder
        self._transport = transport
        workers = engine.tensor_parallel, engine.expert_parallel
        self.done = ThreadPoolExecutor(1).submit(
            ranks, size, train, path, folder, *workers, self._store.port, transport, engine_dtype, options
        )

    async def plan(self) -> tuple[TransferPlan, Membership]:
        file = self._folder / "plan"
        while not file.exists() and not self.done.done():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if not file.exists():
            self.done.result()
        plan: TransferPlan = pickle.loads(file.read_bytes())
        return plan, plan.membership(1, self._transport, HOST, self._store.port, TIMEOUT_S)
