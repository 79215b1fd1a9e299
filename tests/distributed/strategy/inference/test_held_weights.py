"""Experts that workers share, put together again. Workers are threads, the engine's classes stand-ins; real ones: tests/contracts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from roll_lite.distributed.strategy.inference.held_weights import Layers, held_weights

EXPERTS, ROWS, COLUMNS = 4, 6, 5


class Experts(nn.Module):
    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        super().__init__()
        self.gate_up, self.down = gate_up, down


class Absent(nn.Module):
    """Any other class of an engine."""


def layers(rank: int, parts: list[Any], barrier: Barrier) -> Layers:
    def gather(part: torch.Tensor, dim: int) -> torch.Tensor:
        parts[rank] = part
        barrier.wait(10)
        whole = torch.cat(parts, dim)
        barrier.wait(10)
        return whole

    names = ("LinearBase", "ColumnParallelLinear", "RowParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear")
    linear = SimpleNamespace(**dict.fromkeys(names, Absent))
    vocabulary = SimpleNamespace(VocabParallelEmbedding=Absent, ParallelLMHead=Absent)
    return Layers(linear, vocabulary, Experts, lambda module: (EXPERTS, module.gate_up, module.down), len(parts), gather)


@pytest.mark.parametrize(("workers", "shared"), [(1, "whole"), (2, "whole"), (2, "in parts")])
def test_experts_that_workers_share(workers: int, shared: str) -> None:
    gate, up, down = torch.randn(EXPERTS, ROWS, COLUMNS), torch.randn(EXPERTS, ROWS, COLUMNS), torch.randn(EXPERTS, COLUMNS, ROWS)
    parts, barrier = [None] * workers, Barrier(workers)

    def of_worker(rank: int) -> dict[str, torch.Tensor]:
        if shared == "whole":
            mine = [tensor.chunk(workers)[rank] for tensor in (gate, up, down)]
        else:
            mine = [tensor.chunk(workers, dim)[rank] for tensor, dim in ((gate, 1), (up, 1), (down, 2))]
        model = nn.ModuleDict({"mlp": nn.ModuleDict({"routed_experts": Experts(torch.cat(mine[:2], 1), mine[2])})})
        return dict(held_weights(model, layers(rank, parts, barrier)))

    whole = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    expected = {f"mlp.{number}.{name}.weight": tensor[number] for name, tensor in whole.items() for number in range(EXPERTS)}
    with ThreadPoolExecutor(workers) as pool:
        for held in pool.map(of_worker, range(workers)):
            assert held.keys() == expected.keys()
            assert all(torch.equal(held[name], tensor) for name, tensor in expected.items())


def test_experts_are_read_only_if_they_are_asked_for() -> None:
    def refuse(_: Any) -> Any:
        raise RuntimeError("experts cannot be read back on a GPU")

    model = nn.ModuleDict({"experts": nn.ModuleDict({"routed_experts": Experts(torch.ones(1), torch.ones(1))}), "norm": nn.LayerNorm(2)})
    of_gpu = replace(layers(0, [None], Barrier(1)), read_experts=refuse)
    assert [name for name, _ in held_weights(model, of_gpu, ["norm.weight"])] == ["norm.weight"]
    with pytest.raises(RuntimeError, match="read back"):
        list(held_weights(model, of_gpu, ["experts.0.up_proj.weight"]))
