"""A device whose streams compute as late as they may: only when somebody waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LateStream:
    def __init__(self) -> None:
        self.queued: list[Callable[[], Any]] = []

    def wait_stream(self, other: LateStream) -> None:
        other.synchronize()

    @torch.no_grad()
    def synchronize(self) -> None:
        queued, self.queued = self.queued, []
        for work in queued:
            work()


class LateEvent:
    def record(self, stream: LateStream) -> None:
        self._stream = stream

    def wait(self, stream: LateStream) -> None:
        self._stream.synchronize()

    synchronize = property(lambda self: self._stream.synchronize)


class _Queue(TorchDispatchMode):
    """Queues what writes to a tensor."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.endswith("_"):
            return func(*args, **kwargs or {})
        self._stream.queued.append(lambda: func(*args, **kwargs or {}))
        return args[0]


class LateDevice:
    """In the place of torch.cuda."""

    Stream, Event = LateStream, LateEvent

    def __init__(self) -> None:
        self.main = LateStream()

    def current_stream(self) -> LateStream:
        return self.main

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        with _Queue(stream), torch.no_grad():
            yield
