"""Stand-in for `torch.cuda` without CUDA: what Megatron-Core calls in training."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

FloatTensor = torch.FloatTensor
HalfTensor = torch.HalfTensor
BFloat16Tensor = torch.BFloat16Tensor
OutOfMemoryError = torch.OutOfMemoryError


def current_device() -> torch.device:
    return torch.device("cpu")


def device_count() -> int:
    return 1


def is_available() -> bool:
    return False


def set_device(device: Any) -> None:
    """Do nothing: there is one device."""


def synchronize(device: Any = None) -> None:
    """Do nothing: CPU work is synchronous."""


def empty_cache() -> None:
    """Do nothing: the CPU allocator keeps no cache."""


# Megatron's "CUDA" random streams become states of the CPU generator.


class _DefaultGenerators:
    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


default_generators = _DefaultGenerators()


def manual_seed(seed: int) -> None:
    torch.manual_seed(seed)


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(state)


class random:
    get_rng_state = staticmethod(get_rng_state)


def _lazy_init() -> None:
    """Do nothing: there is no driver to start."""


def _lazy_call(callback: Callable[[], None]) -> None:
    callback()


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    yield


class Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def record_event(self) -> Event:
        return Event()

    def synchronize(self) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record(self, stream: Stream | None = None) -> None: ...

    def wait(self, stream: Stream | None = None) -> None: ...


_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _stream


def default_stream(device: Any = None) -> Stream:
    return _stream


@contextlib.contextmanager
def stream(which: Stream | None) -> Iterator[None]:
    yield


# Collectives over pieces of unequal size, which gloo does not support.


def ragged_all_gather(outputs: list[torch.Tensor], mine: torch.Tensor, group: Any) -> None:
    for rank, output in enumerate(outputs):
        if rank == group.rank():
            output.copy_(mine)
        if output.numel():
            dist.broadcast(output, group=group, group_src=rank)


def ragged_reduce_scatter(output: torch.Tensor, pieces: list[torch.Tensor], group: Any) -> None:
    for rank, piece in enumerate(pieces):
        total = piece.clone()
        if total.numel():
            dist.reduce(total, group=group, group_dst=rank)
        if rank == group.rank():
            output.copy_(total)


class nvtx:
    @staticmethod
    def range_push(message: str) -> None: ...

    @staticmethod
    def range_pop() -> None: ...


class amp:
    @staticmethod
    def custom_fwd(function: Any) -> Any:
        return function

    @staticmethod
    def custom_bwd(function: Any) -> Any:
        return function
