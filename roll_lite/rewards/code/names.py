"""Find the names in asserts that a program must define, and the tests that can run outside its process. Only tests are read: a program
could redefine `abs`, or choose where it is tested."""

from __future__ import annotations

import ast
import builtins
import collections
import datetime
import decimal
import fractions
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from roll_lite.sandbox.values import FROM_PROGRAM

PYTHONS_OWN = frozenset(dir(builtins))
USUAL_NAMES = {"np": "numpy", "pd": "pandas"}
PLAIN = (
    str,
    bytes,
    int,
    float,
    complex,
    list,
    dict,
    set,
    range,
    collections.deque,
    collections.Counter,
    decimal.Decimal,
    fractions.Fraction,
)
TIMES = (datetime.datetime, datetime.timedelta)
OF_ARRAYS = ("shape", "dtype", "ndim", "size", "all", "any", "sum", "mean", "min", "max", "tolist", "item", "round", "astype", "T")
OF_PLAIN = {name for kind in (*PLAIN, *TIMES) for name in dir(kind)} | {*OF_ARRAYS, "args", "value", "msg", "exception"}
METHODS = {name for kind in PLAIN for name in dir(kind) if callable(getattr(kind, name))}
NEED_INSIDE = frozenset(
    {"asyncio", "Mock", "MagicMock", "patch", "redirect_stdout", "stdout", "stdin", "stderr", "builtins", "capsys", "inspect", "signature"}
    | {"GeneratorType", "islice", "takewhile", "next", "SystemExit", "KeyboardInterrupt", "GeneratorExit", "gc", "weakref", "deepcopy"}
)
"""Names for which a test must run in the program's process: input and output, lazy values, object identity, exit."""


@dataclass(frozen=True)
class Asserts:
    source: str
    names: tuple[str, ...]
    imports: tuple[str, ...] = ()
    inside: str = ""


def why_inside(tree: ast.Module, program: Collection[str], foreign: Collection[str]) -> str:
    """Return why a test must run in the program's process, or "". `program`: names that the program defines; capitalized ones count as
    classes, except Solution. `foreign`: imported names and modules."""
    nodes = list(ast.walk(tree))
    own = {"self", "cls", "Solution", "super", *foreign} | {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in nodes:
        if isinstance(node, ast.Assign) and _root(node.value) in own:
            own |= {_name(target) for target in node.targets}
    for node in nodes:
        match node:
            case ast.Name(id=name) if name in program and name[0].isupper() and name != "Solution":
                return f"{name} is a class"
            case ast.ExceptHandler(type=ast.Name(id=name)) if name in program:
                return f"{name} is an exception"
            case ast.Name(id=name) | ast.alias(name=name) | ast.Attribute(attr=name) if name in NEED_INSIDE:
                return name
            case ast.AsyncFunctionDef() | ast.Await():
                return "async"
            case ast.Attribute(value=base, attr=name) if _root(base) not in own:
                if name not in OF_PLAIN or (isinstance(base, ast.Attribute) and base.attr in METHODS):
                    return f".{name}"
            case ast.Compare(left=one, ops=kinds, comparators=others):
                sides = (one, *others)
                if any(isinstance(kind, ast.Is | ast.IsNot) for kind in kinds) and not any(map(_is_constant, sides)):
                    return "identity"
                if all(_called(side) in program for side in sides):
                    return "two values of the program"
            case ast.Set(elts=parts) if any(_called(one) in program for one in parts):
                return "a set of values of the program"
            case ast.Call(func=func, args=args) if _name(func) in ("assertIs", "assertIsNot") and not any(map(_is_constant, args)):
                return "identity"
            case ast.withitem(context_expr=one) if _called(one) in program:
                return "a context manager"
    return ""


def _called(node: ast.AST) -> str:
    return _name(node.func) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _root(node: ast.AST) -> str:
    while isinstance(node, ast.Attribute | ast.Call):
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return _name(node)


def _is_constant(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) or _called(node) == "type" or _name(node) in PYTHONS_OWN


def asserts_of(sources: Sequence[str], entry_point: str | None = None) -> list[Asserts]:
    """Find the names of the program that each test uses; ValueError if it uses none. A builtin such as `abs` counts only as entry
    point, or if the tests use no other unknown names and all asserts call it."""
    tests = [_Test(source) for source in sources]
    named = _Test(entry_point).used if entry_point else set[str]()
    unnamed = [test.tree for test in tests if not test.own | named]
    asserts = [node for tree in unnamed for node in ast.walk(tree) if isinstance(node, ast.Assert)]
    called = [{one.func.id for one in ast.walk(node) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)} for node in asserts]
    hidden = set.intersection(*called) & PYTHONS_OWN if called else set()
    if unnamed and len(hidden) != 1:
        problem = f"{' or '.join(sorted(hidden))}: which is the program's?" if hidden else "the tests use no function of the program's;"
        raise ValueError(f"{problem} entry_point can name it")
    return [test.asserts(test.own | named or hidden, named) for test in tests]


class _Test:
    def __init__(self, source: str) -> None:
        self._source, self.tree = source, ast.parse(source)
        self.used, self.imports, self.bound = set[str](), set[str](), set[str]()
        from_program, alone = set[str](), set[str]()
        defined = {"__name__", "__file__", "RUN_TEST_CLASSES"}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute):
                alone |= {one.id for one in ast.iter_child_nodes(node) if isinstance(one, ast.Name)}
            if not isinstance(node, ast.alias | ast.keyword):  # the name of a function, class, argument, caught exception or pattern
                defined |= {name for field in ("name", "arg") if isinstance(name := getattr(node, field, None), str)}
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == FROM_PROGRAM:
                    from_program.add(attribute)
                case ast.Name(id=name, ctx=context):
                    (self.used if isinstance(context, ast.Load) else defined).add(name)
                case ast.Import(names=aliases):
                    self.bound |= {(alias.asname or alias.name).partition(".")[0] for alias in aliases}
                    self.imports |= {f"import {alias.name}" for alias in aliases if alias.name != FROM_PROGRAM}
                case ast.ImportFrom(module=module, names=aliases):
                    names = {alias.asname or alias.name for alias in aliases}
                    defined |= names
                    if module == FROM_PROGRAM:  # some data sets import the program
                        from_program |= {alias.name for alias in aliases if alias.name != "*"}
                    elif module:
                        self.bound |= names
                        self.imports |= {f"from {module} import {alias.name}" for alias in aliases}
        free = self.used - defined - self.bound - PYTHONS_OWN
        self._modules = {name for name in free - alone if name in sys.stdlib_module_names | USUAL_NAMES.keys()}
        self.own = (free - self._modules) | from_program

    def asserts(self, program: set[str], named: set[str]) -> Asserts:
        modules = self._modules - named
        added = {f"import {USUAL_NAMES.get(name, name)} as {name}" for name in modules}
        inside = why_inside(self.tree, program, self.bound | modules | {FROM_PROGRAM})
        return Asserts("\n".join([*sorted(added), self._source]), tuple(sorted(program)), tuple(sorted(self.imports | added)), inside)


def uncalled_tests(source: str) -> list[str]:
    """Calls to append, such as `test_sum()`, for tests left to a test runner. ValueError if one is async or has arguments."""
    tree = ast.parse(source)
    called = {_name(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    functions, classes = list[str](), False
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name, args=ast.arguments(posonlyargs=[], args=[])) if name.startswith("test"):
                functions += [f"{name}()"] if name not in called else []
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name.startswith("test") and name not in called:
                raise ValueError(f"{name} has arguments or is asynchronous: only a test runner could call it")
            case ast.ClassDef(name=name, bases=bases) if name not in called:
                classes |= name.startswith("Test") or any("TestCase" in ast.unparse(base) for base in bases)
    runs_them = called & {"main", "TextTestRunner", "TestSuite", "run"}
    return functions + (["RUN_TEST_CLASSES()"] if classes and not runs_them else [])
