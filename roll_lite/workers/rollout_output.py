"""Output of the rollout service: rows for the driver, with references to their tokens; JSON lines for people; dumps for replays."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from pydantic_core import PydanticSerializationError, to_json
from ray.exceptions import RayError

from roll_lite.algorithms.at_k import NO_ANSWER, READS_NONE
from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data.branches import per_sample, turn_rewards
from roll_lite.data.dump_files import dump_file
from roll_lite.data.dumps import further_columns, times, write_dump
from roll_lite.data.prompts import MOST_REPORTED
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.samples import Branch, Prompt, Sample, SampleGroup
from roll_lite.distributed.dataflow import Block, put_block
from roll_lite.files import replacing
from roll_lite.scheduler.ledger import DELIVERED
from roll_lite.scheduler.stats import RolloutStats
from roll_lite.workers.token_blocks import KEPT_IDS, TOKEN_COLUMNS

REPORTED = ("level", "subject")
"""Data columns by which a validation reports results if `data.report_by` is null."""
NONE: Mapping[str, Sequence[str]] = {}

# ---------------------------------------------------------------- for the driver


def rows_of(groups: Sequence[SampleGroup], temperatures: Mapping[str, float]) -> DataProto:
    """Return one row per branch of each sample, numbered from 0 in the column `sample`. Samples must be accepted and scored."""
    paths = [(sample, number, row) for group in groups for sample in group.samples for number, row in enumerate(sample.transcript.rows)]
    samples, branches, rows = zip(*paths, strict=True) if paths else ((), (), ())
    scores = [sample.score for sample in samples if sample.score is not None]
    assert len(scores) == len(samples), "a sample without a score cannot train"
    columns: dict[str, torch.Tensor | np.ndarray] = {
        "sample": torch.arange(len(rows)),
        "group": _whole(sample.id.group for sample in samples),
        "index": _whole(sample.id.index for sample in samples),
        "prompt_uid": _whole(sample.id.prompt_uid for sample in samples),
        "epoch": _whole(sample.id.epoch for sample in samples),
        "attempt": _whole(sample.id.attempt for sample in samples),
        "domain": object_column(sample.id.domain for sample in samples),
        "finish_reason": object_column(str(sample.transcript.finish_reason) for sample in samples),
        "prompt_length": _whole(row.prompt_length for row in rows),
        "response_length": _whole(row.response_length for row in rows),
        "cut": torch.tensor([row.cut for row in rows], dtype=torch.bool),
        "policy_tokens": _whole(row.policy_tokens for row in rows),
        "score": torch.tensor([score.value for score in scores], dtype=torch.float32),
        "correct": torch.tensor([float(score.is_correct) for score in scores], dtype=torch.float32),
        "format_ok": torch.tensor([float(score.format_ok or False) for score in scores], dtype=torch.float32),
        "sample_weight": torch.tensor([sample.prompt.weight for sample in samples], dtype=torch.float32),
        "min_version": _whole(min((span.version for span in row.versions), default=0) for row in rows),
        "max_version": _whole(max((span.version for span in row.versions), default=0) for row in rows),
        "engine": _whole(-1 if row.engine is None else row.engine for row in rows),
    }
    columns["temperature"] = torch.tensor([temperatures[sample.id.domain] for sample in samples], dtype=torch.float32)
    if any(branches):
        columns["branch"] = _whole(branches)
    if any(group.baseline is not None for group in groups):
        baselines: list[float] = []
        for group in groups:
            assert group.baseline is not None and group.baseline.score is not None, f"group {group.group} has no scored greedy baseline"
            baselines += [group.baseline.score.value] * sum(len(sample.transcript.rows) for sample in group.samples)
        columns["baseline_score"] = torch.tensor(baselines, dtype=torch.float32)
    return DataProto(columns)


def reported_columns(groups: Iterable[SampleGroup], domains: Mapping[str, DomainConfig]) -> dict[str, list[str]]:
    """Return {domain: data columns by which a validation reports}: `data.report_by` or, if null, the columns of REPORTED with text or
    numbers in all prompts and at most MOST_REPORTED values."""
    prompts: dict[str, list[Prompt]] = {name: [] for name in domains}
    for group in groups:
        prompts[group.domain].append(group.samples[0].prompt)
    columns = {name: domain.data.reported for name, domain in domains.items()}
    for name in [name for name, domain in domains.items() if domain.data.report_by is None]:
        found = {column: [prompt.columns.get(column) for prompt in prompts[name]] for column in REPORTED}
        fit = {column: all(isinstance(one, str | int | float) for one in values) for column, values in found.items()}
        columns[name] = [column for column, values in found.items() if fit[column] and len(set(values)) <= MOST_REPORTED]
    return columns


def parts_of(sample: Sample, columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{column}:{sample.prompt.columns[column]}" for column in columns)


def held_out_rows(groups: Sequence[SampleGroup], temperatures: Mapping[str, float], columns: Mapping[str, Sequence[str]]) -> DataProto:
    """Return a validation's rows, one per sample. `columns`: from `reported_columns`."""
    parts = [parts_of(sample, columns[group.domain]) for group in groups for sample in group.samples]
    answers = [number for group in groups for number in _answers(group)]
    return per_sample(rows_of(groups, temperatures)).with_columns(answer=_whole(answers), parts=object_column(parts))


def _answers(group: SampleGroup) -> Iterator[int]:
    numbers: dict[str, int] = {}
    for sample in group.samples:
        answer = sample.score.answer if sample.score is not None else None
        yield READS_NONE if answer is None else numbers.setdefault(answer, len(numbers)) if answer else NO_ANSWER


def tokens_of(groups: Sequence[SampleGroup], extra: Sequence[str] = ()) -> Block:
    """Return a Block with references to all rows' tokens, in the order of `rows_of`. `extra`: token columns beside TOKEN_COLUMNS."""
    places = [row.tokens for group in groups for sample in group.samples for row in sample.transcript.rows]
    numbers: dict[Any, int] = {}
    objects = np.empty(len(places), np.int32)
    rows = np.empty(len(places), np.int32)
    for sample, place in enumerate(places):
        assert place is not None, f"row {sample} has no tokens"
        objects[sample] = numbers.setdefault(place.block, len(numbers))
        rows[sample] = place.row
    return Block(tuple(numbers), (*TOKEN_COLUMNS, *extra), np.arange(len(places)), objects, rows)


def turn_rewards_of(groups: Sequence[SampleGroup], per_turn: Mapping[str, float]) -> Block:
    """Return a block with `turn_rewards` for the rows of `rows_of`. `per_turn`: {domain that rewards turns: weight}."""
    samples = [sample for group in groups for sample in group.samples]
    column = turn_rewards((row, weighted_rewards(sample, per_turn)) for sample in samples for row in sample.transcript.rows)
    return put_block(DataProto({"sample": torch.arange(len(column)), "turn_rewards": column}))


def weighted_rewards(sample: Sample, per_turn: Mapping[str, float]) -> list[float]:
    episode = sample.transcript.episode
    weight = per_turn.get(sample.id.domain, 0.0)
    turns = 1 + max((part.turn or 0 for row in sample.transcript.rows for part in row.segments), default=0)
    return [0.0] * turns if episode is None or not weight else [weight * one for one in episode.rewards]


def _whole(values: Iterable[int]) -> torch.Tensor:
    return torch.from_numpy(np.fromiter(values, np.int64))


def ledger_text(lines: Iterable[dict[str, Any]], step: int | None = None) -> bytes:
    """Return JSON lines for the ledger; those of the batch and its groups get `step`."""
    return b"".join(_line(line | {"step": step} if line.get("end") == DELIVERED or line["event"] == "batch" else line) for line in lines)


# ---------------------------------------------------------------- for people


def write_samples(
    path: Path, groups: Iterable[SampleGroup], step: int, clock_offset: float = 0.0, columns: Mapping[str, Sequence[str]] = NONE
) -> None:
    """Write a line per sample, with failed ones and greedy baselines. The file appears when complete. `columns`: from `reported_columns`,
    for a validation."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, has_other_writers=False) as draft, draft.open("wb") as file:
        for group in groups:
            names = columns.get(group.domain, ())
            for sample in group.samples:
                parts = {"parts": parts_of(sample, names)} if names else {}
                file.write(_line({"step": step, **sample_record(sample, False, clock_offset), **parts}))
            if group.baseline is not None:
                file.write(_line({"step": step, **sample_record(group.baseline, True, clock_offset)}))


def _line(record: dict[str, Any]) -> bytes:
    """Return a JSON line. Lone surrogates, which programs may print, become texts (`\\ud800`): UTF-8 cannot encode them."""
    try:
        return to_json(record, inf_nan_mode="constants", fallback=str) + b"\n"
    except PydanticSerializationError:
        text = json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=str)
        return re.sub("[\ud800-\udfff]", lambda half: f"\\\\u{ord(half[0]):04x}", text).encode() + b"\n"


def sample_record(sample: Sample, baseline: bool, clock_offset: float) -> dict[str, Any]:
    score, transcript = sample.score, sample.transcript
    return {
        "domain": sample.id.domain,
        "group": sample.id.group,
        "index": sample.id.index,
        "prompt_uid": sample.id.prompt_uid,
        "epoch": sample.id.epoch,
        "attempt": sample.id.attempt,
        "baseline": baseline,
        "prompt": sample.prompt.text,
        "response": transcript.text,
        "answer": sample.prompt.answer,
        "score": score.value if score else None,
        "correct": score.is_correct if score else None,
        "format_ok": score.format_ok if score else None,
        "terms": score.terms if score else {},
        "details": score.details if score else {},
        "outcome": str(sample.outcome),
        "failure": sample.failure,
        "finish_reason": str(transcript.finish_reason) if transcript.finish_reason else None,
        "prompt_tokens": transcript.prompt_length or len(sample.prompt.token_ids),
        "response_tokens": sum(row.response_length for row in transcript.rows),
        "versions": _versions(transcript),
        **({"branch_versions": list(map(_versions, transcript.branches))} if transcript.branches else {}),
        **({} if transcript.episode is None else {"episode": asdict(transcript.episode)}),
        **times(sample, clock_offset),
        "columns": further_columns(sample.prompt),
    }


def _versions(row: Branch) -> list[list[int]]:
    return [[span.start, span.version] for span in row.versions]


# ---------------------------------------------------------------- for replays


@dataclass(frozen=True)
class DumpSpec:
    folder: Path
    config: dict[str, Any]
    tokenizer: str

    def writing(
        self,
        step: int,
        groups: Sequence[SampleGroup],
        rows: DataProto,
        stats: RolloutStats,
        extra: Sequence[str],
        clock_offset: float,
        per_turn: Mapping[str, float],
    ) -> Callable[[], None]:
        """Return a function that writes a dump in a thread, with the present `stats`."""
        rewards = partial(weighted_rewards, per_turn=per_turn) if per_turn else None
        facts = {"step": step, "config": self.config, "tokenizer": self.tokenizer, "stats": json.loads(json.dumps(stats, default=vars))}
        return partial(
            write_dump, dump_file(self.folder, step), groups, rows, stored_blocks, facts, KEPT_IDS in extra, clock_offset, rewards
        )


def stored_blocks(references: Sequence[Any]) -> list[DataProto | None]:
    """Fetch blocks; None for blocks lost with their process."""
    with suppress(RayError):
        return ray.get(list(references))
    blocks: list[DataProto | None] = []
    for reference in references:
        try:
            blocks.append(ray.get(reference))
        except RayError:
            blocks.append(None)
    return blocks
