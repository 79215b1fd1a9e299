"""An exponential moving average of the weights, on the host: of those that this rank exports, so that every weight has one owner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from roll_lite.distributed.strategy.megatron.hf_mapping import Binding


class WeightAverage:
    """float32 also beside weights in bfloat16, in which a slow average would stand still."""

    def __init__(self, bindings: Sequence[Binding], decay: float) -> None:
        """`bindings`: of the weights that this rank exports; possibly none."""
        self._decay = decay
        self._means = {binding.parameter: _copy_on_host(binding.parameter) for binding in bindings}
        self.bindings = [replace(binding, parameter=self._means[binding.parameter]) for binding in bindings]
        """The same tensors of the checkpoint, with the average behind them: loading into them sets it."""

    @torch.no_grad()
    def update(self) -> None:
        """decay * average + (1 - decay) * weights."""
        for weight, mean in self._means.items():
            mean.lerp_(weight.to("cpu", torch.float32), 1 - self._decay)

    @torch.no_grad()
    def restart(self) -> None:
        """From the weights as they are now."""
        for weight, mean in self._means.items():
            mean.copy_(weight)

    def read(self, weight: torch.nn.Parameter) -> torch.Tensor:
        """In the place of the weight, where it is exported."""
        return self._means[weight].detach().to(weight.device)


def _copy_on_host(weight: torch.nn.Parameter) -> torch.nn.Parameter:
    copy = weight.detach().to("cpu", torch.float32, copy=True)
    return torch.nn.Parameter(copy, requires_grad=False)
