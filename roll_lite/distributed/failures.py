from __future__ import annotations

import re
import time
from collections.abc import Hashable
from pathlib import Path

from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from roll_lite.files import first_line

LOG_LINES = 15
BUDGET_SECONDS = 3600.0
UNDERLINES = re.compile(r"^[ ^~]+\n", re.MULTILINE)
EXCEPTION_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception): .+")
ANSI_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class RankFailed(RuntimeError):
    """Error: a rank raised an exception, died or timed out. `pending._end` kills the cluster's ranks first; other raisers, such as
    `pending.pause`, do not."""

    def __init__(self, role: str, rank: int, phase: str, cause: str, retryable: bool = False) -> None:
        super().__init__(role, rank, phase, cause, retryable)
        self.role = role
        self.rank = rank
        self.phase = phase
        self.cause = cause
        self.retryable = retryable
        """True if the rank died or hung, so that a restart may help."""
        self.where = ""
        """Suffix " on ADDRESS" of messages; empty if the cluster has one node."""
        self.lost_object = False
        """True if the rank could not read an object that was lost with another process or node."""
        self.others: tuple[RankFailed, ...] = ()
        """Failures of other roles, noticed before this one was raised."""

    def __str__(self) -> str:
        return f"{self.role} rank {self.rank}{self.where} failed in {self.phase}: {self.cause}"

    def final(self, restarts: int, setting: str, when: str = "within an hour") -> RankFailed:
        """Return a copy that is not retryable: the run ends. Its message names the restarts and the `setting` that limits them."""
        first, _, rest = self.cause.partition("\n")
        why = f"after {restarts} restarts {when}, {setting}"
        final = RankFailed(self.role, self.rank, self.phase, f"{first} ({why})\n{rest}".rstrip())
        final.where = self.where
        return final


class RestartBudget:
    def __init__(self, seconds: float = BUDGET_SECONDS) -> None:
        self._seconds = seconds
        self._times: dict[Hashable, list[float]] = {}

    def allows(self, name: Hashable, restarts: int) -> bool:
        """Count a restart and return True; False if `name` had `restarts` within the budget's seconds."""
        now = time.monotonic()
        times = self._times[name] = [at for at in self._times.get(name, []) if now - at < self._seconds]
        if len(times) >= restarts:
            return False
        times.append(now)
        return True


class MemberLost(Exception):
    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class FleetDown(RuntimeError):
    """Error: all members of a Fleet are dead. `place`: number of the last dead member."""

    def __init__(self, fleet: str, place: int, cause: str) -> None:
        super().__init__(fleet, place, cause)
        self.fleet = fleet
        self.place = place
        self.cause = cause

    def __str__(self) -> str:
        return self.cause


class ClusterDead(RuntimeError):
    def __init__(self, role: str, cause: str) -> None:
        super().__init__(role, cause)
        self.role = role
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.role} is dead: {self.cause}"


def is_death(error: BaseException) -> bool:
    return isinstance(error, RayActorError)


def is_loss(error: BaseException) -> bool:
    return is_death(error) or (isinstance(error, RayTaskError) and isinstance(error.cause, MemberLost))


def may_be_aftermath(error: BaseException) -> bool:
    """True if another rank's death may be the cause: broken collectives raise RuntimeError or OSError."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, RuntimeError | OSError)


def is_lost_object(error: BaseException) -> bool:
    return isinstance(error, RayTaskError) and isinstance(error.cause, ObjectLostError)


def is_connection_error(error: BaseException) -> bool:
    cause = error.cause if isinstance(error, RayTaskError) else None
    names = {one.__name__ for one in type(cause).__mro__}
    return bool(names & {"DistError", "AcceleratorError"}) or (type(cause) is RuntimeError and "gloo" in str(cause))


def cause_of(error: BaseException, name: str = "") -> str:
    """Describe an error. `name`: process to prepend, except to a MemberLost."""
    if isinstance(error, RayTaskError) and error.cause is not None:
        error = error.cause
    if isinstance(error, MemberLost):
        return error.cause
    cause = f"its process died: {first_line(error)}" if is_death(error) else f"{type(error).__name__}: {first_line(error)}"
    return f"{name}: {cause}" if name else cause


def failure_text(error: BaseException, log_file: Path | None) -> str:
    """Return a one-line cause, then the remote traceback or, if the process died, its log's end."""
    text = UNDERLINES.sub("", ANSI_COLOURS.sub("", str(error))).strip()
    if isinstance(error, RayTaskError):
        names_cause = isinstance(error.cause, MemberLost | FleetDown)
        message = str(error.cause) if names_cause else f"{type(error.cause).__name__}: {error.cause}"
        cause = _logged_cause(log_file) if "root cause above" in message else None
        return f"{cause or message}{_last_lines(log_file)}" if names_cause else f"{cause or message}\n\n{text}"
    if not is_death(error):
        return f"{type(error).__name__}: {text}"
    if "creation task" in text:
        death = f"it could not be constructed\n\n{text}"
    else:
        detail = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common causes include|$)", text, re.DOTALL)
        pid = re.search(r"pid: (\d+)", text)
        process = f"its process {pid.group(1)}" if pid else "its process"
        death = f"{process} died ({detail.group(1)}: {detail.group(2).strip()})" if detail else f"{process} died\n\n{text}"
    return f"{death}{_last_lines(log_file)}"


def _logged_cause(log_file: Path | None) -> str | None:
    try:
        lines = log_file.read_text(errors="replace").splitlines() if log_file is not None else []
    except OSError:  # on another node
        return None
    named = [
        match.group() for line in lines if "root cause above" not in line and (match := EXCEPTION_LINE.search(ANSI_COLOURS.sub("", line)))
    ]
    return named[-1] if named else None


def _last_lines(log_file: Path | None) -> str:
    if log_file is None:
        return ""
    try:
        lines = log_file.read_text(errors="replace").splitlines()
    except OSError:  # on another node
        return f"; its log is {log_file}"
    tail = "".join(f"\n  {line}" for line in lines[-LOG_LINES:])
    return f"; its log {log_file} ends with:{tail}" if tail else f"; its log {log_file} is empty"
