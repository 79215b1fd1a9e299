"""vLLM's OpenAI-compatible server for a judge: `python -m roll_lite.distributed.strategy.vllm.compat.judge_server ARGUMENTS`. Start it in a
new session: when its starter ends, it kills its process group."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from roll_lite.config.schema.models import JudgeServerConfig
from roll_lite.distributed.strategy.inference.processes import end_group_with_host_or_leader
from roll_lite.distributed.strategy.inference.settings import is_fp8, kv_cache_mb
from roll_lite.distributed.strategy.vllm.compat.settings import FP8, batched_tokens, check_version, engine_environment, notes
from roll_lite.models.hf_config import read_model_shape

OWN_ARGUMENTS = ("host", "port", "uds", "fd", "served_model_name", "api_key", "api_server_count", "root_path", "ssl_certfile")
SAGEMAKER = "model_hosting_container_standards"


def command(config: JudgeServerConfig, host: str, port: int, name: str, cuda: bool) -> list[str]:
    check_version()
    for note in notes(config.strategy, _longest(config, cuda), cuda, engine_environment(config.threads, cuda)):
        sys.stderr.write(f"judges.{name}: {note}\n")
    arguments = server_arguments(config, cuda) | {"host": host, "port": port, "served_model_name": name}
    return [sys.executable, "-m", __name__, *(word for key, value in arguments.items() for word in _words(key, value))]


def server_arguments(config: JudgeServerConfig, cuda: bool) -> dict[str, Any]:
    strategy = config.strategy
    megabytes = kv_cache_mb(strategy.kv_cache_mb, cuda)
    longest = _longest(config, cuda)
    arguments: dict[str, Any] = {
        "model": str(config.path),
        "dtype": config.dtype,
        "tensor_parallel_size": strategy.tensor_parallel,
        "enable_expert_parallel": strategy.expert_parallel > 1 or None,
        "max_model_len": longest,
        "max_num_seqs": strategy.max_running_requests,
        "max_num_batched_tokens": batched_tokens(strategy, longest, cuda),
        "enforce_eager": strategy.enforce_eager or not cuda,
        "uvicorn_log_level": "warning",
        "disable_log_stats": True,
        "distributed_executor_backend": "mp" if strategy.tensor_parallel > 1 else None,
        "gpu_memory_utilization": strategy.gpu_memory_utilization if cuda else None,
        "enable_chunked_prefill": None if cuda else False,  # see batched_tokens
        "quantization": FP8 if is_fp8(strategy, cuda) else None,
        "kv_cache_memory_bytes": None if megabytes is None else megabytes << 20,
    }
    return {key: value for key, value in arguments.items() if value is not None} | strategy.engine_args


def _longest(config: JudgeServerConfig, cuda: bool) -> int | None:
    if config.strategy.max_model_len is not None or cuda:
        return config.strategy.max_model_len
    try:
        return read_model_shape(config.path).max_positions
    except ValueError:  # roll_lite cannot read this model; vLLM may
        return None


def _words(key: str, value: Any) -> list[str]:
    flag = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list | tuple):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]


def _stand_in_for_sagemaker() -> None:
    """Add a dummy for a missing SageMaker, which vLLM's CPU build imports for two routes."""
    if find_spec(SAGEMAKER) is not None:
        return

    def unchanged(first: Any = None, *_: Any, **__: Any) -> Any:
        return first if callable(first) else unchanged

    package, module = ModuleType(SAGEMAKER), ModuleType(f"{SAGEMAKER}.sagemaker")
    for name in ("bootstrap", "register_ping_handler", "register_invocation_handler", "stateful_session_manager", "inject_adapter_id"):
        setattr(module, name, unchanged)
    package.__path__ = []
    sys.modules |= {package.__name__: package, module.__name__: module}


def main() -> None:
    _stand_in_for_sagemaker()
    from vllm.entrypoints.launchers.api_server.entry import main as serve

    serve()


if __name__ in ("__main__", "__mp_main__"):
    # Also in the engine's processes, where spawn imports this module: they may outlive a killed server.
    end_group_with_host_or_leader()
if __name__ == "__main__":
    main()
