from __future__ import annotations

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from roll_lite.config.arithmetic import micro_batch_count_divisor, micro_batch_tokens_divisor
from roll_lite.config.schema.models import MegatronStrategyConfig
from roll_lite.data.microbatch import Multiples
from roll_lite.distributed.strategy.base import GROUP_TIMEOUT, RankLayout


def cut_group(of_experts: bool) -> dist.ProcessGroup:
    return parallel_state.get_expert_tensor_parallel_group() if of_experts else parallel_state.get_tensor_model_parallel_group()


def layout_multiples(strategy: MegatronStrategyConfig) -> Multiples:
    return Multiples(micro_batch_tokens_divisor(strategy), micro_batch_count_divisor(strategy))


def join_groups(strategy: MegatronStrategyConfig, seed: int) -> RankLayout:
    """Create the process groups (collective), or reuse another model's with the same layout. Return this rank's coordinates."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=strategy.tensor_parallel,
            pipeline_model_parallel_size=strategy.pipeline_parallel,
            context_parallel_size=strategy.context_parallel,
            virtual_pipeline_model_parallel_size=strategy.virtual_pipeline_parallel if strategy.virtual_pipeline_parallel > 1 else None,
            expert_model_parallel_size=strategy.expert_parallel,
            expert_tensor_parallel_size=strategy.expert_tensor_parallel,
            distributed_timeout_minutes=int(GROUP_TIMEOUT.total_seconds() / 60),
        )
        left_out = parallel_state.get_expert_data_parallel_group_gloo()  # Megatron-Core 0.16 gives this group no timeout
        if dist.get_backend(left_out) == "gloo":
            left_out.set_timeout(GROUP_TIMEOUT)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    pipeline_rank = parallel_state.get_pipeline_model_parallel_rank()
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    context_rank = parallel_state.get_context_parallel_rank()
    return RankLayout(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=tensor_rank,
        pipeline_rank=pipeline_rank,
        context_rank=context_rank,
        is_head=tensor_rank == 0 and context_rank == 0 and pipeline_rank == strategy.pipeline_parallel - 1,
    )
