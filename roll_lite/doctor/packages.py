# torch, ray and what imports them are not imported here: they may be missing or broken.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

ABSENT = "not installed"
LOCK = "install the versions of a lock file (roll-lite docs environment)"


@dataclass
class Diagnosis:
    check: str
    value: str
    remedy: str = ""
    """Empty if nothing is wrong."""
    status: str = "fault"
    """"fault" or "warning"; "ok" if there is no remedy."""
    node: str = ""
    """Address of the node, if several are checked."""

    def __post_init__(self) -> None:
        self.status = self.status if self.remedy else "ok"


def wrong_packages() -> Iterator[Diagnosis]:
    """Compare installed packages with the ranges in roll_lite's own metadata."""
    for requirement in map(Requirement, metadata.requires("roll_lite") or ()):
        try:
            version = metadata.version(requirement.name)
            fits = requirement.specifier.contains(version, prereleases=True)
        except metadata.PackageNotFoundError:
            version, fits = ABSENT, False
        if not (fits or requirement.marker):  # with a marker it is an extra
            value = f"{version}, supported is {requirement.specifier or 'any'}"
            yield Diagnosis(requirement.name, value, f"{LOCK}, or pip install '{requirement}'")
