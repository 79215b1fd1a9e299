"""Checkpoints in Megatron's torch_dist format: weights, optimizer, schedule, random state.

Shards have offsets in the full tensor, so other layouts can load them; random state needs the same.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as write_state

from roll_lite.distributed.strategy.base import RankLayout
from roll_lite.distributed.strategy.megatron.checkpoint_writer import TENSORS_SUFFIX
from roll_lite.distributed.strategy.megatron.optimizer import Optimizer
from roll_lite.distributed.strategy.megatron.shard_loading import ShardReader, stored_name
from roll_lite.files import is_file, read_object, write_json
from roll_lite.models.hf_config import MODEL_FILE, check_same_model
from roll_lite.models.model_files import weights_fingerprint

STATE_FOLDER = "state"
BASE_FILE = "base.json"
OPTIMIZER_TENSORS = "optimizer_tensors"
MAIN_WEIGHTS = re.compile(r"^optimizer\.state\.(fp32_)?param\.")
_FORMAT = {
    # The only sharding type that can be loaded with another number of tensor or pipeline ranks.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


def write_checkpoint(
    chunks: Sequence[Any],
    optimizer: Optimizer | None,
    layout: RankLayout,
    model: Mapping[str, Any],
    folder: Path,
    writer: FileSystemWriter,
) -> list[Path]:
    """Save a checkpoint to a shared folder (collective); return this rank's files. `model`: facts that loading compares. `writer` writes
    tensors to STATE_FOLDER."""
    state_folder = folder / STATE_FOLDER
    state_folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    state = _sharded_state(chunks, optimizer, loading=False)
    dist_checkpointing.save(
        state,
        str(state_folder),
        _SaveThrough(writer),
        # Megatron checks that the common state is equal on all ranks; the optimizer's differs.
        preprocess_common_before_consistancy_check=lambda common: {name: value for name, value in common.items() if name != "optimizer"},
    )
    if layout.rank == 0:
        write_json(folder / MODEL_FILE, model)
    torch.save({"layout": _identity(layout), "random": random_state()}, _rank_file(folder, layout.rank))
    dist.barrier()
    own = [_rank_file(folder, layout.rank), *state_folder.glob(f"__{layout.rank}_*{TENSORS_SUFFIX}")]
    if layout.rank == 0:
        own += [folder / MODEL_FILE, *(path for path in state_folder.iterdir() if path.suffix != TENSORS_SUFFIX)]
    return own


def write_base(folder: Path, model: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    card = {"path": str(model.resolve()), "fingerprint": weights_fingerprint(model)}
    write_json(folder / BASE_FILE, card)
    return folder / BASE_FILE


def check_base(folder: Path, model: Path, adapters: bool) -> None:
    """Raise ValueError if only one of checkpoint and run uses adapters, or if their base models differ."""
    of_adapters = is_file(folder / BASE_FILE)
    if of_adapters != adapters:
        holds, remedy = ("adapters", "set it") if of_adapters else ("a whole model", "leave it out")
        raise ValueError(f"checkpoint.resume: {folder} holds {holds}; actor_train.lora decides what trains: {remedy}")
    if adapters and (card := read_object(folder / BASE_FILE)).get("fingerprint") != weights_fingerprint(model):
        raise ValueError(f"checkpoint.resume: the adapters in {folder} belong to {card.get('path')}; model.path {model} has other weights")


def read_checkpoint(chunks: Sequence[Any], optimizer: Optimizer | None, layout: RankLayout, model: Mapping[str, Any], folder: Path) -> None:
    """Load a checkpoint (collective). Learning rate, betas and weight decay stay as configured."""
    check_same_model(folder, model)
    # Before loading, tensors in this nested state are templates: the stored name and this rank's shard.
    wanted = _sharded_state(chunks, optimizer, loading=True)
    to_fill = wanted.pop("optimizer", None)
    weights = [wanted.get(name, {}) for name, _ in _named_chunks(chunks)]
    with _clear_errors(folder / STATE_FOLDER) as state_folder:
        stored = dist_checkpointing.load_tensors_metadata(state_folder)
        reader = ShardReader(state_folder, weights)
        # Load the optimizer's templates as a flat list with the weights.
        places = _stored_places(to_fill, stored)
        wanted[OPTIMIZER_TENSORS] = {number: parent[key] for number, (parent, key) in enumerate(places)}
        state = dist_checkpointing.load(wanted, state_folder)
    for name, chunk in _named_chunks(chunks):
        missing, unknown = chunk.load_state_dict(state.pop(name, {}), strict=False)
        left_out = _frozen_in(chunk, optimizer)
        absent = [key for key in missing if not _is_extra(key) and key not in left_out]
        assert not absent and not unknown, f"weights without a place in the model, and without a value: {unknown}, {absent}"
    if optimizer is not None:
        for number, (parent, key) in enumerate(places):
            parent[key] = state[OPTIMIZER_TENSORS][number]
        _load_optimizer(optimizer, to_fill, _steps_in(state["optimizer"]))
        with _clear_errors(folder / STATE_FOLDER):
            reader.load(optimizer.parts)  # the distributed optimizer's tensors
        optimizer.set_schedule(state["schedule"]["num_steps"])
    own = _rank_file(folder, layout.rank)
    if own.is_file():
        saved = torch.load(own, weights_only=True)
        if saved["layout"] == _identity(layout):
            restore_random_state(saved["random"])
    else:
        others = sorted(folder.glob("rank_*.pt"))
        if not others or layout.rank < torch.load(others[0], weights_only=True)["layout"]["world_size"]:  # else fewer ranks saved it
            raise ValueError(f"checkpoint.resume: {own} is missing. If it cannot be found, go on from an earlier checkpoint")


@contextmanager
def _clear_errors(state_folder: Path) -> Iterator[str]:
    try:
        if not dist_checkpointing.check_is_distributed_checkpoint(str(state_folder)):
            raise ValueError("it is none of this strategy, or not a complete one")
        yield str(state_folder)
    except CheckpointException as error:
        raise _unreadable(state_folder, next(iter(error.failures.values()))[0]) from error
    except (CheckpointingException, pickle.UnpicklingError, ValueError, FileNotFoundError, EOFError) as error:
        raise _unreadable(state_folder, error) from error
    except RuntimeError as error:
        if "PytorchStreamReader" not in str(error):  # another failure, such as a rank's death
            raise
        raise _unreadable(state_folder, error) from error


def _unreadable(state_folder: Path, cause: BaseException) -> ValueError:
    said = f"{type(cause).__name__}: {cause}"
    return ValueError(f"checkpoint.resume: {state_folder} cannot be read ({said}). If it is damaged, go on from an earlier checkpoint")


# ---------------------------------------------------------------- what is stored


def _sharded_state(chunks: Sequence[Any], optimizer: Optimizer | None, loading: bool) -> dict[str, Any]:
    metadata = {**_FORMAT, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    metadata["distrib_optim_fully_reshardable_mem_efficient"] = True
    weights: dict[str, Any] = {}
    for name, chunk in _named_chunks(chunks):
        full, left_out = chunk.sharded_state_dict(metadata=metadata), _frozen_in(chunk, optimizer)
        weights[name] = {key: value for key, value in full.items() if not _is_extra(key) and key not in left_out}
    state: dict[str, Any] = {name: own for name, own in weights.items() if own}  # when loading, Megatron drops empty entries
    if optimizer is not None:
        _keep_padding(chunks)
        only = weights["model"] if len(chunks) == 1 else weights
        if loading:  # without the distributed optimizer's tensors, which ShardReader loads
            states = [
                part.state_dict()
                if isinstance(part, DistributedOptimizer)
                else part.sharded_state_dict(only, is_loading=True, metadata=metadata)
                for part in optimizer.parts
            ]
            state["optimizer"] = states[0] if len(states) == 1 else dict(enumerate(states))
        else:
            state["optimizer"] = optimizer.megatron.sharded_state_dict(only, metadata=metadata)
        state["schedule"] = optimizer.scheduler.state_dict()
    return state


def _is_extra(name: str) -> bool:
    """True for Transformer Engine's fp8 scaling factors: unused, and torch's layers could not load them."""
    return name.rpartition(".")[2].startswith("_extra_state")


def _frozen_in(chunk: Any, optimizer: Optimizer | None) -> set[str]:
    return set() if optimizer is None else {name for name, parameter in chunk.named_parameters() if not parameter.requires_grad}


def _named_chunks(chunks: Sequence[Any]) -> list[tuple[str, Any]]:
    bare = [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in chunks]
    return [("model" if len(bare) == 1 else f"model{number}", chunk) for number, chunk in enumerate(bare)]


class _SaveThrough(TorchDistSaveShardedStrategy):
    """Save strategy without a fork. Megatron's strategy forks, and may then hang with threads of Ray, gloo and CUDA."""

    def __init__(self, writer: FileSystemWriter) -> None:
        super().__init__("torch_dist", 1)
        self._writer = writer

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        flat, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        write_state(
            mcore_to_pyt_state_dict(flat, False),
            storage_writer=self._writer,
            planner=MCoreSavePlanner(dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False),
        )


# ---------------------------------------------------------------- the optimizer, with workarounds for Megatron


def _keep_padding(chunks: Sequence[Any]) -> None:
    """Save the distributed optimizer's buckets with padding. Megatron-Core 0.16 saves them without but looks up offsets with it:
    parameters after the first padding would load wrong values."""
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()


def _stored_places(state: Any, stored: Collection[str]) -> list[tuple[Any, Any]]:
    """Return (container, key) of each tensor to load in the nested optimizer state. `stored`: names in the checkpoint; float32 weights
    missing there are removed."""
    places = []
    for key, value in list(_items(state)):
        if isinstance(value, LocalNonpersistentObject):
            state[key] = value.unwrap()
        elif not isinstance(value, ShardedBase | ShardedTensorFactory):
            places += _stored_places(value, stored)
        elif not MAIN_WEIGHTS.match(value.key):
            places.append((state, key))
        elif (name := stored_name("param", MAIN_WEIGHTS.sub("", value.key), stored)) is not None:
            value.key = name
            places.append((state, key))
        else:
            del state[key]
    return places


def _items(state: Any) -> Iterable[tuple[Any, Any]]:
    return state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()


def _steps_in(stored: Any) -> float:
    own = [float(value) for key, value in _items(stored) if key in ("common_step", "step")]
    return max([*own, *(_steps_in(value) for _, value in _items(stored))], default=0.0)


def _load_optimizer(optimizer: Optimizer, state: dict[Any, Any], steps: float) -> None:
    parts = optimizer.parts
    for number, part in enumerate(parts):
        own = state if len(parts) == 1 else state[number]
        inner = own.get("optimizer", own)
        if isinstance(part, DistributedOptimizer):
            part._set_main_param_and_optimizer_states = MethodType(_set_states, part)
        if isinstance(part, DistributedOptimizer) or not isinstance(part.optimizer, torch.optim.AdamW):
            # These keep the step count in parameter groups, like the Adam of Transformer Engine and Apex.
            for group in inner["param_groups"]:
                group["step"] = int(steps)
        else:
            inner["state"]["common_step"] = torch.tensor(steps)
    optimizer.megatron.load_state_dict(state)
    optimizer.complete_states()
    optimizer.updates_made = int(steps)


def _set_states(self: Any, model_param: torch.nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Copy loaded tensors into the optimizer. Replaces a method of Megatron-Core 0.16 that looks for `step` among the tensors, although
    parameter groups hold it."""
    group, place = self.model_param_group_index_map[model_param]
    main = self.optimizer.param_groups[group]["params"][place]
    states = self.optimizer.state[main]
    for name, loaded in tensors.items():
        (main if name == "param" else states[name]).copy_(loaded)


# ---------------------------------------------------------------- random numbers


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank:05d}.pt"


def _identity(layout: RankLayout) -> dict[str, int | bool]:
    return {name: value for name, value in asdict(layout).items() if name != "attention_parity_tokens"}


def random_state() -> dict[str, Any]:
    return {
        "host": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "streams": tensor_parallel.get_cuda_rng_tracker().get_states(),
    }


def restore_random_state(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["host"])
    if saved["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved["device"])
    tensor_parallel.get_cuda_rng_tracker().set_states(saved["streams"])
