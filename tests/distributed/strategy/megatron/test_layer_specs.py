"""Layers of Transformer Engine's shape: modules with its names and arguments, which compute with torch what its kernels do.

What Megatron wraps around them (TEGroupedMLP, checkpoints) is its own. Hugging Face is the oracle."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_cases import batch_of, own_weights, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from safetensors.torch import load_file
from support_passes import train_step
from test_megatron_oracle import check_forward, check_gradients

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.data.microbatch import TokenBudget
from roll_lite.distributed.strategy.megatron import layers
from roll_lite.distributed.strategy.megatron import strategy as strategy_module
from roll_lite.distributed.strategy.megatron.hf_mapping import EXPERT, LAYER
from roll_lite.distributed.strategy.megatron.layers import TORCH, TORCH_ON_GPU, LayerParts, TorchRMSNorm, chosen_parts

from megatron.core.models.common.embeddings import rope_utils  # isort: skip  (roll_lite prepares megatron.core)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear  # isort: skip
from megatron.core.transformer.mlp import MLPSubmodules  # isort: skip
from megatron.core.transformer.moe.experts import TEGroupedMLP  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip

LR = OptimizerConfig(lr=1e-3)


class Norm(TorchRMSNorm):
    """For TENorm, which has a state for fp8 as all of Transformer Engine's modules."""

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.dtype == torch.uint8


class NormedColumn(ColumnParallelLinear):
    """For TELayerNormColumnParallelLinear."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.layer_norm_weight = torch.nn.Parameter(torch.empty(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor, *given: Any, **options: Any) -> Any:
        normed = torch.nn.functional.rms_norm(x, x.shape[-1:], self.layer_norm_weight, self.config.layernorm_epsilon)
        return super().forward(normed, *given, **options)


TE = Path(next(iter(find_spec("megatron.core").submodule_search_locations))) / "extensions/transformer_engine.py"  # type: ignore[union-attr, arg-type]


def of_megatron(owner: str, name: str) -> Any:
    """A method of its extensions, whose classes are there with Transformer Engine only. `super` of its body is the stand-in."""
    from megatron.core.extensions import transformer_engine

    classes = [
        node for node in ast.walk(ast.parse(TE.read_text(encoding="utf-8"))) if isinstance(node, ast.ClassDef) and node.name == owner
    ]
    (method,) = (node for node in classes[0].body if isinstance(node, ast.FunctionDef) and node.name == name)
    found: dict[str, Any] = {}
    code = ast.unparse(method).replace("super()", "self")
    exec(code, vars(transformer_engine), found)
    return found[name]


class Grouped(torch.nn.Module):
    """For TEGroupedLinear: the weights of a rank's experts by number. How they are stored is Megatron's own."""

    use_bias = False
    _sharded_state_dict_grouped = of_megatron("TEGroupedLinear", "_sharded_state_dict_grouped")

    def __init__(self, num_gemms: int, input_size: int, output_size: int, *, config: Any, pg_collection: Any, **_: Any) -> None:
        super().__init__()
        assert pg_collection.expt_tp.size() == 1
        self.num_gemms = num_gemms
        self._pg_collection, self._tp_group = pg_collection, pg_collection.expt_tp
        for number in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
            self.register_parameter(f"weight{number}", weight)

    def forward(self, x: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, None]:
        parts = [part @ getattr(self, f"weight{number}").T for number, part in enumerate(x.split(m_splits))]
        return torch.cat(parts), None

    def get_extra_state(self) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        assert state.dtype == torch.uint8

    def _split_extra_state(self, state: torch.Tensor) -> list[torch.Tensor]:
        return [state] * self.num_gemms


class GroupedColumn(Grouped):
    sharded_state_dict = of_megatron("TEColumnParallelGroupedLinear", "sharded_state_dict")


class GroupedRow(Grouped):
    sharded_state_dict = of_megatron("TERowParallelGroupedLinear", "sharded_state_dict")


STAND_INS = LayerParts(
    norm=Norm,
    normed_column=NormedColumn,
    row=RowParallelLinear,
    experts=ModuleSpec(TEGroupedMLP, submodules=MLPSubmodules(linear_fc1=GroupedColumn, linear_fc2=GroupedRow)),
    fused=True,
)


def fused_rope(t: torch.Tensor, freqs: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """For Transformer Engine's: [tokens, 1, heads, size] turned by the angles [tokens, 1, 1, size] of each token, in float32."""
    assert not interleaved and freqs.dtype == torch.float32 and freqs.shape == (len(t), 1, 1, t.shape[-1])
    first, second = t.float().chunk(2, dim=-1)
    turned = torch.view_as_complex(torch.stack([first, second], dim=-1)) * torch.polar(torch.ones(()), freqs.chunk(2, dim=-1)[0])
    return torch.cat([turned.real, turned.imag], dim=-1).to(t.dtype)


@contextmanager
def with_stand_ins() -> Iterator[None]:
    with (
        patch.object(strategy_module, "chosen_parts", lambda *_: STAND_INS),
        patch.object(layers, "chosen_parts", lambda *_, **__: STAND_INS),
    ):
        yield


with_fused_rope = patch.object(rope_utils, "fused_apply_rotary_pos_emb", fused_rope)


@with_fused_rope
def parity(path: Path, layout: dict[str, Any]) -> None:
    with with_stand_ins():
        check_forward(path, 100, layout)
        check_gradients(path, 100, layout, None, [TokenBudget(20)])
        strategy = started(path, **layout)
        weights = own_weights(strategy)
    assert strategy._model.config.apply_rope_fusion
    saved = load_file(path / "model.safetensors")
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items())
    assert layout or set(weights) == set(saved)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    some_dense = {"layers": 2, "mlp_only_layers": [0], "tied": False}
    return {
        "qwen2": tiny(folder / "qwen2"),
        "qwen3": tiny(folder / "qwen3", "qwen3"),
        "qwen3_moe": tiny(folder / "moe", "qwen3_moe", **some_dense),
    }


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_model_of_such_layers_is_hugging_faces(ranks: RankPool, models: dict[str, Path], name: str) -> None:
    ranks(1, parity, models[name], {})


@pytest.mark.parametrize(
    ("name", "layout"), [("qwen3", {"tensor_parallel": 2, "sequence_parallel": True}), ("qwen3_moe", {"expert_parallel": 2})]
)
def test_so_it_is_on_two_ranks(ranks: RankPool, models: dict[str, Path], name: str, layout: dict[str, Any]) -> None:
    ranks(2, parity, models[name], layout)


@with_fused_rope
def from_one_kind_to_the_other(path: Path, folder: Path, layout: dict[str, Any]) -> None:
    def steps(strategy: Any, count: int) -> list[float]:
        return [train_step(strategy, shard(batch_of(seed=seed), strategy), weighted_loss, ["log_probs"], 6).loss for seed in range(count)]

    before = started(path, LR, **layout)
    steps(before, 2)
    before.save_checkpoint(folder / "torch")
    with with_stand_ins():
        after = started(path, LR, **layout)
    after.load_checkpoint(folder / "torch")
    assert steps(after, 3) == pytest.approx(steps(before, 3), rel=1e-5)
    after.save_checkpoint(folder / "fused")
    back = started(path, LR, **layout)
    back.load_checkpoint(folder / "fused")
    expected = own_weights(after)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in own_weights(back).items())
    assert steps(back, 2) == pytest.approx(steps(after, 2), rel=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_checkpoint_goes_from_one_kind_to_the_other(ranks: RankPool, models: dict[str, Path], tmp_path: Path, name: str) -> None:
    """Qwen3's heads have norms of their own."""
    ranks(1, from_one_kind_to_the_other, models[name], tmp_path, {})


@pytest.mark.slow
@pytest.mark.nightly
def test_so_it_does_where_ranks_share_experts(ranks: RankPool, models: dict[str, Path], tmp_path: Path) -> None:
    ranks(2, from_one_kind_to_the_other, models["qwen3_moe"], tmp_path, {"expert_parallel": 2})


def test_the_names_are_those_that_megatron_knows() -> None:
    from megatron.core.models.gpt import gpt_layer_specs

    source = inspect.getsource(gpt_layer_specs)
    for name, fused in layers.STORED_NAMES_WITHOUT_EXPERTS.items():
        assert f'"{name}": "{fused}"' in source, "Megatron stores norms of its own layers by the same names"
    assert 'full_state_dict[f"weight{gemm_idx}"]' in TE.read_text(encoding="utf-8")
    fused_names = {entry.fused for entry in LAYER if entry.fused}
    assert fused_names == {
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
        f"mlp.experts.linear_fc1.weight{EXPERT}",
        f"mlp.experts.linear_fc2.weight{EXPERT}",
    }


def test_who_gets_which_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "transformer_engine", lambda: STAND_INS)

    def told(installed: bool, cuda: bool, adapters: bool = False) -> str:
        monkeypatch.setattr(layers, "find_spec", lambda _: object() if installed else None)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        plain = TORCH_ON_GPU if cuda and not adapters else TORCH
        assert chosen_parts("torch", adapters) is plain
        try:
            parts = chosen_parts("transformer_engine", adapters)
        except ValueError as error:
            assert chosen_parts("auto", adapters) is plain
            return str(error)
        assert parts is STAND_INS and chosen_parts("auto", adapters) is STAND_INS
        return ""

    assert told(installed=True, cuda=True) == ""
    assert told(installed=False, cuda=True) == (
        "strategy.layers: transformer_engine is not installed here (the package transformer-engine); use torch, or auto"
    )
    assert "needs a GPU" in told(installed=True, cuda=False)
    assert "adapters (lora)" in told(installed=True, cuda=True, adapters=True)
