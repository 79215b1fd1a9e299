"""Names that users import are there, with the signatures that they have had, and docs/public_names.md lists them.

A change that is meant is written down by `python tests/test_public_names.py`.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "tests/public_names.json"
NAMES = re.findall(r"`(roll_lite[\w.]+)`", (ROOT / "docs/public_names.md").read_text(encoding="utf-8"))
IMPORT = re.compile(r"^ *from (roll_lite[\w.]*) import ([\w, ]+)$", re.MULTILINE)
OF_THIS_PROJECT = {"roll_lite.examples.domains.turns.calculate"}
"""An example that another one uses."""


def signatures(name: str) -> dict[str, str]:
    """Signature of a function; of a class also those of its public methods and properties."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    if not inspect.isclass(found):
        return {"": written(found) if inspect.isfunction(found) else str(found)}
    # A section's constructor takes the keys of the YAML, which docs/configuration.md lists.
    kept = {} if issubclass(found, BaseModel | Exception) else {"": written(found)}
    own = [key for key in vars(found) if not key.startswith("_") and key != "model_post_init"]
    return kept | {key: text for key in own if (text := member(found, key)) is not None}


def member(owner: type, key: str) -> str | None:
    found = inspect.getattr_static(owner, key)
    if isinstance(found, property):
        return f"property {inspect.signature(found.fget).return_annotation}" if found.fget is not None else None
    return written(getattr(owner, key)) if callable(getattr(owner, key)) else None


def written(function: Callable[..., Any]) -> str:
    """Signature without what differs between versions of Python and processes."""
    return re.sub(r" at 0x\w+|ForwardRef\(('[^']*')\)", r"\1", str(inspect.signature(function)))


def test_the_names_are_there_with_their_signatures() -> None:
    kept: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    assert list(kept) == NAMES, "docs/public_names.md lists others than tests/public_names.json"
    assert {name: signatures(name) for name in NAMES} == kept, "if this is meant, write it down: python tests/test_public_names.py"


def test_what_documentation_and_examples_import_is_public() -> None:
    files = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").rglob("*.py")]
    found = [f"{module}.{one.strip()}" for file in files for module, names in IMPORT.findall(file.read_text()) for one in names.split(",")]
    assert found and set(found) - {*NAMES, *OF_THIS_PROJECT} == set()


def test_a_change_is_seen() -> None:
    assert signatures("roll_lite.data.samples.Score")[""].startswith("(value: ")
    assert signatures("roll_lite.observability.trackers.Tracker")["close"] == "(self, exit_state: 'str' = 'completed') -> 'None'"
    assert signatures("roll_lite.environments.agents.Endpoint")["variables"] == "property dict[str, str]"


if __name__ == "__main__":
    KEPT.write_text(json.dumps({name: signatures(name) for name in NAMES}, indent=2) + "\n", encoding="utf-8")
