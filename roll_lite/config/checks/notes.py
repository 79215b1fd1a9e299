"""Notes on legal but suspicious settings, printed by `check` and runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from roll_lite.config.arithmetic import roles
from roll_lite.config.checks.gpu_only import gpu_notes
from roll_lite.config.checks.layout import model_folder, sharing_notes
from roll_lite.config.checks.lora import engine_notes, reference_notes
from roll_lite.config.checks.rollout import staleness_notes
from roll_lite.config.checks.secrets import plain_secrets
from roll_lite.config.schema.base import Refused
from roll_lite.config.schema.models import FEED_FORWARD
from roll_lite.config.schema.run import RunConfig
from roll_lite.hub import lacks_weights, written
from roll_lite.models.hf_config import read_model_shape


def mode_notes(config: RunConfig) -> list[str]:
    if config.mode == "rollout_only":
        idle = [name for name in ("actor_train", "reference", "critic") if getattr(config, name) is not None]
        return [f"mode: rollout_only: {', '.join(idle)} and validation are left out; batches are dumped, nothing trains"]
    if config.mode == "train_only":
        return [f"mode: train_only: training on the dumps of {config.replay.path}; engines, rewards and validation are left out"]
    return []


RECOMPUTED_LOSSES = ("ppo", "gspo", "cispo", "topr", "policy_gradient", "raft")


def without_formula(config: RunConfig) -> list[str]:
    """Settings of this run that examples/recompute.py, which recomputes its losses, has no formula for."""
    lora, algorithm = config.actor_train.lora, config.algorithm
    feeds_forward = lora is not None and not set(FEED_FORWARD).isdisjoint(lora.targets)
    found = {
        f"model.dtype: {config.model.dtype}": config.model.dtype != "float32",
        f"algorithm.routing_replay: {algorithm.routing_replay}": algorithm.routing_replay != "none",
        f"algorithm.policy_loss.name: {algorithm.policy_loss.name}": algorithm.policy_loss.name not in RECOMPUTED_LOSSES,
        **{
            f"algorithm.{name}.estimator: full": kl.coef > 0 and kl.estimator == "full"
            for name, kl in (("kl_in_reward", algorithm.kl_in_reward), ("kl_in_loss", algorithm.kl_in_loss))
        },
        "actor_train.lora.targets: adapters of experts": feeds_forward and bool(read_model_shape(config.model.path).experts),
    }
    return [setting for setting, is_missing in found.items() if is_missing]


def batch_notes(config: RunConfig) -> list[str]:
    if config.batches.write != "always" or not (settings := without_formula(config)):
        return []
    return [f"batches.write: always: examples/recompute.py will refuse these batches, it has no formula for {'; '.join(settings)}"]


def hub_notes(config: RunConfig) -> list[str]:
    missing = {folder: name for name, role in roles(config).items() if lacks_weights(folder := model_folder(config, role))}
    return [f"{name}: the weights of {written(folder)} are downloaded, and checked, when a run starts" for folder, name in missing.items()]


def notes_on(config: RunConfig, *further: Callable[[RunConfig], list[str]]) -> list[str]:
    """Collect all notes. `further`: functions of other packages that return notes."""
    notes_of_parts = (
        mode_notes,
        gpu_notes,
        sharing_notes,
        staleness_notes,
        batch_notes,
        reference_notes,
        engine_notes,
        plain_secrets,
        hub_notes,
        *further,
    )
    found: list[str] = []
    for notes in notes_of_parts:
        with suppress(Refused):  # values are missing
            found += notes(config)
    return found
