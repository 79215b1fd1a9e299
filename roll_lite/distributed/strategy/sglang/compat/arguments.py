"""Arguments of an SGLang engine."""

from __future__ import annotations

from typing import Any

from roll_lite.config.hf_config import read_hf_config
from roll_lite.config.keep_mask import KEEP_LIMIT
from roll_lite.config.schema import ModelConfig, SglangStrategyConfig
from roll_lite.distributed.strategy.inference.engine_args import cache_mb

_INPUT_MARGIN = 8
"""Places of the context that SGLang does not let a prompt fill."""


def engine_arguments(model: ModelConfig, strategy: SglangStrategyConfig, max_model_len: int, seed: int, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine."""
    arguments: dict[str, Any] = {
        "model_path": str(model.path),
        "dtype": model.dtype,
        "device": "cuda" if cuda else "cpu",
        "random_seed": seed,
        "tp_size": strategy.tensor_parallel,
        "context_length": max_model_len + _INPUT_MARGIN,
        "max_running_requests": strategy.max_running_requests,
        "max_prefill_tokens": max(strategy.max_batched_tokens, max_model_len),
        "chunked_prefill_size": strategy.max_batched_tokens,
        "sampling_backend": "pytorch",
        "sampling_mask_max_tokens": KEEP_LIMIT,
        "weight_version": "0",
        "grammar_backend": "none",
        "log_level": "error",
        "enable_memory_saver": cuda,
        "enable_weights_cpu_backup": cuda,  # or what is offloaded comes back as noise
        "disable_cuda_graph": strategy.enforce_eager or not cuda,
    }
    if cuda:
        arguments["mem_fraction_static"] = strategy.gpu_memory_utilization
    else:
        arguments |= {"attention_backend": "torch_native", "disable_overlap_schedule": True, "sleep_on_idle": True}
    megabytes = cache_mb(strategy.kv_cache_mb, cuda)
    if megabytes is not None:
        arguments["max_total_tokens"] = (megabytes << 20) // _token_bytes(model, strategy)
    return arguments | strategy.engine_args


def check_cache(
    model: ModelConfig, strategy: SglangStrategyConfig, max_model_len: int, cuda: bool, cache_tokens: int, page_size: int
) -> None:
    """ValueError where one request of the greatest length does not fit: SGLang would cut its response short without a word.

    `cache_tokens`: what SGLang has made room for; of that it leaves a page and one more token empty when it admits a request.
    """
    needed = max_model_len + 2 * page_size
    if cache_tokens >= needed:
        return
    token_bytes = _token_bytes(model, strategy)
    enough = -(-needed * token_bytes // (1 << 20))
    what = f"SGLang's key/value cache holds {cache_tokens} tokens, a request of max_model_len {max_model_len} needs {needed}"
    given = cache_mb(strategy.kv_cache_mb, cuda)
    if given is not None and (given << 20) // token_bytes < needed:
        raise ValueError(f"actor_infer.strategy.kv_cache_mb: {given} is too little: {what}; use at least {enough}")
    raise ValueError(
        f"actor_infer.strategy.gpu_memory_utilization: {strategy.gpu_memory_utilization:g} is too little: {what}; "
        f"use more, so that {enough} MB are left for the cache, or a smaller max_model_len"
    )


def _token_bytes(model: ModelConfig, strategy: SglangStrategyConfig) -> int:
    """Of a token's keys and values, on each device."""
    shape = read_hf_config(model.path)
    heads = -(-shape.key_value_heads // strategy.tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * (4 if model.dtype == "float32" else 2)
