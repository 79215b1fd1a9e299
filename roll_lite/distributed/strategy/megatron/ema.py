"""Exponential moving average of the weights, kept on the host. Each rank averages the weights that it exports, so every weight has one
owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from roll_lite.distributed.strategy.megatron.hf_mapping import Binding


class WeightAverage:
    """Average of the exported weights, in float32: in bfloat16 a slow average would never move."""

    def __init__(self, bindings: Sequence[Binding], decay: float) -> None:
        """`bindings`: weights that this rank exports; may be empty."""
        self._decay = decay
        self._means = {binding.parameter: _copy_on_host(binding.parameter) for binding in bindings}
        self.bindings = [replace(binding, parameter=self._means[binding.parameter]) for binding in bindings]
        """Bindings whose parameters are the averages: loading through them sets the average."""

    @torch.no_grad()
    def update(self) -> None:
        """average = decay * average + (1 - decay) * weights."""
        for weight, mean in self._means.items():
            mean.lerp_(weight.to("cpu", torch.float32), 1 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Restart the average from the current weights."""
        for weight, mean in self._means.items():
            mean.copy_(weight)

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """Return the average in place of a weight, for export."""
        return self._means[weight].detach().to(weight.device)


def _copy_on_host(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    copy = weight.detach().to("cpu", torch.float32, copy=True)
    return torch.nn.Parameter(copy, requires_grad=False)
