"""What the package ships under the name examples/: configurations, the tiny model, toy data, rewards. Found from any folder."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

EXAMPLES = (Path(__file__).parents[1] / "examples").resolve()
"""In a checkout a link to the folder of that name, in an installed package a folder of its own."""
CONFIGS = EXAMPLES / "configs"


def found(path: Path) -> Path:
    """Absolute, counted from the current folder; what begins with examples/ and is not there is the package's."""
    path = path.expanduser()
    here = path.absolute()
    if path.parts[:1] == (EXAMPLES.name,):
        shipped = EXAMPLES.joinpath(*path.parts[1:])
        with suppress(OSError, ValueError):
            return shipped if shipped.exists() and not here.exists() else here
    return here
