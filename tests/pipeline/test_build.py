"""What the processes of a run find in their environment."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from roll_lite.pipeline.build import QUIET, Starter


def environment() -> dict[str, str]:
    starter: Any = SimpleNamespace(session=SimpleNamespace(log_folder=None), config=SimpleNamespace(limits=SimpleNamespace(other=0.0)))
    return dict(Starter.spec(starter, "actor_infer", []).env)


def test_nothing_reports_home_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    assert environment() == QUIET
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert environment() == QUIET | {"HF_HUB_OFFLINE": "0"}
