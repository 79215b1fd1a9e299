"""Process groups of a layout, and this rank's place in it."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from roll_lite.config.arithmetic import count_multiple, pipeline_problem, tensor_parallel_fits, token_multiple
from roll_lite.config.schema.models import MegatronStrategyConfig
from roll_lite.data.microbatch import Multiples
from roll_lite.distributed.strategy.base import RankLayout
from roll_lite.models.hf_config import HfConfig


def check_layout(strategy: MegatronStrategyConfig, hf: HfConfig, world_size: int) -> None:
    """ValueError for an impossible layout."""
    tensor, pipeline, context = strategy.tensor_parallel, strategy.pipeline_parallel, strategy.context_parallel
    if world_size % (tensor * pipeline * context):
        of_context = f" x context_parallel {context}" if context > 1 else ""
        layout = f"tensor_parallel {tensor} x pipeline_parallel {pipeline}{of_context}"
        raise ValueError(f"strategy: {layout} does not divide the {world_size} ranks")
    if not tensor_parallel_fits(tensor, hf.heads, hf.key_value_heads, hf.head_dim):
        heads = f"{hf.heads} attention heads and {hf.key_value_heads} key/value heads of {hf.head_dim}"
        raise ValueError(f"strategy.tensor_parallel: {tensor} does not go with the model's {heads}")
    if not all(hf.has_experts(layer) for layer in range(hf.layers)) and hf.feed_forward % tensor:
        raise ValueError(f"strategy.tensor_parallel: {tensor} does not divide the model's feed-forward size {hf.feed_forward}")
    problem = pipeline_problem(strategy, hf.layers)
    for name, message in [*strategy.mistakes(), *([problem] if problem is not None else [])]:
        raise ValueError(f"strategy.{name}: {getattr(strategy, name)}: {message}")
    _check_experts(strategy, hf, world_size)


def _check_experts(strategy: MegatronStrategyConfig, hf: HfConfig, world_size: int) -> None:
    parallel, tensor = strategy.expert_parallel, strategy.expert_tensor_parallel
    if hf.experts is None:
        for name, size in (("expert_parallel", parallel), ("expert_tensor_parallel", tensor)):
            if size > 1:
                raise ValueError(f"strategy.{name}: {size} is for models with experts; {hf.family} has none")
        return
    if hf.experts.count % parallel:
        raise ValueError(f"strategy.expert_parallel: {parallel} does not divide the model's {hf.experts.count} experts")
    if hf.experts.feed_forward % tensor:
        raise ValueError(
            f"strategy.expert_tensor_parallel: {tensor} does not divide the experts' feed-forward size {hf.experts.feed_forward}"
        )
    if world_size % (parallel * tensor * strategy.pipeline_parallel):
        layout = f"expert_parallel {parallel} x expert_tensor_parallel {tensor} x pipeline_parallel {strategy.pipeline_parallel}"
        raise ValueError(f"strategy: {layout} does not divide the {world_size} ranks")
    if strategy.tensor_parallel > 1 and not strategy.sequence_parallel:
        raise ValueError("strategy.sequence_parallel: false; tensor_parallel > 1 of a model with experts needs true")


def cut_group(of_experts: bool) -> dist.ProcessGroup:
    """Group of ranks that share a matrix."""
    return parallel_state.get_expert_tensor_parallel_group() if of_experts else parallel_state.get_tensor_model_parallel_group()


def layout_multiples(strategy: MegatronStrategyConfig) -> Multiples:
    """Multiples that the layout asks of a micro-batch plan."""
    return Multiples(token_multiple(strategy), count_multiple(strategy))


def join_groups(strategy: MegatronStrategyConfig, seed: int) -> RankLayout:
    """Create the layout's process groups, or share those of another role in this process. Collective."""
    virtual = strategy.virtual_pipeline_parallel if strategy.virtual_pipeline_parallel > 1 else None
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=strategy.tensor_parallel,
            pipeline_model_parallel_size=strategy.pipeline_parallel,
            context_parallel_size=strategy.context_parallel,
            virtual_pipeline_model_parallel_size=virtual,
            expert_model_parallel_size=strategy.expert_parallel,
            expert_tensor_parallel_size=strategy.expert_tensor_parallel,
        )
    _require_own_layout(strategy, virtual)
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


def _require_own_layout(strategy: MegatronStrategyConfig, virtual: int | None) -> None:
    """ValueError if the existing process groups belong to another layout."""
    of_layers = (
        parallel_state.get_tensor_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_context_parallel_world_size(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
    )
    of_experts = (parallel_state.get_expert_model_parallel_world_size(), parallel_state.get_expert_tensor_parallel_world_size())
    for names, wanted, found in (
        (
            "tensor_parallel x pipeline_parallel x context_parallel (x virtual_pipeline_parallel)",
            (strategy.tensor_parallel, strategy.pipeline_parallel, strategy.context_parallel, virtual),
            of_layers,
        ),
        ("expert_parallel x expert_tensor_parallel", (strategy.expert_parallel, strategy.expert_tensor_parallel), of_experts),
    ):
        if wanted != found:
            raise ValueError(
                f"strategy: {names} is {_times(wanted)}, but another role in this process has {_times(found)}; "
                "roles that share processes need the same layout"
            )


def _times(sizes: Sequence[int | None]) -> str:
    return " x ".join(str(size) for size in sizes if size is not None)
