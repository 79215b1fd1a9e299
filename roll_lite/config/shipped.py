"""Shipped files under the name examples/: configurations, the tiny model, toy data, rewards. They are found from any folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

EXAMPLES = (Path(__file__).parents[1] / "examples").resolve()
"""A link to examples/ in a checkout, a folder in an installed package."""
CONFIGS = EXAMPLES / "configs"


def found(path: Path) -> Path:
    """Absolute path, relative to the current folder; the package's file if the path begins with examples/ and does not exist."""
    path = path.expanduser()
    here = path.absolute()
    if path.parts[:1] == (EXAMPLES.name,):
        shipped = EXAMPLES.joinpath(*path.parts[1:])
        with suppress(OSError, ValueError):
            return shipped if shipped.exists() and not here.exists() else here
    return here
