"""The critic: values and gradients equal Hugging Face's hidden states times the head; the three ways to start one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    FAMILIES,
    assert_equal,
    assert_same,
    batch_of,
    expected_of,
    hf_loss,
    hf_values,
    own_gradients,
    own_weights,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import RankPool
from safetensors.torch import load_file, save_file
from support_models import by_checkpoint, load_hf
from support_passes import forward, train_step
from test_megatron_training import CONFIG, compare_steps, megatron_steps, torch_steps
from transformers import AutoModelForSequenceClassification

from roll_lite.config.schema.models import OptimizerConfig

NO_CLIPPING = OptimizerConfig(lr=1e-30, clip_grad=0.0)
INTERLEAVED = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
SEQUENCE = {"tensor_parallel": 2, "sequence_parallel": True}
FURTHER_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "PP2": (2, {"pipeline_parallel": 2}),
    "TP2 SP": (2, SEQUENCE),
    "CP2": (2, {"context_parallel": 2}),
    "VPP2": (2, INTERLEAVED),
    "PP2, uneven": (2, {"pipeline_parallel": 2, "pipeline_layers": [4, 0]}),
    "VPP2, recomputed": (2, {**INTERLEAVED, "recompute": "full"}),
    "TP2 SP, recomputed": (2, {**SEQUENCE, "recompute": "full"}),
    "TP2 SP, recomputed in part": (2, {**SEQUENCE, "recompute": "selective"}),
    "VPP2 TP2 SP, recomputed in part": (4, {**INTERLEAVED, **SEQUENCE, "recompute": "selective"}),
    "CP2 PP2, recomputed": (4, {"context_parallel": 2, "pipeline_parallel": 2, "recompute": "full"}),
}
"""Of heads, with the number of ranks; four layers divide by all of them."""
SLOW_OR_NIGHTLY = [
    name if name in ("PP2", "TP2 SP", "CP2", "VPP2") else pytest.param(name, marks=pytest.mark.nightly) for name in FURTHER_LAYOUTS
]
STEPS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "TP2 SP": (2, "qwen3", SEQUENCE),
    "CP2": (2, "mistral", {"context_parallel": 2}),
    "EP2": (2, "qwen3_moe", {"expert_parallel": 2}),
    "DP2 overlap": (2, "qwen2", {"overlap_grad_reduce": True}),
    "ETP2": (2, "qwen3_moe", {"expert_tensor_parallel": 2}),
    "VPP2, replicated": (2, "qwen3", {**INTERLEAVED, "distributed_optimizer": False}),
    "VPP2 EP2": (4, "qwen3_moe", {**INTERLEAVED, "expert_parallel": 2}),
    "VPP2 TP2 SP": (4, "llama", {**INTERLEAVED, **SEQUENCE}),
    "CP2 PP2, recomputed": (4, "qwen2", {"context_parallel": 2, "pipeline_parallel": 2, "recompute": "full"}),
    "CP2 TP2 EP4": (4, "qwen3_moe", {**SEQUENCE, "context_parallel": 2, "expert_parallel": 4}),
}
"""Ranks, family, layout."""


def reward_model(folder: Path, family: str, **overrides: Any) -> tuple[Path, torch.Tensor]:
    """A sequence-classification checkpoint as Hugging Face saves it, and its head."""
    tiny(folder, family, **overrides)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    with torch.no_grad():
        head = torch.randn(1, 128, generator=torch.Generator().manual_seed(5)) / 8
        model.score.weight.copy_(head)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(folder)
    return folder, head


def check_values(path: Path, base: Path, head: torch.Tensor, layout: dict[str, Any], init: str) -> None:
    """`base` is the language model below the value model, for the oracle."""
    strategy = started(path, NO_CLIPPING, value_init=init, distributed_optimizer=False, **layout)
    batch = batch_of()
    oracle = load_hf(base)
    mine = shard(batch, strategy, [2, 4] if strategy.layout.data_size == 2 else None)
    out = forward(strategy, mine, ["values"], 2)
    if out is not None:
        for row in range(len(mine)):
            mask = mine.ragged("response_mask").row(row)[1:]
            expected = hf_values(oracle, head, mine.ragged("input_ids").row(row)).detach() * mask
            torch.testing.assert_close(out.ragged("values").row(row), expected, rtol=1e-5, atol=1e-5)
    weight = head.clone().requires_grad_()
    loss = hf_loss(oracle, batch, 1.0, head=weight)
    loss.backward()
    body = {name: parameter.grad for name, parameter in oracle.model.named_parameters(prefix="model")}
    gradients = by_checkpoint(body) | {"score.weight": weight.grad}  # type: ignore[arg-type]
    for size in (1, 3):
        result = train_step(strategy, mine, weighted_loss, ["values"], size)
        assert result.loss == pytest.approx(loss.item(), rel=1e-5)
        ours = own_gradients(strategy)
        if ours:
            assert_same(ours, expected_of(ours, gradients, layout))


def check_values_of_all(cases: list[tuple[Any, ...]]) -> None:
    for case in cases:
        check_values(*case)


def pairs(folder: Path, **overrides: Any) -> list[tuple[Path, Path, torch.Tensor]]:
    """Per family: a reward model, the language model with the same body, the head."""
    found = []
    for family in FAMILIES:
        path, head = reward_model(folder / family, family, **overrides)
        found.append((path, tiny(folder / f"{family}_base", family, **overrides), head))
    return found


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path, torch.Tensor]]:
    return pairs(tmp_path_factory.mktemp("rewards"))


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path, torch.Tensor]]:
    return pairs(tmp_path_factory.mktemp("four"), layers=4)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}, {"data": 2}], ids=["one rank", "TP2", "DP2"])
def test_values_and_gradients(ranks: RankPool, checkpoints: list[tuple[Path, Path, torch.Tensor]], layout: dict[str, int]) -> None:
    options = {name: size for name, size in layout.items() if name != "data"}
    ranks(2 if layout else 1, check_values_of_all, [(*case, options, "reward_model") for case in checkpoints])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW_OR_NIGHTLY)
def test_values_and_gradients_in_further_layouts(ranks: RankPool, four_layers: list[tuple[Path, Path, torch.Tensor]], name: str) -> None:
    world_size, layout = FURTHER_LAYOUTS[name]
    ranks(world_size, check_values_of_all, [(*case, layout, "reward_model") for case in four_layers])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in ("TP2 SP", "CP2", "EP2") else pytest.param(name, marks=pytest.mark.nightly) for name in STEPS]
)
def test_steps_equal_adamw(ranks: RankPool, tmp_path: Path, name: str) -> None:
    """Three, clipped, of the head and the model below it."""
    world_size, family, layout = STEPS[name]
    shape = {"layers": 4, "tied": False} | ({"sliding_window": 4} if family == "mistral" else {})
    path, head = reward_model(tmp_path / "critic", family, **shape)
    base, rates = tiny(tmp_path / "base", family, **shape), [CONFIG.lr] * 3
    returned = ranks(world_size, megatron_steps, path, CONFIG, layout, len(rates), "reward_model")
    oracle = torch_steps(base, CONFIG, rates, head)
    assert min(oracle[1]) > CONFIG.clip_grad
    compare_steps(returned, oracle, torch_steps(base, CONFIG, [], head)[0], rates)


def fresh_critic(path: Path, target: Path) -> None:
    strategy = started(path, OptimizerConfig(lr=1e-2), value_init="actor")
    batch = batch_of()
    out = forward(strategy, batch, ["values"], 4)
    assert out is not None
    assert out.ragged("values").values.abs().max() == 0, "a new critic's values are all 0"
    first = train_step(strategy, batch, weighted_loss, ["values"], 4).loss
    for _ in range(5):
        last = train_step(strategy, batch, weighted_loss, ["values"], 4).loss
    assert last < 0.8 * first
    strategy.save_hf(target)
    trained = own_weights(strategy)
    again = started(target, None, value_init="path")
    assert all(torch.equal(tensor, trained[name]) for name, tensor in own_weights(again).items())
    mine, theirs = (forward(one, batch, ["values"], 4) for one in (strategy, again))
    assert mine is not None
    assert theirs is not None
    assert_equal({"values": mine.ragged("values").values}, {"values": theirs.ragged("values").values}, 1e-5)
    with pytest.raises(AssertionError, match="the model has .*values"):
        forward(strategy, batch, ["log_probs"], 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_critic_is_trained_saved_and_loaded(ranks: RankPool, tmp_path: Path, family: str) -> None:
    path = tiny(tmp_path / "model", family)
    ranks(1, fresh_critic, path, tmp_path / "out")
    assert "score.weight" in load_file(tmp_path / "out" / "model.safetensors")
    assert not any(name.startswith("lm_head") for name in load_file(tmp_path / "out" / "model.safetensors"))
    model, report = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not report["missing_keys"], "transformers finds every weight"
    assert model.score.weight.shape == (1, 128)


def save_and_load_critics(folders: list[Path]) -> None:
    for folder in folders:
        saved = started(folder, None, value_init="actor")
        saved.save_hf(folder / "critic")
        started(folder / "critic", None, value_init="path")


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_critic_has_its_class_whatever_the_model_says_of_its_own(ranks: RankPool, tmp_path: Path, family: str) -> None:
    folders = []
    for name, fields in {"missing": {}, "null": {"architectures": None}, "none": {"architectures": []}}.items():
        folders.append(tiny(tmp_path / name, family, layers=1, **({"tied": False} if family == "qwen3_moe" else {})))
        config = json.loads((folders[-1] / "config.json").read_text())
        del config["architectures"]
        (folders[-1] / "config.json").write_text(json.dumps(config | fields))
    ranks(1, save_and_load_critics, folders)
    for folder in folders:
        model, report = AutoModelForSequenceClassification.from_pretrained(folder / "critic", output_loading_info=True)
        assert not report["missing_keys"]
        assert json.loads((folder / "critic" / "config.json").read_text())["architectures"] == [type(model).__name__]


def refused(path: Path, init: str) -> str:
    with pytest.raises(ValueError) as error:
        started(path, None, value_init=init, path_key="critic.path")
    return str(error.value)


def test_checkpoints_without_or_with_another_head(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "model")
    for init in ("reward_model", "path"):
        assert (
            f"critic.path: {path} lacks score.weight; critic.init '{init}' needs a checkpoint with a value head"
            in ranks(1, refused, path, init)[0]
        )
    several = load_file(path / "model.safetensors") | {"score.weight": torch.zeros(3, 128)}
    save_file(several, path / "model.safetensors")
    message = ranks(1, refused, path, "reward_model")[0]
    assert "score.weight has the shape [3, 128] in its safetensors; by config.json it is [1, 128]" in message
