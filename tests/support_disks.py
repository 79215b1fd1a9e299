"""Disks that become full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(place: Path, size: str) -> Iterator[Path]:
    """A disk of this size, as `12m`, at the folder `place`. Skips the test where nothing can be mounted, except in CI."""
    place.mkdir(exist_ok=True)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no file system can be mounted here: {mounted.stderr}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(file: Path, leaving: int = 0) -> None:
    """Write to a file until its disk is full, then take `leaving` bytes away again."""
    with file.open("wb", buffering=0) as filler:
        with suppress(OSError):
            while filler.write(bytes(1 << 16)):
                pass
        filler.truncate(filler.tell() - leaving)
