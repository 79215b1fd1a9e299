from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll_lite.config.problems import Problem
from roll_lite.config.validation import texts_in
from roll_lite.files import CONFIGS

KEPT = ("run_dir", "checkpoint.resume", "replay.path")
"""Settings with paths that must outlive the job's copy of the current folder."""


def not_uploaded(written: Mapping[str, Any], folder: Path) -> Iterator[Problem]:
    """Yield a problem for each `../` path and each relative path of a setting in KEPT, since Ray deletes the job's copy.
    `written`: settings, paths as given. `folder`: the configuration's folder."""
    if folder != CONFIGS and not Path(os.path.normpath(folder)).is_relative_to(Path.cwd()):
        message = "is not in the current folder, which is what is uploaded; change to one that holds it"
        yield Problem("--config-path", message, str(folder))
    for path, text in {"run_dir": "runs", **dict(texts_in(written))}.items():
        if text.startswith("../"):
            remedy = "start from the folder above, or name an absolute path of the cluster"
            yield Problem(path, f"leads out of the current folder, which is what is uploaded; {remedy}", text)
        elif path in KEPT and text != "auto" and text[:1] not in "/~" and "://" not in text:
            message = "would be in the job's copy of the current folder, which Ray deletes; name a folder that the cluster's nodes share"
            yield Problem(path, f"{message} (if they share this one: {Path.cwd() / text})", text)
