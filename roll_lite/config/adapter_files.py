"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from roll_lite.config.files import is_file, read_object
from roll_lite.config.schema.models import LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}
"""Settings of PEFT that change what adapters mean, at the values that ours have."""


def adapter_config(lora: LoraConfig, base: Path) -> dict[str, Any]:
    """What PEFT reads beside the weights."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(lora.targets),
        "inference_mode": True,
        **_PLAIN,
    }


def adapter_problems(lora: LoraConfig) -> Iterator[str]:
    """Why the adapters of lora.path cannot be gone on with."""
    assert lora.path is not None
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not is_file(lora.path / name)]
    if missing:
        yield f"has no {' and no '.join(missing)}; expected adapters in PEFT's format"
        return
    try:
        stored = read_object(lora.path / ADAPTER_CONFIG)
    except ValueError as error:
        yield str(error)
        return
    for setting, key, own in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if stored.get(key) != own:
            yield f"{ADAPTER_CONFIG} has {key} {stored.get(key)!r:.40}, and actor_train.lora.{setting} is {own:g}"
    for key, plain in _PLAIN.items():
        if (stored.get(key) or plain) != plain:
            yield f"{ADAPTER_CONFIG} has {key} {stored[key]!r:.40}, which is not supported"
    for key in ("rank_pattern", "alpha_pattern"):
        if stored.get(key):
            yield f"{ADAPTER_CONFIG} has a {key}, which is not supported"
