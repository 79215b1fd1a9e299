"""For emerging_optimizers, with the names and arguments that Megatron-Core 0.16 calls; Newton-Schulz is that of torch.optim.Muon.

What Megatron makes of it (TensorParallelMuon, its parts, checkpoints) is its own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.optim._muon import _zeropower_via_newtonschulz

import roll_lite.distributed.strategy.megatron  # noqa: F401  (prepares megatron.core)

from megatron.core.optimizer import muon  # isort: skip

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class OrthogonalizedOptimizer(torch.optim.Optimizer):
    def __init__(
        self,
        params: Any,
        lr: float,
        momentum_beta: float,
        weight_decay: float,
        *,
        use_nesterov: bool,
        weight_decay_method: str,
        fp32_matmul_prec: str,
        scaled_orthogonalize_fn: Callable[..., torch.Tensor],
        **options: Any,
    ) -> None:
        assert weight_decay_method == "decoupled" and fp32_matmul_prec == "medium" and not options
        self.use_nesterov, self.scaled_orthogonalize_fn = use_nesterov, scaled_orthogonalize_fn
        super().__init__(params, {"lr": lr, "momentum_beta": momentum_beta, "weight_decay": weight_decay})

    def orthogonalize(self, p: torch.Tensor, grad: torch.Tensor, **group: Any) -> torch.Tensor:
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                buffer = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                buffer.lerp_(weight.grad, 1 - group["momentum_beta"])
                momentum = weight.grad.lerp(buffer, group["momentum_beta"]) if self.use_nesterov else buffer
                weight.add_(self.orthogonalize(weight, momentum, **options), alpha=-group["lr"])


def get_muon_scale_factor(size_out: int, size_in: int, mode: str = "spectral") -> float:
    scales = {
        "spectral": max(size_out, size_in) ** 0.5,
        "shape_scaling": max(1.0, size_out / size_in) ** 0.5,
        "unit_rms_norm": (size_out / size_in) ** 0.5,
    }
    return float(scales[mode])


def newton_schulz_tp(
    x: torch.Tensor, steps: int, coefficient_type: str, tp_group: dist.ProcessGroup, partition_dim: int | None = None, mode: str = ""
) -> torch.Tensor:
    assert x.dtype == torch.float32 and mode == "duplicated" and coefficient_type == "quintic"
    if partition_dim is None:
        return _zeropower_via_newtonschulz(x, COEFFICIENTS, steps, 1e-7).float()
    pieces = [torch.empty_like(x) for _ in range(tp_group.size())]
    dist.all_gather(pieces, x.contiguous(), group=tp_group)
    whole = _zeropower_via_newtonschulz(torch.cat(pieces, partition_dim), COEFFICIENTS, steps, 1e-7).float()
    return whole.chunk(tp_group.size(), partition_dim)[tp_group.rank()]


@contextmanager
def installed() -> Iterator[None]:
    """Megatron-Core looks for it again, and at the end once more."""
    package, optimizers, utils = (
        ModuleType(f"emerging_optimizers{part}") for part in ("", ".orthogonalized_optimizers", ".orthogonalized_optimizers.muon_utils")
    )
    vars(optimizers).update(OrthogonalizedOptimizer=OrthogonalizedOptimizer, get_muon_scale_factor=get_muon_scale_factor)
    vars(utils).update(newton_schulz_tp=newton_schulz_tp)
    with patch.dict(sys.modules, {module.__name__: module for module in (package, optimizers, utils)}):
        importlib.reload(muon)
        yield
    importlib.reload(muon)
