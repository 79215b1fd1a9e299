from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from roll_lite.config.problems import or_nearest
from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.ragged import Index, Ragged, as_index, from_numpy, to_numpy
from roll_lite.files import flush, replacing

Column = torch.Tensor | Ragged | np.ndarray

VECTORS = {
    "kept_ids": -1,
    "experts": -1,
    "old_experts": -1,
    "rollout_experts": -1,
    "distribution": 0,
    "ref_distribution": 0,
    "old_distribution": 0,
}
"""Padding values of the columns whose entries are vectors [k]."""


def object_column(items: Iterable[object]) -> np.ndarray:
    """Make a column of Python objects: NumPy alone would turn lists into dimensions."""
    listed = list(items)
    column = np.empty(len(listed), dtype=object)
    for i, item in enumerate(listed):
        column[i] = item
    return column


@dataclass(frozen=True, eq=False)
class DataProto:
    """Immutable batch. A column's kind (data/keys.py) decides its type: tensor [rows] (ROW), Ragged (TOKENS, TRANSITIONS) or numpy object
    array (OBJECT). Never write to columns: they may be in Ray's object store."""

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        for name, column in self.columns.items():
            _check_column(name, column)
        sizes = {name: len(column) for name, column in self.columns.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"columns of different numbers of rows: {sizes}")
        object.__setattr__(self, "columns", MappingProxyType(dict(self.columns)))
        self._check_lengths()

    def _check_lengths(self) -> None:
        first: tuple[str, torch.Tensor] | None = None
        for name, column in self.columns.items():
            if not isinstance(column, Ragged):
                continue
            tokens = column.lengths + (1 if KEYS[name].kind is Kind.TRANSITIONS else 0)
            if bool((tokens < 1).any()):
                raise ValueError(f"column {name!r}: row {int((tokens < 1).nonzero()[0])} has no token")
            if first is None:
                first = name, tokens
            elif not torch.equal(first[1], tokens):
                row = int((first[1] != tokens).nonzero()[0])
                raise ValueError(
                    f"columns {first[0]!r} and {name!r} disagree: row {row} has {int(first[1][row])} and {int(tokens[row])} tokens "
                    "(a column of transitions has one entry less than there are tokens)"
                )

    # ------------------------------------------------------------ reading

    def __len__(self) -> int:
        return next((len(column) for column in self.columns.values()), 0)

    def keys(self) -> tuple[str, ...]:
        return tuple(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Column:
        if name not in self.columns:
            raise KeyError(f"no column {name!r} in this batch; it has {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    def tensor(self, name: str) -> torch.Tensor:
        column = self[name]
        assert isinstance(column, torch.Tensor), f"{name} is not a column of rows"
        return column

    def ragged(self, name: str) -> Ragged:
        column = self[name]
        assert isinstance(column, Ragged), f"{name} is not a column of tokens or transitions"
        return column

    def objects(self, name: str) -> np.ndarray:
        column = self[name]
        assert isinstance(column, np.ndarray), f"{name} is not a column of objects"
        return column

    @property
    def lengths(self) -> torch.Tensor:
        """[rows] int64: number of prompt and response tokens."""
        for name, column in self.columns.items():
            if isinstance(column, Ragged):
                return column.lengths if KEYS[name].kind is Kind.TOKENS else column.lengths + 1
        raise ValueError(f"this batch has no column of tokens or transitions, only {', '.join(self.columns) or 'none at all'}")

    # ------------------------------------------------------------ columns

    def select(self, names: Iterable[str]) -> DataProto:
        return DataProto({name: self[name] for name in names})

    def with_columns(self, **columns: Column) -> DataProto:
        return DataProto({**self.columns, **columns})

    # ------------------------------------------------------------ rows

    def take(self, index: Index) -> DataProto:
        rows = as_index(index, len(self))
        numbers = rows.numpy()
        taken = {
            name: column.take(rows) if isinstance(column, Ragged) else column[rows] if isinstance(column, torch.Tensor) else column[numbers]
            for name, column in self.columns.items()
        }
        return DataProto(taken)

    def slice(self, start: int, stop: int) -> DataProto:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start} to {stop} of {len(self)}")
        cut = {
            name: column.slice(start, stop) if isinstance(column, Ragged) else column[start:stop] for name, column in self.columns.items()
        }
        return DataProto(cut)

    @staticmethod
    def concat(parts: Sequence[DataProto]) -> DataProto:
        if not parts:
            raise ValueError("concat: no batches given")
        for number, part in enumerate(parts):
            if set(part.columns) != set(parts[0].columns):
                odd = sorted(set(part.columns) ^ set(parts[0].columns))
                raise ValueError(f"concat: batches 0 and {number} do not have the same columns, one lacks {', '.join(odd)}")
        joined = {name: _concat_columns(name, [part[name] for part in parts]) for name in parts[0].columns}
        return DataProto(joined)

    def group_by(self, key: str) -> dict[Hashable, DataProto]:
        column = self[key]
        if isinstance(column, Ragged):
            raise ValueError(f"group_by: {key!r} has several entries per row; only columns with one value per row can group")
        members: dict[Hashable, list[int]] = {}
        for row, value in enumerate(column.tolist()):
            members.setdefault(value, []).append(row)
        return {value: self.take(rows) for value, rows in members.items()}

    def __reduce__(self) -> tuple[Any, ...]:
        columns = {name: to_numpy(column) if isinstance(column, torch.Tensor) else column for name, column in self.columns.items()}
        return _rebuild, (columns,)


def _rebuild(columns: dict[str, Ragged | np.ndarray]) -> DataProto:
    return DataProto(
        {
            name: column if isinstance(column, Ragged) or KEYS[name].kind is Kind.OBJECT else from_numpy(column)
            for name, column in columns.items()
        }
    )


def _check_column(name: str, column: Column) -> None:
    if name not in KEYS:
        raise ValueError(f"column {name!r} is not declared in roll_lite/data/keys.py{or_nearest(name, KEYS)}")
    key = KEYS[name]
    wanted = {Kind.ROW: torch.Tensor, Kind.OBJECT: np.ndarray}.get(key.kind, Ragged)
    if not isinstance(column, wanted):
        raise ValueError(
            f"column {name!r} is declared as {key.kind.name} ({key.kind.value}): a {wanted.__name__}, got {type(column).__name__}"
        )
    if key.kind is Kind.OBJECT:
        if column.dtype != object or column.ndim != 1:
            raise ValueError(f"column {name!r} must be a one-dimensional object array (see object_column), got {column.dtype}")
    elif column.dtype != key.dtype:
        raise ValueError(f"column {name!r} must have dtype {key.dtype}, got {column.dtype}")
    if isinstance(column, Ragged) and len(column.values) and column.values.dim() != 1 + (name in VECTORS):
        entry = "a vector" if name in VECTORS else "one number"
        raise ValueError(f"column {name!r} must have {entry} per entry, got values of shape {tuple(column.values.shape)}")
    if isinstance(column, torch.Tensor) and (column.dim() != 1 or column.device.type != "cpu"):
        raise ValueError(f"column {name!r} must be [rows] in host memory, got {tuple(column.shape)} on {column.device}")


def _concat_columns(name: str, columns: list[Column]) -> Column:
    if isinstance(columns[0], Ragged):
        return Ragged.concat([column for column in columns if isinstance(column, Ragged)], VECTORS.get(name))
    if isinstance(columns[0], torch.Tensor):
        return torch.cat([column for column in columns if isinstance(column, torch.Tensor)])
    return np.concatenate([column for column in columns if isinstance(column, np.ndarray)])


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, with the permissions of the umask (safetensors itself sets 0600)."""
    from safetensors.torch import save_file

    with replacing(path, has_other_writers=False) as draft:
        draft.touch()
        mode = draft.stat().st_mode
        save_file(dict(tensors), draft, dict(metadata))
        draft.chmod(mode)
        flush([draft])
