"""Sweeps: several runs, a process each, and a table of results."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roll_lite.config.arithmetic_tables import table
from roll_lite.config.problems import hidden
from roll_lite.config.schema.base import LATEST
from roll_lite.config.schema.run import RunConfig
from roll_lite.observability.report import EVALUATION_FILE, OVERALL, SUMMARY_FILE

INTERRUPTED, PREEMPTED = 130, 75


@dataclass(frozen=True)
class Choice:
    overrides: Sequence[str]
    config: RunConfig


def run_each(command: Sequence[str], choices: Sequence[Choice]) -> int:
    """Run `command` with each choice's overrides until one is interrupted; print a table of results. Return the first nonzero exit code, or
    0."""
    rows, codes = [], []
    for number, choice in enumerate(choices, start=1):
        settings = " ".join(map(hidden, choice.overrides))
        sys.stderr.write(f"run {number} of {len(choices)}: {settings}\n")
        started = time.monotonic()
        before = _latest(choice.config)
        codes.append(run_forwarding_signals([*command, *choice.overrides]))
        folder = _latest(choice.config)
        end, accuracy = _summary(folder) if folder is not None and folder != before else ("did not start", "")
        seconds = f"{time.monotonic() - started:.0f}"
        rows.append([settings, str(codes[-1]), end, seconds, accuracy, str(folder) if folder != before else ""])
        if codes[-1] in (INTERRUPTED, PREEMPTED):
            break
    sys.stdout.write(f"\n{table(['overrides', 'exit', 'end', 'seconds', 'accuracy', 'folder'], rows)}\n")
    return next((code for code in codes if code), 0)


def run_forwarding_signals(command: Sequence[str], **options: Any) -> int:
    """Run a command; forward SIGTERM and SIGHUP (Ctrl-C reaches it from the terminal). `options`: of subprocess.Popen."""
    with subprocess.Popen(command, **options) as process:
        before = {number: signal.signal(number, lambda got, _: process.send_signal(got)) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            while True:
                try:
                    return process.wait()
                except KeyboardInterrupt:  # the terminal sends it to the command too
                    continue
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _latest(config: RunConfig) -> Path | None:
    link = config.run_dir / LATEST
    return link.resolve() if link.is_symlink() else None


def _summary(folder: Path) -> tuple[str, str]:
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "no summary", ""
    times = ("before",) if (folder / EVALUATION_FILE).exists() else ("before", "after")
    shares = [summary["accuracy"][OVERALL][when] for when in times]
    return str(summary["exit"]), " -> ".join("?" if share is None else f"{share:.1%}" for share in shares)
