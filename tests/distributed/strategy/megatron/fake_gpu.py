"""A rank on a GPU that is not there: torch's fake tensors, which have a shape, a dtype and a device and no contents.

Run as a program: torch is told that there is a GPU before anything is imported, so that Megatron-Core is not rewritten for the CPU, and
what runs is what runs on GPUs. Tensors of two devices in one operation raise, and what is left on the host by mistake is one of those.
Only forward passes: a CPU build of torch has no backward ones for this device. They run as in training (torch.is_grad_enabled), with
frozen weights.

    python fake_gpu.py MODEL_FOLDER '{"tensor_parallel": 2, "sequence_parallel": true}'
    python fake_gpu.py REWARD_MODEL_FOLDER null
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from functools import partial

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # Megatron's fused functions run as they are written: nothing compiles fake tensors here
from pathlib import Path
from typing import Any, cast
from unittest.mock import MagicMock, patch

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from roll_lite.distributed.strategy import base

GPU = torch.device("cuda", 0)


def put(tensor: torch.Tensor, index: Any, value: Any) -> None:
    first = index[0] if isinstance(index, tuple) else index
    if isinstance(first, torch.Tensor):
        given = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=tensor.dtype, device=tensor.device)
        further = index[1:] if isinstance(index, tuple) else ()
        torch.ops.aten.index_put_.default(take(tensor, (slice(None), *further)), [first], given)
    else:
        torch.ops.aten.copy_.default(take(tensor, index), torch.as_tensor(value))


class WithoutDevice(FakeTensorMode):
    """Finds out by torch.cuda.is_available whether it has to do without a GPU."""

    avoid_device_init = True  # type: ignore[assignment]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.stack, torch.ops.aten.cat):  # fake ones take a scalar of another device
            assert len({tensor.device for tensor in args[0]}) == 1, f"{func} of tensors on several devices"
        return super().__torch_dispatch__(func, types, args, kwargs)


def take(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """tensor[index]. torch's own switches to the tensor's device before anything else, as do the others that are replaced in pretend()."""
    parts = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [part for part in parts if not isinstance(part, torch.Tensor)]:
        place = next(number for number, part in enumerate(parts) if part is Ellipsis)
        named = sum(part is not None for part in parts) - 1
        parts = (*parts[:place], *[slice(None)] * (tensor.dim() - named), *parts[place + 1 :])
    dim, indices = 0, dict[int, torch.Tensor]()
    for part in parts:
        if isinstance(part, slice):
            tensor = torch.ops.aten.slice.Tensor(tensor, dim, part.start, part.stop, part.step or 1)
        elif part is None:
            tensor = tensor.unsqueeze(dim)
        elif isinstance(part, int):
            tensor, dim = tensor.select(dim, part), dim - 1
        elif part.dtype != torch.bool:  # without contents nobody knows what a mask takes: all
            indices[dim] = part
        dim += 1
    return torch.ops.aten.index.Tensor(tensor, [indices.get(dim) for dim in range(max(indices) + 1)]) if indices else tensor


def pretend() -> None:
    """What is asked of the driver while a model is made."""
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: GPU  # type: ignore[assignment, return-value]  (of a number torch asks the driver)
    torch.cuda.set_device = lambda device: None
    torch.cuda.device_count = lambda: 1
    torch.cuda.manual_seed = lambda seed: None
    torch.cuda.Stream = MagicMock  # type: ignore[assignment, misc]
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    base.current_device = base.take_local_device = lambda: GPU
    torch.Tensor.__getitem__, torch.Tensor.__setitem__ = take, put  # type: ignore[method-assign, assignment]
    data, tensor_of = cast(Any, torch.Tensor.data), torch.tensor
    torch.tensor = lambda given, *, device=None, **options: tensor_of(given, **options).to(device or "cpu")  # type: ignore[assignment]

    def put_data(tensor: FakeTensor, value: torch.Tensor) -> None:
        data.__set__(tensor, value)
        tensor.fake_device = value.device  # which a fake tensor does not follow by itself

    FakeTensor.data = property(data.__get__, put_data)  # type: ignore[assignment]
    torch.Tensor.__invert__ = lambda tensor: torch.ops.aten.bitwise_not.default(tensor)  # type: ignore[method-assign]
    torch.Tensor.copy_ = lambda tensor, source, *_, **__: torch.ops.aten.copy_.default(tensor, source)  # type: ignore[method-assign, assignment]
    torch.Tensor.contiguous = lambda tensor, **_: torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)  # type: ignore[method-assign, assignment]
    new_group = dist.new_group
    dist.all_gather_object = lambda found, own, *_, **__: found.__setitem__(slice(None), [own, *([] for _ in found[1:])])
    # Megatron makes gloo groups beside those of the default backend.
    dist.new_group = lambda *given, **options: new_group(*given, **{**options, "backend": "fake"})


def main(folder: Path, layout: dict[str, Any]) -> None:
    world_size = max(layout.get("tensor_parallel", 1) * layout.get("context_parallel", 1), layout.get("expert_parallel", 1))
    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0")
    mode = WithoutDevice(allow_non_fake_inputs=True)
    pretend()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron_cases import batch_of, weighted_loss

    from roll_lite.config.schema.losses import MismatchCorrectionConfig
    from roll_lite.config.schema.models import MegatronStrategyConfig
    from roll_lite.data.microbatch import MicroBatchPlan, TokenBudget
    from roll_lite.data.ragged import Ragged
    from roll_lite.distributed.strategy.megatron import model_io, parallel
    from roll_lite.distributed.strategy.megatron.experts import Balance
    from roll_lite.distributed.strategy.megatron.model import RollModel, transformer_config
    from roll_lite.models.hf_config import read_hf_config
    from roll_lite.workers.objectives import ActorLoss, CriticLoss

    parallel.model_parallel_cuda_manual_seed = lambda *_, **__: None  # type: ignore[assignment]
    CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    hf, config = read_hf_config(folder), MegatronStrategyConfig(**layout)
    parallel.join_groups(config, seed=1)
    device, experts = GPU, hf.experts
    if experts is not None:
        _evenly()
    batch = batch_of([9, 4, 12, 2, 7, 5], vocab=hf.vocab_size)
    lengths = batch.ragged("advantages").lengths
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs", "values"):
        batch = batch.with_columns(**{name: Ragged.from_rows([torch.zeros(int(length)) for length in lengths])})
    batch = batch.with_columns(loss_weight=torch.ones(len(batch)), kept_ids=_kept(batch))
    plan = MicroBatchPlan.of(batch.lengths, TokenBudget(20), parallel.layout_multiples(config))

    def to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        own = tensor.clone()
        with mode:
            return mode.from_tensor(own).to(device)

    with patch.object(model_io, "_to", to):
        told = {} if experts is None else {"rollout_experts": _chosen(batch, experts)}
        inputs = model_io.model_inputs(batch.with_columns(**told), plan, device, experts=experts, record=experts is not None)
        ends = model_io.model_inputs(batch, plan, device, ends=True)
    group = parallel.parallel_state.get_tensor_model_parallel_group()
    losses = (
        ActorLoss(
            mismatch_correction=MismatchCorrectionConfig.model_validate(
                {"weight": {}, "filters": [{"level": "sequence_max", "high": 1e9}]}
            ),
            kl_coef=0.1,
            entropy_coef=0.1,
        ),
        CriticLoss(),
    )
    balance = Balance(0.01)
    with mode:
        for value_head, loss in zip((False, True), losses, strict=True):
            model = RollModel(transformer_config(hf, config, torch.bfloat16, False), hf, value_head, balance).requires_grad_(False)
            _all_on(device, dict(model.named_parameters()))
            outputs = ("values", "final_value") if value_head else ("log_probs", "entropy", "distribution")
            for given in ends if value_head else inputs:
                result = model(given.input_ids, given.rows, given.positions)
                found = model_io.outputs_of(result, None if value_head else model.output_weight, given, outputs, hf.vocab_size, group)
                _all_on(device, {name: getattr(found, name) for name in outputs})
                for compute in (loss, weighted_loss):
                    total, metrics = compute(found, given.micro_batch)
                    _all_on(device, {"loss": total, **metrics})
                if experts is not None and not value_head:
                    _routes(given.rows.routes, experts, config.sequence_parallel)
        if experts is not None:
            with patch.object(torch.Tensor, "__float__", lambda _: 1.0), patch.object(FakeTensor, "tolist", lambda _: [2.0, 1.0]):
                used = balance.end(experts, device)
            assert (used.busiest, used.balance_loss is not None, used.rerouted) == (1.0, True, 0.5), used
        _send_weights(hf, config, transformer_config(hf, config, torch.float32, False))
    print("all on", device)


def _evenly() -> None:
    """As many tokens for each expert: what tells their number has no contents."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    from roll_lite.distributed.strategy.megatron import model
    from roll_lite.distributed.strategy.megatron.experts import experts_config

    preprocess = MoEAlltoAllTokenDispatcher.preprocess

    def with_data(*given: Any) -> Any:
        with unset_fake_temporarily():
            return preprocess(*given)

    even = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    model.experts_config = lambda hf: {**experts_config(hf), **even}
    MoEAlltoAllTokenDispatcher.preprocess = with_data


def _chosen(batch: Any, experts: Any) -> Any:
    from roll_lite.data.ragged import Ragged

    width = sum(experts.layers) * experts.per_token
    return Ragged.from_rows([torch.zeros(int(length), width, dtype=torch.int16) for length in batch.lengths])


def _routes(routes: Any, experts: Any, sequence_parallel: bool) -> None:
    from roll_lite.distributed.strategy.megatron.routing import collect_routes

    _all_on(GPU, {str(layer): taken for layer, taken in routes.taken.items()})
    assert len(routes.taken) == sum(experts.layers)
    collected = collect_routes(routes, sum(experts.layers), experts.per_token, sequence_parallel)
    _all_on(torch.device("cpu"), {"for the batch": collected})


def _moved(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """As Module.to, which wants to swap a fake tensor's contents."""
    for module in model.modules():
        module._buffers.update({name: buffer.to(device) for name, buffer in module._buffers.items() if buffer is not None})
        for name, weight in module._parameters.items():
            module._parameters[name] = None if weight is None else torch.nn.Parameter(weight.to(device), requires_grad=False)
    return model


def score(folder: Path) -> None:
    """A Hugging Face reward model: padded batches, its own pooling or that of the strategy."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    pretend()
    from roll_lite.config.schema.models import HfStrategyConfig, ModelConfig
    from roll_lite.data.microbatch import PaddedBudget
    from roll_lite.data.proto import DataProto
    from roll_lite.data.ragged import Ragged
    from roll_lite.distributed.strategy import hf
    from roll_lite.distributed.strategy.base import ModelSpec

    def made(path: Path, dtype: torch.dtype, **_: Any) -> tuple[Any, dict[str, list[str]]]:
        config = AutoConfig.from_pretrained(path, attn_implementation="eager")
        model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
        model.to = partial(_moved, model)
        return model, {"missing_keys": []}

    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    batch = DataProto({"input_ids": Ragged.from_rows([torch.arange(3, 3 + length) for length in (9, 1, 12, 5)], torch.int64)})
    passes: list[torch.Tensor] = []
    mode = WithoutDevice(allow_non_fake_inputs=True)
    spec = ModelSpec(ModelConfig(path=folder, dtype="bfloat16"), HfStrategyConfig(), "reward_models.toy.path")
    strategy = hf.HfRewardStrategy(spec)
    with (
        mode,
        patch.object(AutoModelForSequenceClassification, "from_pretrained", made),
        patch.object(hf, "StateMover", MagicMock()),
        patch.object(hf, "take_local_device", lambda: GPU),
    ):
        strategy.initialize()
    _all_on(GPU, {**dict(strategy._model.named_parameters()), **dict(strategy._model.named_buffers())})
    scores = strategy._scores

    def on_gpu(*given: torch.Tensor) -> torch.Tensor:
        with mode:
            passes.append(scores(*map(mode.from_tensor, given)))
        return passes[-1]

    strategy._scores = on_gpu  # type: ignore[method-assign]
    with patch.object(torch, "inference_mode", lambda *_: torch.no_grad()):  # that one runs kernels at once
        found = strategy.forward(batch, ["final_value"], strategy.plan(batch.lengths, PaddedBudget(20)))
    assert found is not None and len(passes) > 1
    _all_on(GPU, dict(enumerate(passes)))
    _all_on(torch.device("cpu"), {"for the batch": found.tensor("final_value")})
    print("all on", GPU)


def _send_weights(hf: Any, config: Any, megatron: Any) -> None:
    """As a float32 trainer with adapters does for bfloat16 engines: gathered, merged, and cast into the buffers of both kinds of transport.
    They are read where the model is. What comes then wants contents, or a stream: exports, broadcasts, checksums."""
    from roll_lite.config.schema.models import LoraConfig
    from roll_lite.distributed.strategy.megatron.experts import Balance
    from roll_lite.distributed.strategy.megatron.hf_export import HfExporter
    from roll_lite.distributed.strategy.megatron.hf_mapping import bind
    from roll_lite.distributed.strategy.megatron.lora import Adapters
    from roll_lite.distributed.strategy.megatron.model import RollModel
    from roll_lite.distributed.weight_sync.memory import BucketSegment, GpuSegment
    from roll_lite.distributed.weight_sync.plan import plan_transfers
    from roll_lite.distributed.weight_sync.transport import flat_layout, flatten, unflatten

    model = RollModel(megatron, hf, False, Balance(0.01))
    bindings = bind([model], hf)
    adapters = Adapters([model], hf, LoraConfig(rank=2, targets=["q_proj", "o_proj", "up_proj", "down_proj"]), 1)
    exporter = HfExporter(bindings, hf, adapters.merging)
    plan = exporter.plan(1 << 16)
    assert len(plan.tensors) == len({tensor.name for tensor in plan.tensors}) > len(adapters.merging) > 0
    for route in plan_transfers(plan, {0: 1}, torch.bfloat16).routes:
        tensors = exporter.bucket([tensor for tensor in plan.tensors if tensor.bucket == route.bucket])
        assert tensors is not None
        _all_on(GPU, tensors)
        layout = flat_layout(route.tensors)
        for segment, where in ((BucketSegment(layout.nbytes, 1), torch.device("cpu")), (GpuSegment(layout.nbytes, 1), GPU)):
            flatten(route.tensors, tensors, layout, segment.whole)
            received = unflatten(segment.whole, route.tensors, layout)
            _all_on(where, received)
            assert {tensor.dtype for tensor in received.values()} == {torch.bfloat16}


def _kept(batch: Any) -> Any:
    from roll_lite.data.ragged import Ragged

    return Ragged.from_rows([torch.full((int(length), 3), 5, dtype=torch.int32) for length in batch.ragged("advantages").lengths])


def _all_on(device: torch.device, tensors: Mapping[Any, torch.Tensor]) -> None:
    elsewhere = [name for name, tensor in tensors.items() if tensor.device.type != device.type]
    assert tensors and not elsewhere, f"not on {device}: {elsewhere}"


if __name__ == "__main__":
    asked = json.loads(sys.argv[2])
    score(Path(sys.argv[1])) if asked is None else main(Path(sys.argv[1]), asked)
