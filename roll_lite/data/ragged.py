from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

Index = Sequence[int] | np.ndarray | torch.Tensor


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths in host memory. Row i is values[offsets[i]:offsets[i + 1]]. `offsets`: [rows + 1] int64. `values`: [sum of
    lengths, ...], never written in place."""

    values: torch.Tensor
    offsets: torch.Tensor

    def __post_init__(self) -> None:
        if self.values.dim() == 0 or self.offsets.dim() != 1 or self.offsets.dtype != torch.int64:
            raise ValueError(
                f"ragged: values must have entries, offsets must be one-dimensional and int64, "
                f"got {tuple(self.values.shape)} and {tuple(self.offsets.shape)} {self.offsets.dtype}"
            )
        if self.values.device.type != "cpu" or self.offsets.device.type != "cpu":
            raise ValueError(f"ragged: rows live in host memory, got values on {self.values.device}; only micro-batches move to a device")
        if len(self.offsets) == 0 or int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.values):
            raise ValueError(f"ragged: offsets must run from 0 to the number of values, {len(self.values)}")
        if bool((self.lengths < 0).any()):
            raise ValueError("ragged: offsets must not decrease")

    @staticmethod
    def from_rows(rows: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> Ragged:
        dtype = dtype or (rows[0].dtype if rows else torch.float32)
        values = torch.cat([row.to(dtype) for row in rows]) if rows else torch.empty(0, dtype=dtype)
        return Ragged(values, _offsets(torch.tensor([len(row) for row in rows], dtype=torch.int64)))

    @staticmethod
    def from_padded(padded: torch.Tensor, lengths: Index) -> Ragged:
        """Take the first lengths[i] entries of row i of `padded`, [rows, width, ...]."""
        sizes = as_index(lengths)
        if padded.dim() < 2 or len(sizes) != padded.shape[0]:
            raise ValueError(f"ragged: {len(sizes)} lengths for a padded tensor of shape {tuple(padded.shape)}")
        if len(sizes) and (int(sizes.min()) < 0 or int(sizes.max()) > padded.shape[1]):
            raise ValueError(f"ragged: lengths between {int(sizes.min())} and {int(sizes.max())} do not fit rows of {padded.shape[1]}")
        return Ragged(padded.cpu()[_real(sizes, padded.shape[1])], _offsets(sizes))

    @cached_property
    def lengths(self) -> torch.Tensor:
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def row(self, i: int) -> torch.Tensor:
        if not 0 <= i < len(self):
            raise IndexError(f"row {i} of {len(self)}")
        return self.values[int(self.offsets[i]) : int(self.offsets[i + 1])]

    def rows(self) -> list[torch.Tensor]:
        return list(torch.split(self.values, self.lengths.tolist()))

    def take(self, index: Index) -> Ragged:
        rows = as_index(index, len(self))
        lengths = self.lengths[rows]
        offsets = _offsets(lengths)
        shift = torch.repeat_interleave(self.offsets[:-1][rows] - offsets[:-1], lengths)
        return Ragged(self.values[shift + torch.arange(len(shift))], offsets)

    def slice(self, start: int, stop: int) -> Ragged:
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"rows {start} to {stop} of {len(self)}")
        first, last = int(self.offsets[start]), int(self.offsets[stop])
        return Ragged(self.values[first:last], self.offsets[start : stop + 1] - first)

    @staticmethod
    def concat(parts: Sequence[Ragged], fill: float | int | None = None) -> Ragged:
        """Join rows. Entries that are vectors [k] are padded with `fill` to the largest k; without `fill`, all must have the same k."""
        if not parts:
            raise ValueError("ragged: nothing to concatenate")
        values = [part.values for part in parts]
        if fill is not None:
            values = _widened(values, fill)
        elif len({each.shape[1:] for each in values if len(each)}) > 1:
            raise ValueError(f"ragged: entries of different shapes: {', '.join(str(tuple(each.shape[1:])) for each in values)}")
        return Ragged(torch.cat(values), _offsets(torch.cat([part.lengths for part in parts])))

    def to_padded(self, pad_value: float | int | bool, length: int | None = None) -> torch.Tensor:
        longest = int(self.lengths.max()) if len(self) else 0
        width = longest if length is None else length
        if width < longest:
            raise ValueError(f"ragged: a row of {longest} does not fit the length {width}")
        padded = torch.full((len(self), width, *self.values.shape[1:]), pad_value, dtype=self.values.dtype)
        padded[_real(self.lengths, width)] = self.values
        return padded

    def equals(self, other: Ragged) -> bool:
        return torch.equal(self.offsets, other.offsets) and same_tensor(self.values, other.values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (to_numpy(self.values), to_numpy(self.offsets))


# Ray 2.60 pickles CPU tensors in-band and copies them on both sides. It maps numpy arrays out of band, so columns are pickled as numpy
# arrays.


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a contiguous array, since pickling a slice would pickle the whole tensor."""
    return tensor.detach().contiguous().numpy()


class _Writable:
    """Presents read-only memory as writable, because torch warns about read-only arrays."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Share the array's memory, which may be read-only: never write to the tensor."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    return torch.from_numpy(np.asarray(_Writable(array)) if array.size else array.copy())


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compare tensors; NaN equals NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


def as_index(index: Index, rows: int | None = None) -> torch.Tensor:
    """Convert to int64 [n]. Boolean masks are refused, since they would be read as rows 0 and 1."""
    found = index if isinstance(index, torch.Tensor) else np.asarray(index)
    if len(found) == 0:
        return torch.empty(0, dtype=torch.int64)
    numbers = found if isinstance(found, torch.Tensor) else from_numpy(np.ascontiguousarray(found))
    if numbers.dim() != 1 or numbers.dtype == torch.bool or numbers.dtype.is_floating_point:
        raise ValueError(f"row numbers must be a list of integers, got {numbers.dtype} of shape {tuple(numbers.shape)}")
    numbers = numbers.to(torch.int64)
    if rows is not None and (int(numbers.min()) < 0 or int(numbers.max()) >= rows):
        raise IndexError(f"row numbers between {int(numbers.min())} and {int(numbers.max())}, but there are rows 0 to {rows - 1}")
    return numbers


def _rebuild(values: np.ndarray, offsets: np.ndarray) -> Ragged:
    return Ragged(from_numpy(values), from_numpy(offsets))


def _widened(values: list[torch.Tensor], fill: float | int) -> list[torch.Tensor]:
    width = max((each.shape[1] for each in values if each.dim() == 2), default=0)
    return [
        torch.nn.functional.pad(each, (0, width - each.shape[1]), value=fill) if each.dim() == 2 else each.new_empty(0, width)
        for each in values
    ]


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(lengths, 0)])


def _real(lengths: torch.Tensor, width: int) -> torch.Tensor:
    return torch.arange(width) < lengths[:, None]
