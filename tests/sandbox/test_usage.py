"""What a program uses, counted while it goes on."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from roll_lite.sandbox.usage import Usage


def test_a_lock_that_is_made_while_files_are_counted_is_as_large_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a file is deleted, open and mapped; without an open file a mapping counts as the largest file that is allowed."""
    usage, largest, made = Usage(None, namespaces=False), 16 << 20, list[Any]()
    usage.begin({"file_bytes": largest, "folder_bytes": 64 << 20, "folder_files": 100}, str(tmp_path))
    listed = os.listdir

    def make_one_after(folder: str) -> list[str]:
        names = listed(folder)
        if folder.endswith("fd") and not made:
            with tempfile.TemporaryFile(dir=tmp_path) as file:
                file.truncate(64)
                made.append(mmap.mmap(file.fileno(), 64))
        return names

    monkeypatch.setattr(os, "listdir", make_one_after)
    assert usage._open_files([os.getpid()])[0] < largest and len(made) == 1
    assert usage._open_files([os.getpid()])[0] < largest, "it is open"
    made[0].close()
