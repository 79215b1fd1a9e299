"""A small project on disk with a configuration that is right, for tests that make it wrong."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from support_weights import tensors, write_safetensors

from roll_lite.config.checks.across import simulated_domains
from roll_lite.config.checks.gpu_only import needs_gpus
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError, Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.check import check_data
from roll_lite.data.dump_files import check_dumps
from roll_lite.environments.check import check_environments
from roll_lite.observability.run_folder import check_run_dir, check_store
from roll_lite.pipeline.checkpoint_files import check_resumption
from roll_lite.rewards.registry import check_rewards

VALID = """
experiment: probe
model: {path: model, dtype: float32}
rollout: {prompts_per_step: 8, samples_per_prompt: 4}
domains:
  add:
    data: {train: train.jsonl, validation: held_out.jsonl}
    sampling: {max_prompt_tokens: 32, max_tokens: 16}
    reward: {name: math}
  copy:
    data: {train: train.jsonl}
    sampling: {max_prompt_tokens: 16, max_tokens: 24}
    reward: {name: exact}
"""

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@dataclass
class Project:
    folder: Path

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return path

    def write_model(self, name: str, value_head: int | None = None, **changes: object) -> Path:
        """`value_head`: the outputs of one, which it has beside its own."""
        shape = {key: value for key, value in {**MODEL, **changes}.items() if value is not None}
        self.write(f"{name}/config.json", json.dumps(shape))
        self.write(f"{name}/tokenizer.json", '{"model": {"vocab": {}}}')
        self.write(f"{name}/tokenizer_config.json", "{}")
        file = self.folder / name / "model.safetensors"
        heads = {} if value_head is None else {"score.weight": [value_head, shape["hidden_size"]]}
        has_biases = shape.get("model_type") == "qwen2"
        weights = {one: size for one, size in tensors({**MODEL, **shape}).items() if has_biases or not one.endswith(".bias")}
        write_safetensors(file, weights | heads)
        return file.parent

    def load(self, *overrides: str, name: str = "run") -> RunConfig:
        return load_config(
            name,
            self.folder / "configs",
            list(overrides),
            further=[
                check_store,
                check_resumption,
                check_dumps,
                check_data,
                check_rewards,
                check_environments,
                needs_gpus,
                check_run_dir,
                simulated_domains,
            ],
        )

    def problems(self, *overrides: str, name: str = "run") -> list[Problem]:
        """What is wrong; an empty list where nothing is."""
        try:
            self.load(*overrides, name=name)
        except ConfigError as error:
            return list(error.problems)
        return []

    def problems_of(self, yaml: str, *overrides: str) -> list[Problem]:
        """Of the valid configuration with this YAML laid over it."""
        self.write("configs/changed.yaml", f"defaults: [run, _self_]\n{yaml}")
        return self.problems(*overrides, name="changed")
