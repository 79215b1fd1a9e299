from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.base import readable
from roll_lite.config.schema.domains import ChatTemplateConfig, DataConfig, DomainConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.text_templates import placeholders
from roll_lite.data.presets import LeftOut, converted
from roll_lite.data.row_values import (
    RowError,
    TagOwners,
    answer_of,
    difficulty_of,
    files_of,
    files_read,
    messages_of,
    reported_value,
    tag_of,
    text_of,
    weight_of,
)
from roll_lite.data.sources import TABLES, Row, declared_columns, paths_of, read_rows, shard_rows, shards_of
from roll_lite.files import is_folder, read_text
from roll_lite.models.model_files import chat_templates

SCANNED_ROWS, TABLE_ROWS = 200_000, 1000
"""Maximum rows checked: SCANNED_ROWS of a file or folder (about two seconds), TABLE_ROWS if a preset converts it. After a
table's first TABLE_ROWS rows, only tags are checked."""
NAMED_LINES = 5


def check_data(config: RunConfig) -> Iterator[Problem]:
    """Check data of domains (unless dumps are replayed) and of algorithm.ptx."""
    if vars(config).get("mode") != "train_only":
        for name, domain in config.domains.items():
            yield from _domain(config, f"domains.{name}", domain)
    if (ptx := config.algorithm.ptx) is not None:
        yield from _domain(config, "algorithm.ptx", ptx.as_domain)


def _domain(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    for check in (_data_files, _held_out_files, _tags, _filter, _chat_template):
        yield from readable(check(config, path, domain))


def _data_files(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    data = domain.data
    owners = TagOwners(config.domains, data.tag) if data.tag is not None else None
    given = {split: paths_of(files) for split, files in (("train", data.train), ("validation", data.validation))}
    for split, files in given.items():
        for file in {file for file in files if files.count(file) > 1}:
            yield Problem(f"{path}.data.{split}", "stands there twice", str(file))
    for split, file in [(split, file) for split, files in given.items() for file in files]:
        place, preset = f"{path}.data.{split}", data.preset_of(split)
        scan = _Scan(_columns(path, domain, split), data, owners)
        try:
            shards = shards_of(file)
            rows = _table_rows(shards, scan) if shards[0].suffix in TABLES and preset is None else converted(read_rows(file), preset)
            for row in islice(rows, SCANNED_ROWS if preset is None else TABLE_ROWS):
                scan.check_row(row, f"{row.file.name}, {row.place_in_file}" if len(shards) > 1 else row.place_in_file)
                if len(scan.mistakes) >= NAMED_LINES:
                    break
        except ValueError as error:
            yield Problem(place, str(error), str(file))
            continue
        yield from scan.problems(place, f"{path}.data", file)


def _held_out_files(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    """Report a training folder that contains validation files, which would be trained on, unless the folder itself is also
    validation data."""
    train, held_out = paths_of(domain.data.train), paths_of(domain.data.validation)
    for folder in [one for one in train if is_folder(one) and one not in held_out]:
        if shared := sorted(map(str, files_read(folder) & files_read(held_out))):
            message = f"the folder holds {', '.join(shared)}, which data.validation names: held-out rows would train; list the files"
            yield Problem(f"{path}.data.train", message, str(folder))


@dataclass(frozen=True)
class _Column:
    setting: str
    name: str
    value_of: Callable[[Mapping[str, Any]], Any]
    """Reader of a row's value; raises RowError."""


def _columns(path: str, domain: DomainConfig, split: str) -> list[_Column]:
    data, template = domain.data, domain.template
    if isinstance(template, ChatTemplateConfig):
        columns = [_Column(f"{path}.data.prompt", data.prompt, lambda row: messages_of(row, data.prompt, template.system))]
    else:
        text = partial(text_of, setting=f"{path}.template")
        columns = [_Column(f"{path}.data.prompt", data.prompt, partial(text, column=data.prompt, placeholder="prompt"))]
        with suppress(ValueError):  # an invalid template text is reported elsewhere
            for name in placeholders(template.text):
                if name != "prompt":
                    columns.append(_Column(f"{path}.template.text", name, partial(text, column=name, placeholder=name)))
    if (answer := data.answer) is not None:
        setting = f"{path}.data.answer"
        columns.append(_Column(setting, answer, lambda row: answer_of(row, answer, setting)))
    if (tag := data.tag) is not None:
        columns.append(_Column(f"{path}.data.tag", tag, lambda row: tag_of(row, tag)))
    if split == "validation":
        columns += [_Column(f"{path}.data.report_by", name, partial(reported_value, column=name)) for name in data.reported]
    if split == "train" and (weight := data.weight) is not None:
        columns.append(_Column(f"{path}.data.weight", weight, lambda row: weight_of(row, weight)))
    if split == "train" and (difficulty := data.filter.difficulty) is not None:
        columns.append(_Column(f"{path}.data.filter.difficulty", difficulty, lambda row: difficulty_of(row, difficulty)))
    tools = getattr(domain.environment, "tools", ())
    for number, tool in enumerate(tools):
        if (files := getattr(tool, "files", None)) is not None:
            columns.append(_Column(f"{path}.environment.tools.{number}.files", files, partial(files_of, column=files)))
    return columns


@dataclass
class _Scan:
    wanted: list[_Column]
    data: DataConfig
    owners: TagOwners | None
    rows: int = 0
    columns: dict[str, None] = field(default_factory=dict)
    without: dict[str, list[str]] = field(default_factory=dict)
    unfit: dict[str, tuple[str, str]] = field(default_factory=dict)
    """{setting: (first row with a bad value, message)}."""
    mistakes: list[str] = field(default_factory=list)
    strays: dict[tuple[str, Path], tuple[str, str]] = field(default_factory=dict)
    """{(unknown tag, file): (first row with the tag, message)}."""

    def check_row(self, row: Row, where: str) -> None:
        content = row.content
        if isinstance(content, LeftOut):
            return
        if isinstance(content, str):
            self.mistakes.append(f"{where}, {content}" if content.startswith("character ") else f"{where}: {content}")
            return
        self.columns |= dict.fromkeys(content)
        tag = content.get(self.data.tag) if self.data.tag is not None else None
        if self.owners is not None and isinstance(tag, str | int) and str(tag) not in self.data.tags:
            if self.owners.owner(str(tag), row.file) is None and len(self.strays) < NAMED_LINES:
                self.strays.setdefault((str(tag), row.file), (where, self.owners.why_nobody(str(tag), row.file)))
            return
        self.rows += 1
        for column in self.wanted:
            if column.name not in content:
                self.without.setdefault(column.name, []).append(where)
            elif content[column.name] is not _NOT_READ:
                try:
                    column.value_of(content)
                except RowError as error:
                    self.unfit.setdefault(column.setting, (where, error.problem))

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
    """Yield (column, message) for each wanted column missing in a readable file. Other checks report unreadable files."""
    given = {"train": data.train, "validation": data.validation}
    read = [(path, data.preset_of(split)) for split, files in given.items() for path in paths_of(files)]
    for file, preset in dict.fromkeys(read):
        seen: dict[str, None] = {}
        try:
            shards = shards_of(file)
            declares = shards[0].suffix in TABLES and preset is None
            for shard in shards if declares else ():
                seen |= dict.fromkeys(declared_columns(shard))
            for row in islice(converted(read_rows(file), preset), SCANNED_ROWS) if not declares else ():
                if isinstance(row.content, dict) and (data.tag is None or str(row.content.get(data.tag)) in data.tags):
                    seen |= dict.fromkeys(row.content)
                if set(wanted) <= seen.keys():
                    break
        except ValueError:
            continue
        for name in wanted if seen else ():
            if name not in seen:
                yield name, f"{file} has no such column; {did_you_mean(name, seen)}"


_NOT_READ = object()


def _table_rows(shards: list[Path], scan: _Scan) -> Iterator[Row]:
    """Yield the rows of one path's shards (files). All configured columns are read from a shard's first TABLE_ROWS rows;
    from later rows, up to SCANNED_ROWS, only the tag. Columns that were not read hold _NOT_READ."""
    tag = scan.data.tag
    wanted = list(dict.fromkeys(column.name for column in scan.wanted))
    lacks_columns = False
    for shard in shards:
        names = declared_columns(shard)
        rest = dict.fromkeys(names, _NOT_READ)
        if any(name not in names for name in wanted):
            lacks_columns = True
            wanted = [name for name in wanted if name in names and name == tag]
        if lacks_columns and not wanted:
            yield Row(shard, 1, rest)
            continue
        first = islice(shard_rows(shard, wanted), TABLE_ROWS)
        tags = islice(shard_rows(shard, [tag]), SCANNED_ROWS) if tag is not None else ()
        for full, tagged in zip_longest(first, tags):
            row = full or tagged
            assert isinstance(row.content, dict), "a table's rows are whole"
            yield row._replace(content=rest | row.content)


def _tags(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    data = domain.data
    if data.tags and data.tag is None:
        yield Problem(f"{path}.data.tags", "there is no column to look for them; name it with `tag`, or remove them", data.tags)
    if data.tag is not None and not data.tags:
        yield Problem(f"{path}.data.tag", "which rows are this domain's? List their tags in `tags`, or remove it", data.tag)
    name = path.removeprefix("domains.")
    for other, its in config.domains.items():
        if other == name:
            return  # each pair is reported once
        both = [tag for tag in data.tags if tag in its.data.tags] if data.tag == its.data.tag else []
        if both and files_read(data.train, data.validation) & files_read(its.data.train, its.data.validation):
            message = f"domain {other!r} of the same file claims {', '.join(map(repr, both))} too; a row belongs to one domain"
            yield Problem(f"{path}.data.tags", message, data.tags)


def _filter(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    lengths, longest = domain.data.filter.prompt_tokens, domain.sampling.max_prompt_tokens
    if lengths is not None and lengths[0] > longest:
        message = f"is more than sampling.max_prompt_tokens ({longest}): every prompt is left out or too long"
        yield Problem(f"{path}.data.filter.prompt_tokens", message, list(lengths))


def _chat_template(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    folder, template = config.model.path, domain.template
    if not isinstance(template, ChatTemplateConfig):
        return
    place = "model.path" if template.file is None else f"{path}.template.file"
    try:
        texts = [read_text(template.file)] if template.file is not None else chat_templates(folder) if is_folder(folder) else None
    except ValueError as error:
        yield Problem(place, str(error), str(template.file or folder))
        return
    if texts is None:  # a missing model folder is reported elsewhere
        return
    if not texts:
        message = f"the tokenizer in {folder} has no chat template; name one with template.file, or use plain"
        yield Problem(f"{path}.template.name", message, "chat")
    for name in template.arguments if texts else ():
        if name in ("messages", "add_generation_prompt"):
            yield Problem(f"{path}.template.arguments.{name}", "is set by the run itself; remove it")
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in texts):
            yield Problem(f"{path}.template.arguments.{name}", f"{template.file or 'the chat template'} reads no such argument")
