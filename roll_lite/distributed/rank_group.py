"""Ranks of one cluster (RankGroup), and the watch for dead and silent ranks (WATCH)."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from roll_lite.distributed.failures import ClusterDead, failure_text
from roll_lite.distributed.liveness import Silence
from roll_lite.distributed.place import Place, kill_actors

PULSE_SECONDS = 5.0
LISTEN_SECONDS = 1.0
KILL_SECONDS = 30.0


class Pulse:
    def __init__(self, ask: Callable[[], ray.ObjectRef]) -> None:
        self.place: Place | None = None
        """None before the first call to the rank's cluster."""
        self._ask = ask
        self._question: ray.ObjectRef | None = None
        self._next = 0.0
        self._silence = Silence()

    def listen(self) -> float:
        """Start a heartbeat call if due, or check for its answer. Return the seconds that the answer is missing, else 0."""
        if self._question is None:
            if time.monotonic() >= self._next:
                self._question, self._silence = self._ask(), Silence()
                self._silence.look(0.0)
            return 0.0
        ready, _ = ray.wait([self._question], timeout=0, fetch_local=False)
        if not ready:
            return self._silence.look(2 * LISTEN_SECONDS)
        try:
            self.place = ray.get(self._question)
        except RayError:  # deaths are reported elsewhere
            return 0.0
        self._question, self._next = None, time.monotonic() + PULSE_SECONDS
        return 0.0


class RankGroup:
    """Ranks of one cluster. If one dies, all are killed, unless `live_alone`: then only it is lost. `watch`: Ray options of liveness calls;
    None: no such calls."""

    def __init__(
        self,
        name: str,
        actors: Sequence[Any],
        watch: Mapping[str, str] | None,
        log_folder: Path | None,
        timeout_s: float | None,
        live_alone: bool = False,
        make: Callable[[int], Any] | None = None,
        initial_ranks: int | None = None,
    ) -> None:
        self.name = name
        self.actors = list(actors)
        self.log_folder = log_folder
        self.timeout_s = timeout_s
        self.live_alone = live_alone
        self.replaceable: set[int] = set()
        self.initial_ranks = len(self.actors) if initial_ranks is None else initial_ranks
        self._make = make
        self._lost = dict.fromkeys(range(self.initial_ranks, len(self.actors)), "it waits for free devices")
        self.phases: list[str] = []
        self.deaths: dict[ray.ObjectRef, int] = {}
        self.pulses: list[Pulse] = []
        self.started = False
        self.end: str | None = None
        self._watch_options = watch
        self._watch()

    def _watch(self) -> None:
        if (options := self._watch_options) is not None:
            self.deaths = {actor.until_death.options(**options).remote(): rank for rank, actor in enumerate(self.actors)}
            self.pulses = [Pulse(actor.place.options(**options).remote) for actor in self.actors]
        WATCH.groups[self] = None

    @property
    def phase(self) -> str:
        if not self.started:
            return "start"
        return self.phases[0] if self.phases else "idle"

    def log_file(self, rank: int) -> Path | None:
        return log_file(self.log_folder, self.name, rank)

    @property
    def lost(self) -> Mapping[int, str]:
        open_ones = {ref: rank for ref, rank in self.deaths.items() if rank not in self._lost} if self.live_alone else {}
        ready, _ = ray.wait(list(open_ones), num_returns=len(open_ones), timeout=0, fetch_local=False) if open_ones else ([], [])
        for ref in ready:
            try:
                ray.get(ref)
            except Exception as error:  # a process edge: it becomes the cause
                self.lose(open_ones[ref], error)
        return self._lost

    def lose(self, rank: int, error: BaseException) -> None:
        self._lost.setdefault(rank, failure_text(error, self.log_file(rank)))

    def give_up(self, rank: int, cause: str) -> None:
        """Kill a rank that hangs or is stopped; other ranks live on, and it will be replaced."""
        kill_actors([self.actors[rank]], [self.pulses[rank].place])
        self._lost.setdefault(rank, cause)

    def restart(self, rank: int) -> Any:
        """Start a new actor for a dead rank; it counts as lost until `regain`."""
        assert self._make is not None and self._watch_options is not None and rank in self._lost
        kill_actors([self.actors[rank]], [self.pulses[rank].place])
        self.deaths = {ref: number for ref, number in self.deaths.items() if number != rank}
        actor = self.actors[rank] = self._make(rank)
        self.deaths[actor.until_death.options(**self._watch_options).remote()] = rank
        return actor

    def death_of(self, rank: int) -> ray.ObjectRef:
        return next(ref for ref, number in self.deaths.items() if number == rank)

    def regain(self, rank: int, place: Place) -> None:
        assert self._watch_options is not None
        self.pulses[rank] = Pulse(self.actors[rank].place.options(**self._watch_options).remote)
        self.pulses[rank].place = place
        del self._lost[rank]

    def living_pulses(self) -> list[tuple[int, Pulse]]:
        return [(rank, pulse) for rank, pulse in enumerate(self.pulses) if rank not in self._lost]

    def check(self) -> None:
        if self.end is not None:
            raise ClusterDead(self.name, self.end)

    def kill(self, why: str) -> None:
        """Kill all ranks, even busy ones: they may hang in a collective."""
        if self.end is None:
            self.end = why
            WATCH.groups.pop(self, None)
            kill_actors(self.actors, [pulse.place for pulse in self.pulses])

    def rebuild(self) -> None:
        assert self._make is not None and not self.live_alone
        self.kill("it starts anew")
        if self.deaths:
            ray.wait(list(self.deaths), num_returns=len(self.deaths), timeout=KILL_SECONDS, fetch_local=False)
        self.actors = [self._make(rank) for rank in range(len(self.actors))]
        self.phases.clear()
        self.started, self.end = False, None
        self._watch()

    def stand(self, rank: int) -> ray.ObjectRef:
        return self.actors[rank].stand.options(**(self._watch_options or {})).remote()


class LivenessWatch:
    def __init__(self) -> None:
        self.groups: weakref.WeakKeyDictionary[RankGroup, None] = weakref.WeakKeyDictionary()
        """Groups to watch, by weak reference: Ray ends a discarded group's actors."""
        self.overlooked: Sequence[str] = ()
        """Groups whose deaths and silence are ignored (in `overlooking`)."""
        self.errands: dict[str, Callable[[], None]] = {}
        """Non-blocking functions called about once a second in every wait for ranks."""
        self._silence_s: float | None = None
        self._listened = self._ran = 0.0

    def forget_all(self) -> None:
        for group in self.groups:
            group.end = "the Ray session has ended"
        self.groups.clear()
        self.errands.clear()

    def run_errands(self) -> None:
        now = time.monotonic()
        if now - self._ran >= LISTEN_SECONDS:
            self._ran = now
            for errand in list(self.errands.values()):
                errand()

    def places(self) -> dict[tuple[str, int], Place]:
        found = ((group.name, rank, pulse.place) for group in self.groups for rank, pulse in enumerate(group.pulses))
        return {(name, rank): place for name, rank, place in found if place is not None}

    def where(self, name: str, rank: int) -> str:
        """Return " on ADDRESS"; "" if unknown or if all ranks share a node."""
        pulses = [pulse for group in self.groups for pulse in group.pulses]
        place = next((group.pulses[rank].place for group in self.groups if group.name == name and rank < len(group.pulses)), None)
        is_told = place is not None and any(pulse.place is not None and pulse.place.node != place.node for pulse in pulses)
        return f" on {place.address}" if place is not None and is_told else ""

    def deaths(self) -> dict[ray.ObjectRef, tuple[RankGroup, int]]:
        """Return {reference that is ready when a rank dies: (group, rank)}, without overlooked and `live_alone` groups."""
        together = [group for group in self.groups if not group.live_alone and group.name not in self.overlooked]
        return {ref: (group, rank) for group in together for ref, rank in group.deaths.items()}

    @contextmanager
    def overlooking(self, names: Sequence[str]) -> Iterator[None]:
        before, self.overlooked = self.overlooked, names
        try:
            yield
        finally:
            self.overlooked = before

    @contextmanager
    def expecting_answers(self, within_s: float | None) -> Iterator[None]:
        """Limit the time of heartbeat answers in the block; None or 0: unlimited."""
        before, self._silence_s = self._silence_s, within_s or None
        try:
            yield
        finally:
            self._silence_s = before

    def silent(self) -> tuple[RankGroup, int, float] | None:
        """Return (group, rank, limit in seconds) of a rank whose answer exceeds the limit of `expecting_answers`, if any."""
        now = time.monotonic()
        if self._silence_s is None or now - self._listened < LISTEN_SECONDS:
            return None
        self._listened = now
        groups = [group for group in self.groups if group.name not in self.overlooked]
        heard = [(group, rank, pulse.listen()) for group in groups for rank, pulse in group.living_pulses()]
        late = max(heard, key=lambda entry: entry[2], default=None)
        return (late[0], late[1], self._silence_s) if late is not None and late[2] > self._silence_s else None


WATCH = LivenessWatch()


def log_file(folder: Path | None, role: str, rank: int) -> Path | None:
    return folder / f"{role}-{rank}.log" if folder else None
