from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path

from roll_lite.config.schema.base import Mistakes
from roll_lite.config.schema.run import RunConfig
from roll_lite.hub import lacks_weights
from roll_lite.models.hf_config import SUPPORTED_TYPES, HfConfig, ModelShape, read_hf_config, read_model_shape
from roll_lite.models.hf_fields import HEADS, POLICY_HEADS
from roll_lite.models.model_files import (
    HEAD,
    VALUE_HEAD,
    head_beside_tied_embeddings,
    largest_token_id,
    require_tokenizer,
    stored_tensors,
    wrong_settings,
    wrong_weights,
)


def _model(config: RunConfig) -> Mistakes:
    folder = config.model.path
    shape, hf = yield from _read_model("model.path", folder, POLICY_HEADS)
    if shape is not None:
        yield from _mistake_if("model.path", lambda: _tokenizer_misfit(folder, shape.vocab_size))
        yield from _mistake_if("model.path", lambda: wrong_settings(folder, shape.vocab_size))
        yield from _mistake_if("model.path", lambda: _weights_misfit(folder, hf, HEAD))


def _mistake_if(path: str, wrong: Callable[[], str | None]) -> Mistakes:
    try:
        message = wrong()
    except ValueError as error:
        message = str(error)
    if message is not None:
        yield path, message


def _tokenizer_misfit(folder: Path, vocab_size: int) -> str | None:
    require_tokenizer(folder)
    largest = largest_token_id(folder)
    if largest is None or largest < vocab_size:
        return None
    return (
        f"its tokenizer has ids up to {largest}, its vocabulary (vocab_size of config.json) has only {vocab_size} rows; "
        "use the tokenizer that the model was trained with, or resize the model's embeddings"
    )


def _weights_misfit(folder: Path, hf: HfConfig | None, head: str) -> str | None:
    """Fault of a model's safetensors, or None. `head`: the output layer's tensor. `hf` None: only check that a value head exists."""
    if lacks_weights(folder):  # checked after the download
        return None
    stored = stored_tensors(folder)
    if head == VALUE_HEAD and head not in stored:
        return f"its safetensors have no {head}, the value head of a critic or reward model; use init: actor for a new one"
    if hf is None:
        return None
    return wrong_weights(stored, hf, head) or (head_beside_tied_embeddings(folder) if hf.tied_embeddings and head == HEAD else None)


def _critic(config: RunConfig) -> Mistakes:
    critic = config.critic
    if critic is None or critic.init == "actor" or critic.path is None:
        return
    folder = critic.path
    shape, hf = yield from _read_model("critic.path", folder)
    if shape is None:
        return
    yield from _mistake_if("critic.path", lambda: _weights_misfit(folder, hf, VALUE_HEAD))
    with suppress(ValueError):  # reported as a mistake of the model
        if shape.vocab_size < (tokens := read_model_shape(config.model.path).vocab_size):
            yield "critic.path", f"its vocabulary ({shape.vocab_size}) is smaller than the model's ({tokens}); both see the same tokens"


def _read_model(
    path: str, folder: Path, architectures: Sequence[str] = HEADS
) -> Generator[tuple[str, str], None, tuple[ModelShape | None, HfConfig | None]]:
    """Read a model folder and yield its mistake. Return (shape, HfConfig): both None if unreadable, HfConfig None if unsupported."""
    shape = None
    try:
        shape = read_model_shape(folder)
        if shape.model_type not in SUPPORTED_TYPES:
            raise ValueError(f"model_type {shape.model_type!r} is not supported; supported are {', '.join(SUPPORTED_TYPES)}")
        return shape, read_hf_config(folder, path, architectures)
    except ValueError as error:
        yield path, str(error).removeprefix(f"{path}: ")
        return shape, None


MODEL_FILE_CHECKS = (_model, _critic)
