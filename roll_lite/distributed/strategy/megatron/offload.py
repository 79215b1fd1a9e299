"""Moving state out of device memory and back, by emptying the storages that Megatron's buffers and views share.

A storage that is emptied and refilled keeps its identity: every view of it (parameters into the parameter buffer, main_grad into the
gradient buffer, optimizer shards into the parameters) is valid again, and no reference has to be found and replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.strategy.megatron.optimizer import Optimizer


class StateMover:
    def __init__(self, chunks: list[Any], optimizer: Optimizer | None) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._away: dict[StateGroup, list[tuple[torch.UntypedStorage, int, torch.Tensor | None]]] = {}
        self._pinned: dict[int, torch.Tensor] = {}

    def offload(self, groups: Iterable[StateGroup]) -> None:
        for group in dict.fromkeys(groups):
            if group not in self._away:
                self._away[group] = [self._empty(storage, keep=group is not StateGroup.GRADIENTS) for storage in self._storages(group)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies to the host are done when this returns
            torch.cuda.empty_cache()

    def load(self, groups: Iterable[StateGroup]) -> None:
        for group in dict.fromkeys(groups):
            for storage, size, kept in self._away.pop(group, []):
                storage.resize_(size)
                if kept is None:
                    _bytes(storage).zero_()
                else:
                    _bytes(storage).copy_(kept, non_blocking=True)

    def require(self, *groups: StateGroup) -> None:
        missing = [group for group in groups if group in self._away]
        assert not missing, f"{', '.join(missing)} are offloaded: load them first"

    def _empty(self, storage: torch.UntypedStorage, keep: bool) -> tuple[torch.UntypedStorage, int, torch.Tensor | None]:
        size = storage.nbytes()
        kept = None
        if keep:
            kept = self._host_memory(storage)
            kept.copy_(_bytes(storage), non_blocking=True)
        storage.resize_(0)
        return storage, size, kept

    def _host_memory(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Beside a GPU pinned, and kept for the next time: pinning takes longer than copying."""
        if storage.device.type == "cpu":
            return torch.empty(storage.nbytes(), dtype=torch.uint8)
        if storage._cdata not in self._pinned:
            self._pinned[storage._cdata] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        return self._pinned[storage._cdata]

    def _storages(self, group: StateGroup) -> list[torch.UntypedStorage]:
        """Each once. What belongs to several groups belongs to the first of weights, gradients, optimizer."""
        order = list(StateGroup)
        earlier = {key for other in order[: order.index(group)] for key in self._keyed(other)}
        return [storage for key, storage in self._keyed(group).items() if key not in earlier]

    def _keyed(self, group: StateGroup) -> dict[int, torch.UntypedStorage]:
        keyed = {}
        for tensor in self._tensors(group):
            storage = tensor.untyped_storage()
            keyed[storage._cdata] = storage
        return keyed

    def _tensors(self, group: StateGroup) -> Iterator[torch.Tensor]:
        match group:
            case StateGroup.WEIGHTS:
                for chunk in self._chunks:
                    yield from chunk.parameters()
            case StateGroup.GRADIENTS:
                for chunk in self._chunks:
                    for buffer in getattr(chunk, "buffers", []) if self._optimizer is not None else []:
                        yield buffer.grad_data
            case StateGroup.OPTIMIZER:
                for part in self._optimizer.parts if self._optimizer is not None else []:
                    for state in part.optimizer.state.values():
                        yield from (value for value in state.values() if isinstance(value, torch.Tensor))
                    yield from (parameter for param_group in part.optimizer.param_groups for parameter in param_group["params"])


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
