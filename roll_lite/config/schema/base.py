"""Base class of all sections, and types of numbers and paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from roll_lite.files import absolute_path, kind_of


def from_current_folder(path: Path) -> Path:
    """Make a path absolute, relative to the folder where the run starts, so that all workers agree. Shipped files are found from any
    folder. ValueError if the path is unreadable."""
    try:
        path = absolute_path(path)
    except RuntimeError:
        raise ValueError(f"there is no home folder {path.parts[0]}") from None
    kind_of(path)
    return path


def below(limit: int, what: str) -> AfterValidator:
    def check(number: int) -> int:
        if number >= limit:
            raise ValueError(f"is not below {limit:,}, {what}")
        return number

    return AfterValidator(check)


PositiveInt = Annotated[int, Field(gt=0), below(2**31, "the limit for all numbers here")]
NonNegativeFloat = Annotated[float, Field(ge=0)]
TimeLimit = Annotated[float, Field(ge=0)] | None
PositiveFloat = Annotated[float, Field(gt=0)]
UserPath = Annotated[Path, AfterValidator(from_current_folder)]


class Refused(Exception):
    """Raised by reading a field whose value the schema has refused."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, and values never change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Refused(name)
            return super().__getattr__(name)

    @property
    def parameters(self) -> dict[str, Any]:
        """Settings as keyword arguments, without `name`."""
        return {field: value for field, value in self if field != "name"}
