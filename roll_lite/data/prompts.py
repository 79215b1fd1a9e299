from __future__ import annotations

import hashlib
import pickle
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data.presets import LeftOut, converted
from roll_lite.data.row_values import RowError, TagOwners, answer_of, difficulty_of, reported_value, tag_of, weight_of
from roll_lite.data.samples import Prompt
from roll_lite.data.sources import Row, paths_of, read_rows
from roll_lite.data.templates import Template, Tokenizer

Split = Literal["train", "validation"]

MISTAKES_SHOWN = 10
MOST_REPORTED = 50
ROWS_AT_ONCE = 1024
"""Rows tokenized at a time: tokenizer output takes ten times the memory of the ids."""


class PromptSet:
    """Prompts of a domain; a prompt's index is its uid."""

    def __init__(self, domain: str) -> None:
        self.domain = domain
        self.left_out: Counter[str] = Counter()
        # Rows are pickled and token ids are bytes, since Python objects would take several times the memory.
        self._ids: list[bytes] = []
        self._rows: list[bytes] = []
        self._weights: list[float] = []
        self.parts: list[int] = []

    def add(
        self,
        text: str,
        token_ids: Sequence[int],
        answer: Any = None,
        columns: Mapping[str, Any] | None = None,
        weight: float = 1.0,
        question: Any = None,
    ) -> None:
        """Append a prompt. `weight`: loss weight of its samples. `question`: the prompt without template."""
        self._ids.append(np.array(token_ids, np.int32).tobytes())
        # An answer or question that is also a column's value is pickled once.
        self._rows.append(pickle.dumps((text, question, answer, dict(columns or {})), pickle.HIGHEST_PROTOCOL))
        self._weights.append(weight)

    def __len__(self) -> int:
        return len(self._weights)

    def __getitem__(self, uid: int) -> Prompt:
        if not 0 <= uid < len(self):
            raise IndexError(f"prompt {uid} of {len(self)}")
        ids = tuple(np.frombuffer(self._ids[uid], np.int32).tolist())
        text, question, answer, columns = pickle.loads(self._rows[uid])
        return Prompt(self.domain, uid, text, ids, answer, columns, self._weights[uid], question)

    def __iter__(self) -> Iterator[Prompt]:
        return (self[uid] for uid in range(len(self)))

    @property
    def lengths(self) -> list[int]:
        return [len(ids) // np.dtype(np.int32).itemsize for ids in self._ids]

    def counts(self) -> str:
        out = ", ".join(f"{count} {reason}" for reason, count in self.left_out.items())
        total = len(self) + self.left_out.total()
        return f"{len(self)} of {total} rows; left out: {out}" if out else f"{len(self)} rows"


def load_prompts(
    domain: str,
    config: DomainConfig,
    split: Split,
    tokenizer: Tokenizer,
    domains: Mapping[str, DomainConfig] | None = None,
    limit: int | None = None,
) -> PromptSet:
    """Load a domain's prompts, at most `limit`. One ValueError reports up to ten mistakes. `domains`: all domains; rows tagged for another
    domain of the same file are skipped."""
    setting = f"domains.{domain}.data.{split}"
    files = config.data.train if split == "train" else config.data.validation
    if files is None:
        raise ValueError(f"{setting}: no file is configured")
    column = config.data.tag
    owners = TagOwners({**(domains or {}), domain: config}, column) if column is not None else None
    loader = _Loader(domain, config, split, tokenizer, owners)
    try:
        for path in paths_of(files):
            loader.load(path, limit)
    except ValueError as error:
        raise ValueError(f"{setting}: {error}") from error
    mistakes = [mistake for *_, mistake in sorted(loader.mistakes)]
    if loader.too_long:
        mistakes.append(_too_long(domain, config, loader))
    if mistakes:
        more = ["... and more"] if len(mistakes) > MISTAKES_SHOWN else []
        raise ValueError("\n  ".join([f"{setting}: the data has mistakes", *mistakes[:MISTAKES_SHOWN], *more]))
    for column, values in loader.reported.items():
        if len(values) > MOST_REPORTED:
            setting = f"domains.{domain}.data.report_by"
            raise ValueError(f"{setting}: {column!r} has {len(values)} values; each is reported, so use at most {MOST_REPORTED}")
    prompts = loader.prompts
    for path, count in zip(paths_of(files), prompts.parts, strict=True):
        if not count and limit is None:
            nothing = f"no row is left ({prompts.counts()})" if prompts.left_out else "has no rows"
            raise ValueError(f"{setting}: {path} {nothing}")
    return prompts


@dataclass(frozen=True)
class _Read:
    row: Row
    text: str
    question: Any
    answer: Any
    columns: dict[str, Any]
    weight: float


class _Loader:
    def __init__(self, domain: str, config: DomainConfig, split: Split, tokenizer: Tokenizer, owners: TagOwners | None) -> None:
        self.prompts = PromptSet(domain)
        self.mistakes: list[tuple[Path, int, str]] = []
        self.too_long: list[tuple[int, str]] = []
        """(number of tokens, file and row) of each prompt over max_prompt_tokens."""
        self._domain = domain
        self._data = config.data
        self._preset = config.data.preset_of(split)
        self._longest = config.sampling.max_prompt_tokens
        self._template = Template(config.template, config.data.prompt, tokenizer, f"domains.{domain}.template")
        self._owners = owners
        self._weight = config.data.weight if split == "train" else None
        self.reported: dict[str, set[str | float]] = {column: set() for column in config.data.reported if split == "validation"}
        self._difficulty = config.data.filter.difficulty if split == "train" else None

    def load(self, path: Path, limit: int | None) -> None:
        chunk: list[_Read] = []
        before = len(self.prompts)
        for row in converted(read_rows(path), self._preset):
            try:
                if (read := self._read(row)) is not None:
                    chunk.append(read)
            except ValueError as error:
                self.mistakes.append((row.file, row.number, f"{row.place}: {error}"))
            if len(chunk) >= (ROWS_AT_ONCE if limit is None else min(ROWS_AT_ONCE, limit)):
                self._tokenize(chunk, limit)
                chunk = []
            if len(self.mistakes) > MISTAKES_SHOWN or (limit is not None and len(self.prompts) >= limit):
                break
        self._tokenize(chunk, limit)
        self.prompts.parts.append(len(self.prompts) - before)

    def _read(self, row: Row) -> _Read | None:
        """Render a row's prompt; None if it is left out, ValueError if unusable."""
        content, data = row.content, self._data
        if isinstance(content, LeftOut):
            self.prompts.left_out[content] += 1
            return None
        if isinstance(content, str):
            raise ValueError(content)
        if (reason := self._reason_left_out(content, row.file)) is not None:
            self.prompts.left_out[reason] += 1
            return None
        text = self._template.render(content)
        for column, values in self.reported.items():
            values.add(reported_value(content, column))
        answer = answer_of(content, data.answer, f"domains.{self._domain}.data.answer") if data.answer is not None else None
        question = content[data.prompt]
        # Equal texts become one object, which is pickled once.
        return _Read(row, question if question == text else text, question, answer, content, weight_of(content, self._weight))

    def _reason_left_out(self, content: Mapping[str, Any], file: Path) -> str | None:
        data = self._data
        if data.tag is not None and self._owners is not None:
            tag = tag_of(content, data.tag)
            owner = self._domain if tag in data.tags else self._owners.owner(tag, file)
            if owner is None:
                raise RowError(data.tag, self._owners.why_nobody(tag, file))
            if owner != self._domain:
                return f"of domain {owner}"
        bounds = data.filter.difficulty_range
        if self._difficulty is not None and bounds is not None:
            low, high = bounds
            if not low <= difficulty_of(content, self._difficulty) <= high:
                return f"with {self._difficulty} outside {low:g} to {high:g}"
        return None

    def _tokenize(self, chunk: Sequence[_Read], limit: int | None) -> None:
        for read, ids in zip(chunk, self._template.tokenize([read.text for read in chunk]), strict=True):
            if limit is not None and len(self.prompts) >= limit:
                return
            bounds = self._data.filter.prompt_tokens
            if bounds is not None and not bounds[0] <= len(ids) <= bounds[1]:
                self.prompts.left_out[f"whose prompt has not {bounds[0]} to {bounds[1]} tokens"] += 1
            elif not ids:
                mistake = f"{read.row.place}: column {self._data.prompt!r}: no tokens at all"
                self.mistakes.append((read.row.file, read.row.number, mistake))
            elif len(ids) > self._longest:
                self.too_long.append((len(ids), read.row.place))
            else:
                self.prompts.add(read.text, ids, read.answer, read.columns, read.weight, read.question)


def _too_long(domain: str, config: DomainConfig, loader: _Loader) -> str:
    limit, (tokens, place) = config.sampling.max_prompt_tokens, max(loader.too_long)
    count, total = len(loader.too_long), len(loader.too_long) + len(loader.prompts)
    return (
        f"{count} of {total} prompts have more tokens with the template than domains.{domain}.sampling.max_prompt_tokens ({limit}); the "
        f"longest has {tokens} ({place}); leave them out with domains.{domain}.data.filter.prompt_tokens=[1,{limit}], or allow more"
    )


SAME_DATA = "Use the same data, or give the domain another name, under which it starts at its first prompt"


class PromptOrder:
    """Endless order of prompts: each epoch has all, shuffled by seed, domain and epoch."""

    def __init__(self, count: int, seed: int, domain: str) -> None:
        if count < 1:
            raise ValueError(f"domain {domain}: no prompts to put in order")
        self._count = count
        self._seed = seed
        self._domain = domain
        self.epoch = 0
        self._position = 0
        self._order = self._shuffled(0)

    @property
    def next_epoch(self) -> int:
        return self.epoch + (self._position == self._count)

    def next(self) -> tuple[int, int]:
        if self._position == self._count:
            self.epoch += 1
            self._position = 0
            self._order = self._shuffled(self.epoch)
        index = int(self._order[self._position])
        self._position += 1
        return self.epoch, index

    def _shuffled(self, epoch: int) -> np.ndarray:
        # Sorts raw random bits: numpy keeps these equal in all versions, but not permutation().
        digest = hashlib.sha256(f"{self._seed}/{self._domain}/{epoch}".encode()).digest()
        return np.argsort(np.random.PCG64(int.from_bytes(digest)).random_raw(self._count), kind="stable")

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count, "seed": self._seed, "domain": self._domain, "epoch": self.epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. ValueError if its number of prompts, seed or domain differs, or if it mixed files by shares."""
        if "parts" in state:
            raise ValueError(
                f"domain {self._domain}: the checkpoint's prompts came from several files with shares, this run's do not. {SAME_DATA}"
            )
        for name, mine in (("count", self._count), ("seed", self._seed), ("domain", self._domain)):
            if state[name] != mine:
                told = f"the checkpoint's prompt order has {name} {state[name]!r}, this run has {mine!r}"
                raise ValueError(f"domain {self._domain}: {told}. {SAME_DATA}")
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = self._shuffled(self.epoch)
