r"""Weight updates that bring only LoRA adapters: the engine keeps the weights it loaded, with A and B beside its layers. B arrives already
multiplied by alpha / rank. Engines fuse projections: in a fused layer, projections without an adapter get zeros, because an engine may
track adapters by layer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from roll_lite.distributed.strategy.inference.held_weights import Layers, held_layers, shares
from roll_lite.models.adapter_files import A, B, adapter_name

NAME = "actor_train"
"""Name of the only adapter in an engine."""


class IncomingAdapters:
    """Adapters that a worker receives during an update. The engine computes with the old ones until `put_in_place`."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], rank: int, put: Callable[[int, dict[str, torch.Tensor]], None]) -> None:
        """`shapes`: of all adapter tensors, by PEFT's names; they start as zeros. `put(rank, tensors)` installs tensors of this LoRA
        rank."""
        self.rank = rank
        self._shapes = shapes
        self._put = put
        self._come: dict[str, torch.Tensor] = {}
        self.put_in_place()

    def begin(self, again: bool) -> None:
        """Begin an update. `again`: an earlier update broke off and left some of its tensors."""
        self._come.clear()

    def take(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._come |= {name: tensor.clone() for name, tensor in tensors}  # the sender reuses its buffer

    def put_in_place(self) -> None:
        absent = {name: torch.zeros(tuple(shape)) for name, shape in self._shapes.items() if name not in self._come}
        self._put(self.rank, self._come | absent)
        self._come.clear()


@dataclass(frozen=True)
class AdaptedLayer:
    """Layer of an engine's model, with this worker's part of its adapters."""

    path: str
    layer: Any
    a: torch.Tensor
    """Shape [projections x rank, columns]."""
    b: torch.Tensor
    """Shape [rows of all projections, rank]."""


def held_adapters(
    adapted: Iterable[AdaptedLayer], model: nn.Module, layers: Layers, names: Collection[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the named tensors, full size, as the engine computes with them. All workers of an engine iterate together."""
    for one in adapted:
        projections = [f"{held}.weight" for held in held_layers(one.path, model)]
        sizes, copies = shares(one.layer, len(one.b), layers)
        of_rows = isinstance(one.layer, layers.linear.RowParallelLinear)
        for projection, a, b, copy in zip(projections, one.a.chunk(len(projections)), one.b.split(sizes), copies, strict=True):
            if (name := adapter_name(projection, A)) in names:
                yield name, layers.whole(a, 1) if of_rows else a
            if (name := adapter_name(projection, B)) in names:
                yield name, b if of_rows else layers.whole(b, 0, copy)
