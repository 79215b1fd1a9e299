"""AdamW on the host: moments stay in host memory, which frees eight bytes per trained weight on the device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from torch.optim.adamw import adamw

MOMENTS = ("exp_avg", "exp_avg_sq")


def take_adam_of_torch() -> None:
    """Make this process use torch's Adam. Megatron-Core 0.16 prefers Transformer Engine's or Apex's, which compute on the device."""
    optimizer.USING_PYTORCH_OPTIMIZER = True
    distrib_optimizer.HAVE_APEX_OR_TE = False  # it keeps the step count as torch does


@dataclass
class Staged:
    """A weight on its way through host memory."""

    weight: torch.Tensor
    gradient: torch.Tensor


class HostStep:
    """Replacement for torch AdamW's `step`. Gradients and weights travel to the host together on a stream of their own; a weight is updated
    while others still arrive or travel back."""

    def __init__(self, adam: torch.optim.AdamW, device: torch.device) -> None:
        self._optimizer = adam
        self._pin = device.type == "cuda"
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream()
        self._staged: dict[torch.Tensor, Staged] = {}
        for group in adam.param_groups:
            for weight in group["params"]:
                adam.state[weight] = {name: self._zeros_like(weight) for name in MOMENTS}

    def _zeros_like(self, weight: torch.Tensor) -> torch.Tensor:
        """Zeros in host memory: the device may have no room."""
        return torch.zeros(weight.shape, dtype=weight.dtype, pin_memory=self._pin)

    def keep_moments(self) -> None:
        """Move moments to host memory, wherever they were loaded."""
        for state in self._optimizer.state.values():
            for name in MOMENTS:
                if not self._pin:
                    state[name] = state[name].cpu()
                elif not state[name].is_pinned():
                    state[name] = state[name].cpu().pin_memory()

    @torch.no_grad()
    def __call__(self) -> None:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            under_way = [(group, weight, self._to_host(weight), self._event()) for group, weight in self._trained()]
        for group, weight, staged, arrived in under_way:
            arrived.synchronize()
            self._update(group, staged, self._optimizer.state[weight])
            with self._device.stream(self._stream):
                weight.copy_(staged.weight, non_blocking=True)
        self._device.current_stream().wait_stream(self._stream)

    def _trained(self) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        for group in self._optimizer.param_groups:
            yield from ((group, weight) for weight in group["params"] if weight.grad is not None)

    def _to_host(self, weight: torch.Tensor) -> Staged:
        if weight not in self._staged:
            self._staged[weight] = Staged(*(torch.empty(weight.shape, dtype=weight.dtype, pin_memory=self._pin) for _ in range(2)))
        assert weight.grad is not None
        staged = self._staged[weight]
        staged.weight.copy_(weight, non_blocking=True)
        staged.gradient.copy_(weight.grad, non_blocking=True)
        return staged

    def _event(self) -> Any:
        event = self._device.Event()
        event.record(self._stream)
        return event

    def _update(self, group: dict[str, Any], staged: Staged, state: dict[str, torch.Tensor]) -> None:
        adamw(
            [staged.weight],
            [staged.gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
