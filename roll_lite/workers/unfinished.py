"""Checkpoint file of unfinished groups' samples: a Parquet table of their rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from io import BytesIO
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from roll_lite.data.columns_file import as_table
from roll_lite.data.dumps import Fetch, column_of
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import FinishReason, TokenRow
from roll_lite.scheduler.unfinished import Pieces, SavedGroups, SavedSample, SavedTurn, Unfinished
from roll_lite.workers.token_blocks import TOKEN_COLUMNS, TokenRecord, joined_record, token_block


def to_file(found: Mapping[int, Mapping[int, Unfinished]], columns: Sequence[str], fetch: Fetch) -> bytes:
    """Return a Parquet file of the samples in `found`, {group: {index: sample}}, except any without tokens or with lost tokens."""
    samples = [(group, index, one) for group, of_group in found.items() for index, one in of_group.items()]
    references = list(dict.fromkeys(row.block for *_, one in samples for row in _rows_of(one)))
    blocks = {reference: block for reference, block in zip(references, fetch(references), strict=True) if block is not None}
    samples = [(group, index, _without_lost_parts(one, blocks)) for group, index, one in samples]
    samples = [entry for entry in samples if (rows := _rows_of(entry[2])) and all(row.block in blocks for row in rows)]
    if not samples:
        return b""
    records: list[TokenRecord] = []
    names: list[tuple[int, int, str | None]] = []
    for group, index, one in samples:
        own = _records(one, lambda row: TokenRecord.read(blocks[row.block], row.row))
        records += own
        bare = [replace(saved, turn=saved.turn._replace(tokens=None, ids=b""), given_ids=b"") for saved in one.sample.turns]
        unplaced = replace(one.sample, turns=tuple(bare)) if bare else _with_tokens(one.sample, [None] * len(own))
        text = json.dumps(asdict(unplaced), default=str)
        names += [(group, index, None if row else text) for row in range(len(own))]
    table = as_table(token_block(records, columns))
    for name, values in zip(("group", "index", "sample"), zip(*names, strict=True), strict=True):
        table = table.append_column(name, pa.array(values))
    file = BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()


def _without_lost_parts(one: Unfinished, blocks: Mapping[Any, DataProto]) -> Unfinished:
    """Drop an episode's responses in progress whose tokens are lost. No other response continues them."""
    turns: list[SavedTurn] = []
    under_way: dict[int, Pieces] = {}
    for index, saved in enumerate(one.sample.turns):
        pieces = one.under_way.get(index)
        rows = [saved.turn.tokens] if pieces is None else [pieces.request.context, *pieces.parts]
        if saved.turn.finish_reason is FinishReason.ABORT and any(row is not None and row.block not in blocks for row in rows):
            continue
        if pieces is not None:
            under_way[len(turns)] = pieces
        turns.append(saved)
    return Unfinished(replace(one.sample, turns=tuple(turns)), under_way) if one.sample.turns else one


def _rows_of(one: Unfinished) -> list[TokenRow]:
    under_way = [row for pieces in one.under_way.values() for row in (pieces.request.context, *pieces.parts)]
    return [row for row in (*_complete_rows(one.sample), *under_way) if row is not None]


def _complete_rows(sample: SavedSample) -> list[TokenRow | None]:
    return [saved.turn.tokens for saved in sample.turns] or [row.tokens for row in sample.transcript.rows]


def _records(one: Unfinished, read: Callable[[TokenRow], TokenRecord]) -> list[TokenRecord]:
    records = []
    for index, row in enumerate(_complete_rows(one.sample)):
        if (pieces := one.under_way.get(index)) is not None:
            records.append(joined_record(*pieces, read))
        elif row is not None:
            records.append(read(row))
    if one.sample.turns:  # each without the tokens before it, which are in earlier records
        turns = zip(one.sample.turns, records, strict=True)
        return [record.drop_prefix(len(record) - saved.given - saved.turn.length) for saved, record in turns]
    return records


def _with_tokens(sample: SavedSample, tokens: Sequence[TokenRow | None]) -> SavedSample:
    first, *others = tokens
    branches = tuple(replace(row, tokens=own) for row, own in zip(sample.transcript.branches, others, strict=True))
    return replace(sample, transcript=replace(sample.transcript, tokens=first, branches=branches))


def from_file(content: bytes, columns: Sequence[str], store: Callable[[DataProto], Any]) -> SavedGroups:
    """Read a file's samples, {group: {index: sample}}; none if its token columns differ from TOKEN_COLUMNS plus `columns`. `store`: puts a
    block into the object store."""
    table = pq.read_table(BytesIO(content)).combine_chunks()
    names = [*TOKEN_COLUMNS, *columns]
    if {"group", "index", "sample", *names} != set(table.column_names):
        return {}
    block = DataProto({name: column_of(name, table[name].combine_chunks()) for name in names})
    reference, lengths = store(block), block.ragged("input_ids").lengths.tolist()
    adapter = TypeAdapter(SavedSample)
    saved: dict[int, dict[int, SavedSample]] = {}
    names = table.select(["group", "index", "sample"]).to_pylist()
    starts = [row for row, one in enumerate(names) if one["sample"] is not None]  # a sample's further rows follow its first one
    for start, end in pairwise([*starts, len(names)]):
        one = names[start]
        sample = adapter.validate_python(json.loads(one["sample"]))
        if sample.turns:
            sample = _with_turns(sample, [TokenRecord.read(block, row) for row in range(start, end)], columns, store)
        else:
            sample = _with_tokens(sample, [TokenRow(reference, row, lengths[row]) for row in range(start, end)])
        saved.setdefault(one["group"], {})[one["index"]] = sample
    return saved


def _with_turns(sample: SavedSample, records: list[TokenRecord], columns: Sequence[str], store: Callable[[DataProto], Any]) -> SavedSample:
    """Store the tokens of an unfinished episode's turns; return the sample with references to them. A turn's row: all tokens of its
    conversation up to its end. `records`: each turn's own input and response."""
    whole: dict[int, TokenRecord] = {}
    for saved, own in zip(sample.turns, records, strict=True):
        before = [] if saved.after is None else [whole[saved.after].masked() if saved.branches else whole[saved.after]]
        assert saved.number not in whole, f"two saved responses have the number {saved.number}"
        whole[saved.number] = TokenRecord.joined([*before, own])
    reference, turns = store(token_block(list(whole.values()), columns)), []
    for row, (saved, own) in enumerate(zip(sample.turns, records, strict=True)):
        given, response = (ids.astype(np.int32).tobytes() for ids in np.split(own.ids, [saved.given]))
        place = TokenRow(reference, row, len(whole[saved.number]))
        turns.append(replace(saved, turn=saved.turn._replace(tokens=place, ids=response), given_ids=given))
    return replace(sample, turns=tuple(turns))
