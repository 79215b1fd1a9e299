"""Small batches of rollouts, and dumps of them, without engines and Ray."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from roll_lite.config.schema.run import RunConfig
from roll_lite.data.dump_files import dump_file
from roll_lite.data.dumps import write_dump
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged, same_tensor
from roll_lite.data.samples import (
    Author,
    FinishReason,
    Prompt,
    Sample,
    SampleGroup,
    SampleId,
    SampleOutcome,
    Score,
    Segment,
    TokenRow,
    Transcript,
    VersionSpan,
)
from roll_lite.models.model_files import tokenizer_checksum
from roll_lite.scheduler.service import accepted
from roll_lite.workers.rollout_output import rows_of
from roll_lite.workers.token_blocks import KEPT_IDS, TokenRecord, token_block

PROMPT = (5, 6, 7)
TEMPERATURES = {"add": 1.0, "copy": 0.7}


class Blocks:
    """Token blocks by name."""

    def __init__(self, records: dict[str, list[TokenRecord]], kept_ids: bool = False) -> None:
        columns = [KEPT_IDS] if kept_ids else []
        self.blocks: dict[str, DataProto | None] = {name: token_block(own, columns) for name, own in records.items()}

    def __call__(self, references: Sequence[Any]) -> list[DataProto | None]:
        return [self.blocks[name] for name in references]


def record(response: Sequence[int], kept: np.ndarray | None = None) -> TokenRecord:
    count = len(response)
    log_probs = -np.arange(1, count + 1, dtype=np.float32) / 3
    own = TokenRecord(np.array(response, np.int64), np.ones(count, bool), log_probs, {} if kept is None else {KEPT_IDS: kept})
    return TokenRecord.joined([TokenRecord.given(PROMPT), own])


def sample(
    group: int,
    index: int,
    tokens: TokenRow | None,
    score: Score | None,
    outcome: SampleOutcome = SampleOutcome.ACCEPTED,
    domain: str = "add",
    **further: Any,
) -> Sample:
    length = tokens.length - len(PROMPT) if tokens else 0
    spans = (VersionSpan(0, 3), VersionSpan(1, 4)) if length > 1 else (VersionSpan(0, 4),)
    segments = (Segment(Author.PROMPT, len(PROMPT)), Segment(Author.POLICY, length, spans)) if tokens else ()
    transcript = Transcript(segments, tokens, "said" if tokens else "", FinishReason.STOP if tokens else None)
    prompt = Prompt(domain, 10 + group, "1+1=", PROMPT, answer={"value": 2}, weight=0.5)
    return Sample(SampleId(domain, 10 + group, 1, group, index, 2), prompt, transcript, outcome, score, **further)


def batch(domains: Sequence[str] = ("add", "copy"), group_size: int = 2, length: int = 2) -> tuple[list[SampleGroup], Blocks]:
    """A group of each domain, all samples of which train; the blocks' rows are in another order."""
    records = [record(range(10 + number, 10 + number + length)) for number in range(len(domains) * group_size)]
    groups = []
    for number, domain in enumerate(domains):
        rows = [len(records) - 1 - (number * group_size + index) for index in range(group_size)]
        members = [
            sample(number, index, TokenRow("one", row, len(records[row])), Score(index / 2), domain=domain)
            for index, row in enumerate(rows)
        ]
        groups.append(SampleGroup(number, domain, tuple(members)))
    return groups, Blocks({"one": records})


def facts(config: dict[str, Any], tokenizer: str = "none", step: int = 1) -> dict[str, Any]:
    domains = {name: {"delivered": 1, "finish_reasons": {"stop": 2}} for name in ("add", "copy")}
    return {"step": step, "config": config, "tokenizer": tokenizer, "stats": {"domains": domains, "version": 4, "wall_s": 1.5}}


def write(path: Path, groups: list[SampleGroup], blocks: Blocks, **further: Any) -> DataProto:
    """The rows of the samples that train."""
    rows = rows_of(accepted(groups), TEMPERATURES)
    write_dump(path, groups, rows, blocks, facts({}), **further)
    return rows


def dump_run(folder: Path, config: RunConfig, steps: int, **of_batch: Any) -> Path:
    """What a run with this configuration would leave: the folder of its dumps."""
    for step in range(1, steps + 1):
        groups, blocks = batch(**of_batch)
        made = facts(config.model_dump(mode="json"), tokenizer_checksum(config.model.path), step)
        write_dump(dump_file(folder, step), groups, rows_of(groups, TEMPERATURES), blocks, made)
    return folder


def assert_same(found: DataProto, expected: DataProto) -> None:
    """The same columns, equal bit for bit; NaN equals NaN."""
    assert set(found.keys()) == set(expected.keys())
    for name, other in expected.columns.items():
        one = found[name]
        if isinstance(one, Ragged) and isinstance(other, Ragged):
            assert one.equals(other), name
        elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            assert same_tensor(one, other), name
        else:
            assert isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.tolist() == other.tolist(), name
