"""Megatron-Core's Muon for the layers' matrices, beside AdamW for the rest. It needs NVIDIA's Emerging-Optimizers package."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import muon as upstream
from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer

from roll_lite.config.schema.models import MuonConfig
from roll_lite.distributed.strategy.device import current_device

PACKAGE = "emerging-optimizers"


def check_muon() -> None:
    """ValueError if the package is missing or Megatron-Core cannot call it."""
    if not upstream.HAVE_EMERGING_OPTIMIZERS:
        raise ValueError(
            f"optimizer.muon: the package {PACKAGE} is not installed here; install it (docs/parallelism.md), or remove the section"
        )
    taken = inspect.signature(upstream.OrthogonalizedOptimizer.__init__).parameters
    gather = inspect.signature(upstream.newton_schulz_tp).parameters
    if "use_nesterov" not in taken or "mode" not in gather:
        message = f"{PACKAGE} is installed here in a version whose arguments are not those that Megatron-Core 0.16 gives"
        raise ValueError(f"optimizer.muon: {message}; install an earlier one (docs/parallelism.md), or remove the section")


def muon_optimizer(muon: MuonConfig, config: MegatronOptimizerConfig, chunks: Sequence[Any], shared: bool) -> Any:
    """`config`: settings of AdamW. `shared`: data-parallel copies share the state, in whole weights."""
    check_muon()
    settings = replace(
        config,
        use_distributed_optimizer=False,  # which cuts weights anywhere
        muon_momentum=muon.momentum,
        muon_use_nesterov=muon.nesterov,
        muon_scale_mode=muon.scale,
        muon_extra_scale_factor=muon.factor,
        # Query, key and value are separate matrices, and whole even if tensor ranks share them: the layout changes no update.
        muon_split_qkv=True,
        muon_tp_mode="duplicated",
    )
    # A single copy has nothing to share, and Megatron would count expert gradients that tensor ranks share twice.
    shared = shared and parallel_state.get_data_parallel_world_size(with_context_parallel=True) > 1
    chain = upstream.get_megatron_muon_optimizer(settings, list(chunks), layer_wise_distributed_optimizer=shared)
    if shared:
        for part in chain.chained_optimizers:
            part.grad_stats_parallel_group = None  # all ranks
    return chain


def send_updated(chain: LayerWiseDistributedOptimizer) -> None:
    """Send updated weights to the other copies, because gloo cannot gather tensors of different sizes."""
    chain.allgather_params() if current_device().type == "cuda" else chain.broadcast_params()


def is_muon(part: Any) -> bool:
    """True for Muon, of the optimizers in Megatron's chain."""
    return isinstance(part.optimizer, upstream.TensorParallelMuon)
