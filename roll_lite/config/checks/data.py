"""A domain's data: do the files exist, do they hold the columns that the domain names, do tags and filters make sense."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from roll_lite.config.data_files import Shard, TagOwners, column_of, declared_columns, files_read, paths_of, shards_of
from roll_lite.config.problems import Problem, did_you_mean, show
from roll_lite.config.schema.domains import DataConfig, DomainConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.text_templates import placeholders

SCANNED_ROWS, TABLE_ROWS = 200_000, 1000
"""Of JSON lines, and of tables but for their tags: a second or two. The start of the run reads all of them."""
NAMED_LINES = 5


def _data_files(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    """Every row has its columns, with values of a kind that can be used; what only the tokenizer can tell is left to the start."""
    data = domain.data
    owners = TagOwners(config.domains, data.tag) if data.tag is not None else None
    given = {"train": data.train} | ({"validation": data.validation} if data.validation is not None else {})
    for split, files in given.items():
        for file in {file for file in paths_of(files) if paths_of(files).count(file) > 1}:
            yield Problem(f"{path}.data.{split}", "stands there twice", str(file))
    for split, file in [(split, file) for split, files in given.items() for file in paths_of(files)]:
        place = f"{path}.data.{split}"
        scan = _Scan(_columns(path, domain, split), data, owners)
        try:
            shards = shards_of(file)
            rows = _lines(shards) if shards[0].kind == "jsonl" else _table_rows(shards, scan)
            for where in islice(rows, SCANNED_ROWS):
                scan.look(*where)
                if len(scan.mistakes) >= NAMED_LINES:
                    break
        except (ValueError, OSError) as error:
            yield Problem(place, str(error), str(file))
            continue
        yield from scan.problems(place, f"{path}.data", file)


@dataclass(frozen=True)
class _Column:
    setting: str
    """Which names it."""
    name: str
    wrong: Callable[[Any], str | None]
    """What is wrong with a value."""


def _columns(path: str, domain: DomainConfig, split: str) -> list[_Column]:
    """What steers the training is no matter for held-out prompts."""
    data, template = domain.data, domain.template
    columns = [_Column(f"{path}.data.prompt", data.prompt, _wrong_chat if template.type == "chat" else _wrong_text)]
    if data.answer is not None:
        columns.append(_Column(f"{path}.data.answer", data.answer, lambda value: "is null" if value is None else None))
    if data.tag is not None:
        columns.append(_Column(f"{path}.data.tag", data.tag, lambda value: None))
    if split == "validation" and data.report_by is not None:
        columns.append(_Column(f"{path}.data.report_by", data.report_by, _wrong_report))
    if split == "train":
        named = {"weight": data.weight, "filter.difficulty": data.filter.difficulty}
        columns += [_Column(f"{path}.data.{setting}", name, _wrong_number) for setting, name in named.items() if name is not None]
    if template.type == "plain":
        with suppress(ValueError):  # told as the template's mistake
            text = f"{path}.template.text"
            columns += [_Column(text, name, _wrong_text) for name in placeholders(template.text) if name != "prompt"]
    return columns


def _wrong_report(value: Any) -> str | None:
    """Of a column that held-out prompts are reported by."""
    return None if isinstance(value, str | int | float) else f"is {show(value)}, neither a text nor a number"


def _wrong_text(value: Any) -> str | None:
    if isinstance(value, list):
        return "is a list of chat messages, which needs template.type: chat"
    return None if isinstance(value, str | int | float) and not isinstance(value, bool) else f"is {show(value)}, not a text or a number"


def _wrong_chat(value: Any) -> str | None:
    parts = value if isinstance(value, list) and value else [{"role": "user", "content": value}]
    right = all(isinstance(one, dict) and isinstance(one.get("role"), str) and isinstance(one.get("content"), str) for one in parts)
    return None if right else f"is {show(value)}, neither a text nor a list of {{role: ..., content: ...}}"


def _wrong_number(value: Any) -> str | None:
    return None if isinstance(value, int | float) and not isinstance(value, bool) else f"is {show(value)}, not a number"


@dataclass
class _Scan:
    """What was seen of the rows that belong to the domain."""

    wanted: list[_Column]
    data: DataConfig
    owners: TagOwners | None
    rows: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    """Of all of them, in order."""
    without: dict[str, list[str]] = field(default_factory=dict)
    """Places by the column that is missing there."""
    unfit: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By setting: the first place whose value cannot be used, and why."""
    mistakes: list[str] = field(default_factory=list)
    strays: dict[tuple[str, Path], tuple[str, str]] = field(default_factory=dict)
    """Rows that no domain would get, by tag and file: the first place, and what is wrong there."""

    def look(self, file: Path, where: str, row: Any) -> None:
        if not isinstance(row, dict):
            self.mistakes.append(f"{where} {row}" if isinstance(row, str) else f"{where} is not a JSON object with columns")
            return
        self.columns |= dict.fromkeys(row)
        tag = row.get(self.data.tag) if self.data.tag is not None else None
        tag = None if tag is _NOT_READ else tag
        if self.owners is not None and tag is not None and str(tag) not in self.data.tags:
            if self.owners.owner(str(tag), file) is None and len(self.strays) < NAMED_LINES:
                self.strays.setdefault((str(tag), file), (where, self.owners.why_nobody(str(tag), file)))
            return
        self.rows += 1
        for column in self.wanted:
            if column.name not in row:
                self.without.setdefault(column.name, []).append(where)
            elif row[column.name] is not _NOT_READ and (wrong := column.wrong(row[column.name])) is not None:
                self.unfit.setdefault(column.setting, (where, wrong))

    def problems(self, place: str, section: str, file: Path) -> Iterator[Problem]:
        nothing = "no row has a tag of this domain" if self.columns else "the file is empty: there are no rows"
        if self.mistakes or not self.rows:
            yield Problem(place, "; ".join(self.mistakes) or nothing, str(file))
        if self.mistakes or (not self.rows and file.suffix == ".jsonl"):
            return
        for (tag, stray), (where, wrong) in self.strays.items():
            yield Problem(f"{section}.tags", f"{stray}, {where}: {wrong}", tag)
        for column in self.wanted:
            places = self.without.get(column.name, [])
            if places and len(places) == self.rows:
                yield Problem(column.setting, f"{file} has no such column; {did_you_mean(column.name, self.columns)}", column.name)
            elif places:
                listed = ", ".join(places[:NAMED_LINES]) + (", ..." if len(places) > NAMED_LINES else "")
                yield Problem(place, f"{len(places)} row(s) without the column {column.name!r}: {listed}", str(file))
            if column.setting in self.unfit:
                where, wrong = self.unfit[column.setting]
                yield Problem(column.setting, f"{file}, {where}: {wrong}", column.name)


def columns_missing(data: DataConfig, wanted: Collection[str]) -> Iterator[tuple[str, str]]:
    """Of `wanted`, what no row of a file has, and what is to be said of it. A file that cannot be read is its own mistake."""
    given = [data.train, data.validation]
    for file in dict.fromkeys(path for files in given if files is not None for path in paths_of(files)):
        seen: dict[str, None] = {}
        try:
            shards = shards_of(file)
            for shard in shards if shards[0].kind != "jsonl" else ():
                seen |= dict.fromkeys(declared_columns(shard))
            for _, _, row in islice(_lines(shards), SCANNED_ROWS) if shards[0].kind == "jsonl" else ():
                if isinstance(row, dict) and (data.tag is None or str(row.get(data.tag)) in data.tags):
                    seen |= dict.fromkeys(row)
                if set(wanted) <= seen.keys():
                    break
        except (ValueError, OSError):
            continue
        for name in wanted if seen else ():
            if name not in seen:
                yield name, f"{file} has no such column; {did_you_mean(name, seen)}"


_NOT_READ = object()
"""Stands for a table's value that nobody has looked at."""


def _table_rows(shards: list[Shard], scan: _Scan) -> Iterator[tuple[Path, str, Any]]:
    """Of all rows their tags, of the first ones what else is named. No row is read where a column is missing."""
    columns = {shard.path: declared_columns(shard) for shard in shards}
    wanted = list(dict.fromkeys(column.name for column in scan.wanted))
    for shard in shards:
        names = columns[shard.path]
        rest = dict.fromkeys(names, _NOT_READ)
        if any(name not in names for name in wanted):
            wanted = [name for name in wanted if name in names and name == scan.data.tag]
            if not wanted:
                yield shard.path, "row 1", rest
                continue
        read = {name: column_of(shard, name, SCANNED_ROWS if name == scan.data.tag else TABLE_ROWS) for name in wanted}
        for number, values in enumerate(zip_longest(*read.values(), fillvalue=_NOT_READ), start=1):
            yield shard.path, f"row {number}", rest | dict(zip(read, values, strict=True))


def _lines(shards: list[Shard]) -> Iterator[tuple[Path, str, Any]]:
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
                except (ValueError, RecursionError) as error:
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
