"""Protections that hold on this machine, missing ones, and the resulting risk."""

from __future__ import annotations

from dataclasses import dataclass

REQUIRED = {
    "files": "programs could read and write the user's files",
    "network": "programs could open connections",
    "processes": "programs could see or signal other processes, or outlive their test",
}
OPTIONAL = {"system calls": "more of the kernel is within reach", "users": "programs run as the user who started this"}
ALWAYS = "CPU time, memory, processes, size of files and folder, open files, output and wall-clock time limited; clean environment"


@dataclass(frozen=True)
class Protections:
    kind: str
    held: dict[str, str]
    why_not: tuple[str, ...] = ()
    counted: tuple[str, ...] = ()
    """Resources that the kernel counts in a control group; others are sampled about twenty times a second."""

    @property
    def missing(self) -> list[str]:
        return [name for name in REQUIRED if not self.held.get(name)]

    def describe(self) -> str:
        holds = "; ".join(f"{name}: {by}" for name, by in self.held.items())
        lacks = "; ".join(f"{name} ({what})" for name, what in {**REQUIRED, **OPTIONAL}.items() if not self.held.get(name))
        reasons = f" [{'; '.join(self.why_not)}]" if self.why_not else ""
        counted = f" ({', '.join(self.counted)} by a control group)" if self.counted else ""
        return f"holds: {holds or 'nothing'}; limits: {ALWAYS}{counted}. missing: {lacks or 'nothing'}{reasons}"


def refuse_unprotected(protections: Protections, allowed: bool) -> None:
    if protections.missing and not allowed:
        raise ValueError(
            f"reward code: this machine cannot isolate programs: {protections.describe()}. "
            "Run where user namespaces or landlock and seccomp are available, use a remote sandbox (backend: {url: ...}), "
            "or accept the risk with allow_unprotected: true"
        )
