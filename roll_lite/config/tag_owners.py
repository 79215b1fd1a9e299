"""Which domain a row belongs to where domains share files: the one that lists its tag, among those that read its file."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from roll_lite.config.data_files import shards_of
from roll_lite.config.schema import DataConfig, DomainConfig


def files_read(data: DataConfig) -> set[Path]:
    """By both splits. What is missing or cannot be read is its own domain's mistake."""
    files: set[Path] = set()
    for path in (data.train, data.validation):
        if path is not None:
            with suppress(ValueError, OSError):
                files |= {shard.path.resolve() for shard in shards_of(path)}
    return files


class TagOwners:
    """Of the domains that have their rows told apart by this column."""

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
