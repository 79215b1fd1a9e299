from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import yaml

from roll_lite.config.problems import did_you_mean


@cache
def presets() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return table


def preset(name: str) -> dict[str, Any]:
    if name not in presets():
        raise ValueError(f"no such preset; {did_you_mean(name, presets())} `roll-lite data list` describes them")
    return presets()[name]


def validation_preset(name: str) -> Any:
    if "validation" not in (entry := preset(name)):
        raise ValueError("this preset has no held-out prompts; take another one, or set data.validation")
    return entry["validation"]
