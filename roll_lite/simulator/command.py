"""`roll-lite simulate`: predict a run's speed, and compare supply modes, staleness limits and numbers of engines."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import NamedTemporaryFile

import yaml

from roll_lite.config.schema.run import RunConfig
from roll_lite.files import absolute_path, is_folder
from roll_lite.simulator.calibration import calibrated
from roll_lite.simulator.picture import draw_engines
from roll_lite.simulator.report import NOTES, advice, details, engines, table_of_runs
from roll_lite.simulator.scenario import Scenario, scenario_of
from roll_lite.simulator.simulation import simulate

ALTERNATIVES: tuple[dict[str, object], ...] = (
    {"supply": "sync"},
    {"supply": "one_step_off"},
    {"supply": "async", "max_staleness": 1, "on_sync": "pause"},
    {"supply": "async", "max_staleness": 2, "on_sync": "pause"},
    {"supply": "async", "max_staleness": 4, "on_sync": "pause"},
    {"supply": "async", "max_staleness": 4, "on_sync": "abort"},
)
TAKES_TURNS = (
    "other policies than sync generate beside training: with actor_infer.offload: false and deterministic: false they are compared as well"
)


def answer(config: RunConfig, asked: argparse.Namespace) -> int:
    """Simulate the configuration (and alternatives, if `compare`) and print results. Exit code: 0, 1 without a step, 2 for unusable
    arguments."""
    try:
        if asked.picture is not None:
            refuse_unwritable(asked.picture)
        if asked.measured is not None:
            config = calibrated(config, absolute_path(asked.measured))
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if asked.measured is not None:
        measured = config.simulation.model_dump(mode="json", exclude_unset=True)
        text = yaml.safe_dump({"simulation": measured}, sort_keys=False, default_flow_style=None, width=120)
        sys.stdout.write(f"measured in {asked.measured}:\n{text}\n")
    chosen = scenario_of(config)
    outcome = simulate(chosen, spans=asked.picture is not None)
    if not outcome.steps:
        sys.stderr.write(f"{outcome.early_end}\n")
        return 1
    sys.stdout.write(f"{details(outcome)}\n\n")
    others = []
    for one in alternatives(chosen) if asked.compare else ():
        if one == chosen:
            continue
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\033[K{one.policy}, {engines(one)} ...")
            sys.stderr.flush()
        others.append(simulate(one))
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
    sys.stdout.write(f"{table_of_runs([outcome, *others])}\n\n{NOTES}\n")
    if asked.compare and chosen.takes_turns:
        sys.stdout.write(f"\n{TAKES_TURNS}\n")
    if others and (best := advice([outcome, *others])):
        sys.stdout.write(f"\n{best}\n")
    if asked.picture is not None:
        draw_engines(asked.picture, [outcome], [f"{config.experiment}: {chosen.policy}, {engines(chosen)}"], asked.color)
        sys.stdout.write(f"\npicture: {asked.picture}\n")
    return 0


def refuse_unwritable(picture: Path) -> None:
    if is_folder(picture):
        raise ValueError(f"--picture: {picture} is a folder; name a file in it")
    try:
        with NamedTemporaryFile(dir=picture.parent, prefix=picture.name):
            pass
    except (OSError, ValueError) as error:
        raise ValueError(f"--picture: {picture} cannot be written: {getattr(error, 'strerror', None) or error}") from error


def alternatives(chosen: Scenario) -> Iterator[Scenario]:
    """Yield scenarios with half, the same and twice the number of engines, each with all supply policies (only `sync` if engines and
    trainer take turns)."""
    for count in sorted({max(1, chosen.engines // 2), chosen.engines, 2 * chosen.engines}):
        for settings in ALTERNATIVES if not chosen.takes_turns else ALTERNATIVES[:1]:
            yield replace(chosen, engines=count).under(settings)
