"""Which models are taken, as what, and what is refused; the oracle is transformers' own reading of the same file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from config_project import MODEL, Project
from published_models import REFUSED, TRAINABLE
from safetensors.torch import load_file, save_file
from support_models import make_tiny_model
from support_weights import tensors
from transformers import (
    AutoConfig,
    AutoModel,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from roll_lite.models.hf_config import ExpertsConfig, HfConfig, RopeConfig, read_hf_config, read_model_shape
from roll_lite.models.hf_fields import ONLY, READ, READ_OF_EXPERTS, WITHOUT_EFFECT
from roll_lite.models.model_files import head_beside_tied_embeddings, largest_token_id


def folder_with(config: dict[str, Any], folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", TRAINABLE)
def test_a_published_model_is_read_as_transformers_reads_it(name: str, tmp_path: Path) -> None:
    ours = read_hf_config(folder_with(TRAINABLE[name], tmp_path))
    theirs = AutoConfig.from_pretrained(tmp_path)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    family = {"ministral": "mistral"}.get(theirs.model_type, theirs.model_type)  # its name for a Mistral that lists its layers' kinds
    assert dataclasses.replace(ours, rope=None) == HfConfig(  # type: ignore[arg-type]
        family=family,
        vocab_size=theirs.vocab_size,
        hidden=theirs.hidden_size,
        feed_forward=theirs.intermediate_size,
        layers=theirs.num_hidden_layers,
        heads=theirs.num_attention_heads,
        key_value_heads=theirs.num_key_value_heads,
        head_dim=head_dim,
        max_positions=theirs.max_position_embeddings,
        norm_eps=theirs.rms_norm_eps,
        tied_embeddings=theirs.tie_word_embeddings,
        qkv_bias=theirs.model_type == "qwen2",
        qk_norm=theirs.model_type in ("qwen3", "qwen3_moe"),
        rope=None,  # type: ignore[arg-type]
        window=theirs.sliding_window if family == "mistral" else None,
        experts=experts_of(theirs) if theirs.model_type == "qwen3_moe" else None,
    )
    theirs.head_dim = head_dim
    # Megatron divides positions where transformers divides frequencies: in float32 the angles differ by rounding.
    torch.testing.assert_close(angles(ours), hf_angles(theirs), rtol=1e-6, atol=1e-6)


def experts_of(theirs: Any) -> ExpertsConfig:
    """As transformers' own layers decide it."""
    with torch.device("meta"):
        model = AutoModel.from_config(theirs)
    return ExpertsConfig(
        count=theirs.num_experts,
        per_token=theirs.num_experts_per_tok,
        feed_forward=theirs.moe_intermediate_size,
        normalised=theirs.norm_topk_prob,
        layers=tuple(hasattr(layer.mlp, "experts") for layer in model.layers),
    )


def angles(hf: HfConfig) -> torch.Tensor:
    """By which Megatron's RoPE turns, as RollModel sets it up."""
    from roll_lite.distributed.strategy.megatron.model import scale_as_llama3  # before Megatron-Core, whose import it changes

    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding  # isort: skip

    rope = RotaryEmbedding(
        hf.head_dim,
        1.0,
        seq_len_interpolation_factor=hf.rope.linear_factor,
        rotary_base=hf.rope.theta,  # type: ignore[arg-type]
        use_cpu_initialization=True,
    )
    scale_as_llama3(rope, hf.rope)
    return rope.get_freqs_non_repeated(64)


def hf_angles(config: Any) -> torch.Tensor:
    return torch.outer(torch.arange(64.0), LlamaRotaryEmbedding(config).inv_freq)


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_another_model_is_refused(name: str, tmp_path: Path) -> None:
    config, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"(?s)model\.path: .*config\.json.*{message}"):
        read_hf_config(folder_with(config, tmp_path))


UNSCALED = ["Qwen2.5-7B with YaRN", "Qwen3-8B with YaRN", "saved by transformers 5, then the family's YaRN advice"]
UNSCALED += ["saved by transformers 5, with linear scaling beside it"]


@pytest.mark.parametrize("name", UNSCALED)
def test_a_scaling_that_is_refused_makes_another_model(name: str, tmp_path: Path) -> None:
    """For transformers, than the one without it."""
    config = REFUSED[name][0]
    theirs = AutoConfig.from_pretrained(folder_with(config, tmp_path))
    theirs.head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    ours = read_hf_config(folder_with(config | {"rope_scaling": None}, tmp_path))
    assert not torch.allclose(angles(ours), hf_angles(theirs), rtol=0.2)  # the slow ones, which hold far positions apart


def test_every_field_of_transformers_config_classes_is_known() -> None:
    known = READ | WITHOUT_EFFECT | set(ONLY) | {"layer_types"}
    for config_class in (Qwen2Config, Qwen3Config, Qwen3MoeConfig, LlamaConfig, MistralConfig):
        fields = {field.name for field in dataclasses.fields(config_class)} | set(config_class().to_dict())
        assert fields <= known | (READ_OF_EXPERTS if config_class is Qwen3MoeConfig else set()), config_class.__name__


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, Qwen3MoeConfig, LlamaConfig, MistralConfig])
def test_what_transformers_saves_is_taken(config_class: Any, tmp_path: Path) -> None:
    config_class(architectures=[config_class.__name__.replace("Config", "ForCausalLM")]).save_pretrained(tmp_path)
    assert read_hf_config(tmp_path).family == config_class.model_type


@pytest.mark.parametrize("config_class", [Qwen2Config, Qwen3Config, Qwen3MoeConfig, LlamaConfig, MistralConfig])
def test_what_is_missing_is_what_transformers_takes_for_it(config_class: Any, tmp_path: Path) -> None:
    theirs = config_class()
    given = ("num_attention_heads", "num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    given += ("num_experts", "num_experts_per_tok", "moe_intermediate_size") if config_class is Qwen3MoeConfig else ()
    ours = read_hf_config(folder_with({"model_type": config_class.model_type, **{name: getattr(theirs, name) for name in given}}, tmp_path))
    assert ours.key_value_heads == read_model_shape(tmp_path).kv_heads == theirs.num_key_value_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert ours.head_dim == read_model_shape(tmp_path).head_dim == head_dim
    assert ours.max_positions == theirs.max_position_embeddings
    assert (ours.norm_eps, ours.tied_embeddings) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert ours.window == (theirs.sliding_window if config_class is MistralConfig else None)
    assert ours.rope == RopeConfig(theirs.rope_parameters["rope_theta"])
    if ours.experts is not None:
        assert ours.experts == experts_of(theirs)


def test_no_field_is_both_without_effect_and_limited() -> None:
    assert not WITHOUT_EFFECT & set(ONLY) and not READ & (WITHOUT_EFFECT | set(ONLY))


def test_the_same_rope_said_twice_is_one(tmp_path: Path) -> None:
    twice = TRAINABLE["saved by transformers 5"] | {"rope_theta": 1000000.0, "rope_scaling": {"type": "default", "rope_theta": 1e6}}
    assert read_hf_config(folder_with(twice, tmp_path)).rope.theta == 1e6


def test_a_check_names_every_field_at_once(project: Project) -> None:
    project.write_model("model", is_causal=False, mlp_bias=True, muon_scale=2)
    (problem,) = [problem for problem in project.problems() if problem.path == "model.path"]
    for name in ("is_causal is False", "mlp_bias is True", "muon_scale is 2"):
        assert name in problem.message


# ---------------------------------------------------------------- files beside it


def test_a_head_beside_tied_embeddings_has_to_be_theirs(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen2", tied=True)
    assert head_beside_tied_embeddings(folder) is None
    weights = load_file(folder / "model.safetensors")
    same = weights | {"lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(same, folder / "model.safetensors", {"format": "pt"})
    assert head_beside_tied_embeddings(folder) is None
    same["lm_head.weight"][-1, -1] += 1e-3
    save_file(same, folder / "model.safetensors", {"format": "pt"})
    assert "lm_head.weight in model.safetensors is another tensor than model.embed_tokens.weight: set tie_word_embeddings" in str(
        head_beside_tied_embeddings(folder)
    )


def test_a_head_of_another_file_and_type_is_found_too(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen2", tied=True)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"lm_head.weight": weights["model.embed_tokens.weight"].bfloat16()}, folder / "b.safetensors")
    index = dict.fromkeys(weights, "a.safetensors") | {"lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert "lm_head.weight in b.safetensors is another tensor" in str(head_beside_tied_embeddings(folder))


def test_the_check_tells_both_and_an_unreadable_file(project: Project) -> None:
    folder = project.write_model("model", tie_word_embeddings=True)
    weights = {name: torch.zeros(shape) for name, shape in tensors(MODEL).items()}
    save_file(weights | {"lm_head.weight": torch.ones(100, 256)}, folder / "model.safetensors")
    project.write(
        "model/tokenizer.json", json.dumps({"model": {"vocab": {"a": 0, "b": 99}}, "added_tokens": [{"id": 100, "content": "<x>"}]})
    )
    messages = [problem.message for problem in project.problems() if problem.path == "model.path"]
    assert len(messages) == 2
    assert "ids up to 100, its vocabulary (vocab_size of config.json) has only 100 rows" in messages[0]
    assert "tie_word_embeddings true" in messages[1]
    project.write("model/tokenizer.json", '{"model": {"vocab": {}}}')
    project.write("model/model.safetensors", "version https://git-lfs.github.com/spec/v1")
    (problem,) = [problem for problem in project.problems() if problem.path == "model.path"]
    assert "its safetensors cannot be read" in problem.message


@pytest.mark.parametrize(
    ("name", "content", "largest"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 7}}}, 7),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0], ["b", -1.0]]}, "added_tokens": [{"id": 5, "content": "<x>"}]}, 5),
        ("tokenizer.json", {"model": {"vocab": {}}}, None),
        ("vocab.json", {"a": 3}, 3),
        ("added_tokens.json", {"<pad>": 32000}, 32000),
        ("tokenizer.model", {}, None),
    ],
)
def test_the_largest_id_of_a_tokenizer(name: str, content: object, largest: int | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert largest_token_id(tmp_path) == largest


def test_a_saved_tokenizers_ids_are_the_ones_transformers_counts(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m")
    assert largest_token_id(folder) == len(PreTrainedTokenizerFast.from_pretrained(folder)) - 1


def test_a_llama_config_of_old_has_the_positions_of_old(tmp_path: Path) -> None:
    old = {key: value for key, value in TRAINABLE["Llama-2-7b"].items() if key != "max_position_embeddings"}
    assert read_hf_config(folder_with(old, tmp_path)).max_positions == 2048
