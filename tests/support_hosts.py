"""Hosts on this machine: network namespaces on a bridge, with a Ray node each.

The first and the others see one folder differently, as hosts without a shared disk do.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

START_SECONDS = 120.0


@dataclass(frozen=True)
class Hosts:
    """The driver runs on the first host, where paths are as outside."""

    names: Sequence[str]
    addresses: Sequence[str]
    shared: Path
    """A folder that all hosts see."""
    apart: Path
    """A folder of the first host; on the others its path leads to `apart_there`."""
    apart_there: Path
    cpus: int

    @property
    def environment(self) -> dict[str, str]:
        return _ray_environment() | {"RAY_ADDRESS": f"{self.addresses[0]}:6379"}

    def on_first(self, command: Sequence[str | Path]) -> list[str]:
        """A command line that runs this command on the first host."""
        return ["ip", "netns", "exec", self.names[0], *map(str, command)]

    def start(self, number: int) -> None:
        """Start Ray on a host, counted from 0, and wait until it has joined the cluster."""
        ray = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            "--block",
            f"--num-cpus={self.cpus}",
            "--object-store-memory=100000000",
        ]
        before: list[str | Path] = []
        role = ["--head", "--port=6379", f"--temp-dir={self.shared.parent}/1", "--include-dashboard=false"]
        if number:
            bind = 'mount --bind "$0" "$1" && shift && exec "$@"'
            before = ["unshare", "--mount", "bash", "-c", bind, self.apart_there, self.apart]
            role = [f"--address={self.addresses[0]}:6379"]
        command = ["ip", "netns", "exec", self.names[number], *before, *ray, *role, f"--node-ip-address={self.addresses[number]}"]
        file = self.shared.parent / f"ray-{number}.log"
        with file.open("w") as log:
            started = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=_ray_environment(), start_new_session=True
            )
        _until_alive(self, self.addresses[number], started, file)

    def kill(self, number: int) -> None:
        """Kill all processes of a host, as if it were switched off."""
        _end_processes(self.names[number])

    def set_link(self, number: int, state: Literal["up", "down"]) -> None:
        """Connect a host to the network, or cut it off."""
        _run("ip", "-netns", self.names[number], "link", "set", "eth0", state)

    def rules(self, number: int) -> str:
        """Routing rules of a host."""
        return _run("ip", "-netns", self.names[number], "rule")

    def has_ray(self, number: int) -> bool:
        """True if a Ray node runs on a host."""
        pids = _run("ip", "netns", "pids", self.names[number]).split()
        return any(_name_of(pid) == "raylet" for pid in pids)


@contextmanager
def hosts(count: int = 2, cpus: int = 2, running: int | None = None) -> Iterator[Hosts]:
    """Everything that it started is gone afterwards: processes, namespaces, folders. `running`: number of hosts on which Ray starts; None:
    all."""
    _require_namespaces()
    mark, folder = uuid.uuid4().hex[:6], Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))
    network = f"10.{int(mark[:2], 16)}.{int(mark[2:4], 16)}"
    numbers = range(1, count + 1)
    found = Hosts(
        names=[f"rl-{mark}-{number}" for number in numbers],
        addresses=[f"{network}.{number}" for number in numbers],
        **{name: folder / name for name in ("shared", "apart", "apart_there")},
        cpus=cpus,
    )
    for place in (found.shared, found.apart, found.apart_there):
        place.mkdir()
    with ExitStack() as left:
        left.callback(shutil.rmtree, folder, ignore_errors=True)
        switch = f"rl-{mark}-0"
        for name in (switch, *found.names):
            _run("ip", "netns", "add", name)
            left.callback(_run, "ip", "netns", "delete", name)
            left.callback(_end_processes, name)
        _run("ip", "-netns", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-netns", switch, "link", "set", "bridge", "up")
        for name, address in zip(found.names, found.addresses, strict=True):
            port, inside = f"to-{address.rpartition('.')[2]}", ("ip", "-netns", name)
            _run("ip", "link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-netns", switch, "link", "set", port, "master", "bridge", "up")
            _run(*inside, "address", "add", f"{address}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _run(*inside, "link", "set", device, "up")
            _run(*inside, "route", "add", "default", "via", f"{network}.254")  # nobody: Ray looks for the address of this route
        for number in range(count if running is None else running):
            found.start(number)
        yield found


def _until_alive(hosts: Hosts, address: str, started: subprocess.Popen[bytes], log: Path) -> None:
    code = (
        "import sys, ray; nodes = ray._raylet.GcsClient(address=sys.argv[1]).get_all_node_info().values(); "
        "print([node.node_manager_address for node in nodes if node.state == 0])"
    )
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert started.poll() is None and time.monotonic() < deadline, log.read_text()
        asked = hosts.on_first([sys.executable, "-c", code, f"{hosts.addresses[0]}:6379"])
        answer = subprocess.run(asked, capture_output=True, text=True, env=_ray_environment(), timeout=60, check=False)
        if answer.returncode == 0 and f"'{address}'" in answer.stdout:
            return
        time.sleep(0.5)


def _ray_environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return environment | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


def _end_processes(name: str) -> None:
    """Of a namespace, which a cluster's processes never leave."""
    deadline = time.monotonic() + 30.0
    while pids := _run("ip", "netns", "pids", name).split():
        for pid in pids:
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        assert time.monotonic() < deadline, f"{name} has processes that do not end: {pids}"
        time.sleep(0.1)


def _name_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def _require_namespaces() -> None:
    """Skip where there are none; fail where CI runs as root."""
    reason = None if shutil.which("ip") else "iproute2 is not installed"
    if reason is None and (os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "--net", "true"], check=False).returncode):
        reason = "no network namespaces can be made here"
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"{reason}, and in CI tests of several hosts must not be skipped")
        pytest.skip(reason)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
