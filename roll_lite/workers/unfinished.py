"""Samples of unfinished groups as a checkpoint's file: a Parquet table with a row per sample."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from roll_lite.data.columns_file import as_table
from roll_lite.data.dumps import Fetch, column_of
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import TokenRow
from roll_lite.scheduler.unfinished import SavedGroups, SavedSample, Unfinished
from roll_lite.workers.token_blocks import TOKEN_COLUMNS, TokenRecord, joined_record, token_block


def to_file(found: Mapping[int, Mapping[int, Unfinished]], columns: Sequence[str], fetch: Fetch) -> bytes:
    """Write samples, given by group and index, with their tokens. Samples without tokens or with lost ones are left out. `columns`: further
    token columns."""
    samples = [(group, index, one) for group, of_group in found.items() for index, one in of_group.items()]
    references = list(dict.fromkeys(row.block for *_, one in samples for row in _rows_of(one)))
    blocks = {reference: block for reference, block in zip(references, fetch(references), strict=True) if block is not None}
    samples = [entry for entry in samples if (rows := _rows_of(entry[2])) and all(row.block in blocks for row in rows)]
    if not samples:
        return b""
    records = [_record(one, lambda row: TokenRecord.read(blocks[row.block], row.row)) for *_, one in samples]
    table = as_table(token_block(records, columns))
    groups, indices, saved = zip(*samples, strict=True)
    texts = [json.dumps(asdict(_with_tokens(one.sample, None))) for one in saved]
    for name, values in (("sample", texts), ("index", indices), ("group", groups)):
        table = table.add_column(0, name, pa.array(values))
    file = BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def _rows_of(one: Unfinished) -> list[TokenRow]:
    """Rows of token blocks with the sample's tokens."""
    rows = [one.request.context, *one.parts] if one.parts and one.request is not None else [one.sample.transcript.tokens]
    return [row for row in rows if row is not None]


def _record(one: Unfinished, read: Callable[[TokenRow], TokenRecord]) -> TokenRecord:
    if one.parts and one.request is not None:
        return joined_record(one.request, one.parts, read)
    return read(_rows_of(one)[0])


def _with_tokens(sample: SavedSample, tokens: TokenRow | None) -> SavedSample:
    return replace(sample, transcript=replace(sample.transcript, tokens=tokens))


def from_file(content: bytes, columns: Sequence[str], store: Callable[[DataProto], Any]) -> SavedGroups:
    """Read samples. Returns none if the file's token columns are not exactly TOKEN_COLUMNS and `columns`. `store`: function that puts a
    block into the object store and returns its reference."""
    table = pq.read_table(BytesIO(content)).combine_chunks()
    names = [*TOKEN_COLUMNS, *columns]
    if {"group", "index", "sample", *names} != set(table.column_names):
        return {}
    block = DataProto({name: column_of(name, table[name].combine_chunks()) for name in names})
    reference, lengths = store(block), block.ragged("input_ids").lengths.tolist()
    adapter = TypeAdapter(SavedSample)
    saved: dict[int, dict[int, SavedSample]] = {}
    for row, one in enumerate(table.select(["group", "index", "sample"]).to_pylist()):
        sample = adapter.validate_python(json.loads(one["sample"]))
        saved.setdefault(one["group"], {})[one["index"]] = _with_tokens(sample, TokenRow(reference, row, lengths[row]))
    return saved
