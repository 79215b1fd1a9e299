"""A weight update on the engine's side: check of its tensors against the model's checkpoint, and record of those arrived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from roll_lite.distributed.weight_sync.plan import ExportedTensor

_SHOWN = 5

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor shapes by Hugging Face name."""


@dataclass
class WeightUpdate:
    tensors: Sequence[ExportedTensor]
    arrived: set[str] = field(default_factory=set)

    def check(self, tensors: Sequence[ExportedTensor]) -> None:
        """Raise ValueError for tensors that were not announced or have arrived before."""
        announced = {tensor.name for tensor in self.tensors}
        for tensor in tensors:
            if tensor.name not in announced or tensor.name in self.arrived:
                raise ValueError(f"weight update: {tensor.name} was {'sent before' if tensor.name in announced else 'not announced'}")

    def require_complete(self) -> None:
        missing = [tensor.name for tensor in self.tensors if tensor.name not in self.arrived]
        if missing:
            raise RuntimeError(f"weight update: {len(missing)} tensors have not arrived, among them {', '.join(missing[:_SHOWN])}")

    def dtypes(self) -> dict[str, str]:
        return {tensor.name: str(tensor.dtype).removeprefix("torch.") for tensor in self.tensors}


def checkpoint_shapes(folder: Path, tied: bool) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors that an engine needs, read from the file headers. `tied`: the embedding is also the LM head."""
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


def check_tensors(tensors: Sequence[ExportedTensor], shapes: Shapes) -> None:
    """Raise ValueError that names every unknown, missing, duplicate or misshapen tensor."""
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
