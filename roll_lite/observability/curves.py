from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

from roll_lite.files import replacing
from roll_lite.observability.timers import OTHER, STEP

CURVES_FILE = "curves.png"
DOMAIN_COLORS = ("#3b6fb6", "#e07b39", "#3f9b62", "#b5497f", "#8a6bbf", "#8f7a3a", "#3a9aa6", "#c0504d", "#6b6b6b", "#9bb13c")
OVERALL_COLOR = "#222222"
PHASE_COLORS = ("#4c78a8", "#f2a65a", "#72b7a1", "#c66b6b", "#9d86b8", "#d9c36a", "#7f9fbf", "#b98b6b", "#94b06b", "#c08fb0")
OTHER_COLOR = "#c9c9c9"
WARNING_COLOR = "#b3541e"
SMOOTHING_STEPS = 30
"""Number of steps above which a curve also shows its running mean."""

FEW_POINTS = 4
"""Curves with fewer points get dots: a line through one is invisible."""

Records = Mapping[int, Mapping[str, float]]


@contextmanager
def drawing(path: Path, size: tuple[float, float], **pads: Any) -> Iterator[Any]:
    """Yield a figure of `size` (inches); after the block, write it to the file `path` atomically."""
    # Imported here: matplotlib takes a second. No pyplot: it would set a back end for the whole process.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=size, dpi=110, layout=ConstrainedLayoutEngine(**pads), facecolor="white")
    yield figure
    with replacing(path) as draft:
        figure.savefig(draft, format="png", metadata={"Software": None})


def draw_curves(path: Path, records: Records, domains: Sequence[str], title: str, warnings: Sequence[str] = ()) -> Path | None:
    """Draw curves into the file `path`, replaced atomically; None without metrics."""
    if not any(records.values()):
        return None
    with drawing(path, (14, 8), w_pad=0.1, h_pad=0.12) as figure:
        figure.suptitle(title, x=0.012, ha="left", fontsize=14, fontweight="bold")
        if warnings:
            text = f"look at: {', '.join(name.replace('_', ' ') for name in warnings)} (summary.json)"
            figure.text(0.988, 0.985, text, ha="right", va="top", fontsize=11, color=WARNING_COLOR)
        grid = figure.add_gridspec(2, 6, height_ratios=(1.25, 1))
        panels: list[tuple[Any, Callable[[Any, Records, Sequence[str]], None]]] = [
            (grid[0, :4], _accuracy),
            (grid[0, 4:], _reward),
            (grid[1, :2], _entropy_and_length),
            (grid[1, 2:4], _divergence),
            (grid[1, 4:], _time),
        ]
        for place, draw in panels:
            axes = figure.add_subplot(place)
            draw(axes, records, domains)
            _tidy(axes, first=min(records), last=max(records))
    return path


# ---------------------------------------------------------------- panels


def _accuracy(axes: Any, records: Records, domains: Sequence[str]) -> None:
    axes.set_title("accuracy: dots on held-out prompts, lines in training", loc="left")
    for name, prefix, color in _series(domains):
        steps, values = _points(records, f"{prefix}reward/accuracy")
        bold = name == "all"
        _curve(axes, steps, values, color, width=1.2, alpha=0.55)
        steps, values = _points(records, f"{prefix}validation/accuracy")
        label = f"{name}  {100 * values[0]:.0f}% → {100 * values[-1]:.0f}%" if len(values) > 1 else name
        size, line = (7, 2.6) if bold else (5, 1.6)
        axes.plot(steps, values, color=color, linewidth=line, marker="o", markersize=size, label=label, zorder=4)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    _legend(axes, ncols=2, loc="best")


def _reward(axes: Any, records: Records, domains: Sequence[str]) -> None:
    axes.set_title("mean score in training", loc="left")
    for name, prefix, color in _series(domains):
        steps, values = _points(records, f"{prefix}reward/mean")
        _curve(axes, steps, values, color, width=2.4 if name == "all" else 1.5, label=name)
    _legend(axes, loc="best")


def _entropy_and_length(axes: Any, records: Records, _: Sequence[str]) -> None:
    axes.set_title("entropy (nats) and response length (tokens)", loc="left")
    steps, values = _points(records, "actor/entropy")
    if not values:
        steps, values = _points(records, "actor/entropy_before")
    _curve(axes, steps, values, "#8a6bbf", label="entropy")
    axes.set_ylim(bottom=0)
    steps, lengths = _points(records, "rollout/response_length")
    if lengths:
        right = axes.twinx()
        _curve(right, steps, lengths, "#b98b3a", label="length, right")
        right.set_ylim(0, 1.25 * max(lengths) or 1)
        right.tick_params(labelsize=8, colors="#8f6a22", length=0)
        right.spines[:].set_visible(False)
        handles = [line for part in (axes, right) for line in part.get_legend_handles_labels()[0]]
        axes.legend(handles=handles, frameon=False, fontsize=8, loc="lower left")
    else:
        _legend(axes)


def _divergence(axes: Any, records: Records, _: Sequence[str]) -> None:
    axes.set_title("divergence (nats per token)", loc="left")
    curves = (
        ("actor/kl_ref", "KL to the reference", "#3b6fb6"),
        ("actor/approx_kl", "KL of the update", "#e07b39"),
        ("mismatch/mean", "engine - trainer, mean", "#3f9b62"),
        ("mismatch/k3", "engine - trainer, KL", "#9bb13c"),
    )
    drawn: list[float] = []
    for metric, label, color in curves:
        # A logarithmic axis has no place for zeros (with one update per batch the policy has not moved yet).
        points = [(step, value) for step, value in zip(*_points(records, metric), strict=True) if value > 0]
        if points:
            _curve(axes, [step for step, _ in points], [value for _, value in points], color, label=label)
            drawn += [value for _, value in points]
    if drawn:
        axes.set_yscale("log")
        axes.set_ylim(min(drawn) / 2, max(drawn) * 2)
        axes.minorticks_off()
    _legend(axes)


def _time(axes: Any, records: Records, _: Sequence[str]) -> None:
    axes.set_title("seconds of a step", loc="left")
    steps = [step for step in sorted(records) if f"time/{STEP}" in records[step]]
    names = {name: None for step in steps for name in records[step] if name.startswith("time/") and name.count("/") == 1}
    phases = [name.removeprefix("time/") for name in names if name not in (f"time/{STEP}", f"time/{OTHER}")]
    colors = dict(zip(phases, cycle(PHASE_COLORS))) | {OTHER: OTHER_COLOR}
    base = [0.0] * len(steps)
    for phase, color in colors.items():
        seconds = [records[step].get(f"time/{phase}", math.nan) for step in steps]
        top = [below + (own if math.isfinite(own) else 0.0) for below, own in zip(base, seconds, strict=True)]
        if steps:
            # Half a step on either side, so that a run of one step is visible.
            edges = [steps[0] - 0.5, *steps, steps[-1] + 0.5]
            low, high = ([line[0], *line, line[-1]] for line in (base, top))
            axes.fill_between(edges, low, high, step="mid", color=color, label=phase.replace("_", " "), linewidth=0)
        base = top
    if base:
        # The first steps include warm-up: without a limit, they would squeeze the others.
        usual = sorted(base)[math.ceil(0.9 * len(base)) - 1]
        axes.set_ylim(0, min(max(base), 1.6 * usual) * 1.3 or 1)
    _legend(axes, ncols=3, loc="upper center")


# ---------------------------------------------------------------- helpers for drawing


def _series(domains: Sequence[str]) -> list[tuple[str, str, str]]:
    own = [(domain, f"domain/{domain}/", color) for domain, color in zip(domains, cycle(DOMAIN_COLORS))]
    return own if len(own) == 1 else [*own, ("all", "", OVERALL_COLOR)]


def _points(records: Records, name: str) -> tuple[list[int], list[float]]:
    steps = [step for step in sorted(records) if math.isfinite(records[step].get(name, math.nan))]
    return steps, [records[step][name] for step in steps]


def _curve(
    axes: Any, steps: Sequence[int], values: Sequence[float], color: str, width: float = 1.8, alpha: float = 1.0, label: str | None = None
) -> None:
    smooth = _running_mean(values)
    if smooth is not values:
        axes.plot(steps, values, color=color, linewidth=0.7, alpha=0.25 * alpha)
    marker = "o" if len(values) < FEW_POINTS else None
    axes.plot(steps, smooth, color=color, linewidth=width, alpha=alpha, marker=marker, markersize=3, label=label if values else None)


def _running_mean(values: Sequence[float]) -> Sequence[float]:
    if len(values) <= SMOOTHING_STEPS or max(values) == min(values):
        return values
    half = max(1, len(values) // 20)
    sums = [0.0, *accumulate(values)]
    edges = [(max(0, place - half), min(len(values), place + half + 1)) for place in range(len(values))]
    return [(sums[right] - sums[left]) / (right - left) for left, right in edges]


def _legend(axes: Any, **options: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, **({"frameon": True, "framealpha": 0.8, "edgecolor": "none"} | options))
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", va="center", color="#999999")


def _tidy(axes: Any, first: int, last: int) -> None:
    axes.title.set_fontsize(10.5)
    axes.title.set_color("#333333")
    margin = 0.02 * max(1, last - first) + 0.5
    axes.set_xlim(first - margin, max(first + 1, last) + margin)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("step", fontsize=8, color="#555555", labelpad=1)
    axes.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, colors="#555555", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#bbbbbb")
