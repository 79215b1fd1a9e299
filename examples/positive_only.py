"""A user's own mask (algorithm.masks.function): only samples with a positive score train."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # not imported, to keep `roll-lite check` fast
    import torch

    from roll_lite.algorithms.rewards import RewardRows


def weights(rows: RewardRows) -> torch.Tensor:
    """1 trains, 0 does not. [samples]"""
    return (rows.score > 0).float()
