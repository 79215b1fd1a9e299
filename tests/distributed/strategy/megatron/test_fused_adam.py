"""With torch's fused AdamW, and with a stand-in for the Adam of Transformer Engine and of Apex, which Megatron-Core takes where it is
installed. That one counts steps in the parameter groups, not in each parameter's state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_cases import batch_of, copied, optimizer_of, own_weights, started, tiny, weighted_loss
from megatron_ranks import RankPool
from support_passes import train_step
from torch.optim.adamw import adamw

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.distributed.strategy.megatron import optimizer as our_optimizer

from megatron.core import optimizer as upstream  # isort: skip  (roll_lite prepares megatron.core)
from megatron.core.optimizer import distrib_optimizer  # isort: skip

CONFIG = OptimizerConfig(lr=1e-3, betas=(0.8, 0.9), weight_decay=0.1)


class FusedAdam(torch.optim.Optimizer):
    """Takes no other state than the moments, as those do."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, adam_w_mode: bool) -> None:
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        assert all(state.keys() == {"exp_avg", "exp_avg_sq"} for state in self.state.values())

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            weights = [weight for weight in group["params"] if weight.grad is not None]
            moments = ([self.state[weight][name] for weight in weights] for name in ("exp_avg", "exp_avg_sq"))
            counts = [torch.tensor(float(group["step"] - 1)) for _ in weights]
            options = {name: group[name] for name in ("lr", "weight_decay", "eps")}
            options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            adamw(weights, [weight.grad for weight in weights], *moments, [], counts, amsgrad=False, maximize=False, **options)


@contextmanager
def installed() -> Iterator[None]:
    with (
        patch.multiple(upstream, Adam=FusedAdam, USING_PYTORCH_OPTIMIZER=False),
        patch.multiple(distrib_optimizer, Adam=FusedAdam, HAVE_APEX_OR_TE=True, USING_TE_OPTIMIZER=True),
    ):
        yield


def train_save_and_go_on(path: Path, folder: Path, config: OptimizerConfig, distributed: bool) -> None:
    with installed():
        whole, resumed, again = (started(path, config, distributed_optimizer=distributed) for _ in range(3))
        assert {type(part.optimizer) for part in optimizer_of(whole).parts} == {torch.optim.AdamW if config.on_host else FusedAdam}
        for number in range(3):
            train_step(whole, batch_of(seed=number), weighted_loss, ["log_probs"], 3)
        whole.save_checkpoint(folder)
        copy = copied(whole)
        resumed.load_checkpoint(folder)
        for strategy in (whole, resumed, again):
            if strategy is again:
                again.load_copy(copy)
            train_step(strategy, batch_of(seed=3), weighted_loss, ["log_probs"], 3)
        theirs = own_weights(whole)
        for ours in (own_weights(resumed), own_weights(again)):
            assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(("on_host", "distributed"), [(False, False), (True, False), (True, True)])
def test_a_resumed_run_counts_on(ranks: RankPool, tmp_path: Path, on_host: bool, distributed: bool) -> None:
    """Else the first update would correct moments that are there for being none: several times too large. The step on the host is torch's
    all the same."""
    config = CONFIG.model_copy(update={"on_host": on_host})
    ranks(1, train_save_and_go_on, tiny(tmp_path / "model"), tmp_path / "checkpoint", config, distributed)


def as_on_gpus(path: Path, folder: Path, distributed: bool) -> None:
    """The same update to 1% of the learning rate, from a checkpoint of either kind too; a copy of the state goes on with the same bits."""
    plain, other = (started(path, CONFIG, distributed_optimizer=distributed) for _ in range(2))
    with patch.object(our_optimizer, "FUSED_ON", ("cpu",)):
        fused, again = (started(path, CONFIG, distributed_optimizer=distributed) for _ in range(2))
        for strategy in (plain, fused):
            for number in range(3):
                train_step(strategy, batch_of(seed=number), weighted_loss, ["log_probs"], 3)
        plain.save_checkpoint(folder / "plain")
        fused.save_checkpoint(folder / "fused")
        again.load_copy(copied(fused))
        for strategy in (fused, again):
            train_step(strategy, batch_of(seed=3), weighted_loss, ["log_probs"], 3)
        expected = own_weights(fused)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in own_weights(again).items())
        again.load_checkpoint(folder / "plain")
        groups = [group for part in optimizer_of(again).parts for group in part.optimizer.param_groups]
        assert groups and all(group["fused"] for group in groups), "a checkpoint says what its run had"
    other.load_checkpoint(folder / "fused")
    assert not any(group["fused"] for part in optimizer_of(other).parts for group in part.optimizer.param_groups)
    for strategy in (plain, other, again):
        train_step(strategy, batch_of(seed=3), weighted_loss, ["log_probs"], 3)
        for name, tensor in own_weights(strategy).items():
            assert torch.allclose(tensor, expected[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("distributed", [False, True])
def test_torchs_fused_adam_is_the_same_update(ranks: RankPool, tmp_path: Path, distributed: bool) -> None:
    ranks(1, as_on_gpus, tiny(tmp_path / "model", "qwen3"), tmp_path, distributed)
