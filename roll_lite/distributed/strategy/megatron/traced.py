"""Estimate one rank's memory from a micro-batch, with torch's fake tensors (shapes without data) and fake process groups."""

from __future__ import annotations

import json
import os
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import param_and_grad_buffer
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll_lite.data.microbatch import MicroBatchPlan, RowsAtATime
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.base import LossFn, ModelSpec, StateGroup
from roll_lite.distributed.strategy.megatron import layers, model, vocabulary
from roll_lite.distributed.strategy.megatron.experts import experts_config
from roll_lite.distributed.strategy.megatron.forward_backward import sum_gradients
from roll_lite.distributed.strategy.megatron.layers import SdpaAttention
from roll_lite.distributed.strategy.megatron.model_io import ModelInput, model_inputs
from roll_lite.distributed.strategy.megatron.parallel import layout_multiples
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank. `training`, `update` and `forward`: peaks on top of weights, gradients and optimizer state."""

    weights: int
    gradients: int = 0
    optimizer: int = 0
    kept: int = 0
    """Activations of a micro-batch, from forward to backward."""
    training: int = 0
    update: int = 0
    forward: int = 0
    inputs: int = 0
    """Inputs of one micro-batch; a pass holds every micro-batch's."""
    kv_cache: int = 0
    send_buffers: int = 0
    """Buffers kept between weight updates, even if the role is offloaded."""


class StorageMeter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._living: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._add(leaf.untyped_storage())
        return result

    def since(self, start: int) -> int:
        peak, self.peak = self.peak, self.now
        return max(peak - start, 0)

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._living:
            self._living[key] = weakref.ref(storage, lambda _: self._remove(key, size))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _remove(self, key: int, size: int) -> None:
        del self._living[key]
        self.now -= size


class _TracedStrategy(MegatronStrategy):
    def _load_weights(self, *_: Any) -> None:
        """Skip loading: fake tensors hold no weights."""

    def state(self) -> tuple[int, int, int]:
        """Return bytes of (weights, gradients, optimizer). A shared storage counts once."""
        sizes: dict[int, int] = {}
        totals = []
        for group in StateGroup:
            sizes |= {one.untyped_storage()._cdata: one.untyped_storage().nbytes() for one in self._mover._tensors(group)}
            totals.append(sum(sizes.values()))
        return totals[0], totals[1] - totals[0], totals[2] - totals[1]

    def trace(self, given: ModelInput, meter: StorageMeter, loss_fn: LossFn, outputs: Sequence[str]) -> RankMemory:
        base = meter.now
        meter.since(base)
        with torch.no_grad():
            self._loss(given, loss_fn, outputs)
        forward = meter.since(base)
        if self._optimizer is None:
            return RankMemory(*self.state(), 0, 0, 0, forward)
        loss = self._loss(given, loss_fn, outputs)
        kept = meter.now - base
        loss.backward(torch.empty_like(loss))
        del loss
        sum_gradients(self._chunks)
        training = meter.since(base)
        self._optimizer.megatron.prepare_grads()
        self._optimizer.megatron.step_with_ready_grads()
        return RankMemory(*self.state(), kept, training, meter.since(base), forward)

    def _loss(self, given: ModelInput, loss_fn: LossFn, outputs: Sequence[str]) -> torch.Tensor:
        hidden: Any = None
        for chunk in self._chunks:
            inner = chunk if self._optimizer is None else chunk.module
            if not inner.pre_process:
                shards = self._config.tensor_parallel if self._config.sequence_parallel else 1
                shape = given.input_ids.shape[1] // shards, 1, self._hf.hidden
                hidden = torch.empty(shape, dtype=self._dtype).requires_grad_() if hidden is None else hidden
                inner.set_input_tensor(hidden)
            hidden = chunk(given.input_ids, given.rows, given.positions)
        return loss_fn(self._outputs(hidden, given, outputs), given.micro_batch)[0] if self._model.post_process else hidden


def trace(
    spec: ModelSpec,
    config: Mapping[str, Any],
    devices: int,
    stage: int,
    batch: DataProto,
    loss_fn: LossFn,
    outputs: Sequence[str],
    on_gpu: bool,
) -> RankMemory:
    """Measure the memory of one rank of pipeline stage `stage`. `config`: the model's config.json. `batch`: rows of one micro-batch."""
    rank = stage * devices // getattr(spec.strategy, "pipeline_parallel", 1)
    with tempfile.TemporaryDirectory() as folder, _alone(devices, rank, on_gpu):
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
        moved = spec.model.model_copy(update={"path": Path(folder)})
        strategy = _TracedStrategy(replace(spec, model=moved, deterministic=False))
        with FakeTensorMode(allow_non_fake_inputs=True), StorageMeter() as meter:
            strategy.initialize()
            with unset_fake_temporarily():
                plan = MicroBatchPlan.of(batch.lengths, RowsAtATime(len(batch)), layout_multiples(strategy._config))
                given = model_inputs(batch, plan, torch.device("cpu"))[0]
            inputs = sum(one.nbytes for one in _tensors([given, given.rows, given.micro_batch, given.micro_batch.columns]))
            found = strategy.trace(given, meter, loss_fn, outputs)
            if not on_gpu and spec.optimizer is not None and strategy._config.distributed_optimizer:
                found = replace(found, training=max(found.training, found.gradients))  # gloo copies all gradients to scatter their sums
            return replace(found, inputs=inputs)


def _tensors(holders: Sequence[Any]) -> Iterator[torch.Tensor]:
    for one in holders:
        yield from (value for value in (one if isinstance(one, Mapping) else vars(one)).values() if isinstance(value, torch.Tensor))


@contextmanager
def _alone(devices: int, rank: int, on_gpu: bool) -> Iterator[None]:
    new_group, preprocess, blocks = dist.new_group, MoEAlltoAllTokenDispatcher.preprocess, vocabulary.Vocabulary.blocks

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    def with_data(*args: Any) -> Any:
        with unset_fake_temporarily():
            return preprocess(*args)

    def evenly(hf: Any) -> dict[str, Any]:
        """Return the experts' settings with equal tokens for every expert: fake tensors hold no counts."""
        even = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
        return {**experts_config(hf), **even} if hf.experts is not None else {}

    def same_everywhere(gathered: list[Any], mine: Any, **_: Any) -> None:
        gathered[:] = [mine] * len(gathered)

    def no_state(*_: Any, **__: Any) -> None: ...

    @contextmanager
    def no_fork(*_: Any, **__: Any) -> Iterator[None]:
        yield

    replaced: list[Any] = [
        patch.dict(os.environ, {"RANK": str(rank), "WORLD_SIZE": str(devices), "LOCAL_RANK": "0"}),
        patch.object(dist, "new_group", fake_group),
        patch.object(dist, "all_gather_object", same_everywhere),
        patch.object(torch, "get_rng_state", no_state),
        patch.object(torch, "set_rng_state", no_state),
        patch.object(megatron_random.CudaRNGStatesTracker, "fork", no_fork),
        *(patch.object(megatron_random, name, no_state) for name in ("_get_cuda_rng_state", "_set_cuda_rng_state")),
        patch.object(param_and_grad_buffer, "_coalescing_manager", MagicMock()),
        patch.object(MoEAlltoAllTokenDispatcher, "preprocess", with_data),
        patch.object(model, "experts_config", evenly),
    ]
    if on_gpu:
        replaced += [
            patch.object(SdpaAttention, "_run_by_run", SdpaAttention._variable_length),
            patch.object(layers, "has_fused_kernels", lambda: True),
            patch.dict(vocabulary.BLOCK_LOGITS, {"cpu": vocabulary.BLOCK_LOGITS["cuda"]}),
            patch.object(vocabulary.Vocabulary, "blocks", lambda words: islice(blocks(words), 2)),  # further blocks take no more memory
        ]
    with ExitStack() as stack:
        for one in replaced:
            stack.enter_context(one)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=devices)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
