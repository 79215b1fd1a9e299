"""Whether the installed engine is one that the tests have run on."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import metadata

from packaging.version import Version

Range = tuple[str, str]
"""From, up to but not including."""


def check_version(distributions: Sequence[str], supported: Range, remedy: str) -> str:
    """Version of the first distribution that is installed. RuntimeError with the `remedy` where none is, or with the range."""
    low, high = supported
    for name in distributions:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if not Version(low).release <= Version(version).release < Version(high).release:
            raise RuntimeError(f"{name} {version} is installed, roll_lite supports {distributions[0]} >={low},<{high}")
        return version
    raise RuntimeError(f"strategy `{distributions[0]}` needs {remedy}")
