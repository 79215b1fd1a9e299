from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from roll_lite.config.arithmetic import EngineOffload
from roll_lite.config.keep_mask import KEEP_LIMIT
from roll_lite.config.schema.models import LoraConfig, ModelConfig, SglangStrategyConfig
from roll_lite.distributed.strategy.inference import settings
from roll_lite.distributed.strategy.inference.settings import Environment, is_fp8, kv_cache_mb, with_fused
from roll_lite.models.hf_config import read_hf_config

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.base import EngineNode

SUPPORTED = ("0.5.23", "0.5.24")

OWN_ARGUMENTS = (
    "model_path",
    "dtype",
    "device",
    "random_seed",
    "tp_size",
    "pp_size",
    "dp_size",
    "nnodes",
    "node_rank",
    "dist_init_addr",
    "context_length",
    "sampling_backend",
    "sampling_mask_max_tokens",
    "preferred_sampling_params",
    "speculative_algorithm",
    "skip_tokenizer_init",
    "enable_memory_saver",
    "enable_weights_cpu_backup",
    "weight_version",
    "load_format",
    "stream_interval",
    "enable_return_routed_experts",
    # Weight updates assume a fixed worker for each expert.
    "enable_eplb",
    "ep_num_redundant_experts",
    "init_expert_location",
    "elastic_ep_backend",
    "moe_dp_size",
    # Adapters come from the trainer (actor_train.lora.engines).
    "enable_lora",
    "enable_lora_overlap_loading",
    "max_lora_rank",
    "lora_target_modules",
    "lora_paths",
    "max_loaded_loras",
    "max_loras_per_batch",
    "lora_strict_loading",
    "lora_eviction_policy",
    "experts_shared_outer_loras",
    "lora_use_virtual_experts",
    "lora_drain_wait_threshold",
)

SETTINGS = {
    "max_running_requests": "max_running_requests",
    "max_prefill_tokens": "max_batched_tokens",
    "chunked_prefill_size": "max_batched_tokens",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_total_tokens": "kv_cache_mb",
    "disable_cuda_graph": "enforce_eager",
    "ep_size": "expert_parallel",
}
"""{refused engine argument: key of `strategy` to use instead}."""
FIELDS = (("srt/arg_groups/fields/[a-z]*.py", None),)
"""Places of SGLang's arguments: (file pattern, class name or None for all)."""

CPU_MODELS = "roll_lite.distributed.strategy.sglang.compat.models"
_ERRORS = "errors"
_INPUT_MARGIN = 8
"""Tokens at the context's end that SGLang does not let prompts use."""


def check_version() -> str:
    return settings.check_version(("sglang",), SUPPORTED, "SGLang: pip install 'roll_lite[sglang]'")


def engine_environment(
    threads: int, cuda: bool, workers: int = 1, node: EngineNode | None = None, sleep: EngineOffload = "with_copy"
) -> Environment:
    follows = {} if node is None or node.number == 0 else {"SGLANG_BLOCK_NONZERO_RANK_CHILDREN": "0"}  # otherwise the start never returns
    preset = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::DeprecationWarning,ignore::FutureWarning",
    }
    # SGLang does not let prompts fill the context, so the context is slightly longer than max_model_len; responses do not use the excess.
    required = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
    if cuda:
        # Also free CUDA graphs, but keep their pinned copies: pinning again in every step would take seconds.
        graphs = {} if sleep == "never" else {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "TMS_RETAIN_CPU_BACKUP": "1"}
        return Environment(preset | graphs, required, follows)
    preset |= {
        # SGLang's default needs a NUMA node per worker. Its native torch code binds no cores.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * workers),
        # Some sampling paths are compiled at their first call, for half a minute.
        "TORCHDYNAMO_DISABLE": "1",
    }
    required |= {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_EXTERNAL_MODEL_PACKAGE": CPU_MODELS}
    return Environment(preset, required, {"OMP_NUM_THREADS": str(threads)} | follows)


def engine_arguments(
    model: ModelConfig,
    strategy: SglangStrategyConfig,
    max_model_len: int,
    seed: int,
    cuda: bool,
    lora: LoraConfig | None = None,
    sleep: EngineOffload = "with_copy",
) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model_path": str(model.path),
        "dtype": model.dtype,
        "device": "cuda" if cuda else "cpu",
        "random_seed": seed,
        "tp_size": strategy.tensor_parallel,
        "ep_size": strategy.expert_parallel,
        "context_length": max_model_len + _INPUT_MARGIN,
        "max_running_requests": strategy.max_running_requests,
        "max_prefill_tokens": strategy.max_batched_tokens,
        "chunked_prefill_size": strategy.max_batched_tokens,
        "sampling_backend": "pytorch",
        "sampling_mask_max_tokens": KEEP_LIMIT,
        "weight_version": "0",
        "grammar_backend": "none",
        "log_level": "error",
        "enable_memory_saver": cuda,
        "enable_weights_cpu_backup": cuda and sleep == "with_copy",  # without it, reloaded weights are garbage
        "disable_cuda_graph": strategy.enforce_eager or not cuda,
    }
    if cuda:
        arguments["mem_fraction_static"] = strategy.gpu_memory_utilization
        if sleep != "never":
            arguments["cuda_graph_backend_prefill"] = "disabled"  # SGLang's default cannot be freed, and would abort the start
    else:
        arguments |= {"attention_backend": "torch_native", "disable_overlap_schedule": True, "sleep_on_idle": True}
    if lora is not None:
        # Two slots, because SGLang's warm-up runs without an adapter.
        arguments |= {"enable_lora": True, "max_loras_per_batch": 2, "max_lora_rank": lora.rank, "lora_strict_loading": True}
        arguments |= {"lora_target_modules": with_fused(lora.targets)} | ({} if cuda else {"lora_backend": "torch_native"})
    if is_fp8(strategy, cuda):
        # Plain `fp8` cannot load weights twice: the first load deletes data that weight loaders need. flash_rl keeps the data.
        arguments |= {"quantization": "fp8", "load_format": "flash_rl"}
    megabytes = kv_cache_mb(strategy.kv_cache_mb, cuda)
    if megabytes is not None:
        arguments["max_total_tokens"] = (megabytes << 20) // _token_bytes(model, strategy)
    return arguments | strategy.engine_args


def node_arguments(node: EngineNode | None) -> dict[str, Any]:
    if node is None:
        return {}
    host, port = node.meeting
    return {"nnodes": node.nodes, "node_rank": node.number, "dist_init_addr": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}


def check_cache(
    model: ModelConfig, strategy: SglangStrategyConfig, max_model_len: int, cuda: bool, cache_tokens: int, page_size: int
) -> None:
    """Raise ValueError if the KV cache is too small for the longest request: SGLang, which keeps a page and a token free, would cut
    it."""
    needed = max_model_len + 2 * page_size
    if cache_tokens >= needed:
        return
    token_bytes = _token_bytes(model, strategy)
    enough = -(-needed * token_bytes // (1 << 20))
    what = f"SGLang's KV cache holds {cache_tokens} tokens, a request of max_model_len {max_model_len} needs {needed}"
    given = kv_cache_mb(strategy.kv_cache_mb, cuda)
    if given is not None and (given << 20) // token_bytes < needed:
        raise ValueError(f"actor_infer.strategy.kv_cache_mb: {given} is too little: {what}; use at least {enough}")
    raise ValueError(
        f"actor_infer.strategy.gpu_memory_utilization: {strategy.gpu_memory_utilization:g} is too little: {what}; "
        f"use more, so that {enough} MB are left for the cache, or a smaller max_model_len"
    )


def _token_bytes(model: ModelConfig, strategy: SglangStrategyConfig) -> int:
    shape = read_hf_config(model.path)
    heads = -(-shape.key_value_heads // strategy.tensor_parallel)
    return 2 * shape.layers * heads * shape.head_dim * (4 if model.dtype == "float32" else 2)


def keep_files_in(folder: Path) -> None:
    """Make SGLang put its load snapshot and a copy of its error log in this folder. Call first in each engine process."""
    from sglang.srt.managers import load_snapshot

    # SGLang's default is /dev/shm, where a failed start leaves this file.
    load_snapshot.shm_path_for = lambda _: str(folder / "loads.shm")
    errors = logging.FileHandler(folder / _ERRORS)
    errors.setLevel(logging.ERROR)
    # Not on the root logger, whose handlers SGLang removes. SGLang's own handler still writes to the host's log.
    logging.getLogger("sglang").addHandler(errors)


def logged_error(folder: Path) -> str | None:
    """Return the log's first exception, in one line; later ones are its consequences."""
    try:
        text = (folder / _ERRORS).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    _, _, failed = text.partition("Traceback (most recent call last):")
    # The exception's line is the first without indentation.
    lines = (line for line in failed.splitlines() if line and not line.startswith(" "))
    return next(lines, None) or next((line for line in text.splitlines() if line), None)
