from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from roll_lite.files import write_json
from roll_lite.hub import config_notation
from roll_lite.observability.health import Finding
from roll_lite.observability.run_folder import CONFIG_FILE

OVERALL = "overall"
SUMMARY_FILE = "summary.json"
EVALUATION_FILE = "evaluation.json"
HELD_OUT = re.compile(r"(?:domain/(?P<where>.+)/)?validation/(?P<metric>[^/]+)", re.DOTALL)
PASS_AT = re.compile(r"validation/pass@(\d+)")

BeforeAfter = dict[str, dict[str, float | None]]
"""{metric: {"before": value in the first validation, "after": value in the last}}."""
Measures = dict[str, BeforeAfter]
"""{subset of the validation samples: its metrics}. Subsets: `overall`, a domain (`math`), or its samples with one value of a `report_by`
column (`math/level:5`)."""


def held_out_change(before: Mapping[str, float], after: Mapping[str, float]) -> Measures:
    change: Measures = {}
    for name in {**before, **after}:
        if (known := HELD_OUT.fullmatch(name)) is not None:
            change.setdefault(known["where"] or OVERALL, {})[known["metric"]] = {"before": before.get(name), "after": after.get(name)}
    return change


def accuracy_change(change: Measures, domains: Iterable[str]) -> BeforeAfter:
    unknown: dict[str, float | None] = {"before": None, "after": None}
    return {where: change.get(where, {}).get("accuracy", unknown) for where in (OVERALL, *domains)}


Results = dict[str, dict[str, float]]
"""{subset of the validation samples (see Measures): {metric: value}}."""


def write_evaluation(folder: Path, model: Path, metrics: Mapping[str, float]) -> Results:
    results: Results = {OVERALL: {}}
    for name, value in metrics.items():
        if (known := HELD_OUT.fullmatch(name)) is not None and not known["metric"].startswith("version"):
            results.setdefault(known["where"] or OVERALL, {})[known["metric"]] = value
    config = hashlib.sha256((folder / CONFIG_FILE).read_bytes()).hexdigest()
    evaluation = {"model": config_notation(model), "config_sha256": config, "results": results}
    write_json(folder / EVALUATION_FILE, evaluation)
    return results


def largest_k(metrics: Iterable[str]) -> int | None:
    found = [int(known[1]) for name in metrics if (known := PASS_AT.fullmatch(name)) is not None]
    return max(found, default=None)


def write_summary(
    folder: Path,
    *,
    domains: Iterable[str],
    validation: Measures,
    steps: int,
    wall_s: Mapping[str, float],
    tokens: Mapping[str, float],
    exit_state: str,
    resumed_after: int = 0,
    findings: Iterable[Finding] = (),
) -> Path:
    """Replace summary.json atomically. `steps` includes earlier runs, `wall_s` (seconds by phase, and `total`) and `tokens` do not."""
    assert exit_state in ("running", "completed", "interrupted") or exit_state.startswith("failed: "), exit_state
    assert "total" in wall_s, "wall_s needs the total"
    summary = {
        "accuracy": accuracy_change(validation, domains),
        "validation": validation,
        "steps": steps,
        "resumed_after": resumed_after,
        "wall_s": {phase: round(seconds, 3) for phase, seconds in wall_s.items()},
        "tokens": dict(tokens),
        "warnings": [asdict(finding) for finding in findings],
        "exit": exit_state,
    }
    path = folder / SUMMARY_FILE
    write_json(path, summary)
    return path


class LivePicture:
    """Redraws the run's curves in a thread after changes, at most every `every_s` seconds."""

    def __init__(self, draw: Callable[[], object], every_s: float = 30.0) -> None:
        self._draw = draw
        self._every_s = every_s
        self._changed, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="picture", daemon=True)

    def changed(self) -> None:
        self._changed.set()
        if not self._thread.is_alive() and not self._over.is_set():
            self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while self._changed.wait() and not self._over.is_set():
            self._changed.clear()
            with suppress(OSError):  # the last drawing, at the end of the run, raises the error
                self._draw()
            self._over.wait(self._every_s)


class LiveReport:
    """Starts a low-priority process that writes report.html every `every` steps (0: never), unless one still runs."""

    def __init__(self, folder: Path, every: int) -> None:
        self._folder = folder
        self._every = every
        self._process: subprocess.Popen[bytes] | None = None

    def step_done(self, step: int) -> None:
        if self._every and step % self._every == 0 and (self._process is None or self._process.poll() is not None):
            command = ["nice", "-n", "19", sys.executable, "-m", "roll_lite.cli", "report", str(self._folder)]
            nowhere = subprocess.DEVNULL
            self._process = subprocess.Popen(command, stdin=nowhere, stdout=nowhere, stderr=nowhere, start_new_session=True)

    def close(self) -> None:
        """End the process: the run writes its last report itself."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            for draft in self._folder.glob("report.html.*.partial"):
                draft.unlink()
