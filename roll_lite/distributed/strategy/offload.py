"""Offload weights and optimizer state to the host; drop gradients.

Storages are emptied in place: views stay valid. Loads run on their own stream; `require` makes computation wait. Host copies are
reused until the state changes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from roll_lite.distributed.strategy.base import StateGroup


class OptimizerState(Protocol):
    on_host: bool

    def tensors(self, with_moments: bool) -> Iterator[torch.Tensor]: ...


@dataclass
class HostCopy:
    storage: torch.UntypedStorage
    size: int
    memory: torch.Tensor | None = None
    """Bytes on the host; None for gradients (dropped), and before the first offload."""
    is_current: bool = False
    is_frozen: bool = False


class StateMover:
    def __init__(self, chunks: list[Any], optimizer: OptimizerState | None, device: torch.device) -> None:
        self._chunks = chunks
        self._optimizer = optimizer
        self._device_type = device.type
        self._device = torch.get_device_module(device)
        self._stream = self._device.Stream()
        self._copies: dict[StateGroup, dict[int, HostCopy]] = {group: {} for group in StateGroup}
        self._away: set[StateGroup] = set()
        self._arriving: dict[StateGroup, Any] = {}

    def offload(self, groups: Iterable[StateGroup]) -> dict[str, int]:
        """Offload groups. Gradients, and state with a current copy, are not copied."""
        leaving = [group for group in dict.fromkeys(groups) if group not in self._away]
        copied = freed = 0
        self._stream.wait_stream(self._device.current_stream())
        with self._device.stream(self._stream):
            for group in leaving:
                self._copies[group] = self._copies_of(group)
                if group is not StateGroup.GRADIENTS:
                    copied += sum(self._copy_out(copy) for copy in self._copies[group].values())
        self._event().synchronize()
        for group in leaving:
            for copy in self._copies[group].values():
                freed += copy.size
                copy.storage.resize_(0)
        self._away.update(leaving)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        elif trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # of glibc
            trim(0)
        return {"freed": freed, "out": copied}

    def load(self, groups: Iterable[StateGroup]) -> dict[str, int]:
        copied = 0
        for group in [group for group in dict.fromkeys(groups) if group in self._away]:
            for copy in self._copies[group].values():
                copy.storage.resize_(copy.size)
            self._stream.wait_stream(self._device.current_stream())  # queued work may still use that memory
            with self._device.stream(self._stream):
                for copy in self._copies[group].values():
                    if copy.memory is None:
                        _bytes(copy.storage).zero_()
                    else:
                        _bytes(copy.storage).copy_(copy.memory, non_blocking=True)
                        copied += copy.size
            self._arriving[group] = self._event()
            self._away.remove(group)
        return {"in": copied}

    @property
    def loaded(self) -> list[StateGroup]:
        return [group for group in StateGroup if group not in self._away and any(True for _ in self._tensors(group))]

    def require(self, *groups: StateGroup) -> None:
        """Make device work wait for loads of these groups. AssertionError if one is offloaded."""
        missing = [group for group in groups if group in self._away]
        assert not missing, f"{', '.join(missing)} are offloaded: load them first"
        for group in groups:
            if (event := self._arriving.pop(group, None)) is not None:
                event.wait(self._device.current_stream())

    def require_to_write(self, *groups: StateGroup, trained_only: bool = False) -> None:
        """Call `require`, then mark host copies as outdated. `trained_only`: those of frozen weights stay valid."""
        self.require(*groups)
        for group in groups:
            for copy in self._copies[group].values():
                copy.is_current = copy.is_current and trained_only and copy.is_frozen

    def _copy_out(self, copy: HostCopy) -> int:
        if copy.is_current:
            return 0
        if copy.memory is None:
            copy.memory = torch.empty(copy.size, dtype=torch.uint8, pin_memory=self._device_type == "cuda")
        copy.memory.copy_(_bytes(copy.storage), non_blocking=True)
        copy.is_current = True
        return copy.size

    def _event(self) -> Any:
        event = self._device.Event()
        event.record(self._stream)
        return event

    def _copies_of(self, group: StateGroup) -> dict[int, HostCopy]:
        """Return {address of a storage: host copy}, listed anew because loading a checkpoint replaces storages."""
        known, frozen = self._copies[group], group is StateGroup.WEIGHTS
        training = self._keyed(weight for chunk in self._chunks for weight in chunk.parameters() if weight.requires_grad)
        return {
            storage._cdata: known.get(storage._cdata)
            or HostCopy(storage, storage.nbytes(), is_frozen=frozen and storage._cdata not in training)
            for storage in self._storages(group)
        }

    def _storages(self, group: StateGroup) -> list[torch.UntypedStorage]:
        """List the group's storages. A shared storage belongs to the first of its groups in StateGroup's order."""
        order = list(StateGroup)
        earlier = {key for other in order[: order.index(group)] for key in self._keyed(self._tensors(other))}
        return [storage for key, storage in self._keyed(self._tensors(group)).items() if key not in earlier]

    def _keyed(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.UntypedStorage]:
        keyed = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.device.type == self._device_type:  # torch AdamW's step counters are on the host
                keyed[storage._cdata] = storage
        return keyed

    def _tensors(self, group: StateGroup) -> Iterator[torch.Tensor]:
        match group:
            case StateGroup.WEIGHTS:
                for chunk in self._chunks:
                    yield from chunk.parameters()
            case StateGroup.GRADIENTS:
                for chunk in self._chunks if self._optimizer is not None else []:
                    for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
                        yield buffer.grad_data
            case StateGroup.OPTIMIZER:
                if self._optimizer is not None:
                    yield from self._optimizer.tensors(with_moments=not self._optimizer.on_host)


def memory_of(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [_bytes(one) for one in {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values()]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
