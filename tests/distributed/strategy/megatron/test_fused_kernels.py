"""What GPUs compute with in the place of torch's single operations, here by the same formulas without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_cases import tiny
from megatron_ranks import RankPool
from test_megatron_oracle import check_forward, check_gradients

from roll_lite.data.microbatch import TokenBudget
from roll_lite.distributed.strategy.megatron import layers
from roll_lite.distributed.strategy.megatron.experts import _GroupedProduct
from roll_lite.distributed.strategy.megatron.model import COMPILED_VARIANTS, compile_rotary_embedding
from roll_lite.distributed.strategy.megatron.vocabulary import HeadGradients

from megatron.core.models.common.embeddings import rope_utils  # isort: skip  (roll_lite prepares it)
from megatron.core.fusions import fused_bias_swiglu  # isort: skip  (roll_lite prepares it)
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl, weighted_bias_swiglu_impl  # isort: skip  (roll_lite prepares it)


def swiglu(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """As Megatron's MLP computes it without fusion."""
    gate, up = x.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * (up + 0.0)
    return product if weights is None else (product * weights).to(x.dtype)


def fused(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    return bias_swiglu_impl(x, None) if weights is None else weighted_bias_swiglu_impl(x, None, weights)


def results(function: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor | None) -> list[torch.Tensor]:
    """Value and gradients."""
    given = [each.detach().clone().requires_grad_() for each in (x, weights) if each is not None]
    value = function(given[0], given[1] if len(given) > 1 else None)
    value.backward(torch.linspace(-1, 1, value.numel()).view_as(value).to(value.dtype))
    return [value.detach(), *(each.grad for each in given if each.grad is not None)]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("weighted", [False, True], ids=["dense", "expert"])
def test_fused_swiglu_is_the_same_function(dtype: torch.dtype, tolerance: float, weighted: bool) -> None:
    """To `tolerance` of a tensor's norm; in bfloat16 both are that near to float32."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 1, 64, generator=generator).to(dtype)
    x = x.squeeze(1) if weighted else x
    weights = torch.rand(24, 1, generator=generator) if weighted else None
    exact = results(swiglu, x.float(), weights)
    for function in (swiglu, fused):
        found = results(function, x, weights)
        assert [each.dtype for each in found] == [dtype, dtype, torch.float32][: len(found)] and len(found) == len(exact)
        for ours, expected in zip(found, exact, strict=True):
            assert float((ours.float() - expected).norm()) <= tolerance * float(expected.norm())


def test_fused_swiglu_stays_compiled_for_any_number_of_tokens() -> None:
    """Traced as on GPUs, for single experts and dense layers, with and without gradients of input and router."""
    names = ("swiglu", "swiglu_back", "weighted_swiglu", "weighted_swiglu_back")
    functions = {name: torch.compile(getattr(fused_bias_swiglu, name), backend="aot_eager") for name in names}
    limits = {"recompile_limit": COMPILED_VARIANTS, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits), patch.multiple(fused_bias_swiglu, **functions):  # type: ignore[attr-defined]
        for count, with_gradient, of_router in product((7, 1, 0, 2, *range(3, 20)), (False, True), (False, True)):
            x = torch.randn(count, 16, requires_grad=with_gradient)
            weights = torch.rand(count, 1, requires_grad=with_gradient and of_router)
            with torch.set_grad_enabled(with_gradient):
                for value in (fused(x[:, None] if count else x, None), fused(x, weights)):
                    if with_gradient:
                        value.sum().backward()


@pytest.fixture
def compiled_rotary(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Traced as on GPUs. Undone after the test."""
    monkeypatch.setattr(rope_utils, "_apply_rotary_pos_emb_bshd", rope_utils._apply_rotary_pos_emb_bshd)
    compile_rotary_embedding("aot_eager")
    return rope_utils._apply_rotary_pos_emb_bshd


def test_the_compiled_rotary_embedding_stays_compiled_for_any_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, compiled_rotary: Callable[..., torch.Tensor]
) -> None:
    """Queries and keys are views into one product, with different numbers of heads."""
    monkeypatch.undo()
    plain, options = rope_utils._apply_rotary_pos_emb_bshd, {"rotary_interleaved": False, "multi_latent_attention": False, "mscale": 1.0}
    limits = {"recompile_limit": COMPILED_VARIANTS, "fail_on_recompile_limit_hit": True}
    with torch._dynamo.config.patch(limits):  # type: ignore[attr-defined]
        for count, with_gradient in product((7, 1, 2, *range(3, 20)), (False, True)):
            angles = torch.rand(count, 1, 1, 16)
            whole = torch.randn(count, 1, 6, 16, requires_grad=with_gradient)
            for part in (slice(0, 4), slice(4, 6)):
                found = []
                for function in (compiled_rotary, plain):
                    with torch.set_grad_enabled(with_gradient):
                        value = function(whole[:, :, part], angles, **options)
                    found.append([value, *(torch.autograd.grad(value.square().sum(), whole) if with_gradient else ())])
                for ours, theirs in zip(*found, strict=True):
                    torch.testing.assert_close(ours, theirs)


def test_a_product_on_gpus_sums_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no such product: its arguments are checked without contents, its formula is written out here."""

    def product_on_gpu(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, **options: Any) -> torch.Tensor:
        out = options.pop("out")
        torch.ops.aten.addmm.dtype_out(*(each.to("meta") for each in (total, left, right)), **options, out=out.to("meta"))
        return out.copy_(total + left.float() @ right.float())

    class OnGpu(torch.Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(torch, "addmm", product_on_gpu)
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(size, 16, generator=generator).bfloat16() for size in (8, 32))
    found = HeadGradients(hidden, weight, (True, False))
    assert found._hidden is not None
    found._hidden = found._hidden.as_subclass(OnGpu)
    gradients = torch.randn(8, 32, generator=generator)
    for start in range(0, 32, 8):
        found.add(slice(start, start + 8), gradients[:, start : start + 8])
    assert found.hidden is not None and found.hidden.dtype == torch.bfloat16
    torch.testing.assert_close(found._hidden.as_subclass(torch.Tensor), gradients.bfloat16().float() @ weight.float())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_one_product_of_all_experts_is_that_of_each(dtype: torch.dtype, tolerance: float) -> None:
    """One has no tokens, and its gradient is zero."""
    generator = torch.Generator().manual_seed(1)
    tokens, counts = torch.randn(20, 16, generator=generator).to(dtype), [7, 0, 12, 1]
    weights = [torch.randn(8, 16, generator=generator).to(dtype) for _ in counts]
    slope = torch.randn(20, 8, generator=generator).to(dtype)
    found = []
    for grouped in (False, True):
        x, *w = (each.clone().requires_grad_() for each in (tokens, *weights))
        if grouped:
            value = _GroupedProduct.apply(x, torch.tensor(counts).cumsum(0).int(), *w)
        else:
            value = torch.cat([part @ one.T for part, one in zip(x.split(counts), w, strict=True)])
        value.backward(slope)
        found.append([value.detach(), *(each.grad for each in (x, *w))])
    for ours, expected in zip(*found, strict=True):
        assert ours.dtype == dtype and float((ours - expected).norm()) <= tolerance * float(expected.norm())


def as_on_gpus(path: Path, layout: dict[str, Any]) -> None:
    rotary = torch.compile(rope_utils._apply_rotary_pos_emb_bshd, backend="aot_eager")
    with patch.object(layers, "has_fused_kernels", lambda: True), patch.object(rope_utils, "_apply_rotary_pos_emb_bshd", rotary):
        check_forward(path, 100, layout)
        check_gradients(path, 100, layout, None, [TokenBudget(20)])


EP2 = {"expert_parallel": 2, "overlap_grad_reduce": True}


@pytest.mark.parametrize(("family", "layout"), [("qwen2", {}), ("qwen3_moe", {}), ("qwen3_moe", EP2)], ids=["dense", "MoE", "MoE EP2"])
def test_a_model_with_them_is_hugging_faces(ranks: RankPool, tmp_path: Path, family: str, layout: dict[str, Any]) -> None:
    ranks(2 if layout else 1, as_on_gpus, tiny(tmp_path / family, family), layout)
