"""Checks of the files that a configuration names: they exist and hold what the run needs."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from roll_lite.config.adapter_files import resumption_problem
from roll_lite.config.arithmetic import roles, trains, uses_reference
from roll_lite.config.checkpoint_files import check_model, describe, read_state, remedy, resumption
from roll_lite.config.checks.layout import model_folder
from roll_lite.config.files import elsewhere, is_folder, kind_of, listing
from roll_lite.config.hf_config import SUPPORTED_TYPES, HfConfig, ModelShape, read_hf_config, read_model_shape
from roll_lite.config.hf_fields import HEADS, POLICY_HEADS
from roll_lite.config.model_files import (
    HEAD,
    TOKENIZER_FILES,
    VALUE_HEAD,
    has_tokenizer,
    head_beside_tied_embeddings,
    largest_token_id,
    stored_tensors,
    wrong_settings,
    wrong_weights,
)
from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig

NO_TOKENIZER = f"no tokenizer in this folder (none of {', '.join(TOKENIZER_FILES)})"


def _model(config: RunConfig) -> Iterator[Problem]:
    folder = config.model.path
    shape, hf = yield from _readable("model.path", folder, POLICY_HEADS)
    if shape is not None:
        yield from _told("model.path", folder, lambda: None if has_tokenizer(folder) else NO_TOKENIZER)
        yield from _told("model.path", folder, lambda: _ids_without_a_row(folder, shape))
        yield from _told("model.path", folder, lambda: wrong_settings(folder, shape.vocab_size))
        yield from weights_fit("model.path", folder, hf, HEAD)


def weights_fit(path: str, folder: Path, hf: HfConfig | None, head: str) -> Iterator[Problem]:
    """Check that the safetensors are complete and, given `hf`, have the shapes that config.json implies."""

    def wrong() -> str | None:
        stored = stored_tensors(folder)
        if head == VALUE_HEAD and head not in stored:
            return f"its safetensors have no {head}, the value head of a critic or reward model; use init: actor for a new one"
        missing = wrong_weights(stored, hf, head) if hf is not None else None
        return missing or (head_beside_tied_embeddings(folder) if hf is not None and hf.tied_embeddings and head == HEAD else None)

    yield from _told(path, folder, wrong)


def _told(path: str, folder: Path, wrong: Callable[[], str | None]) -> Iterator[Problem]:
    """Yield the message that `wrong` returns, or that of its ValueError."""
    try:
        message = wrong()
    except ValueError as error:
        message = str(error)
    if message is not None:
        yield Problem(path, message, str(folder))


def _ids_without_a_row(folder: Path, shape: ModelShape) -> str | None:
    largest = largest_token_id(folder)
    if largest is None or largest < shape.vocab_size:
        return None
    return (
        f"its tokenizer has ids up to {largest}, its vocabulary (vocab_size of config.json) has only {shape.vocab_size} rows; "
        "use the tokenizer that the model was trained with, or resize the model's embeddings"
    )


def _critic(config: RunConfig) -> Iterator[Problem]:
    critic = config.critic
    if critic is None:
        return
    if critic.init == "actor":
        if critic.path is not None:
            yield Problem(
                "critic.path", "is not used with init: actor; remove it, or use init: path or init: reward_model", str(critic.path)
            )
        return
    if critic.path is None:
        yield Problem("critic.path", f"init: {critic.init} needs the checkpoint's folder", None)
        return
    shape, hf = yield from _readable("critic.path", critic.path)
    actor = _quietly(config.model.path)
    if shape is not None:
        yield from weights_fit("critic.path", critic.path, hf, VALUE_HEAD)
    if shape is not None and actor is not None and shape.vocab_size < actor.vocab_size:
        message = f"its vocabulary ({shape.vocab_size}) is smaller than the model's ({actor.vocab_size}); both see the same tokens"
        yield Problem("critic.path", message, str(critic.path))


def _readable(
    path: str, folder: Path, architectures: Sequence[str] = HEADS
) -> Generator[Problem, None, tuple[ModelShape | None, HfConfig | None]]:
    """Read a model folder. Both results are None if it is unreadable, the second if the model cannot be trained."""
    shape = None
    try:
        shape = read_model_shape(folder)
        if shape.model_type not in SUPPORTED_TYPES:
            raise ValueError(f"model_type {shape.model_type!r} is not supported; supported are {', '.join(SUPPORTED_TYPES)}")
        return shape, read_hf_config(folder, path, architectures)
    except ValueError as error:
        yield Problem(path, str(error).removeprefix(f"{path}: "), str(folder))
        return shape, None


def _quietly(folder: Path) -> ModelShape | None:
    try:
        return read_model_shape(folder)
    except ValueError:
        return None


def _resume(config: RunConfig) -> Iterator[Problem]:
    folder = config.checkpoint.resume
    if folder is None:
        return
    if (found := kind_of(folder)) != "folder":
        what = f"no such folder: {folder}{elsewhere(folder)}" if found is None else f"{folder} is no folder; name a checkpoint's or a run's"
        yield Problem("checkpoint.resume", what, str(folder))
        return
    try:
        checkpoint = resumption(folder).checkpoint
        state = read_state(checkpoint)
        absent = [name for name in ("pipeline", "rollouts") if not isinstance(state.get(name), dict)]
        if absent:
            raise ValueError(f"{checkpoint / 'state.json'} has no {' and no '.join(absent)}; {remedy(checkpoint)}")
        if (mode := state.get("config", {}).get("mode", "full")) != config.mode:
            raise ValueError(f"{checkpoint} was written by a run of mode: {mode}, this one is of mode: {config.mode}")
        for other in _trained_otherwise(config, state):
            raise ValueError(f"{checkpoint} cannot be gone on from: {other}")
        follows = config.reference is not None and config.reference.refresh is not None
        with_state = [role for role in ("actor_train", "critic", *(["reference"] if follows else [])) if role in roles(config)]
        absent = [role for role in with_state if not is_folder(checkpoint / role) or not listing(checkpoint / role)]
        if absent:
            raise ValueError(f"{checkpoint} holds nothing for {', '.join(absent)}; {remedy(checkpoint)}")
        for role in with_state:
            _same_model(config, role, checkpoint)
    except (ValueError, OSError) as error:
        yield Problem("checkpoint.resume", str(error).removeprefix("checkpoint.resume: "), str(folder))


def _trained_otherwise(config: RunConfig, state: Mapping[str, Any]) -> Iterator[str]:
    if not trains(config):
        return
    if other := resumption_problem(config.actor_train.lora, _saved(state, "actor_train", "lora")):
        yield other


def _saved(state: Mapping[str, Any], *names: str) -> Mapping[str, Any] | None:
    """Section of the checkpoint's configuration, None if absent."""
    found: Any = state.get("config")
    for name in names:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, dict) else None


def resumption_notes(config: RunConfig) -> list[str]:
    """Notes if KL is measured against other weights than before the resume: a checkpoint does not hold a fixed reference. (With adapters,
    model.path must have the same weights.)"""
    folder, reference = config.checkpoint.resume, config.reference
    follows = reference is not None and reference.refresh is not None
    if folder is None or follows or not trains(config) or not uses_reference(config):
        return []
    state = read_state(resumption(folder).checkpoint)
    now, made, had = config.model.path.resolve(), _saved(state, "model"), _saved(state, "reference")
    if had is not None and had.get("refresh") is not None:
        was = "a reference that follows the actor (reference.refresh)"
    elif had is not None and made is not None and config.actor_train.lora is None and Path(made["path"]).resolve() != now:
        was = made["path"]
    else:
        return []
    return [f"checkpoint.resume: KL is measured against model.path ({now}) from here on, and was so far against {was}"]


NOT_COMPARED = ("experiment", "run_dir", "checkpoint.resume", "simulation")
MOST_CHANGES = 12


def resumption_changes(config: RunConfig) -> list[str]:
    """One line that lists the settings that differ from the checkpoint's."""
    folder = config.checkpoint.resume
    if folder is None:
        return []
    before = read_state(resumption(folder).checkpoint).get("config")
    was, now = flattened(before if isinstance(before, dict) else {}), flattened(config.model_dump(mode="json"))
    paths = [
        path
        for path in {**was, **now}
        if was.get(path) != now.get(path) and not f"{path}.".startswith(tuple(f"{one}." for one in NOT_COMPARED))
    ]
    if not paths:
        return ["checkpoint.resume: every setting is as it was"]
    told = [f"{path}: {was.get(path)!s:.60} -> {now.get(path)!s:.60}" for path in paths[:MOST_CHANGES]]
    more = [f"and {len(paths) - MOST_CHANGES} more"] if len(paths) > MOST_CHANGES else []
    return [f"checkpoint.resume: these settings differ from the checkpoint's: {'; '.join([*told, *more])}"]


def flattened(section: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by full path; a list counts as one value."""
    flat: dict[str, Any] = {}
    for key, value in section.items():
        place = f"{path}.{key}" if path else str(key)
        flat |= flattened(value, place) if isinstance(value, dict) and value else {place: value}
    return flat


def _same_model(config: RunConfig, role: str, checkpoint: Path) -> None:
    try:
        hf = read_hf_config(model_folder(config, roles(config)[role]))
    except ValueError:  # reported where the model is checked
        return
    check_model(checkpoint / role, describe(hf, config.model, role == "critic"))


def run_folder(config: RunConfig) -> Iterator[Problem]:
    """Check that the existing part of run_dir is a writable folder. Only for runs, which create the rest."""
    existing = next(folder for folder in (config.run_dir, *config.run_dir.parents) if kind_of(folder))
    if kind_of(existing) != "folder":
        yield Problem("run_dir", f"{existing} is a file; name a folder", str(config.run_dir))
    elif not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith(("/proc", "/sys")):
        yield Problem("run_dir", f"{existing} cannot be written to; name another folder", str(config.run_dir))
    link = config.run_dir / "latest"
    if not link.is_symlink() and kind_of(link):
        yield Problem("run_dir", f"{link} is not a link; it has to make room for the link to the newest run", str(config.run_dir))


FILE_CHECKS = (_model, _critic, _resume)
