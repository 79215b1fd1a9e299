"""Lists, dicts and sets that a program and its tests both have: one object on each side, by label, kept the same."""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from roll_lite.sandbox.values import decode, encode

MUTABLE = (list, dict, set, bytearray, collections.deque, collections.Counter, collections.OrderedDict)
HELD_HERE = 2
"""References to an object that nobody but its link has, while it is looked at."""


class Links:
    """Of one side. What crosses by itself is linked; what is inside of it is copied."""

    def __init__(self, side: str, refer: Callable[[Any], Any], find: Callable[[Any], Any]) -> None:
        self._side, self._refer, self._find = side, refer, find
        self._objects: dict[str, Any] = {}
        self._labels: dict[int, str] = {}
        self._known: dict[str, Any] = {}
        """Their content as both sides knew it last."""
        self._made = 0

    def send(self, value: Any) -> Any:
        content = encode(value, self._refer)
        if type(value) not in MUTABLE:
            return content
        if id(value) not in self._labels:
            self._made += 1
            self._hold(f"{self._side}{self._made}", value)
        label = self._labels[id(value)]
        self._known[label] = content
        return {"m": [label, content]}

    def take(self, data: Any) -> Any:
        """ValueError for what no `send` writes."""
        if not isinstance(data, dict) or list(data) != ["m"]:
            return decode(data, self._find)
        label, content = data["m"]
        if label in self._objects:
            self.follow({label: content})
        else:
            value = decode(content, self._find)
            if type(value) not in MUTABLE:
                raise ValueError("no value that can be changed")
            self._hold(label, value)
            self._known[label] = content
        return self._objects[label]

    def _hold(self, label: str, value: Any) -> None:
        self._objects[label] = value
        self._labels[id(value)] = label

    def changes(self) -> dict[str, Any]:
        """What is new on this side since the last time."""
        found = {label: encode(value, self._refer) for label, value in self._objects.items()}
        changed = {label: content for label, content in found.items() if content != self._known[label]}
        self._known |= changed
        return changed

    def follow(self, changes: Mapping[str, Any]) -> None:
        """What is new on the other side."""
        for label, content in changes.items():
            if label not in self._objects:  # let go meanwhile
                continue
            mine, now = self._objects[label], decode(content, self._find)
            if type(mine) is not type(now):
                raise ValueError("a value of another type")
            mine.clear()
            mine.extend(now) if hasattr(mine, "extend") else mine.update(now)
            self._known[label] = content

    def let_go(self) -> list[str]:
        """Forgets what only this table still holds."""
        alone = [label for label in self._objects if sys.getrefcount(self._objects[label]) <= HELD_HERE]
        self.forget(alone)
        return alone

    def forget(self, labels: list[str]) -> None:
        for label in labels:
            if label in self._objects:
                del self._labels[id(self._objects[label])], self._objects[label], self._known[label]


def inner(value: Any) -> Iterator[Any]:
    """What can be changed inside of a value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        parts = [*one.keys(), *one.values()] if isinstance(one, dict) else one if isinstance(one, list | tuple | set | frozenset) else ()
        for part in parts:
            if type(part) in MUTABLE:
                yield part
            waiting.append(part)
