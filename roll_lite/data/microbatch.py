"""Micro-batches: the one place where ragged rows become padded tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import VECTORS, DataProto
from roll_lite.data.ragged import Ragged


@dataclass(frozen=True)
class MicroBatch:
    """A padded slice of a batch. Token columns are [B, T], transition columns [B, T-1] ([B, T-1, k] for vectors), row columns [B]."""

    columns: Mapping[str, torch.Tensor]
    mask: torch.Tensor
    """[B, T-1] bool: response_mask shifted, the transitions that count."""


@dataclass(frozen=True)
class MicroBatchOutputs:
    """What the model says of a micro-batch, [B, T-1] float32 where nothing else is said."""

    log_probs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    values: torch.Tensor | None = None
    distribution: torch.Tensor | None = None
    """[B, T-1, V] log-probs of the whole vocabulary."""
    final_value: torch.Tensor | None = None
    """[B] value of the end of the row."""


def micro_batches(batch: DataProto, size: int, pad_id: int = 0, pad_multiple: int = 1) -> list[tuple[np.ndarray, MicroBatch]]:
    """The batch in row order, `size` rows at a time, each micro-batch padded to its longest row (rounded up to pad_multiple).

    With each comes the array of its rows' numbers in the batch. input_ids are padded with pad_id, kept_ids with -1, everything else with 0;
    OBJECT columns stay behind. Without a response_mask every transition between real tokens counts.
    """
    if size < 1 or pad_multiple < 1:
        raise ValueError(f"micro_batches: size {size} and pad_multiple {pad_multiple} must be positive")
    cuts = range(0, len(batch), size)
    return [
        (np.arange(start, min(start + size, len(batch))), _padded(batch.slice(start, min(start + size, len(batch))), pad_id, pad_multiple))
        for start in cuts
    ]


def _padded(rows: DataProto, pad_id: int, pad_multiple: int) -> MicroBatch:
    lengths = rows.lengths
    width = -(-int(lengths.max()) // pad_multiple) * pad_multiple
    columns: dict[str, torch.Tensor] = {}
    for name, column in rows.columns.items():
        if isinstance(column, Ragged):
            shorter = 1 if KEYS[name].kind is Kind.TRANSITIONS else 0
            columns[name] = column.to_padded(pad_id if name == "input_ids" else VECTORS.get(name, 0), width - shorter)
        elif isinstance(column, torch.Tensor):
            columns[name] = column
    real = torch.arange(1, width) < lengths[:, None]
    return MicroBatch(columns, columns["response_mask"][:, 1:] & real if "response_mask" in columns else real)


def collect_transitions(padded: Sequence[torch.Tensor], micro_batches: Sequence[tuple[np.ndarray, MicroBatch]], batch: DataProto) -> Ragged:
    """Outputs [B, T-1, ...] of the micro-batches as one column of the batch, in its row order, on the host and without a graph."""
    if not micro_batches and len(batch) == 0:
        return Ragged.from_rows([], torch.float32)
    rows = torch.from_numpy(np.concatenate([numbers for numbers, _ in micro_batches]))
    if len(padded) != len(micro_batches) or not torch.equal(rows.sort().values, torch.arange(len(batch))):
        raise ValueError(
            f"{len(padded)} outputs of {len(micro_batches)} micro-batches do not make up the {len(batch)} rows of the batch once each"
        )
    lengths = batch.lengths - 1
    parts = [
        Ragged.from_padded(output.detach().to("cpu", torch.float32), lengths[torch.from_numpy(numbers)])
        for output, (numbers, _) in zip(padded, micro_batches, strict=True)
    ]
    joined = Ragged.concat(parts)
    return joined if bool((rows[1:] > rows[:-1]).all()) else joined.take(torch.argsort(rows))
