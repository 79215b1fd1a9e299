"""The transfer group: who is there, in which epoch, and what its members tell each other before and after a bucket.

All of it goes over a rendezvous store; the bytes of the weights are the transports' business.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Literal

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll_lite.distributed.weight_sync.devices import Home
from roll_lite.distributed.weight_sync.plan import Channel, Membership, Route

LONGEST_PAUSE_S = 0.01  # between two looks at who has come
_LONGER = 1.2
"""Each pause, than the one before: whoever has come is seen after little more than the time that it took."""

_CLIENT_S = 30.0
_EPOCH = "epoch"
_INTERRUPTED = "interrupted"
"""Written by whoever interrupts, the other one by a member: each has one writer, so that neither goes back."""
_CLOSED = "closed"
_OPENED = "opened/"
_KEPT_STEPS = 2
"""What was said about a bucket is deleted so many buckets later; until then somebody may still read it."""


class TransferError(RuntimeError):
    """The transfer group is no longer usable; both sides have to connect again."""


class TransferTimeout(TransferError):
    """A peer did not come. The message names it."""


class StaleEpoch(TransferError):
    """Engines have left or joined since this member connected, or another member has broken off: the cause is elsewhere."""


@dataclass(frozen=True)
class Transferred:
    """What came of one side's part in an update."""

    failure: str | None = None
    """Why it broke off: that may be another member's fault."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """By phase."""
    nbytes: Mapping[str, int] = field(default_factory=dict)
    """That a trainer has sent, by transport."""
    by_transport: Mapping[str, float] = field(default_factory=dict)
    """Seconds that this took it, gathering apart."""
    stale: bool = False
    """It broke off because others had."""

    @classmethod
    def broke_off(cls, error: TransferError) -> Transferred:
        return cls(str(error), stale=isinstance(error, StaleEpoch))


def largest(members: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Of each phase, what the slowest member took."""
    slowest: dict[str, float] = {}
    for seconds in members:
        slowest |= {phase: max(value, slowest.get(phase, 0.0)) for phase, value in seconds.items()}
    return slowest


@dataclass(frozen=True)
class Announcement:
    """What a member says of a bucket."""

    signature: str
    """Tells buckets apart, to notice members that are out of step before they exchange bytes."""
    handle: str = ""
    """Where the bytes lie, for transports whose receivers fetch them."""


Moment = Literal["here", "done"]
"""A sender is `here` when the bucket may be taken, a receiver when it is ready to. A receiver is `done` when it does not need the
sender's buffer any more."""


def rendezvous_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """A rendezvous on a port that the system has just given out; its number is `store.port`.

    The store is the server: keep it for as long as the group is used.
    """
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def rendezvous_client(host: str, port: int) -> TCPStore:
    """Of a rendezvous that is there, for `interrupt`. Connecting waits, and for a stopped process without end."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CLIENT_S))


def interrupt(rendezvous: TCPStore, epoch: int) -> None:
    """Whoever waits at this rendezvous for somebody of an earlier epoch waits no longer, and has to connect again. `epoch`: a new one.

    Does not wait itself, and is no failure where the rendezvous is gone: who waits for its host is told why.
    """
    with suppress(dist.DistNetworkError):
        rendezvous.set(_INTERRUPTED, str(epoch))


class TransferGroup:
    """One member's view. Making it blocks until all members of the epoch have come."""

    def __init__(self, membership: Membership, number: int, home: Home | None = None) -> None:
        """`home`: this process's own, where None."""
        assert 0 <= number < len(membership.members), f"member {number} of {len(membership.members)}"
        self.membership = membership
        self.number = number
        self.failure: str | None = None
        self._steps: defaultdict[Channel, int] = defaultdict(int)
        self._told: defaultdict[Channel, deque[tuple[int, str]]] = defaultdict(deque)
        """Step and key of what this member has said and not deleted yet."""
        host, port, timeout_s = membership.host, membership.port, membership.timeout_s
        try:
            self.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise TransferTimeout(f"weight transfer: {self.name} found no rendezvous at {host}:{port} within {timeout_s:g} s") from error
        with self.breaking_off(), self._rendezvous():
            self._check_epoch()
            if number == 0:
                self.store.set(_EPOCH, str(membership.epoch))
            self.store.set(self._joined(number), json.dumps(asdict(home or Home.here())))
            joined = {self._joined(other): other for other in range(len(membership.members))}
            self._await(joined, "join the transfer group")
            self.homes = [Home.of(json.loads(said)) for said in self.store.multi_get(list(joined))]
            """Of the members."""

    @property
    def name(self) -> str:
        return self.membership.members[self.number]

    def close(self) -> None:
        """Also ends what threads still wait for."""
        self.failure = _CLOSED

    @contextmanager
    def breaking_off(self) -> Iterator[None]:
        """Whatever fails in the block is told to the others, who wait no longer: workers of an engine answer only when all of them have.
        A time-out is each one's own: all come to it, and name who is missing."""
        try:
            yield
        except (StaleEpoch, TransferTimeout):
            raise
        except Exception as error:
            with suppress(dist.DistError):  # of a rendezvous that is gone or stopped
                if isinstance(error, TransferError):
                    self._check_epoch()  # where somebody has gone before, it is no cause
                self.store.compare_set(self._broken_off, "", f"{self.name} has broken off ({type(error).__name__}: {error})")
            raise

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Of bytes with other members. One that failed leaves nobody knows what: then all have to connect again."""
        if self.failure is not None:
            raise TransferError(f"weight transfer: connect again, the group failed earlier: {self.failure}")
        try:
            yield
        except TransferError as error:
            self.failure = str(error)
            raise

    # ------------------------------------------------------------ buckets

    def step(self, route: Route) -> int:
        """Number of the bucket on its channel. Every member of the channel asks once for each."""
        number = self._steps[route.channel]
        self._steps[route.channel] = number + 1
        return number

    def tell(self, route: Route, step: int, moment: Moment, said: Announcement) -> None:
        key = self._key(route, step, moment, self.number)
        with self._rendezvous():
            self.store.set(key, json.dumps(asdict(said)))
        self._told[route.channel].append((step, key))

    def hear(self, route: Route, step: int, moment: Moment) -> dict[int, Announcement]:
        """Waits for the other side: the sender for all receivers, a receiver for the sender."""
        others = route.receivers if self.number == route.sender else (route.sender,)
        keys = {self._key(route, step, moment, other): other for other in others}
        told = self._told[route.channel]
        with self._rendezvous():
            self._check_epoch()
            self._await(keys, f"take part in bucket {step} from {self.membership.members[route.sender]}")
            said = self.store.multi_get(list(keys))
            while told and told[0][0] <= step - _KEPT_STEPS:
                self.store.delete_key(told.popleft()[1])
        return {other: Announcement(**json.loads(value)) for other, value in zip(others, said, strict=True)}

    def meet(self, route: Route, said: Announcement) -> dict[int, Announcement]:
        """Both sides wait for each other, and compare what they are about to exchange."""
        step = self.step(route)
        self.tell(route, step, "here", said)
        heard = self.hear(route, step, "here")
        self.compare(said, heard)
        return heard

    def compare(self, said: Announcement, heard: Mapping[int, Announcement]) -> None:
        for other, theirs in heard.items():
            if theirs.signature != said.signature:
                them = self.membership.members[other]
                raise TransferError(
                    f"weight transfer: out of step, {self.name} is at a bucket of {said.signature}, {them} at one of {theirs.signature}"
                )

    # ------------------------------------------------------------ memory that is lent beyond an epoch

    def opens(self, name: str) -> None:
        """This member is about to open what is lent to it under that name."""
        with self._rendezvous():
            self.store.set(_OPENED + name, self.name)

    def forget_opened(self, name: str) -> bool:
        """Whether somebody has opened it; nobody asks again."""
        with self._rendezvous():
            return bool(self.store.check([_OPENED + name])) and bool(self.store.delete_key(_OPENED + name))

    # ------------------------------------------------------------ inside

    def _key(self, route: Route, step: int, moment: str, number: int) -> str:
        return f"{self.membership.epoch}/{route.sender}-{'.'.join(map(str, route.receivers))}/{step}/{moment}/{number}"

    def _joined(self, number: int) -> str:
        return f"{self.membership.epoch}/joined/{number}"

    @property
    def _broken_off(self) -> str:
        return f"{self.membership.epoch}/broken off"

    def _check_epoch(self) -> None:
        if self.failure == _CLOSED:
            raise TransferError(f"weight transfer: {self.name} has left the transfer group")
        current = max((int(self.store.get(key)) for key in (_EPOCH, _INTERRUPTED) if self.store.check([key])), default=0)
        if current > self.membership.epoch:
            own = self.membership.epoch
            raise StaleEpoch(
                f"weight transfer: {self.name} belongs to epoch {own} of the transfer group, which is at epoch {current}: engines have "
                "left or joined since; connect again"
            )
        if self.store.check([self._broken_off]):
            who = self.store.get(self._broken_off).decode()
            raise StaleEpoch(f"weight transfer: {self.name} waits no longer, {who}; connect again")

    def _await(self, keys: Mapping[str, int], what: str) -> None:
        """Looks again and again: the store's own waiting writes a warning for each time-out and cannot say which key is missing."""
        deadline = time.monotonic() + self.membership.timeout_s
        pause = 0.0002
        missing = dict(keys)
        while missing := {key: owner for key, owner in missing.items() if not self.store.check([key])}:
            if time.monotonic() > deadline:
                names = ", ".join(self.membership.members[owner] for owner in missing.values())
                raise TransferTimeout(
                    f"weight transfer: {names} did not {what} within {self.membership.timeout_s:g} s ({self.name} waited)"
                )
            time.sleep(pause)
            pause = min(_LONGER * pause, LONGEST_PAUSE_S)
            if pause == LONGEST_PAUSE_S:
                self._check_epoch()

    def poll(self, is_done: Callable[[float], bool], what: str) -> None:
        """Of something that members do together, until it is done, somebody breaks off, or the time is up. `is_done` waits for so many
        seconds where it is not."""
        deadline = time.monotonic() + self.membership.timeout_s
        pause = 0.0002
        while not is_done(pause):
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    f"weight transfer: somebody did not {what} within {self.membership.timeout_s:g} s ({self.name} waited)"
                )
            pause = min(_LONGER * pause, LONGEST_PAUSE_S)
            if pause == LONGEST_PAUSE_S:
                with self._rendezvous():
                    self._check_epoch()

    @contextmanager
    def _rendezvous(self) -> Iterator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise TransferError(f"weight transfer: {self.name} lost the rendezvous: {error}") from error
