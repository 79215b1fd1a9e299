from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from roll_lite.data.proto import Column, DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.files import replacing


def write_rows(folder: Path, data_rank: int, rows: DataProto) -> None:
    write_table(folder / f"rows_{data_rank:04d}.parquet", as_table(rows))


def as_table(columns: DataProto) -> pa.Table:
    return pa.table({name: as_array(column) for name, column in columns.columns.items()})


def write_table(path: Path, table: pa.Table) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, has_other_writers=False) as draft:
        pq.write_table(table, draft, compression="zstd")


def as_array(column: Column) -> pa.Array:
    if isinstance(column, Ragged):
        values = column.values
        flat = pa.array(np.ascontiguousarray(values.numpy()).reshape(-1))
        entries = flat if values.dim() == 1 else pa.FixedSizeListArray.from_arrays(flat, values.shape[1])
        return pa.LargeListArray.from_arrays(pa.array(column.offsets.numpy()), entries)
    if isinstance(column, torch.Tensor):
        return pa.array(column.numpy())
    assert isinstance(column, np.ndarray)
    return pa.array([str(value) for value in column], pa.string())
