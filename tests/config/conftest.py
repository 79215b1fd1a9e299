"""A small project on disk with a configuration that is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_project import VALID, Project


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    one = Project(tmp_path)
    monkeypatch.chdir(tmp_path)
    one.write("configs/run.yaml", VALID)
    one.write("train.jsonl", '{"prompt": "1+1=", "answer": "2"}\n')
    one.write("held_out.jsonl", '{"prompt": "1+2=", "answer": "3"}\n')
    one.write_model("model")
    return one
