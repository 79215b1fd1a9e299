"""Several optimizer steps equal torch's AdamW on the Hugging Face model, in every layout; and what a step reports."""

import math
import os
import socket
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from megatron_cases import (
    assert_equal,
    assert_repeats,
    batch_of,
    hf_loss,
    optimizer_of,
    own_weights,
    parameters_of,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import RankPool
from support_models import by_checkpoint, load_hf
from support_passes import train_step

from roll_lite.config.schema.models import ModelConfig, OptimizerConfig, TrainRoleConfig
from roll_lite.config.schema.run import LimitsConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs
from roll_lite.data.minibatches import MiniBatch
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import TrainResult, ValueInit
from roll_lite.distributed.strategy.megatron.optimizer import STRETCH, squared_norm
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy
from roll_lite.models.hf_config import read_hf_config
from roll_lite.workers.model import CriticWorker, ModelRole, ModelWorker, TrainShare, Update
from roll_lite.workers.objectives import CriticLoss
from roll_lite.workers.phases import RankPhases

# A large eps keeps Adam from blowing rounding errors of tiny gradients up to whole steps.
CONFIG = OptimizerConfig(lr=1e-3, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-2, clip_grad=20.0)
STEPS = 4


def torch_steps(
    path: Path, config: OptimizerConfig, learning_rates: list[float], head: torch.Tensor | None = None
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The oracle: weights after the steps, and the gradient norms. With a critic's head, of the model below it and the head."""
    model = load_hf(path)
    parameters = dict(model.named_parameters())
    if head is not None:
        head = torch.nn.Parameter(head.clone())
        parameters = dict(model.model.named_parameters(prefix="model")) | {"score.weight": head}
    decayed = [parameter for parameter in parameters.values() if parameter.dim() > 1]
    exempt = [parameter for parameter in parameters.values() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": exempt, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    norms = []
    for step, lr in enumerate(learning_rates):
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        hf_loss(model, batch_of(seed=step), head=head).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters.values(), config.clip_grad or float("inf"))))
        optimizer.step()
    return by_checkpoint({name: parameter.detach() for name, parameter in parameters.items()}), norms


def megatron_steps(
    path: Path, config: OptimizerConfig, layout: dict[str, Any], steps: int, value_init: ValueInit | None = None
) -> tuple[dict[str, torch.Tensor], list[TrainResult]]:
    strategy = started(path, config, total_updates=steps, value_init=value_init, **layout)
    outputs, results = ["log_probs", "entropy"] if value_init is None else ["values"], []
    for step in range(steps):
        batch = shard(batch_of(seed=step), strategy, [2, 4] if strategy.layout.data_size == 2 else None)
        results.append(train_step(strategy, batch, weighted_loss, outputs, 3))
    return own_weights(strategy), results


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("training") / "model", "qwen2")


def check_steps(
    ranks: RankPool,
    path: Path,
    config: OptimizerConfig,
    layout: dict[str, Any],
    learning_rates: list[float],
    world_size: int | None = None,
    tolerance: float = 5e-5,
) -> None:
    """On two ranks unless told otherwise, on one where the layout is empty."""
    world_size = world_size or (2 if layout else 1)
    options = {name: value for name, value in layout.items() if name != "data"}
    returned = ranks(world_size, megatron_steps, path, config, options, len(learning_rates))
    compare_steps(returned, torch_steps(path, config, learning_rates), torch_steps(path, config, [])[0], learning_rates, tolerance)


def compare_steps(
    returned: list[tuple[dict[str, torch.Tensor], list[TrainResult]]],
    oracle: tuple[dict[str, torch.Tensor], list[float]],
    start: dict[str, torch.Tensor],
    learning_rates: list[float],
    tolerance: float = 5e-5,
) -> None:
    """What every rank returned of megatron_steps with what torch_steps did from the same `start`; to `tolerance` of the movement."""
    results, (expected, norms) = [result for _, result in returned], oracle
    assert all(result == results[0] for result in results), "every rank reports the same"
    for result, norm, lr in zip(results[0], norms, learning_rates, strict=True):
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        assert result.lr == pytest.approx(lr, abs=1e-12)
        assert not result.skipped
    weights = {name: tensor for exported, _ in returned for name, tensor in exported.items()}
    assert set(weights) == set(expected)
    for name, tensor in expected.items():
        moved = float((tensor - start[name]).norm())
        assert moved > 0
        assert float((weights[name] - tensor).norm()) < tolerance * moved, f"{name} moved by {moved}"


@pytest.mark.parametrize("distributed_optimizer", [True, False], ids=["distributed", "replicated"])
@pytest.mark.parametrize("layout", [{}, {"data": 2}, {"tensor_parallel": 2}], ids=["one rank", "DP2", "TP2"])
def test_steps_equal_adamw(ranks: RankPool, path: Path, layout: dict[str, Any], distributed_optimizer: bool) -> None:
    check_steps(ranks, path, CONFIG, {**layout, "distributed_optimizer": distributed_optimizer} if layout else {}, [CONFIG.lr] * STEPS)


def test_overlapped_reduction_changes_no_bit(ranks: RankPool, path: Path) -> None:
    """After three steps of two data-parallel ranks."""
    (plain, _), _ = ranks(2, megatron_steps, path, CONFIG, {}, 3)
    (overlapped, _), _ = ranks(2, megatron_steps, path, CONFIG, {"overlap_grad_reduce": True}, 3)
    assert plain
    assert_equal(plain, overlapped)


FURTHER: dict[str, tuple[int, dict[str, Any]]] = {
    "CP2": (2, {"context_parallel": 2}),
    "PP2": (2, {"pipeline_parallel": 2}),
    "TP2 SP": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "VPP2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "DP2 overlap": (2, {"data": 2, "overlap_grad_reduce": True}),
    "TP2 PP2": (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "TP2 SP PP2, recomputed": (4, {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2, "recompute": "full"}),
    "CP2 DP2": (4, {"context_parallel": 2, "data": 2}),
}
ONCE = (("qwen2", "PP2"), ("qwen3", "VPP2"), ("llama", "TP2 SP"), ("mistral", "CP2"))
"""Each kind of layout once, and each family; the others are nightly."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        (family, name) if (family, name) in ONCE else pytest.param(family, name, marks=pytest.mark.nightly)
        for family in ("qwen2", "qwen3", "llama", "mistral")
        for name in FURTHER
    ],
)
def test_steps_equal_adamw_in_every_family(ranks: RankPool, tmp_path: Path, family: str, name: str) -> None:
    """Qwen2's and Qwen3's embeddings are tied, the others' are not; Mistral's window is shorter than the samples."""
    world_size, layout = FURTHER[name]
    options = {"sliding_window": 4, "tied": False} if family == "mistral" else {}
    path = tiny(tmp_path / family, family, layers=4, **options)
    for distributed_optimizer in (True, False):
        check_steps(ranks, path, CONFIG, layout | {"distributed_optimizer": distributed_optimizer}, [CONFIG.lr] * 3, world_size)


@pytest.mark.parametrize(
    ("decay", "warmup", "learning_rates"),
    [
        ("constant", 2, [5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3]),
        ("constant", 20, [5e-5, 1e-4, 1.5e-4, 2e-4]),
        ("constant", 4, [2.5e-4, 5e-4, 7.5e-4, 1e-3]),
        ("linear", 1, [1e-3, 8.5e-4, 7e-4, 5.5e-4, 4e-4, 2.5e-4]),
        ("linear", 2, [5e-4, 1e-3, 8.2e-4, 6.4e-4, 4.6e-4, 2.8e-4]),
        ("wsd", 2, [5e-4, 1e-3, 1e-3, 1e-3, 7e-4, 4e-4]),
        ("wsd", 3, [1e-3 / 3, 2e-3 / 3, 1e-3, 1e-3, 7e-4, 4e-4]),
        ("cosine", 3, [1e-3 / 3, 2e-3 / 3, 1e-3, 1e-4 + 9e-4 * (1 + 2**-0.5) / 2, 1e-4 + 9e-4 / 2, 1e-4 + 9e-4 * (1 - 2**-0.5) / 2]),
    ],
)
def test_learning_rates(ranks: RankPool, path: Path, decay: str, warmup: int, learning_rates: list[float]) -> None:
    """Update i of the warm-up runs at i parts of the way; from its last one, or over the last three (wsd), the rate goes to 1e-4, which
    the update after the run would have. Worked out by hand."""
    settings = {"decay": decay, "warmup_steps": warmup, "min_lr": 1e-4, "clip_grad": 0.0, "decay_steps": 3 if decay == "wsd" else None}
    # Where rates are small, the rounding of the weights is more of what they move.
    check_steps(ranks, path, CONFIG.model_copy(update=settings), {}, learning_rates, tolerance=1e-4)


def rates_of(path: Path, config: OptimizerConfig, total: int) -> list[float]:
    """Of the schedule alone, and of the update after the run."""
    scheduler = optimizer_of(started(path, config, total_updates=total)).scheduler
    rates = []
    for _ in range(total + 1):
        rates.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.step(increment=1)
    return rates


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ("linear", [1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, (1 + 2**-0.5) / 2, 0.5, (1 - 2**-0.5) / 2]),
        ("exponential", [1.0, 0.681792830507429, 2**0.5 - 1, 0.189207115002721]),
        ("minus_sqrt", [1.0, 0.5, 1 - 2**-0.5, 1 - 3**0.5 / 2]),
    ],
)
def test_shapes_of_the_decay_after_the_stable_part(ranks: RankPool, path: Path, shape: str, parts: list[float]) -> None:
    """Seven updates, of which one is warm-up and four are decay: `parts` of the way from 1e-4 to 1e-3, worked out by hand."""
    settings = {"decay": "wsd", "decay_steps": 4, "decay_shape": shape, "warmup_steps": 1, "min_lr": 1e-4}
    (rates,) = ranks(1, rates_of, path, CONFIG.model_copy(update=settings), 7)
    assert rates == pytest.approx([1e-3, 1e-3, 1e-3, *(1e-4 + 9e-4 * part for part in parts), 1e-4], abs=1e-12)


def decay_alone(path: Path, value_init: ValueInit | None) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """An update whose gradient is zero everywhere: weights before and after."""
    config = OptimizerConfig(lr=0.01, weight_decay=0.5)
    strategy = started(path, config, value_init=value_init)
    if value_init is not None:  # zeros would not show it
        strategy._model.output_layer.weight.data.fill_(1.0)
    before = {name: tensor.clone() for name, tensor in own_weights(strategy).items()}
    optimizer_of(strategy).megatron.zero_grad()
    for chunk in strategy._chunks:
        chunk.zero_grad_buffer()
    assert not optimizer_of(strategy).step(loss=0.0).skipped
    return before, own_weights(strategy)


@pytest.mark.parametrize(("family", "value_init"), [("qwen2", None), ("llama", None), ("qwen2", "actor")])
def test_norms_and_biases_do_not_decay_and_embeddings_and_heads_do(
    ranks: RankPool, tmp_path: Path, family: str, value_init: ValueInit | None
) -> None:
    """By lr x weight_decay = 0.005 of each weight. Qwen2 has biases, Llama an output layer of its own."""
    ((before, after),) = ranks(1, decay_alone, tiny(tmp_path / family, family), value_init)
    exempt = {name for name in before if name.endswith(".bias") or "norm" in name}
    assert any(name.endswith(".bias") for name in exempt) == (family == "qwen2")
    assert "model.embed_tokens.weight" not in exempt and ("lm_head.weight" in before) == (family == "llama")
    assert any(bool((tensor == 1.0).all()) and name not in exempt for name, tensor in before.items()) == (value_init is not None)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor if name in exempt else tensor * 0.995, rtol=1e-6, atol=1e-9, msg=name)


def norm_of_many(path: Path, options: dict[str, Any]) -> tuple[float, float, int]:
    """Of made-up gradients of one size, a million entries and more: as reported, in numpy's float64, and how many there are."""
    strategy = started(path, CONFIG.model_copy(update={"clip_grad": 1.0}), **options)
    generator = torch.Generator().manual_seed(0)
    squares, entries = 0.0, 0
    optimizer_of(strategy).megatron.zero_grad()
    for parameter in parameters_of(strategy):
        parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator))  # type: ignore[attr-defined]
        squares += float((parameter.main_grad.cpu().numpy().astype(np.float64) ** 2).sum())  # type: ignore[attr-defined]
        entries += parameter.numel()
    return optimizer_of(strategy).step(loss=0.0).grad_norm, squares**0.5, entries


@pytest.mark.parametrize("distributed_optimizer", [True, False], ids=["distributed", "replicated"])
def test_the_norm_of_many_gradients_is_not_too_small(ranks: RankPool, tmp_path: Path, distributed_optimizer: bool) -> None:
    """What gradients are clipped by. Added up in float32, the norm of these comes out 3e-4 too small."""
    path = tiny(tmp_path / "wide", vocab_size=1 << 16)
    for world_size in (1, 2):
        for reported, expected, entries in ranks(world_size, norm_of_many, path, {"distributed_optimizer": distributed_optimizer}):
            assert entries > 8e6
            assert reported == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("entries", [0, 1, STRETCH, STRETCH + 3, 10_000_000])
def test_a_squared_norm_is_numpys(entries: int) -> None:
    values = torch.randn(entries, generator=torch.Generator().manual_seed(1))
    found = squared_norm([values, values[: entries // 2]], torch.device("cpu"))
    expected = (values.numpy().astype(np.float64) ** 2).sum() + (values[: entries // 2].numpy().astype(np.float64) ** 2).sum()
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(expected, rel=1e-7)


def exploding_loss(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Infinite gradients wherever there are rows."""
    assert outputs.log_probs is not None
    loss = (outputs.log_probs * micro_batch.mask).sum() * float("inf")
    return loss, {"rows": torch.tensor(float(micro_batch.mask.shape[0]), device=loss.device)}


def infinite_loss(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Wherever there are rows, with the gradient of weighted_loss."""
    loss, metrics = weighted_loss(outputs, micro_batch)
    return loss + (float("-inf") if len(micro_batch.mask) else 0.0), {"rows": metrics["rows"].float()}


def nan_loss(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradient, wherever there are rows."""
    loss, metrics = exploding_loss(outputs, micro_batch)
    return loss - loss if len(micro_batch.mask) else loss * 0.0, metrics


BROKEN = {"gradient": exploding_loss, "loss": infinite_loss, "both": nan_loss, "weight": weighted_loss}


def lose_a_gradient(strategy: MegatronStrategy) -> Any:
    """That of one matrix of the last rank, until the hook is removed. The matrix is no other rank's where ranks share layers or experts."""
    matrices = [parameter for name, parameter in strategy._chunks[-1].named_parameters() if "linear_fc2" in name]
    return matrices[-1].register_hook(lambda gradient: gradient * (1.0 if dist.get_rank() < dist.get_world_size() - 1 else float("nan")))


def moments(strategy: MegatronStrategy) -> list[torch.Tensor]:
    """And step counters."""
    return [
        tensor.clone()
        for part in optimizer_of(strategy).parts
        for state in part.optimizer.state.values()
        for _, tensor in sorted(state.items())
    ]


def skip_and_go_on(path: Path, layout: dict[str, Any], broken: str) -> None:
    config = CONFIG.model_copy(update={"warmup_steps": 4})
    strategy, untouched = started(path, config, **layout), started(path, config, **layout)
    for one in (strategy, untouched):  # moments that are not zero, in the middle of the warm-up
        batch = shard(batch_of(seed=1), one, [3, 3] if one.layout.data_size == 2 else None)
        train_step(one, batch, weighted_loss, ["log_probs"], 4)
    # Only data-parallel rank 0 has rows, so only its loss or its gradient explodes; all ranks must skip.
    batch = shard(batch_of(), strategy, [6, 0] if strategy.layout.data_size == 2 else None)
    before, state = own_weights(strategy), moments(strategy)
    hook = lose_a_gradient(strategy) if broken == "weight" else None
    skipped = train_step(strategy, batch, BROKEN[broken], ["log_probs"], 4)
    if hook is not None:
        hook.remove()
    assert skipped.skipped and skipped.lr == pytest.approx(CONFIG.lr / 2)
    assert math.isfinite(skipped.grad_norm) == (broken == "loss") and math.isfinite(skipped.loss) == (broken == "weight")
    assert skipped.metrics["rows"] == 6
    assert all(torch.equal(tensor, before[name]) for name, tensor in own_weights(strategy).items())
    assert all(torch.equal(ours, earlier) for ours, earlier in zip(moments(strategy), state, strict=True))
    after = train_step(strategy, batch, weighted_loss, ["log_probs"], 4)
    untouched.set_schedule(2)
    expected = train_step(untouched, batch, weighted_loss, ["log_probs"], 4)
    assert after.lr == pytest.approx(CONFIG.lr * 3 / 4) and optimizer_of(strategy).updates_made == 2
    assert_repeats([after], [expected])  # but for the rate, the step after a skipped one is that of a strategy that never saw it
    assert_equal(own_weights(strategy), own_weights(untouched))


SKIPPING: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP2": {"data": 2},
    "DP2 replicated": {"data": 2, "distributed_optimizer": False},
    "TP2": {"tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("layout", SKIPPING)
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(ranks: RankPool, path: Path, layout: str, broken: str) -> None:
    options = {name: size for name, size in SKIPPING[layout].items() if name != "data"}
    ranks(2 if SKIPPING[layout] else 1, skip_and_go_on, path, options, broken)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", ["CP2", "TP2 PP2", "CP2 DP2"])
def test_what_is_not_finite_changes_nothing_in_further_layouts(ranks: RankPool, path: Path, name: str, broken: str) -> None:
    world_size, layout = FURTHER[name]
    options = {name: size for name, size in layout.items() if name != "data"}
    ranks(world_size, skip_and_go_on, path, options, broken)


def loss_of_one_rank(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """weighted_loss, infinite on the last rank alone, as no arithmetic makes it; its gradient is finite everywhere."""
    loss, metrics = weighted_loss(outputs, micro_batch)
    return loss + (float("inf") if dist.get_rank() == dist.get_world_size() - 1 else 0.0), metrics


def lose_a_loss(path: Path, layout: dict[str, Any]) -> bool:
    strategy = started(path, CONFIG, **layout)
    before = own_weights(strategy)
    result = train_step(strategy, shard(batch_of(), strategy), loss_of_one_rank, ["log_probs"], 4)
    after = own_weights(strategy)
    return result.skipped and all(torch.equal(tensor, before[name]) for name, tensor in after.items())


ALONE: dict[str, dict[str, Any]] = {"TP2": {"tensor_parallel": 2}, "PP2": {"pipeline_parallel": 2}, "CP2": {"context_parallel": 2}}


@pytest.mark.parametrize("layout", ALONE)
def test_a_loss_that_is_not_finite_on_one_rank_alone_is_so_on_all(ranks: RankPool, path: Path, layout: str) -> None:
    """Ranks that share a sample's tokens or matrices compute its loss each for itself; they must not go apart."""
    assert ranks(2, lose_a_loss, path, ALONE[layout] | {"distributed_optimizer": False}) == [True, True]


def losses_of_rows(path: Path, layout: dict[str, Any]) -> tuple[list[Update], dict[int, float]]:
    """Of a critic with a return that is not finite in sample 4, which data-parallel rank 1 has; and what its rows should be told with:
    all values are 0 at first. Three updates of the warm-up are behind it, made or not."""
    strategy = started(path, CONFIG.model_copy(update={"warmup_steps": 10}), value_init="actor", **layout)
    batch = batch_of()
    returns = [row.clone() for row in (batch.ragged("returns").row(number) for number in range(6))]
    returns[4][-1] = float("nan")
    zeros = [torch.zeros_like(row) for row in returns]
    further = {"returns": Ragged.from_rows(returns), "values": Ragged.from_rows(zeros), "domain_number": torch.zeros(6, dtype=torch.int64)}
    own = shard(batch.with_columns(**further), strategy, [4, 2] if strategy.layout.data_size == 2 else None)
    samples, masks = own.tensor("sample").numpy(), [own.ragged("response_mask").row(number)[1:] for number in range(len(own))]
    expected = {int(sample): float(0.25 * (returns[sample][mask] ** 2).sum()) for sample, mask in zip(samples, masks, strict=True)}
    worker: Any = CriticWorker.__new__(CriticWorker)
    worker.spec = ModelRole(ModelConfig(path=path), TrainRoleConfig(), total_updates=0, seed=0, deterministic=False)
    worker.strategy, worker.loss = strategy, CriticLoss()
    worker.phases, worker._architecture = RankPhases("critic-0", Path("none")), read_hf_config(path)
    mini_batches = [MiniBatch(epoch, samples, np.full(len(samples), 0.5, dtype=np.float32)) for epoch in range(2)]
    updates = worker.train(TrainShare(SimpleNamespace(materialize=lambda: own), mini_batches, first_update=3))  # type: ignore[arg-type]
    return updates, expected if strategy.layout.is_head else {}


@pytest.mark.parametrize("layout", [*SKIPPING, "CP2"])
def test_a_skipped_update_tells_the_loss_of_every_row_where_it_is(ranks: RankPool, path: Path, layout: str) -> None:
    options = {name: size for name, size in (SKIPPING | ALONE)[layout].items() if name != "data"}
    check_losses_of_rows(ranks, path, options, 1 if layout == "one rank" else 2)


def check_losses_of_rows(ranks: RankPool, path: Path, layout: dict[str, Any], world_size: int) -> None:
    told: dict[int, float] = {}
    for updates, expected in ranks(world_size, losses_of_rows, path, layout):
        assert [update.result.skipped for update in updates] == [True, True]
        assert [update.result.lr for update in updates] == pytest.approx([0.4 * CONFIG.lr, 0.5 * CONFIG.lr])
        assert updates[0].row_losses == pytest.approx(expected, nan_ok=True) and updates[1].row_losses == {}
        told |= updates[0].row_losses
    assert sorted(told) == list(range(6)) and [sample for sample, loss in told.items() if math.isnan(loss)] == [4]


def timeouts_of_groups(path: Path) -> set[timedelta]:
    """Of all that a worker makes, in a process group of its own."""
    dist.destroy_process_group()
    worker: Any = ModelWorker.__new__(ModelWorker)
    worker.spec = ModelRole(ModelConfig(path=path, dtype="float32"), TrainRoleConfig(), total_updates=1, seed=0, deterministic=False)
    worker.rank, worker.world_size, worker.local_rank = 0, 1, 0
    worker._listener, worker.phases = socket.create_server(("", 0)), RankPhases("critic-0", Path("none"))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(worker._listener.getsockname()[1])}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        worker.initialize()
    groups = list(dist.distributed_c10d._world.pg_map)
    assert len(groups) > 10
    return {group._get_backend(device).options._timeout for group in groups for device in group._device_types}


def test_no_collective_gives_up_before_the_drivers_limits(ranks: RankPool, path: Path) -> None:
    """A save waits for the rank that writes most, as long as limits.checkpoint allows."""
    longest = max(limit for limit in LimitsConfig().model_dump().values() if isinstance(limit, float))
    (timeouts,) = ranks(1, timeouts_of_groups, path)
    assert min(timeouts) > timedelta(seconds=longest), timeouts


def bfloat16_training(path: Path, layout: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    strategy = started(path, CONFIG.model_copy(update={"eps": 1e-8}), dtype="bfloat16", **layout)
    losses = []
    for _ in range(8):
        batch = shard(batch_of(), strategy, [2, 4] if strategy.layout.data_size == 2 else None)
        losses.append(train_step(strategy, batch, weighted_loss, ["log_probs"], 3).loss)
    return losses, own_weights(strategy)


def test_bfloat16_with_float32_main_weights(ranks: RankPool, path: Path) -> None:
    """Low precision moves the figures, not the course: the loss falls as in float32."""
    for layout, world_size in (({}, 1), ({"distributed_optimizer": False}, 2)):
        losses, weights = ranks(world_size, bfloat16_training, path, layout)[0]
        assert losses[-1] < losses[0] - 5
        assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())


def repeated(path: Path) -> list[TrainResult]:
    try:
        strategy = started(path, CONFIG, deterministic=True, tensor_parallel=2)
        return [train_step(strategy, batch_of(seed=step), weighted_loss, ["log_probs", "entropy"], 3) for step in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_runs_repeat_bit_for_bit(ranks: RankPool, path: Path) -> None:
    assert ranks(2, repeated, path) == ranks(2, repeated, path)
