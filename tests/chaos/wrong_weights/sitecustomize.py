"""Python runs this in every process that finds it on its path: an engine of a run gets wrong weights from one update on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HOW, FROM, ENGINE = "WRONG_HOW", "WRONG_FROM_UPDATE", "WRONG_ENGINE"
"""Variables: `negated` (a quarter of a tensor) or `stale` (the update is skipped); the first such update, from 0; the engine."""


def _change(receiver: Any) -> None:
    load, finish = receiver.load, receiver.finish
    updates = 0

    def load_wrong(self: Any, routes: Any, begin: Any, into_model: Callable[[Iterable[Any]], object], *following: Any) -> None:
        def wrong(arrived: Iterable[Any]) -> None:
            if updates < int(os.environ[FROM]) or self._half.group.number != 1 + int(os.environ[ENGINE]):
                into_model(arrived)
            elif os.environ[HOW] == "negated":
                into_model([(name, _quarter_negated(tensor) if name.endswith("o_proj.weight") else tensor) for name, tensor in arrived])

        load(self, routes, begin, wrong, *following)

    def counted_finish(self: Any, put_in_place: Any) -> Any:
        nonlocal updates
        updates += 1
        return finish(self, put_in_place)

    receiver.load, receiver.finish = load_wrong, counted_finish


def _quarter_negated(tensor: Any) -> Any:
    changed = tensor.clone()
    changed[: len(changed) // 4] *= -1
    return changed


if HOW in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from when_imported import change_receiver

    sys.path.pop(0)
    change_receiver(_change)
