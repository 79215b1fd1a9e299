"""Guards for a test that runs in the program's process, where the program could decide its own verdict (docs/code_reward.md).

Its classes could equal everything (`__eq__`), or read the expected value (`Area(3) - 28.274`). A program that reads the interpreter's
frames or memory can still forge a verdict."""

from __future__ import annotations

import ast
import builtins
import copy
import functools
import itertools
import operator
import sys
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

from roll_lite.sandbox.values import FROM_PROGRAM, encode, plain_copy

BUILTINS = dict(vars(builtins))
COMPARES: dict[str, tuple[Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "Eq": (operator.eq, ("__eq__", "__ne__")),
    "NotEq": (operator.ne, ("__eq__", "__ne__")),
    "Lt": (operator.lt, ("__lt__", "__gt__")),
    "Gt": (operator.gt, ("__lt__", "__gt__")),
    "LtE": (operator.le, ("__le__", "__ge__")),
    "GtE": (operator.ge, ("__le__", "__ge__")),
    "Is": (operator.is_, ()),
    "IsNot": (operator.is_not, ()),
}
SPECIAL = {"Mult": "mul", "MatMult": "matmul", "Div": "truediv", "BitOr": "or_", "BitXor": "xor", "BitAnd": "and_"}
"""Operators that `operator` names otherwise than `ast`."""
COMPARING = ("__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__", "__sub__", "__rsub__")
OF_CLASS = type.__dict__
MRO, HELD_BY, FLAGS = (OF_CLASS[name].__get__ for name in ("__mro__", "__dict__", "__flags__"))
"""Attributes of a class as Python reads them; a metaclass could override them."""
MADE_IN_PYTHON = 1 << 9
"""Flag of classes created at run time (Py_TPFLAGS_HEAPTYPE)."""
OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
PLAIN_CONTAINERS = (list, tuple, set, frozenset, dict)
DEEPEST = 20
CONSTANT = (int, float, complex, str, bytes)
RAISING = ("raises", "assertRaises", "assertRaisesRegex", "suppress", "warns", "assertWarns", "assertLogs", "assertNoLogs")


class Loaded:
    """Snapshot of modules, their classes' attributes and functions' code, to undo a program's changes."""

    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}
        self._held: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._code: dict[int, tuple[Any, ...]] = {}

    def add(self, modules: dict[str, types.ModuleType] = sys.modules) -> Loaded:
        """Add modules; by default, those loaded since the last call."""
        known = {"__main__", *self.modules}
        new = {name: one for name, one in modules.items() if isinstance(one, types.ModuleType) and name not in known}
        self.modules |= new
        places: list[Any] = list(new.values())
        places += {one for module in places for one in vars(module).values() if isinstance(one, type) and FLAGS(one) & MADE_IN_PYTHON}
        for place in places:
            held = self._held.setdefault(id(place), (place, dict(vars(place))))[1]
            functions = [one for one in held.values() if type(one) is types.FunctionType]
            self._code |= {id(one): (one, one.__code__, one.__defaults__, one.__kwdefaults__) for one in functions}
        return self

    def put_back(self) -> set[str]:
        """Undo what the program changed in the loaded modules, their classes and functions, except state such as sys.stdout. Returns names
        of the functions, classes and modules that it had replaced."""
        replaced = {name for name, module in self.modules.items() if sys.modules.get(name) is not module}
        sys.modules.update(self.modules)
        for function, code, defaults, named in self._code.values():
            if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ is not named:
                function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named
                replaced.add(function.__name__)
        for place, held in self._held.values():
            now, is_class = vars(place), isinstance(place, type)
            added = [name for name in now if name not in held and (is_class or name in BUILTINS)]  # a global hides a builtin
            for name in [name for name, value in held.items() if now.get(name, held) is not value] + added:
                value = held.get(name, now.get(name))
                if callable(value) or isinstance(value, types.ModuleType):
                    replaced.add(name)
                elif not isinstance(value, CONSTANT) or name.startswith("_"):  # state, such as sys.stdout
                    continue
                if name in added:
                    type.__delattr__(place, name) if is_class else now.pop(name)
                else:
                    type.__setattr__(place, name, value) if is_class else now.update({name: value})
        return replaced


LOADED = Loaded()


def replaced_by(source: str) -> set[str]:
    """Names that the tests themselves may replace: attributes that they set, and all their strings, as for `setattr`."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def guarded(source: str, names: dict[str, Any], failed: list[str]) -> ast.Module:
    """The tests' syntax tree with calls of guards, which are added to `names`; failed asserts go to `failed`, even if the program catches
    them."""
    names |= {"__builtins__": BUILTINS, "__compare__": compare, "__operate__": operate}
    names |= {"__failed__": lambda line, *why: failed.append(f"AssertionError{f': {why[0]}' if why else ''} at {line}"[:300])}
    names |= {f"__{name}__": one for name, one in CALLING.items()}
    names |= {"__reached__": set(), "__all_reached__": functools.partial(_all_reached, failed)}
    if "unittest" in source:
        _guard_unittest(failed)
    tree = ast.parse(source)
    return ast.fix_missing_locations(_Guards(source.splitlines(), names).visit(tree))


class _Guards(ast.NodeTransformer):
    def __init__(self, lines: list[str], names: Collection[str]) -> None:
        self._lines, self._names = lines, names

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        kinds = ast.List([ast.Constant(type(one).__name__) for one in node.ops], ast.Load())
        return _call(node, "__compare__", kinds, node.left, *node.comparators)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return _call(node, "__operate__", ast.Constant(type(node.op).__name__), node.left, node.right)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id in CALLING and node.func.id not in self._names:
            node.func = ast.copy_location(ast.Name(f"__{node.func.id}__", ast.Load()), node.func)
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Record a failure as well as raise it: the program may catch it."""
        self.generic_visit(node)
        line = ast.Constant(self._lines[node.lineno - 1].strip())
        note = ast.copy_location(ast.Expr(_call(node, "__failed__", line, *([node.msg] if node.msg else []))), node)
        raised = ast.copy_location(ast.Assert(ast.Constant(False), copy.deepcopy(node.msg)), node)
        return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), node.test), [note, raised], []), node)

    def visit_With(self, node: ast.With) -> Any:
        """Check that a context manager swallows at most a final call or `raise` of its block."""
        called = [one.context_expr for one in node.items if isinstance(one.context_expr, ast.Call)]
        names = {getattr(one.func, "attr", getattr(one.func, "id", "")) for one in called}
        self.generic_visit(node)
        if names & set(RAISING):
            return node
        key = ast.Constant(node.lineno)
        mark = ast.Expr(ast.Call(ast.Attribute(ast.Name("__reached__", ast.Load()), "add", ast.Load()), [key], []))
        place = len(node.body) - isinstance(node.body[-1], ast.Raise | ast.Expr)
        node.body.insert(place, ast.copy_location(mark, node))
        check = ast.Expr(_call(node, "__all_reached__", ast.Name("__reached__", ast.Load()), key))
        return [node, ast.copy_location(check, node)]


def _call(node: Any, name: str, *args: Any) -> ast.Call:
    return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), list(args), []), node)


def _map(function: Callable[..., Any], *items: Any) -> Iterator[Any]:
    return (function(*one) for one in zip(*items, strict=False))


def _filter(function: Callable[..., Any] | None, items: Any) -> Iterator[Any]:
    return (one for one in items if (function(one) if function else one))


def _iter(first: Any, *last: Any) -> Iterator[Any]:
    calls = (first() for _ in itertools.count())
    return itertools.takewhile(lambda one: not _compared("Eq", one, last[0]), calls) if last else iter(first)


CALLING = {"map": _map, "filter": _filter, "iter": _iter}
"""Replacements in tests: with Python's own, a program's StopIteration ends the test's loop early; a generator makes it an error."""


def _all_reached(failed: list[str], reached: set[int], line: int) -> None:
    if line not in reached:
        failed.append(f"a context manager of the program swallowed the rest of its block, line {line} of the tests")


def _guard_unittest(failed: list[str]) -> None:
    """Guard unittest's assert methods: both values must be plain, or both the program's."""
    import unittest

    def guard(method: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                own = [_decides(one, COMPARING) for one in args[:2]]
                if len(own) == 2 and own[0] != own[1]:
                    raise AssertionError("an operator of the program's class would see the plain value that is expected of it")
                if all(own) and method.__name__ == "assertEqual" and _state(args[0]) != _state(args[1]):
                    raise AssertionError("objects of the program that do not hold the same")
                return method(self, *args, **kwargs)
            except AssertionError as error:
                failed.append(f"AssertionError: {error}"[:300])
                raise

        return checked

    for name in dir(unittest.TestCase):
        if name.startswith("assert") and name not in RAISING:
            setattr(unittest.TestCase, name, guard(getattr(unittest.TestCase, name)))


def compare(kinds: list[str], *values: Any) -> Any:
    if len(kinds) == 1:
        return _compared(kinds[0], *values)
    return all(_compared(kind, one, other) for kind, one, other in zip(kinds, values, values[1:], strict=False))


def _compared(kind: str, one: Any, other: Any) -> Any:
    if kind in ("In", "NotIn"):
        return _holds(other, one) == (kind == "In")
    operation, dunders = COMPARES[kind]
    own = [_decides(value, dunders) for value in (one, other)]
    if not all(own) and any(own):  # compare the data itself, not what the program's class says of it
        one, other = plain_copy(one), plain_copy(other)
        if any(_decides(value, dunders) for value in (one, other)):
            if kind in ("Eq", "NotEq"):
                return kind == "NotEq"
            raise AssertionError("an operator of the program's class would see the plain value that is expected of it")
    result = operation(one, other)
    if all(own) and type(result) is not bool:
        raise AssertionError(f"a comparison of the program's gave a {type(result).__name__}")
    if all(own) and kind in ("Eq", "NotEq") and result == (kind == "Eq"):
        return (_state(one) == _state(other)) == (kind == "Eq")
    return result


def _holds(container: Any, item: Any) -> bool:
    if type(container) in PLAIN_CONTAINERS and any(_decides(one, ("__eq__", "__ne__")) for one in (item, *container)):
        return any(item is one or _compared("Eq", item, one) for one in container)
    return bool(item in container)


def operate(kind: str, one: Any, other: Any) -> Any:
    """Apply an operator; AssertionError if it is the program's own, sees a plain value (perhaps the expected one) and returns one."""
    operation = getattr(operator, SPECIAL.get(kind, kind.lower()))
    name = operation.__name__.strip("_")
    own = [_defines(value, (f"__{name}__", f"__r{name}__")) for value in (one, other)]
    result = operation(one, other)
    sees_plain = (own[0] and not _is_own(type(other))) or (own[1] and not _is_own(type(one)))
    if sees_plain and not _is_own(type(result)) and not (kind == "Mod" and type(one) is str):
        raise AssertionError("an operator of the program's class would see the plain value that is expected of it")
    return result


def _is_own(kind: type) -> bool:
    """True if the program created the class: by its `__module__`, which can be forged, or its functions' globals, which cannot be."""
    if not FLAGS(kind) & MADE_IN_PYTHON:
        return False
    return kind.__module__ == FROM_PROGRAM or any(type(one) is types.FunctionType and _is_of_program(one) for one in HELD_BY(kind).values())


def _is_of_program(function: types.FunctionType) -> bool:
    known = function.__globals__
    name = str(known.get("__name__"))
    return name == FROM_PROGRAM or name not in sys.modules or vars(sys.modules[name]) is not known


def _defines(value: Any, dunders: tuple[str, ...]) -> bool:
    """True if a class of the program defines one of these operators, or any class by something else than a function: `__eq__ = bool`."""
    for kind in MRO(type(value)):
        held = HELD_BY(kind)
        operators = [held[name] for name in dunders if name in held] if FLAGS(kind) & MADE_IN_PYTHON else []
        if operators and (_is_own(kind) or any(type(one) not in (types.FunctionType, *OF_C) for one in operators)):
            return True
    return False


def _decides(value: Any, dunders: tuple[str, ...], depth: int = 0) -> bool:
    """True if a program's operator would be called for the value or its items."""
    if type(value) in PLAIN_CONTAINERS and depth < DEEPEST:
        return any(_decides(one, dunders, depth + 1) for one in (*value, *(value.values() if type(value) is dict else ())))
    return _defines(value, dunders)


def _state(value: Any, above: tuple[int, ...] = ()) -> Any:
    def refer(one: Any) -> Any:
        if id(one) in above or not _is_own(type(one)):
            return {"same": above.index(id(one)) if id(one) in above else id(one)}
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
        held = {name: getattr(one, name) for name in slots if hasattr(one, name)} | getattr(one, "__dict__", {})
        return {type(one).__qualname__: [[name, _state(held[name], (*above, id(one)))] for name in sorted(held)]}

    return encode(value, refer)
