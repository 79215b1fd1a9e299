"""What a model's checkpoint holds, and whether an update fits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open

from roll_lite.distributed.strategy.base import ExportedTensor

_SHOWN = 5


def checkpoint_shapes(folder: Path, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shape by name of every tensor that an engine needs, read from the headers. `tied`: the embedding is the LM head."""
    shapes: dict[str, tuple[int, ...]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"model.path: {folder} holds no safetensors")
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118, the handle is no mapping
                    shapes[name] = tuple(handle.get_slice(name).get_shape())
        except SafetensorError as error:
            raise ValueError(f"model.path: {file} cannot be read, it may have been copied only in part: {error}") from error
    if tied:
        shapes.pop("lm_head.weight", None)
    return shapes


def check_tensors(tensors: Sequence[ExportedTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError that names every tensor which is unknown, missing, sent twice or of the wrong shape."""
    names = [tensor.name for tensor in tensors]
    problems = [
        *_listed("unknown to the model", sorted(set(names) - shapes.keys())),
        *_listed("missing", sorted(shapes.keys() - set(names))),
        *_listed("announced twice", sorted({name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ())),
        *_listed(
            "of the wrong shape",
            [
                f"{tensor.name} {tuple(tensor.shape)} instead of {shapes[tensor.name]}"
                for tensor in tensors
                if tensor.name in shapes and tuple(tensor.shape) != shapes[tensor.name]
            ],
        ),
    ]
    if problems:
        raise ValueError("weight update refused, the engine keeps its weights: " + "; ".join(problems))


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{rest}"]
