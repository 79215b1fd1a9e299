"""A program's folder on the disk, where no mount namespace gives it one of limited size that goes by itself."""

from __future__ import annotations

import os
import shutil
import subprocess

BLOCK = 512


def fits(folder: str, most_bytes: int, most_files: int) -> bool:
    """A program may be at work in it meanwhile: what has gone does not count."""
    taken = seen = 0
    waiting = [folder]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    else:
                        taken += entry.stat(follow_symlinks=False).st_blocks * BLOCK
                    if seen > most_files or taken > most_bytes:
                        return False
        except OSError:
            continue
    return True


def remove_folder(folder: str) -> None:
    """Also one nested more deeply than Python recurses. Nothing where there is none."""
    try:
        shutil.rmtree(folder, ignore_errors=True)
    except RecursionError:
        subprocess.run(["rm", "-rf", folder], check=False)
