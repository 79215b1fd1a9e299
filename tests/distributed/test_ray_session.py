"""A session leaves nothing behind, however its driver ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import ray
from cluster_workers import Adder

from roll_lite.config.schema.run import RayConfig
from roll_lite.distributed import ray_session as module
from roll_lite.distributed import session_guard
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.ray_session import ray_session
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.observability.report import SUMMARY_FILE, write_summary

HERE = Path(__file__).parent
SECONDS = 60.0


def wait_until(condition: Callable[[], bool], seconds: float = SECONDS) -> float:
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen in time"
        time.sleep(0.05)
    return time.monotonic() - start


def family(process: int) -> list[psutil.Process]:
    """All that belong to the driver's session, also those whose parent has died: the guard is told its mark and its folder."""
    for child in psutil.Process(process).children():
        command = child.cmdline()
        if session_guard.__file__ in command:
            _, mark, folder = command[command.index(session_guard.__file__) + 1 :][:3]
            return [psutil.Process(pid) for pid in session_guard.session_processes(mark, Path(folder))]
    return []


def is_running(process: psutil.Process) -> bool:
    """Zombies have ended: this process may have become their parent, since Ray makes its driver a subreaper."""
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


@contextmanager
def running_driver(how: str, tmp: Path, address: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The program, once its actor works, and the number of the actor's child. Ended with the block, at the latest."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    driver = subprocess.Popen(
        [sys.executable, str(HERE / "session_driver.py"), how, address, str(tmp / "run")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**environment, "TMPDIR": str(tmp), "PYTHONPATH": str(HERE)},
    )
    assert driver.stdout is not None and driver.stderr is not None
    with driver.stdout, driver.stderr:
        try:
            said = driver.stdout.readline().split()
            assert said, driver.stderr.read()
            yield driver, int(said[2])
        finally:
            driver.kill()
            driver.wait()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("sleep", signal.SIGKILL),
        pytest.param("wait", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("sleep", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("raise", None, marks=pytest.mark.slow),
        pytest.param("return", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures("signals_arrive")
def test_nothing_is_left_behind(tmp: Path, how: str, end: signal.Signals | None) -> None:
    with running_driver(how, tmp) as (driver, child):
        processes = [psutil.Process(child)] if psutil.pid_exists(child) else []
        if end is not None:
            # A process that is just starting its program has no environment to be recognised by.
            wait_until(lambda: child in [process.pid for process in family(driver.pid)])
            processes = family(driver.pid)
            names = {process.name() for process in processes}
            assert {"raylet", "gcs_server", "ray::DashboardAgent"} < names and any(name.startswith("ray::Adder") for name in names), names
            commands = [" ".join(process.cmdline()) for process in processes]
            assert [one for one in commands if "dashboard.py" in one or "monitor.py" in one] == [], "not needed, and each takes a second"
            assert len(list(tmp.glob("rl-*"))) == 1
            driver.send_signal(end)
        wait_until(lambda: driver.poll() is not None)
        took = wait_until(lambda: not any(map(is_running, processes)))
        wait_until(lambda: not list(tmp.glob("rl-*")))
        assert driver.returncode == (0 if how == "return" else 1 if how == "raise" else driver.returncode)
        assert (driver.returncode == 0) == (how == "return")
        assert took < SECONDS
        if how == "raise":
            assert driver.stderr is not None and "ValueError: as told" in driver.stderr.read()


def test_folders_of_dead_owners_are_purged(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.tempfile, "gettempdir", lambda: str(tmp))
    ended = subprocess.Popen(["true"])
    ended.wait()
    own = module._identity(os.getpid())
    _, tick, namespace = own.split(" ")
    owners = {
        "rl-dead": f"{ended.pid} {tick} {namespace}",
        "rl-number-reused": f"{os.getpid()} {int(tick) - 1} {namespace}",
        "rl-alive": own,
        "rl-other-container": f"{ended.pid} {tick} pid:[1]",
        "rl-not-ours": None,
    }
    for name, owner in owners.items():
        (tmp / name).mkdir()
        if owner:
            (tmp / name / "owner").write_text(owner)
    (tmp / "rl-dead" / "mark").write_text("left behind")
    orphan = subprocess.Popen(["sleep", "1000"], env={**os.environ, session_guard.MARK: "left behind"})
    new = module._make_folder()
    assert orphan.wait(SECONDS) == -signal.SIGKILL
    assert {folder.name for folder in tmp.iterdir()} == {"rl-alive", "rl-other-container", "rl-not-ours", new.name}
    assert (new / "owner").read_text() == own


def test_a_process_that_wrote_its_title_over_its_mark_is_known_by_its_files(tmp: Path) -> None:
    log = tmp / "session" / "log"
    log.parent.mkdir()
    hold = ["-c", 'exec -a "$1" sleep 1000 9>"$0"', str(log)]
    titled, untitled = (subprocess.Popen(["bash", *hold, title]) for title in ("ray::Agent", "tail"))
    try:
        wait_until(lambda: titled.pid in session_guard.session_processes("mark", log.parent))
        assert untitled.pid not in session_guard.session_processes("mark", log.parent)
        assert titled.pid not in session_guard.session_processes("mark", tmp / "other")
    finally:
        for process in (titled, untitled):
            process.kill()
            process.wait()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("how", ["killed", "killed with its guard", "done"])
def test_the_guard_ends_marked_processes(tmp: Path, how: str) -> None:
    """And the semaphores of an engine whose host was killed, whose folder is in that of the session. A killed driver's run has failed."""
    mark, folder = uuid.uuid4().hex, tmp / "session"
    summary = write_summary(tmp, domains=[], validation={}, steps=3, wall_s={"total": 1.0}, tokens={}, exit_state="running")
    before = json.loads(summary.read_text())
    scratch = folder / f"rl-engine-{mark}"
    scratch.mkdir(parents=True)
    semaphore, others = (session_guard.SHARED / f"sem.{name}-1" for name in (scratch.name, f"rl-others-{mark}"))
    semaphore.touch()
    others.touch()
    driver = subprocess.Popen(["sleep", "1000"])
    marked = subprocess.Popen(["sleep", "1000"], env={**os.environ, session_guard.MARK: mark}, start_new_session=True)
    other = subprocess.Popen(["sleep", "1000"], env={**os.environ, session_guard.MARK: mark + "0"})
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", session_guard.__file__, str(driver.pid), mark, str(folder), str(summary)], stdin=subprocess.PIPE
    )
    assert guard.stdin is not None
    time.sleep(0.5)
    assert guard.poll() is None and marked.poll() is None
    if how == "done":
        guard.stdin.write(b".")
        guard.stdin.flush()
    else:
        driver.kill()
    if how == "killed with its guard":
        guard.kill()
    assert guard.wait(SECONDS) == (-signal.SIGKILL if how == "killed with its guard" else 0)
    wait_until(lambda: not folder.exists())
    assert marked.wait(SECONDS) == -signal.SIGKILL
    assert not folder.exists() and other.poll() is None
    assert not semaphore.exists() and others.exists()
    assert json.loads(summary.read_text()) == (before if how == "done" else {**before, "exit": "failed: the driver was killed"})
    others.unlink()
    guard.stdin.close()
    for process in (driver, other):
        process.kill()
        process.wait()


def test_guards_replace_each_other(tmp: Path) -> None:
    driver = subprocess.Popen(["sleep", "1000"])
    command = [sys.executable, "-I", "-S", session_guard.__file__, str(driver.pid), "mark", str(tmp)]
    guard = subprocess.Popen(command, stdin=subprocess.PIPE)
    ours = psutil.Process(guard.pid)
    wait_until(lambda: len(ours.children()) == 1)
    (twin,) = ours.children()
    twin.kill()
    wait_until(lambda: [child for child in ours.children() if is_running(child)] not in ([], [twin]))
    (twin,) = [child for child in ours.children() if is_running(child)]
    guard.kill()
    guard.wait()
    wait_until(lambda: len(twin.children()) == 1)
    driver.kill()
    driver.wait()
    wait_until(lambda: not tmp.exists() and not is_running(twin))


def test_the_summary_of_a_run_that_ended_stays(tmp: Path) -> None:
    summary = write_summary(tmp, domains=[], validation={}, steps=3, wall_s={"total": 1.0}, tokens={}, exit_state="failed: no disk")
    before = summary.read_text()
    session_guard.record_death(summary)
    session_guard.record_death(tmp / "no run" / SUMMARY_FILE)
    assert summary.read_text() == before and list(tmp.iterdir()) == [summary]


def test_one_session_at_a_time(ray_local: object) -> None:
    with pytest.raises(RuntimeError, match="connected to a Ray cluster already"), ray_session(RayConfig(), None):
        pass


def test_exit_codes_of_children_are_not_lost(ray_local: object) -> None:
    """Ray would have them all be 0."""
    assert subprocess.run(["sh", "-c", "exit 3"], check=False).returncode == 3
    cluster = start_cluster(ClusterSpec("adder", anywhere(1)), Adder)
    assert cluster.one(Adder.exit_code) == 3
    cluster.shutdown()


def test_workers_have_the_drivers_priority(ray_local: object) -> None:
    assert ray.get(ray.remote(lambda: os.nice(0)).remote()) == os.nice(0)


@pytest.mark.nightly
def test_a_process_can_have_one_session_after_another() -> None:
    program = """
        from roll_lite.config.schema.run import RayConfig
        from roll_lite.distributed.ray_session import ray_session
        for _ in range(2):
            with ray_session(RayConfig(), None) as session:
                print("began", session.started)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    assert done.stdout.splitlines() == ["began True"] * 2, done.stderr


def test_sessions_start_in_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    raised: list[BaseException] = []

    def enter() -> None:
        try:
            with ray_session(RayConfig(), None):
                pass
        except RuntimeError as error:
            raised.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(SECONDS)
    assert "starts in the main thread" in str(raised[0])


@pytest.mark.parametrize("address", ["host:6379", None])
def test_how_long_ray_may_take_to_start_is_set_in_the_configuration(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    found = []

    def init(**_: object) -> None:
        found.append(WATCHDOG.nearest)
        raise ConnectionError("nobody is there")

    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(module.ray, "init", init)
    monkeypatch.setattr(module, "_check_address", lambda given: given)
    monkeypatch.setattr(module, "_disconnect", lambda: None)
    monkeypatch.setattr(module, "_own_servers", list)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConnectionError, match="nobody is there"), ray_session(RayConfig(address=address, start_timeout_s=7), None):
        pass
    assert [str(limit) for limit in found] == ["ray.start_timeout_s: 7 s"] and WATCHDOG.nearest is None


def test_unsupported_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.ray, "__version__", "2.40.1")
    with pytest.raises(RuntimeError, match=r"Ray 2\.40\.1 is not supported: 2\.60 up to below 2\.62 is"), ray_session(RayConfig(), None):
        pass


@pytest.mark.parametrize(
    ("address", "error", "message"),
    [
        ("127.0.0.1:1", ConnectionError, r"no Ray cluster answers at 127\.0\.0\.1:1 \(ray\.address, RAY_ADDRESS\)"),
        ("head:6379x", ConnectionError, "no Ray cluster answers at head:6379x"),
        ("head", ValueError, "'head' .or RAY_ADDRESS. is neither host:port nor auto"),
        ("ray://head:10001", ValueError, "is a Ray Client address; start the run on a node of the cluster"),
    ],
)
def test_an_address_that_is_of_no_use(address: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        module._check_address(address)


@pytest.mark.parametrize(("answer", "said"), [(b"", "says nothing for 0.5 s"), (b"HTTP/1.1 400 Bad Request", "does not speak gRPC")])
def test_a_port_that_is_no_cluster(monkeypatch: pytest.MonkeyPatch, answer: bytes, said: str) -> None:
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        connections: list[socket.socket] = []

        def accept() -> None:
            connections.append(server.accept()[0])
            connections[0].sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(ConnectionError, match=rf"no Ray cluster answers at 127\.0\.0\.1:\d+ .*{said}"):
            module._check_address(f"127.0.0.1:{server.getsockname()[1]}")
        thread.join()
        connections[0].close()


def test_auto_without_a_cluster_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The private sessions of other runs are none."""
    private = "raylet --gcs-address=127.0.0.1:7001 --session=/tmp/rl-abc/session"
    monkeypatch.setattr(module, "_raylets", lambda: [(psutil.Process(), private)])
    monkeypatch.setattr(module.ray._private.utils, "read_ray_address", lambda: None)
    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(ConnectionError, match=r"RAY_ADDRESS. is auto, .* none runs on this machine: start one .ray start --head"):
        with ray_session(RayConfig(), None):
            pass
    started = [f"raylet --gcs-address=127.0.0.1:{port}" for port in (7002, 7003)]
    monkeypatch.setattr(module, "_raylets", lambda: [(psutil.Process(), command) for command in (private, started[0])])
    assert module._running_cluster() == "127.0.0.1:7002"
    monkeypatch.setattr(module, "_raylets", lambda: [(psutil.Process(), command) for command in started])
    with pytest.raises(ConnectionError, match=r"several run on this machine .127\.0\.0\.1:7002, 127\.0\.0\.1:7003.: name one"):
        module._running_cluster()
    monkeypatch.setattr(module.ray._private.utils, "read_ray_address", lambda: "127.0.0.1:7003")
    assert module._running_cluster() == "127.0.0.1:7003"


ORPHANS = """
import ctypes, os, subprocess, sys, time
from roll_lite.distributed.ray_session import _children, _reap_orphans

ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # inherit orphans, as Ray's processes do
ours = subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"])
own = set(_children())
for _ in range(3):
    subprocess.run(["sh", "-c", "sleep 0.2 & exit 0"])
time.sleep(1.0)
assert len(_children()) == 4, "three dead orphans, and a child of its own"
_reap_orphans(own)
assert _children() == [ours.pid] and ours.wait() == 7
"""


def test_orphans_that_the_driver_inherits_do_not_stay_as_zombies() -> None:
    subprocess.run([sys.executable, "-c", ORPHANS], check=True, timeout=60)
