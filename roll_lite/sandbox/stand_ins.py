"""For tests that run apart from the program: its functions and objects, called over a socket.

What comes back is plain data, or a stand-in for an object that stays with the program. The program never learns what a test expects, and
decides no equality of what the tests made. What the tests need and cannot be done that way is no verdict about the program: it ends
them as `Cannot`. What the program alone brings about, by what it returns or sends, is its fault: it ends them as `ProgramFault`.
"""

from __future__ import annotations

import builtins
import importlib
import sys
import types
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeAlias

from roll_lite.sandbox.library import by_name, name_of

Wire: TypeAlias = Any
"""That of wire.py, which makes these objects."""

OF_CLASSES = ("__name__", "__qualname__", "__dict__", "__annotations__", "__bases__", "__mro__", "__module__", "__members__")
"""Such as tests read. No others are asked for: Python itself looks for them, and takes what it finds."""


class Cannot(BaseException):
    """The tests need something that two processes apart cannot do."""


class ProgramFault(BaseException):
    """The program ended, or returned or sent what no tests can use; it fails them whatever they catch."""


class StandIn:
    """An object of the program. Everything is asked there, except whether it equals something."""

    __slots__ = ("_number", "_wire")
    _wire: Wire
    _number: int

    def __init__(self, wire: Wire, number: int) -> None:
        object.__setattr__(self, "_wire", wire)
        object.__setattr__(self, "_number", number)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._wire.use("call", self, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in OF_CLASSES:
            raise AttributeError(name)
        return self._wire.use("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._wire.use("set", self, name, value)

    def __delattr__(self, name: str) -> None:
        self._wire.use("delete", self, name)

    def __contains__(self, item: Any) -> bool:
        """Asked of the program where the tests made the object; what it returns otherwise is looked through."""
        if self._wire.is_made(self):
            return bool(self._wire.use("contains", self, item))
        return any(one is item or one == item for one in self)

    def __getitem__(self, key: Any) -> Any:
        return self._wire.use("item", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._wire.use("set item", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._wire.use("delete item", self, key)

    def __iter__(self) -> Any:
        """Of what has a length, as many as it says: a loop over fewer would check less."""
        size = self._wire.use("size", self)
        if not size:
            return self._wire.items(self._wire.use("iter", self))
        items = self._wire.use("list", self)
        if size != (len(items),):
            self._wire.end(ProgramFault(f"an object of the program has the length {size[0]} and {len(items)} items"))
        return iter(items)

    def __next__(self) -> Any:
        """Its end could end a loop of the tests: it is told where they look for it."""
        if found := self._wire.use("items", self, 1):
            return found[0]
        self._wire.check_end_of_iterator()
        raise StopIteration

    def __len__(self) -> int:
        size = self._wire.use("size", self)
        if not size:
            raise TypeError("an object of the program has no len()")
        return int(size[0])

    def __bool__(self) -> bool:
        return bool(self._wire.use("bool", self))

    def __str__(self) -> str:
        return str(self._wire.use("str", self))

    def __repr__(self) -> str:
        return str(self._wire.use("repr", self))

    def __copy__(self) -> Any:
        return self._wire.use("call", "copy.copy", self)

    def __deepcopy__(self, _: Any) -> Any:
        return self._wire.use("call", "copy.deepcopy", self)

    def __enter__(self) -> Any:
        return self._wire.use("enter", self)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        return bool(self._wire.use("leave", self, *self._wire.shown(error))) and self._wire.may_swallow(error)

    async def __aenter__(self) -> Any:
        return await self._wire.use("enter later", self)

    async def __aexit__(self, kind: Any, error: BaseException | None, _: Any) -> bool:
        return bool(await self._wire.use("leave later", self, *self._wire.shown(error))) and self._wire.may_swallow(error)

    async def __aiter__(self) -> AsyncIterator[Any]:
        iterator = self._wire.use("iter later", self)
        while found := await self._wire.use("item later", iterator):
            yield found[0]

    def __eq__(self, other: object) -> bool:
        """An object that is the same only as itself is that; one that is a list, number or the like is compared as such. Where the program
        has a way of its own, it is asked about what it returned only, and believed where the objects hold the same, too: it could have
        returned plain data as well, without knowing more."""
        if self is other:
            return True
        how, *plain = self._wire.use("how to compare", self)
        if how != "own":
            return any(one == other for one in self._wire.held(self, plain))
        if not isinstance(other, StandIn) or self._wire.is_made(self) or self._wire.is_made(other):
            self._wire.end_at_object("comparing an object of a class of the program, which has an __eq__ of its own", self, other)
        return bool(self._wire.use("operator", self, "eq", other)) and self._wire.use("state", self) == self._wire.use("state", other)

    def _may_be(self, kind: type) -> bool:
        how, *plain = self._wire.use("how to compare", self)
        return how == "own" or any(isinstance(one, kind) for one in self._wire.held(self, plain))

    def __hash__(self) -> int:
        if plain := self._plain_for("__hash__"):
            return hash(plain[0])
        return self._wire.hash_of(self) if self._wire.use("how to compare", self)[0] == "own" else object.__hash__(self)

    def _plain_for(self, method: str) -> list[Any]:
        """The number, text or tuple that it derives from, where it has the method from there; else empty."""
        plain = list(self._wire.use("plain for", self, method))
        return self._wire.held(self, plain) if plain else plain


async def awaitable(task: StandIn) -> Any:
    """What the program has to be awaited for; whatever else the tests await has its turn meanwhile."""
    wire = task._wire
    wire.use("start", task)
    try:
        await _turn()
        while not (found := wire.use("step", task)):
            await _turn()
    except BaseException:
        wire.use("cancel", task)
        raise
    return found[0]


@types.coroutine
def _turn() -> Any:
    yield


OPPOSITE = {"lt": "gt", "gt": "lt", "le": "gt", "ge": "lt"}


def _operator(name: str, mirrored: bool = False) -> Callable[..., Any]:
    """Of an IntEnum, a namedtuple and the like in the tests. Otherwise the program's, as a method would be, for what the tests made and for
    what it returned. With what it returned on one side and what is expected on the other it would learn that."""
    method = f"__{'r' if mirrored else ''}{name}__"

    def called(self: StandIn, *others: Any) -> Any:
        wire = self._wire
        values = [one._plain_for(method) if isinstance(one, StandIn) else [one] for one in (self, *others)]
        if all(values):
            return getattr(values[0][0], method)(*(one for [one] in values[1:]))
        all_there = all(isinstance(one, StandIn) for one in others)
        if not (any(map(wire.is_made, (self, *others))) or (all_there if others else wire.is_promised(self))):
            wire.end_at_object(f"{method} of an object of a class of the program", self, *others)
        value = wire.use("operator", self, name, *others, **({"mirrored": True} if mirrored else {}))
        if name in OPPOSITE and bool(value) and _holds(self, OPPOSITE[name], *others):
            wire.end(ProgramFault("an object of the program is both less and more than another"))
        return value

    return called


def _holds(one: StandIn, name: str, other: Any) -> bool:
    try:
        return bool(one._wire.use("operator", one, name, other))
    except Exception:  # it need not have both
        return False


def _refused(method: str) -> Callable[..., Any]:
    return lambda self, *others: self._wire.end_at_object(f"{method} of an object of a class of the program", self, *others)


_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift")
for _name in (
    *(*_TWO, "lt", "le", "gt", "ge", "neg", "pos", "abs", "invert"),
    *("int", "float", "complex", "index", "round", "trunc", "floor", "ceil", "reversed"),
):
    setattr(StandIn, f"__{_name}__", _operator(_name))
for _name in _TWO:
    setattr(StandIn, f"__r{_name}__", _operator(_name, mirrored=True))
for _name in ("await", "anext", "array", "reduce_ex"):
    setattr(StandIn, f"__{_name}__", _refused(f"__{_name}__"))
setattr(StandIn, "__doc__", property(lambda self: self._wire.use("get", self, "__doc__")))  # noqa: B010


def builtins_for(wire: Wire, under_test: list[str]) -> dict[str, Any]:
    """Python's own names as the tests see them: none that the program was to define, and such as know stand-ins."""

    def is_instance(value: Any, kinds: Any) -> bool:
        if isinstance(kinds, tuple | types.UnionType):
            return any(is_instance(value, one) for one in (kinds if isinstance(kinds, tuple) else kinds.__args__))
        if isinstance(value, StandIn) and isinstance(kinds, StandIn):
            return bool(wire.use("isinstance", value, kinds))
        if isinstance(kinds, StandIn):
            return False
        if not isinstance(value, StandIn):
            return isinstance(value, kinds)
        if name_of(kinds) is None:
            wire.end_at_object(f"isinstance of an object of the program and {getattr(kinds, '__name__', kinds)}", value)
        is_one = bool(wire.use("isinstance", value, kinds))
        if is_one and kinds in _SCALARS and not value._may_be(kinds):
            wire.end(ProgramFault(f"an object of the program is a {kinds.__name__} and derives from none"))
        return is_one

    def is_subclass(kind: Any, kinds: Any) -> bool:
        if isinstance(kinds, tuple):
            return any(is_subclass(kind, one) for one in kinds)
        if isinstance(kind, StandIn):
            return bool(wire.use("issubclass", kind, kinds))
        wire.note_kind(kind)
        return not isinstance(kinds, StandIn) and issubclass(kind, kinds)

    def is_callable(value: Any) -> bool:
        return bool(wire.use("callable", value)) if isinstance(value, StandIn) else callable(value)

    def has_attribute(value: Any, name: str) -> bool:
        return bool(wire.use("has", value, name)) if isinstance(value, StandIn) else hasattr(value, name)

    def next_of(iterator: Any, *default: Any) -> Any:
        """With a default its end ends no loop."""
        if not isinstance(iterator, StandIn) or len(default) != 1:
            return next(iterator, *default)
        found = wire.use("items", iterator, 1)
        return found[0] if found else default[0]

    names = {"isinstance": is_instance, "issubclass": is_subclass, "callable": is_callable, "hasattr": has_attribute, "next": next_of}
    return {name: value for name, value in {**vars(builtins), **names}.items() if name not in under_test}


_SCALARS = (bool, int, float, complex, str, bytes)
ASKING = {
    "inspect": (
        "isfunction",
        "isclass",
        "ismethod",
        "isgenerator",
        "isgeneratorfunction",
        "iscoroutinefunction",
        "isabstract",
        "signature",
    ),
    "dataclasses": ("is_dataclass", "fields", "asdict", "astuple", "replace"),
    "asyncio": ("iscoroutinefunction",),
}
"""Functions of Python's that look into an object: the program's are looked into there."""


def ask_there(wire: Wire) -> None:
    for module, names in ASKING.items():
        for name in names if module in sys.modules else ():
            _ask_there(wire, module, name)


def _ask_there(wire: Wire, module: str, name: str) -> None:
    own = by_name(f"{module}.{name}")

    def called(*args: Any, **kwargs: Any) -> Any:
        return wire.use("call", f"{module}.{name}", *args, **kwargs) if args and isinstance(args[0], StandIn) else own(*args, **kwargs)

    setattr(importlib.import_module(module), name, called)
