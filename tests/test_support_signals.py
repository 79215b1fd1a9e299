"""Tests that send signals run where a shell ignores them, as under nohup."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN, "as it was"
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ignored", "signals_arrive")
def test_signals_arrive_where_a_shell_ignores_them() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
