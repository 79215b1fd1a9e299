"""Wait for calls to ranks. A rank's death ends every wait, unless its cluster's ranks are independent (`live_alone`)."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

import psutil
import ray
from ray.exceptions import RayActorError, RayTaskError

from roll_lite.config.placement import ranges
from roll_lite.distributed.failures import (
    FleetDown,
    RankFailed,
    failure_text,
    is_connection_error,
    is_death,
    is_loss,
    is_lost_object,
    may_be_aftermath,
)
from roll_lite.distributed.liveness import is_stopped, name_of
from roll_lite.distributed.place import Place, stopped_at
from roll_lite.distributed.rank_group import WATCH, RankGroup
from roll_lite.distributed.watchdog import WATCHDOG, Limit
from roll_lite.distributed.worker import Stand

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Maximum length of one `ray.wait`: Ctrl-C and timeouts are noticed in between."""
KILLED = "ray.kill"
BLAME_SECONDS = 2.0
"""Seconds to look for a dead rank after another's broken connection."""
STACK_SECONDS = 3.0
DUMP_SECONDS = 0.5


class Call:
    def __init__(self, group: RankGroup, rank: int, phase: str, ref: Any, may_be_lost: bool = False) -> None:
        """`ref`: the call's result, or a list for several; None if the rank is already lost."""
        first, *self.kept = ref if isinstance(ref, list) else [ref]
        """Further results. The object store keeps them even if the rank dies."""
        self.group = group
        self.rank = rank
        self.phase = phase
        self.ref: ray.ObjectRef | None = first
        self.value: Any = None
        self.may_be_lost = may_be_lost
        """True: the rank's death ends the call without a value."""
        self.lost = ref is None

    @property
    def done(self) -> bool:
        return self.ref is None

    def take(self) -> None:
        try:
            self.value = ray.get(self.ref)
        except Exception as error:
            if not (self.may_be_lost and is_loss(error)):
                raise
            self.lost = True
            self.group.lose(self.rank, error)
        self.ref = None


class Pending(Generic[T]):
    """Calls in flight on one cluster; `collect` makes the result from their values."""

    def __init__(self, group: RankGroup, phase: str, calls: Sequence[Call], collect: Callable[[list[Any]], T]) -> None:
        self.calls = list(calls)
        self.group = group
        self.phase = phase
        self.started = WATCHDOG.time()
        self._collect = collect
        self._settled = False
        self.group.phases.append(self.phase)

    def result(self, timeout_s: float | None = None, poll: Callable[[], None] | None = None) -> T:
        """Wait for the calls and return the result. `timeout_s` overrides the cluster's limit. `poll` is called about once a second."""
        _wait([self], timeout_s, poll=poll)
        return self._collect([call.value for call in self.calls])

    def answer(self) -> T | None:
        """Return the result if ready, else None. Raises a rank's error, but leaves its death to the next wait."""
        waiting = {cast(ray.ObjectRef, call.ref): call for call in self.calls if not call.done}
        ready, _ = ray.wait(list(waiting), num_returns=len(waiting), timeout=0, fetch_local=False) if waiting else ([], [])
        for ref in ready:
            with suppress(RayActorError):
                _take(waiting[ref], list(waiting.values()), deaths_too=False)
        return self.result() if self.done else None

    @property
    def done(self) -> bool:
        return all(call.done for call in self.calls)

    def settle(self) -> None:
        if not self._settled:
            self._settled = True
            with suppress(ValueError):  # the group was rebuilt since
                self.group.phases.remove(self.phase)

    def deadline(self, timeout_s: float | None) -> float:
        """Return the time (`WATCHDOG.time`) at which waiting ends. Default: the cluster's limit, except in phases with their own."""
        own = self.group.timeout_s if timeout_s is None and WATCHDOG.nearest is None else timeout_s
        return float("inf") if own is None else self.started + own


def gather(*pendings: Pending[T], timeout_s: float | None = None, poll: Callable[[], None] | None = None) -> list[T]:
    _wait(pendings, timeout_s, poll=poll)
    return [pending.result() for pending in pendings]


def first_done(pendings: Sequence[Pending[T]]) -> list[Pending[T]]:
    _wait(pendings, None, enough=any)
    return [pending for pending in pendings if pending.done]


def raise_all_dead(group: RankGroup) -> NoReturn:
    """Raise the failure of a cluster without living ranks. If another cluster's rank dies within BLAME_SECONDS, raise its failure,
    the likely cause."""
    deaths = WATCH.deaths()
    ready, _ = ray.wait(list(deaths), num_returns=1, timeout=BLAME_SECONDS, fetch_local=False) if deaths else ([], [])
    _report_deaths([deaths[ref] for ref in ready])
    rank, cause = list(group.lost.items())[-1]
    raise located(RankFailed(group.name, rank, group.phase, cause))


def _wait(
    pendings: Sequence[Pending[Any]],
    timeout_s: float | None,
    enough: Callable[[Iterable[bool]], bool] = all,
    poll: Callable[[], None] | None = None,
) -> None:
    while pendings and not enough(pending.done for pending in pendings):
        waiting = {cast(ray.ObjectRef, call.ref): call for pending in pendings for call in pending.calls if not call.done}
        for pending in pendings:
            pending.group.check()
        WATCHDOG.check()
        unfinished = [pending for pending in pendings if not pending.done]
        first = min(unfinished, key=lambda pending: pending.deadline(timeout_s))
        limit = WATCHDOG.nearest
        remaining = min(first.deadline(timeout_s), limit.deadline if limit else float("inf")) - WATCHDOG.time()
        if remaining <= 0:
            _time_out(first, limit)
        for ref in _ready(list(waiting), min(POLL_SECONDS, remaining)):
            _take(waiting[ref], list(waiting.values()))
        if poll is not None:
            poll()
    for pending in pendings:
        if pending.done:
            pending.settle()


def pause(group: RankGroup, rank: int, waits_for: str) -> None:
    """Sleep half a second in a loop that waits for an event (`waits_for`, for messages). RankFailed if a rank fails or, blaming `rank`, if
    the phase times out."""
    WATCHDOG.check()
    limit = WATCHDOG.nearest
    if limit is not None and WATCHDOG.time() >= limit.deadline:
        cause = f"{waits_for} took longer than the phase may last ({limit})"
        raise located(RankFailed(group.name, rank, limit.phase, cause))
    _ready([], POLL_SECONDS / 2)


def _ready(refs: Sequence[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
    if silent := WATCH.silent():
        group, rank, seconds = silent
        cause = f"nothing was heard of its process for {seconds:g} s (limits.silence)"
        if rank in group.replaceable:
            group.give_up(rank, cause)
        else:
            ranks = [rank, *(other for other in range(len(group.actors)) if other != rank and not group.live_alone)]
            _give_up(group, ranks, group.phase, cause, rank)
    WATCH.run_errands()
    deaths = WATCH.deaths()
    both = [*refs, *deaths]
    if not both:
        time.sleep(timeout_s)
        return []
    ready, _ = ray.wait(both, num_returns=1, timeout=timeout_s, fetch_local=False)
    if ready:
        ready, _ = ray.wait(both, num_returns=len(both), timeout=0, fetch_local=False)
    _report_deaths([deaths[ref] for ref in ready if ref in deaths])
    return [ref for ref in ready if ref not in deaths]


def _take(call: Call, waiting: Sequence[Call], deaths_too: bool = True) -> None:
    try:
        call.take()
    except Exception as error:
        if isinstance(error, RayActorError) and not deaths_too:
            raise
        _blame(call, error, [other.rank for other in waiting if other.group is call.group and not other.done and other is not call])


def _report_deaths(dead: Sequence[tuple[RankGroup, int]]) -> None:
    if dead:
        group, rank = dead[0]
        _fail_dead(group, rank, group.phase)


def _blame(call: Call, error: Exception, unanswered: Sequence[int]) -> NoReturn:
    """Raise the failure of the rank at fault: dead ranks first, since a death may have broken the collective."""
    group = call.group
    if not may_be_aftermath(error) or not group.deaths:
        _fail(group, call.rank, call.phase, error)
    dead, _ = ray.wait(list(group.deaths), num_returns=1, timeout=BLAME_SECONDS, fetch_local=False)
    if dead:
        _fail_dead(group, group.deaths[dead[0]], call.phase)
    note = ""
    if unanswered:
        traces = _stack_traces(group, unanswered, _collect_stands(group, unanswered))
        note = f"\n\n{_ranks(unanswered)} had not answered yet{traces}"
    _fail(group, call.rank, call.phase, error, note)


def _fail(group: RankGroup, rank: int, phase: str, error: BaseException, note: str = "") -> NoReturn:
    text = failure_text(error, group.log_file(rank)) + note
    failure = RankFailed(group.name, rank, phase, text, is_death(error) or is_connection_error(error) or is_lost_object(error))
    failure.lost_object = is_lost_object(error)
    _end(group, failure)


def located(failure: RankFailed) -> RankFailed:
    """Return a failure after setting `where`, its rank's node."""
    failure.where = WATCH.where(failure.role, failure.rank)
    return failure


def _end(group: RankGroup, failure: RankFailed) -> NoReturn:
    group.kill(str(located(failure)))
    raise failure from None


def _fail_dead(group: RankGroup, rank: int, phase: str) -> NoReturn:
    """Raise the failure of a dead rank or, if it ended because its Fleet's members died, of the last member."""
    error = _death_of(group, rank)
    down = error.cause if isinstance(error, RayTaskError) else None
    if isinstance(down, FleetDown):
        for other in WATCH.groups:
            if other is not group and other.name == down.fleet:
                ref = next((ref for ref, number in other.deaths.items() if number == down.place), None)
                if ref is not None and ray.wait([ref], timeout=BLAME_SECONDS, fetch_local=False)[0]:
                    own = _death_of(other, down.place)
                    error = error if is_death(own) and KILLED in str(own) else own  # killed by its fleet, which knows the cause
                _fail(other, down.place, other.phase, error)
    _fail(group, rank, phase, error)


def _death_of(group: RankGroup, rank: int) -> BaseException:
    try:
        ray.get(group.death_of(rank))
    except Exception as error:
        return error
    raise AssertionError(f"{group.name} rank {rank}: until_death returned")


def _time_out(pending: Pending[Any], limit: Limit | None) -> NoReturn:
    group = pending.group
    stuck = [call.rank for call in pending.calls if not call.done]
    answered = [call.rank for call in pending.calls if call.done]
    seconds = WATCHDOG.time() - pending.started
    cause = f"no answer after {seconds:.0f} s from {_ranks(stuck)}"
    if answered:
        cause += f"; {_ranks(answered)} answered"
    if limit is not None and WATCHDOG.time() >= limit.deadline:
        cause += f" (the limit for the phase {limit.phase} is {limit}; raise it if it only needs longer)"
    elif group.timeout_s is not None and seconds >= group.timeout_s:
        cause += f" (the limit for calls of no phase is limits.other: {group.timeout_s:g} s; raise it if it only needs longer)"
    _give_up(group, stuck, pending.phase, cause)


def _give_up(group: RankGroup, ranks: Sequence[int], phase: str, cause: str, blamed: int | None = None) -> NoReturn:
    stopped = stopped_at(pulse.place for other in WATCH.groups for pulse in other.pulses)
    names = ", ".join(f"{process.pid} ({name_of(process)})" for process in stopped)
    note = f"\n\nstopped, as by SIGSTOP: {names}" if names else ""
    stands = _collect_stands(group, ranks)
    first = at_fault(ranks, stands) if blamed is None else blamed
    text = _stack_traces(group, [first, *(rank for rank in ranks if rank != first)], stands)
    _end(group, RankFailed(group.name, first, phase, cause + text + note, retryable=True))


def at_fault(ranks: Sequence[int], stands: Mapping[int, Stand]) -> int:
    """Return the rank to blame for a hang: the first without a Stand (report of its collectives), else the first that others wait for and
    that waits for none. In a process group, ranks wait for ranks that have begun fewer collectives."""
    if silent := [rank for rank in ranks if rank not in stands]:
        return silent[0]
    numbers: dict[str, list[int]] = {}
    for rank in ranks:
        for group, number in stands[rank].begun.items():
            numbers.setdefault(group, []).append(number)
    awaited, waiting = set[int](), set[int]()
    for rank in ranks:
        for group, number in stands[rank].begun.items():
            awaited |= {rank} if number < max(numbers[group]) else set()
            waiting |= {rank} if number > min(numbers[group]) else set()
    at_work = [rank for rank in ranks if not stands[rank].unfinished]
    return next(iter([rank for rank in ranks if rank in awaited - waiting] or at_work or ranks))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _collect_stands(group: RankGroup, ranks: Sequence[int]) -> dict[int, Stand]:
    if not group.deaths:
        return {}
    refs = {group.stand(rank): rank for rank in ranks}
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=STACK_SECONDS)
    answers = dict[int, Stand]()
    for ref in ready:
        with suppress(ray.exceptions.RayError):  # the rank is given up anyway
            answers[refs[ref]] = ray.get(ref)
    return answers


def _stack_traces(group: RankGroup, ranks: Sequence[int], stands: Mapping[int, Stand]) -> str:
    """Return stack traces, equal ones once. Ranks without a Stand write theirs on SIGUSR1."""
    if not group.deaths:
        return ""
    alike = dict[str, list[int]]()
    for rank in ranks:
        place = group.pulses[rank].place
        known = place.describe() if place is not None else "where its process is, is not known"
        silent = f"does not say where it stands: {known}"
        text = f"stands at\n{stands[rank]}" if rank in stands else f"{silent}{_dumped(place, group.log_file(rank))}"
        alike.setdefault(text, []).append(rank)
    return "".join(f"\n\n{'each of ' * (len(own) > 1)}{_ranks(own)} {text}" for text, own in alike.items())


def _dumped(place: Place | None, log: Path | None) -> str:
    """Return the stacks that a local process writes on SIGUSR1, even if it never releases the GIL."""
    process = None if place is None else place.process
    if process is None or is_stopped(process) or log is None or not log.exists():
        return ""
    with suppress(psutil.Error), log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        process.send_signal(signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        written = file.read().decode(errors="replace").strip()
        return f". It stands at\n{written}" if written else ""
    return ""
