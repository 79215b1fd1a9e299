"""For tests that run apart from the program: its functions and objects, called over a socket."""

from __future__ import annotations

import builtins
import json
import os
from typing import Any

from roll_lite.rewards.sandbox.values import decode, encode

LONGEST = 8 << 20


class Wire:
    def __init__(self, file: int) -> None:
        self._incoming = open(file, "rb", closefd=False)  # noqa: SIM115
        self._file = file

    def wait(self) -> None:
        """Until the program has been read."""
        if not self._incoming.readline(LONGEST):
            raise RuntimeError("the program ended before its tests")

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        message = json.dumps(asked).encode() + b"\n"
        while message:
            message = message[os.write(self._file, message) :]
        line = self._incoming.readline(LONGEST)
        if not line.endswith(b"\n"):
            raise RuntimeError("the program ended during its tests")
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise RuntimeError("the program gave no answer")
        return answer


class StandIn:
    """Compares equal to nothing but itself: no program decides a comparison."""

    _wire: Wire
    _target: dict[str, Any]
    _attributes: tuple[str, ...]

    def __init__(self, wire: Wire, target: dict[str, Any], attributes: tuple[str, ...] = ()) -> None:
        self.__dict__.update(_wire=wire, _target=target, _attributes=attributes)

    def __getattr__(self, name: str) -> StandIn:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(self._wire, self._target, (*self._attributes, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._do("call", args, kwargs)

    def __iter__(self) -> Any:
        return iter(self._do("list"))

    def __len__(self) -> int:
        return int(self._do("len"))

    def __str__(self) -> str:
        return str(self._do("str"))

    def __repr__(self) -> str:
        return str(self._do("repr"))

    def __eq__(self, other: object) -> bool:
        """An attribute is plain data or it is nothing that could be compared."""
        value = self._do("get")
        return False if isinstance(value, StandIn) or isinstance(other, StandIn) else bool(value == other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        value = self._do("get")
        if isinstance(value, StandIn):
            raise TypeError("an object of the program is neither true nor false")
        return bool(value)

    def __getitem__(self, key: Any) -> Any:
        return StandIn(self._wire, self._target, (*self._attributes, "__getitem__"))(key)

    def _do(self, what: str, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        asked = {"do": what, "attributes": self._attributes, "args": encode(list(args), _refer), "kwargs": encode(kwargs or {}, _refer)}
        answer = self._wire.ask(asked | self._target)
        if "error" in answer:
            kind = getattr(builtins, str(answer["error"]), RuntimeError)
            usable = isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError
            raise (kind if usable else RuntimeError)(str(answer.get("text")))
        changed = decode(answer.get("args", []), self._find)
        for given, now in zip(args, changed if isinstance(changed, list) else [], strict=False):
            _follow(given, now)
        return decode(answer["value"], self._find)

    def _find(self, number: Any) -> StandIn:
        return StandIn(self._wire, {"object": int(number)})


def _refer(value: Any) -> Any:
    if isinstance(value, StandIn) and "object" in value._target and not value._attributes:
        return {"r": value._target["object"]}
    raise TypeError(f"a value of type {type(value).__name__} cannot be given to the program")


def _follow(given: Any, now: Any) -> None:
    """What the function did to a list, set or dict in place."""
    if type(given) is not type(now) or not isinstance(given, list | set | dict):
        return
    given.clear()
    given.extend(now) if isinstance(given, list) else given.update(now)
