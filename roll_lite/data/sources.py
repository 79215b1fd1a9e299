from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from roll_lite.config.schema.domains import DataFiles
from roll_lite.files import elsewhere, first_line, is_file, kind_of, listing, read_json, read_object
from roll_lite.hub import HubPath, fetch, split_of

TABLES = (".parquet", ".arrow")
"""Suffixes of files that declare their columns."""
IN_FOLDERS = (".jsonl", *TABLES)
SUFFIXES = (*IN_FOLDERS, ".csv", ".json")
"""Suffixes accepted for a single file. In a folder, CSV and JSON files are not read, because they are often not data."""
ROWS_AT_ONCE = 1024
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Row(NamedTuple):
    file: Path
    number: int
    """Number of the line (.jsonl) or row, from 1."""
    content: dict[str, Any] | str
    """{column: value}, or why the row is unreadable or left out."""

    @property
    def place_in_file(self) -> str:
        return f"{'line' if self.file.suffix == '.jsonl' else 'row'} {self.number}"

    @property
    def place(self) -> str:
        return f"{self.file}, {self.place_in_file}"


# ---------------------------------------------------------------- files


def paths_of(files: DataFiles | None) -> list[Path]:
    return list(files) if isinstance(files, list | dict) else [files] if files is not None else []


def shards_of(path: Path) -> list[Path]:
    """Return a path's data files. ValueError for a folder with different formats or splits, unless Hugging Face `datasets` saved it."""
    if isinstance(path, HubPath):
        return [_file(file) for file in fetch(path)]
    found = kind_of(path)
    if found is None:
        raise ValueError(f"no such file: {path}{elsewhere(path)}")
    if found == "other":
        raise ValueError(f"{path} is no plain file: its rows are read more than once")
    return _folder(path) if found == "folder" else [_file(path)]


def _file(path: Path) -> Path:
    if path.suffix not in SUFFIXES:
        hint = "; write it with one row per line as .jsonl" if path.suffix in (".tsv", ".txt") else ""
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; known are {', '.join(SUFFIXES)} and folders{hint}")
    return path


def _folder(folder: Path) -> list[Path]:
    if is_file(folder / "dataset_dict.json"):
        splits = [one.name for one in listing(folder) if is_file(one / "state.json")]
        raise ValueError(f"{folder} holds several splits; name the folder of one of them: {', '.join(splits) or 'it has none'}")
    if is_file(folder / "state.json"):
        return _saved(folder)
    shards = [one for one in listing(folder) if one.suffix in IN_FOLDERS and is_file(one)]
    if not shards:
        inside = [one.name for one in listing(folder) if one.is_dir() and any(inner.suffix in IN_FOLDERS for inner in listing(one))]
        hint = f"; its folder{'s' if len(inside) > 1 else ''} {', '.join(inside)} may be meant" if inside else ""
        raise ValueError(f"{folder} holds no {', '.join(IN_FOLDERS)} file{hint}")
    if len(kinds := {shard.suffix for shard in shards}) > 1:
        raise ValueError(f"{folder} holds files of several kinds ({', '.join(sorted(kinds))}); name one of them")
    _refuse_mixed_splits(folder, [shard.stem for shard in shards])
    return shards


def _refuse_mixed_splits(folder: Path, names: Sequence[str]) -> None:
    """Raise ValueError if the files may be of several splits: their names state different splits, or state none and differ in letters.
    Otherwise held-out rows might be trained on."""
    by_split = {split_of(name): name for name in names}
    if len(by_split) > 1:
        named = ", ".join(f"{name} ({split or 'no split named'})" for split, name in sorted(by_split.items()))
        raise ValueError(f"{folder} holds files of several splits: {named}; name one file, or list the files that belong together")
    series = {re.sub(r"[\d\W_]", "", name): name for name in names}
    if not any(by_split) and len(series) > 1:
        shown = " and ".join(list(series.values())[:2])
        raise ValueError(f"{folder}: the names {shown} do not say whether the files are of one split; list those that are meant")


def _saved(folder: Path) -> list[Path]:
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
    return [folder / name for name in names]


# ---------------------------------------------------------------- rows


def read_rows(path: Path) -> Iterator[Row]:
    return chain.from_iterable(map(shard_rows, shards_of(path)))


def shard_rows(file: Path, columns: Sequence[str] | None = None) -> Iterator[Row]:
    """Yield rows. `columns`: columns to read of a table (None: all)."""
    try:
        contents = _json_rows(file) if file.suffix in (".jsonl", ".json") else _table(file, columns)
        for number, content in contents:
            yield Row(file, number, content)
    except OSError as error:
        raise ValueError(f"{error.filename or file} cannot be read: {error.strerror or error}") from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with path.open("rb") as file:
        is_list = path.suffix == ".json" and file.read(1024).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"["
    if is_list:
        checked = _if_text if _SURROGATE.search(path.read_bytes()) else _if_object
        for number, row in enumerate(read_json(path), start=1):
            yield number, checked(row)
        return
    with path.open("rb") as lines:  # bytes, so that invalid UTF-8 is an error of its line only
        for number, line in enumerate(lines, start=1):
            raw = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if raw.strip():
                yield number, _parsed(raw)


def _parsed(raw: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(raw.decode("utf-8"))
        return _if_text(row) if _SURROGATE.search(raw) else _if_object(row)
    except UnicodeDecodeError as error:
        return f"character {error.start + 1}: not valid UTF-8"
    except json.JSONDecodeError as error:
        return f"character {error.pos + 1}: not valid JSON: {error.msg}"
    except (ValueError, RecursionError) as error:  # thousands of digits or brackets
        return f"not valid JSON: {first_line(error)}"


def _if_text(row: Any) -> dict[str, Any] | str:
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"not valid text: \\u{ord(error.object[error.start]):04x} is half of a character (a surrogate without its pair)"
    return _if_object(row)


def _if_object(row: Any) -> dict[str, Any] | str:
    return row if isinstance(row, dict) else f"must be a JSON object with one entry per column, got {row!r:.80}"


def declared_columns(file: Path) -> list[str]:
    from pyarrow import ArrowException, parquet

    try:
        schema = parquet.read_schema(file) if file.suffix == ".parquet" else _arrow_reader(file).schema
    except (OSError, ArrowException) as error:
        raise ValueError(f"{file} cannot be read as {file.suffix[1:]}: {first_line(error)}") from error
    return [str(name) for name in schema.names]


def _table(file: Path, columns: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowException

    number = 0
    try:
        for batch in _batches(file, columns):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except (ArrowException, UnicodeDecodeError, OverflowError) as error:
        after = f" after row {number}" if number else ""
        raise ValueError(f"{file} cannot be read as {file.suffix[1:]}{after}: {first_line(error)}") from error


def _batches(path: Path, columns: Sequence[str] | None) -> Iterator[Any]:
    from pyarrow import csv, parquet, string

    if path.suffix == ".csv":
        quoted = csv.ParseOptions(newlines_in_values=True)
        with csv.open_csv(path, parse_options=quoted) as file:
            texts = dict.fromkeys(file.schema.names, string())  # guessed types would turn 007 into 7 and, beside 2.5, 1 into 1.0
        as_written = csv.ConvertOptions(column_types=texts)
        yield from csv.read_csv(path, parse_options=quoted, convert_options=as_written).to_batches(ROWS_AT_ONCE)
        return
    if path.suffix == ".parquet":
        with parquet.ParquetFile(path, memory_map=True) as file:
            yield from file.iter_batches(ROWS_AT_ONCE, columns=columns)
        return
    reader = _arrow_reader(path)
    batches = reader if hasattr(reader, "read_next_batch") else map(reader.get_batch, range(reader.num_record_batches))
    for batch in batches:
        read = batch if columns is None else batch.select(list(columns))
        yield from (read.slice(start, ROWS_AT_ONCE) for start in range(0, batch.num_rows, ROWS_AT_ONCE))


def _arrow_reader(file: Path) -> Any:
    """Open an Arrow file. Hugging Face writes Arrow's stream format, other programs the file format."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    source = memory_map(str(file))
    try:
        return ipc.open_stream(source)
    except ArrowInvalid:
        source.seek(0)
        return ipc.open_file(source)
