"""Which rows go to which data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch


def balanced_partition(lengths: Sequence[int] | np.ndarray | torch.Tensor, parts: int) -> list[np.ndarray]:
    """Row numbers of each part, ascending, with the token counts of the parts close to each other.

    The longest row goes first, each to the lightest part; ties go to the part with fewer rows, then to the lower number, so that the
    result depends on the lengths alone and no part stays empty while there are rows for all.
    """
    if parts < 1:
        raise ValueError(f"balanced_partition: {parts} is no number of parts")
    tokens = np.asarray(lengths)
    members: list[list[int]] = [[] for _ in range(parts)]
    lightest = [(0, 0, part) for part in range(parts)]
    for row in np.argsort(-tokens, kind="stable").tolist():
        load, rows, part = lightest[0]
        members[part].append(row)
        heapq.heapreplace(lightest, (load + int(tokens[row]), rows + 1, part))
    return [np.sort(np.array(rows, dtype=np.int64)) for rows in members]
