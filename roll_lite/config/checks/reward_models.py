"""Checks of reward models: a reward uses each one, and its checkpoint is a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_lite.config.checks.named import used_by_a_reward
from roll_lite.config.problems import Problem
from roll_lite.config.schema.models import MegatronStrategyConfig, RewardModelConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import SUPPORTED_TYPES, read_config, read_hf_config
from roll_lite.models.model_files import TOKENIZER_FILES, VALUE_HEAD, has_tokenizer, stored_tensors

MODEL_REWARD = "model"


def _used(config: RunConfig, path: str, model: RewardModelConfig) -> Iterator[Problem]:
    yield from used_by_a_reward(config, path, "reward model", config.reward_models, MODEL_REWARD, "model")


def _checkpoint(config: RunConfig, path: str, model: RewardModelConfig) -> Iterator[Problem]:
    folder = model.path
    try:
        raw = read_config(folder)
        stored = stored_tensors(folder)
    except ValueError as error:
        yield Problem(f"{path}.path", str(error), str(folder))
        return
    named = raw.get("architectures")
    architecture = str(named[0] if isinstance(named, list) and named else named or "(none)")
    if not architecture.endswith("ForSequenceClassification"):
        message = f"its config.json names the architecture {architecture}; expected a reward model, ...ForSequenceClassification"
        yield Problem(f"{path}.path", message, str(folder))
        return
    labels = len(raw["id2label"]) if isinstance(raw.get("id2label"), dict) and raw["id2label"] else raw.get("num_labels", 2)
    head = list(stored[VALUE_HEAD].shape) if VALUE_HEAD in stored else []
    if labels != 1:
        yield Problem(f"{path}.path", f"it has {labels} labels; a reward model has one output (num_labels 1)", str(folder))
    elif head and head[0] != 1:
        yield Problem(f"{path}.path", f"its {VALUE_HEAD} has the shape {head}; a reward model has one output", str(folder))
    elif not head and isinstance(model.strategy, MegatronStrategyConfig):
        yield Problem(
            f"{path}.path", f"its safetensors have no {VALUE_HEAD}, the head that Megatron needs; use strategy.name: hf", str(folder)
        )
    if not has_tokenizer(folder):
        yield Problem(f"{path}.path", f"no tokenizer in this folder (none of {', '.join(TOKENIZER_FILES)})", str(folder))


def _family(config: RunConfig, path: str, model: RewardModelConfig) -> Iterator[Problem]:
    raw = _config(model.path)
    if raw is None or not isinstance(model.strategy, MegatronStrategyConfig):
        return
    if raw.get("model_type") not in SUPPORTED_TYPES:
        message = f"model_type {raw.get('model_type')!r} does not run on Megatron ({', '.join(SUPPORTED_TYPES)} do); use hf"
        yield Problem(f"{path}.strategy.name", message, "megatron")
        return
    try:
        read_hf_config(model.path, f"{path}.path")
    except ValueError as error:
        yield Problem(f"{path}.path", str(error).removeprefix(f"{path}.path: "), str(model.path))


def _length(config: RunConfig, path: str, model: RewardModelConfig) -> Iterator[Problem]:
    positions = (_config(model.path) or {}).get("max_position_embeddings")
    if model.max_length is not None and isinstance(positions, int) and model.max_length > positions:
        message = f"is more than the model's {positions} positions (max_position_embeddings)"
        yield Problem(f"{path}.max_length", message, model.max_length)


REWARD_MODEL_CHECKS = (_used, _checkpoint, _family, _length)


def _config(folder: Path) -> dict[str, Any] | None:
    """config.json of the folder; None if unreadable, which `_checkpoint` reports."""
    try:
        return read_config(folder)
    except ValueError:
        return None
