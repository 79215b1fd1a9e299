"""Muon through Megatron-Core, with a stand-in for the package that it is in. torch.optim.Muon on Hugging Face's model is the oracle.

Newton-Schulz runs in bfloat16: sums in another order move an update by up to a hundredth."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import batch_of, hf_loss, own_weights, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from support_models import by_checkpoint, load_hf
from support_passes import train_step

from roll_lite.config.schema.models import MuonConfig, OptimizerConfig
from roll_lite.distributed.strategy.base import StateGroup, TrainResult, ValueInit
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

MUON = MuonConfig(momentum=0.8, nesterov=True)
CONFIG = OptimizerConfig(lr=2e-3, weight_decay=5.0, betas=(0.8, 0.9), eps=1e-2, clip_grad=20.0, muon=MUON)
STEPS = 3
REPLICATED = {"distributed_optimizer": False}


def matrices_of(tensors: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
    """Of the layers, those that Megatron has in one together: gate and up."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, tensor in tensors.items():
        if ".layers." in name and tensor.dim() > 1:
            for number, one in enumerate(tensor if tensor.dim() == 3 else [tensor]):  # transformers has all experts in one
                found.setdefault(f"{name.replace('up_proj', 'gate_proj')} {number}", []).append(one)
    return list(found.values())


def torch_steps(path: Path, config: OptimizerConfig) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Weights after the steps, and the gradient norms."""
    model, muon = load_hf(path), config.muon
    assert muon is not None
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    matrices = [torch.nn.Parameter(torch.cat(together)) for together in matrices_of(weights)]
    rest = [parameter for name, parameter in model.named_parameters() if ".layers." not in name or parameter.dim() == 1]
    groups = [{"params": [one for one in rest if one.dim() == dim], "weight_decay": config.weight_decay * (dim - 1)} for dim in (1, 2)]
    adam = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    ours = torch.optim.Muon(matrices, config.lr, config.weight_decay, muon.momentum, nesterov=muon.nesterov, adjust_lr_fn="match_rms_adamw")
    norms = []
    for step in range(STEPS):
        model.zero_grad()
        hf_loss(model, batch_of(seed=step), entropy=False).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)))
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        for matrix, together in zip(matrices, matrices_of(gradients), strict=True):
            matrix.grad = torch.cat(together)
        adam.step()
        ours.step()
        for matrix, together in zip(matrices, matrices_of(weights), strict=True):
            for one, updated in zip(together, matrix.detach().split([len(one) for one in together]), strict=True):
                one.copy_(updated)
    assert max(norms) > config.clip_grad, "clipping takes part"
    return by_checkpoint(weights), norms


def steps(strategy: MegatronStrategy, numbers: range) -> list[TrainResult]:
    found = []
    for number in numbers:
        batch = shard(batch_of(seed=number), strategy, [2, 4] if strategy.layout.data_size == 2 else None)
        found.append(train_step(strategy, batch, weighted_loss, ["log_probs"], 3))
    return found


def megatron_steps(path: Path, config: OptimizerConfig, layout: dict[str, Any]) -> tuple[dict[str, torch.Tensor], list[float]]:
    import muon_stand_in

    with muon_stand_in.installed():
        strategy = started(path, config, **{**REPLICATED, **layout})
        norms = [result.grad_norm for result in steps(strategy, range(STEPS))]
        assert strategy._optimizer is not None
        kinds = {type(part.optimizer).__name__ for part in strategy._optimizer.parts}
        assert kinds == {"TensorParallelMuon", "AdamW"}
        return own_weights(strategy), norms


def check(ranks: RankPool, path: Path, world_size: int, layout: dict[str, Any], config: OptimizerConfig = CONFIG) -> None:
    found = ranks(world_size, megatron_steps, path, config, layout)
    expected, norms = torch_steps(path, config)
    start = by_checkpoint({name: parameter.detach() for name, parameter in load_hf(path).named_parameters()})
    weights = {name: tensor for own, _ in found for name, tensor in own.items()}
    assert weights.keys() == expected.keys()
    for _, own in found:
        assert own == pytest.approx(norms, rel=1e-2) and own[0] == pytest.approx(norms[0], rel=1e-5)
    for name, tensor in expected.items():
        moved, off = float((tensor - start[name]).norm()), float((weights[name] - tensor).norm())
        # The rows of a router's gradient add up to zero: it has a direction of rounding errors alone, which is made as large as the others.
        tolerance = 5e-2 if name.endswith("mlp.gate.weight") else 2e-2
        assert moved > 0 and off < tolerance * moved, f"{name}: off by {off}, moved by {moved}"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("muon") / "model")


def test_steps_are_those_of_torch(ranks: RankPool, path: Path) -> None:
    """Query, key and value each for itself, gate and up together; embeddings, norms and biases by AdamW. Clipping takes part."""
    check(ranks, path, 1, {})


def test_so_they_are_where_tensor_ranks_share_matrices(ranks: RankPool, path: Path) -> None:
    check(ranks, path, 2, {"tensor_parallel": 2, "sequence_parallel": True})


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel": 2}, {"context_parallel": 2}], ids=["DP2", "PP2", "CP2"])
def test_so_they_are_in_further_layouts(ranks: RankPool, path: Path, layout: dict[str, Any]) -> None:
    check(ranks, path, 2, layout, CONFIG.model_copy(update={"muon": MUON.model_copy(update={"nesterov": False})}))


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout", [{}, {"expert_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}], ids=["one", "EP2", "TP2"]
)
def test_experts_are_matrices_too(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    check(ranks, tiny(tmp_path / "moe", "qwen3_moe", tied=False), 2 if layout else 1, layout)


def steps_of_shared_state(path: Path, layout: dict[str, Any], dtype: str) -> None:
    """What copies that share the state do is what copies that all have it do, and each has a part of it."""
    import muon_stand_in

    with muon_stand_in.installed():
        shared, whole = (started(path, CONFIG, dtype=dtype, **layout, distributed_optimizer=own) for own in (True, False))
        shared.offload(StateGroup)
        shared.load(StateGroup)
        for mine, other in zip(steps(shared, range(STEPS)), steps(whole, range(STEPS)), strict=True):
            assert (mine.loss, mine.grad_norm) == pytest.approx((other.loss, other.grad_norm), rel=1e-6)
        expected = own_weights(whole)
        for name, tensor in own_weights(shared).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-6, atol=1e-7)
        assert bytes_of_state(shared) < 0.7 * bytes_of_state(whole)


def bytes_of_state(strategy: MegatronStrategy) -> int:
    assert strategy._optimizer is not None
    states = [state for part in strategy._optimizer.parts for state in part.optimizer.state.values()]
    return sum(tensor.nbytes for state in states for tensor in state.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_copies_may_share_the_state(ranks: RankPool, path: Path, dtype: str) -> None:
    ranks(2, steps_of_shared_state, path, {}, dtype)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [{}, {"expert_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 2}, {"context_parallel": 2}],
    ids=["DP4", "DP4 EP2", "DP2 TP2", "DP2 PP2", "DP2 CP2"],
)
def test_so_they_may_in_further_layouts(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    ranks(4, steps_of_shared_state, tiny(tmp_path / "moe", "qwen3_moe", tied=False), layout, "float32")


def save_and_resume(path: Path, folder: Path, layout: dict[str, Any], dtype: str) -> list[float]:
    """A run goes on bit for bit; losses of its further steps."""
    import muon_stand_in

    with muon_stand_in.installed():
        straight, resumed = (started(path, CONFIG, dtype=dtype, **{**REPLICATED, **layout}) for _ in range(2))
        steps(straight, range(2))
        straight.save_checkpoint(folder)
        expected = steps(straight, range(2, 4))
        resumed.load_checkpoint(folder)
        assert steps(resumed, range(2, 4)) == expected
        theirs = own_weights(straight)
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in own_weights(resumed).items())
    return [result.loss for result in expected]


def resume_elsewhere(path: Path, folder: Path, layout: dict[str, Any]) -> list[float]:
    import muon_stand_in

    with muon_stand_in.installed():
        strategy = started(path, CONFIG, **{**REPLICATED, **layout})
        strategy.load_checkpoint(folder)
        return [result.loss for result in steps(strategy, range(2, 4))]


def resume_with_adam(path: Path, folder: Path) -> str:
    strategy = started(path, CONFIG.model_copy(update={"muon": None}), **REPLICATED)
    with pytest.raises(ValueError) as error:
        strategy.load_checkpoint(folder)
    return str(error.value)


def test_checkpoints(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    losses = ranks(2, save_and_resume, path, tmp_path / "TP2", {"tensor_parallel": 2}, "float32")[0]
    ranks(1, save_and_resume, path, tmp_path / "bfloat16", {}, "bfloat16")
    assert ranks(1, resume_elsewhere, path, tmp_path / "TP2", {})[0] == pytest.approx(losses, rel=1e-2)
    (told,) = ranks(1, resume_with_adam, path, tmp_path / "TP2")
    assert told == f"checkpoint.resume: {tmp_path / 'TP2'} holds Muon's state; optimizer.muon decides what trains matrices: set it"


SHARED = {"distributed_optimizer": True}


def test_checkpoints_of_shared_state(ranks: RankPool, path: Path, tmp_path: Path) -> None:
    ranks(2, save_and_resume, path, tmp_path / "bfloat16", SHARED, "bfloat16")
    losses = ranks(2, save_and_resume, path, tmp_path / "DP2", SHARED, "float32")[0]
    for world_size, layout in ((1, {}), (2, {}), (2, {"tensor_parallel": 2})):
        assert ranks(world_size, resume_elsewhere, path, tmp_path / "DP2", layout)[0] == pytest.approx(losses, rel=1e-2)
    ranks(1, save_and_resume, path, tmp_path / "one", {}, "float32")
    losses = ranks(1, resume_elsewhere, path, tmp_path / "one", {})[0]
    assert ranks(2, resume_elsewhere, path, tmp_path / "one", SHARED)[0] == pytest.approx(losses, rel=1e-2)


@pytest.mark.slow
@pytest.mark.nightly
def test_checkpoints_of_experts(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "moe", "qwen3_moe", tied=False)
    for name, layout in {"EP2": {"expert_parallel": 2}, "EP2 shared": {"expert_parallel": 2, **SHARED}, "DP2 shared": SHARED}.items():
        losses = ranks(2, save_and_resume, path, tmp_path / name, layout, "float32")[0]
        for world_size, other in ((1, {}), (2, {"expert_parallel": 2, **SHARED}), (2, {"tensor_parallel": 2, "sequence_parallel": True})):
            assert ranks(world_size, resume_elsewhere, path, tmp_path / name, other)[0] == pytest.approx(losses, rel=1e-2)


def which_parts(path: Path, value_init: ValueInit | None) -> dict[str, str]:
    """Which optimizer has each weight, by Megatron's name."""
    import muon_stand_in

    with muon_stand_in.installed():
        strategy = started(path, CONFIG, value_init=value_init, **REPLICATED)
        assert strategy._optimizer is not None
        owners = {id(one): type(part.optimizer).__name__ for part in strategy._optimizer.parts for one in part.get_parameters()}
        return {name: owners[id(one)] for chunk in strategy._chunks for name, one in chunk.named_parameters()}


def test_heads_are_adams(ranks: RankPool, tmp_path: Path) -> None:
    """The value head is a matrix of one row."""
    path = tiny(tmp_path / "m", "llama", layers=1)
    for value_init in ("actor", None):
        (found,) = ranks(1, which_parts, path, value_init)
        adams = [name.partition("module.")[2] for name, kind in found.items() if kind == "AdamW"]
        assert "output_layer.weight" in adams and "embedding.word_embeddings.weight" in adams
        assert {name.rpartition(".")[0].rpartition(".")[2] for name, kind in found.items() if kind != "AdamW"} == {
            "linear_qkv",
            "linear_proj",
            "linear_fc1",
            "linear_fc2",
        }


def without_the_package(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        started(path, CONFIG, **REPLICATED)
    return str(error.value)


def with_renamed_arguments(path: Path) -> str:
    import muon_stand_in

    class Renamed(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float, *, nesterov: bool) -> None:
            super().__init__(params, {})

    with muon_stand_in.installed():
        muon_stand_in.muon.OrthogonalizedOptimizer = Renamed
        return without_the_package(path)


def test_what_a_rank_lacks(ranks: RankPool, path: Path) -> None:
    if importlib.util.find_spec("emerging_optimizers") is None:
        (told,) = ranks(1, without_the_package, path)
        assert told.startswith("optimizer.muon: the package emerging-optimizers is not installed here; install it")
    (told,) = ranks(1, with_renamed_arguments, path)
    assert "in a version whose arguments are not those that Megatron-Core 0.16 gives" in told
