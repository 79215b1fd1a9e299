"""Arguments of a vLLM engine."""

from __future__ import annotations

from typing import Any

from roll_lite.config.keep_mask import KEEP_LIMIT
from roll_lite.config.schema import ModelConfig, VllmStrategyConfig
from roll_lite.distributed.strategy.inference.engine_args import cache_mb

TRANSFER_BACKEND = "roll_lite"
WORKER_EXTENSION = "roll_lite.distributed.strategy.vllm.compat.worker.WorkerExtension"


def engine_arguments(model: ModelConfig, strategy: VllmStrategyConfig, max_model_len: int, seed: int, cuda: bool) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs."""
    arguments: dict[str, Any] = {
        "model": str(model.path),
        "dtype": model.dtype,
        "seed": seed,
        "tensor_parallel_size": strategy.tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": strategy.max_running_requests,
        "max_num_batched_tokens": max(strategy.max_batched_tokens, max_model_len, strategy.max_running_requests),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": KEEP_LIMIT,  # what a request may ask for; vLLM sets nothing aside for it
        "worker_extension_cls": WORKER_EXTENSION,
        "weight_transfer_config": {"backend": TRANSFER_BACKEND},
        "enforce_eager": strategy.enforce_eager or not cuda,
        "enable_sleep_mode": cuda,  # refused on a CPU
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if strategy.tensor_parallel > 1:
        # Left to itself, vLLM takes a Ray cluster of its own inside a Ray worker; the devices here are this process's own.
        arguments["distributed_executor_backend"] = "mp"
    if cuda:
        arguments["gpu_memory_utilization"] = strategy.gpu_memory_utilization
    else:
        # A prompt prefilled in pieces rewinds the request's random generator, which torch's CPU generator cannot do:
        # with a seed the engine dies ("CPU Generator does not use offset"). Whole prompts always fit, see the batch size above.
        arguments["enable_chunked_prefill"] = False
    megabytes = cache_mb(strategy.kv_cache_mb, cuda)
    if megabytes is not None:
        arguments["kv_cache_memory_bytes"] = megabytes << 20
    return arguments | strategy.engine_args
