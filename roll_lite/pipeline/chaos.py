"""Chaos mode: kill, stop or slow processes, and cut off nodes, at seeded random times to test recovery."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count

import psutil
import ray
from ray.exceptions import RayError

from roll_lite.config.schema.run import ChaosConfig
from roll_lite.distributed.place import MEMBER_ROLES, Place, member_places, node_addresses, on_node
from roll_lite.distributed.rank_group import WATCH

MEMBER_TARGETS = frozenset(MEMBER_ROLES.values())
SLICE_SECONDS = 0.2
RUNS = 0.1
"""Fraction of time in which a slowed process runs."""
CUT = "for do in add del; do ip rule $do pref 1 blackhole; ip -6 rule $do pref 1 blackhole; [ $do = del ] || sleep $0; done"
"""Shell command that blocks all traffic leaving the node for $0 seconds."""
TRY_CUT = "ip rule add pref 32765 lookup main && ip rule del pref 32765 lookup main"
"""Shell command that adds and removes a harmless routing rule: it fails where CUT would."""


@contextmanager
def faults(config: ChaosConfig | None, say: Callable[[str], None]) -> Iterator[None]:
    if config is None:
        yield
        return
    WATCH.errands["chaos"] = Chaos(config, say).tick
    try:
        yield
    finally:
        WATCH.errands.pop("chaos", None)


def check_cuts(config: ChaosConfig | None, nodes: Sequence[str]) -> None:
    """Raise ValueError if `chaos.actions` contains `cut`, but `nodes` (ids) is empty or holds one that cannot be cut off."""
    if config is None or "cut" not in config.actions:
        return
    if not nodes:
        raise ValueError(
            "chaos.actions: cut: the driver's node is never cut off, and the run has no other: set placement.nodes, or leave cut out"
        )
    addresses = node_addresses()
    for node in nodes:
        if why := ray.get(on(node, why_uncut).remote()):
            raise ValueError(
                f"chaos.actions: cut: node {addresses[node]} cannot be cut off ({why}). Install iproute2 there and start its Ray as root "
                f"(in a container with the capability NET_ADMIN), or leave cut out"
            )


def on(node: str, task: ray.remote_function.RemoteFunction) -> ray.remote_function.RemoteFunction:
    return task.options(scheduling_strategy=on_node(node))


@ray.remote(num_cpus=0)
def why_uncut() -> str | None:
    tried = subprocess.run(["sh", "-c", TRY_CUT], capture_output=True, text=True, check=False)
    return tried.stderr.strip() if tried.returncode else None


class Chaos:
    def __init__(self, config: ChaosConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._left = config.most
        self._numbers = count()
        self._next = time.monotonic()
        self._plan_next()
        self._never_cut = nodes_never_cut() if "cut" in config.actions else set[str]()

    def tick(self) -> None:
        """Cause a fault if one is due. The driver's wait loops call this about once a second."""
        if self._left == 0 or time.monotonic() < self._next:
            return
        draw = self._draw
        self._plan_next()
        (action,) = draw.choices(list(self._config.actions), list(self._config.actions.values()))
        victims = [
            (group.name, rank, pulse.place)
            for group in sorted(WATCH.groups, key=lambda group: group.name)
            if group.name.split(".")[0] in self._config.targets and group.started
            for rank, pulse in enumerate(group.pulses)
            if pulse.place is not None and rank not in group.lost and not (action == "cut" and pulse.place.node in self._never_cut)
        ]
        if MEMBER_TARGETS.intersection(self._config.targets):
            with suppress(RayError):  # Ray is busy, as after a fault
                members = [member for member in member_places() if member[0] in self._config.targets]
                victims += [one for one in members if not (action == "cut" and one[2].node in self._never_cut)]
        if not victims:
            return
        role, rank, place = victims[int(draw.random() * len(victims))]
        self._left = None if self._left is None else self._left - 1
        cut = action == "cut"
        whom = f"its node {place.address} for {self._config.cut_s:g} s" if cut else f"process {place.pid} or one that it started"
        self._say(f"chaos: {action} of {role} rank {rank}, {whom}")
        on(place.node, strike).remote(place, action, draw.random(), self._config.cut_s if cut else self._config.slow_s)

    def _plan_next(self) -> None:
        """Draw the next fault's time. Each fault has its own random generator: only the seed decides time and kind."""
        self._draw = random.Random(f"{self._config.seed} {next(self._numbers)}")
        self._next += self._draw.expovariate(1 / self._config.every_s)


def nodes_never_cut() -> set[str]:
    """Return ids of nodes whose loss ends the run: the driver's and Ray's head node."""
    heads = {node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]}
    return heads | {ray.get_runtime_context().get_node_id()}


@ray.remote(num_cpus=0, max_retries=0)
def strike(place: Place, action: str, draw: float, seconds: float) -> None:
    """Kill, stop or slow a process, or cut off this node. `draw` in [0, 1) selects the process at `place` or a descendant.
    `seconds`: duration of slow or cut."""
    if action == "cut":  # own session, so that the cut ends even if Ray ends this process, as after long cuts
        subprocess.run(["sh", "-c", CUT, str(seconds)], start_new_session=True, check=False)
        return
    with suppress(psutil.Error):  # the process has ended
        process = psutil.Process(place.pid)
        family = [process, *process.children(recursive=True)]
        victim = family[int(draw * len(family))]
        if action != "slow":
            victim.send_signal(signal.SIGKILL if action == "kill" else signal.SIGSTOP)
            return
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            victim.suspend()
            time.sleep((1 - RUNS) * SLICE_SECONDS)
            victim.resume()
            time.sleep(RUNS * SLICE_SECONDS)
