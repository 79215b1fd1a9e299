"""What an engine's arguments are made of: those that a configuration hands through, and the size of the cache."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

CPU_KV_CACHE_MB = 256


def cache_mb(given: int | None, cuda: bool) -> int | None:
    """Of the key/value cache; None where it takes what is left of the GPU."""
    return given if given is not None or cuda else CPU_KV_CACHE_MB


def check_engine_args(make: str, given: Mapping[str, Any], own: Collection[str], known: Collection[str]) -> None:
    """ValueError for one that the engine does not have, or that is roll_lite's `own`."""
    for name in sorted(given):
        path = f"actor_infer.strategy.engine_args.{name}"
        if name in own:
            raise ValueError(f"{path}: roll_lite sets this one itself; remove it")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{path}: {make} has no such engine argument{hint}")
