"""config.json files as they are published, by the families that can be trained, and such that cannot. The numbers are those of the models.

A line of the tables (cases/) is a model `like` an earlier one, `with` some entries and `without` others.
"""

from __future__ import annotations

from typing import Any

from support_cases import records

TRAINABLE: dict[str, dict[str, Any]] = {}


def _config(record: dict[str, Any]) -> dict[str, Any]:
    whole = (TRAINABLE[record["like"]] if "like" in record else {}) | record.get("with", {})
    return {name: value for name, value in whole.items() if name not in record.get("without", ())}


for one in records("config/published_models"):
    TRAINABLE[one["model"]] = _config(one)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {one["model"]: (_config(one), one["told"]) for one in records("config/refused_models")}
