"""The configurations for real models pass every check beside a model of full size: its config.json, and weights that are a hole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from published_models import TRAINABLE
from support_weights import write_safetensors

from roll_lite.config.arithmetic import derive
from roll_lite.config.checks.layout import sharing_notes
from roll_lite.config.loading import load_config
from roll_lite.models.hf_config import read_hf_config
from roll_lite.models.model_files import HEAD, weight_shapes

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "examples/configs"
QWEN2_5_1_5B = TRAINABLE["Qwen2.5-0.5B"] | {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
}
QWEN2_5_32B = TRAINABLE["Qwen2.5-7B"] | {
    "hidden_size": 5120,
    "intermediate_size": 27648,
    "num_attention_heads": 40,
    "num_hidden_layers": 64,
    "num_key_value_heads": 8,
}
MODELS = {
    "qwen2.5_0.5b_grpo": (TRAINABLE["Qwen2.5-0.5B"], 0.494, {"actor_train": "megatron: DP 1", "actor_infer": "vllm: 1 replica"}),
    "qwen2.5_1.5b_grpo": (QWEN2_5_1_5B, 1.54, {"actor_train": "megatron: DP 8", "actor_infer": "vllm: 8 replicas"}),
    "qwen2.5_7b_grpo": (TRAINABLE["Qwen2.5-7B"], 7.62, {"actor_train": "megatron: TP 2 x DP 4", "actor_infer": "vllm: 8 replicas"}),
    "qwen2.5_7b_fp8_grpo": (TRAINABLE["Qwen2.5-7B"], 7.62, {"actor_train": "megatron: TP 2 x DP 4", "actor_infer": "vllm: 8 replicas"}),
    "qwen2.5_32b_grpo": (QWEN2_5_32B, 32.8, {"actor_train": "megatron: TP 4 x PP 2 x DP 4", "actor_infer": "vllm: 8 replicas of TP 4"}),
    "qwen3_30b_a3b_grpo": (
        TRAINABLE["Qwen3-30B-A3B"],
        30.5,
        {"actor_train": "megatron: DP 16 x EP 8", "actor_infer": "vllm: 8 replicas of TP 2"},
    ),
    "llama3.1_8b_ppo": (
        TRAINABLE["Llama-3.1-8B-Instruct"],
        8.03,
        dict.fromkeys(("actor_train", "reference", "critic"), "megatron: TP 2 x DP 4") | {"actor_infer": "vllm: 8 replicas"},
    ),
}
"""config.json, billions of parameters, layouts."""


def test_every_configuration_of_a_real_model_is_here() -> None:
    """Those of gsm8k_* name a model of the hub: tests/test_hub.py, tests/data/test_presets.py. `evaluate` names none."""
    shipped = {file.stem for file in CONFIGS.glob("*.yaml") if not file.stem.startswith(("tiny_", "gsm8k_"))}
    assert shipped == {"gpu_base", "evaluate", *MODELS}


@pytest.mark.parametrize("name", MODELS)
def test_it_passes_every_check_beside_its_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("roll_lite.config.checks.layout.gpus_visible", lambda: True)
    published, billions, layouts = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(published))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    hf = read_hf_config(tmp_path)
    shapes = {key: list(shape) for key, shape in weight_shapes(hf).items()}
    shapes |= {} if hf.tied_embeddings else {HEAD: [hf.vocab_size, hf.hidden]}
    write_safetensors(tmp_path / "model.safetensors", shapes)
    size = (tmp_path / "model.safetensors").stat().st_size / 2e9
    assert size == pytest.approx(billions, rel=0.01), "the config.json is that of the model"
    data = "examples/data/add_train.jsonl"
    given = [f"model.path={tmp_path}", f"domains.math.data.train={data}", f"domains.math.data.validation={data}"]
    config = load_config(name, CONFIGS, given)
    assert {role: cluster.layout for role, cluster in derive(config).clusters.items()} == layouts
    assert config.experiment == name and sharing_notes(config) == [], "what shares GPUs leaves them when it is idle"
