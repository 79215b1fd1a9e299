"""Checks of trackers: each exists and is listed once."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from roll_lite.config.checks.functions import check_function
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.run import RunConfig

LOCAL = ("jsonl", "tensorboard")
SERVICES = ("wandb", "mlflow", "swanlab")
"""Names of packages and of our optional dependencies; a test compares both with the trackers."""


def _differ(config: RunConfig) -> Iterator[Problem]:
    names = [tracker.name for tracker in config.trackers]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"trackers.{index}.name", f"trackers.{names.index(name)} is {name} too; keep one", name)


def _known(config: RunConfig) -> Iterator[Problem]:
    for index, tracker in enumerate(config.trackers):
        path, name = f"trackers.{index}", tracker.name
        if name in LOCAL:
            if tracker.args:
                yield Problem(f"{path}.args", f"{name} takes no arguments", tracker.args)
        elif name in SERVICES:
            if find_spec(name) is None:
                yield Problem(f"{path}.name", f'its package is not installed: pip install "roll_lite[{name}]"', name)
        elif "." in name:
            yield from check_function(path, "name", name, tracker.args, or_class=True)
        else:
            near = did_you_mean(name, [*LOCAL, *SERVICES])
            yield Problem(f"{path}.name", f"no such tracker; {near} A class of your own is a dotted path, package.module.Class", name)


TRACKER_CHECKS = (_differ, _known)
