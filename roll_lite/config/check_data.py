"""A domain's data: do the files exist, do they hold the columns that the domain names, do tags and filters make sense."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from roll_lite.config.data_files import Shard, TagOwners, column_of, declared_columns, files_read, shards_of
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema import DataConfig, DomainConfig, RunConfig

SCANNED_ROWS = 200_000
"""Of JSON lines: a second or two. The start of the run reads all of them."""
NAMED_LINES = 5


def _data_files(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    """Every row has its columns; what only the tokenizer can tell is left to the start of the run."""
    data = domain.data
    owners = TagOwners(config.domains, data.tag) if data.tag is not None else None
    for split, file in (("train", data.train), ("validation", data.validation)):
        if file is None:
            continue
        place = f"{path}.data.{split}"
        try:
            shards = shards_of(file)
        except (ValueError, OSError) as error:
            yield Problem(place, str(error), str(file))
            continue
        named = _named_columns(data, split)
        if shards[0].kind == "jsonl":
            yield from _lines(shards, file, place, f"{path}.data", data, named, owners)
        else:
            yield from _tables(shards, place, f"{path}.data", data, named, owners)


def _named_columns(data: DataConfig, split: str) -> dict[str, str]:
    """Setting to column. What steers the training is no matter for held-out prompts."""
    named = {"tag": data.tag, "prompt": data.prompt, "answer": data.answer}
    if split == "train":
        named |= {"weight": data.weight, "filter.difficulty": data.filter.difficulty}
    return {setting: column for setting, column in named.items() if column is not None}


def _tables(
    shards: list[Shard], place: str, section: str, data: DataConfig, named: dict[str, str], owners: TagOwners | None
) -> Iterator[Problem]:
    """Of the rows only their tags are looked at."""
    tags: list[tuple[Path, str, Any]] = []
    try:
        for shard in shards:
            columns = declared_columns(shard)
            for setting, column in named.items():
                if column not in columns:
                    yield Problem(f"{section}.{setting}", f"{shard.path} has no such column; {did_you_mean(column, columns)}", column)
            if data.tag in columns:
                values = column_of(shard, data.tag, SCANNED_ROWS - len(tags))
                tags += [(shard.path, f"row {number}", value) for number, value in enumerate(values, start=1)]
    except ValueError as error:
        yield Problem(place, str(error), str(shard.path))
        return
    scan = _Scan()
    for file, where, tag in tags:
        _look(scan, file, where, {data.tag: tag}, data, {}, owners)
    for (tag, file), (where, wrong) in scan.strays.items():
        yield Problem(f"{section}.tags", f"{file}, {where}: {wrong}", tag)
    if tags and not scan.rows and not scan.strays:
        yield Problem(place, "no row has a tag of this domain", str(shards[0].path))


@dataclass
class _Scan:
    """What was seen of the rows that belong to the domain."""

    rows: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    """Of all of them, in order."""
    without: dict[str, list[str]] = field(default_factory=dict)
    """Places by the column that is missing there."""
    mistakes: list[str] = field(default_factory=list)
    strays: dict[tuple[str, Path], tuple[str, str]] = field(default_factory=dict)
    """Rows that no domain would get, by tag and file: the first place, and what is wrong there."""


def _lines(
    shards: list[Shard], file: Path, place: str, section: str, data: DataConfig, named: dict[str, str], owners: TagOwners | None
) -> Iterator[Problem]:
    scan = _Scan()
    try:
        for path, where, row in islice(_rows(shards), SCANNED_ROWS):
            if len(scan.mistakes) >= NAMED_LINES:
                break
            _look(scan, path, where, row, data, named, owners)
    except OSError as error:
        yield Problem(place, f"the file cannot be read: {error}", str(file))
        return
    if scan.mistakes or not scan.rows:
        nothing = "no row has a tag of this domain" if scan.columns else "the file is empty"
        yield Problem(place, "; ".join(scan.mistakes) or nothing, str(file))
        return
    for (tag, _), (where, wrong) in scan.strays.items():
        yield Problem(f"{section}.tags", f"{file}, {where}: {wrong}", tag)
    for setting, column in named.items():
        places = scan.without.get(column, [])
        if len(places) == scan.rows:
            yield Problem(f"{section}.{setting}", f"{file} has no such column; {did_you_mean(column, scan.columns)}", column)
        elif places:
            listed = ", ".join(places[:NAMED_LINES]) + (", ..." if len(places) > NAMED_LINES else "")
            yield Problem(place, f"{len(places)} row(s) without the column {column!r}: {listed}", str(file))


def _look(scan: _Scan, file: Path, where: str, row: Any, data: DataConfig, named: dict[str, str], owners: TagOwners | None) -> None:
    if not isinstance(row, dict):
        scan.mistakes.append(f"{where} {row}" if isinstance(row, str) else f"{where} is not a JSON object with columns")
        return
    scan.columns |= dict.fromkeys(row)
    tag = row.get(data.tag) if data.tag is not None else None
    if owners is not None and tag is not None and str(tag) not in data.tags:
        if owners.owner(str(tag), file) is None and len(scan.strays) < NAMED_LINES:
            scan.strays.setdefault((str(tag), file), (where, owners.why_nobody(str(tag), file)))
        return
    scan.rows += 1
    for column in named.values():
        if column not in row:
            scan.without.setdefault(column, []).append(where)


def _rows(shards: list[Shard]) -> Iterator[tuple[Path, str, Any]]:
    """File, place and row; in the place of one that is no JSON, what is wrong with it."""
    for shard in shards:
        file = f"{shard.path.name}, " if len(shards) > 1 else ""
        with shard.path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except ValueError as error:
                    yield shard.path, f"{file}line {number}", f"is not JSON: {error}"
                else:
                    yield shard.path, f"{file}line {number}", None if isinstance(row, str) else row


def _tags(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    data = domain.data
    if data.tags and data.tag is None:
        yield Problem(f"{path}.data.tags", "there is no column to look for them; name it with `tag`, or remove them", data.tags)
    if data.tag is not None and not data.tags:
        yield Problem(f"{path}.data.tag", "which rows are this domain's? List their tags in `tags`, or remove it", data.tag)
    for tag in sorted({tag for tag in data.tags if data.tags.count(tag) > 1}):
        yield Problem(f"{path}.data.tags", f"{tag!r} stands there twice", data.tags)
    name = path.removeprefix("domains.")
    for other, its in config.domains.items():
        if other == name:
            return  # each pair is told once, at the later one
        both = [tag for tag in data.tags if tag in its.data.tags] if data.tag == its.data.tag else []
        if both and files_read(data) & files_read(its.data):
            message = f"domain {other!r} of the same file claims {', '.join(map(repr, both))} too; a row belongs to one domain"
            yield Problem(f"{path}.data.tags", message, data.tags)


def _filter(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    chosen = domain.data.filter
    place = f"{path}.data.filter"
    for name in ("prompt_tokens", "difficulty_range"):
        bounds = getattr(chosen, name)
        if bounds is not None and bounds[0] > bounds[1]:
            yield Problem(f"{place}.{name}", f"is upside down, nothing lies in it; use [{bounds[1]}, {bounds[0]}]", list(bounds))
    if chosen.difficulty_range is not None and chosen.difficulty is None:
        yield Problem(f"{place}.difficulty_range", "of which column? Name it with `difficulty`", list(chosen.difficulty_range))
    if chosen.difficulty is not None and chosen.difficulty_range is None:
        yield Problem(f"{place}.difficulty", "filters nothing without difficulty_range; set it, or remove this", chosen.difficulty)
    longest = domain.sampling.max_prompt_tokens
    if chosen.prompt_tokens is not None and chosen.prompt_tokens[0] > longest:
        message = f"is more than sampling.max_prompt_tokens ({longest}): every prompt is left out or too long"
        yield Problem(f"{place}.prompt_tokens", message, list(chosen.prompt_tokens))


DOMAIN_DATA_CHECKS = (_data_files, _tags, _filter)
