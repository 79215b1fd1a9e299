"""The supported range of SGLang."""

from __future__ import annotations

from importlib import metadata

SUPPORTED = ((0, 5, 23), (0, 5, 24))
"""From, up to but not including: what the tests have run on."""


def check_version() -> str:
    """Version of the installed SGLang."""
    low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise RuntimeError("strategy `sglang` needs SGLang: pip install 'roll_lite[sglang]'") from None
    digits = version.split("+")[0].split(".post")[0].split("rc")[0].split(".")
    if not digits or not all(part.isdigit() for part in digits) or not SUPPORTED[0] <= tuple(map(int, digits)) < SUPPORTED[1]:
        raise RuntimeError(f"sglang {version} is installed, roll_lite supports sglang >={low},<{high}")
    return version
