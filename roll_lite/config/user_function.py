"""Functions of users, named by dotted paths. Looking one up imports its module."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from roll_lite.config.problems import did_you_mean, or_nearest
from roll_lite.config.schema.base import Mistakes
from roll_lite.files import first_line


def load_function(name: str, path: str, or_class: bool = False) -> Callable[..., Any]:
    """Load "package.module.function" (or a class, if `or_class`); ValueError on failure. `path`: YAML path for messages."""
    try:
        return _find(name, or_class)
    except ValueError as error:
        raise ValueError(f"{path}: {name!r}: {error}") from error


def check_function(
    key: str,
    name: str,
    arguments: Mapping[str, Any] | None,
    or_class: bool = False,
    given: Collection[str] = (),
    inputs: Sequence[str] = ("its input",),
) -> Mistakes:
    """Check that `name`, the value of setting `key`, is the dotted path of a function that accepts the arguments the run will pass.

    `inputs`: positional arguments, in words for messages. `arguments`: setting `args`, its keyword arguments; None: do not check arguments.
    `given`: names of keyword arguments that the run adds. `or_class`: a class is allowed too; its arguments are not checked."""
    try:
        function = _find(name, or_class)
    except ValueError as error:
        yield key, str(error)
        return
    if arguments is None or isinstance(function, type):
        return
    try:
        signature = inspect.signature(function)
    except ValueError:  # a function in C
        return
    try:
        taken = signature.bind_partial(*inputs).arguments
    except TypeError:
        place = "its first argument" if len(inputs) == 1 else "its first arguments"
        yield key, f"the function has to take {' and '.join(inputs)} as {place}"
        return
    free = [one for one in signature.parameters.values() if one.name not in taken]
    by_name = {one.name for one in free if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    for argument in arguments if all(one.kind != one.VAR_KEYWORD for one in free) else ():
        if argument not in by_name:
            yield f"args.{argument}", f"{name!r} takes no such argument; {did_you_mean(argument, by_name)}"
    needed = [one.name for one in free if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    if missing := [one for one in needed if one not in arguments and one not in given]:
        offered = f"; of itself the run gives {', '.join(given)}" if given else ""
        yield "args", f"{name!r} needs {', '.join(missing)}{offered}"


def parameters_of(function: Callable[..., Any]) -> set[str]:
    """Return the names of a function's parameters that can be passed by keyword, except the first parameter."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return {one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}


def _find(name: str, or_class: bool) -> Callable[..., Any]:
    module_name, _, attribute = name.rpartition(".")
    if not module_name or not attribute:
        raise ValueError("a function of your own is a dotted path, package.module.function")
    here = search_current_folder()
    try:
        module = sys.modules.get(module_name)
        if module is None:
            with redirect_stdout(sys.stderr):  # `roll-lite check` prints YAML
                module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing a user's module may raise anything
        absent = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
        if absent and f"{module_name}.".startswith(f"{absent}."):
            parent, _, last = absent.rpartition(".")
            place = f"in {parent}" if parent else f"importable from {here} or a folder on PYTHONPATH"
            raise ValueError(f"there is no module {last!r} {place}") from error
        raise ValueError(f"importing {module_name} failed: {type(error).__name__}: {first_line(error)}") from error
    found = getattr(module, attribute, None)
    if found is None:
        own = [
            one
            for one, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module_name and one[0] != "_"
        ]
        raise ValueError(f"{module_name} has no {attribute!r}; {did_you_mean(attribute, own)}")
    if not callable(found) or (isinstance(found, type) and not or_class):
        kind = "a class" if isinstance(found, type) else f"a constant of type {type(found).__name__}"
        raise ValueError(f"is {kind}; expected a function")
    loaded: Callable[..., Any] = found
    return loaded


def search_current_folder() -> str:
    """Add the current folder to the import path, and return it. Python itself adds only the script's folder."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.append(here)
    return here


def nearest_aside(word: str, known: list[str]) -> str:
    """Return a "did you mean" for insertion into a message; empty if no name is similar."""
    return or_nearest(word, known).replace(";", ",", 1)
