"""What is left in the run's folder at the end: summary.json (and the picture of `curves.py`)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

OVERALL = "overall"
SUMMARY_FILE = "summary.json"

Accuracy = dict[str, dict[str, float | None]]
"""`overall` and each domain: {"before": share or None, "after": share or None}."""


def accuracy_change(domains: Sequence[str], before: Mapping[str, float], after: Mapping[str, float]) -> Accuracy:
    """From the metrics of the first and of the last validation; None where something was not measured."""

    def read(name: str) -> dict[str, float | None]:
        return {"before": before.get(name), "after": after.get(name)}

    change = {domain: read(f"domain/{domain}/validation/accuracy") for domain in domains}
    return {OVERALL: read("validation/accuracy"), **change}


def write_summary(
    folder: Path,
    *,
    accuracy: Accuracy,
    steps: int,
    wall_s: Mapping[str, float],
    tokens: Mapping[str, float],
    exit_state: str,
    resumed_after: int = 0,
) -> Path:
    """`steps`: done by now, those before a resumption (`resumed_after`) included; times and tokens are this run's own.
    `wall_s`: seconds, `total` and by phase. `exit_state`: "completed", "interrupted", or "failed: <cause>".

    The file appears whole or not at all, and a second call (an interruption after the end) replaces the first.
    """
    assert exit_state in ("completed", "interrupted") or exit_state.startswith("failed: "), exit_state
    assert "total" in wall_s, "wall_s needs the total"
    summary = {
        "accuracy": accuracy,
        "steps": steps,
        "resumed_after": resumed_after,
        "wall_s": {phase: round(seconds, 3) for phase, seconds in wall_s.items()},
        "tokens": dict(tokens),
        "exit": exit_state,
    }
    path = folder / SUMMARY_FILE
    draft = folder / f".{SUMMARY_FILE}.{os.getpid()}"
    draft.write_text(json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(path)
    return path


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
