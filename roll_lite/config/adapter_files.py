"""Adapters in PEFT's format: a folder with adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_lite.config.files import is_file, read_object
from roll_lite.config.model_files import weights_fingerprint
from roll_lite.config.schema.models import LoraConfig

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = "lora_A", "lora_B"
"""Matrices of an adapter: [rank, in] and [out, rank]."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM reserves memory for; a rank between two of them takes as much as the larger one."""
BASE_FILE = "base.json"
"""File beside a checkpoint of adapters that names their base model."""
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}
"""PEFT settings that change what adapters compute, with the values of our adapters."""
_CHECKED = ("peft_type", "r", "lora_alpha", "init_lora_weights")
_WITHOUT_EFFECT = (
    *("task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config"),
    *("target_modules", "exclude_modules", "layers_pattern", "ensure_weight_tying", "megatron_config", "megatron_core"),
    *("lora_dropout", "eva_config", "loftq_config", "corda_config", "lora_ga_config", "qalora_group_size"),
)
"""PEFT settings without effect on the computation: the weights file shows the tensors, init_lora_weights how they were initialized."""
_BEGUN_BESIDE_THE_BASE = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the base unchanged; all others move part of its weights into the adapters."""


def adapter_config(lora: LoraConfig, base: Path) -> dict[str, Any]:
    """adapter_config.json, which PEFT reads beside the weights."""
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
    """Reasons why training cannot start from the adapters of lora.path."""
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
    if stored.get("peft_type") != "LORA":
        yield f"{ADAPTER_CONFIG} has peft_type {stored.get('peft_type')!r:.40}; expected adapters of the type LORA"
        return
    for setting, key, own in (("rank", "r", lora.rank), ("alpha", "lora_alpha", lora.alpha)):
        if stored.get(key) != own:
            yield f"{ADAPTER_CONFIG} has {key} {stored.get(key)!r:.40}, and actor_train.lora.{setting} is {own:g}"
    for key, plain in _PLAIN.items():
        if (stored.get(key) or plain) != plain:
            yield f"{ADAPTER_CONFIG} has {key} {stored[key]!r:.40}, which is not supported"
    begun = stored.get("init_lora_weights")
    if (begun.lower() if isinstance(begun, str) else begun) not in _BEGUN_BESIDE_THE_BASE:
        yield (
            f"{ADAPTER_CONFIG} has init_lora_weights {begun!r:.40}: these adapters belong to weights that were changed beside them, not to "
            "model.path; convert them (path_initial_model_for_weight_conversion of PEFT's save_pretrained), or merge them into a model "
            "and train that"
        )
    for key in sorted(set(stored) - {*_PLAIN, *_CHECKED, *_WITHOUT_EFFECT}):
        if stored[key]:
            yield f"{ADAPTER_CONFIG} has {key} {stored[key]!r:.40}, which is not supported; merge the adapters into a model and train that"


def target_of(weight: str) -> str | None:
    """Name of the target layer, q_proj for self_attn.q_proj.weight; None if the tensor is not a weight."""
    module, _, kind = weight.rpartition(".")
    return module.rpartition(".")[2] if kind == "weight" else None


def adapter_name(weight: str, matrix: str) -> str:
    """PEFT's name of the A or B matrix beside a weight."""
    return f"base_model.model.{weight.removesuffix('.weight')}.{matrix}.weight"


def adapter_shapes(weights: Mapping[str, tuple[int, ...]], targets: Collection[str], rank: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's adapters, from the shapes of its weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, shape in weights.items():
        if target_of(weight) in targets:
            rows, columns = shape
            shapes |= {adapter_name(weight, A): (rank, columns), adapter_name(weight, B): (rows, rank)}
    return shapes


# ---------------------------------------------------------------- checkpoints of adapters, without the model's weights


def write_base(folder: Path, model: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    card = {"path": str(model.resolve()), "fingerprint": weights_fingerprint(model)}
    (folder / BASE_FILE).write_text(json.dumps(card, indent=2) + "\n", encoding="utf-8")
    return folder / BASE_FILE


def check_base(folder: Path, model: Path, lora: LoraConfig | None) -> None:
    """Raise ValueError if the checkpoint holds adapters but all weights train, or the reverse, or adapters of another model."""
    of_adapters = is_file(folder / BASE_FILE)
    if of_adapters != (lora is not None):
        holds, remedy = ("adapters", "set it") if of_adapters else ("a whole model", "leave it out")
        raise ValueError(f"checkpoint.resume: {folder} holds {holds}; actor_train.lora decides what trains: {remedy}")
    if lora is not None and (card := read_object(folder / BASE_FILE)).get("fingerprint") != weights_fingerprint(model):
        raise ValueError(f"checkpoint.resume: the adapters in {folder} belong to {card.get('path')}; model.path {model} has other weights")


def resumption_problem(lora: LoraConfig | None, saved: Mapping[str, Any] | None) -> str | None:
    """Reason why a run cannot resume from one with other adapters. `saved`: actor_train.lora of that run."""
    kept = ("rank", "alpha", "targets")
    before, now = ({key: values.get(key) for key in kept} if values else None for values in (saved, lora.model_dump() if lora else None))
    if _sorted_targets(before) == _sorted_targets(now):
        return None
    told = ["trains all weights" if one is None else ", ".join(f"{key} {value}" for key, value in one.items()) for one in (before, now)]
    return f"it was written with other adapters (actor_train.lora): {told[0]}; this run: {told[1]}"


def _sorted_targets(adapters: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    return None if adapters is None else {**adapters, "targets": sorted(adapters["targets"] or [])}
