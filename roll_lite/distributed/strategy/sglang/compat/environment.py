"""The environment that SGLang wants to find when it starts."""

from __future__ import annotations

from collections.abc import Sequence

CPU_MODELS = "roll_lite.distributed.strategy.sglang.compat.models"


def engine_environment(threads: int, devices: Sequence[int] | None, cuda: bool, workers: int = 1) -> dict[str, str]:
    """Variables that the engine's process finds when it starts. `devices`: the GPUs that it may use; all visible ones where None."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The context is a few places longer than the model's, since prompts may not fill SGLang's; no response gets that far.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",
        "PYTHONWARNINGS": "ignore::UserWarning,ignore::DeprecationWarning,ignore::FutureWarning",
    }
    if cuda:
        return environment if devices is None else environment | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))}
    return environment | {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_EXTERNAL_MODEL_PACKAGE": CPU_MODELS,
        "OMP_NUM_THREADS": str(threads),
        # Left to itself, SGLang wants a NUMA node for each worker. Its native path binds nothing, whatever stands here.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(["0"] * workers),
        # Some sampling paths are compiled at their first call, which takes half a minute.
        "TORCHDYNAMO_DISABLE": "1",
    }
