from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer
from pydantic_core import PydanticSerializationUnexpectedValue

from roll_lite.files import absolute_path, kind_of
from roll_lite.hub import config_notation, located

T = TypeVar("T")

LATEST = "latest"
"""Link in run_dir to the newest run."""


def from_current_folder(path: Path) -> Path:
    """Make a path absolute: workers may run in another folder. Replace the link `latest`, which moves when this run starts, by its target.
    Look up a missing `examples/...` in the package. ValueError if the path cannot be inspected."""
    try:
        path = absolute_path(path)
    except RuntimeError:
        raise ValueError(f"there is no home folder {path.parts[0]}") from None
    kind_of(path)
    return path.resolve() if LATEST in path.parts else path


def below(limit: int, what: str) -> AfterValidator:
    def check(number: int) -> int:
        if number >= limit:
            raise ValueError(f"is not below {limit:,}, {what}")
        return number

    return AfterValidator(check)


def _in_order(given: tuple[Any, Any]) -> tuple[Any, Any]:
    low, high = given
    if low > high:
        raise ValueError(f"is upside down, nothing lies in it; use [{high:g}, {low:g}]")
    return given


ASCENDING = AfterValidator(_in_order)
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveInt = Annotated[int, Field(gt=0), below(2**31, "the limit for all numbers here")]
NonNegativeFloat = Annotated[float, Field(ge=0)]
ZeroToOne = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1)]
TimeLimit = NonNegativeFloat | None
PositiveFloat = Annotated[float, Field(gt=0)]
NonEmpty = Annotated[list[T], Field(min_length=1)]
UserPath = Annotated[Path, AfterValidator(from_current_folder)]


def _as_written(path: Any) -> str:
    if not isinstance(path, Path):  # another member of a union
        raise PydanticSerializationUnexpectedValue("no path")
    return config_notation(path)


_AS_WRITTEN = PlainSerializer(_as_written, when_used="json")
ModelFolder = Annotated[Path, AfterValidator(lambda path: located(path, "model") or from_current_folder(path)), _AS_WRITTEN]
DataPath = Annotated[Path, AfterValidator(lambda path: located(path, "dataset") or from_current_folder(path)), _AS_WRITTEN]


class Refused(Exception):
    """Error: a field with an invalid value was read."""


def readable(found: Iterable[T]) -> list[T]:
    """Items that an iterator yields before it ends or raises Refused."""
    mistakes: list[T] = []
    with suppress(Refused):
        mistakes.extend(found)  # keeps the items before the exception
    return mistakes


Mistakes = Iterator[tuple[str, str]]
"""Pairs (field, message). An empty field means the whole section."""
Rule = Callable[[Any], Mistakes]


def rule(method: Rule) -> Rule:
    vars(method)["is_rule"] = True
    return method


@cache
def _rules(cls: type) -> list[Rule]:
    methods = {name: one for base in cls.__mro__ for name, one in vars(base).items() if isinstance(one, FunctionType)}
    return [one for one in methods.values() if hasattr(one, "is_rule")]


class Section(BaseModel):
    """Base class of sections: no unknown keys, frozen values."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Refused(name)
            return super().__getattr__(name)

    def mistakes(self) -> list[tuple[str, str]]:
        """Return (field, message) of each mistake found by the section's rules. A rule ends where it reads an invalid field; its earlier
        mistakes count."""
        return [found for one in _rules(type(self)) for found in readable(one(self))]

    @property
    def parameters(self) -> dict[str, Any]:
        return {field: value for field, value in self if field != "name"}


def missing_extra(package: str, extra: str) -> Mistakes:
    """Yield a mistake if a package of the extra roll_lite[`extra`] is missing."""
    with suppress(ModuleNotFoundError):  # a package around it is missing
        if find_spec(package) is not None:
            return
    yield "name", f'its package is not installed: pip install "roll_lite[{extra}]"'
