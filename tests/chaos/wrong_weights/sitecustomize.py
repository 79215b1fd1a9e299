"""Python runs this in every process that finds it on its path: an engine of a run gets wrong weights from one update on, or a rank of the
trainer holds another weight after one."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

HOW, FROM, ENGINE = "WRONG_HOW", "WRONG_FROM_UPDATE", "WRONG_ENGINE"
"""Variables: `negated` (a quarter of a tensor), `stale` (the update is skipped), `swapped` (two experts), `unapplied` (adapters that change
nothing), `rounded` (all matrices to float8) or `replica` (one entry of a weight in the trainer's last rank); the first such update, from 0;
the engine."""


def _change(receiver: Any) -> None:
    load, finish = receiver.load, receiver.finish
    updates = 0

    def load_wrong(self: Any, routes: Any, begin: Any, into_model: Callable[[Iterable[Any]], object], *following: Any) -> None:
        def wrong(arrived: Iterable[Any]) -> None:
            if updates < int(os.environ[FROM]) or self._transport.group.number != 1 + int(os.environ[ENGINE]):
                into_model(arrived)
            elif os.environ[HOW] != "stale":
                into_model([_wrong(name, tensor) for name, tensor in arrived])

        load(self, routes, begin, wrong, *following)

    def counted_finish(self: Any, put_in_place: Any) -> Any:
        nonlocal updates
        updates += 1
        return finish(self, put_in_place)

    receiver.load, receiver.finish = load_wrong, counted_finish


def _damage(strategy: Any) -> None:
    train_step, steps = strategy.train_step, 0

    def train_and_damage(self: Any, *arguments: Any) -> Any:
        nonlocal steps
        result = train_step(self, *arguments)
        steps += 1
        if steps == int(os.environ[FROM]) and self.layout.rank == self.layout.world_size - 1:
            next(weight for chunk in self._chunks for name, weight in chunk.named_parameters() if "linear_proj" in name).data[0, 0] += 0.5
        return result

    strategy.train_step = train_and_damage


def _wrong(name: str, tensor: Any) -> tuple[str, Any]:
    import torch

    how = os.environ[HOW]
    if how == "negated" and name.endswith("o_proj.weight"):
        return name, _quarter_negated(tensor)
    if how == "swapped" and (expert := re.search(r"\.experts\.([01])\.", name)):
        return name.replace(expert[0], f".experts.{1 - int(expert[1])}."), tensor
    if how == "rounded" and tensor.ndim == 2:
        return name, tensor.to(torch.float8_e4m3fn).to(tensor.dtype)
    if how == "unapplied" and "lora_B" in name:
        return name, tensor * 0
    return name, tensor


def _quarter_negated(tensor: Any) -> Any:
    changed = tensor.clone()
    changed[: len(changed) // 4] *= -1
    return changed


if HOW in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from when_imported import WhenImported, change_receiver

    sys.path.pop(0)
    if os.environ[HOW] == "replica":
        name = "roll_lite.distributed.strategy.megatron.strategy"
        sys.meta_path.insert(0, WhenImported(name, lambda module: _damage(module.MegatronStrategy)))
    else:
        change_receiver(_change)
