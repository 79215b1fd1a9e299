"""Experts recorded in one pass are those of others: transformers with its routers told what to choose is the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    assert_equal,
    assert_repeats,
    assert_same,
    batch_of,
    expected_of,
    hf_log_probs,
    own_gradients,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import RankPool
from support_models import by_checkpoint, load_hf
from support_passes import forward, train_step
from test_megatron_oracle import NO_CLIPPING, check_many
from transformers import PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from roll_lite.data.microbatch import TokenBudget
from roll_lite.data.proto import Column, DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

COEF = 0.7
OUTPUTS = ["log_probs", "entropy"]
LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_parallel": 2},
    "TP2 EP2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "CP2 EP2": {"context_parallel": 2, "expert_parallel": 2},
    "EP2, recomputed": {"expert_parallel": 2, "recompute": "full"},
    "PP2, recomputed": {"pipeline_parallel": 2, "recompute": "full"},
    "PP2, recomputed in part": {"pipeline_parallel": 2, "recompute": "selective"},
    "VPP2": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
    "VPP2, uneven": {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "pipeline_layers": [1, 1, 2, 0]},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`old` and `new` agree in nothing, so that about half of the choices differ."""
    folder = tmp_path_factory.mktemp("experts")
    shape: dict[str, Any] = {"tied": False, "layers": 4, "mlp_only_layers": [1]}
    models = {name: tiny(folder / name, "qwen3_moe", seed=seed, **shape) for name, seed in (("old", 0), ("new", 1))}
    return models | {"not normalised": tiny(folder / "raw", "qwen3_moe", seed=2, norm_topk_prob=False, **shape)}


# ---------------------------------------------------------------- the oracle


@contextmanager
def told(model: PreTrainedModel, experts: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """transformers' routers choose these [tokens, layers, k]; where an entry is -1, what they like best. Yields the logits of each."""
    routers = [module for module in model.modules() if isinstance(module, Qwen3MoeTopKRouter)]
    logits: list[torch.Tensor] = []

    def choose(number: int, router: Qwen3MoeTopKRouter, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        logits.append(output[0])
        if experts is None:
            return output
        probabilities = torch.softmax(output[0], dim=-1)
        chosen = torch.where(experts[:, number] < 0, output[2], experts[:, number])
        weights = probabilities.gather(1, chosen)
        return output[0], weights / weights.sum(1, keepdim=True) if router.norm_topk_prob else weights, chosen

    hooks = [
        router.register_forward_hook(lambda router, _, output, number=number: choose(number, router, output))
        for number, router in enumerate(routers)
    ]
    yield logits
    for hook in hooks:
        hook.remove()


def chosen_by(path: Path, batch: DataProto) -> list[torch.Tensor]:
    """Of each row [tokens, layers, k], the likeliest first."""
    model, rows = load_hf(path), []
    for ids in batch.ragged("input_ids").rows():
        with torch.no_grad(), told(model, None) as logits:
            model(ids[None])
        rows.append(torch.stack([each.topk(model.config.num_experts_per_tok).indices for each in logits], dim=1))
    return rows


def hf_replayed(path: Path, batch: DataProto, experts: list[torch.Tensor]) -> tuple[float, float, float, dict[str, torch.Tensor]]:
    """weighted_loss; load-balancing loss of a row in a layer; share of choices that would have been others; gradients of the objective."""
    model = load_hf(path)
    per_token = model.config.num_experts_per_tok
    total, balance, other, replayed = torch.zeros(()), torch.zeros(()), 0, 0
    for row, ids in enumerate(batch.ragged("input_ids").rows()):
        mask, weights = batch.ragged("response_mask").row(row)[1:], batch.ragged("advantages").row(row)
        with told(model, experts[row]) as logits:
            log_p, entropy = hf_log_probs(model, ids, batch.tensor("temperature")[row])
        total = total + ((-weights * log_p - 0.3 * entropy) * mask).sum()
        for layer, each in enumerate(logits):
            balance = balance + load_balancing_loss_func((each,), model.config.num_experts, per_token) / (per_token * len(batch))
            for given, own in zip(experts[row][:, layer].tolist(), each.topk(per_token).indices.tolist(), strict=True):
                other += len(set(given) - {-1} - set(own))
                replayed += sum(expert >= 0 for expert in given)
    (total + COEF * balance).backward()
    gradients = by_checkpoint({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
    return total.item(), balance.item() / experts[0].shape[1], other / replayed, gradients


# ---------------------------------------------------------------- recorded


def as_column(experts: list[torch.Tensor]) -> Ragged:
    return Ragged.from_rows([each.flatten(1) for each in experts], torch.int16)


def check_recorded(path: Path, layout: dict[str, Any], sizes: list[int] | None) -> None:
    strategy, batch = started(path, **layout), batch_of()
    wanted = batch.with_columns(old_experts=as_column(chosen_by(path, batch)))
    mine = shard(wanted, strategy, sizes)
    for size in (2, TokenBudget(20)):
        found = forward(strategy, mine.select(["input_ids", "response_mask", "temperature"]), ["log_probs", "experts"], size)
        assert (found is not None) == strategy.layout.is_head
        if found is not None and len(mine):
            assert found.ragged("experts").equals(mine.ragged("old_experts"))


# ---------------------------------------------------------------- replayed


def check_replayed(old: Path, new: Path, layout: dict[str, Any], sizes: list[int] | None) -> None:
    batch, experts = batch_of(), chosen_by(old, batch_of())
    for each in experts:
        each[-1] = -1  # an engine has not run the last token
    loss, balance, rerouted, gradients = hf_replayed(new, batch, experts)
    assert 0.2 < rerouted < 0.8
    strategy = started(new, NO_CLIPPING, balance_coef=COEF, distributed_optimizer=False, **layout)
    mine = shard(batch.with_columns(rollout_experts=as_column(experts)), strategy, sizes)
    for size in (1, TokenBudget(20)):
        result = train_step(strategy, mine, weighted_loss, OUTPUTS, size)
        assert abs(result.loss - loss) < 1e-5 * 5 * result.metrics["tokens"], (result.loss, loss)
        assert result.experts is not None
        assert (result.experts.balance_loss, result.experts.rerouted) == pytest.approx((balance, rerouted), rel=1e-5)
        own = own_gradients(strategy)
        if own:
            assert_same(own, expected_of(own, gradients, layout))


def check_own_choices(path: Path) -> None:
    """Replayed with the weights that they were recorded with, they change no bit; and a forward pass replays as well."""
    strategy: MegatronStrategy = started(path, NO_CLIPPING, balance_coef=COEF, distributed_optimizer=False)
    batch = batch_of()
    recorded = forward(strategy, batch, ["log_probs", "experts"], TokenBudget(20))
    assert recorded is not None
    again = batch.with_columns(old_experts=recorded["experts"])
    found = forward(strategy, again, ["log_probs"], TokenBudget(20))
    assert found is not None and found.ragged("log_probs").equals(recorded.ragged("log_probs"))
    unknown = batch.with_columns(
        rollout_experts=Ragged(batch.ragged("input_ids").values[:, None].short() * 0 - 1, batch.ragged("input_ids").offsets)
    )
    found = forward(strategy, unknown, ["log_probs"], TokenBudget(20))
    assert found is not None and found.ragged("log_probs").equals(recorded.ragged("log_probs")), "an engine that told nothing"
    plain = train_step(strategy, batch, weighted_loss, OUTPUTS, 2)
    gradients = own_gradients(strategy)
    replayed = train_step(strategy, again, weighted_loss, OUTPUTS, 2)
    assert plain.experts is not None and plain.experts.rerouted is None
    assert replayed.experts is not None and replayed.experts.rerouted == 0
    assert_repeats([replace(plain, loss=replayed.loss, grad_norm=replayed.grad_norm)], [plain])
    assert_equal(own_gradients(strategy), gradients, 1e-4)


def cases(models: dict[str, Path], layout: dict[str, Any], sizes: list[int] | None = None) -> list[tuple[Any, ...]]:
    return [(check_recorded, models["old"], layout, sizes), (check_replayed, models["old"], models["new"], layout, sizes)]


def test_one_rank(ranks: RankPool, models: dict[str, Path]) -> None:
    raw = models["not normalised"]
    own = [(check_own_choices, path) for path in (models["old"], raw)]
    ranks(1, check_many, [*own, *cases(models, {}), (check_replayed, models["old"], raw, {}, None)])


def test_two_ranks(ranks: RankPool, models: dict[str, Path]) -> None:
    """One of which has no rows."""
    ranks(2, check_many, cases(models, LAYOUTS["EP2"], [6, 0]))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    ranks(2, check_many, cases(models, LAYOUTS[name]))


# ---------------------------------------------------------------- what rounding does


def recorded_and_replayed(path: Path) -> tuple[Column, float, dict[str, torch.Tensor]]:
    strategy = started(path, NO_CLIPPING, dtype="bfloat16", distributed_optimizer=False)
    recorded = forward(strategy, batch_of(), ["log_probs", "experts"], 2)
    assert recorded is not None
    return recorded["experts"], *replayed_gradients(strategy, recorded["experts"])


def replayed_gradients(strategy: MegatronStrategy, experts: Column) -> tuple[float, dict[str, torch.Tensor]]:
    mine = shard(batch_of().with_columns(old_experts=experts), strategy)
    return train_step(strategy, mine, weighted_loss, OUTPUTS, 2).grad_norm, own_gradients(strategy)


def replayed_elsewhere(path: Path, layout: dict[str, Any], experts: Column) -> tuple[float, dict[str, torch.Tensor]]:
    return replayed_gradients(started(path, NO_CLIPPING, dtype="bfloat16", distributed_optimizer=False, **layout), experts)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["EP2", "TP2 EP2", "CP2 EP2", "PP2"])
def test_layouts_agree_in_bfloat16_where_tokens_go_to_the_same_experts(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    """Left to themselves, routers that see other last bits send a few tokens elsewhere: the gradient of an expert can be another one."""
    ((experts, norm, expected),) = ranks(1, recorded_and_replayed, models["old"])
    found = ranks(2, replayed_elsewhere, models["old"], LAYOUTS[name], experts)
    gradients = {key: tensor for _, own in found for key, tensor in own.items()}
    assert [own for own, _ in found] == [pytest.approx(norm, rel=1e-2)] * 2
    assert_same(gradients, expected, tolerance=0.1)
    whole, others = (torch.cat([of[key].flatten() for key in sorted(expected)]) for of in (expected, gradients))
    assert (whole - others).norm() < 0.05 * whole.norm()
