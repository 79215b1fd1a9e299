from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from roll_lite.config.compose.merging import merge
from roll_lite.config.problems import did_you_mean


@cache
def presets() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return table


def preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise ValueError(f"no such preset; {did_you_mean(name, presets())} `roll-lite data list` describes them")
    return presets()[name]


def expanded(domain: Mapping[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return a domain with its preset's settings as defaults. If the domain sets `data.train`, the preset's training and validation files
    are left out."""
    data = domain["data"]
    entry = preset(str(data["preset"]))
    full: dict[str, Any] = copy.deepcopy(entry["domain"])
    splits = {} if "train" in data else {split: entry[split] for split in ("train", "validation") if split in entry}
    full["data"] = {**splits, **full.get("data", {})}
    if "validation_preset" in data and "validation" not in data and data["validation_preset"] is not None:
        full["data"]["validation"] = preset(str(data["validation_preset"]))["validation"]
    merge(full, domain, path)
    sampling, filters = full.get("sampling"), full["data"].setdefault("filter", {})
    if isinstance(filters, dict) and isinstance(sampling, dict) and isinstance(longest := sampling.get("max_prompt_tokens"), int):
        filters.setdefault("prompt_tokens", [1, longest])  # drops longer prompts, and reports how many
    return full
