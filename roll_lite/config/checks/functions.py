"""Check that a dotted path leads to a function with fitting arguments, without importing it: an import might load torch or start a
client."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll_lite.config.problems import Problem, did_you_mean

LONGEST_CHAIN = 8
CONSTANTS = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Set, ast.Dict)


def check_function(
    path: str,
    key: str,
    name: str,
    arguments: Mapping[str, Any] | None,
    or_class: bool = False,
    given: Collection[str] = (),
    inputs: Sequence[str] = ("its input",),
) -> Iterator[Problem]:
    """Check `name`, the value of setting `path`.`key`. `inputs`: positional arguments, in words for messages. `arguments`: keyword
    arguments from the YAML; None: unchecked. `given`: names of keyword arguments that the run adds. `or_class`: a class is allowed too; its
    arguments are not checked."""
    try:
        found = _definition(name)
    except ValueError as error:
        yield Problem(f"{path}.{key}", str(error), name)
        return
    if isinstance(found, ast.ClassDef) and or_class:
        return
    if isinstance(found, (ast.ClassDef, *CONSTANTS)):
        kind = "a class" if isinstance(found, ast.ClassDef) else "a constant"
        yield Problem(f"{path}.{key}", f"is {kind}; expected a function", name)
    elif arguments is None:
        return
    elif isinstance(found, ast.Lambda) or (isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef) and not found.decorator_list):
        yield from _arguments_fit(path, key, name, found.args, arguments, given, inputs)


def parameters_of(name: str) -> set[str]:
    """Names of a function's parameters that can be passed by keyword, except the first."""
    try:
        found = _definition(name)
    except ValueError:  # reported by check_function
        return set()
    return _by_name(found.args) if isinstance(found, ast.Lambda | ast.FunctionDef | ast.AsyncFunctionDef) else set()


def _by_name(parameters: ast.arguments, inputs: int = 1) -> set[str]:
    positional = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    return {*positional[max(inputs, len(parameters.posonlyargs)) :], *(one.arg for one in parameters.kwonlyargs)}


def _definition(name: str, chain: int = LONGEST_CHAIN) -> ast.AST | None:
    """Syntax tree of the object that a dotted path names, found through assignments and imports. None if only running the code could tell;
    ValueError if the object does not exist or the file is unreadable."""
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError("a function of your own is a dotted path, package.module.function")
    spec = locate_module(module)
    if spec.origin is None or not spec.origin.endswith(".py"):
        return None
    names: dict[str, ast.AST | None] = {}
    try:
        for one, node in _bound(ast.parse(Path(spec.origin).read_bytes()).body):
            names[one] = None if one in names else node  # bound twice: only running the code could tell
    except (SyntaxError, ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{spec.origin} cannot be read: {error}") from error
    if attribute not in names:
        if "*" in names or "__getattr__" in names:
            return None
        kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
        defined = [one for one, node in names.items() if isinstance(node, kinds) and one[0] != "_"]
        raise ValueError(f"{spec.origin} has no {attribute!r}; {did_you_mean(attribute, defined)}")
    found = names[attribute]
    while isinstance(found, ast.Name) and (chain := chain - 1) > 0:
        found = names.get(found.id)
    if not isinstance(found, ast.ImportFrom) or chain <= 0:
        return found
    package = module if Path(spec.origin).name == "__init__.py" else module.rpartition(".")[0]
    base = package.split(".")[: len(package.split(".")) + 1 - found.level] if found.level else []
    original = next(alias.name for alias in found.names if (alias.asname or alias.name) == attribute)
    try:
        return _definition(".".join([*base, *([found.module] if found.module else []), original]), chain - 1)
    except ValueError:  # a module that exists on the nodes only, or the imported object is itself a module
        return None


def locate_module(module_name: str) -> ModuleSpec:
    """Locate a module without importing its parents; ValueError if missing."""
    top, *below = module_name.split(".")
    try:
        spec = find_spec(top)
    except (ValueError, ImportError):  # a module loaded in an unusual way, such as __main__, has no spec
        spec = None
    spec = spec or PathFinder.find_spec(top, [str(Path.cwd())])  # runs search the current folder too
    if spec is None:
        raise ValueError(f"there is no module {top!r} importable from {Path.cwd()} or a folder on PYTHONPATH")
    found = top
    for part in below:
        # Searched by its last part: for a namespace package, the full name looks the parent up among the imported modules.
        inner = PathFinder.find_spec(part, list(spec.submodule_search_locations or ()))
        if inner is None:
            raise ValueError(f"there is no module {part!r} in {found}")
        spec, found = inner, f"{found}.{part}"
    return spec


def _bound(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.AST | None]]:
    """Yield (name, node) for each name that the statements bind: the definition, assigned value or `from` import; None if only running the
    code could tell."""
    for node in nodes:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name, node
            case ast.Import():
                yield from (((alias.asname or alias.name).partition(".")[0], None) for alias in node.names)
            case ast.ImportFrom():
                yield from ((alias.asname or alias.name, node) for alias in node.names)
            case ast.Assign() | ast.AnnAssign():
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    value = node.value if isinstance(target, ast.Name) else None
                    yield from ((one.id, value) for one in ast.walk(target) if isinstance(one, ast.Name))
            case ast.stmt() | ast.excepthandler() | ast.match_case():
                yield from _bound(ast.iter_child_nodes(node))


def _arguments_fit(
    path: str, key: str, name: str, parameters: ast.arguments, given: Mapping[str, Any], by_run: Collection[str], inputs: Sequence[str]
) -> Iterator[Problem]:
    positional = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
    keywords = [one.arg for one in parameters.kwonlyargs]
    by_name = _by_name(parameters, len(inputs))
    if len(positional) < len(inputs) and parameters.vararg is None:
        place = "its first argument" if len(inputs) == 1 else "its first arguments"
        yield Problem(f"{path}.{key}", f"the function has to take {' and '.join(inputs)} as {place}", name)
        return
    for argument in given if parameters.kwarg is None else ():
        if argument not in by_name:
            message = f"{name!r} takes no such argument; {did_you_mean(argument, by_name)}"
            yield Problem(f"{path}.args.{argument}", message, given[argument])
    first_default = len(positional) - len(parameters.defaults)
    required = positional[len(inputs) : first_default] + [
        one for one, default in zip(keywords, parameters.kw_defaults, strict=True) if default is None
    ]
    missing = [one for one in required if one not in given and one not in by_run]
    if missing:
        offered = f"; of itself the run gives {', '.join(by_run)}" if by_run else ""
        yield Problem(f"{path}.args", f"{name!r} needs {', '.join(missing)}{offered}", dict(given))
