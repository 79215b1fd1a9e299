"""Transfer group: training ranks and engine workers that announce weight buckets through a rendezvous store.

When engines join or leave, a new group with a higher epoch replaces it; members of the old one get StaleEpoch.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from roll_lite.distributed.weight_sync.plan import Channel, Membership, Route


@dataclass(frozen=True)
class Home:
    machine: str
    """Id of machine, container and user: processes with equal ids can map each other's memory."""
    device: str = ""
    """UUID of the member's GPU (device numbers differ between processes); "" on CPU."""
    visible: tuple[str, ...] = ()
    """GPUs whose memory the member can read, its own included."""
    process: int = 0

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Home:
        return Home(**{**plain, "visible": tuple(plain["visible"])})

    @staticmethod
    def here() -> Home:
        if not torch.cuda.is_available():
            return Home(this_machine(), process=os.getpid())
        own = torch.cuda.current_device()
        near = [one for one in range(torch.cuda.device_count()) if one == own or torch.cuda.can_device_access_peer(own, one)]
        return Home(this_machine(), uuid_of(own), tuple(uuid_of(one) for one in near), os.getpid())


def this_machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:  # not on Linux: then processes cannot share memory
        return f"{socket.gethostname()} {os.getpid()}"


def uuid_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


LONGEST_PAUSE_S = 0.01  # between two polls
_LONGER = 1.2
_KEYS_AT_ONCE = 64  # in a request to the store, which all members send while they wait

_CLIENT_S = 30.0
_EPOCH = "epoch"
_INTERRUPTED = "interrupted"
"""Store key that `interrupt` sets to a new epoch; a group's member 0 sets _EPOCH. The larger epoch counts. Each key has one writer; values
grow."""
_CLOSED = "closed"
_OPENED = "opened/"
_KEPT_STEPS = 2
"""Age in buckets at which keys are deleted: members may read younger ones."""


class TransferError(RuntimeError):
    """Error: a weight transfer failed. All members must connect again."""


class TransferTimeout(TransferError):
    """Error: a member did not respond in time."""


class StaleEpoch(TransferError):
    """Error: a newer transfer group exists, or another member failed first."""


@dataclass(frozen=True)
class Transferred:
    failure: str | None = None
    """Cause of failure, perhaps in another member; None: success."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    nbytes: Mapping[str, int] = field(default_factory=dict)
    by_transport: Mapping[str, float] = field(default_factory=dict)
    stale: bool = False
    """True if another member failed, or a newer group exists."""

    @classmethod
    def broke_off(cls, error: TransferError) -> Transferred:
        return cls(str(error), stale=isinstance(error, StaleEpoch))


@dataclass(frozen=True)
class Pushed:
    version: int
    megabytes: float
    seconds: float
    """Seconds until the last engine had the new weights."""
    phases: Mapping[str, float]
    """{phase: seconds of the slowest rank or worker}; phases overlap."""
    by_transport: Mapping[str, float]
    """{transport: megabytes sent}; a broadcast counts once."""
    transport_seconds: Mapping[str, float]
    """{transport: seconds of the slowest training rank}."""


def largest(members: Iterable[Mapping[str, float]]) -> dict[str, float]:
    slowest: dict[str, float] = {}
    for seconds in members:
        slowest |= {phase: max(value, slowest.get(phase, 0.0)) for phase, value in seconds.items()}
    return slowest


@dataclass(frozen=True)
class Announcement:
    signature: str
    """Tensor count, size and layout checksum of the bucket, compared between members."""
    handle: str = ""
    """Handle to open the sender's buffer; in a receiver's `done`: handles still in use, separated by spaces."""


Moment = Literal["here", "done"]
"""`here`: the sender's buffer is filled, or the receiver is ready. `done`: the receiver has loaded the bucket."""


def rendezvous_store(host: str, timeout_s: float = 300.0) -> TCPStore:
    """Start a rendezvous store on a free port. It ends with the returned object."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s))


def rendezvous_client(host: str, port: int) -> TCPStore:
    """Connect to a rendezvous store. Blocks forever if its process is stopped (SIGSTOP)."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_CLIENT_S))


def interrupt(rendezvous: TCPStore, epoch: int) -> None:
    """Make members of groups older than `epoch` stop waiting. Non-blocking; ignores a lost store."""
    with suppress(dist.DistNetworkError):
        rendezvous.set(_INTERRUPTED, str(epoch))


class TransferGroup:
    """Connection of one member (training rank or engine worker) to all others; the constructor blocks until all have joined."""

    def __init__(self, membership: Membership, number: int, home: Home | None = None) -> None:
        assert 0 <= number < len(membership.members), f"member {number} of {len(membership.members)}"
        self.membership = membership
        self.number = number
        self.name = membership.members[number]
        self.failure: str | None = None
        self._steps: defaultdict[Channel, int] = defaultdict(int)
        self._announced: defaultdict[Channel, deque[tuple[int, str]]] = defaultdict(deque)
        host, port, limit_s = membership.host, membership.port, min(_CLIENT_S, membership.timeout_s)
        try:
            self.store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=limit_s))
        except RuntimeError as error:
            raise TransferTimeout(f"weight transfer: {self.name} found no rendezvous at {host}:{port} within {limit_s:g} s") from error
        self.store.set_timeout(timedelta(seconds=membership.timeout_s))
        with self.report_failures(), self._rendezvous():
            self._check_epoch()
            if number == 0:
                self.store.set(_EPOCH, str(membership.epoch))
            joined = [f"{membership.epoch}/joined/{other}" for other in range(len(membership.members))]
            self.store.set(joined[number], json.dumps(asdict(home or Home.here())))
            self._await({key: other for other, key in enumerate(joined)}, "join the transfer group")
            self.homes = [Home.of(json.loads(said)) for said in self.store.multi_get(joined)]

    @cached_property
    def trainer_on(self) -> dict[tuple[str, str], int]:
        """{(machine, device): member number of the training rank there}."""
        homes = enumerate(self.homes[: self.membership.trainers])
        return {(home.machine, home.device): number for number, home in homes if home.device}

    def close(self) -> None:
        self.failure = _CLOSED

    @contextmanager
    def report_failures(self) -> Iterator[None]:
        """Report exceptions in the block, so that all members stop waiting; not timeouts, since each member raises its own."""
        try:
            yield
        except (StaleEpoch, TransferTimeout):
            raise
        except Exception as error:
            with suppress(dist.DistError):  # the rendezvous store is gone or stopped
                if isinstance(error, TransferError):
                    self._check_epoch()  # raises StaleEpoch if another member failed first: that failure is the cause
                self.store.compare_set(self._broken_off, "", f"{self.name} has broken off ({type(error).__name__}: {error})")
            raise

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Refuse all further transfers of the group after a TransferError in the block."""
        if self.failure is not None:
            raise TransferError(f"weight transfer: connect again, the group failed earlier: {self.failure}")
        try:
            yield
        except TransferError as error:
            self.failure = str(error)
            raise

    # ------------------------------------------------------------ buckets

    def step(self, route: Route) -> int:
        """Return the number of the channel's next bucket. Call once per bucket on each member."""
        number = self._steps[route.channel]
        self._steps[route.channel] = number + 1
        return number

    def announce(self, route: Route, step: int, moment: Moment, said: Announcement) -> None:
        key = self._key(route, step, moment, self.number)
        with self._rendezvous():
            self.store.set(key, json.dumps(asdict(said)))
        self._announced[route.channel].append((step, key))

    def await_announcements(self, route: Route, step: int, moment: Moment) -> dict[int, Announcement]:
        """Wait for the other side: the sender for all receivers, a receiver for the sender. Return announcements by member number."""
        others = route.receivers if self.number == route.sender else (route.sender,)
        keys = {self._key(route, step, moment, other): other for other in others}
        announced = self._announced[route.channel]
        with self._rendezvous():
            self._check_epoch()
            self._await(keys, f"take part in bucket {step} from {self.membership.members[route.sender]}")
            said = self.store.multi_get(list(keys))
            while announced and announced[0][0] <= step - _KEPT_STEPS:
                self.store.delete_key(announced.popleft()[1])
        return {other: Announcement(**json.loads(value)) for other, value in zip(others, said, strict=True)}

    def meet(self, route: Route, said: Announcement) -> dict[int, Announcement]:
        """Announce a bucket and wait for the other side; TransferError if it is at another bucket."""
        step = self.step(route)
        self.announce(route, step, "here", said)
        heard = self.await_announcements(route, step, "here")
        self.compare(said, heard)
        return heard

    def compare(self, said: Announcement, heard: Mapping[int, Announcement]) -> None:
        for other, theirs in heard.items():
            if theirs.signature != said.signature:
                them = self.membership.members[other]
                raise TransferError(
                    f"weight transfer: out of step, {self.name} is at a bucket of {said.signature}, {them} at one of {theirs.signature}"
                )

    # ------------------------------------------------------------ memory that stays exported beyond an epoch

    def opens(self, name: str) -> None:
        with self._rendezvous():
            self.store.set(_OPENED + name, self.name)

    def forget_opened(self, name: str) -> bool:
        with self._rendezvous():
            return bool(self.store.check([_OPENED + name])) and bool(self.store.delete_key(_OPENED + name))

    # ------------------------------------------------------------ inside

    def _key(self, route: Route, step: int, moment: str, number: int) -> str:
        return f"{self.membership.epoch}/{route.sender}-{'.'.join(map(str, route.receivers))}/{step}/{moment}/{number}"

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
        """Poll until all keys, {key: member that writes it}, are in the store, whose own wait would not name missing ones."""
        missing = list(keys)

        def arrived(pause: float) -> bool:
            while missing and self.store.check(missing[:_KEYS_AT_ONCE]):
                del missing[:_KEYS_AT_ONCE]
            if missing:
                time.sleep(pause)
            return not missing

        def late() -> str:
            return ", ".join(self.membership.members[keys[key]] for key in missing if not self.store.check([key]))

        self.poll(arrived, what, late)

    def poll(self, is_done: Callable[[float], bool], what: str, who: Callable[[], str] = lambda: "somebody") -> None:
        """Call `is_done(seconds)`, which may block that long, until it returns True. StaleEpoch or TransferTimeout; the message names the
        awaited work (`what`) and missing members (`who()`)."""
        deadline = time.monotonic() + self.membership.timeout_s
        pause = 0.0002
        while not is_done(pause):
            if time.monotonic() > deadline:
                raise TransferTimeout(
                    f"weight transfer: {who()} did not {what} within {self.membership.timeout_s:g} s ({self.name} waited)"
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
