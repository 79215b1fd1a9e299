from __future__ import annotations

import itertools

import pytest

from roll_lite.distributed.weight_sync import devices


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each member has one of its own."""
    numbers = itertools.count()
    monkeypatch.setattr(devices, "this_machine", lambda: f"machine {next(numbers)}")
