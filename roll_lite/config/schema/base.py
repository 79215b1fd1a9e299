"""What every section of the configuration has in common, and the kinds of numbers and paths."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from roll_lite.config.files import kind_of
from roll_lite.config.shipped import found


def from_current_folder(path: Path) -> Path:
    """The one rule for paths, the shell's: relative to the folder the run is started in. Absolute from then on, so that workers agree.
    What the package ships is found from everywhere. ValueError where nobody could tell what is there.
    """
    try:
        path = found(path)
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
    """A field was read whose value the schema has refused: nothing can be said of it."""


class Section(BaseModel):
    """Base of every section: unknown keys are refused, nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=())

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in type(self).model_fields:
                raise Refused(name)
            return super().__getattr__(name)

    @property
    def parameters(self) -> dict[str, Any]:
        """The settings as keyword arguments, without the name by which a variant is chosen."""
        return {field: value for field, value in self if field != "name"}
