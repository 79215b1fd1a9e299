from __future__ import annotations

import os
from functools import cached_property, partial
from typing import Any

import psutil
import torch
import torch.distributed as dist
from vllm.config import set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_gather
from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample import rejection_sampler

from roll_lite.distributed.liveness import is_running
from roll_lite.distributed.numa import bind_to_gpu
from roll_lite.distributed.strategy.inference.adapters import IncomingAdapters, held_adapters
from roll_lite.distributed.strategy.inference.answers import answering
from roll_lite.distributed.strategy.inference.held_weights import Layers, held_weights
from roll_lite.distributed.strategy.inference.processes import HOST_PID, kill_all, when_host_is_gone
from roll_lite.distributed.strategy.vllm.compat.adapters import adapted_layers, multiply_plainly, put_adapters
from roll_lite.distributed.weight_sync.endpoints import WeightReceiver
from roll_lite.distributed.weight_sync.update import checksum
from roll_lite.observability.device_memory import take_peaks
from roll_lite.observability.trace_recorder import RECORDER


def _layers() -> Layers:
    workers = get_tensor_model_parallel_world_size()
    return Layers(linear, vocab_parallel_embedding, RoutedExperts, _read_experts, workers, tensor_model_parallel_all_gather)


def _all_say(mine: bool) -> bool:
    group = get_tp_group()
    if group.world_size == 1:
        return mine
    said = torch.tensor(int(mine))
    dist.all_reduce(said, dist.ReduceOp.MIN, group=group.cpu_group)
    return bool(said)


class WorkerExtension:
    """Methods of vLLM's workers, called by name (collective_rpc). `answering` turns exceptions into return values."""

    rank: int
    device: torch.device
    vllm_config: Any
    model_config: Any
    get_model: Any
    model_runner: Any
    roll_lite_dropped: list[tuple[torch.UntypedStorage, int]]
    roll_lite_adapters: IncomingAdapters | None = None

    @cached_property
    def roll_lite_receiver(self) -> WeightReceiver:
        return WeightReceiver(staged=self.roll_lite_adapters is not None)

    @answering
    def roll_lite_take_adapters(self, shapes: dict[str, list[int]], rank: int) -> None:
        """Make later weight updates carry LoRA adapters only. `shapes`: {PEFT name: shape}."""
        self.roll_lite_adapters = IncomingAdapters(shapes, rank, partial(put_adapters, self.model_runner))

    @answering
    def roll_lite_connect(self, first_member: int, membership: dict[str, Any]) -> None:
        if self.device.type == "cuda":
            bind_to_gpu(torch.cuda.get_device_properties(self.device))
        self.roll_lite_receiver.connect(membership, first_member + self.rank)

    @answering
    def roll_lite_load_bucket(self, routes: list[dict[str, Any]], following: list[dict[str, Any]]) -> None:
        model = self.get_model()

        def begin(again: bool) -> None:
            if again:  # the failed update has left counts of loaded parts in the layers
                finalize_layerwise_reload(model, self.model_config)
            if self.device.type == "cpu":
                _make_expert_kernels_anew(model)
            initialize_layerwise_reload(model)

        adapters = self.roll_lite_adapters
        first, take = (begin, model.load_weights) if adapters is None else (adapters.begin, adapters.take)
        with set_current_vllm_config(self.vllm_config):
            self.roll_lite_receiver.load(routes, first, take, following, _all_say)
        torch.accelerator.synchronize()

    @answering
    def roll_lite_weights_touched(self) -> bool:
        return self.roll_lite_receiver.touched

    @answering
    def roll_lite_put_in_place(self) -> dict[str, float]:
        model = self.get_model()

        def put_in_place() -> None:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(model, self.model_config)
                if self.device.type == "cpu":
                    _pack_lm_head_again(model)

        adapters = self.roll_lite_adapters
        return self.roll_lite_receiver.finish(put_in_place if adapters is None else adapters.put_in_place)

    @answering
    def roll_lite_trace(self, prefix: str | None) -> str:
        return RECORDER.trace(prefix and f"{prefix}-{self.rank}.json.gz")

    @answering
    def roll_lite_memory(self) -> dict[str, int]:
        return take_peaks()

    @answering
    def roll_lite_drop_cache(self) -> None:
        """Free the KV cache on a CPU, where vLLM frees nothing. `roll_lite_make_cache` restores it."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in self.model_runner.kv_caches}
        self.roll_lite_dropped = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    @answering
    def roll_lite_make_cache(self) -> None:
        dropped, self.roll_lite_dropped = self.roll_lite_dropped, []
        for storage, size in dropped:
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8).set_(storage).zero_()  # must be finite: attention multiplies masked entries by 0

    @answering
    def roll_lite_checksums(self, dtypes: dict[str, str], shapes: dict[str, list[int]], names: list[str] | None) -> dict[str, str]:
        model, adapters = self.get_model(), self.roll_lite_adapters
        if adapters is None:
            held = held_weights(model, _layers(), names)
        else:
            adapted = adapted_layers(self.model_runner, adapters.rank)
            held = held_adapters(adapted, model, _layers(), shapes if names is None else names)
        return {name: checksum(tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor) for name, tensor in held}


def _experts_of_this_worker_alone() -> None:
    """Give vLLM's CPU kernel local expert ids: with global ids, it would read out of bounds."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    apply = CPUUnquantizedExperts.apply

    def mapped(
        self: Any, *args: Any, topk_weights: torch.Tensor, topk_ids: torch.Tensor, expert_map: torch.Tensor | None, **rest: Any
    ) -> Any:
        if expert_map is not None:
            local = expert_map[topk_ids.long()]
            topk_weights = topk_weights.masked_fill(local < 0, 0.0)
            topk_ids = local.clamp(min=0).to(topk_ids.dtype)
        return apply(self, *args, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=None, **rest)

    CPUUnquantizedExperts.apply = mapped


def _experts_without_adapters() -> None:
    """Make vLLM choose its expert kernel as if LoRA were off: experts have no adapters in engines."""
    select = unquantized_fused_moe_method.select_unquantized_moe_backend

    def without(moe_config: Any) -> Any:
        moe_config.is_lora_enabled = False
        return select(moe_config)

    unquantized_fused_moe_method.select_unquantized_moe_backend = without


def _check_drafts_correctly() -> None:
    """Repair speculative decoding on CPUs: temperature and top_p get lost in an integer copy, top_k fails in steps without drafts."""
    truncate = rejection_sampler.apply_top_k_top_p

    def expand(settings: torch.Tensor, ends: torch.Tensor, _: int, replace_from: int = 0, replace_to: int = 0) -> torch.Tensor:
        return settings.masked_fill(settings == replace_from, replace_to).repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))

    rejection_sampler.expand_batch_to_tokens = expand
    rejection_sampler.apply_top_k_top_p = lambda logits, k, p: truncate(logits, k, p) if len(logits) else logits


def _pack_lm_head_again(model: torch.nn.Module) -> None:
    """Pack a tied LM head again; vLLM's reload skips it."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _make_expert_kernels_anew(model: torch.nn.Module) -> None:
    """Drop expert kernels: vLLM's reload then rebuilds them with the new weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, unquantized_fused_moe_method.UnquantizedFusedMoEMethod):
            method.moe_kernel = None


_DIGIT = 128
"""Base of the row and column numbers that `_unpacked` packs digit by digit: any dtype holds a digit."""


def _read_experts(module: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    if module.w13_weight.device.type != "cpu":
        raise RuntimeError("weight_sync.verify: experts cannot be read back from vLLM on a GPU; use none")
    rows, isa = module.moe_config.intermediate_size_per_partition_unpadded, module.quant_method.experts_cls.isa
    gate_up, down = _unpacked(module.w13_weight.detach(), isa), _unpacked(module.w2_weight.detach(), isa)
    gate_up = torch.cat([half[:, :rows] for half in gate_up.chunk(2, 1)], 1)
    return module.global_num_experts, gate_up, down[:, :, :rows]


def _unpacked(packed: torch.Tensor, isa: str) -> torch.Tensor:
    """Undo vLLM's packing, which permutes each expert's entries: packing row and column numbers, digit by digit, reveals the
    permutation."""
    from vllm._custom_ops import cpu_prepack_moe_weight

    _, rows, columns = packed.shape
    places = []
    for number in (torch.arange(rows)[:, None].expand(rows, columns), torch.arange(columns).expand(rows, columns)):
        digits = [(number // _DIGIT**power % _DIGIT).to(packed.dtype).contiguous() for power in range(3)]
        moved = [cpu_prepack_moe_weight(digit[None], isa).long().flatten() for digit in digits]
        places.append(sum(digit * _DIGIT**power for power, digit in enumerate(moved)))
    whole = torch.empty_like(packed)
    whole[:, places[0], places[1]] = packed.flatten(1)
    return whole


def _die_without_host(parent: psutil.Process | None) -> None:
    engine = [parent] if parent is not None and parent.pid != int(os.environ[HOST_PID]) and is_running(parent) else []
    kill_all([*engine, psutil.Process()])


if not torch.cuda.is_available():
    _experts_of_this_worker_alone()
    _experts_without_adapters()
    _check_drafts_correctly()
    multiply_plainly()
when_host_is_gone(partial(_die_without_host, psutil.Process().parent()))
