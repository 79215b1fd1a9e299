"""The supported range of SGLang."""

from __future__ import annotations

from roll_lite.distributed.strategy.inference import version

SUPPORTED = ("0.5.23", "0.5.24")


def check_version() -> str:
    return version.check_version(("sglang",), SUPPORTED, "SGLang: pip install 'roll_lite[sglang]'")
