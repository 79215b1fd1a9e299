"""Write and read rollout dumps, one zstd Parquet file per step (columns: docs/replay.md)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from roll_lite.data.branches import per_sample, turn_rewards
from roll_lite.data.columns_file import as_array
from roll_lite.data.dump_files import FORMAT, METADATA, SCHEMA_VERSION, damaged, read_header
from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import VECTORS, Column, DataProto, object_column
from roll_lite.data.ragged import Ragged, from_numpy
from roll_lite.data.samples import Branch, Prompt, Sample, SampleGroup, TokenRow
from roll_lite.files import replacing

ROW_GROUP_TOKENS = 2**21
"""Tokens per Parquet row group (about 30 MB)."""

Fetch = Callable[[Sequence[Any]], Sequence[DataProto | None]]
"""Getter of token blocks (workers/token_blocks.py) by reference; None for a lost block."""

DESCRIPTION = {
    "sample": "int64",
    "domain": "string",
    "prompt_uid": "int64",
    "epoch": "int64",
    "group": "int64",
    "index": "int64",
    "attempt": "int64",
    "baseline": "bool",
    "outcome": "string",
    "failure": "string",
    "timed_out": "bool",
    "finish_reason": "string",
    "score": "float64",
    "correct": "bool",
    "format_ok": "bool",
    "details": "string",
    "prompt": "string",
    "response": "string",
    "reference_answer": "string",
    "prompt_length": "int64",
    "response_length": "int64",
    "policy_tokens": "int64",
    "versions": pa.list_(pa.struct({"start": pa.int32(), "version": pa.int32()})),
    "terms": "string",
    "episode": "string",
    "asked_at": "float64",
    "generated_at": "float64",
    "scored_at": "float64",
    "columns": "string",
}
TOKENS = {"input_ids": pa.int64(), "response_mask": pa.bool_(), "rollout_log_probs": pa.float32()}
KEPT_IDS, TURN_REWARDS = "kept_ids", "turn_rewards"
LONGEST_COLUMN = 1000
"""Maximum characters stored of a data column's value."""
UNKNOWN = {"format_ok": False}
"""{column: value used in training where the dump has null}."""


# ---------------------------------------------------------------- writing


@dataclass(frozen=True)
class _Entry:
    sample: Sample
    row: int | None
    """Row in the training batch; None if not trained on."""
    baseline: bool
    branch: int = 0

    @property
    def path(self) -> Branch:
        return self.sample.transcript.rows[self.branch]

    @property
    def tokens(self) -> TokenRow | None:
        return self.path.tokens


def write_dump(
    path: Path,
    groups: Sequence[SampleGroup],
    rows: DataProto,
    fetch: Fetch,
    facts: Mapping[str, Any],
    kept_ids: bool = False,
    clock_offset: float = 0.0,
    rewards_of: Callable[[Sample], Sequence[float]] | None = None,
) -> None:
    """Write a dump atomically. `groups`: all samples, trained on or not. `facts`: header fields. `kept_ids`: also store the ids kept by
    truncated sampling. `clock_offset`: wall clock minus event loop clock, in seconds. `rewards_of`: a sample's rewards by turn; None: no
    column turn_rewards."""
    entries = _entries(groups, rows)
    description = DESCRIPTION | ({"branch": "int64"} if "branch" in rows else {})
    further = {name: as_array(column) for name, column in rows.columns.items() if name not in description}
    tokens = {name: pa.large_list(kind) for name, kind in TOKENS.items()}
    if kept_ids:
        width = max((block.ragged(KEPT_IDS).values.shape[1] for block in _blocks(entries, fetch).values()), default=1)
        tokens[KEPT_IDS] = pa.large_list(pa.list_(pa.int32(), width))
    if rewards_of is not None:
        tokens[TURN_REWARDS] = pa.large_list(pa.float32())
    schema = pa.schema(description | {name: array.type for name, array in further.items()} | tokens)
    largest = 0
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, False) as draft, pq.ParquetWriter(draft, schema, compression="zstd", write_page_checksum=True) as file:
        for part in _row_groups(entries):
            described = [_described(entry, clock_offset) for entry in part]
            arrays = {name: pa.array([one[name] for one in described], kind) for name, kind in description.items()}
            arrays |= {name: array.take(arrays["sample"]) for name, array in further.items()}
            arrays |= _token_columns(part, fetch, schema)
            if rewards_of is not None:
                paid = [turn_rewards([(one.path, rewards_of(one.sample))]).values.numpy() if one.tokens else None for one in part]
                arrays[TURN_REWARDS] = pa.array(paid, tokens[TURN_REWARDS])
            largest = max(largest, pc.max(arrays["input_ids"].values).as_py() or 0)
            file.write_table(pa.table(arrays, schema))
        made = {"format": FORMAT, "schema_version": SCHEMA_VERSION, "made_by": f"roll_lite {version('roll_lite')}", **facts}
        found = {"largest_token": largest, "domains": _sizes(rows), "baselines": any(entry.baseline for entry in entries)}
        file.add_key_value_metadata({METADATA: json.dumps(made | found)})


def _entries(groups: Sequence[SampleGroup], rows: DataProto) -> list[_Entry]:
    branches = rows.tensor("branch").tolist() if "branch" in rows else [0] * len(rows)
    names = zip(rows.tensor("group").tolist(), rows.tensor("index").tolist(), branches, strict=True)
    row_of = {name: row for row, name in enumerate(names)}
    entries: list[_Entry] = []
    for group in groups:
        for sample in group.samples:
            numbers = range(len(sample.transcript.rows))
            entries += [_Entry(sample, row_of.get((group.group, sample.id.index, number)), False, number) for number in numbers]
        entries += [_Entry(group.baseline, None, True)] if group.baseline is not None else []
    assert sum(entry.row is not None for entry in entries) == len(rows), "a sample that trains is in none of the groups"
    return entries


def _described(entry: _Entry, clock_offset: float) -> dict[str, Any]:
    sample, score, transcript, path = entry.sample, entry.sample.score, entry.sample.transcript, entry.path
    return {
        "sample": entry.row,
        **asdict(sample.id),
        "branch": entry.branch,
        "baseline": entry.baseline,
        "outcome": str(sample.outcome),
        "failure": _text(sample.failure),
        "timed_out": sample.timed_out,
        "finish_reason": str(transcript.finish_reason) if transcript.finish_reason else None,
        "score": score.value if score else None,
        "correct": score.is_correct if score else None,
        "format_ok": score.format_ok if score else None,
        "details": _json(score.details) if score else None,
        "prompt": _text(sample.prompt.text),
        "response": _text(transcript.text),
        "reference_answer": _json(sample.prompt.answer),
        "prompt_length": path.prompt_length or len(sample.prompt.token_ids),
        "response_length": path.response_length,
        "policy_tokens": path.policy_tokens,
        "versions": [{"start": span.start, "version": span.version} for span in path.versions],
        "terms": _json(score.terms) if score else None,
        "episode": None if transcript.episode is None else _json(asdict(transcript.episode)),
        **times(sample, clock_offset),
        "columns": _json(further_columns(sample.prompt)),
    }


def times(sample: Sample, clock_offset: float) -> dict[str, float | None]:
    """Times when a sample was requested, generated and scored, in Unix seconds or None."""
    moments = {"asked_at": sample.asked, "generated_at": sample.generated, "scored_at": sample.scored}
    return {name: None if moment is None else round(moment + clock_offset, 3) for name, moment in moments.items()}


def further_columns(prompt: Prompt) -> dict[str, Any]:
    question = prompt.question
    shortened = {}
    for name, value in prompt.columns.items():
        if not (type(value) is type(question) and value == question):
            text = value if isinstance(value, str) else _json(value)
            is_short = len(text) <= LONGEST_COLUMN
            shortened[name] = value if is_short else f"{text[:LONGEST_COLUMN]}... ({len(text)} characters)"
    return shortened


def _json(value: Any) -> str:
    return json.dumps(value, default=str)


def _text(text: str | None) -> str | None:
    """Escape lone surrogates, which UTF-8 cannot encode. Program output may contain them."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode("utf-8")


def _row_groups(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    part: list[_Entry] = []
    tokens = 0
    for entry in entries:
        part.append(entry)
        tokens += entry.tokens.length if entry.tokens else 0
        if tokens >= ROW_GROUP_TOKENS:
            yield part
            part, tokens = [], 0
    if part or not entries:
        yield part


def _token_columns(entries: Sequence[_Entry], fetch: Fetch, schema: pa.Schema) -> dict[str, pa.Array]:
    """Token columns, null for samples without tokens; RuntimeError if a trained sample's tokens are lost."""
    names = [name for name in (*TOKENS, KEPT_IDS) if name in schema.names]
    blocks = _blocks(entries, fetch)
    rows: dict[Any, dict[int, int]] = {}
    """{token block: {entry number: row in block}}."""
    for number, entry in enumerate(entries):
        if entry.tokens is not None and entry.tokens.block in blocks:
            rows.setdefault(entry.tokens.block, {})[number] = entry.tokens.row
        elif entry.row is not None:
            raise RuntimeError(f"the tokens of {entry.sample.id.request_id()}, which trains, are gone")
    if not rows:
        return {name: pa.nulls(len(entries), schema.field(name).type) for name in names}
    joined = DataProto.concat([blocks[reference].select(names).take(list(own.values())) for reference, own in rows.items()])
    place = {number: place for place, number in enumerate(chain.from_iterable(rows.values()))}
    in_order = pa.array([place.get(number) for number in range(len(entries))], pa.int64())
    if KEPT_IDS in names:
        kept = joined.ragged(KEPT_IDS)
        missing = schema.field(KEPT_IDS).type.value_type.list_size - kept.values.shape[1]
        values = torch.nn.functional.pad(kept.values, (0, missing), value=VECTORS[KEPT_IDS])
        joined = joined.with_columns(kept_ids=Ragged(values, kept.offsets))
    return {name: as_array(joined[name]).take(in_order) for name in names}


def _blocks(entries: Sequence[_Entry], fetch: Fetch) -> dict[Any, DataProto]:
    references = list(dict.fromkeys(entry.tokens.block for entry in entries if entry.tokens is not None))
    return {reference: block for reference, block in zip(references, fetch(references), strict=True) if block is not None}


def _sizes(rows: DataProto) -> dict[str, dict[str, int]]:
    return {
        str(name): {
            "samples": len(per_sample(own)),
            "longest_prompt": int(own.tensor("prompt_length").max()),
            "longest_response": int(own.tensor("response_length").max()),
            "longest_row": int((own.tensor("prompt_length") + own.tensor("response_length")).max()),
        }
        for name, own in rows.group_by("domain").items()
    }


# ---------------------------------------------------------------- reading


def load_dump(path: Path | str) -> DataProto:
    """Load the trained samples as the original batch, bit-identical and in order. ValueError for an unusable file."""
    return DataProto.concat(list(dump_parts(Path(path))))


def dump_parts(path: Path) -> Iterator[DataProto]:
    """Yield the batch of `load_dump` in parts, one per row group. Joining them takes twice the memory."""
    read_header(path)
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            names = [name for name in file.schema_arrow.names if name in KEYS]
            missing = [name for name in ("sample", "group", *TOKENS) if name not in names]
            if missing:
                raise ValueError(f"{path} is no dump of rollouts: it has no column {', '.join(missing)}")
            for number in range(file.num_row_groups):
                table = file.read_row_group(number, columns=names).combine_chunks()
                trained = table.filter(pc.is_valid(table["sample"]))
                yield DataProto({name: column_of(name, trained[name].combine_chunks()) for name in names})
    except (pa.ArrowException, OSError) as error:
        raise damaged(path, error) from error


def column_of(name: str, array: pa.Array) -> Column:
    key = KEYS[name]
    if name in UNKNOWN:
        array = pc.fill_null(array, UNKNOWN[name])
    if array.null_count:
        raise pa.ArrowInvalid(f"column {name} has no value for a sample that trains")
    if key.kind is Kind.OBJECT:
        return object_column(array.to_pylist())
    if key.kind is Kind.ROW:
        return _tensor(array, key.dtype)
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
    entries = pc.list_flatten(array)
    if pa.types.is_fixed_size_list(entries.type):
        return Ragged(_tensor(entries.flatten(), key.dtype).view(-1, entries.type.list_size), offsets)
    return Ragged(_tensor(entries, key.dtype), offsets)


def _tensor(array: pa.Array, dtype: torch.dtype | None) -> torch.Tensor:
    return from_numpy(array.to_numpy(zero_copy_only=False)).to(dtype)
