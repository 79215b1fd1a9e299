"""Checks of partial runs: the settings that go with `mode`. data/dump_files.py checks the dumps."""

from __future__ import annotations

from collections.abc import Iterator

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig


def _mode(config: RunConfig) -> Iterator[Problem]:
    path = config.replay.path
    if config.mode == "train_only" and path is None:
        yield Problem("replay.path", "mode: train_only trains on the dumps of a past run; name its folder", None)
    if config.mode != "train_only" and path is not None:
        message = f"is only used by mode: train_only, the mode is {config.mode}; remove it, or change the mode"
        yield Problem("replay.path", message, str(path))
    if config.mode == "train_only" and config.rollout.dump:
        yield Problem("rollout.dump", "mode: train_only generates nothing that could be dumped; use false", True)
    if config.mode == "rollout_only" and config.weight_sync.verify != "none":
        message = "in mode: rollout_only nothing trains, and no weights are sent that could be compared; use none"
        yield Problem("weight_sync.verify", message, config.weight_sync.verify)


REPLAY_CHECKS = (_mode,)


def mode_notes(config: RunConfig) -> list[str]:
    """Notes on the parts that a partial run leaves out."""
    if config.mode == "rollout_only":
        idle = [name for name in ("actor_train", "reference", "critic") if getattr(config, name) is not None]
        return [f"mode: rollout_only: {', '.join(idle)} and validation are left out; batches are dumped, nothing trains"]
    if config.mode == "train_only":
        return [f"mode: train_only: training on the dumps of {config.replay.path}; engines, rewards and validation are left out"]
    return []
