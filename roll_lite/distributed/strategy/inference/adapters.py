"""Receive and read LoRA adapters in an engine's worker, for weight updates that send only adapters.

The engine keeps the base weights that it loaded at start-up, and adds the matrices A and B beside its layers. In a layer that fuses
projections (q, k, v), those without an adapter get zeros, because an engine may track adapters by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roll_lite.distributed.strategy.inference.held_weights import Layers, held_layers, shares
from roll_lite.models.adapter_files import A, B, adapter_name

NAME = "actor_train"
"""Name of the engine's only adapter."""


class IncomingAdapters:
    """Buffer for the adapters that a worker receives in an update. The engine uses the old ones until `put_in_place`."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], rank: int, put: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        """`shapes`: shapes of all adapter tensors by PEFT name; until the first update they are zeros. `put(rank, tensors)` installs
        tensors of this LoRA rank in the engine."""
        self.rank = rank
        self._shapes = shapes
        self._put = put
        self._come: dict[str, torch.Tensor] = {}
        self.put_in_place()

    def begin(self, again: bool) -> None:
        """Drop tensors that a failed update left. `again`: whether there was such an update; not used here."""
        self._come.clear()

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._come |= {name: tensor.clone() for name, tensor in tensors}  # the sender reuses its buffer

    def put_in_place(self) -> None:
        absent = {name: torch.zeros(tuple(shape)) for name, shape in self._shapes.items() if name not in self._come}
        self._put(self.rank, self._come | absent)
        self._come.clear()


@dataclass(frozen=True)
class AdaptedLayer:
    """Layer of an engine's model that has adapters, with this worker's shards of them."""

    path: str
    layer: Any
    a: torch.Tensor
    """LoRA matrices A of the layer's projections, stacked: [projections * rank, columns]."""
    b: torch.Tensor
    """LoRA matrices B of the layer's projections, stacked: [rows of all projections, rank]."""


def held_adapters(
    adapted: Iterable[AdaptedLayer], model: nn.Module, layers: Layers, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named adapter tensors, unsharded, as the engine uses them. Collective over the engine's workers."""
    for one in adapted:
        projections = [f"{held}.weight" for held in held_layers(one.path, model)]
        sizes, copies = shares(one.layer, len(one.b), layers)
        of_rows = isinstance(one.layer, layers.linear.RowParallelLinear)
        for projection, a, b, copy in zip(projections, one.a.chunk(len(projections)), one.b.split(sizes), copies, strict=True):
            if (name := adapter_name(projection, A)) in names:
                yield name, layers.whole(a, 1) if of_rows else a
            if (name := adapter_name(projection, B)) in names:
                yield name, b if of_rows else layers.whole(b, 0, copy)
