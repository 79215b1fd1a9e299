"""Which names of a sample's asserts are the program's. Told from the tests alone: a program that could claim a name could claim `abs`."""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from roll_lite.sandbox.values import FROM_PROGRAM

PYTHONS_OWN = frozenset(dir(builtins))
USUAL_NAMES = {"np": "numpy", "pd": "pandas"}
"""Of modules that are no part of Python."""


@dataclass(frozen=True)
class Names:
    program: tuple[str, ...]
    modules: dict[str, str]
    """What tests use without importing it, such as `math.pi`."""


def names_of(sources: Sequence[str], entry_point: str | None = None) -> list[Names]:
    """Of each of a sample's tests. A builtin is the program's if it is the entry point, or where tests call nothing else of the
    program's and every assert of theirs calls it. ValueError where nothing is the program's, or it is not clear which."""
    trees = [ast.parse(source) for source in sources]
    named = _used_and_defined(ast.parse(entry_point))[0] if entry_point else set[str]()
    own, modules = zip(*(_own_and_modules(tree) for tree in trees), strict=True)
    unnamed = [tree for tree, found in zip(trees, own, strict=True) if not found | named]
    hidden = _called_everywhere(unnamed) if unnamed else set()
    if unnamed and len(hidden) != 1:
        problem = f"{' or '.join(sorted(hidden))}: which is the program's?" if hidden else "the tests use no function of the program's;"
        raise ValueError(f"{problem} entry_point can name it")
    return [
        Names(tuple(sorted(found | named or hidden)), {name: path for name, path in needed.items() if name not in named})
        for found, needed in zip(own, modules, strict=True)
    ]


def _own_and_modules(tree: ast.Module) -> tuple[set[str], dict[str, str]]:
    used, defined = _used_and_defined(tree)
    free = used - defined - PYTHONS_OWN
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    alone = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in bare}
    known = {name: USUAL_NAMES.get(name, name) for name in free - alone if name in sys.stdlib_module_names or name in USUAL_NAMES}
    return (free - known.keys()) | _imported_from_program(tree), known


def _used_and_defined(tree: ast.Module) -> tuple[set[str], set[str]]:
    used, defined = set[str](), {"__name__", "__file__"}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.arg(arg=name) | ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                defined.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                defined |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
    return used, defined


def _imported_from_program(tree: ast.Module) -> set[str]:
    """`from solution import f`, as some data sets write it; or `import solution`, and then `solution.f`."""
    found = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=module, names=aliases) if module == FROM_PROGRAM:
                found |= {alias.name for alias in aliases if alias.name != "*"}
            case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == FROM_PROGRAM:
                found.add(attribute)
    return found


def _called_everywhere(trees: Sequence[ast.Module]) -> set[str]:
    """Builtins that each assert calls."""
    asserts = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    called = [{one.func.id for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)} for node in asserts]
    return set.intersection(*called) & PYTHONS_OWN if called else set()


def uncalled_tests(source: str) -> list[str]:
    """Functions `test_...` that the source defines for a test runner to call. ValueError for what only a test runner can call."""
    tree = ast.parse(source)
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    found = []
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name, args=ast.arguments(posonlyargs=[], args=[])) if name.startswith("test"):
                found.append(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test") and name not in called:
                raise ValueError(f"{name} has arguments or is asynchronous: only a test runner could call it")
            case ast.ClassDef(name=name) if name.startswith("Test") and name not in called:
                raise ValueError(f"{name} is a class of tests: only a test runner could call it")
    return [name for name in found if name not in called]
