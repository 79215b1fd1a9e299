"""The rows of a domain's data: JSON lines, parquet, arrow; one file or a folder of them; a part at a time, whatever their size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from roll_lite.config.data_files import Shard, arrow_reader, shards_of
from roll_lite.config.problems import first_line

ROWS_AT_ONCE = 1024
"""How many rows of a parquet file are read at once; the file stores columns."""


class Row(NamedTuple):
    shard: int
    """Number of its file."""
    file: Path
    unit: str
    """What the file's rows are counted in: line or row."""
    number: int
    """From 1."""
    content: dict[str, Any] | str
    """Its columns, or why they cannot be read."""

    @property
    def place(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


def read_rows(path: Path) -> Iterator[Row]:
    """Every row of the file or folder, in order. ValueError where a file as a whole cannot be read."""
    try:
        for index, shard in enumerate(shards_of(path)):
            for number, content in _contents(shard):
                yield Row(index, shard.path, shard.unit, number, content)
    except OSError as error:
        raise ValueError(f"{error.filename or path} cannot be read: {error.strerror or error}") from error


def _contents(shard: Shard) -> Iterator[tuple[int, dict[str, Any] | str]]:
    if shard.kind == "jsonl":
        yield from _json_lines(shard.path)
    else:
        yield from _table(shard)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Bytes, because text mode and str.splitlines cut at characters that JSON allows inside strings. Blank lines are skipped."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if raw.strip():
                yield number, _parsed(raw)


def _parsed(raw: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        return f"character {error.start + 1}: not valid UTF-8"
    except json.JSONDecodeError as error:
        return f"character {error.pos + 1}: not valid JSON: {error.msg}"
    if not isinstance(row, dict):
        return f"must be a JSON object with one entry per column, got {row!r:.80}"
    return row


def _table(shard: Shard) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowException

    number = 0
    try:
        for batch in _batches(shard):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except ArrowException as error:
        after = f" after row {number}" if number else ""
        raise ValueError(f"{shard.path} cannot be read as {shard.kind}{after}: {first_line(error)}") from error


def _batches(shard: Shard) -> Iterator[Any]:
    from pyarrow import parquet

    if shard.kind == "parquet":
        with parquet.ParquetFile(shard.path, memory_map=True) as file:
            yield from file.iter_batches(ROWS_AT_ONCE)
        return
    reader = arrow_reader(shard.path)
    batches = reader if hasattr(reader, "read_next_batch") else map(reader.get_batch, range(reader.num_record_batches))
    for batch in batches:
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield batch.slice(start, ROWS_AT_ONCE)
