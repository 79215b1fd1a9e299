"""Checks of the files that a configuration names: they exist and hold what the run needs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path

from roll_lite.config.problems import Problem
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import SUPPORTED_TYPES, HfConfig, ModelShape, read_hf_config, read_model_shape
from roll_lite.models.hf_fields import HEADS, POLICY_HEADS
from roll_lite.models.model_files import (
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


FILE_CHECKS = (_model, _critic)
