"""Facts about the run's nodes (versions, clocks, memory, disk, connections), compared before the run starts."""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import psutil
import ray
from ray.exceptions import RayError

from roll_lite.config.arithmetic_tables import table
from roll_lite.distributed.place import on_node
from roll_lite.files import first_line, free_bytes

PACKAGES = (
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "vllm",
    "sglang",
    "math-verify",
    "latex2sympy2_extended",
    "sympy",
    "langdetect",
)
"""Packages that ranks, engines or rewards compute with."""
ENGINES = ("vllm", "sglang")
CONNECT_SECONDS = 5.0
MOST_CLOCK_SECONDS = 5.0
"""Clock difference in seconds that draws a warning: times in ledger and logs mislead."""
LEAST_DISK_GIB = 1.0
GIB = 1 << 30
ANSWER_SECONDS = 60.0


@dataclass(frozen=True)
class NodeFacts:
    versions: Mapping[str, str]
    memory_gib: float
    disk_gib: float
    unreachable: Mapping[str, str]
    """{address of another node: reason why this node cannot connect to it}."""
    clock_s: float = 0.0
    """Minimum seconds by which this clock is ahead of the driver's (negative: behind); the answer's delay may hide more."""


class Scout:
    def __init__(self) -> None:
        self._listener = socket.create_server(("", 0))

    def listens_at(self) -> tuple[str, int]:
        return ray.util.get_node_ip_address(), self._listener.getsockname()[1]

    def time(self) -> float:
        return time.time()

    def look(self, run_folder: Path, others: Sequence[tuple[str, int]]) -> NodeFacts:
        """Collect this node's facts; try to connect to `others` (addresses and ports of the other nodes)."""
        with ThreadPoolExecutor(max_workers=32) as threads:
            reasons = dict(zip((address for address, _ in others), threads.map(_why_unreachable, others), strict=True))
        free = psutil.virtual_memory().available / GIB, free_bytes(run_folder) / GIB
        return NodeFacts(installed(), *free, {address: reason for address, reason in reasons.items() if reason is not None})


def installed() -> dict[str, str]:
    """Return the versions of Python and PACKAGES, with a hash of their Python files: builds of one version may differ."""
    versions = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in PACKAGES:
        for of_build in (name, f"{name}-cpu"):  # vLLM's build for CPUs has a name of its own
            with suppress(PackageNotFoundError):
                found = distribution(of_build)
                versions[name] = f"{found.version} (sources {_sources_of(found)})"
                break
    return versions


def _sources_of(package: Distribution) -> str:
    """Hash the checksums that the installer recorded for a package's Python files."""
    lines = (package.read_text("RECORD") or "").splitlines()
    sources = sorted(line for line in lines if line.split(",")[0].endswith(".py") and not line.startswith(".."))
    return hashlib.blake2b("\n".join(sources).encode(), digest_size=4).hexdigest()


def _why_unreachable(place: tuple[str, int]) -> str | None:
    try:
        socket.create_connection(place, CONNECT_SECONDS).close()
    except OSError as error:
        return error.strerror or first_line(error)
    return None


def compare_nodes(
    roles_of: Mapping[str, set[str]], addresses: Mapping[str, str], run_folder: Path, tell: Callable[[str], None]
) -> list[str]:
    """Show nodes in a table; return problems: versions differ, or nodes cannot reach each other. `roles_of`: {node id: roles}, the driver's
    node first; `addresses`: {node id: address}."""
    facts = {addresses[node]: own for node, own in look_at(list(roles_of), run_folder).items()}
    roles = {addresses[node]: own for node, own in roles_of.items()}
    tell(node_table(facts, {"roles": {address: ", ".join(sorted(own)) or "driver" for address, own in roles.items()}}))
    for warning in warnings(facts):
        tell(warning)
    return list(differences(facts, roles))


def look_at(nodes: Sequence[str], run_folder: Path) -> dict[str, NodeFacts]:
    make = ray.remote(Scout)
    scouts = [make.options(num_cpus=0, scheduling_strategy=on_node(node)).remote() for node in nodes]
    try:
        places = ray.get([scout.listens_at.remote() for scout in scouts], timeout=ANSWER_SECONDS)
        others = [[place for place in places if place is not own] for own in places]
        found = ray.get([scout.look.remote(run_folder, rest) for scout, rest in zip(scouts, others, strict=True)], timeout=ANSWER_SECONDS)
        clocks = []
        for scout in scouts:
            asked = time.time()
            there = ray.get(scout.time.remote(), timeout=ANSWER_SECONDS)
            answered = time.time()
            clocks.append(min(0.0, there - asked) + max(0.0, there - answered))
    except RayError as error:
        raise RuntimeError(f"the nodes of the run cannot be looked at: {first_line(error)}") from error
    finally:
        for scout in scouts:
            ray.kill(scout)
    return {node: replace(own, clock_s=clock) for node, own, clock in zip(nodes, found, clocks, strict=True)}


def differences(facts: Mapping[str, NodeFacts], roles: Mapping[str, set[str]]) -> Iterator[str]:
    """Yield differences between nodes that prevent the run. `facts`: {node address: facts}, the driver's first. `roles`: {node address:
    roles}."""
    here = next(iter(facts))
    with_engines = [address for address in facts if "actor_infer" in roles[address]]
    for name in ("python", *PACKAGES):
        compared = with_engines if name in ENGINES else list(facts)
        given = {address: facts[address].versions.get(name, "none") for address in compared}
        if len(set(given.values())) > 1:
            told = ", ".join(f"{version} on {address}" for address, version in given.items())
            yield f"versions of {name} differ: {told}. Install the same on all nodes"
    for address, own in facts.items():
        for other, reason in own.unreachable.items():
            side = "the driver's node" if address == here else "node"
            yield (
                f"{side} {address} cannot connect to {other}: {reason}. Training ranks and weight transfers use ports that the system "
                f"chooses: let the nodes of the cluster reach each other on all ports above 1023"
            )


def warnings(facts: Mapping[str, NodeFacts]) -> Iterator[str]:
    for address, own in facts.items():
        if abs(own.clock_s) > MOST_CLOCK_SECONDS:
            yield f"node {address}: its clock differs from the driver's by {own.clock_s:+.0f} s; times in logs and ledger will mislead"
        if own.disk_gib < LEAST_DISK_GIB:
            yield f"node {address}: {own.disk_gib:.1f} GiB are free where the run writes"


def node_table(facts: Mapping[str, NodeFacts], columns: Mapping[str, Mapping[str, str]]) -> str:
    """Return a table with a line per node, below the versions common to all. `columns`: further cells, {column name: {address: text}}."""
    installed = [name for name in ("python", *PACKAGES) if any(name in own.versions for own in facts.values())]
    differing = [name for name in installed if len({own.versions.get(name) for own in facts.values()}) > 1]
    common = next(iter(facts.values())).versions
    rows = []
    for address, own in facts.items():
        versions = (own.versions.get(name, "none") for name in differing)
        amounts = f"{own.memory_gib:.0f} GiB", f"{own.disk_gib:.0f} GiB", f"{own.clock_s:+.1f} s"
        rows.append((address, *(cells[address] for cells in columns.values()), *versions, *amounts))
    same = ", ".join(f"{name} {common[name].split()[0]}" for name in installed if name not in differing)
    header = ("node", *columns, *differing, "memory free", "disk free", "clock")
    return f"{len(facts)} nodes, all with {same}:\n{table(header, rows)}"
