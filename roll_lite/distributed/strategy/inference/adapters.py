"""LoRA adapters in an engine's worker, for weight updates that send adapters only.

Some engines adapt a fused layer (q, k, v) as a whole: projections without adapters get zero matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roll_lite.distributed.strategy.inference.held_weights import Layers, held_layers, shares
from roll_lite.models.adapter_files import A, B, adapter_name

NAME = "actor_train"


class IncomingAdapters:
    """Buffer for an update's adapters; `put_in_place` installs them."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], rank: int, put: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        """`shapes`: {PEFT name: shape}. `put(LoRA rank, tensors)` installs adapters; called here with zeros."""
        self.rank = rank
        self._shapes = shapes
        self._put = put
        self._received: dict[str, torch.Tensor] = {}
        self.put_in_place()

    def begin(self, again: bool) -> None:
        self._received.clear()

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._received |= {name: tensor.clone() for name, tensor in tensors}  # the sender reuses its buffer

    def put_in_place(self) -> None:
        absent = {name: torch.zeros(tuple(shape)) for name, shape in self._shapes.items() if name not in self._received}
        self._put(self.rank, self._received | absent)
        self._received.clear()


@dataclass(frozen=True)
class AdaptedLayer:
    path: str
    layer: Any
    a: torch.Tensor
    """A matrices of the projections, stacked: [projections * rank, columns]."""
    b: torch.Tensor
    """B matrices, stacked: [rows of all projections, rank]."""


def held_adapters(
    adapted: Iterable[AdaptedLayer], model: nn.Module, layers: Layers, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (PEFT name, unsharded LoRA matrix) for `names`. Collective over the engine's workers."""
    for one in adapted:
        projections = [f"{held}.weight" for held in held_layers(one.path, model)]
        sizes, copies = shares(one.layer, len(one.b), layers)
        of_rows = isinstance(one.layer, layers.linear.RowParallelLinear)
        for projection, a, b, copy in zip(projections, one.a.chunk(len(projections)), one.b.split(sizes), copies, strict=True):
            if (name := adapter_name(projection, A)) in names:
                yield name, layers.whole(a, 1) if of_rows else a
            if (name := adapter_name(projection, B)) in names:
                yield name, b if of_rows else layers.whole(b, 0, copy)
