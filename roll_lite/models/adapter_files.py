from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_lite.files import is_file, read_object
from roll_lite.models.hf_fields import names

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
A, B = "lora_A", "lora_B"
"""PEFT's names of the LoRA matrices A [rank, in] and B [out, rank]."""
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""LoRA ranks for which vLLM can reserve memory. Another rank takes the memory of the next larger one."""
_PLAIN: dict[str, Any] = {
    "bias": "none",
    "fan_in_fan_out": False,
    "layers_to_transform": None,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
}
"""{PEFT setting that changes the computation: its only supported value}."""
_CHECKED = ("peft_type", "r", "lora_alpha", "init_lora_weights")
_WITHOUT_EFFECT = names(
    """task_type auto_mapping base_model_name_or_path revision inference_mode peft_version runtime_config target_modules exclude_modules
    layers_pattern ensure_weight_tying megatron_config megatron_core lora_dropout eva_config loftq_config corda_config lora_ga_config
    qalora_group_size"""
)
"""Ignored PEFT settings: the weights file shows which layers have adapters, init_lora_weights how they were initialized."""
_LEAVES_BASE_UNCHANGED = (None, True, False, "gaussian", "orthogonal", "eva", "mica")
"""Values of init_lora_weights that leave the base model unchanged; others move part of its weights into the adapters."""


def adapter_config(rank: int, alpha: float, targets: Iterable[str], base: Path) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base.resolve()),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(targets),
        "inference_mode": True,
        **_PLAIN,
    }


def adapter_problems(folder: Path, rank: int, alpha: float) -> Iterator[str]:
    missing = [name for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS) if not is_file(folder / name)]
    if missing:
        yield f"has no {' and no '.join(missing)}; expected adapters in PEFT's format"
        return
    try:
        stored = read_object(folder / ADAPTER_CONFIG)
    except ValueError as error:
        yield str(error)
        return
    if stored.get("peft_type") != "LORA":
        yield f"{ADAPTER_CONFIG} has peft_type {stored.get('peft_type')!r:.40}; expected adapters of the type LORA"
        return
    for setting, key, own in (("rank", "r", rank), ("alpha", "lora_alpha", alpha)):
        if stored.get(key) != own:
            yield f"{ADAPTER_CONFIG} has {key} {stored.get(key)!r:.40}, and actor_train.lora.{setting} is {own:g}"
    for key, plain in _PLAIN.items():
        if (stored.get(key) or plain) != plain:
            yield f"{ADAPTER_CONFIG} has {key} {stored[key]!r:.40}, which is not supported"
    begun = stored.get("init_lora_weights")
    if (begun.lower() if isinstance(begun, str) else begun) not in _LEAVES_BASE_UNCHANGED:
        yield (
            f"{ADAPTER_CONFIG} has init_lora_weights {begun!r:.40}: these adapters belong to weights that were changed beside them, not to "
            "model.path; convert them (path_initial_model_for_weight_conversion of PEFT's save_pretrained), or merge them into a model "
            "and train that"
        )
    for key in sorted(set(stored) - {*_PLAIN, *_CHECKED, *_WITHOUT_EFFECT}):
        if stored[key]:
            yield f"{ADAPTER_CONFIG} has {key} {stored[key]!r:.40}, which is not supported; merge the adapters into a model and train that"


def target_of(weight: str) -> str | None:
    """LoRA target of a weight matrix (q_proj for self_attn.q_proj.weight); None if the name does not end in `.weight`."""
    module, _, kind = weight.rpartition(".")
    return module.rpartition(".")[2] if kind == "weight" else None


def adapter_name(weight: str, matrix: str) -> str:
    return f"base_model.model.{weight.removesuffix('.weight')}.{matrix}.weight"


def adapter_shapes(weights: Mapping[str, tuple[int, ...]], targets: Collection[str], rank: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for weight, shape in weights.items():
        if target_of(weight) in targets:
            rows, columns = shape
            shapes |= {adapter_name(weight, A): (rank, columns), adapter_name(weight, B): (rows, rank)}
    return shapes
