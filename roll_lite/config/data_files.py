"""Which files a domain's data consists of, which columns they declare, and whose their rows are. Only headers are read; data/sources.py
reads the rows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roll_lite.config.files import elsewhere, is_file, kind_of, listing, read_object
from roll_lite.config.problems import first_line
from roll_lite.config.schema.domains import DataConfig, DataFiles, DomainConfig

Kind = Literal["jsonl", "parquet", "arrow"]

KINDS: dict[str, Kind] = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow"}
"""By suffix."""
SPLIT = re.compile(r"(train|validation|valid|val|dev|test)(?=[-_.]|$)")


@dataclass(frozen=True)
class Shard:
    """One file of a domain's data."""

    path: Path
    kind: Kind

    @property
    def unit(self) -> str:
        """What its rows are counted in, from 1."""
        return "line" if self.kind == "jsonl" else "row"


def paths_of(files: DataFiles) -> list[Path]:
    return list(files) if isinstance(files, list | dict) else [files]


def shards_of(path: Path) -> list[Shard]:
    """A file, or in their order the files of a folder: one saved by Hugging Face `datasets`, or one with shards of one kind.

    What is wrong is a ValueError.
    """
    found = kind_of(path)
    if found is None:
        raise ValueError(f"no such file: {path}{elsewhere(path)}")
    if found == "other":
        raise ValueError(f"{path} is no plain file: its rows are read more than once")
    return _folder(path) if found == "folder" else [_file(path)]


def _file(path: Path) -> Shard:
    if path.suffix not in KINDS:
        hint = "; write it with one row per line as .jsonl" if path.suffix in (".json", ".csv", ".tsv", ".txt") else ""
        raise ValueError(f"{path}: unknown suffix {path.suffix!r}; known are {', '.join(KINDS)} and folders with such files{hint}")
    return Shard(path, KINDS[path.suffix])


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
    splits = sorted({match[1] if (match := SPLIT.match(shard.path.name)) else "" for shard in shards})
    if len(splits) > 1 and any(splits):
        named = ", ".join(split or "others" for split in splits)
        raise ValueError(f"{folder} holds files of several splits ({named}); name one file, or give each split a folder of its own")
    return shards


def _saved(folder: Path) -> list[Shard]:
    """What `Dataset.save_to_disk` wrote."""
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


def arrow_reader(file: Path) -> Any:
    """pyarrow's reader of batches. Hugging Face writes the stream format, other programs the file format."""
    from pyarrow import ArrowInvalid, ipc, memory_map

    source = memory_map(str(file))
    try:
        return ipc.open_stream(source)
    except ArrowInvalid:
        source.seek(0)
        return ipc.open_file(source)


def declared_columns(shard: Shard) -> list[str]:
    """Of a parquet or arrow file, from its schema alone; ValueError if it has none that can be read."""
    from pyarrow import ArrowException, parquet

    try:
        schema = parquet.read_schema(shard.path) if shard.kind == "parquet" else arrow_reader(shard.path).schema
    except (OSError, ArrowException) as error:
        raise ValueError(f"{shard.path} cannot be read as {shard.kind}: {first_line(error)}") from error
    return [str(name) for name in schema.names]


def column_of(shard: Shard, column: str, most: int) -> list[Any]:
    """The first values of one column of a parquet or arrow file, without reading the others; ValueError where that fails."""
    from pyarrow import ArrowException, parquet

    values: list[Any] = []
    try:
        if shard.kind == "parquet":
            with parquet.ParquetFile(shard.path, memory_map=True) as file:
                parts = file.iter_batches(columns=[column])
                while len(values) < most and (part := next(parts, None)) is not None:
                    values += part.column(0).to_pylist()
        else:
            reader = arrow_reader(shard.path)
            for part in reader if hasattr(reader, "read_next_batch") else map(reader.get_batch, range(reader.num_record_batches)):
                values += part.column(column).to_pylist()
                if len(values) >= most:
                    break
    except (OSError, ArrowException) as error:
        raise ValueError(f"{shard.path} cannot be read as {shard.kind}: {first_line(error)}") from error
    return values[:most]


# ---------------------------------------------------------------- whose rows


def files_read(data: DataConfig) -> set[Path]:
    """By both splits. What is missing or cannot be read is its own domain's mistake."""
    files: set[Path] = set()
    for given in (data.train, data.validation):
        for path in paths_of(given) if given is not None else ():
            with suppress(ValueError, OSError):
                files |= {shard.path.resolve() for shard in shards_of(path)}
    return files


class TagOwners:
    """Which domain a row belongs to where domains share files: the one that lists its tag, among those that read its file and have their
    rows told apart by this column."""

    def __init__(self, domains: Mapping[str, DomainConfig], column: str) -> None:
        tagged = {name: domain.data for name, domain in domains.items() if domain.data.tag == column}
        self._tags = {name: data.tags for name, data in tagged.items()}
        self._files = {name: files_read(data) for name, data in tagged.items()}
        self._of_file: dict[Path, dict[str, str]] = {}

    def owner(self, tag: str, file: Path) -> str | None:
        """The domain that gets this file's rows with this tag; None where they would be lost."""
        return self._owners(file).get(tag)

    def why_nobody(self, tag: str, file: Path) -> str:
        """What is wrong with a row that has no owner."""
        elsewhere = [name for name, tags in self._tags.items() if tag in tags]
        if elsewhere:
            name = elsewhere[0]
            return (
                f"the tag {tag!r} is one of domain {name}, which does not read this file, so the row would be lost; "
                f"name the file in domains.{name}.data too, or list the tag in a domain that reads it"
            )
        known = ", ".join(f"{one} ({name})" for one, name in self._owners(file).items())
        return f"the tag {tag!r} belongs to no domain; there are {known or 'none'}"

    def _owners(self, file: Path) -> dict[str, str]:
        if file not in self._of_file:
            path = file.resolve()
            self._of_file[file] = {tag: name for name, tags in self._tags.items() if path in self._files[name] for tag in tags}
        return self._of_file[file]
