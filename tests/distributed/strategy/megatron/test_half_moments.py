"""Moments in float16 through Megatron-Core's precision-aware optimizer, with a stand-in for Transformer Engine's Adam: its names,
arguments and states, and torch's arithmetic. The oracle is torch's AdamW, with float32 moments, in Megatron-Core's usual optimizer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_cases import batch_of, own_weights, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from support_passes import train_step
from torch.optim.adamw import adamw

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

from megatron.core import optimizer as upstream  # isort: skip  (roll_lite prepares megatron.core)
from megatron.core.optimizer import distrib_optimizer, optimizer_config  # isort: skip

FLOAT32 = OptimizerConfig(lr=1e-3, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-2, clip_grad=8.0)
HALF = FLOAT32.model_copy(update={"moments": "float16"})


class FusedAdam(torch.optim.Optimizer):
    """As of Transformer Engine 2.1: low-precision states have a scale each, gradients come as `decoupled_grad`."""

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        *,
        adam_w_mode: bool,
        master_weights: bool,
        master_weight_dtype: torch.dtype,
        exp_avg_dtype: torch.dtype,
        exp_avg_sq_dtype: torch.dtype,
        use_decoupled_grad: bool,
        store_param_remainders: bool,
    ) -> None:
        assert adam_w_mode and master_weights and use_decoupled_grad and not store_param_remainders
        self.dtypes = {"exp_avg": exp_avg_dtype, "exp_avg_sq": exp_avg_sq_dtype, "master_param": master_weight_dtype}
        self._scales: dict[torch.Tensor, dict[str, float]] = {}
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.set_scaled_state(param, name, torch.zeros_like(param, dtype=torch.float32))
        self.set_scaled_state(param, "master_param", param.detach().float())

    def set_scaled_state(self, param: torch.Tensor, name: str, unscaled: torch.Tensor) -> None:
        assert unscaled.dtype == torch.float32
        dtype = self.dtypes[name]
        scale = float(unscaled.abs().max()) / (torch.finfo(dtype).max / 2) if dtype == torch.float16 and len(unscaled) else 1.0
        self._scales.setdefault(param, {})[name] = scale
        state = self.state[param].setdefault(name, torch.empty_like(param, dtype=dtype))
        state.copy_(unscaled / scale if scale else unscaled)

    def get_unscaled_state(self, param: torch.Tensor, name: str) -> torch.Tensor:
        state = self.state[param][name]
        assert state.dtype == self.dtypes[name]
        return state if state.dtype == torch.float32 else state.float() * self._scales[param][name]

    def load_state_dict(self, state_dict: Any) -> None:
        """Of the groups; Megatron sets the states after it."""
        for group, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            assert type(group["step"]) is int
            for weight in group["params"]:
                assert weight.grad is None and weight.dtype == torch.bfloat16
                moments = [self.get_unscaled_state(weight, name) for name in ("exp_avg", "exp_avg_sq")]
                main = self.state[weight]["master_param"]
                options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
                options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
                step = torch.tensor(float(group["step"] - 1))
                lists = [[one] for one in (main, weight.decoupled_grad, *moments)]
                adamw(*lists, [], [step], amsgrad=False, maximize=False, **options)
                for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                    self.set_scaled_state(weight, name, moment)
                weight.copy_(main)


@contextmanager
def installed() -> Iterator[None]:
    names = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.optimizers")
    modules = [module_from_spec(ModuleSpec(name, None)) for name in names]
    modules[-1].FusedAdam = FusedAdam  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(patch.dict(sys.modules, {module.__name__: module for module in modules}))
        for place, name, value in (
            (upstream, "Adam", FusedAdam),
            (upstream, "USING_PYTORCH_OPTIMIZER", False),
            (upstream, "is_te_min_version", lambda *_: True),
            (optimizer_config, "is_te_min_version", lambda *_: True),
            (distrib_optimizer, "Adam", FusedAdam),
            (distrib_optimizer, "HAVE_APEX_OR_TE", True),
            (distrib_optimizer, "USING_TE_OPTIMIZER", True),
        ):
            stack.enter_context(patch.object(place, name, value))
        yield


def begin(path: Path, config: OptimizerConfig) -> MegatronStrategy:
    return started(path, config, dtype="bfloat16")


def steps(strategy: MegatronStrategy, numbers: range) -> list[float]:
    """The gradient norms."""
    found = []
    for number in numbers:
        batch = shard(batch_of(seed=number), strategy, [2, 4] if strategy.layout.data_size == 2 else None)
        found.append(train_step(strategy, batch, weighted_loss, ["log_probs"], 3).grad_norm)
    return found


def moments(strategy: MegatronStrategy) -> dict[str, set[torch.dtype]]:
    assert strategy._optimizer is not None
    states = [state for part in strategy._optimizer.parts for state in part.optimizer.state.values()]
    return {name: {state[name].dtype for state in states} for name in states[0]}


def main_weights(strategy: MegatronStrategy) -> torch.Tensor:
    """In float32, of this rank."""
    assert strategy._optimizer is not None
    parts = strategy._optimizer.parts
    weights = [state.get("master_param", weight) for part in parts for weight, state in part.optimizer.state.items()]
    return torch.cat([weight.detach().flatten() for weight in weights])


def train_and_save(path: Path, folder: Path) -> None:
    """Offloaded in between. A run goes on from its checkpoint, also with float32 moments."""
    theirs = begin(path, FLOAT32)
    start = main_weights(theirs).clone()
    expected_norms = steps(theirs, range(3))
    assert max(expected_norms) > FLOAT32.clip_grad, "clipping takes part"
    expected = main_weights(theirs)
    with installed():
        ours, resumed = (begin(path, HALF) for _ in range(2))
        assert moments(ours) == {"exp_avg": {torch.float16}, "exp_avg_sq": {torch.float16}, "master_param": {torch.float32}}
        norms = steps(ours, range(1))
        ours.offload(StateGroup)
        ours.load(StateGroup)
        norms += steps(ours, range(1, 3))
        assert norms == pytest.approx(expected_norms, rel=1e-2) and norms[0] == expected_norms[0]
        moved = float((expected - start).norm())
        assert 0 < float((main_weights(ours) - expected).norm()) < 1e-2 * moved
        ours.save_checkpoint(folder)
        resumed.load_checkpoint(folder)
        assert torch.equal(main_weights(resumed), main_weights(ours))
        after = steps(ours, range(3, 5))
        assert steps(resumed, range(3, 5)) == pytest.approx(after, rel=1e-2)
        assert float((main_weights(resumed) - main_weights(ours)).norm()) < 1e-3 * moved
    full = begin(path, FLOAT32)
    full.load_checkpoint(folder)
    assert steps(full, range(3, 5)) == pytest.approx(after, rel=1e-2)
    assert float((main_weights(full) - main_weights(ours)).norm()) < 1e-2 * moved
    assert all(torch.isfinite(weight).all() for weight in own_weights(ours).values())


@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=(pytest.mark.slow, pytest.mark.nightly))])
def test_training_is_that_of_float32_moments(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    """But for what rounding them leaves."""
    ranks(world_size, train_and_save, tiny(tmp_path / "model"), tmp_path / "checkpoint")


def without_the_package(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        begin(path, HALF)
    return str(error.value)


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="it is installed")
def test_what_a_rank_lacks(ranks: RankPool, tmp_path: Path) -> None:
    (told,) = ranks(1, without_the_package, tiny(tmp_path / "model"))
    assert told.startswith("optimizer.moments: float16 needs the package transformer-engine, which is not installed here")
