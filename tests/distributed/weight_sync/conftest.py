from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from roll_lite.distributed.weight_sync import group
from roll_lite.distributed.weight_sync.broadcast import _Broadcasts
from roll_lite.distributed.weight_sync.plan import Route


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member has one of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(group, "this_machine", lambda: f"machine {next(numbers)}")


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that have left each member by broadcasts, counted once for each receiver."""
    counted: Counter[int] = Counter()
    broadcast = _Broadcasts._broadcast

    def counting(self: _Broadcasts, route: Route, buffer: torch.Tensor) -> None:
        broadcast(self, route, buffer)
        if self._group.number == route.sender:
            counted[route.sender] += buffer.nbytes * len(route.receivers)

    monkeypatch.setattr(_Broadcasts, "_broadcast", counting)
    return counted
