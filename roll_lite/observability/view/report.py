"""A run as one HTML file: the viewer's page with its content inside, at rest."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from roll_lite.files import write_whole
from roll_lite.observability.view.runs import PAGE, Run, meanings

REPORT_FILE = "report.html"
STEPS, VALIDATIONS = 6, 2
"""Numbers of training steps and validations, evenly spread, whose samples are shown."""
SAMPLES = 24
"""Samples of a domain in each of them; groups stay whole."""
LONGEST_TEXT = 4000
POINTS = 300
"""Points of a curve."""
STYLES, SCRIPTS = ("uPlot.min.css", "view.css"), ("uPlot.iife.min.js", "parts.js", "view.js")


def write_report(folder: Path, path: Path | None = None) -> Path:
    """Write the report of the run in `folder`; returns its path."""
    path = path or folder / REPORT_FILE
    write_whole(path, _html(content(Run(f"{folder.resolve().parent.name}/{folder.resolve().name}", folder))))
    return path


def content(run: Run) -> dict[str, Any]:
    """Answers to what the page would ask the server for, by question."""
    status = run.status()
    steps = status["steps"]
    shown = [*_spread(run.folder, "step", STEPS), *_spread(run.folder, "validation", VALIDATIONS)]
    samples = [record for file in shown for record in _some(run, file, status["domains"])]
    newest = {record["domain"]: (record["step"], record["group"]) for record in samples if record["kind"] == "step"}
    return {
        "runs": [status],
        "metrics": meanings(),
        "series": run.series(status["metrics"], every=max(1, len(run.records()) // POINTS)),
        "config": run.config(),
        "samples": samples,
        "tokens": {f"{step} {group}": run.tokens(step, group) for step, group in newest.values()},
        "phases": {step: run.phases(step) for step in steps[:: max(1, len(steps) // POINTS)]},
    }


def _spread(folder: Path, kind: str, most: int) -> list[Path]:
    files = sorted((folder / "samples").glob(f"{kind}_*.jsonl"))
    places = {round(number * (len(files) - 1) / (most - 1)) for number in range(most)} if files else set()
    return [files[place] for place in sorted(places)]


def _some(run: Run, file: Path, domains: list[str]) -> Iterator[dict[str, Any]]:
    """First groups of each domain in a file of samples."""
    counts, groups, missing = Counter[str](), set(), set(domains)
    for record in run.samples(file.name):
        domain, group = record["domain"], record["group"]
        if counts[domain] < SAMPLES or group in groups:
            counts[domain] += 1
            groups.add(group)
            yield _shortened(record)
        else:
            missing.discard(domain)
            if not missing:
                return


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shortened(item) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[:LONGEST_TEXT]} … ({len(value) - LONGEST_TEXT:,} more characters)"
    return value


def _html(data: dict[str, Any]) -> str:
    """The page with styles, scripts and data inside; only these scripts may run."""
    files = {name: (PAGE / name).read_text(encoding="utf-8") for name in (*STYLES, *SCRIPTS, "view.html")}
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(files[name].encode()).digest()).decode()}'" for name in SCRIPTS)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src {hashes}"
    text = to_json(data, inf_nan_mode="null").decode().replace("<", "\\u003c")
    head = [f'<meta http-equiv="Content-Security-Policy" content="{policy}">', *(f"<style>{files[name]}</style>" for name in STYLES)]
    body = [f'<script type="application/json" id="content">{text}</script>', *(f"<script>{files[name]}</script>" for name in SCRIPTS)]
    before, _, rest = files["view.html"].partition("<!-- styles -->")
    middle, _, _ = rest.partition("<!-- scripts -->")
    return "".join([before, *head, middle.partition("<!-- /styles -->")[2], *body, "\n</body>\n</html>\n"])
