from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

from roll_lite.observability.curves import DOMAIN_COLORS, drawing
from roll_lite.simulator.engine import Span
from roll_lite.simulator.simulation import SimulatedRun

VERSION_COLORS = ("#3b6fb6", "#e07b39", "#3f9b62", "#b5497f", "#8a6bbf", "#c9a227")
PHASE_COLORS = {"train": "#444444", "hold": "#f0b4b4", "sync": "#d62728", "move": "#bbbbbb"}
"""Phases: training, draining, weight update, and loading or offloading of engines."""
MOST_ROWS = 96
"""Maximum request slots drawn one per row. With more slots, each engine gets one row, paler when fewer requests run."""
COLUMNS = 1400


def draw_engines(
    path: Path, outcomes: Sequence[SimulatedRun], titles: Sequence[str], by: str = "version", until: float | None = None
) -> None:
    """Draw one panel per simulated run on a common time axis. `by`: what colours show, "version" (of weights) or "domain". `until`: end of
    the axis in seconds."""
    end = until or max(outcome.steps[-1].end for outcome in outcomes)
    rows = [engines * slots for engines, slots in map(_layout, outcomes)]
    heights = [0.7 + 2.2 * min(1.0, (count / 32) ** 0.5) for count in rows]
    with drawing(path, (12, 0.4 + sum(heights)), h_pad=0.08) as figure:
        panels = figure.subplots(len(outcomes), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, outcome, title in zip(panels, outcomes, titles, strict=True):
            _panel(axes, outcome, title, by, end)
        panels[-1].set_xlabel("seconds", fontsize=8, color="#555555")


def _layout(outcome: SimulatedRun) -> tuple[int, int]:
    """(engines, rows of each)."""
    slots, engines = outcome.scenario.limits.slots, 1 + max((span.engine for span in outcome.spans), default=0)
    return engines, slots if engines * slots <= MOST_ROWS else 1


def _panel(axes: Any, outcome: SimulatedRun, title: str, by: str, end: float) -> None:
    slots, (engines, each) = outcome.scenario.limits.slots, _layout(outcome)
    rows, single = engines * each, each == slots
    axes.set_title(title, loc="left", fontsize=10, color="#333333")
    colors: dict[Any, str] = defaultdict(str) | dict(zip(range(len(outcome.steps) + 1), cycle(VERSION_COLORS)))
    if by == "domain":
        colors = dict(zip((model.name for model in outcome.scenario.domains), cycle(DOMAIN_COLORS)))
    if single:
        _bars(axes, outcome.spans, slots, by, colors)
    else:
        image = _image(outcome.spans, rows, slots, by, colors, end)
        axes.imshow(image, extent=(0, end, rows - 0.5, -0.5), aspect="auto", interpolation="nearest")
    trainer = rows + 0.06 * rows
    height = 0.05 * rows + 0.35
    for phase in outcome.phases:
        axes.barh(trainer, phase.end - phase.start, left=phase.start, height=height, color=PHASE_COLORS[phase.name], linewidth=0)
        if phase.name == "sync" and phase.start > 0:
            axes.axvline(phase.end, color=PHASE_COLORS["sync"], linewidth=0.8, alpha=0.7)
    for at, number in outcome.deaths:
        axes.plot(at, number * each + (each - 1) / 2, marker="x", color="black", markersize=7)
    axes.set_xlim(0, end)
    axes.set_ylim(trainer + height, -0.6)
    if single:
        axes.set_yticks([*(engine * slots + (slots - 1) / 2 for engine in range(engines)), trainer])
        axes.set_yticklabels([*(f"engine {engine}" for engine in range(engines)), "trainer"])
        for engine in range(1, engines):
            axes.axhline(engine * slots - 0.5, color="white", linewidth=2)
    else:
        axes.set_yticks([0, rows - 1, trainer])
        axes.set_yticklabels(["engine 0", f"engine {rows - 1}", "trainer"])
    if by == "domain":
        for name, color in colors.items():
            axes.plot([], [], color=color, linewidth=6, label=name)
        axes.legend(fontsize=8, frameon=False, ncols=len(colors), loc="lower right", bbox_to_anchor=(1, 1))
    axes.tick_params(labelsize=8, colors="#555555", length=0)
    axes.spines[:].set_visible(False)


def _bars(axes: Any, spans: Sequence[Span], slots: int, by: str, colors: dict[Any, str]) -> None:
    found: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        found[span.engine * slots + span.slot].append(span)
    for row, ones in found.items():
        axes.broken_barh(
            [(span.start, span.end - span.start) for span in ones],
            (row - 0.42, 0.84),
            facecolors=[colors[getattr(span, by)] for span in ones],
            edgecolors="white",
            linewidth=0.3,
        )


def _image(spans: Sequence[Span], rows: int, slots: int, by: str, colors: dict[Any, str], end: float) -> np.ndarray:
    amount = np.zeros((rows, COLUMNS + 1, 4))  # changes by column: red, green, blue, number
    rgb = {key: np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)]) for key, color in colors.items()}
    for span in spans:
        first, last = (min(COLUMNS, int(at / end * COLUMNS)) for at in (span.start, span.end))
        value = np.append(rgb[getattr(span, by)], 1.0)
        amount[span.engine, first] += value
        amount[span.engine, last] -= value
    running = np.cumsum(amount, axis=1)[:, :COLUMNS]
    count = running[..., 3:]
    mixed = running[..., :3] / np.maximum(count, 1)
    shade = np.clip(count / slots, 0, 1) ** 0.6
    return np.clip(shade * mixed + (1 - shade), 0, 1)
