"""Members that live and die alone: engines, reward workers, reward models, judges' servers.

A `Fleet` starts them, watches over them, starts another in the place of one that is lost, and tells when nobody is left. What
they are made of is theirs (a member may be several processes), and so is what they do: a fleet knows neither Ray nor samples. It
belongs to one event loop, whose clock is its only clock. Training ranks, which die together, are a `RankGroup`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Protocol, TypeVar

from roll_lite.config.problems import first_line

ASK_SECONDS = 10.0
SILENCE_SECONDS = 30.0
"""Of a member that has nothing to do; generous, for machines that are busy otherwise."""


class Member(Protocol):
    name: str

    async def start(self) -> None:
        """Until it can serve; after a loss again."""
        ...

    async def until_lost(self) -> str:
        """For as long as it lives, then why it does not. Called once after every start."""
        ...

    def kill(self) -> None:
        """End what is left of it, whatever it is doing; also where nothing is left, or nothing was started."""
        ...


class MemberLost(Exception):
    """From the work of a member, or from its start: it is of no use any more, for this cause."""

    def __init__(self, cause: str) -> None:
        super().__init__(cause)
        self.cause = cause


class SlowStart(MemberLost):
    """A start took longer than it may."""


class FleetDown(RuntimeError):
    """Nobody is left to serve, and nothing will change that."""

    def __init__(self, fleet: str, place: int, cause: str) -> None:
        super().__init__(fleet, place, cause)
        self.fleet = fleet
        self.place = place
        """Number of the member whose loss was the end."""
        self.cause = cause

    def __str__(self) -> str:
        return self.cause


@dataclass(frozen=True)
class Policy:
    """How members are started, and started again when they are lost."""

    start_timeout_s: float | None
    """For one attempt to start; None: without limit."""
    restarts: int | None = None
    """How often each member is started again; None: without limit."""
    attempts: int = 3
    """How often a restart is tried before the member is given up."""
    path: str = ""
    """Where these are set in the configuration, for messages."""


class MemberState(StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    LOST = "lost"
    """It is gone, and about to be started again."""
    DOWN = "down"
    """It is gone for good: its restarts are used up."""


M = TypeVar("M", bound=Member)


@dataclass(eq=False)
class _Seat(Generic[M]):
    """What the fleet knows of a member."""

    place: int
    member: M
    state: MemberState = MemberState.STARTING
    restarts: int = 0
    at_work: int = 0
    cause: str = ""
    """Why it is down."""

    @property
    def rests(self) -> bool:
        return not self.at_work and self.state is not MemberState.STARTING


class Fleet(Generic[M]):
    """`serve`: what a member does while it lives, from one start to the next loss: it is cancelled when the member is lost, and ends
    by itself only by raising, MemberLost or whatever else, which makes the member a lost one. `lost`: told of each loss before
    anything is done about it, when the member's work has ended: what was under way is the caller's again. `down`: told once when
    the fleet is at its end. No error in any of these leaves anybody waiting: it is the end of the fleet."""

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
        """Members started again, since the start."""
        self.end: FleetDown | None = None
        self._policy = policy
        self._serve = serve
        self._lost = lost
        self._down = down
        self._seats = {id(member): _Seat(place, member) for place, member in enumerate(members)}
        self._tasks: list[asyncio.Task[None]] = []
        self._drains = 0
        self._waiters: list[asyncio.Future[None]] = []
        self._told = 0

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """All side by side. Where one cannot be started nothing is, and its error is raised as it is: this is the time of mistakes."""
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
        """From now on watch over the members, those first that are not started yet."""
        self._tasks = [asyncio.get_running_loop().create_task(self._tend(seat)) for seat in self._seats.values()]

    @property
    def is_tended(self) -> bool:
        return bool(self._tasks)

    def close(self, kill: bool = True) -> None:
        """`kill`: unless the members' processes are somebody else's."""
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
    def down(self) -> dict[int, str]:
        """Those that are gone for good, by their numbers, and why."""
        return {seat.place: seat.cause for seat in self._seats.values() if seat.state is MemberState.DOWN}

    async def in_service(self) -> None:
        """Wait until a member serves; FleetDown when none ever will."""
        await self._until(lambda: self.end is not None or bool(self.serving))
        if self.end is not None:
            raise self.end

    def newly_replaced(self) -> int:
        """Since this was last asked, for the statistics of a batch."""
        new, self._told = self.replaced - self._told, self.replaced
        return new

    # ------------------------------------------------------------ work

    @asynccontextmanager
    async def at_work(self, member: M) -> AsyncIterator[None]:
        """For each piece of work: begins when nobody drains the fleet."""
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
        """Inside, nobody is at work or being started, and nobody begins; what is under way is waited for. A member that is lost inside
        is started again afterwards."""
        self._drains += 1
        try:
            await self._until(lambda: self.end is not None or all(seat.rests for seat in self._seats.values()))
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
                    cause = await self._until_lost(seat)
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
        except Exception as error:  # a bug, here or in what the fleet was given: the end, told as one, instead of waiting for ever
            seat.cause = cause_of(error, self.name)
            self._enter(seat, MemberState.DOWN)
            self._finish(seat.cause, seat.place)

    async def _until_lost(self, seat: _Seat[M]) -> str:
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(seat.member.until_lost())]
        if self._serve is not None:
            tasks.insert(0, asyncio.create_task(self._serve(seat.member)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended = next(task for task in tasks if task.done())
            error = ended.exception()
            return ended.result() or f"{seat.member.name} stopped serving" if error is None else cause_of(error, seat.member.name)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _replace(self, seat: _Seat[M], lost: str) -> str | None:
        """Why that fails, where it does."""
        policy = self._policy
        if policy.restarts is not None and seat.restarts >= policy.restarts:
            seat.member.kill()
            where = f" ({policy.path}.restarts)" if policy.path else ""
            return f"{lost}, and was started again {seat.restarts} time(s) before{where}" if policy.restarts else lost
        failure: str | None = None
        for _ in range(policy.attempts):
            seat.member.kill()
            await self._until(lambda: not self._drains)
            self._enter(seat, MemberState.STARTING)
            failure = await self._try_to_start(seat)
            if failure is None:
                seat.restarts += 1
                self.replaced += 1
                return None
        return f"{lost}; it could not be started again: {failure}"

    async def _try_to_start(self, seat: _Seat[M]) -> str | None:
        try:
            await self._start(seat)
        except Exception as error:  # a process edge: told as a failure, and another attempt may succeed
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
    """A watch for members that do one thing after the other: those that are not busy have to answer now and then, as they did at first."""
    first: object = None
    while True:
        if not is_busy():
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    answer = await ask()
            except TimeoutError:
                return f"it had nothing to do, and did not answer within {SILENCE_SECONDS:g} s"
            if first not in (None, answer):
                return "it has been started again by others"
            first = answer
        await asyncio.sleep(ASK_SECONDS)


def cause_of(error: BaseException, name: str) -> str:
    """In one line. What is not told as a loss is told as an error of `name`."""
    return error.cause if isinstance(error, MemberLost) else f"{name}: {type(error).__name__}: {first_line(error)}"
