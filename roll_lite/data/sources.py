from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from roll_lite.config.schema.domains import DataFiles
from roll_lite.files import elsewhere, first_line, is_file, kind_of, listing, read_json, read_object
from roll_lite.hub import HubPath, data_files, split_of

FileKind = Literal["jsonl", "parquet", "arrow", "csv", "json"]

KINDS: dict[str, FileKind] = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
FILE_KINDS: dict[str, FileKind] = {**KINDS, ".csv": "csv", ".json": "json"}
"""Suffixes accepted for a single file. In a folder, only files with suffixes in KINDS are read: CSV and JSON files there are often not
data."""
ROWS_AT_ONCE = 1024
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Shard(NamedTuple):
    path: Path
    kind: FileKind

    @property
    def unit(self) -> str:
        return "line" if self.kind == "jsonl" else "row"

    @property
    def is_table(self) -> bool:
        return self.kind in ("parquet", "arrow")


class Row(NamedTuple):
    shard: int
    file: Path
    unit: str
    """Unit that `number` counts, from 1: `line` or `row`."""
    number: int
    content: dict[str, Any] | str
    """{column: value}, or the reason why the row is unreadable or left out."""

    @property
    def place(self) -> str:
        return f"{self.file}, {self.unit} {self.number}"


# ---------------------------------------------------------------- files


def paths_of(files: DataFiles) -> list[Path]:
    return list(files) if isinstance(files, list | dict) else [files]


def shards_of(path: Path) -> list[Shard]:
    """Return a path's data files. ValueError for a folder with different formats or splits, unless Hugging Face `datasets` saved it."""
    if isinstance(path, HubPath):
        return [_file(file) for file in data_files(path)]
    found = kind_of(path)
    if found is None:
        raise ValueError(f"no such file: {path}{elsewhere(path)}")
    if found == "other":
        raise ValueError(f"{path} is no plain file: its rows are read more than once")
    return _folder(path) if found == "folder" else [_file(path)]


def _file(path: Path) -> Shard:
    if path.suffix not in FILE_KINDS:
        hint = "; write it with one row per line as .jsonl" if path.suffix in (".tsv", ".txt") else ""
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; known are {', '.join(FILE_KINDS)} and folders{hint}")
    return Shard(path, FILE_KINDS[path.suffix])


def _folder(folder: Path) -> list[Shard]:
    if is_file(folder / "dataset_dict.json"):
        splits = [one.name for one in listing(folder) if is_file(one / "state.json")]
        raise ValueError(f"{folder} holds several splits; name the folder of one of them: {', '.join(splits) or 'it has none'}")
    if is_file(folder / "state.json"):
        return _saved(folder)
    shards = [Shard(one, KINDS[one.suffix]) for one in listing(folder) if one.suffix in KINDS and is_file(one)]
    if not shards:
        inside = [one.name for one in listing(folder) if one.is_dir() and any(inner.suffix in KINDS for inner in listing(one))]
        hint = f"; its folder{'s' if len(inside) > 1 else ''} {', '.join(inside)} may be meant" if inside else ""
        raise ValueError(f"{folder} holds no {', '.join(KINDS)} file{hint}")
    if len({shard.kind for shard in shards}) > 1:
        raise ValueError(f"{folder} holds files of several kinds ({', '.join(sorted({s.path.suffix for s in shards}))}); name one of them")
    _refuse_mixed_splits(folder, [shard.path.stem for shard in shards])
    return shards


def _refuse_mixed_splits(folder: Path, names: Sequence[str]) -> None:
    """Raise ValueError if file names tell several splits, or tell none and differ in more than digits and punctuation: held-out rows would
    be trained on."""
    by_split = {split_of(name): name for name in names}
    if len(by_split) > 1:
        named = ", ".join(f"{name} ({split or 'no split named'})" for split, name in sorted(by_split.items()))
        raise ValueError(f"{folder} holds files of several splits: {named}; name one file, or list the files that belong together")
    series = {re.sub(r"[\d\W_]", "", name): name for name in names}
    if not any(by_split) and len(series) > 1:
        shown = " and ".join(list(series.values())[:2])
        raise ValueError(f"{folder}: the names {shown} do not say whether the files are of one split; list those that are meant")


def _saved(folder: Path) -> list[Shard]:
    state = read_object(folder / "state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{folder} was saved by an old version of `datasets` with an index beside the rows; save flatten_indices() of it")
    try:
        names = [str(one["filename"]) for one in state["_data_files"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / 'state.json'} names no data files, as one that was written by save_to_disk does") from error
    missing = [name for name in names if not is_file(folder / name)]
    if missing:
        raise ValueError(f"{folder / 'state.json'} names files that are not there: {', '.join(missing)}")
    if not names:
        raise ValueError(f"{folder / 'state.json'} names no data files: the data set is empty")
    return [Shard(folder / name, "arrow") for name in names]


# ---------------------------------------------------------------- rows


def read_rows(path: Path) -> Iterator[Row]:
    for index, shard in enumerate(shards_of(path)):
        yield from shard_rows(shard, index)


def shard_rows(shard: Shard, index: int = 0, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield rows. `columns`: columns to read of a table (None: all)."""
    try:
        contents = _table(shard, columns) if shard.kind not in ("jsonl", "json") else _json_rows(shard)
        for number, content in contents:
            yield Row(index, shard.path, shard.unit, number, content)
    except OSError as error:
        raise ValueError(f"{error.filename or shard.path} cannot be read: {error.strerror or error}") from error


def _json_rows(shard: Shard) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with shard.path.open("rb") as file:
        is_list = shard.kind == "json" and file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    if not is_list:
        yield from _json_lines(shard.path)
        return
    for number, row in enumerate(read_json(shard.path), start=1):
        yield number, row if isinstance(row, dict) else f"must be a JSON object with one entry per column, got {row!r:.80}"


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (line number, row or error). Reads bytes, so that invalid UTF-8 is an error of its line only."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if raw.strip():
                yield number, _parsed(raw)


def _parsed(raw: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(raw.decode("utf-8"))
        wrong = _lone_surrogate(row) if _SURROGATE.search(raw) else None
    except UnicodeDecodeError as error:
        return f"character {error.start + 1}: not valid UTF-8"
    except json.JSONDecodeError as error:
        return f"character {error.pos + 1}: not valid JSON: {error.msg}"
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        return f"not valid JSON: {first_line(error)}"
    if not isinstance(row, dict):
        return f"must be a JSON object with one entry per column, got {row!r:.80}"
    if wrong is not None:
        return f"not valid text: {wrong} is half of a character (a surrogate without its pair)"
    return row


def _lone_surrogate(row: Any) -> str | None:
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def declared_columns(shard: Shard) -> list[str]:
    from pyarrow import ArrowException, parquet

    try:
        schema = parquet.read_schema(shard.path) if shard.kind == "parquet" else _arrow_reader(shard.path).schema
    except (OSError, ArrowException) as error:
        raise ValueError(f"{shard.path} cannot be read as {shard.kind}: {first_line(error)}") from error
    return [str(name) for name in schema.names]


def _table(shard: Shard, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowException

    number = 0
    try:
        for batch in _batches(shard, columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (ArrowException, UnicodeDecodeError, OverflowError) as error:
        after = f" after row {number}" if number else ""
        raise ValueError(f"{shard.path} cannot be read as {shard.kind}{after}: {first_line(error)}") from error


def _batches(shard: Shard, columns: Sequence[str] | None) -> Iterator[Any]:
    from pyarrow import csv, parquet

    if shard.kind == "csv":
        quoted = csv.ParseOptions(newlines_in_values=True)
        yield from csv.read_csv(shard.path, parse_options=quoted).to_batches(ROWS_AT_ONCE)
        return
    if shard.kind == "parquet":
        with parquet.ParquetFile(shard.path, memory_map=True) as file:
            yield from file.iter_batches(ROWS_AT_ONCE, columns=columns)
        return
    reader = _arrow_reader(shard.path)
    batches = reader if hasattr(reader, "read_next_batch") else map(reader.get_batch, range(reader.num_record_batches))
    for batch in batches:
        read = batch if columns is None else batch.select(list(columns))
        for start in range(0, batch.num_rows, ROWS_AT_ONCE):
            yield read.slice(start, ROWS_AT_ONCE)


def _arrow_reader(file: Path) -> Any:
    """Open an Arrow file. Hugging Face writes Arrow's stream format, other programs the file format."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    source = memory_map(str(file))
    try:
        return ipc.open_stream(source)
    except ArrowInvalid:
        source.seek(0)
        return ipc.open_file(source)
