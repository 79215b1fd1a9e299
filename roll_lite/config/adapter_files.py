"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_lite.config.files import is_file, read_object
from roll_lite.config.model_files import weights_fingerprint
from roll_lite.config.schema.models import LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE_FILE = "base.json"
"""Beside a checkpoint of adapters: whose they are."""
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


# ---------------------------------------------------------------- checkpoints, which hold adapters without the weights that they belong to


def write_base(folder: Path, model: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    card = {"path": str(model.resolve()), "fingerprint": weights_fingerprint(model)}
    (folder / BASE_FILE).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")


def check_base(folder: Path, model: Path, lora: LoraConfig | None) -> None:
    """ValueError for a checkpoint of adapters where all weights train, for the contrary, and for adapters of another model."""
    of_adapters = is_file(folder / BASE_FILE)
    if of_adapters != (lora is not None):
        holds, remedy = ("adapters", "set it") if of_adapters else ("a whole model", "leave it out")
        raise ValueError(f"checkpoint.resume: {folder} holds {holds}; actor_train.lora decides what trains: {remedy}")
    if lora is not None and (card := read_object(folder / BASE_FILE)).get("fingerprint") != weights_fingerprint(model):
        raise ValueError(f"checkpoint.resume: the adapters in {folder} belong to {card.get('path')}; model.path {model} has other weights")


def resumption_problem(lora: LoraConfig | None, saved: Mapping[str, Any] | None) -> str | None:
    """Why a run cannot go on from one with other adapters. `saved`: that one's actor_train.lora."""
    kept = ("rank", "alpha", "targets")
    before, now = ({key: values.get(key) for key in kept} if values else None for values in (saved, lora.model_dump() if lora else None))
    if _sorted_targets(before) == _sorted_targets(now):
        return None
    told = ["trains all weights" if one is None else ", ".join(f"{key} {value}" for key, value in one.items()) for one in (before, now)]
    return f"it was written with other adapters (actor_train.lora): {told[0]}; this run: {told[1]}"


def _sorted_targets(adapters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return None if adapters is None else {**adapters, "targets": sorted(adapters["targets"] or [])}
