"""Read a model's shape from its Hugging Face config.json, without torch, transformers or Megatron."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from roll_lite.files import elsewhere, kind_of, read_object
from roll_lite.models.hf_fields import HEADS, LLAMA3_FIELDS, refusals, rope_fields

MODEL_FILE = "model.json"
"""File in a role's checkpoint that stores `tensor_facts`."""
NOT_IN_TENSORS = ("max_positions", "norm_eps", "rope", "window")
SUPPORTED_TYPES = ("qwen2", "qwen3", "qwen3_moe", "llama", "mistral")
"""`model_type`s that the Megatron strategy supports."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, even one that roll_lite cannot train."""

    model_type: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int | None
    """Size of dense layers; None if all layers have experts."""
    vocab_size: int
    max_positions: int | None
    tied_embeddings: bool
    window: int | None
    experts: int | None = None
    """Number of experts; None for dense models, or if the field in config.json is unknown."""
    expert_feed_forward: int | None = None


@dataclass(frozen=True)
class ExpertsConfig:
    count: int
    per_token: int
    feed_forward: int
    normalised: bool
    """True if the router's weights of a token's experts are normalised to sum to 1."""
    layers: tuple[bool, ...]
    """[layers]: True if the layer has experts."""


@dataclass(frozen=True)
class RopeConfig:
    theta: float
    linear_factor: float | None = None
    """Factor by which positions are divided; None: no linear scaling."""
    llama3: Mapping[str, float] | None = None
    """Llama 3's scaling, {field: value}."""


@dataclass(frozen=True)
class HfConfig:
    """Architecture of a model that roll_lite can train."""

    family: str
    vocab_size: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    rope: RopeConfig
    window: int | None
    """Sliding attention window in tokens, including the token itself; None: the whole context."""
    experts: ExpertsConfig | None = None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    @property
    def attention_parity_tokens(self) -> float:
        """Row length at which attention costs as many operations as the multiplications with weight matrices."""
        # A token is multiplied with each matrix once, and with half of the row's tokens, on average, twice (scores, values).
        return self.hidden * self._weights_per_hidden / (self.heads * self.head_dim)

    def flops(self, lengths: Iterable[int], outputs: int, passes: int = 1) -> float:
        """FLOPs of weights and causal attention in a forward pass or, with training_passes, training. `outputs`: tokens that reach the
        output layer."""
        tokens = pairs = 0
        for length in lengths:
            near = min(length, self.window or length)
            tokens += length
            pairs += near * (2 * length - near + 1) // 2
        weights = tokens * self.token_flops(0) + 2 * outputs * self.hidden * self.vocab_size
        attention = tokens * (self.token_flops(pairs / max(tokens, 1)) - self.token_flops(0))
        return passes * weights + (1 if passes == 1 else 3) * attention  # attention has no weights that LoRA freezes

    def token_flops(self, seen: float) -> float:
        """FLOPs of one token that attends to `seen` tokens, without the output layer."""
        routers = 0 if self.experts is None else sum(self.experts.layers) * self.experts.count
        of_weights = self.hidden * (self.layers * self._weights_per_hidden + routers)
        return 2 * (of_weights + 2 * seen * self.layers * self.heads * self.head_dim)

    @property
    def _weights_per_hidden(self) -> float:
        """Weights that a token uses in a layer, divided by `hidden`; mean over layers."""
        experts = self.experts
        widths = [
            self.feed_forward if experts is None or not experts.layers[layer] else experts.per_token * experts.feed_forward
            for layer in range(self.layers)
        ]
        return (2 * self.heads + 2 * self.key_value_heads) * self.head_dim + 3 * sum(widths) / len(widths)

    def tensor_facts(self, dtype: str, has_values: bool) -> dict[str, Any]:
        """Facts that determine a checkpoint's tensors, as JSON values: sizes, dtype and kind of output. `has_values`: value head, not LM
        head."""
        shape = {name: value for name, value in asdict(self).items() if name not in NOT_IN_TENSORS}
        return {**json.loads(json.dumps(shape)), "model.dtype": dtype, "outputs": "values" if has_values else "tokens"}


def check_same_model(checkpoint: Path, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError for a checkpoint of another model or precision. Checkpoints without model.json are accepted."""
    if kind_of(checkpoint / MODEL_FILE) is None:
        return
    held = read_object(checkpoint / MODEL_FILE)
    differences = [f"{name} is {held[name]} there, {value} here" for name, value in wanted.items() if held.get(name, value) != value]
    if differences:
        raise ValueError(f"checkpoint.resume: {checkpoint} holds another model: {'; '.join(differences)}")


def read_config(folder: Path) -> dict[str, Any]:
    run = folder.parent
    if (found := kind_of(folder)) != "folder":
        why = f" ({run} is an evaluation; name the run that trained)" if kind_of(run / "evaluation.json") else elsewhere(folder)
        raise ValueError(f"{folder} is no folder" if found else f"no such folder: {folder}{why}")
    if kind_of(folder / "config.json") is None:
        wanted = f"{folder / 'model'}, the model of this run" if kind_of(folder / "model/config.json") else "a model in Hugging Face format"
        raise ValueError(f"no config.json in {folder}; expected {wanted}")
    return read_object(folder / "config.json")


def read_model_shape(folder: Path) -> ModelShape:
    raw = read_config(folder)
    try:
        heads = _size(raw, "num_attention_heads", most=_MANY)
        if not isinstance(raw.get("model_type"), str):
            raise ValueError(
                f"model_type is {raw['model_type']!r:.40}; it must be a name" if "model_type" in raw else "has no 'model_type'"
            )
        return ModelShape(
            model_type=raw["model_type"],
            layers=_size(raw, "num_hidden_layers", most=_MANY),
            heads=heads,
            kv_heads=_key_value_heads(raw, heads),
            head_dim=_head_dim(raw, heads),
            feed_forward=None if raw["model_type"] == "qwen3_moe" and all(_experts(raw).layers) else _size(raw, "intermediate_size"),
            vocab_size=_size(raw, "vocab_size"),
            max_positions=_size(raw, "max_position_embeddings") if raw.get("max_position_embeddings") is not None else None,
            tied_embeddings=raw.get("tie_word_embeddings", False) is True,
            window=sliding_window(raw),
            experts=_size(raw, _experts_field(raw)) if _experts_field(raw) in raw else None,
            expert_feed_forward=_size(raw, "moe_intermediate_size") if "moe_intermediate_size" in raw else None,
        )
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from error


_MANY = 10_000


def _size(raw: Mapping[str, Any], name: str, default: int | None = None, most: int = 2**31 - 1) -> int:
    value = raw.get(name)
    if value is None and default is not None:
        return default
    if name not in raw:
        raise ValueError(f"has no {name!r}")
    if type(value) is not int or not 0 < value <= most:
        raise ValueError(f"{name} is {value!r:.40}; it must be a positive integer" + (f" up to {most:,}" if most == _MANY else ""))
    return value


def read_hf_config(folder: Path, key: str = "model.path", architectures: Sequence[str] = HEADS) -> HfConfig:
    """Read the architecture of a trainable model. ValueError names all unsupported fields. `key`: YAML path of the folder."""
    try:
        raw = read_config(folder)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error
    try:
        return hf_config_of(raw, architectures)
    except ValueError as error:
        raise ValueError(f"{key}: {folder / 'config.json'}: {error}") from error


def sliding_window(raw: Mapping[str, Any]) -> int | None:
    """Sliding window of a Mistral model, 4,096 if the field is missing; None for other families."""
    given = {"sliding_window": 4096, **raw}
    return None if raw["model_type"] != "mistral" or given["sliding_window"] is None else _size(given, "sliding_window")


def _key_value_heads(raw: Mapping[str, Any], heads: int) -> int:
    missing = {"mistral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}.get(raw["model_type"], heads)
    return _size(raw, "num_key_value_heads", heads if "num_key_value_heads" in raw else missing)


def _head_dim(raw: Mapping[str, Any], heads: int) -> int:
    size = _size(raw, "head_dim", 128 if raw["model_type"] == "qwen3" else max(_size(raw, "hidden_size") // heads, 1))
    if raw["model_type"] == "qwen2" and size != (engines := _size(raw, "hidden_size") // heads):
        raise ValueError(f"head_dim is {size}; engines take hidden_size / num_attention_heads = {engines} for it in a qwen2 model")
    return size


def hf_config_of(raw: dict[str, Any], architectures: Sequence[str] = HEADS) -> HfConfig:
    """Architecture described by the contents of a config.json."""
    family = raw.get("model_type")
    if family not in SUPPORTED_TYPES:
        raise ValueError(f"model_type {family!r} cannot be trained; supported are {', '.join(SUPPORTED_TYPES)}")
    refused = list(refusals(raw, architectures))
    try:
        rope = rope_fields(raw)
    except ValueError as error:
        refused.append(str(error))
    if refused:
        raise ValueError("; ".join(refused))
    heads, norm_eps = _size(raw, "num_attention_heads", most=_MANY), raw.get("rms_norm_eps", 1e-6)
    if not isinstance(norm_eps, int | float) or not 0 < norm_eps < 1:
        raise ValueError(f"rms_norm_eps is {norm_eps!r}; it must be a small positive number")
    if not isinstance(raw.get("tie_word_embeddings", False), bool):
        raise ValueError(f"tie_word_embeddings is {raw['tie_word_embeddings']!r:.40}; it must be true or false")
    hidden = _size(raw, "hidden_size")
    positions = {"llama": 2048, "mistral": 4096 * 32}.get(family, 32768)
    return HfConfig(
        family=family,
        vocab_size=_size(raw, "vocab_size"),
        hidden=hidden,
        feed_forward=_size(raw, "intermediate_size"),
        layers=_size(raw, "num_hidden_layers", most=_MANY),
        heads=heads,
        key_value_heads=_key_value_heads(raw, heads),
        head_dim=_head_dim(raw, heads),
        max_positions=_size(raw, "max_position_embeddings", positions),
        norm_eps=float(norm_eps),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        rope=RopeConfig(
            float(rope["rope_theta"]),
            linear_factor=float(rope["factor"]) if rope["rope_type"] == "linear" else None,
            llama3={name: rope[name] for name in LLAMA3_FIELDS} if rope["rope_type"] == "llama3" else None,
        ),
        window=sliding_window(raw),
        experts=_experts(raw) if family == "qwen3_moe" else None,
    )


def _experts_field(raw: Mapping[str, Any]) -> str:
    """Name of the expert-count field: transformers 5 writes num_local_experts, published Qwen3-MoE models num_experts."""
    return "num_experts" if "num_experts" in raw else "num_local_experts"


def _experts(raw: Mapping[str, Any]) -> ExpertsConfig:
    count, per_token = _size(raw, _experts_field(raw)), _size(raw, "num_experts_per_tok")
    if raw.get("num_local_experts", count) != count:
        raise ValueError(f"num_local_experts is {raw['num_local_experts']!r} beside num_experts {count}; keep one of them")
    if per_token > count:
        raise ValueError(f"num_experts_per_tok is {per_token}; there are only {count} experts")
    normalised = raw.get("norm_topk_prob", False)
    if not isinstance(normalised, bool):
        raise ValueError(f"norm_topk_prob is {normalised!r:.40}; it must be true or false")
    if normalised and per_token == 1:
        raise ValueError("norm_topk_prob is true with one expert per token: its weight would always be 1 and the router learn nothing")
    step, dense = _size(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ValueError(f"mlp_only_layers is {dense!r:.40}; it must be a list of layer numbers")
    layers = tuple((layer + 1) % step == 0 and layer not in dense for layer in range(_size(raw, "num_hidden_layers", most=_MANY)))
    if not any(layers):
        raise ValueError("mlp_only_layers and decoder_sparse_step leave no layer with experts; use model_type 'qwen3'")
    return ExpertsConfig(count, per_token, _size(raw, "moe_intermediate_size"), normalised, layers)
