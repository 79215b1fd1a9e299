"""Two hosts on this machine: network namespaces with a Ray node each.

They see one folder differently, as hosts without a shared disk do.
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

import pytest

START_SECONDS = 120.0


@dataclass(frozen=True)
class TwoHosts:
    """The driver runs on the first host, where paths are as outside."""

    names: Sequence[str]
    addresses: Sequence[str]
    shared: Path
    """A folder that both hosts see."""
    apart: Path
    """A folder of the first host; on the second one its path leads to `apart_there`."""
    apart_there: Path

    @property
    def environment(self) -> dict[str, str]:
        return _ray_environment() | {"RAY_ADDRESS": f"{self.addresses[0]}:6379"}

    def on_first(self, command: Sequence[str | Path]) -> list[str]:
        """A command line that runs this command on the first host."""
        return ["ip", "netns", "exec", self.names[0], *map(str, command)]


@contextmanager
def two_hosts(cpus: int = 2) -> Iterator[TwoHosts]:
    """Everything that it started is gone afterwards: processes, namespaces, folders."""
    _require_namespaces()
    mark, folder = uuid.uuid4().hex[:6], Path(tempfile.mkdtemp(prefix="h-", dir="/tmp"))
    third, fourth = int(mark[:2], 16), int(mark[2:4], 16)
    hosts = TwoHosts(
        names=[f"rl-{mark}-{number}" for number in (1, 2)],
        addresses=[f"10.{third}.{fourth}.{number}" for number in (1, 2)],
        **{name: folder / name for name in ("shared", "apart", "apart_there")},
    )
    for place in (hosts.shared, hosts.apart, hosts.apart_there):
        place.mkdir()
    with ExitStack() as left:
        left.callback(shutil.rmtree, folder, ignore_errors=True)
        for name in hosts.names:
            _run("ip", "netns", "add", name)
            left.callback(_run, "ip", "netns", "delete", name)
            left.callback(_end_processes, name)
        cable = [f"rl{mark}{end}" for end in "ab"]
        _run("ip", "link", "add", cable[0], "netns", hosts.names[0], "type", "veth", "peer", "name", cable[1], "netns", hosts.names[1])
        for name, end, address in zip(hosts.names, cable, hosts.addresses, strict=True):
            inside = ("ip", "-netns", name)
            _run(*inside, "address", "add", f"{address}/24", "dev", end)
            _run(*inside, "link", "set", end, "up")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "route", "add", "default", "via", f"10.{third}.{fourth}.254")  # nobody: Ray looks for the address of this route
        _start_ray(hosts, folder, cpus)
        yield hosts


def _start_ray(hosts: TwoHosts, folder: Path, cpus: int) -> None:
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", f"--num-cpus={cpus}", "--object-store-memory=100000000"]
    head = ["--head", "--port=6379", f"--temp-dir={folder}/1", "--include-dashboard=false"]
    other_disk = ["unshare", "--mount", "bash", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', hosts.apart_there, hosts.apart]
    for number, (name, address, before, role) in enumerate(
        zip(hosts.names, hosts.addresses, ([], other_disk), (head, [f"--address={hosts.addresses[0]}:6379"]), strict=True), start=1
    ):
        command = ["ip", "netns", "exec", name, *before, *ray, *role, f"--node-ip-address={address}"]
        with (folder / f"ray-{number}.log").open("w") as log:
            started = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=_ray_environment(), start_new_session=True
            )
        _until_alive(hosts, number, started, folder / f"ray-{number}.log")


def _until_alive(hosts: TwoHosts, nodes: int, started: subprocess.Popen[bytes], log: Path) -> None:
    code = "import sys, ray; print(len(ray._raylet.GcsClient(address=sys.argv[1]).get_all_node_info()))"
    deadline = time.monotonic() + START_SECONDS
    while True:
        assert started.poll() is None and time.monotonic() < deadline, log.read_text()
        asked = hosts.on_first([sys.executable, "-c", code, f"{hosts.addresses[0]}:6379"])
        answer = subprocess.run(asked, capture_output=True, text=True, env=_ray_environment(), timeout=60, check=False)
        if answer.returncode == 0 and answer.stdout.strip() == str(nodes):
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
