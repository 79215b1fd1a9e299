"""Arguments of an SGLang engine."""

from __future__ import annotations

from typing import Any

from roll_lite.config.hf_config import read_hf_config
from roll_lite.config.keep_mask import KEEP_LIMIT
from roll_lite.config.schema import ModelConfig, SglangStrategyConfig

_CPU_KV_CACHE_MB = 256
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
    if strategy.kv_cache_mb is not None or not cuda:
        arguments["max_total_tokens"] = _cache_tokens(model, strategy)
    return arguments | strategy.engine_args


def _cache_tokens(model: ModelConfig, strategy: SglangStrategyConfig) -> int:
    shape = read_hf_config(model.path)
    heads = -(-shape.key_value_heads // strategy.tensor_parallel)
    nbytes = 2 * shape.layers * heads * shape.head_dim * (4 if model.dtype == "float32" else 2)
    return ((strategy.kv_cache_mb or _CPU_KV_CACHE_MB) << 20) // nbytes
