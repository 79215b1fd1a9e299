"""Terminal output of a run: one line per step, a table at the end."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.text import Text

from roll_lite.config.arithmetic_tables import table
from roll_lite.observability.health import Finding
from roll_lite.observability.report import OVERALL, Measures, Results, accuracy_change, largest_k
from roll_lite.observability.timers import OTHER, STEP

PLAIN_WIDTH = 100
HEADER_EVERY = 20
PROGRESS_EVERY_S = 10.0
START_OF_LINE = "\r\x1b[2K"
DOMAIN_WIDTH = 10
SMALLEST_CHANGE = 0.05
"""Changes of accuracy below this many percentage points are shown as 0."""
SHORT_PHASES = {
    "sync_weights": "sync",
    "generate": "gen",
    "log_probs": "logp",
    "advantages": "adv",
    "write_batch": "files",
    "validate": "eval",
    "checkpoint": "save",
}


@dataclass(frozen=True)
class Cell:
    title: str
    subtitle: str
    text: str
    width: int
    style: str = ""
    gap: int = 2


class _LastingConsole(Console):
    """Console that stops printing when its reader is gone (`| head`, a closed terminal)."""

    _shown = False

    def print(self, *objects: Any, **options: Any) -> None:
        self.take_back()
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def show(self, line: str) -> None:
        """Show a temporary line in place of the previous one."""
        self._shown = True
        self._write(f"{START_OF_LINE}{line}")

    def take_back(self) -> None:
        if self._shown:
            self._shown = False
            self._write(START_OF_LINE)

    def _write(self, text: str) -> None:
        if self.quiet:
            return
        try:
            self.file.write(text)
            self.file.flush()
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        if self.quiet:
            return
        self.quiet = True
        with suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.file.fileno())  # otherwise flushing buffered output would fail at exit
            os.close(nowhere)
            sys.stderr.write("nobody reads the output any more; the run goes on\n")


class RunConsole:
    def __init__(self, domains: Sequence[str], total_steps: int, stream: TextIO | None = None, width: int | None = None) -> None:
        self._console = _LastingConsole(file=stream, highlight=False, emoji=False, markup=False)
        if width or not self._console.is_terminal:
            self._console.width = width or PLAIN_WIDTH
        self._domains = list(domains)
        self._total = total_steps
        self._step = 0
        self._phases: list[str] = []
        self._columns = 0
        self._lines = 0
        self._clock = time.monotonic
        self._last_progress = 0.0

    def message(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context for calls of `progress`; clears the progress line at the end."""
        self._last_progress = self._clock()
        try:
            yield
        finally:
            self._console.take_back()

    def progress(self, label: str, domains: Mapping[str, tuple[int, int, int]]) -> None:
        """Show the progress of a batch or validation: on terminals in a temporary line, else a line every 10 s. `domains`: {domain:
        (generated, scored, wanted samples)}."""
        parts = [f"{name} {generated}/{wanted} ({scored} scored)" for name, (generated, scored, wanted) in domains.items()]
        line = f"{label}: {', '.join(parts)}"
        if self._console.is_terminal:
            self._console.show(_shortened(line, self._console.width - 1))
        elif self._clock() - self._last_progress >= PROGRESS_EVERY_S:
            self._last_progress = self._clock()
            self.message(line)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        for name in metrics:
            kind, _, phase = name.partition("/")
            if kind == "time" and phase not in (STEP, OTHER, *self._phases) and "/" not in phase:
                self._phases.append(phase)
        speed = Cell("tok/s", "", _thousands(metrics.get("rollout/tokens_per_second")), 5)
        total = Cell("step", "s", _seconds(metrics.get(f"time/{STEP}")), 5)
        phases = [
            Cell(_shortened(SHORT_PHASES.get(phase, phase), 5), "s", _seconds(metrics.get(f"time/{phase}")), 5, "dim", gap=1)
            for phase in self._phases
        ]
        self._step = step
        self._line(f"{step}/{self._total}", self._scores(metrics, "reward/mean", "reward/accuracy"), [speed, total, *phases])

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show validation results in columns under the step's line if `step` is the latest, else as sentences."""
        k = largest_k(metrics)
        measures = {"held-out": ("validation/reward", "validation/accuracy")}
        if k is not None:
            measures |= {f"pass@{k}": (f"validation/best@{k}", f"validation/pass@{k}")}
        if f"validation/maj@{k}" in metrics:
            measures |= {f"maj@{k}": ("", f"validation/maj@{k}")}
        for label, (score, share) in measures.items():
            if self._columns and step == self._step:
                self._line(label, self._scores(metrics, score, share), [], style="bold")
                continue
            parts = [("all", ""), *((domain, f"domain/{domain}/") for domain in self._domains)]
            shares = ", ".join(f"{title} {_number(metrics.get(prefix + share), '.0%')}" for title, prefix in parts)
            what = "held-out accuracy" if label == "held-out" else f"held-out {label}"
            self.message(f"{what} {'before training' if step == 0 else f'at step {step}'}: {shares}")

    def finish(self, change: Measures, findings: Iterable[Finding]) -> None:
        """Show held-out accuracy before and after training, and repeat the warnings."""
        if (held_out := change.get(OVERALL)) is not None:
            k = largest_k(f"validation/{name}" for name in held_out)
            further = {name: held_out[name] for name in (f"pass@{k}", f"maj@{k}") if name in held_out}
            overall, *domains = accuracy_change(change, self._domains).items()
            rows = []
            for name, measured in [*domains, overall, *further.items()]:
                before, after = measured["before"], measured["after"]
                points = None if before is None or after is None else 100 * (after - before)
                if points is not None and abs(points) < SMALLEST_CHANGE:
                    points = 0.0
                rows.append([name, _number(before, ".1%"), _number(after, ".1%"), _number(points, "+.1f")])
            self.message(f"\n{table(('held-out', 'before', 'after', 'change'), rows, numbers=True)}\n")
        for finding in findings:
            self.message(f"warning, {finding.steps} step(s) from step {finding.first_step} on: {finding.message}", style="yellow")

    def evaluation(self, results: Results) -> None:
        """Show a table of metrics with a row for each domain, each part of a domain (one value of a `report_by` column), and all domains
        together."""
        overall = results[OVERALL]
        k = largest_k(f"validation/{name}" for name in overall)
        shares = [name for name in (f"pass@{k}", f"maj@{k}") if name in overall]
        means = [name for name in ("reward", f"best@{k}", "turns", "tool_errors") if name in overall]
        ends = ["truncated", *(["max_turns"] if "turns" in overall else [])]
        counts = ["prompts", "samples", *(["failed"] if overall.get("failed") else [])]
        header = ("held-out", "accuracy", "±", *shares, *(name.replace("_", " ") for name in (*means, *ends)), "tokens", *counts)
        rows = []
        for name, of in [*(one for one in results.items() if one[0] != OVERALL and "samples" in one[1]), (OVERALL, overall)]:
            domain, _, part = name.partition("/")
            rows.append(
                [
                    f"  {part}" if part else domain,
                    *(_number(of.get(share), ".1%") for share in ("accuracy", "accuracy_error", *shares)),
                    *(_number(of.get(mean), ".2f") for mean in means),
                    *(_number(of.get(end), ".1%") for end in ends),
                    _thousands(of.get("response_tokens")),
                    *(f"{of[count]:.0f}" if count in of else "" for count in counts),
                ]
            )
        self.message(f"\n{table(header, rows, numbers=True)}\n")
        self.message(f"± one standard error, by prompt; {_thousands(overall['tokens_per_second'])} tokens/s")

    def closing_line(self, steps: int | None, resumed_after: int, seconds: float, folder: Path) -> None:
        """Show steps, time and folder. `steps`: last step; None after an evaluation. `resumed_after`: step after which the run was resumed,
        or 0."""
        done = f"steps {resumed_after + 1} to {steps}" if resumed_after else f"{steps} step{'' if steps == 1 else 's'}"
        minutes, rest = divmod(round(seconds), 60)
        hours, minutes = divmod(minutes, 60)
        duration = f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
        self.message(f"{'evaluated' if steps is None else done} in {duration}; everything is in {folder}")

    # ------------------------------------------------------------ layout

    def _scores(self, metrics: Mapping[str, float], reward: str, accuracy: str) -> list[Cell]:
        cells = []
        for title, prefix in [("all", ""), *((domain, f"domain/{domain}/") for domain in self._domains)]:
            score, share = metrics.get(prefix + reward), metrics.get(prefix + accuracy)
            text, style = f"{_number(score, '.2f')} {_number(share, '.0%'):>4}", "dim"
            if share is not None and not math.isnan(share):
                style = "red" if share < 1 / 3 else "yellow" if share < 2 / 3 else "green"
            cells.append(Cell(_shortened(title, DOMAIN_WIDTH), "score  acc", text, DOMAIN_WIDTH, style))
        return cells

    def _line(self, label: str, scores: Sequence[Cell], times: Sequence[Cell], style: str = "") -> None:
        first = max(8, 2 * len(str(self._total)) + 1)
        room = self._console.width - first
        together = [*scores, *times]
        fits = sum(cell.gap + cell.width for cell in together) <= room
        rows = [together] if fits else [*_wrapped(scores, room), *_wrapped(times, room)]
        if times and (self._lines % HEADER_EVERY == 0 or len(together) != self._columns):
            self._lines, self._columns = 0, len(together)
            for row in rows:
                for titles in ([cell.title for cell in row], [cell.subtitle for cell in row]):
                    line = "".join(f"{'':{cell.gap}}{title:>{cell.width}}" for cell, title in zip(row, titles, strict=True))
                    self._console.print(Text(" " * first + line.rstrip(), style="dim"), soft_wrap=True)
        for number, row in enumerate(rows):
            text = Text(f"{label if number == 0 else '':>{first}}", style=style)
            for cell in row:
                text.append(" " * cell.gap).append(f"{cell.text:>{cell.width}}", style=cell.style)
            self._console.print(text, soft_wrap=True)
        self._lines += 1


def _wrapped(cells: Sequence[Cell], width: int) -> list[list[Cell]]:
    rows: list[list[Cell]] = []
    left = 0
    for cell in cells:
        if not rows or left < cell.gap + cell.width:
            rows.append([])
            left = width
        rows[-1].append(cell)
        left -= cell.gap + cell.width
    return rows


def _shortened(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else format(value, form)


def _seconds(value: float | None) -> str:
    return _number(value, ".2f" if value is None or value < 10 else ".1f" if value < 1000 else ".0f")


def _thousands(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0f}" if value < 1000 else f"{value / 1000:.1f}k" if value < 1e6 else f"{value / 1e6:.1f}M"
