from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import distrib_optimizer, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch.optim.adamw import adamw

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.distributed.strategy.base import current_device

FUSED_ON = ("cuda",)
"""Device types with a fused torch AdamW kernel. Elsewhere AdamW's temporary tensors take 4 bytes per weight."""
STRETCH = 4096
"""Squares that a CPU sums in float32 before adding the sum in float64."""


@dataclass(frozen=True)
class StepResult:
    grad_norm: float
    lr: float
    skipped: bool


class Optimizer:
    def __init__(
        self, config: OptimizerConfig, chunks: Sequence[Any], distributed: bool, dtype: torch.dtype, total_updates: int | None
    ) -> None:
        assert config.decay == "constant" or total_updates is not None, "a decay needs the number of updates of the whole run"
        self._clip_grad = config.clip_grad
        self.megatron = _megatron_optimizer(config, chunks, distributed, dtype)
        self.parts: list[Any] = list(self.megatron.chained_optimizers)
        self.on_host = config.on_host
        self.updates_made = 0
        # Create Adam's moments before the first step, so that memory use is known and checkpoints can be loaded.
        for part in self.parts:
            if self.on_host:
                part.optimizer.step = HostStep(part.optimizer, current_device())
            part.init_state_fn(part.optimizer, part.config)
            if isinstance(part, DistributedOptimizer) and isinstance(part.optimizer, torch.optim.AdamW) and not part.optimizer.state:
                part.state_dict = partial(self._state_without_parameters, part)
        self.complete_states()
        # The constructor's step(0) also applies weight decay multipliers, which exempt norms and biases. Megatron makes the first update
        # with init_lr, so that update i of the warm-up has the rate lr * i / warmup_steps.
        rest = max(config.warmup_steps - 1, 0)
        self.scheduler = OptimizerParamScheduler(
            self.megatron,
            init_lr=config.lr / max(config.warmup_steps, 1),
            max_lr=config.lr,
            min_lr=config.min_lr if config.decay != "constant" else config.lr,
            lr_warmup_steps=rest,
            # A constant rate has no last step, but Megatron wants one after the warm-up.
            lr_decay_steps=total_updates if total_updates is not None and config.decay != "constant" else rest + 1,
            lr_decay_style="WSD" if config.decay == "wsd" else config.decay,
            wsd_decay_steps=config.decay_steps,
            lr_wsd_decay_style=config.decay_shape,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def _state_without_parameters(self, part: Any) -> dict[str, Any]:
        """Return the state of a part without parameters on this rank, where Megatron's method fails."""
        made = float(self.updates_made)
        groups = [{key: value for key, value in group.items() if key != "params"} | {"step": made} for group in part.param_groups]
        return {"optimizer": {"param_groups": groups}}

    def complete_states(self) -> None:
        """Finish new or loaded states: use fused AdamW (if available), give each parameter its own counter."""
        is_fused = not self.on_host and current_device().type in FUSED_ON
        # With torch's AdamW, Megatron-Core 0.16 loads one shared counter, which every parameter's update would advance: Adam's bias
        # correction would be silently wrong.
        for part in self.parts:
            if isinstance(part.optimizer, torch.optim.AdamW):
                for group in part.optimizer.param_groups:
                    group["fused"] = is_fused or None
                for weight, state in part.optimizer.state.items():
                    count = state["step"].clone() if "step" in state else torch.tensor(0.0)
                    state["step"] = count.to(weight.device) if is_fused else count

    def tensors(self, with_moments: bool = True) -> Iterator[torch.Tensor]:
        for part in self.parts:
            for weight in part.get_parameters():
                yield weight
                if with_moments:
                    yield from (one for _, one in sorted(part.optimizer.state.get(weight, {}).items()) if isinstance(one, torch.Tensor))

    def set_schedule(self, update: int) -> None:
        self.scheduler.num_steps = update
        self.scheduler.step(increment=0)

    @torch.no_grad()
    def step(self, loss: float) -> StepResult:
        """Clip gradients, update weights. If any rank's loss or gradient is not finite, all skip this. Advance the schedule."""
        # Megatron's step() checks for infinities only with loss scaling. Without Apex or Transformer Engine, its norm and clipping wait for
        # the device once per parameter.
        lr = self.megatron.param_groups[0]["lr"]
        self.megatron.prepare_grads()
        grad_norm, all_finite = self._grad_norm(math.isfinite(loss))
        is_finite = all_finite and math.isfinite(grad_norm)
        if is_finite:
            if 0 < self._clip_grad < grad_norm:
                trained = (parameter for part in self.parts for parameter in part.get_parameters())
                if gradients := [one.grad for one in trained if one.grad is not None]:  # a rank may hold no part of a small adapter
                    torch._foreach_mul_(gradients, self._clip_grad / (grad_norm + 1e-6))
            self.megatron.step_with_ready_grads()
            self.updates_made += 1
        self.scheduler.step(increment=1)
        return StepResult(grad_norm, lr, skipped=not is_finite)

    def _grad_norm(self, is_finite: bool) -> tuple[float, bool]:
        """Return (gradient norm of the whole model, whether all ranks' losses are finite). Collective."""
        sums = torch.zeros(2, dtype=torch.float64, device=current_device())
        for part in self.parts:
            squares = squared_norm(part.get_main_grads_for_grad_norm(), current_device())
            total = torch.stack([squares, torch.full_like(squares, float(not is_finite))])
            dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
            sums += total
        squared, broken = sums.tolist()
        return math.sqrt(squared), broken == 0


def _megatron_optimizer(config: OptimizerConfig, chunks: Sequence[Any], distributed: bool, dtype: torch.dtype) -> Any:
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr if config.decay != "constant" else config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.betas[0],
        adam_beta2=config.betas[1],
        adam_eps=config.eps,
        clip_grad=config.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
        log_num_zeros_in_grad=False,
    )
    if config.on_host:  # with torch's Adam: that of Transformer Engine or Apex would update on the device
        optimizer.USING_PYTORCH_OPTIMIZER = True
        distrib_optimizer.HAVE_APEX_OR_TE = False  # Megatron then stores the step count like torch's Adam
    return get_megatron_optimizer(settings, list(chunks))


def squared_norm(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum squares without waiting for the device; partial sums are added in float64."""
    if device.type == "cpu":
        # torch on a CPU sums float32 in eight running sums: the norm of 10^7 entries is 0.1% too small, that of 10^9 almost 2%. Sums of
        # short stretches, added in float64, are exact enough and as fast.
        norms = []
        for tensor in tensors:
            flat = tensor.flatten()
            whole = len(flat) - len(flat) % STRETCH
            norms += [torch.linalg.vector_norm(part, dim=1) for part in (flat[:whole].view(-1, STRETCH), flat[None, whole:])]
    else:
        norms = [torch.stack(torch._foreach_norm(list(tensors)))] if tensors else []
    return torch.cat([torch.zeros(1, device=device), *norms]).double().square().sum()


MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass
class Staged:
    weight: torch.Tensor
    gradient: torch.Tensor


class HostStep:
    """Replaces torch AdamW's `step`: moments and update on the host, copies overlapping with updates."""

    def __init__(self, adam: torch.optim.AdamW, device: torch.device) -> None:
        self._optimizer = adam
        self._pin = device.type == "cuda"
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream()
        self._staged: dict[torch.Tensor, Staged] = {}
        for group in adam.param_groups:
            for weight in group["params"]:
                adam.state[weight] = {name: torch.zeros(weight.shape, dtype=weight.dtype, pin_memory=self._pin) for name in MOMENTS}
        # torch's load_state_dict would move all moments to the device.
        adam.register_load_state_dict_pre_hook(self._take_moments)
        adam.register_load_state_dict_post_hook(lambda loaded: loaded.state.update(self._kept))
        self._kept: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def _take_moments(self, adam: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
        self._kept = dict(adam.state)
        weights = [weight for group in adam.param_groups for weight in group["params"]]
        numbers = [number for group in loaded["param_groups"] for number in group["params"]]
        for number, weight in zip(numbers, weights, strict=True):
            given, kept = loaded["state"][number], self._kept[weight]
            for name in MOMENTS:
                kept[name].copy_(given[name])
            kept["step"] = given["step"]
        return {**loaded, "state": {}}

    @torch.no_grad()
    def __call__(self) -> None:
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            under_way = [
                (group, weight, self._to_host(weight), self._event())
                for group in self._optimizer.param_groups
                for weight in group["params"]
                if weight.grad is not None
            ]
        for group, weight, staged, arrived in under_way:
            arrived.synchronize()
            self._update(group, staged, self._optimizer.state[weight])
            with self._device.stream(self._stream):
                weight.copy_(staged.weight, non_blocking=True)
        self._device.current_stream().wait_stream(self._stream)

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
