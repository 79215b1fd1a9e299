"""Guards for tests that run in the program's process, where it could forge its verdict (docs/code_reward.md). They stop objects that equal
everything, and operators that see the expected value (`Area(3) - 28.274`), but not programs that read the interpreter's frames or memory.
"""

from __future__ import annotations

import ast
import copy
import functools
import itertools
import operator
import sys
import types
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any, ClassVar

from roll_lite.sandbox.loaded import BUILTINS, HELD_BY, LOADED, MRO, every_class
from roll_lite.sandbox.values import encode, plain_copy

COMPARES: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "Gt": operator.gt,
    "LtE": operator.le,
    "GtE": operator.ge,
    "Is": operator.is_,
    "IsNot": operator.is_not,
}
RICH = ("__eq__", "__ne__", "__lt__", "__gt__", "__le__", "__ge__")
ARITHMETIC = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "lshift", "rshift", "and", "or", "xor")
OF_ARRAYS = ("__array_ufunc__", "__array_function__")
"""Methods by which a class replaces numpy functions for its objects."""
OPERATORS = {*RICH, *(f"__{kind}{name}__" for name in ARITHMETIC for kind in ("", "r", "i")), *OF_ARRAYS, "__array_wrap__"}
SEES_PLAIN = "an operator of the program's class would see the plain value that is expected of it"
SWALLOWED = "a context manager of the program swallowed the rest of its block"
OF_C = (types.WrapperDescriptorType, types.MethodDescriptorType)
PLAIN_CONTAINERS = (list, tuple, set, frozenset, dict)
DEEPEST = 20
NUMBERS = (int, float, complex)
RAISING = {"raises", "assertRaises", "assertRaisesRegex", "suppress", "warns", "assertWarns", "assertLogs", "assertNoLogs"}


def replaced_by(source: str) -> set[str]:
    """Names that tests may replace on purpose: attributes that they assign, and all string constants (for `setattr`)."""
    nodes = list(ast.walk(ast.parse(source)))
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}


def guarded(source: str, names: dict[str, Any], failed: list[str]) -> ast.Module:
    """Parse the tests and wrap their values in guard functions, which are added to `names`. Failed asserts are appended to `failed`, also
    if the program catches them."""
    names |= {
        "__builtins__": BUILTINS,
        "__compare__": compare,
        "__seen__": guard_value,
        # A value that a test reads from a variable or by subscript. Items of containers are guarded when they are read.
        "__named__": lambda value: value if id(type(value)) in LOADED.classes and not isinstance(value, type) else guard_value(value),
        "__minus__": minus,
        "__true__": lambda one: one is not NotImplemented and one,
        "__failed__": lambda line, *why: failed.append(f"AssertionError{f': {why[0]}' if why else ''} at {line}"[:300]),
        "__reached__": set(),
        "__all_reached__": lambda reached, line: failed.extend([] if line in reached else [f"{SWALLOWED}, line {line} of the tests"]),
        **{f"__{name}__": one for name, one in CALLING.items()},
    }
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

    def visit_Attribute(self, node: ast.Attribute | ast.Name | ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        guard = "__seen__" if isinstance(node, ast.Attribute) else "__named__"
        return _call(node, guard, node) if isinstance(node.ctx, ast.Load) else node

    visit_Name = visit_Subscript = visit_Attribute

    def visit_pattern(self, node: ast.AST) -> ast.AST:
        return node  # Python allows no calls in patterns

    visit_MatchClass = visit_MatchValue = visit_MatchMapping = visit_pattern

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Name) and function.id == "abs" and len(node.args) == 1:
            difference = node.args[0]
            if isinstance(difference, ast.BinOp) and isinstance(difference.op, ast.Sub):
                node.args = [_call(difference, "__minus__", difference.left, difference.right)]
        self.generic_visit(node)
        node.func = function  # an attribute that is called needs no guard
        if isinstance(function, ast.Name) and function.id in CALLING and function.id not in self._names:
            node.func = ast.copy_location(ast.Name(f"__{function.id}__", ast.Load()), function)
        return _call(node, "__seen__", node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        """Record a failed assert before it raises: the program may catch the exception."""
        self.generic_visit(node)
        line = ast.Constant(self._lines[node.lineno - 1].strip())
        note = ast.copy_location(ast.Expr(_call(node, "__failed__", line, *([node.msg] if node.msg else []))), node)
        raised = ast.copy_location(ast.Assert(ast.Constant(False), copy.deepcopy(node.msg)), node)
        return ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), _call(node, "__true__", node.test)), [note, raised], []), node)

    def visit_With(self, node: ast.With) -> Any:
        """Fail the test if the `with` block did not run to its end: the program's context manager can suppress a failed assert."""
        called = [one.context_expr for one in node.items if isinstance(one.context_expr, ast.Call)]
        names = {getattr(one.func, "attr", getattr(one.func, "id", "")) for one in called}
        self.generic_visit(node)
        if names & RAISING:
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
"""Generators in place of builtins that call functions. A function's StopIteration is then an error (PEP 479), not the end of a loop."""


def _guard_unittest(failed: list[str]) -> None:
    """Wrap unittest's assert methods: a failure counts even if the program catches it, and the program's objects are equal only if their
    attributes are."""
    import unittest

    def guard(method: Callable[..., Any]) -> Callable[..., Any]:
        kind = {"assertEqual": "Eq", "assertIn": "In"}.get(method.__name__)

        def checked(self: Any, *args: Any, **kwargs: Any) -> None:
            values = [*args[:2], *(kwargs[name] for name in ("first", "second", "member", "container") if name in kwargs)]
            try:
                own = [_has_own_comparison(value) for value in values]
                if "Almost" in method.__name__ and len({_is_of_objects(plain_copy(value)) for value in values}) > 1:
                    raise AssertionError(SEES_PLAIN)
                method(self, *args, **kwargs)
                once = kind == "In" and type(values[1]) not in PLAIN_CONTAINERS  # an iterator may be used up
                if kind and not once and any(own) and not _compared(kind, *values):
                    raise AssertionError("objects of the program that do not hold the same")
            except AssertionError as error:
                failed.append(f"AssertionError: {error}"[:300])
                raise

        return checked

    for name in dir(unittest.TestCase):
        if any(word in name for word in ("Equal", "Less", "Greater", "In")) and name.startswith("assert") and "Instance" not in name:
            setattr(unittest.TestCase, name, guard(getattr(unittest.TestCase, name)))


def compare(kinds: list[str], *values: Any) -> Any:
    if len(kinds) == 1:
        return _compared(kinds[0], *values)
    return all(_compared(kind, one, other) for kind, one, other in zip(kinds, values, values[1:], strict=False))


def _compared(kind: str, first: Any, second: Any) -> Any:
    if kind in ("In", "NotIn"):
        return _holds(second, first) == (kind == "In")
    own = _has_own_comparison(first), _has_own_comparison(second)
    result = COMPARES[kind](first, second)
    if id(type(result)) in LOADED.classes and type(result).__name__ in ("bool", "bool_"):  # also numpy's bool
        result = bool(result)
    if not all(own):
        return result
    if type(result) is not bool:
        raise AssertionError(f"a comparison of the program's gave a {type(result).__name__}")
    if kind in ("Eq", "NotEq") and result == (kind == "Eq"):
        return (_without_order(_held(first)) == _without_order(_held(second))) == result
    return result


def _holds(container: Any, item: Any) -> bool:
    if type(container) in PLAIN_CONTAINERS and True in [_has_own_comparison(one) for one in (item, *container)]:
        return any(item is one or _compared("Eq", item, one) for one in container)
    return item in container


class Operators:
    """Guards around operator methods of the program's classes during a test."""

    tests: Any = None
    failed: ClassVar[list[str]] = []

    def __init__(self, tests: dict[str, Any], failed: list[str], source: str) -> None:
        Operators.tests, Operators.failed = tests, failed
        self._known = {name: one for name, one in tests.items() if name.startswith("__")}
        for module in ("__main__", "unittest"):
            warnings.filterwarnings("error", "NotImplemented", DeprecationWarning, module)  # NotImplemented is truthy
        self._guards: list[tuple[type, str, Any]] = []
        self._silent: list[tuple[type, str, Any]] = []
        for one, kind in every_class().items():
            if HELD_BY(kind).get("__module__") == "unittest.mock" and kind.__name__ == "_ANY" and "ANY" not in source:
                for name in ("__eq__", "__ne__"):
                    self._silent.append((kind, name, HELD_BY(kind)[name]))
                    type.__setattr__(kind, name, _silent(HELD_BY(kind)[name]))
            if one not in LOADED.classes:
                guard_class(kind)
                self._guards += [(kind, name, held) for name, held in HELD_BY(kind).items() if _is_guard(held)]

    def end(self) -> set[str]:
        """Disable the guards. Return the names replaced during the test: operator methods, and our own functions, such as `__compare__`."""
        taken = {name for name, one in self._known.items() if Operators.tests.get(name) is not one}
        Operators.tests = None
        for kind, name, original in self._silent:
            type.__setattr__(kind, name, original)
        return taken | {name for kind, name, guard in self._guards if HELD_BY(kind).get(name) is not guard}


def guard_value(value: Any) -> Any:
    """Guard the operators of the classes of a value and its items. Return the value."""
    if id(type(value)) in LOADED.classes and type(value) not in PLAIN_CONTAINERS and not isinstance(value, type):
        return value
    items = [*value, *value.values()] if type(value) is dict else value if type(value) in PLAIN_CONTAINERS else [value]
    kinds = {id(kind): kind for kind in map(type, items)}.values()  # by id, since a metaclass may make classes unhashable
    for kind in (*kinds, *([value] if type in MRO(type(value)) else [])):
        for one in MRO(kind):
            if id(one) not in LOADED.classes:
                guard_class(one)
    return value


def minus(one: Any, other: Any) -> Any:
    """Subtract for a test's `abs(a - b)`. If only one value is the program's object, convert it to plain data first: its `__sub__` would
    see the expected value and could fake the result."""
    is_mixed = _is_of_objects(one) != _is_of_objects(other)
    if is_mixed:
        one, other = plain_copy(one), plain_copy(other)
    difference = one - other
    own = [kind for kind in MRO(type(difference)) if is_mixed and _is_own(kind)]
    if own and (plain_copy(difference) is not difference or any("__abs__" in HELD_BY(kind) for kind in own)):
        raise AssertionError(SEES_PLAIN)
    return difference


def guard_class(kind: type) -> None:
    held = HELD_BY(kind)
    for name in [name for name in held if name in OPERATORS]:
        one = held[name]
        if one is None or _is_guard(one):
            continue
        # Neither a Python function nor a C method of the same name, as in `__sub__ = float.__mul__`.
        is_odd = one.__name__ != name if type(one) in OF_C else type(one) is not types.FunctionType
        if is_odd or (type(one) not in OF_C and _is_own(kind)):
            type.__setattr__(kind, name, _guard(name, one))


def _guard(name: str, original: Any) -> Any:
    own = original.__globals__ if type(original) is types.FunctionType and _is_programs(original.__globals__) else None

    def guard(one: Any, *others: Any, **named: Any) -> Any:
        if sys._getframe(1).f_globals is own:  # the usual case, first for speed
            return original(one, *others, **named)
        call = original.__get__(one, type(one)) if hasattr(type(original), "__get__") else original
        operands = others if name not in OF_ARRAYS else others[2:] if name == "__array_ufunc__" else others[2]
        if not operands or _is_of_objects(operands if name in OF_ARRAYS else others[0]) or not _is_by_test(sys._getframe(1)):
            return call(*others, **named)
        if name in RICH:
            data = plain_copy(one)
            return NotImplemented if data is one else getattr(type(data), name)(data, *others)
        result = call(*others, **named)
        if result is NotImplemented or (name == "__rmod__" and type(others[0]) is str):
            return result
        if _is_of_objects(result) and _is_as_plain(name, one, others[0], result):
            return result
        Operators.failed.append(f"AssertionError: {SEES_PLAIN}")
        raise AssertionError(SEES_PLAIN)

    return functools.update_wrapper(guard, original) if type(original) is types.FunctionType else guard


def _is_as_plain(name: str, one: Any, other: Any, result: Any) -> bool:
    data, number = plain_copy(one), plain_copy(result)
    if data is one or not isinstance(data, NUMBERS) or not isinstance(number, NUMBERS):
        return True
    plain = getattr(data, name, None) or getattr(data, name.replace("__i", "__", 1), None)
    return plain is not None and bool(plain(other) == number)


def _silent(original: Any) -> Any:
    return lambda one, other: NotImplemented if _is_by_test(sys._getframe(1)) else original(one, other)


GUARD = _guard("", None).__code__


def _is_guard(held: Any) -> bool:
    return type(held) is types.FunctionType and held.__code__ is GUARD


def _is_of_objects(value: Any) -> bool:
    """True for an object of the program's classes, or a nonempty container of only such objects."""
    if type(value) in PLAIN_CONTAINERS:
        return bool(value) and all(map(_is_of_objects, value))
    return any(map(_is_own, MRO(type(value))))


def _is_by_test(frame: types.FrameType | None) -> bool:
    """True if the test, not the program, applies an operator. `frame`: caller of the operator's method."""
    while frame is not None and Operators.tests is not None:
        if frame.f_globals is Operators.tests:
            return True
        if _is_programs(frame.f_globals):
            return False
        frame = frame.f_back
    return False


OURS = globals()


def _is_own(kind: type) -> bool:
    """True if the program may have made the class."""
    if id(kind) in LOADED.classes:
        return False
    return not any(type(one) is types.FunctionType and one.__globals__ is Operators.tests for one in HELD_BY(kind).values())


def _is_programs(known: dict[str, Any]) -> bool:
    return id(known) not in LOADED.names and known is not Operators.tests and known is not OURS


def _has_own_comparison(value: Any, depth: int = 0) -> bool:
    """True if comparing the value or its items would call the program's operators; guards their classes."""
    if type(value) in PLAIN_CONTAINERS and depth < DEEPEST:
        return True in [_has_own_comparison(one, depth + 1) for one in (*value, *(value.values() if type(value) is dict else ()))]
    own = [kind for kind in MRO(type(value)) if _is_own(kind)]
    for kind in own:
        guard_class(kind)
    return any(not HELD_BY(kind).keys().isdisjoint(RICH) for kind in own)


def _held(value: Any, above: tuple[int, ...] = ()) -> Any:
    def refer(one: Any) -> Any:
        if id(type(one)) in LOADED.classes and not callable(one):
            return one
        if id(one) in above or not _is_own(type(one)):
            return {"same": above.index(id(one)) if id(one) in above else id(one)}
        slots = [name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
        held = {name: getattr(one, name) for name in slots if hasattr(one, name)} | getattr(one, "__dict__", {})
        return {type(one).__qualname__: [[name, _held(held[name], (*above, id(one)))] for name in sorted(held)]}

    return encode(value, refer)


def _without_order(code: Any) -> Any:
    if type(code) is list:
        return [_without_order(one) for one in code]
    if type(code) is not dict:
        return code
    inner = {name: _without_order(one) for name, one in code.items()}
    return {name: sorted(one, key=repr) if name in ("s", "d") and type(one) is list else one for name, one in inner.items()}
