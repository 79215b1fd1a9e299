from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from roll_lite.distributed.strategy.megatron.model_io import ModelInput

OnHead = Callable[[torch.Tensor, ModelInput], Any]


def sum_gradients(chunks: list[Any], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Call Megatron's finalize_model_grads without dividing by the token count, which loss weights include."""
    finalize_model_grads(chunks, None, **options)


def run_forward(chunks: Sequence[Any], inputs: Sequence[ModelInput], on_head: OnHead) -> list[Any]:
    """Run micro-batches without gradients. The last pipeline stage returns results of `on_head(stage output, input)`, others []."""

    def step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        given = next(iterator)
        return chunk(given.input_ids, given.rows, given.positions), lambda result, non_loss_data: on_head(result, given)

    with torch.no_grad():
        return _run(step, chunks, inputs, forward_only=True, collect_non_loss_data=True)


def run_training(chunks: Sequence[Any], inputs: Sequence[ModelInput], on_head: OnHead) -> list[Any]:
    """Run micro-batches forward and backward; sum gradients over micro-batches and data-parallel ranks. `on_head(stage output, input)`
    returns (loss, value). The last pipeline stage returns the values, others []."""

    def step(iterator: Any, chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        given = next(iterator)

        def of_result(result: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            loss, value = on_head(result, given)
            # Megatron wants a token count for averaging, which sum_gradients skips.
            return loss, torch.zeros([], dtype=torch.int, device=loss.device), value

        return chunk(given.input_ids, given.rows, given.positions), of_result

    return _run(step, chunks, inputs, forward_only=False)


def _run(step: Any, chunks: Sequence[Any], inputs: Sequence[ModelInput], **options: Any) -> list[Any]:
    iterators = [iter(inputs) for _ in chunks]
    several = len(chunks) > 1
    return get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators if several else iterators[0],
        model=list(chunks) if several else [chunks[0]],
        num_microbatches=len(inputs),
        # Used by Megatron only for micro-batches of equal shape; here stages exchange shapes.
        seq_length=inputs[0].input_ids.shape[1],
        micro_batch_size=inputs[0].input_ids.shape[0],
        **options,
    )


def over_data_ranks(count: int, reduction: Any) -> int:
    """Reduce an integer over data-parallel ranks on the host, without waiting for the device."""
    if parallel_state.get_data_parallel_world_size() > 1:
        total = torch.tensor(count)
        dist.all_reduce(total, reduction, group=parallel_state.get_data_parallel_group_gloo())
        return int(total)
    return count


def reduce_sums(sums: Sequence[dict[str, torch.Tensor]], is_last_stage: bool, device: torch.device) -> dict[str, float]:
    """Sum metrics over micro-batches and data-parallel ranks, with one wait for the device.

    Context-parallel ranks' equal sums are averaged, so that a NaN or infinity on one reaches all.
    """
    named: tuple[list[str], list[float]] = ([], [])
    if is_last_stage:
        names = sorted(sums[0])
        if any(sorted(other) != names for other in sums):
            raise ValueError("a loss function must return the same metrics for every micro-batch")
        total = torch.stack([torch.stack([part[name].detach().double() for name in names]) for part in sums]).sum(0)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        named = names, (total / parallel_state.get_context_parallel_world_size()).tolist()
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        box: list[Any] = [named]
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        dist.broadcast_object_list(box, src=last, group=parallel_state.get_pipeline_model_parallel_group(), device=device)
        named = box[0]
    return dict(zip(*named, strict=True))
