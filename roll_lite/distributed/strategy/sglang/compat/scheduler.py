from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import Any

import sglang.srt.managers.scheduler as scheduler_module
import sglang.srt.model_executor.model_runner as model_runner
import torch
import torch.distributed as dist
from sglang.srt.distributed import tensor_model_parallel_all_gather
from sglang.srt.layers import linear, vocab_parallel_embedding
from sglang.srt.layers.moe import fused_moe_native
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.sampler import Sampler
from sglang.srt.managers.io_struct import AbortReq, GetInternalStateReq, GetInternalStateReqOutput, TokenizedGenerateReqInput
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_MATCHED_STR, Req
from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.model_executor.model_runner_components.weight_updater import _unsupported_derived_weight_cache_error
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling import penaltylib
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from roll_lite.distributed.strategy.inference.adapters import NAME, IncomingAdapters, held_adapters
from roll_lite.distributed.strategy.inference.answers import answering
from roll_lite.distributed.strategy.inference.held_weights import Layers, held_weights
from roll_lite.distributed.strategy.inference.requests import STOP_OVERLAP
from roll_lite.distributed.strategy.sglang.compat.adapters import (
    adapted_layers,
    adapters_leave_with_weights,
    do_without_pinned_memory,
    put_adapters,
)
from roll_lite.distributed.strategy.sglang.compat.requests import StopText
from roll_lite.distributed.weight_sync.endpoints import WeightReceiver
from roll_lite.distributed.weight_sync.update import checksum
from roll_lite.observability.device_memory import take_peaks
from roll_lite.observability.trace_recorder import RECORDER

_PAUSED_POLL_S = 0.001
_GREEDY_TOP_K = 1


def _by_all(method: Callable[..., Any]) -> Callable[..., None]:
    """Decorate a method that all workers run; worker 0 writes all return values to the file `answer`."""
    answering_method = answering(method)

    @wraps(method)
    def call(self: RolloutScheduler, answer: str, **arguments: Any) -> None:
        answers: list[Any] = [None] * dist.get_world_size(self.tp_group.cpu_group)
        dist.all_gather_object(answers, answering_method(self, **arguments), group=self.tp_group.cpu_group)
        if get_parallel().tp_rank == 0:
            Path(answer).write_text(json.dumps(answers), encoding="utf-8")

    return call


class RolloutScheduler(Scheduler):
    roll_lite_adapters: IncomingAdapters | None = None

    @cached_property
    def _receiver(self) -> WeightReceiver:
        return WeightReceiver(staged=self.roll_lite_adapters is not None)

    # ------------------------------------------------------------ weights

    @_by_all
    def roll_lite_take_adapters(self, shapes: dict[str, list[int]], rank: int) -> None:
        self.roll_lite_adapters = IncomingAdapters(shapes, rank, partial(put_adapters, self.tp_worker.model_runner))

    @_by_all
    def roll_lite_connect(self, first_member: int, membership: dict[str, Any]) -> None:
        refusal = _unsupported_derived_weight_cache_error(self.tp_worker.model_runner.model)
        if refusal and self.roll_lite_adapters is None:
            raise ValueError(f"SGLang cannot take new weights as it was started: {refusal}")
        self._receiver.connect(membership, first_member + get_parallel().tp_rank)

    @_by_all
    def roll_lite_load_bucket(self, routes: list[dict[str, Any]], following: list[dict[str, Any]]) -> None:
        runner, adapters = self.tp_worker.model_runner, self.roll_lite_adapters

        def begin(again: bool) -> None:
            if again:
                runner.weight_updater.end_weight_update(run_post_load=False)
            runner.weight_updater.begin_weight_update()

        first, take = (begin, runner.model.load_weights) if adapters is None else (adapters.begin, adapters.take)
        self._receiver.load(routes, first, take, following)

    @_by_all
    def roll_lite_put_in_place(self) -> dict[str, float]:
        updater, adapters = self.tp_worker.model_runner.weight_updater, self.roll_lite_adapters
        put_in_place = partial(updater.end_weight_update, run_post_load=False) if adapters is None else adapters.put_in_place
        return self._receiver.finish(put_in_place)

    @_by_all
    def roll_lite_weights_touched(self) -> bool:
        return self._receiver.touched

    @_by_all
    def roll_lite_checksums(self, dtypes: dict[str, str], shapes: dict[str, list[int]], names: list[str] | None) -> dict[str, str]:
        runner = self.tp_worker.model_runner
        if self.roll_lite_adapters is None:
            held = held_weights(runner.model, _layers(), names)
        else:
            held = held_adapters(adapted_layers(runner), runner.model, _layers(), shapes if names is None else names)
        whole = ((name, _without_padding(name, tensor, shapes[name])) for name, tensor in held)
        return {name: checksum(tensor.to(getattr(torch, dtypes[name])) if name in dtypes else tensor) for name, tensor in whole}

    @_by_all
    def roll_lite_lengths(self) -> dict[str, int]:
        """{rid: tokens} of the requests, which all wait during a pause."""
        return {request.rid: len(request.output_ids) for request in self.waiting_queue}

    @_by_all
    def roll_lite_trace(self, prefix: str | None) -> str:
        return RECORDER.trace(prefix and f"{prefix}-{get_parallel().tp_rank}.json.gz")

    @_by_all
    def roll_lite_memory(self) -> dict[str, int]:
        return take_peaks()

    def get_init_info(self) -> dict[str, Any]:
        return {**super().get_init_info(), "page_size": self.page_size}

    def get_internal_state(self, recv_req: GetInternalStateReq) -> GetInternalStateReqOutput:
        """Return an empty state: liveness checks call this every second, and SGLang's method collects all settings."""
        return GetInternalStateReqOutput(internal_state={})

    # ------------------------------------------------------------ requests

    def handle_generate_request(self, recv_req: TokenizedGenerateReqInput, **options: Any) -> None:
        if self.roll_lite_adapters is not None:
            recv_req.lora_id = NAME
        super().handle_generate_request(recv_req, **options)

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests and report all their tokens; of re-queued ones, SGLang reports only streamed tokens."""
        begun = [r for r in self.waiting_queue if r.output_ids and (recv_req.abort_all or r.rid.startswith(recv_req.rid))]
        for request in begun:
            self.waiting_queue.remove(request)
            self._release_aborted_request(request)
            request.finished_reason = FINISH_ABORT()
        if begun:
            self.output_streamer.stream_output(begun, any(request.return_logprob for request in begun))
        super().abort_request(recv_req)

    def _record_scheduler_state_for_paused_engine(self) -> None:
        """Sleep while paused: the loop would use a whole core."""
        super()._record_scheduler_state_for_paused_engine()
        time.sleep(_PAUSED_POLL_S)


class RolloutSampler(Sampler):
    """Torch sampler that truncates like vLLM and reports log-probs under the sampling distribution."""

    def _sample_from_probs(self, probs: torch.Tensor, sampling_info: Any, positions: torch.Tensor, simple_sampling_case: bool) -> Any:
        """Sample tokens. `probs` then holds the distribution for SGLang's log-probs: truncated, or whole for greedy requests."""
        if simple_sampling_case:
            return super()._sample_from_probs(probs, sampling_info, positions, True)
        whole = probs.clone()
        truncate_(probs, sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
        greedy = sampling_info.top_ks[:, None] == _GREEDY_TOP_K
        # Of tied tokens a greedy request takes the one that it would take in an all-greedy batch.
        probs.masked_fill_(greedy & (torch.arange(probs.shape[-1], device=probs.device) != whole.argmax(-1, keepdim=True)), 0.0)
        sampled = super()._sample_from_probs(probs, sampling_info, positions, True)
        # Greedy requests report log-probs under the whole distribution, as in an all-greedy batch. An index by a mask would stall the host.
        torch.where(greedy, whole, probs, out=probs)
        return sampled


def truncate_(probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """Truncate probabilities [rows, vocabulary] in place by min_p, then top_k (with ties), then top_p; renormalize."""
    columns = probs.shape[-1]
    probs.masked_fill_(probs < probs.amax(-1, keepdim=True) * min_p[:, None], 0.0)
    ordered, order = probs.sort(-1, descending=True)
    last = ordered.gather(1, top_k.long().clamp(1, columns)[:, None] - 1)
    ordered = ordered.masked_fill(ordered < last, 0.0)
    before = ordered.cumsum(-1) - ordered
    beyond = before >= top_p[:, None] * ordered.sum(-1, keepdim=True)
    ordered = ordered.masked_fill(beyond & (top_p[:, None] < 1), 0.0)  # not at top_p 1, where rounding could drop the last tokens
    probs.zero_().scatter_(1, order, ordered / ordered.sum(-1, keepdim=True))


def take_seeds_where_given() -> None:
    """Make SGLang use requests' seeds without its deterministic mode, which needs a GPU. Batches without seeds keep faster sampling."""
    make, merge = SamplingBatchInfo.__dict__["from_schedule_batch"].__func__, SamplingBatchInfo.merge_batch

    def drawn(info: SamplingBatchInfo) -> torch.Tensor:
        return torch.randint(2**62, (len(info),), device=info.device)

    def from_schedule_batch(cls: type[SamplingBatchInfo], batch: Any, vocab_size: int) -> SamplingBatchInfo:
        info: SamplingBatchInfo = make(cls, batch, vocab_size)
        seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
        if any(seed is not None for seed in seeds):
            given = torch.tensor([-1 if seed is None else seed for seed in seeds], dtype=torch.int64).to(info.device)
            info.sampling_seed = torch.where(given < 0, drawn(info), given)
        return info

    def merge_batch(info: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
        if (info.sampling_seed is None) != (other.sampling_seed is None):
            unseeded = info if info.sampling_seed is None else other
            unseeded.sampling_seed = drawn(unseeded)
        merge(info, other)

    SamplingBatchInfo.from_schedule_batch, SamplingBatchInfo.merge_batch = classmethod(from_schedule_batch), merge_batch


class MinTokens(penaltylib.BatchedMinNewTokensPenalizer):
    """Count tokens for min_tokens from the request's start; SGLang restarts at 0 when a request is re-queued."""

    def _prepare(self) -> None:
        super()._prepare()
        generated = [[len(request.output_ids)] for request in self.orchestrator.reqs()]
        self.len_output_tokens = torch.tensor(generated, dtype=torch.int32).to(self.orchestrator.device)


def ends_with_stop_text(request: Req, _: int = 1) -> bool:
    """True if a response ends with a stop string. SGLang's check ignores min_tokens, searches special tokens' text, and looks back too few
    tokens."""
    parameters = request.sampling_params
    if not parameters.stop_strs:
        return False
    if not hasattr(request, "roll_lite_stop_text"):
        overlap = (parameters.custom_params or {}).get(STOP_OVERLAP, 0)
        request.roll_lite_stop_text = StopText(request.tokenizer, request.origin_input_ids, parameters.stop_strs, overlap)
    seen: StopText = request.roll_lite_stop_text
    while seen.tokens < len(request.output_ids):
        found = seen.next(request.output_ids[seen.tokens])
        if found is not None and seen.tokens > parameters.min_new_tokens:
            request.finished_reason = FINISH_MATCHED_STR(matched=found)
            request.finished_len = seen.tokens
            return True
    return False


def ended_rather_than_aborted(update: Callable[[Req, int], None]) -> Callable[..., None]:
    # SGLang decodes one more token after an abort, and does not check whether that ends the response: it would be continued behind its end.

    def update_finish_state(request: Req, new_accepted_len: int = 1) -> None:
        abort = request.to_finish
        if new_accepted_len and isinstance(abort, FINISH_ABORT) and abort.status_code is None:  # failures have a code
            request.to_finish = None
            update(request, new_accepted_len)
            if request.finished():
                return
            request.to_finish = abort
        update(request, new_accepted_len)

    return update_finish_state


def _without_padding(name: str, tensor: torch.Tensor, shape: list[int]) -> torch.Tensor:
    """Remove SGLang's padding of weights on a CPU; RuntimeError if it is not zero. `shape`: without padding."""
    whole = tensor[tuple(slice(size) for size in shape)]
    if whole.numel() != tensor.numel() and tensor.count_nonzero() != whole.count_nonzero():
        raise RuntimeError(f"{name}: what SGLang has added to it is not zero")
    return whole


def _layers() -> Layers:
    workers = get_parallel().tp_group.world_size
    return Layers(linear, vocab_parallel_embedding, FusedMoE, _read_experts, workers, tensor_model_parallel_all_gather)


def _read_experts(module: Any) -> tuple[int, torch.Tensor, torch.Tensor]:
    if module.w13_weight.device.type != "cpu":  # GPU kernels' layouts are not supported
        raise RuntimeError("weight_sync.verify: experts cannot be read back from SGLang on a GPU; use none")
    return module.num_experts, module.w13_weight.detach(), module.w2_weight.detach()


def _of_this_worker_alone(multiply: Any) -> Any:
    """Make SGLang's CPU code skip experts on other workers, whose id, -1, it would use as an index."""

    def moe_forward_native(layer: Any, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
        if layer.num_local_experts == layer.num_experts:
            whole: torch.Tensor = multiply(layer, x, chosen, config)
            return whole
        output = torch.zeros_like(x)
        tokens, choices = torch.nonzero(chosen.topk_ids >= 0, as_tuple=True)
        if len(tokens):
            weights, ids = chosen.topk_weights[tokens, choices, None], chosen.topk_ids[tokens, choices, None]
            output.index_add_(0, tokens, multiply(layer, x[tokens], chosen._replace(topk_weights=weights, topk_ids=ids), config))
        return output

    return moe_forward_native


def run_scheduler(*args: Any, **kwargs: Any) -> None:
    scheduler_module.Scheduler = RolloutScheduler
    model_runner.create_sampler = RolloutSampler
    take_seeds_where_given()
    penaltylib.BatchedMinNewTokensPenalizer = MinTokens
    Req._check_str_based_finish = ends_with_stop_text
    Req.update_finish_state = ended_rather_than_aborted(Req.update_finish_state)
    adapters_leave_with_weights()
    if not torch.cuda.is_available():
        fused_moe_native.moe_forward_native = _of_this_worker_alone(fused_moe_native.moe_forward_native)
        # Buffer of expert choices; SGLang's is pinned memory, which needs a GPU.
        ALLOC_MEMORY_FUNCS["cpu"] = lambda dims, dtype, **_: torch.empty(dims, dtype=dtype)
        do_without_pinned_memory()
    run_scheduler_process(*args, **kwargs)
