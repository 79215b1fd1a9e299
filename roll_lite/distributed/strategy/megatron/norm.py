"""RMSNorm for Megatron-Core: the bundled torch norm refuses sequence parallelism, the fused one needs Apex."""

from __future__ import annotations

from typing import Any

import torch

from roll_lite.distributed.strategy.megatron.device import current_device


class TorchRMSNorm(torch.nn.RMSNorm):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=current_device())
        # Under sequence parallelism each rank sees a part of the sequence: finalize_model_grads adds up what is marked.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
