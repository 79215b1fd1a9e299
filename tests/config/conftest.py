"""A small project on disk with a configuration that is right."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from config_project import VALID, Project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    one = Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    one.write("configs/run.yaml", VALID)
    one.write("train.jsonl", '{"prompt": "1+1=", "answer": "2"}\n')
    one.write("held_out.jsonl", '{"prompt": "1+2=", "answer": "3"}\n')
    one.write_model("model")
    monkeypatch.setattr(sys, "path", [*sys.path])
    known = set(sys.modules)
    yield one
    for name in set(sys.modules) - known:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
