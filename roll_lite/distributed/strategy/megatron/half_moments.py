"""AdamW moments in float16: Megatron-Core's precision-aware optimizer on Transformer Engine's Adam."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch


def half_moments() -> dict[str, Any]:
    """Optimizer fields of Megatron's configuration. ValueError where no such Adam is installed."""
    try:
        adam = import_module("transformer_engine.pytorch.optimizers").FusedAdam
    except ImportError as error:
        told = "optimizer.moments: float16 needs the package transformer-engine, which is not installed here; install it, or use float32"
        raise ValueError(told) from error
    if "store_param_remainders" not in inspect.signature(adam).parameters:
        raise ValueError("optimizer.moments: float16 needs transformer-engine 2.1 or later; install it here, or use float32")
    return {
        "use_precision_aware_optimizer": True,
        "exp_avg_dtype": torch.float16,
        "exp_avg_sq_dtype": torch.float16,
        # Keep float32 weights whole: their lower halves alone are not tensors that another optimizer can load.
        "store_param_remainders": False,
    }


def make_half_moments(optimizer: Any, config: Any = None) -> None:
    """Replace Megatron-Core 0.16's factory, which omits the second argument that Transformer Engine needs since 2.1."""
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if not optimizer.state[weight]:
                optimizer.initialize_state(weight, False)
