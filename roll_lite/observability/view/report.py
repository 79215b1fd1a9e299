"""Write a run as one HTML file: the viewer's page with its data embedded."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import to_json

from roll_lite.files import write_whole
from roll_lite.observability.metric_table import METRICS
from roll_lite.observability.view.runs import PAGE, Run, find_runs

REPORT_FILE = "report.html"
STEPS, VALIDATIONS = 6, 2
"""Training steps and validations whose samples are shown, evenly spread."""
SAMPLES = 24
"""Samples shown per step and domain. Groups that begin among them are shown whole."""
LONGEST_TEXT = 4000
POINTS = 300
REFERENCE = re.compile(r'<(?:link rel="stylesheet" href|script src)="page/([\w.]+)">(?:</script>)?')
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline';
img-src data: blob:">"""


def write_reports(places: Sequence[Path]) -> int:
    code = 0
    try:
        folders = find_runs(places).values()
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    for folder in folders:
        try:
            path = write_report(folder)
        except (ValueError, OSError, yaml.YAMLError) as error:  # the other runs get theirs
            sys.stderr.write(f"{folder}: no report: {error}\n")
            code = 2
        else:
            sys.stdout.write(f"{path}\n")
    return code


def write_report(folder: Path) -> Path:
    def inside(reference: re.Match[str]) -> str:
        text, tag = (PAGE / reference[1]).read_text(encoding="utf-8"), "style" if reference[1].endswith(".css") else "script"
        return f"<{tag}>{text}</{tag}>"

    path = folder.resolve() / REPORT_FILE
    data = content(Run(f"{path.parent.parent.name}/{path.parent.name}", folder))
    text = to_json(data, inf_nan_mode="null").decode().replace("<", "\\u003c")
    page = REFERENCE.sub(inside, (PAGE / "view.html").read_text(encoding="utf-8"))
    write_whole(path, page.replace("<!-- content -->", f'{POLICY}<script type="application/json" id="content">{text}</script>', 1))
    return path


def content(run: Run) -> dict[str, Any]:
    """Data that the page would otherwise request from the server."""
    status = run.status()
    steps = status["steps"]
    shown = [*_spread(run.folder, "step", STEPS), *_spread(run.folder, "validation", VALIDATIONS)]
    samples = [record for file in shown for record in _some(run, file, status["domains"])]
    with_samples = {record["step"] for record in samples if record["kind"] == "step"}
    newest = {record["domain"]: (record["step"], record["group"]) for record in samples if record["kind"] == "step"}
    return {
        "runs": [status],
        "metrics": METRICS,
        "series": run.series(status["metrics"], every=_every(len(run.records()))),
        "config": run.config(),
        "samples": samples,
        "tokens": {f"{step} {group}": run.tokens(step, group) for step, group in newest.values()},
        "phases": {step: run.phases(step) for step in sorted({*steps[:: _every(len(steps))], *with_samples})},
        "lanes": {step: run.lanes(step) for step in with_samples},
        "processes": run.processes(),
    }


def _every(count: int) -> int:
    return max(1, ceil((count - 1) / (POINTS - 1)))  # the last is kept besides each n-th


def _spread(folder: Path, kind: str, most: int) -> list[Path]:
    files = sorted((folder / "samples").glob(f"{kind}_*.jsonl"))
    places = {round(number * (len(files) - 1) / (most - 1)) for number in range(most)} if files else set()
    return [files[place] for place in sorted(places)]


def _some(run: Run, file: Path, domains: list[str]) -> Iterator[dict[str, Any]]:
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
