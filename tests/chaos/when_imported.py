"""Changes a class of roll_lite when a process imports it, for the `sitecustomize.py` beside it: importing torch takes seconds, which
processes without an engine do not need."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class WhenImported(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[Any], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def execute_and_change(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        spec.loader.exec_module = execute_and_change  # type: ignore[method-assign]
        return spec


def change_receiver(change: Callable[[Any], None]) -> None:
    """Change the class that receives weights in an engine's worker."""
    endpoints = "roll_lite.distributed.weight_sync.endpoints"
    sys.meta_path.insert(0, WhenImported(endpoints, lambda module: change(module.WeightReceiver)))
