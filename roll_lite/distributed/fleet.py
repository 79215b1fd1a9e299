"""Fleet: independent members (engines, reward workers, judge servers) in one event loop, restarted when lost. Training ranks, which die
together, form a `RankGroup`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from roll_lite.distributed.failures import FleetDown, MemberLost, RestartBudget, cause_of
from roll_lite.distributed.liveness import Heartbeat, first_of

ASK_SECONDS = 5.0
SILENCE_SECONDS = 10.0


class Member(Protocol):
    """Process, or group of processes, that a `Fleet` starts, watches and restarts."""

    name: str

    async def start(self) -> None:
        """Start or restart; return when able to serve."""
        ...

    async def until_lost(self) -> str:
        """Wait until the member dies; return the cause."""
        ...

    def kill(self) -> None: ...


class SlowStart(MemberLost):
    pass


@dataclass(frozen=True)
class Policy:
    start_timeout_s: float | None
    restarts: int | None = None
    """Maximum restarts of a member per hour; None: unlimited."""
    attempts: int = 3
    path: str = ""


class MemberState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"
    DOWN = "down"


M = TypeVar("M", bound=Member)


@dataclass(eq=False)
class _Seat(Generic[M]):
    place: int
    member: M
    state: MemberState = MemberState.STARTING
    at_work: int = 0
    cause: str = ""


class Fleet(Generic[M]):
    """Runs `serve(member)` after each start; its end is a loss. Calls `lost(member, cause)` at each loss, and `down(error)` once: when no
    member is left, or after an exception in `lost`."""

    def __init__(
        self,
        name: str,
        members: Sequence[M],
        policy: Policy,
        serve: Callable[[M], Coroutine[Any, Any, None]] | None = None,
        lost: Callable[[M, str], None] | None = None,
        down: Callable[[FleetDown], None] | None = None,
    ) -> None:
        self.name = name
        self.members = list(members)
        self.replaced = 0
        self.end: FleetDown | None = None
        self._policy = policy
        self._budget = RestartBudget()
        self._serve = serve
        self._lost = lost
        self._down = down
        self._seats = {id(member): _Seat(place, member) for place, member in enumerate(members)}
        self._tasks: list[asyncio.Task[None]] = []
        self._drains = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._causes: list[str] = []

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        starting = [asyncio.create_task(self._start(seat)) for seat in self._seats.values()]
        try:
            await asyncio.gather(*starting)
        except BaseException:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            self.close()
            raise
        self.tend()

    def tend(self) -> None:
        self._tasks = [asyncio.get_running_loop().create_task(self._tend(seat)) for seat in self._seats.values()]

    @property
    def is_tended(self) -> bool:
        return bool(self._tasks)

    def close(self, kill: bool = True) -> None:
        for task in self._tasks:
            task.cancel()
        for member in self.members if kill else ():
            member.kill()

    def state(self, member: M) -> MemberState:
        return self._seats[id(member)].state

    @property
    def serving(self) -> list[M]:
        return [seat.member for seat in self._seats.values() if seat.state is MemberState.SERVING]

    @property
    def lost(self) -> dict[int, str]:
        """{member number: cause}, until the member serves again."""
        return {seat.place: seat.cause for seat in self._seats.values() if seat.cause}

    async def until(self, member: M, *states: MemberState) -> None:
        await self._until(lambda: self.state(member) in states)

    async def in_service(self) -> None:
        await self._until(lambda: self.end is not None or bool(self.serving))
        if self.end is not None:
            raise self.end

    def newly_replaced(self) -> list[str]:
        """Return why members were replaced since the last call."""
        causes, self._causes = self._causes, []
        return causes

    # ------------------------------------------------------------ work

    @asynccontextmanager
    async def at_work(self, member: M) -> AsyncIterator[None]:
        """Wait until no `drained` block is active; mark the member as busy in the block."""
        seat = self._seats[id(member)]
        await self._until(lambda: not self._drains)
        seat.at_work += 1
        try:
            yield
        finally:
            seat.at_work -= 1
            self._tell()

    @asynccontextmanager
    async def drained(self) -> AsyncIterator[None]:
        """Wait until no member is busy or starting. In the block, members get no work and no restarts."""
        self._drains += 1
        try:
            seats = self._seats.values()
            await self._until(lambda: self.end is not None or not any(seat.at_work or seat.state is MemberState.STARTING for seat in seats))
            yield
        finally:
            self._drains -= 1
            self._tell()

    # ------------------------------------------------------------ inside

    async def _tend(self, seat: _Seat[M]) -> None:
        try:
            cause = None if seat.state is MemberState.SERVING else await self._try_to_start(seat)
            while True:
                if cause is None:
                    cause = seat.cause = await self._until_lost(seat)
                    self._enter(seat, MemberState.LOST)
                    if self._lost is not None:
                        self._lost(seat.member, cause)
                cause = await self._replace(seat, cause)
                if cause is not None:
                    seat.cause = cause
                    self._enter(seat, MemberState.DOWN)
                    if all(one.state is MemberState.DOWN for one in self._seats.values()):
                        self._finish(cause, seat.place)
                    return
        except Exception as error:  # a bug, here or in a callback: end the fleet, so that no caller waits forever
            seat.cause = cause_of(error, self.name)
            self._enter(seat, MemberState.DOWN)
            self._finish(seat.cause, seat.place)

    async def _until_lost(self, seat: _Seat[M]) -> str:
        member = seat.member
        try:
            works: list[Coroutine[Any, Any, str | None]] = [] if self._serve is None else [self._serve(member)]
            return await first_of(*works, member.until_lost()) or f"{member.name} stopped serving"
        except Exception as error:  # a process edge: it becomes the cause
            return cause_of(error, member.name)

    async def _replace(self, seat: _Seat[M], lost: str) -> str | None:
        policy = self._policy
        if policy.restarts is not None and not self._budget.allows(seat.place, policy.restarts):
            seat.member.kill()
            setting = f", {policy.path}.restarts" if policy.path else ""
            return f"{lost} (after {policy.restarts} restarts within an hour{setting})" if policy.restarts else lost
        failure: str | None = None
        for _ in range(policy.attempts):
            seat.member.kill()
            await self._until(lambda: not self._drains)
            self._enter(seat, MemberState.STARTING)
            failure = await self._try_to_start(seat)
            if failure is None:
                self.replaced += 1
                self._causes.append(lost)
                return None
        return f"{lost}; it could not be started again: {failure}"

    async def _try_to_start(self, seat: _Seat[M]) -> str | None:
        try:
            await self._start(seat)
        except Exception as error:  # a process edge: another attempt may succeed
            return cause_of(error, seat.member.name)
        return None

    async def _start(self, seat: _Seat[M]) -> None:
        try:
            async with asyncio.timeout(self._policy.start_timeout_s) as limit:
                await seat.member.start()
        except TimeoutError:
            if not limit.expired():
                raise
            where = f" ({self._policy.path}.start_timeout_s)" if self._policy.path else ""
            raise SlowStart(f"{seat.member.name} was not ready within {self._policy.start_timeout_s:g} s{where}") from None
        seat.cause = ""
        self._enter(seat, MemberState.SERVING)

    def _enter(self, seat: _Seat[M], state: MemberState) -> None:
        seat.state = state
        self._tell()

    def _finish(self, cause: str, place: int) -> None:
        if self.end is not None:
            return
        self.end = FleetDown(self.name, place, cause)
        self._tell()
        if self._down is not None:
            self._down(self.end)

    # ------------------------------------------------------------ news

    async def _until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def _tell(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


async def until_silent(ask: Callable[[], Awaitable[object]], is_busy: Callable[[], bool]) -> str:
    """Call `ask` periodically while not busy. Return a message when an answer takes longer than SILENCE_SECONDS."""
    limit_s = await Heartbeat(ask, SILENCE_SECONDS, ASK_SECONDS, is_busy=is_busy).until_silent()
    return f"it had nothing to do, and did not answer within {limit_s:g} s"
