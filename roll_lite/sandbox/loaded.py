"""Record of modules and classes before an untrusted program runs, to undo its changes and to tell its classes from trusted ones."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

BUILTINS = dict(vars(builtins))
OF_CLASS = type.__dict__
MRO, HELD_BY, FLAGS = (OF_CLASS[name].__get__ for name in ("__mro__", "__dict__", "__flags__"))
DERIVED = OF_CLASS["__subclasses__"]
"""List the subclasses of a class. A metaclass cannot override this, nor MRO, HELD_BY and FLAGS."""
MADE_IN_PYTHON = 1 << 9
CONSTANT = (int, float, complex, str, bytes)


class Loaded:
    def __init__(self) -> None:
        self.modules: dict[str, types.ModuleType] = {}
        self.names: dict[int, dict[str, Any]] = {}
        self.classes: dict[int, type] = {}
        self._held: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._code: dict[int, tuple[Any, ...]] = {}

    def add(self, modules: dict[str, types.ModuleType] = sys.modules) -> Loaded:
        known = {"__main__", *self.modules}
        new = {name: one for name, one in modules.items() if isinstance(one, types.ModuleType) and name not in known}
        self.modules |= new
        self.names |= {id(vars(module)): vars(module) for module in new.values()}
        self.classes |= every_class() if modules is sys.modules else {}
        places: list[Any] = list(new.values())
        places += {one for module in places for one in vars(module).values() if isinstance(one, type) and FLAGS(one) & MADE_IN_PYTHON}
        for place in places:
            held = self._held.setdefault(id(place), (place, dict(vars(place))))[1]
            functions = [one for one in held.values() if type(one) is types.FunctionType]
            self._code |= {id(one): (one, one.__code__, one.__defaults__, one.__kwdefaults__) for one in functions}
        return self

    def put_back(self) -> set[str]:
        """Restore modules, classes and functions that the program changed, but not state such as sys.stdout. Return the replaced names."""
        replaced = {name for name, module in self.modules.items() if sys.modules.get(name) is not module}
        sys.modules.update(self.modules)
        for function, code, defaults, named in self._code.values():
            if function.__code__ is not code or function.__defaults__ is not defaults or function.__kwdefaults__ is not named:
                function.__code__, function.__defaults__, function.__kwdefaults__ = code, defaults, named
                replaced.add(function.__name__)
        for place, held in self._held.values():
            now, is_class = vars(place), isinstance(place, type)
            added = [name for name in now if name not in held and (is_class or name in BUILTINS)]  # a new global may hide a builtin
            for name in [name for name, value in held.items() if now.get(name, held) is not value] + added:
                value = held.get(name, now.get(name))
                if callable(value) or isinstance(value, types.ModuleType) or (is_class and hasattr(type(value), "__get__")):
                    replaced.add(name)
                elif not isinstance(value, CONSTANT) or name.startswith("_"):  # state, such as sys.stdout
                    continue
                if name in added:
                    type.__delattr__(place, name) if is_class else now.pop(name)
                else:
                    type.__setattr__(place, name, value) if is_class else now.update({name: value})
        return replaced


def every_class() -> dict[int, type]:
    found: dict[int, type] = {id(object): object}
    kinds: list[type] = [object]
    for kind in kinds:
        new = {id(one): one for one in DERIVED(kind) if id(one) not in found}
        found |= new
        kinds += new.values()
    return found


LOADED = Loaded()
