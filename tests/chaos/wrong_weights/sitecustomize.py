"""Python runs this in every process that finds it on its path: an engine of a run gets wrong weights from one update on.

Importing torch takes seconds, which processes without an engine do not need: what is changed is changed when somebody imports it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

HOW, FROM, ENGINE = "WRONG_HOW", "WRONG_FROM_UPDATE", "WRONG_ENGINE"
"""Variables: `negated` (a quarter of a tensor) or `stale` (the update is skipped); the first such update, from 0; the engine."""


class _WhenImported(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "roll_lite.distributed.weight_sync.endpoints":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            _change(module.WeightReceiver)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


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
    sys.meta_path.insert(0, _WhenImported())
