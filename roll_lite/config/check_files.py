"""Files that a configuration names: do they exist, and do they hold what the run will look for."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path

from roll_lite.config.check_data import DOMAIN_DATA_CHECKS
from roll_lite.config.checkpoint_files import read_state, resumption
from roll_lite.config.hf_config import SUPPORTED_TYPES, ModelShape, elsewhere, read_hf_config, read_model_shape
from roll_lite.config.model_files import head_beside_tied_embeddings, largest_token_id
from roll_lite.config.problems import Problem
from roll_lite.config.schema import DomainConfig, RunConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def _model(config: RunConfig) -> Iterator[Problem]:
    folder = config.model.path
    shape = yield from _readable_shape("model.path", folder)
    if shape is None:
        return
    if not any(folder.glob("*.safetensors")):
        yield Problem("model.path", "no *.safetensors in this folder; expected a model in Hugging Face format", str(folder))
        return
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        yield Problem("model.path", f"no tokenizer in this folder (none of {', '.join(TOKENIZER_FILES)})", str(folder))
    try:
        wrong = [_ids_without_a_row(folder, shape), head_beside_tied_embeddings(folder) if shape.tied_embeddings else None]
    except ValueError as error:
        wrong = [str(error)]
    for message in filter(None, wrong):
        yield Problem("model.path", message, str(folder))


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
    shape = yield from _readable_shape("critic.path", critic.path)
    actor = _quietly(config.model.path)
    if shape is not None and actor is not None and shape.vocab_size < actor.vocab_size:
        message = f"its vocabulary ({shape.vocab_size}) is smaller than the model's ({actor.vocab_size}); both see the same tokens"
        yield Problem("critic.path", message, str(critic.path))


def _readable_shape(path: str, folder: Path) -> Generator[Problem, None, ModelShape | None]:
    try:
        shape = read_model_shape(folder)
    except ValueError as error:
        yield Problem(path, str(error), str(folder))
        return None
    if shape.model_type not in SUPPORTED_TYPES:
        message = f"model_type {shape.model_type!r} is not supported; supported are {', '.join(SUPPORTED_TYPES)}"
        yield Problem(path, message, str(folder))
        return shape
    try:
        read_hf_config(folder, path)
    except ValueError as error:
        yield Problem(path, str(error).removeprefix(f"{path}: "), str(folder))
    return shape


def _quietly(folder: Path) -> ModelShape | None:
    try:
        return read_model_shape(folder)
    except ValueError:
        return None


def _resume(config: RunConfig) -> Iterator[Problem]:
    folder = config.checkpoint.resume
    if folder is None:
        return
    if not folder.is_dir():
        yield Problem("checkpoint.resume", f"no such folder: {folder}{elsewhere(folder)}", str(folder))
        return
    try:
        read_state(resumption(folder).checkpoint)
    except ValueError as error:
        yield Problem("checkpoint.resume", str(error).removeprefix("checkpoint.resume: "), str(folder))


def _run_folder(config: RunConfig) -> Iterator[Problem]:
    """Made only when the run starts: what exists of the path has to be a folder that can be written to."""
    existing = next(folder for folder in (config.run_dir, *config.run_dir.parents) if folder.exists())
    if not existing.is_dir():
        yield Problem("run_dir", f"{existing} is a file; name a folder", str(config.run_dir))
    elif not os.access(existing, os.W_OK | os.X_OK) or str(existing).startswith(("/proc", "/sys")):
        yield Problem("run_dir", f"{existing} cannot be written to; name another folder", str(config.run_dir))
    link = config.run_dir / "latest"
    if link.exists() and not link.is_symlink():
        yield Problem("run_dir", f"{link} is not a link; it has to make room for the link to the newest run", str(config.run_dir))


FILE_CHECKS = (_model, _critic, _resume, _run_folder)


def _chat_template_exists(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    folder = config.model.path
    settings = folder / "tokenizer_config.json"
    if domain.template.type != "chat" or not settings.is_file() or (folder / "chat_template.jinja").is_file():
        return
    try:
        has_template = "chat_template" in json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        yield Problem("model.path", f"{settings} cannot be read: {error}", str(folder))
        return
    if not has_template:
        yield Problem(f"{path}.template.type", f"the tokenizer in {folder} has no chat template; use plain", "chat")


DOMAIN_FILE_CHECKS = (*DOMAIN_DATA_CHECKS, _chat_template_exists)
