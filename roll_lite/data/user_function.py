from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from roll_lite.config.problems import or_nearest


def load_function(name: str, path: str, shape: str, or_class: bool = False) -> Callable[..., Any]:
    """Load "package.module.function" (or a class, if `or_class`); ValueError on failure. Messages show `path` (YAML path) and `shape`
    (expected signature)."""
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise ValueError(f"{path}: {name!r} is no dotted path; a function of your own is named package.module.function")
    here = search_current_folder()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ValueError(
                f"{path}: {name!r}: there is no module {error.name!r}; it must be importable from {here} or from a folder on PYTHONPATH"
            ) from error
        raise ValueError(f"{path}: {name!r}: importing {module_name} failed: {error}") from error
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        raise ValueError(f"{path}: {name!r}: importing {module_name} failed: {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if function is None:
        public = [known for known, value in vars(module).items() if callable(value) and not known.startswith("_")]
        raise ValueError(f"{path}: {name!r}: module {module_name} has no {attribute!r}{nearest_aside(attribute, public)}")
    if not callable(function) or (isinstance(function, type) and not or_class):
        raise ValueError(f"{path}: {name!r} is {type(function).__name__}, expected a function `{shape}`")
    loaded: Callable[..., Any] = function
    return loaded


def search_current_folder() -> str:
    """Add the current folder to the import path, and return it. Python itself adds only the script's folder."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return here


def nearest_aside(word: str, known: list[str]) -> str:
    """Write a "did you mean" to insert into a message; empty if no name is similar."""
    return or_nearest(word, known).replace(";", ",", 1)
