"""Table from Megatron tensors to Hugging Face tensors.

Tensor parallelism shards a Hugging Face tensor evenly along one dimension; a rank's Megatron tensor joins shards of one or more of them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch

from roll_lite.models.hf_config import HfConfig


class Layout(Enum):
    PLAIN = "one tensor"
    STACKED = "one after the other (gate above up)"
    GROUPED = "query, key, value interleaved by key/value head: the queries of a group, its key, its value"


EXPERT = "<expert>"
"""Placeholder for an expert's number: global in Hugging Face names, local in Megatron's."""


@dataclass(frozen=True)
class Entry:
    megatron: str
    """Megatron's tensor name, in entries of LAYER without `decoder.layers.<n>.`."""
    hf: tuple[str, ...]
    """Hugging Face tensor names, in entries of LAYER without `model.layers.<n>.`."""
    cut: int | None
    """Sharded dimension; None if replicated."""
    layout: Layout = Layout.PLAIN
    vocabulary: bool = False
    """True if dimension 0 is the vocabulary, padded to equal shares."""
    only_with: Literal["qkv_bias", "qk_norm", "experts", "no experts"] | None = None
    fused: str | None = None
    """Parameter name with Transformer Engine's layers, if different."""

    @property
    def of_experts(self) -> bool:
        """True for tensors of single experts, sharded by expert_tensor_parallel."""
        return EXPERT in self.megatron

    def megatron_name(self, layer: int, expert: int | None, among: Container[str]) -> str:
        """Return the parameter's name in Megatron's model: `megatron` or `fused`. `layer`, `expert`: local numbers. `among`: the model's
        names."""
        names = [f"decoder.layers.{layer}.{name}".replace(EXPERT, str(expert)) for name in (self.megatron, self.fused) if name]
        found = next((name for name in names if name in among), None)
        assert found is not None, f"the Megatron model has no {' or '.join(names)}"
        return found

    def present(self, hf: HfConfig, layer: int) -> bool:
        match self.only_with:
            case None:
                return True
            case "experts" | "no experts":
                return hf.has_experts(layer) == (self.only_with == "experts")
            case _:
                return bool(getattr(hf, self.only_with))

    def hf_names(self, layer: int, expert: int | None = None) -> tuple[str, ...]:
        return tuple(f"model.layers.{layer}.{name}".replace(EXPERT, str(expert)) for name in self.hf)


def _attention(part: str) -> tuple[str, ...]:
    return tuple(f"self_attn.{name}_proj.{part}" for name in "qkv")


LAYER = (
    Entry("input_layernorm.weight", ("input_layernorm.weight",), cut=None, fused="self_attention.linear_qkv.layer_norm_weight"),
    Entry("self_attention.linear_qkv.weight", _attention("weight"), cut=0, layout=Layout.GROUPED),
    Entry("self_attention.linear_qkv.bias", _attention("bias"), cut=0, layout=Layout.GROUPED, only_with="qkv_bias"),
    Entry("self_attention.q_layernorm.weight", ("self_attn.q_norm.weight",), cut=None, only_with="qk_norm"),
    Entry("self_attention.k_layernorm.weight", ("self_attn.k_norm.weight",), cut=None, only_with="qk_norm"),
    Entry("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), cut=1),
    Entry(
        "pre_mlp_layernorm.weight",
        ("post_attention_layernorm.weight",),
        cut=None,
        only_with="no experts",
        fused="mlp.linear_fc1.layer_norm_weight",
    ),
    Entry("pre_mlp_layernorm.weight", ("post_attention_layernorm.weight",), cut=None, only_with="experts"),
    Entry(
        "mlp.linear_fc1.weight",
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        cut=0,
        layout=Layout.STACKED,
        only_with="no experts",
    ),
    Entry("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), cut=1, only_with="no experts"),
    Entry("mlp.router.weight", ("mlp.gate.weight",), cut=None, only_with="experts"),
    Entry(
        f"mlp.experts.local_experts.{EXPERT}.linear_fc1.weight",
        (f"mlp.experts.{EXPERT}.gate_proj.weight", f"mlp.experts.{EXPERT}.up_proj.weight"),
        cut=0,
        layout=Layout.STACKED,
        only_with="experts",
        fused=f"mlp.experts.linear_fc1.weight{EXPERT}",
    ),
    Entry(
        f"mlp.experts.local_experts.{EXPERT}.linear_fc2.weight",
        (f"mlp.experts.{EXPERT}.down_proj.weight",),
        cut=1,
        only_with="experts",
        fused=f"mlp.experts.linear_fc2.weight{EXPERT}",
    ),
)
EMBEDDING = Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",), cut=0, vocabulary=True)
FINAL_NORM = Entry("decoder.final_layernorm.weight", ("model.norm.weight",), cut=None)
LM_HEAD = Entry("output_layer.weight", ("lm_head.weight",), cut=0, vocabulary=True)
TIED_HEAD = Entry("output_layer.weight", EMBEDDING.hf, cut=0, vocabulary=True)
VALUE_HEAD = Entry("output_layer.weight", ("score.weight",), cut=None)
"""Named as in Hugging Face's one-label sequence classification, so that reward models can be loaded."""


@dataclass(frozen=True)
class Binding:
    entry: Entry
    hf: tuple[str, ...]
    parameter: torch.nn.Parameter
    exported: bool = True
    """False for a second copy of tied embeddings, on another pipeline stage."""


def bind(chunks: Sequence[Any], hf: HfConfig) -> list[Binding]:
    bindings: list[Binding] = []
    for chunk in chunks:
        parameters = dict(chunk.named_parameters())
        if chunk.pre_process:
            bindings.append(Binding(EMBEDDING, EMBEDDING.hf, parameters.pop(EMBEDDING.megatron)))
        for position, layer in enumerate(chunk.decoder.layers):
            number = layer.layer_number - 1
            for entry in filter(lambda entry: entry.present(hf, number), LAYER):
                for place, expert in enumerate(layer.mlp.local_expert_indices if entry.of_experts else [None]):
                    own = entry.megatron_name(position, place, parameters)
                    bindings.append(Binding(entry, entry.hf_names(number, expert), parameters.pop(own)))
        if chunk.post_process:
            bindings.append(Binding(FINAL_NORM, FINAL_NORM.hf, parameters.pop(FINAL_NORM.megatron)))
            head = VALUE_HEAD if chunk.has_value_head else TIED_HEAD if hf.tied_embeddings else LM_HEAD
            if head.megatron in parameters:
                bindings.append(Binding(head, head.hf, parameters.pop(head.megatron), exported=head is not TIED_HEAD))
        assert not parameters, f"parameters without a place in the Hugging Face mapping: {', '.join(parameters)}"
    return bindings


def ranks_of_a_group(entry: Entry, hf: HfConfig, tensor_ranks: int) -> int:
    """Return how many consecutive tensor-parallel ranks split a key/value head and its queries: 1, except for q, k and v with fewer heads
    than ranks."""
    return max(tensor_ranks // hf.key_value_heads, 1) if entry.layout is Layout.GROUPED else 1


def join(entry: Entry, cuts: Sequence[torch.Tensor], hf: HfConfig, dim: int = 0) -> torch.Tensor:
    """Join this rank's Hugging Face shards into a Megatron tensor along `dim`."""
    match entry.layout:
        case Layout.PLAIN:
            return cuts[0]
        case Layout.STACKED:
            return torch.cat(list(cuts), dim)
        case Layout.GROUPED:
            groups = cuts[1].shape[dim] // hf.head_dim
            return torch.cat([cut.unflatten(dim, (groups, -1)) for cut in cuts], dim + 1).flatten(dim, dim + 1)


def take_apart(entry: Entry, local: torch.Tensor, hf: HfConfig) -> list[torch.Tensor]:
    """Split a Megatron tensor into Hugging Face shards; inverse of `join`."""
    match entry.layout:
        case Layout.PLAIN:
            return [local]
        case Layout.STACKED:
            return list(local.chunk(2))
        case Layout.GROUPED:
            queries = hf.heads // hf.key_value_heads
            by_group = local.reshape(-1, queries + 2, hf.head_dim, *local.shape[1:])
            return [part.reshape(-1, *local.shape[1:]) for part in by_group.split([queries, 1, 1], dim=1)]
