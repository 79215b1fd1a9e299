"""The state of one weight update, as the hosting process sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_lite.distributed.strategy.base import ExportedTensor
from roll_lite.distributed.weight_sync.plan import sender_of


@dataclass
class WeightUpdate:
    tensors: Sequence[ExportedTensor]
    opened: bool = False
    """Buckets are coming in. From here on the engine stands still until the update is finished."""
    arrived: set[str] = field(default_factory=set)

    def bucket(self, tensors: Sequence[ExportedTensor]) -> dict[str, Any]:
        """What a worker needs to receive these tensors, in plain types."""
        announced = {tensor.name for tensor in self.tensors}
        for tensor in tensors:
            if tensor.name not in announced or tensor.name in self.arrived:
                raise ValueError(f"weight update: {tensor.name} was {'sent before' if tensor.name in announced else 'not announced'}")
        owners = {tensor.owner for tensor in tensors}
        assert len(owners) == 1, f"a bucket has one owner, not {sorted(owners)}"
        return {
            "tensors": [[tensor.name, list(tensor.shape), _name(tensor)] for tensor in tensors],
            "sender": sender_of(owners.pop(), self.tensors),
        }

    def missing(self) -> list[str]:
        return [tensor.name for tensor in self.tensors if tensor.name not in self.arrived]

    def dtypes(self) -> dict[str, str]:
        return {tensor.name: _name(tensor) for tensor in self.tensors}


def _name(tensor: ExportedTensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
