"""The environment that vLLM wants to find when it is imported. Engine processes inherit it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from roll_lite.distributed.strategy.inference.processes import HOST_PID

SOCKETS = "VLLM_RPC_BASE_PATH"
"""Variable that names the folder of vLLM's sockets."""


def on_cuda() -> bool:
    return torch.cuda.is_available()


def engine_environment(threads: int = 1, devices: Sequence[int] | None = None, cuda: bool | None = None) -> dict[str, str]:
    """Variables to set before vLLM is imported in the process that hosts an engine.

    `devices`: the GPUs that the engine may use; all that the process sees where None. `cuda`: whether there are any; looked up where None.
    """
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_CONFIGURE_LOGGING": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        # An engine is spawned, never forked: a fork would inherit the threads' locks of the process that hosts it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        HOST_PID: str(os.getpid()),
    }
    if on_cuda() if cuda is None else cuda:
        if devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(str(device) for device in devices)
        return environment
    return environment | {
        "OMP_NUM_THREADS": str(threads),
        # Binding threads to cores makes engines of one machine fight for the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Some sampling paths are compiled at their first call, which takes half a minute.
        "TORCHDYNAMO_DISABLE": "1",
        # With one worker, keep it in the engine's process: a process less per engine.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }


def apply_environment(threads: int = 1, devices: Sequence[int] | None = None) -> None:
    os.environ.update(engine_environment(threads, devices))
