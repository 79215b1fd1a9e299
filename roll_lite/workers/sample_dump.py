"""The samples of a step as JSON lines: what a user looks at to see what the model does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from roll_lite.data.samples import Sample, SampleGroup


def write_samples(path: Path, groups: Iterable[SampleGroup]) -> None:
    """One line for each sample, the failed ones and greedy baselines too. The file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps(line, ensure_ascii=False, default=str) for group in groups for line in _described(group))
    unfinished = path.with_suffix(".partial")
    # Half a surrogate pair, which a program may print and JSON may hold, is no UTF-8: it stays readable as the escape that it came from.
    with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in lines)
    unfinished.replace(path)


def _described(group: SampleGroup) -> Iterator[dict[str, Any]]:
    for sample in group.samples:
        yield describe(sample)
    if group.baseline is not None:
        yield describe(group.baseline, baseline=True)


def describe(sample: Sample, baseline: bool = False) -> dict[str, Any]:
    score = sample.score
    return {
        "domain": sample.id.domain,
        "group": sample.id.group,
        "index": sample.id.index,
        "prompt_uid": sample.id.prompt_uid,
        "epoch": sample.id.epoch,
        "attempt": sample.id.attempt,
        "baseline": baseline,
        "prompt": sample.prompt.text,
        "response": sample.completion.text,
        "answer": sample.prompt.answer,
        "score": score.value if score else None,
        "correct": score.is_correct if score else None,
        "format_ok": score.format_ok if score else None,
        "details": score.details if score else {},
        "outcome": str(sample.outcome),
        "failure": sample.failure,
        "finish_reason": str(sample.completion.finish_reason) if sample.completion.finish_reason else None,
        "prompt_tokens": len(sample.prompt.token_ids),
        "response_tokens": len(sample.completion.token_ids),
        "versions": [[span.start, span.version] for span in sample.completion.versions],
    }
