"""Read and check the values of a data row; shared by `roll-lite check` and runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from roll_lite.config.problems import or_nearest, show
from roll_lite.config.schema.domains import DataFiles, DomainConfig
from roll_lite.data.sources import paths_of, shards_of

LARGEST_WEIGHT = 3.4028234663852886e38


class RowError(ValueError):
    def __init__(self, column: str, problem: str) -> None:
        super().__init__(f"column {column!r}: {problem}")
        self.problem = problem


def cell(row: Mapping[str, Any], column: str, hint: str = "") -> Any:
    if column not in row:
        raise RowError(column, f"missing; the line has the columns {', '.join(row) or '(none)'}{or_nearest(column, row)}{hint}")
    return row[column]


def answer_of(row: Mapping[str, Any], column: str, setting: str) -> Any:
    without = f"; without answers, set {setting}: null"
    if (answer := cell(row, column, without)) is None:
        raise RowError(column, f"empty (null){without}")
    return answer


def text_of(row: Mapping[str, Any], column: str, placeholder: str, setting: str) -> str:
    """Text for a placeholder of the template. `setting`: the template's YAML path."""
    value = cell(row, column, "" if placeholder == "prompt" else f" ({setting}.text has the placeholder {{{placeholder}}})")
    if isinstance(value, list) and value and isinstance(value[0], dict):
        raise RowError(column, f"a list of chat messages needs {setting}.name: chat")
    if type(value) not in (str, int, float):
        raise RowError(column, f"only a string or a number can be filled into a text, got {show(value)}")
    return str(value)


def messages_of(row: Mapping[str, Any], column: str, system: str | None) -> list[dict[str, str]]:
    prompt = cell(row, column)
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list) and prompt:
        messages = prompt
        for number, message in enumerate(messages):
            if not isinstance(message, dict) or not all(isinstance(message.get(part), str) for part in ("role", "content")):
                raise RowError(column, f"message {number} must be {{role: ..., content: ...}} with strings, got {show(message)}")
    else:
        raise RowError(column, f"must be a string or a list of chat messages, got {show(prompt)}")
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise RowError(column, "begins with a system message, but template.system sets one too; keep one of them")
    return [{"role": "system", "content": system}, *messages]


def tag_of(row: Mapping[str, Any], column: str) -> str:
    tag = cell(row, column)
    if type(tag) not in (str, int):
        raise RowError(column, f"a tag is a text, got {show(tag)}")
    return str(tag)


def reported_value(row: Mapping[str, Any], column: str) -> str | float:
    value = cell(row, column)
    if not isinstance(value, str | int | float):
        raise RowError(column, f"prompts are reported by a text or a number, got {show(value)}")
    return value


def _number(row: Mapping[str, Any], column: str) -> Any:
    value = cell(row, column)
    with suppress(ValueError):  # a CSV file's cells are texts
        return float(value) if isinstance(value, str) else value
    return value


def difficulty_of(row: Mapping[str, Any], column: str) -> float:
    number: float = _number(row, column)
    if type(number) not in (int, float) or number != number:
        raise RowError(column, f"a difficulty is a number, got {show(number)}")
    return number


def weight_of(row: Mapping[str, Any], column: str | None) -> float:
    weight = 1.0 if column is None else _number(row, column)
    if type(weight) not in (int, float) or not 0 <= weight <= LARGEST_WEIGHT:
        raise RowError(str(column), f"the weight of a sample is a number of at least 0, got {show(weight)}")
    return float(weight)


def files_of(row: Mapping[str, Any], column: str) -> dict[str, str]:
    """Files of the column, {name: text}. Nulls are dropped: Parquet gives each row all rows' file names, null if absent."""
    files = cell(row, column) or {}
    if not isinstance(files, dict):
        raise RowError(column, f"must be a mapping of file names to texts, got {show(files)}")
    return {name: str(text) for name, text in files.items() if text is not None}


def files_read(*given: DataFiles | None) -> set[Path]:
    """Resolve data files, and those in folders. Missing or broken files are skipped: other checks report them."""
    files: set[Path] = set()
    for path in (path for one in given for path in paths_of(one)):
        with suppress(ValueError, OSError):
            files |= {shard.resolve() for shard in shards_of(path)}
    return files


class TagOwners:
    """Finds the domain of a row in a shared file: the domain that reads the file and lists the row's tag."""

    def __init__(self, domains: Mapping[str, DomainConfig], column: str) -> None:
        tagged = {name: domain.data for name, domain in domains.items() if domain.data.tag == column}
        self._tags = {name: data.tags for name, data in tagged.items()}
        self._files = {name: files_read(data.train, data.validation) for name, data in tagged.items()}
        self._of_file: dict[Path, dict[str, str]] = {}

    def owner(self, tag: str, file: Path) -> str | None:
        return self._owners(file).get(tag)

    def why_nobody(self, tag: str, file: Path) -> str:
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
