"""What SGLang writes outside of its own folder, kept in the engine's: it goes with that, however the engine ends."""

from __future__ import annotations

import logging
from pathlib import Path

_ERRORS = "errors"


def keep_files_in(folder: Path) -> None:
    """In each of the engine's processes, before SGLang does anything."""
    from sglang.srt.managers import load_snapshot

    # In /dev/shm, where SGLang has it, a start that fails leaves this file behind.
    load_snapshot.shm_path_for = lambda _: str(folder / "loads.shm")
    errors = logging.FileHandler(folder / _ERRORS)
    errors.setLevel(logging.ERROR)
    # Not on the root, whose handlers SGLang takes away: what it has there stays, and writes to the host's log.
    logging.getLogger("sglang").addHandler(errors)


def logged_error(folder: Path) -> str | None:
    """The end of the first error that the engine's processes have logged: the others follow from it."""
    try:
        text = (folder / _ERRORS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    _, _, failed = text.partition("Traceback (most recent call last):")
    # An exception's own lines are the first that stand at the margin again.
    lines = (line for line in failed.splitlines() if line and not line.startswith(" "))
    return next(lines, None) or next((line for line in text.splitlines() if line), None)
