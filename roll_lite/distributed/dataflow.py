"""Batches whose per-token columns bypass the driver.

Workers store these columns as blocks in Ray's object store. The driver holds one value per sample, and sends each data-parallel rank its
rows with references to blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import ray

from roll_lite.data.proto import Column, DataProto
from roll_lite.data.ragged import Ragged

SAMPLE = "sample"
NOWHERE = -1


@dataclass(frozen=True)
class Block:
    refs: tuple[ray.ObjectRef, ...]
    keys: tuple[str, ...]
    samples: np.ndarray
    """[n] int64: sample numbers."""
    objects: np.ndarray
    """[n] int32: index in `refs` of each sample's object."""
    rows: np.ndarray
    """[n] int32: row of each sample in its object."""

    def renumbered(self, numbers: Mapping[int, int]) -> Block:
        kept = np.array([place for place, sample in enumerate(self.samples.tolist()) if sample in numbers], dtype=np.int64)
        samples = np.array([numbers[sample] for sample in self.samples[kept].tolist()], dtype=np.int64)
        return Block(self.refs, self.keys, samples, self.objects[kept], self.rows[kept])


def put_block(columns: DataProto) -> Block:
    """Store per-token columns in Ray's object store. Column `sample`: each row's sample number."""
    samples = columns.tensor(SAMPLE).numpy().copy()
    keys = tuple(key for key in columns.columns if key != SAMPLE)
    return Block((ray.put(columns.select(keys)),), keys, samples, np.zeros(len(samples), np.int32), np.arange(len(samples), dtype=np.int32))


@dataclass(frozen=True)
class Piece:
    refs: tuple[ray.ObjectRef, ...]
    keys: tuple[str, ...]
    objects: np.ndarray
    rows: np.ndarray

    def fetch(self) -> dict[str, Column]:
        found: list[DataProto] = ray.get(list(self.refs))
        order = np.argsort(self.objects, kind="stable")
        ends = np.searchsorted(self.objects[order], np.arange(len(found) + 1))
        parts = [
            columns.select(self.keys).take(self.rows[order[start:end]]) for columns, (start, end) in zip(found, pairwise(ends), strict=True)
        ]
        joined = DataProto.concat(parts)
        in_order = bool((order[1:] > order[:-1]).all())
        return dict((joined if in_order else joined.take(np.argsort(order))).columns)


@dataclass(frozen=True)
class BatchShard:
    rows: DataProto
    keys: tuple[str, ...]
    pieces: tuple[Piece, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def materialize(self) -> DataProto:
        columns = dict(self.rows.columns)
        for piece in self.pieces:
            columns |= piece.fetch()
        return DataProto(columns).select(self.keys)


class Batch:
    """Driver's view of a batch."""

    def __init__(self, rows: DataProto, blocks: Iterable[Block] = ()) -> None:
        long = [key for key, column in rows.columns.items() if isinstance(column, Ragged)]
        assert not long, f"columns with an entry per token do not pass through the driver, they belong into blocks: {long}"
        self.rows = rows
        self._samples = rows.tensor(SAMPLE).numpy()
        self._order = np.argsort(self._samples, kind="stable")
        assert len(np.unique(self._samples)) == len(self._samples), "sample numbers must be unique within a batch"
        self._blocks: list[Block] = []
        self._refs: list[ray.ObjectRef] = []
        self._where: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """{column: for each batch row, (index in `_refs` of the object with its value, or NOWHERE; position in that object)}."""
        self.add(blocks)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def blocks(self) -> list[Block]:
        return list(self._blocks)

    def __contains__(self, key: str) -> bool:
        return key in self.keys()

    def keys(self) -> list[str]:
        complete = [key for key, (number, _) in self._where.items() if not (number == NOWHERE).any()]
        return [*self.rows.keys(), *complete]

    def lacking(self, keys: Iterable[str]) -> np.ndarray:
        lacks = np.zeros(len(self), dtype=bool)
        for key in keys:
            if key not in self.rows:
                lacks |= self._where[key][0] == NOWHERE if key in self._where else True
        return np.flatnonzero(lacks)

    def with_rows(self, **columns: Column) -> Batch:
        return Batch(self.rows.with_columns(**columns), self._blocks)

    def take(self, rows: np.ndarray) -> Batch:
        part = Batch(self.rows.take(rows))
        part._blocks, part._refs = list(self._blocks), list(self._refs)
        part._where = {key: (held[rows], row[rows]) for key, (held, row) in self._where.items()}
        return part

    def add(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            unknown = block.samples[~np.isin(block.samples, self._samples)]
            assert not len(unknown), f"a block with {', '.join(block.keys)} has rows for samples {unknown}, not in this batch"
            places = self._order[np.searchsorted(self._samples, block.samples, sorter=self._order)]
            for key in block.keys:
                assert key not in self.rows, f"column {key!r} comes in a block, but the batch's rows have it already"
                held, row = self._where.setdefault(key, (np.full(len(self), NOWHERE), np.full(len(self), NOWHERE)))
                twice = block.samples[held[places] != NOWHERE]
                assert not len(twice), f"column {key!r} is there already for samples {twice}; each comes from one block"
                held[places] = len(self._refs) + block.objects
                row[places] = block.rows
            self._blocks.append(block)
            self._refs += block.refs

    def shards(self, parts: Sequence[np.ndarray], keys: Sequence[str]) -> list[BatchShard]:
        wanted = tuple(dict.fromkeys([SAMPLE, *keys]))
        return [self._shard(np.asarray(part, dtype=np.int64), wanted) for part in parts]

    # ------------------------------------------------------------ inside

    def _shard(self, part: np.ndarray, keys: tuple[str, ...]) -> BatchShard:
        together: dict[tuple[bytes, bytes], list[str]] = {}
        for key in keys:
            if key not in self.rows:
                held, row = self._where[key]
                # An empty shard takes its column types from any object that has the columns.
                named = (held[part].tobytes(), row[part].tobytes()) if len(part) else (str(self._first_object(key)).encode(), b"")
                together.setdefault(named, []).append(key)
        rows = self.rows.select([key for key in keys if key in self.rows]).take(part)
        return BatchShard(rows, keys, tuple(self._piece(part, tuple(names)) for names in together.values()))

    def _piece(self, part: np.ndarray, keys: tuple[str, ...]) -> Piece:
        held, row = self._where[keys[0]]
        missing = self._samples[part[held[part] == NOWHERE]]
        assert not len(missing), f"{', '.join(keys)}: missing for samples {missing}"
        needed, objects = np.unique(held[part], return_inverse=True)
        numbers = needed.tolist() if len(part) else [self._first_object(keys[0])]
        refs = tuple(self._refs[number] for number in numbers)
        return Piece(refs, keys, objects.astype(np.int32), row[part].astype(np.int32))

    def _first_object(self, key: str) -> int:
        before = 0
        for block in self._blocks:
            if key in block.keys and block.refs:
                return before
            before += len(block.refs)
        raise AssertionError(f"no object of the store has the column {key!r}")
