"""LoRA: Hugging Face's model with W + alpha / rank * B A in the place of each W is the oracle, in every layout."""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import (
    assert_equal,
    assert_same,
    batch_of,
    hf_log_probs,
    hf_loss,
    optimizer_of,
    own_weights,
    parameters_of,
    reported_once,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import DEVICE, RankPool
from safetensors.torch import load_file, save_file
from support_models import by_checkpoint, load_hf
from support_passes import forward, train_step
from torch.nn.utils import parametrize
from transformers import PreTrainedModel

from roll_lite.config.schema.models import LINEAR_LAYERS, ActorRoleConfig, LoraConfig, ModelConfig, OptimizerConfig
from roll_lite.data.microbatch import TokenBudget
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.strategy.megatron.hf_export import HfExporter
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy
from roll_lite.files import FileRecord, record
from roll_lite.models.hf_config import read_hf_config
from roll_lite.workers.actor import AdaptedActorWorker
from roll_lite.workers.model import ModelRole
from roll_lite.workers.phases import RankPhases

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-2, clip_grad=76.0)
RANK, ALPHA, STEPS = 3, 5.0, 3
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
SOME = ("k_proj", "o_proj", "up_proj")


class LowRank(torch.nn.Module):
    """PEFT's arithmetic."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + ALPHA / RANK * (self.b @ self.a)


class OfExperts(torch.nn.Module):
    """The same for what transformers has of a layer's experts: one tensor [experts, out, in], of one projection or several."""

    def __init__(self, parts: dict[tuple[int, int], LowRank], projections: int) -> None:
        """`parts`: by expert and projection."""
        super().__init__()
        self.places, self.low_ranks, self.projections = list(parts), torch.nn.ModuleList(parts.values()), projections

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        matrices = [list(expert.chunk(self.projections)) for expert in weight]
        for (expert, number), low_rank in zip(self.places, self.low_ranks, strict=True):
            matrices[expert][number] = low_rank(matrices[expert][number])
        return torch.stack([torch.cat(expert) for expert in matrices])


def make_adapters(path: Path, folder: Path, targets: Sequence[str] = LINEAR_LAYERS) -> Path:
    """Random ones, B too, in PEFT's format."""
    generator = torch.Generator().manual_seed(7)
    tensors = {}
    for name, weight in by_checkpoint(dict(load_hf(path).named_parameters())).items():
        module, _, kind = name.rpartition(".")
        if kind == "weight" and module.rpartition(".")[2] in targets:
            rows, columns = weight.shape
            tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, columns, generator=generator) / columns**0.5
            tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(rows, RANK, generator=generator) / 30
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": [*targets]})
    )
    return folder


def hf_adapted(path: Path, adapters: Path) -> tuple[PreTrainedModel, dict[str, torch.nn.Parameter]]:
    """And the matrices that train, by PEFT's names."""
    model, stored = load_hf(path).requires_grad_(False), load_file(adapters / "adapter_model.safetensors")
    trained: dict[str, torch.nn.Parameter] = {}
    of_experts: dict[tuple[str, str], dict[tuple[int, int], LowRank]] = defaultdict(dict)
    for name in sorted({key.removeprefix("base_model.model.").rpartition(".lora_")[0] for key in stored}):
        a, b = (f"base_model.model.{name}.lora_{matrix}.weight" for matrix in "AB")
        low_rank = LowRank(stored[a], stored[b])
        trained |= {a: low_rank.a, b: low_rank.b}
        layer, experts, place = name.partition(".mlp.experts.")
        if experts:
            number, _, projection = place.partition(".")
            tensor = "down_proj" if projection == "down_proj" else "gate_up_proj"
            of_experts[f"{layer}.mlp.experts", tensor][int(number), int(projection == "up_proj")] = low_rank
        else:
            parametrize.register_parametrization(model.get_submodule(name), "weight", low_rank)
    for (module, tensor), parts in of_experts.items():
        together = OfExperts(parts, 2 if tensor == "gate_up_proj" else 1)
        parametrize.register_parametrization(model.get_submodule(module), tensor, together)
    return model, trained


@dataclass
class Expected:
    log_probs: list[torch.Tensor]
    base_log_probs: list[torch.Tensor]
    merged: dict[str, torch.Tensor]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    """Of the first step, before clipping."""
    trained: dict[str, torch.Tensor]
    """After the last one."""


def expected_of(path: Path, adapters: Path) -> Expected:
    model, trained = hf_adapted(path, adapters)
    batch = batch_of()
    rows = [(batch.ragged("input_ids").row(row), batch.tensor("temperature")[row]) for row in range(len(batch))]
    with torch.no_grad():
        log_probs, base_log_probs = ([hf_log_probs(one, *row)[0] for row in rows] for one in (model, load_hf(path)))
        merged = {name: one.clone() for name, one in model.named_parameters() if ".parametrizations." not in name}
        for name, module in model.named_modules():
            if parametrize.is_parametrized(module):
                merged |= {f"{name}.{own}": getattr(module, own).clone() for own in module.parametrizations}
    optimizer = torch.optim.AdamW(trained.values(), CONFIG.lr, CONFIG.betas, CONFIG.eps, CONFIG.weight_decay)
    norms: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for step in range(STEPS):
        optimizer.zero_grad()
        hf_loss(model, batch_of(seed=step), entropy=False).backward()
        gradients = gradients or {name: one.grad.clone() for name, one in trained.items() if one.grad is not None}
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), CONFIG.clip_grad)))
        optimizer.step()
    assert max(norms) > CONFIG.clip_grad, "clipping takes part"
    return Expected(
        log_probs, base_log_probs, by_checkpoint(merged), norms, gradients, {name: one.detach() for name, one in trained.items()}
    )


def lora_of(adapters: Path, **changed: Any) -> LoraConfig:
    targets = json.loads((adapters / "adapter_config.json").read_text())["target_modules"]
    return LoraConfig(rank=RANK, alpha=ALPHA, targets=targets, path=adapters, **changed)


def own_adapters(strategy: MegatronStrategy, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Under PEFT's names, on the ranks that own them."""
    assert strategy._adapters is not None
    exporter = HfExporter(strategy._adapters.bindings, strategy._hf)
    found: dict[str, torch.Tensor] = {}
    for tensors in exporter.plan(1 << 16).buckets():
        found |= exporter.bucket(tensors, read=lambda one: one.main_grad if gradients else one.detach()) or {}
    return {name: tensor.cpu() for name, tensor in found.items()}


def like_hugging_face(path: Path, adapters: Path, layout: dict[str, Any], expected: Expected, after_steps: float = 1e-5) -> set[str]:
    """The names of what this rank owns. `after_steps`: how far adapters may be off then, relatively."""
    strategy = started(path, CONFIG, total_updates=STEPS, lora=lora_of(adapters), **layout)
    assert_log_probs(strategy, expected.log_probs)
    with strategy.adapters_off():
        assert_log_probs(strategy, expected.base_log_probs)
    assert_log_probs(strategy, expected.log_probs)
    weights = own_weights(strategy)
    assert_own(weights, expected.merged, 1e-6)
    assert_memory_of_adapters(strategy)

    for step, norm in enumerate(expected.norms):
        batch = shard(batch_of(seed=step), strategy, [2, 4] if strategy.layout.data_size == 2 else None)
        result = train_step(strategy, batch, weighted_loss, ["log_probs"], 3)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
        if step == 0 and not layout.get("distributed_optimizer", True):
            clipped = min(1.0, CONFIG.clip_grad / (norm + 1e-6))
            assert_own(own_adapters(strategy, gradients=True), {name: one * clipped for name, one in expected.gradients.items()})
    trained = own_adapters(strategy)
    assert_own(trained, expected.trained, after_steps)
    with strategy.adapters_off():
        assert_log_probs(strategy, expected.base_log_probs)
    return {*weights, *trained}


def assert_memory_of_adapters(strategy: MegatronStrategy) -> None:
    """Nothing else has gradients and moments. Buffers are padded a little."""
    adapters = sum(parameter.numel() for parameter in parameters_of(strategy) if parameter.requires_grad)
    buffers = [buffer for chunk in strategy._chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
    gradients = sum(buffer.grad_data.numel() for buffer in buffers)
    moments = sum(
        len(one.flatten()) for part in optimizer_of(strategy).parts for state in part.optimizer.state.values() for one in state.values()
    )
    assert adapters <= gradients <= 1.2 * adapters and moments <= 2.2 * adapters


def assert_own(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    """What this rank owns; other than first ranks may own nothing."""
    if ours:
        assert_same(ours, {name: theirs[name] for name in ours}, tolerance)


def assert_log_probs(strategy: MegatronStrategy, expected: Sequence[torch.Tensor]) -> None:
    unmasked = batch_of().select(["input_ids", "temperature", "sample"])
    mine = shard(unmasked, strategy)
    out = forward(strategy, mine, ["log_probs"], 3)
    if out is not None:
        for row, sample in enumerate(mine.tensor("sample").tolist()):
            torch.testing.assert_close(out.ragged("log_probs").row(row), expected[sample], rtol=1e-5, atol=1e-5)


def in_every(path: Path, cases: Sequence[tuple[Path, dict[str, Any], Expected]]) -> list[set[str]]:
    """Layouts that one process group can have one after the other."""
    return [like_hugging_face(path, adapters, layout, expected) for adapters, layout, expected in cases]


@dataclass
class Cases:
    path: Path
    adapters: dict[str, Path]
    expected: dict[str, Expected]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = tmp_path_factory.mktemp("lora")
    path = tiny(folder / "model", "qwen2")
    adapters = {"all": make_adapters(path, folder / "all"), "some": make_adapters(path, folder / "some", SOME)}
    return Cases(path, adapters, {name: expected_of(path, one) for name, one in adapters.items()})


REPLICATED = {"distributed_optimizer": False}
LAYOUTS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "one rank": [("all", REPLICATED), ("some", REPLICATED), ("all", {"recompute": "full", **REPLICATED})],
    "TP2": [
        ("all", {"tensor_parallel": 2, "sequence_parallel": True, **REPLICATED}),
        ("some", {"tensor_parallel": 2, **REPLICATED}),
        ("some", {"tensor_parallel": 2, "sequence_parallel": True}),
    ],
    "PP2": [("all", {"pipeline_parallel": 2, **REPLICATED})],
    "CP2": [("all", {"context_parallel": 2, **REPLICATED})],
    "DP2": [("all", {}), ("some", {"overlap_grad_reduce": True})],
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_adapters_train_as_in_hugging_face(ranks: RankPool, cases: Cases, name: str) -> None:
    """Log-probs with and without adapters, merged weights, every gradient, the gradient norm, and three optimizer steps."""
    given = [(cases.adapters[which], layout, cases.expected[which]) for which, layout in LAYOUTS[name]]
    found = ranks(1 if name == "one rank" else 2, in_every, cases.path, given)
    for (_, _, expected), owned in zip(given, zip(*found, strict=True), strict=True):
        assert set().union(*owned) == {*expected.merged, *expected.trained}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [{"expert_parallel": 2, **REPLICATED}, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}],
    ids=["EP2", "TP2 EP2"],
)
def test_adapters_of_attention_beside_experts(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Which are frozen as everything else, and have neither gradients nor moments."""
    path = tiny(tmp_path / "model", "qwen3_moe", layers=4, decoder_sparse_step=2, mlp_only_layers=[3])
    adapters = make_adapters(path, tmp_path / "adapters", ATTENTION)
    expected = expected_of(path, adapters)
    found = ranks(2, like_hugging_face, path, adapters, layout, expected)
    assert set().union(*found) == {*expected.merged, *expected.trained}


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2},
        {"tensor_parallel": 2, "sequence_parallel": True, "context_parallel": 2, "recompute": "full"},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, **REPLICATED},
        {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "pipeline_layers": [0, 1, 3, 0]},
    ],
    ids=["TP2 PP2", "TP2 CP2", "TP2 DP2", "VPP2 DP2", "uneven VPP2 DP2"],
)
def test_adapters_train_in_layouts_of_four_ranks(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    path = tiny(tmp_path / "model", "qwen3", layers=4)
    adapters = make_adapters(path, tmp_path / "adapters")
    ranks(4, like_hugging_face, path, adapters, layout, expected_of(path, adapters))


def save_adapters(path: Path, adapters: Path, folder: Path, layout: dict[str, Any]) -> None:
    reported_once(folder, started(path, lora=lora_of(adapters, export="adapter"), **layout).save_hf(folder))
    started(path, lora=lora_of(adapters), **layout).save_hf(folder / "merged")


def test_adapters_come_out_as_they_went_in_and_merged(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    for layout in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        folder = tmp_path / next(iter(layout))
        ranks(2, save_adapters, cases.path, cases.adapters["some"], folder, layout)
        before, after = (load_file(one / "adapter_model.safetensors") for one in (cases.adapters["some"], folder))
        assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (RANK, ALPHA, sorted(SOME))
        merged = dict(load_hf(folder / "merged").named_parameters())
        assert_same(merged, cases.expected["some"].merged, 1e-6)


def refused(path: Path, adapters: Path, changed: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as error:
        started(path, lora=lora_of(adapters).model_copy(update=changed))
    return str(error.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"targets": [*LINEAR_LAYERS]}, "lacks base_model.model.model.layers.0.mlp.down_proj"),
        ({"targets": ["k_proj"]}, "has base_model.model.model.layers.0.mlp.up_proj"),
        ({"rank": 4}, "has the shape [3, 128] in its safetensors; by actor_train.lora.rank and the model it is [4, 128]"),
    ],
)
def test_adapters_that_do_not_fit(ranks: RankPool, cases: Cases, changed: dict[str, Any], message: str) -> None:
    assert message in ranks(1, refused, cases.path, cases.adapters["some"], changed)[0]


def fresh(path: Path, layout: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Adapters as they begin, which change nothing."""
    strategy = started(path, lora=LoraConfig(rank=RANK, alpha=ALPHA, targets=[*LINEAR_LAYERS]), **layout)
    base, weights = by_checkpoint(load_hf(path).state_dict()), own_weights(strategy)
    assert all(torch.equal(tensor, base[name]) for name, tensor in weights.items())
    return own_adapters(strategy)


def test_a_run_begins_with_the_same_adapters_under_every_layout(ranks: RankPool, cases: Cases) -> None:
    (whole,) = ranks(1, fresh, cases.path, {})
    for layout in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        parts = {name: one for own in ranks(2, fresh, cases.path, layout) for name, one in own.items()}
        assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)
    starts = {name: one for name, one in whole.items() if "lora_A" in name}
    assert all(one.std() > 0 for one in starts.values()) and len({float(one.flatten()[0]) for one in starts.values()}) == len(starts)


def steps(strategy: MegatronStrategy, numbers: range) -> list[float]:
    """The gradient norms."""
    norms = []
    for number in numbers:
        batch = shard(batch_of(seed=number), strategy, [5, 1] if strategy.layout.data_size == 2 else None)
        norms.append(train_step(strategy, batch, weighted_loss, ["log_probs"], 3).grad_norm)
    return norms


def assert_norms(found: list[float], expected: list[float]) -> None:
    assert found == (expected if DEVICE == "cpu" else pytest.approx(expected, rel=2e-2))


def save_and_resume(path: Path, adapters: Path, folder: Path, layout: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A run goes on bit for bit. Offloading in between changes nothing, and frees everything."""
    straight, resumed = (started(path, CONFIG, total_updates=9, lora=lora_of(adapters), **layout) for _ in range(2))
    steps(straight, range(2))
    reported_once(folder, straight.save_checkpoint(folder).files)
    straight.offload(StateGroup)
    assert sum(one.untyped_storage().nbytes() for chunk in straight._chunks for one in chunk.parameters()) == 0
    straight.load(StateGroup)
    norms = steps(straight, range(2, 4))
    resumed.load_checkpoint(folder)
    assert_norms(steps(resumed, range(2, 4)), norms)
    ours = own_weights(resumed)
    assert_equal(ours, own_weights(straight))
    return norms, ours


def resume_elsewhere(path: Path, adapters: Path, folder: Path, layout: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    strategy = started(path, CONFIG, total_updates=9, lora=lora_of(adapters), **layout)
    strategy.load_checkpoint(folder)
    return steps(strategy, range(2, 4)), own_weights(strategy)


def test_checkpoints_hold_adapters_and_go_on_under_other_layouts(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    given = cases.path, cases.adapters["all"]
    saved = ranks(2, save_and_resume, *given, tmp_path / "TP2", {"tensor_parallel": 2, "sequence_parallel": True})
    size = sum(file.stat().st_size for file in (tmp_path / "TP2").rglob("*.distcp"))
    model = (cases.path / "model.safetensors").stat().st_size
    ranks(2, save_and_resume, *given, tmp_path / "bfloat16", {"dtype": "bfloat16"})
    assert size < 0.6 * model, "adapters of this model with two moments"
    assert json.loads((tmp_path / "TP2" / "base.json").read_text())["path"] == str(cases.path)
    norms, weights = saved[0]
    others: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {}), (2, {"pipeline_parallel": 2})]
    for world_size, layout in others:
        found = ranks(world_size, resume_elsewhere, *given, tmp_path / "TP2", layout)
        assert found[0][0] == pytest.approx(norms, rel=1e-5)
        assert_same({name: one for _, own in found for name, one in own.items()}, weights)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [{"tensor_parallel": 2, "sequence_parallel": True, "pipeline_parallel": 2}, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}],
    ids=["TP2 PP2", "VPP2 DP2"],
)
def test_checkpoints_of_four_ranks_go_on_under_other_layouts(ranks: RankPool, tmp_path: Path, layout: dict[str, Any]) -> None:
    path = tiny(tmp_path / "model", "qwen3", layers=4)
    given = path, make_adapters(path, tmp_path / "adapters")
    saved = ranks(4, save_and_resume, *given, tmp_path / "saved", layout)
    weights = {name: one for _, own in saved for name, one in own.items()}
    for world_size, other in ((1, {}), (2, {"pipeline_parallel": 2}), (2, {"tensor_parallel": 2})):
        found = ranks(world_size, resume_elsewhere, *given, tmp_path / "saved", other)
        assert found[0][0] == pytest.approx(saved[0][0], rel=1e-5)
        assert_same({name: one for _, own in found for name, one in own.items()}, weights)


def save_beside_steps(path: Path, adapters: Path, folder: Path, layout: dict[str, Any]) -> dict[str, FileRecord]:
    """Two updates go over the adapters while these are written."""
    strategy, resumed = (started(path, CONFIG, total_updates=9, lora=lora_of(adapters), **layout) for _ in range(2))
    steps(strategy, range(2))
    running = strategy.save_checkpoint(folder, asynchronous=True)
    expected = steps(strategy, range(2, 4))
    written = running.finish()
    dist.barrier()
    resumed.load_checkpoint(folder)
    assert_norms(steps(resumed, range(2, 4)), expected)
    assert_equal(own_weights(resumed), own_weights(strategy))
    return written


def check_written_beside(ranks: RankPool, cases: Cases, folder: Path, layout: dict[str, Any]) -> None:
    parts = ranks(2, save_beside_steps, cases.path, cases.adapters["all"], folder, layout)
    written = [entry for part in parts for entry in part.items()]
    files = {str(path.relative_to(folder)): record(path) for path in folder.rglob("*") if path.is_file()}
    assert "base.json" in files and len(written) == len(files) and dict(written) == files


@pytest.mark.nightly
def test_adapters_are_written_beside_steps(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    check_written_beside(ranks, cases, tmp_path, {})


@pytest.mark.slow
@pytest.mark.nightly
def test_adapters_are_written_beside_steps_in_further_layouts(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    for layout in ({"tensor_parallel": 2, "sequence_parallel": True}, {"pipeline_parallel": 2}, REPLICATED):
        check_written_beside(ranks, cases, tmp_path / "_".join(layout), layout)


def told(path: Path, folder: Path, lora: LoraConfig | None) -> str:
    with pytest.raises(ValueError) as error:
        started(path, CONFIG, lora=lora).load_checkpoint(folder)
    return str(error.value)


def save(path: Path, folder: Path, lora: LoraConfig | None) -> None:
    started(path, CONFIG, lora=lora).save_checkpoint(folder)


def test_a_checkpoint_says_whose_adapters_it_holds(ranks: RankPool, cases: Cases, tmp_path: Path) -> None:
    lora, other = lora_of(cases.adapters["some"]), tiny(tmp_path / "other", "qwen2", seed=1)
    ranks(1, save, cases.path, tmp_path / "adapters", lora)
    ranks(1, save, cases.path, tmp_path / "whole", None)
    assert f"belong to {cases.path}; model.path {other} has other weights" in ranks(1, told, other, tmp_path / "adapters", lora)[0]
    assert "holds adapters; actor_train.lora" in ranks(1, told, cases.path, tmp_path / "adapters", None)[0]
    assert "holds a whole model; actor_train.lora" in ranks(1, told, cases.path, tmp_path / "whole", lora)[0]


def two_in_one(path: Path, adapters: Path, layout: dict[str, Any], expected: Expected) -> None:
    """The actor's pass and the reference's, which is that of a model without adapters to the last bit."""
    worker = AdaptedActorWorker.__new__(AdaptedActorWorker)
    worker.strategy = started(path, CONFIG, lora=lora_of(adapters), **layout)
    worker.spec = ModelRole(ModelConfig(path=path), ActorRoleConfig(micro_batch_tokens=20), total_updates=0, seed=0, deterministic=False)
    worker.phases, worker._architecture = RankPhases("actor_train-0", Path("none")), read_hf_config(path)
    batch = shard(batch_of().select(["input_ids", "temperature", "sample"]), worker.strategy)
    columns = ["ref_log_probs", "old_log_probs", "old_entropy"]
    found = worker.forward_pass(batch, columns)
    apart = forward(started(path, **layout), batch, ["log_probs"], TokenBudget(20))
    alone = worker.forward_pass(batch, columns[:1])
    assert (found is None) == (apart is None) == (alone is None) == (not worker.strategy.layout.is_head)
    if found is None or apart is None or alone is None:
        return
    assert list(found) == columns and list(alone) == columns[:1]
    for reference in (found, alone):
        assert_equal({"log_probs": reference["ref_log_probs"].values}, {"log_probs": apart.ragged("log_probs").values}, 1e-5)
    for row, sample in enumerate(batch.tensor("sample").tolist()):
        torch.testing.assert_close(found["old_log_probs"].row(row), expected.log_probs[sample], rtol=1e-5, atol=1e-5)


def test_the_actor_without_adapters_is_the_reference(ranks: RankPool, cases: Cases) -> None:
    for layout in ({}, {"tensor_parallel": 2}):
        ranks(2 if layout else 1, two_in_one, cases.path, cases.adapters["all"], layout, cases.expected["all"])


def log_probs_and_adapters(path: Path, adapters: Path, folder: Path, layout: dict[str, Any]) -> torch.Tensor | None:
    strategy = started(path, lora=lora_of(adapters, export="adapter"), **layout)
    strategy.save_hf(folder)
    result = forward(strategy, batch_of(), ["log_probs"], 6)
    return None if result is None else result.ragged("log_probs").values


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("family", "size", "layout", "targets"),
    [
        ("qwen3", 2, {"tensor_parallel": 2, "sequence_parallel": True}, LINEAR_LAYERS),
        ("llama", 2, {"pipeline_parallel": 2}, SOME),
        ("qwen3_moe", 1, {}, ATTENTION),
        ("qwen3_moe", 2, {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}, LINEAR_LAYERS),
    ],
)
def test_peft_itself_computes_the_same_with_what_was_exported(
    ranks: RankPool, tmp_path: Path, family: Any, size: int, layout: dict[str, Any], targets: Sequence[str]
) -> None:
    """Where it is installed (`pip install peft` beside the pinned packages)."""
    peft = pytest.importorskip("peft")
    path = tiny(tmp_path / "m", family, layers=4, tied=False)
    adapters = make_adapters(path, tmp_path / "adapters", targets)
    (found,) = [one for one in ranks(size, log_probs_and_adapters, path, adapters, tmp_path / "out", layout) if one is not None]
    model, batch = peft.PeftModel.from_pretrained(load_hf(path), tmp_path / "out"), batch_of()
    rows = [hf_log_probs(model, batch.ragged("input_ids").row(row), batch.tensor("temperature")[row])[0] for row in range(len(batch))]
    masks = [batch.ragged("response_mask").row(row)[1:] for row in range(len(batch))]
    expected = torch.cat([row.detach() * mask for row, mask in zip(rows, masks, strict=True)])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)
