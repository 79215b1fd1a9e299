"""Chaos mode: kills, stops and slows processes of the run by a seeded plan, to try what it survives."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from roll_lite.config.schema.run import ChaosConfig
from roll_lite.distributed.place import Place
from roll_lite.distributed.rank_group import WATCH

SLICE_SECONDS = 0.2
RUNS = 0.1
"""Share of the time in which a slowed process runs."""


@contextmanager
def faults(config: ChaosConfig | None, say: Callable[[str], None]) -> Iterator[None]:
    """Cause faults as configured (`chaos`) inside the block. `say` reports each."""
    if config is None:
        yield
        return
    WATCH.errands["chaos"] = Chaos(config, say).tick
    try:
        yield
    finally:
        WATCH.errands.pop("chaos", None)


class Chaos:
    def __init__(self, config: ChaosConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._draw = random.Random(config.seed)
        self._left = config.most
        self._next = time.monotonic() + self._gap()

    def tick(self) -> None:
        """Cause a fault if one is due. Called about once a second by the driver's waits."""
        if self._left == 0 or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self._gap()
        victims = [
            (group.name, rank, pulse.place)
            for group in sorted(WATCH.groups, key=lambda group: group.name)
            if group.name.split(".")[0] in self._config.targets and group.started
            for rank, pulse in enumerate(group.pulses)
            if pulse.place is not None and rank not in group.lost
        ]
        if not victims:
            return
        role, rank, place = victims[self._draw.randrange(len(victims))]
        (action,) = self._draw.choices(list(self._config.actions), list(self._config.actions.values()))
        self._left = None if self._left is None else self._left - 1
        self._say(f"chaos: {action} of {role} rank {rank}, process {place.pid} or one that it started")
        agent = strike.options(scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False))
        agent.remote(place, action, self._draw.random(), self._config.slow_s)

    def _gap(self) -> float:
        return self._draw.expovariate(1 / self._config.every_s)


@ray.remote(num_cpus=0, max_retries=0)
def strike(place: Place, action: str, draw: float, slow_s: float) -> None:
    """Kill, stop or slow a process or one of its descendants. Runs on its node. `draw`: number in [0, 1) that selects the process.
    `slow_s`: seconds of slowness."""
    with suppress(psutil.Error):  # it has ended meanwhile
        process = psutil.Process(place.pid)
        family = [process, *process.children(recursive=True)]
        victim = family[int(draw * len(family))]
        if action == "slow":
            slowed(victim, slow_s)
        else:
            victim.send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def slowed(process: psutil.Process, seconds: float) -> None:
    """Let a process run only a tenth of the time, for `seconds` seconds."""
    end = time.monotonic() + seconds
    with suppress(psutil.Error):
        while time.monotonic() < end:
            process.suspend()
            time.sleep((1 - RUNS) * SLICE_SECONDS)
            process.resume()
            time.sleep(RUNS * SLICE_SECONDS)
