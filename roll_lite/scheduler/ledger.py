"""Lines of ledger.jsonl, written by the driver: how each sample group ended, and why."""

from __future__ import annotations

from typing import Any

from roll_lite.data.samples import SampleGroup, SampleOutcome

DELIVERED, FILTERED, FAILED, STALE, DROPPED = "delivered", "filtered", "failed", "stale", "dropped"
"""Ends of groups. The prompt of a stale or dropped group starts again."""
LONGEST_CAUSE = 400


def group_line(
    number: int,
    domain: str,
    row: tuple[int, int],
    batches_requested: int,
    end: str,
    cause: str | None = None,
    group: SampleGroup | None = None,
    continues: int | None = None,
) -> dict[str, Any]:
    """Return the line of an ended group. `row`: (epoch, prompt index). `batches_requested`: at its admission. `continues`: dropped group
    that this one restarts."""
    line: dict[str, Any] = {
        "event": "group",
        "group": number,
        "domain": domain,
        "epoch": row[0],
        "prompt": row[1],
        "asked": batches_requested,
        "end": end,
    }
    if cause is not None:
        line["cause"] = _short(cause)
    if continues is not None:
        line["continues"] = continues
    if group is None:
        return line
    turns: list[list[list[int | list[int] | None]]] = []  # engine, first and last version, by sample and turn
    scores: list[float | None] = []
    line |= {"turns": turns, "scores": scores}
    for sample in (*group.samples, group.baseline):
        if sample is None:
            continue
        parts = [part for row in sample.transcript.rows for part in row.segments if part.versions]
        engines = [part.engines[0] if len(part.engines) == 1 else list(part.engines) or None for part in parts]
        turns.append([[engine, part.versions[0][1], part.versions[-1][1]] for engine, part in zip(engines, parts, strict=True)])
        scores.append(None if sample.score is None else sample.score.value)
        if sample.outcome is SampleOutcome.FAILED:
            line.setdefault("failed", {})[sample.id.index] = _short(sample.failure or "unknown")
        if sample.id.attempt:
            line.setdefault("attempts", {})[sample.id.index] = sample.id.attempt
    if group.baseline is not None:
        line["baseline"] = len(group.samples)
    return line


def _short(cause: str) -> str:
    return " ".join(cause.split())[:LONGEST_CAUSE]
