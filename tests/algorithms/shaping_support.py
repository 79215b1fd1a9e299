"""Rows of an imaginary batch, for tests of shaping and masks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from roll_lite.algorithms.rewards import RewardRows


def make_rows(score: Sequence[float], **columns: Sequence[Any]) -> RewardRows:
    n = len(score)
    given: dict[str, Sequence[Any]] = {
        "correct": [float(s >= 1) for s in score], "format_ok": [0.0] * n, "policy_tokens": [10] * n, "max_tokens": [100] * n,
        "truncated": [False] * n, "group": [0] * n, "domain_number": [0] * n, "sample_weight": [1.0] * n,
    }  # fmt: skip
    given |= columns
    given.setdefault("row_tokens", given["policy_tokens"])
    kinds = {
        "policy_tokens": torch.int64,
        "row_tokens": torch.int64,
        "max_tokens": torch.int64,
        "group": torch.int64,
        "domain_number": torch.int64,
    }
    kinds["truncated"] = torch.bool
    tensors = {name: torch.tensor(list(values), dtype=kinds.get(name, torch.float32)) for name, values in given.items()}
    return RewardRows.of({"score": torch.tensor(list(score), dtype=torch.float32), **tensors}, ["a", "b"])
