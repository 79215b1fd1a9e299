"""Mixtures of experts: Hugging Face is the oracle in every layout of the experts; weights come out as they went in."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    assert_same,
    batch_of,
    expected_of,
    hf_gradients,
    hf_loss,
    own_gradients,
    parameters_of,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import RankPool
from safetensors.torch import load_file
from support_models import by_checkpoint, load_hf
from support_passes import train_step
from test_megatron_oracle import NO_CLIPPING, check_forward, check_gradients, check_many
from test_megatron_state import Saved, check_bfloat16, goes_on, offload_and_go_on, save_and_resume
from test_megatron_training import BROKEN, CONFIG, check_losses_of_rows, check_steps, skip_and_go_on
from test_megatron_values import check_values, reward_model
from test_megatron_weights import round_trip
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter, load_balancing_loss_func

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.data.microbatch import TokenBudget
from roll_lite.data.proto import DataProto

LAYOUTS: dict[str, dict[str, Any]] = {
    "EP2": {"expert_parallel": 2},
    "TP2 EP2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "TP2": {"tensor_parallel": 2, "sequence_parallel": True},
    "ETP2": {"expert_tensor_parallel": 2},
    "TP2 ETP2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_tensor_parallel": 2},
    "PP2": {"pipeline_parallel": 2},
    "CP2 EP2": {"context_parallel": 2, "expert_parallel": 2},
    "EP2, recomputed": {"expert_parallel": 2, "recompute": "full"},
    "PP2, recomputed in part": {"pipeline_parallel": 2, "recompute": "selective"},
}
OF_FOUR: dict[str, dict[str, Any]] = {
    "EP2": {"expert_parallel": 2},
    "EP4": {"expert_parallel": 4},
    "EP2 ETP2": {"expert_parallel": 2, "expert_tensor_parallel": 2},
    "TP2 EP2": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2},
    "TP2 EP4": {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 4},
    "PP2 EP2": {"pipeline_parallel": 2, "expert_parallel": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("experts")
    some_dense = {"layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": False}
    return {
        "all layers": tiny(folder / "all", "qwen3_moe", tied=False, intermediate_size=97),  # a size of layers that it does not have
        "one of four": tiny(folder / "some", "qwen3_moe", **some_dense),
        "two of five": tiny(folder / "five", "qwen3_moe", tied=False, layers=5, decoder_sparse_step=2),
    }


def parity(path: Path, layout: dict[str, Any], sizes: list[int] | None = None) -> list[tuple[Any, ...]]:
    return [(check_forward, path, 100, layout), (check_gradients, path, 100, layout, sizes, [2, TokenBudget(20)])]


def test_one_rank(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks(1, check_many, [case for path in models.values() for case in parity(path, {})])


def overlapped(path: Path, layout: dict[str, Any]) -> None:
    """Gradients go out while others are still to come: when, Megatron learns in the first step, in which one rank has no rows."""
    strategy = started(path, NO_CLIPPING, distributed_optimizer=False, overlap_grad_reduce=True, **layout)
    batch = batch_of()
    _, gradients = hf_gradients(path, batch)
    for sizes in ([0, 6], [6, 0]):
        own = shard(batch, strategy, sizes if strategy.layout.data_size == 2 else None)
        train_step(strategy, own, weighted_loss, ["log_probs", "entropy"], 2)
        mine = own_gradients(strategy)
        if mine:
            assert_same(mine, expected_of(mine, gradients, layout))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    """Under EP 2 one rank has no rows: its experts work for the other."""
    cases = parity(models["all layers"], LAYOUTS[name])
    if name == "EP2":
        cases += parity(models["all layers"], LAYOUTS[name], [6, 0])
        cases.append((overlapped, models["all layers"], LAYOUTS[name]))
    if name.startswith("PP2"):
        cases += parity(models["one of four"], LAYOUTS[name])
    ranks(2, check_many, cases)


STAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "VPP2": ("one of four", {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "PP2, uneven": ("two of five", {"pipeline_parallel": 2}),
    "PP2, dense layers first": ("one of four", {"pipeline_parallel": 2, "pipeline_layers": [1, 3]}),
    "VPP2, uneven": ("two of five", {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "pipeline_layers": [0, 2, 2, 1]}),
    "PP2, uneven, recomputed": ("two of five", {"pipeline_parallel": 2, "recompute": "full"}),
}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", STAGES)
def test_stages(ranks: RankPool, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Interleaved, and with a last one that has a layer less: gradients, steps, what is exported, what another layout goes on with."""
    model, layout = STAGES[name]
    path = models[model]
    ranks(2, check_many, [*parity(path, layout), (check_balance, path, layout, None)])
    check_steps(ranks, path, CONFIG, layout, [CONFIG.lr] * 3)
    ranks(2, round_trip, path, tmp_path / "exported", layout, "float32")
    before, after = (load_all(folder) for folder in (path, tmp_path / "exported"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    ranks(2, save_and_resume, path, tmp_path / "resumed", layout, "float32", 2)
    states = {"one rank": {}, name: layout, "EP2": LAYOUTS["EP2"] | TWO}
    saved = Saved(ranks, tmp_path / "saved", path, states)
    goes_on(ranks, saved, ["one rank", "EP2"], name)
    goes_on(ranks, saved, [name], "EP2")


@pytest.mark.nightly
def test_a_stage_without_experts_has_a_checkpoint_all_the_same(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    for shards, dtype in ((False, "float32"), (False, "bfloat16"), (True, "float32")):
        layout = {"pipeline_parallel": 2, "distributed_optimizer": shards}
        ranks(2, save_and_resume, models["one of four"], tmp_path / f"{dtype}{shards}", layout, dtype, 2)


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    return {key: tensor for file in folder.glob("*.safetensors") for key, tensor in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    path, layout = models["all layers"], OF_FOUR[name]
    ranks(4, check_many, [*parity(path, layout), (overlapped, path, layout)])


@pytest.mark.parametrize("name", ["EP2", "TP2 EP2"])
def test_three_steps_with_clipping(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    check_steps(ranks, models["all layers"], CONFIG, LAYOUTS[name], [CONFIG.lr] * 3)


@pytest.mark.slow
def test_three_steps_of_experts_that_two_ranks_share(ranks: RankPool, models: dict[str, Path]) -> None:
    check_steps(ranks, models["all layers"], CONFIG, LAYOUTS["ETP2"], [CONFIG.lr] * 3)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["EP2 ETP2", "TP2 EP4", "PP2 EP2"])
def test_three_steps_on_four_ranks(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    check_steps(ranks, models["all layers"], CONFIG, OF_FOUR[name], [CONFIG.lr] * 3, 4)


@pytest.mark.slow
@pytest.mark.nightly
def test_three_steps_in_further_layouts(ranks: RankPool, models: dict[str, Path]) -> None:
    for layout in ({"data": 2}, LAYOUTS["EP2"], LAYOUTS["TP2 EP2"], LAYOUTS["TP2"]):
        check_steps(ranks, models["all layers"], CONFIG, layout | {"distributed_optimizer": False}, [CONFIG.lr] * 3)
    for layout in ({"data": 2}, LAYOUTS["TP2"], LAYOUTS["TP2 ETP2"], LAYOUTS["CP2 EP2"]):
        check_steps(ranks, models["all layers"], CONFIG, layout, [CONFIG.lr] * 3)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["EP2", "CP2 EP2"])
def test_what_is_not_finite_on_one_rank_changes_nothing_on_any(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    for broken in ("gradient", "weight"):
        ranks(2, skip_and_go_on, models["all layers"], LAYOUTS[name], broken)
    check_losses_of_rows(ranks, models["all layers"], LAYOUTS[name], 2)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("name", OF_FOUR)
def test_what_is_not_finite_changes_nothing_on_any_of_four_ranks(ranks: RankPool, models: dict[str, Path], name: str, broken: str) -> None:
    for options in ({}, {"distributed_optimizer": False}):
        ranks(4, skip_and_go_on, models["all layers"], OF_FOUR[name] | options, broken)


@pytest.mark.parametrize("name", ["EP2", "ETP2", "TP2 EP2", "PP2"])
def test_what_comes_out_is_what_went_in(ranks: RankPool, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Every tensor once, from a rank that has it; the files are those that transformers wrote."""
    path = models["one of four" if name == "PP2" else "all layers"]
    returned = ranks(2, round_trip, path, tmp_path, LAYOUTS[name], "float32")
    plan = returned[0]["plan"]
    assert all(one["plan"] == plan for one in returned)
    before = load_file(path / "model.safetensors")
    after = {key: tensor for file in tmp_path.glob("*.safetensors") for key, tensor in load_file(file).items()}
    assert sorted(tensor.name for tensor in plan.tensors) == sorted(before) == sorted(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    owners = {tensor.name: tensor.owner for tensor in plan.tensors if ".layers.0." in tensor.name}
    if "EP2" in name:
        assert [owners[f"model.layers.0.mlp.experts.{expert}.up_proj.weight"] for expert in range(4)] == [0, 0, 1, 1]
        assert owners["model.layers.0.mlp.gate.weight"] == 0


# ---------------------------------------------------------------- the load-balancing loss

COEF = 0.7


def hf_balance(path: Path, batch: DataProto) -> tuple[float, float, dict[str, torch.Tensor]]:
    """transformers' own loss, of every row in every layer alone: it counts an expert's choices per token, we among all choices. Mean
    over layers and rows; tokens of the busiest expert; and the gradients of the whole objective."""
    model = load_hf(path)
    config, total = model.config, torch.zeros(())
    chosen = torch.zeros(sum(isinstance(module, Qwen3MoeTopKRouter) for module in model.modules()), config.num_experts)
    for row in batch.ragged("input_ids").rows():
        for layer, logits in enumerate(model(row[None], output_router_logits=True).router_logits):
            total = total + load_balancing_loss_func((logits,), config.num_experts, config.num_experts_per_tok)
            chosen[layer] += logits.topk(config.num_experts_per_tok).indices.flatten().bincount(minlength=config.num_experts)
    mean = total / (config.num_experts_per_tok * len(batch))
    (hf_loss(model, batch) + COEF * mean).backward()
    gradients = by_checkpoint({name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None})
    busiest = (chosen.amax(1) / chosen.mean(1)).mean()
    return mean.item() / len(chosen), busiest.item(), gradients


def check_balance(path: Path, layout: dict[str, Any], sizes: list[int] | None) -> None:
    batch = batch_of()
    loss, busiest, gradients = hf_balance(path, batch)
    strategy = started(path, NO_CLIPPING, balance_coef=COEF, distributed_optimizer=False, **layout)
    for size in (1, TokenBudget(20)):
        result = train_step(strategy, shard(batch, strategy, sizes), weighted_loss, ["log_probs", "entropy"], size)
        assert result.experts is not None and result.experts.balance_loss is not None
        assert result.experts.balance_loss == pytest.approx(loss, rel=1e-5)
        assert result.experts.busiest == pytest.approx(busiest, rel=1e-6)
        assert result.grad_norm == pytest.approx(float(torch.stack([each.norm() for each in gradients.values()]).norm()), rel=1e-5)
        mine = own_gradients(strategy)
        if mine:
            assert_same(mine, expected_of(mine, gradients, layout))


def test_the_balance_loss_is_transformers_own(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks(1, check_balance, models["all layers"], {}, None)
    for name, sizes in (
        ("EP2", [6, 0]),
        ("TP2 EP2", None),
        ("CP2 EP2", None),
        ("EP2, recomputed", [2, 4]),
        ("PP2, recomputed in part", None),
    ):
        ranks(2, check_balance, models["all layers"], LAYOUTS[name], sizes)


# ---------------------------------------------------------------- state

TWO = {"data": 2}  # copies of the model
STATES: dict[str, dict[str, Any]] = {
    "one rank": {},
    "DP2": TWO,
    "EP2": LAYOUTS["EP2"] | TWO,
    "EP2 replicated": LAYOUTS["EP2"] | TWO | {"distributed_optimizer": False},
    "TP2 EP2": LAYOUTS["TP2 EP2"],
    "ETP2": LAYOUTS["ETP2"] | TWO,
}
LOADED_FROM = {"one rank": ["EP2"], "EP2": ["one rank"], "DP2": ["EP2", "EP2 replicated"]}


@pytest.fixture(scope="module")
def saved(ranks: RankPool, models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(ranks, tmp_path_factory.mktemp("saved"), models["all layers"], STATES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("loaded", LOADED_FROM)
def test_another_layout_goes_on_where_the_first_stopped(ranks: RankPool, saved: Saved, loaded: str) -> None:
    """Also with fewer or more ranks that share experts, and their optimizer."""
    goes_on(ranks, saved, LOADED_FROM[loaded], loaded)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("loaded", STATES)
def test_every_layout_goes_on_where_any_other_stopped(ranks: RankPool, saved: Saved, loaded: str) -> None:
    goes_on(ranks, saved, [name for name in STATES if name not in (loaded, *LOADED_FROM.get(loaded, ()))], loaded)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [("EP2", "one rank"), ("one rank", "EP2"), ("EP2 replicated", "DP2"), ("ETP2", "EP2")])
def test_bfloat16_goes_on_with_the_same_bits(ranks: RankPool, models: dict[str, Path], tmp_path: Path, before: str, after: str) -> None:
    check_bfloat16(ranks, models["all layers"], tmp_path, STATES[before], STATES[after])


def test_offloading_changes_no_bit(ranks: RankPool, models: dict[str, Path]) -> None:
    """Buffers of experts are buffers of their own."""
    replicated = {"distributed_optimizer": False} | LAYOUTS["EP2"]
    for layout in (TWO, replicated):
        ranks(2, offload_and_go_on, models["all layers"], layout, "float32")


@pytest.mark.slow
@pytest.mark.nightly
def test_resuming_is_bit_identical(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    for name in ("EP2", "EP2 replicated"):
        ranks(2, save_and_resume, models["all layers"], tmp_path / name, STATES[name], "float32", 2)


def test_a_critic_with_experts(ranks: RankPool, tmp_path: Path) -> None:
    path, head = reward_model(tmp_path / "reward", "qwen3_moe")
    base = tiny(tmp_path / "base", "qwen3_moe")
    for name in ("EP2", "TP2 EP2"):
        ranks(2, check_values, path, base, head, LAYOUTS[name], "reward_model")


def replica_checksums(path: Path, options: dict[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Of a rank after a step, and after one entry of its output layer has changed on the last rank."""
    strategy = started(path, OptimizerConfig(lr=1e-2), **options)
    train_step(strategy, shard(batch_of(), strategy), weighted_loss, ["log_probs", "entropy"], 3)
    sound = strategy.replica_checksums()
    if strategy.layout.rank == strategy.layout.world_size - 1:
        next(weight for weight in parameters_of(strategy) if weight.dim() == 2).data[0, 0] += 1.0
    return sound, strategy.replica_checksums()


@pytest.mark.parametrize(
    ("layout", "world_size", "dense", "experts"),
    [("DP2", 2, 2, 2), ("EP2", 2, 2, 1), pytest.param("EP2", 4, 4, 2, marks=pytest.mark.nightly)],
)
def test_replicas_have_equal_checksums_and_shards_have_keys_of_their_own(
    ranks: RankPool, models: dict[str, Path], layout: str, world_size: int, dense: int, experts: int
) -> None:
    options = {"DP2": {}, **LAYOUTS}[layout]
    returned = ranks(world_size, replica_checksums, next(iter(models.values())), options)
    holders: dict[str, list[str]] = {}
    for sound, _ in returned:
        for name, digest in sound.items():
            holders.setdefault(name, []).append(digest)
    assert all(len(set(digests)) == 1 for digests in holders.values()), "no false alarm"
    assert {len(digests) for name, digests in holders.items() if ".experts." in name} == {experts}
    assert {len(digests) for name, digests in holders.items() if ".experts." not in name} == {dense}
    changed = [name for name, digest in returned[-1][1].items() if returned[-1][0][name] != digest]
    assert len(changed) == 1 and all(before == after for before, after in returned[:-1])
