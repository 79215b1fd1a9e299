from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.authentication.authentication_token_setup
import ray._private.parameter
import ray._private.services
import ray._private.utils

from roll_lite.config.schema.run import RayConfig
from roll_lite.distributed import session_guard
from roll_lite.distributed.liveness import is_stopped
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.watchdog import WATCHDOG
from roll_lite.files import changed_environment
from roll_lite.observability.report import SUMMARY_FILE

logger = logging.getLogger(__name__)

SUPPORTED_RAY = ((2, 60), (2, 62))
FOLDER_PREFIX = "rl-"
OWNER_FILE = "owner"
MARK_FILE = "mark"
CONNECT_SECONDS = 10.0
ENDING = ("the end of Ray", 60.0, "")
GCS_ADDRESS = re.compile(r"--gcs-address=(\S+)")
HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5)
HTTP2_SETTINGS = 4
SERVERS = ("raylet", "gcs_server")
LONGEST_BASE = 40
"""Maximum length of the temporary folder's path: Ray appends up to 64 characters, and a socket path has at most 107."""

QUIET = {"RAY_IGNORE_UNHANDLED_ERRORS": "1"}
"""Keeps Ray from printing errors of calls not awaited, such as those to a replaced engine."""
LOCAL_SETTINGS = {
    # Also kill a dead worker's children (engine processes).
    "kill_child_processes_on_worker_exit_with_raylet_subreaper": True,
    # Do not start workers ahead: each has its own environment, so they would never be used.
    "enable_worker_prestart": False,
    "prestart_worker_first_driver": False,
    # Ray's default of 15 would starve engines and ranks under other load.
    "worker_niceness": 0,
    # Keep no records of finished tasks; gcs_server would keep 100,000.
    "task_events_report_interval_ms": 0,
}


@dataclass(frozen=True)
class RaySession:
    address: str
    started: bool
    log_folder: Path | None


@contextmanager
def ray_session(config: RayConfig, run_folder: Path | None) -> Iterator[RaySession]:
    check_version(ray.__version__)
    if ray.is_initialized():
        raise RuntimeError("this process is connected to a Ray cluster already; one session at a time")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a Ray session starts in the main thread: its processes end with the thread that started them")
    log_folder = run_folder.resolve() / "logs" if run_folder else None
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address and address != "local":
        with _guarded(run_folder), _attached(address, config) as found, changed_environment(QUIET):
            yield RaySession(found, started=False, log_folder=log_folder)
    else:
        with _local(config, run_folder) as found, changed_environment(QUIET):
            yield RaySession(found, started=True, log_folder=log_folder)


@contextmanager
def _attached(address: str, config: RayConfig) -> Iterator[str]:
    address = _check_address(address)
    if _may_want_token(address):
        use_token()
    # In Ray, RAY_ADDRESS (which may be `auto`) overrides the argument.
    with _starting({"RAY_USAGE_STATS_ENABLED": "0"}, config):
        try:
            context = ray.init(address=address, log_to_driver=False, logging_level="error", runtime_env=_runtime_env())
        except ConnectionError as error:
            raise ConnectionError(
                f"no Ray cluster lets us in at {address} (ray.address, RAY_ADDRESS): {error}. "
                "A cluster may ask for a token: put what `ray get-auth-token` prints on its head node into ~/.ray/auth_token here"
            ) from error
    session_guard.keep_exit_codes()
    try:
        socket_name = f"--raylet_socket_name={context.address_info['raylet_socket_name']}"
        with WATCHDOG.over([process for process, command in _raylets() if socket_name in command.split()]):
            yield context.address_info["address"]
    finally:
        # Ends the job: Ray removes its actors and placement groups, and nothing else.
        _disconnect()


def _may_want_token(address: str) -> bool:
    """True if the cluster refuses callers without a token, or does not answer. If it wants no token, a driver with one would lose its
    actors."""
    if find_spec("grpc") is None or os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    import grpc

    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=CONNECT_SECONDS)
        except grpc.RpcError as error:
            return error.code() in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)
    return False


def use_token() -> None:
    setup = ray._private.authentication.authentication_token_setup
    setup.logger.disabled = True  # it would warn that the token is used
    setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def _check_address(address: str) -> str:
    """Resolve `auto`; check that a gRPC server answers. Ray takes minutes to report a closed port and hangs on a silent one."""
    if "://" in address:
        raise ValueError(
            f"ray.address: {address!r} is a Ray Client address; start the run on a node of the cluster, with host:port or auto"
        )
    if address == "auto":
        address = _running_cluster()
    host, separator, port = address.rpartition(":")
    if not separator:
        raise ValueError(f"ray.address: {address!r} (or RAY_ADDRESS) is neither host:port nor auto")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS) as connection:
            _expect_grpc(connection)
    except (OSError, ValueError) as error:
        raise ConnectionError(f"no Ray cluster answers at {address} (ray.address, RAY_ADDRESS): {error}") from error
    return address


def _running_cluster() -> str:
    """Return the address of the cluster recorded by `ray start`, else of the only cluster on this machine. Private clusters of runs do not
    count."""
    running = [match.group(1) for _, command in _raylets() if (match := GCS_ADDRESS.search(command)) and f"/{FOLDER_PREFIX}" not in command]
    noted = ray._private.utils.read_ray_address()
    if noted and (noted in running or not running):
        return str(noted)
    if len(set(running)) == 1:
        return running[0]
    said = (
        "none runs on this machine: start one (ray start --head), name one elsewhere (host:port), "
        "or leave ray.address and RAY_ADDRESS unset for a local one of the run's own"
    )
    if running:
        said = f"several run on this machine ({', '.join(sorted(set(running)))}): name one of them"
    raise ConnectionError(f"ray.address (or RAY_ADDRESS) is auto, which means a running Ray cluster, and {said}")


def _raylets() -> list[tuple[psutil.Process, str]]:
    found = psutil.process_iter(["name", "cmdline"])
    return [(process, " ".join(process.info["cmdline"] or [])) for process in found if process.info["name"] == "raylet"]


def _expect_grpc(connection: socket.socket) -> None:
    """Check for an HTTP/2 SETTINGS frame, which every gRPC server sends first; not with TLS."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return
    connection.sendall(HTTP2_GREETING)
    header = b""
    try:
        while len(header) < 9 and (part := connection.recv(9 - len(header))):
            header += part
    except TimeoutError:
        raise OSError(f"what listens there accepts connections and says nothing for {CONNECT_SECONDS:g} s") from None
    if len(header) < 9 or header[3] != HTTP2_SETTINGS:
        raise OSError("what listens there does not speak gRPC")


@contextmanager
def _local(config: RayConfig, run_folder: Path | None) -> Iterator[str]:
    with _guarded(run_folder) as (folder, mark):
        try:
            with _starting({"RAY_USAGE_STATS_ENABLED": "0", session_guard.MARK: mark}, config), _few_processes():
                context = ray.init(
                    address="local",
                    _temp_dir=str(folder),
                    include_dashboard=False,
                    object_store_memory=config.object_store_mb << 20,
                    log_to_driver=False,
                    logging_level="error",
                    # Temporary files of workers and engines vanish with the session, even after a kill.
                    runtime_env=_runtime_env({"TMPDIR": str(folder)}),
                    _system_config=dict(LOCAL_SETTINGS),  # a copy, because Ray adds this session's folder
                )
            session_guard.keep_exit_codes()
            WATCH.errands["orphans"] = partial(_reap_orphans, set(_children()))
            with WATCHDOG.over(_own_servers()):
                yield context.address_info["address"]
        finally:
            for process in _own_servers():
                if is_stopped(process):  # by SIGSTOP: ray.shutdown would wait for it
                    process.kill()
            _disconnect()


@contextmanager
def _few_processes() -> Iterator[None]:
    """Keep ray.init from starting dashboard (which include_dashboard=False would still start), autoscaler and log monitor."""
    parameter, services = ray._private.parameter, ray._private.services
    before = parameter.RayParams, services.start_api_server
    parameter.RayParams = partial(parameter.RayParams, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *_, **__: ("", None)  # neither address nor process
    try:
        yield
    finally:
        parameter.RayParams, services.start_api_server = before


def _children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def _reap_orphans(own: Collection[int]) -> None:
    """Reap dead processes inherited from killed workers. `own`: children right after Ray's start, which other code reaps."""
    for pid in set(_children()).difference(own):
        with suppress(ChildProcessError):  # another thread was faster
            os.waitpid(pid, os.WNOHANG)


def _own_servers() -> list[psutil.Process]:
    return [process for process in psutil.Process().children() if process.name() in SERVERS]


def _disconnect() -> None:
    WATCH.forget_all()
    with WATCHDOG.limit(*ENDING):
        ray.shutdown()


def check_version(version: str) -> None:
    low, high = SUPPORTED_RAY
    if not low <= tuple(int(part) for part in version.split(".")[:2]) < high:
        raise RuntimeError(f"Ray {version} is not supported: {'.'.join(map(str, low))} up to below {'.'.join(map(str, high))} is")


def _runtime_env(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return a runtime environment with the driver's import path; other nodes need its folders on a shared file system."""
    installed = {Path(path).resolve() for path in sysconfig.get_paths().values()}
    folders = [Path(path or ".").resolve() for path in sys.path]
    own = [folder for folder in folders if folder.is_dir() and not any(folder.is_relative_to(place) for place in installed)]
    return {
        "env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, own))), **(environment or {})},
        "worker_process_setup_hook": f"{session_guard.__name__}.{session_guard.keep_exit_codes.__name__}",
    }


@contextmanager
def _starting(environment: Mapping[str, str], config: RayConfig) -> Iterator[None]:
    """Limit the time of ray.init in the block; hide Ray's messages of errors such as worker deaths, which the run reports itself."""
    limit = WATCHDOG.limit("the start of Ray", config.start_timeout_s, "ray.start_timeout_s")
    listen = ray._private.worker.listen_error_messages
    ray._private.worker.listen_error_messages = lambda _worker, _stopped: None
    try:
        with changed_environment(environment, without=("RAY_ADDRESS",)), limit:
            yield
    finally:
        ray._private.worker.listen_error_messages = listen


# ---------------------------------------------------------------- the private folder and its guard


@contextmanager
def _guarded(run_folder: Path | None) -> Iterator[tuple[Path, str]]:
    """Yield the session's (private folder, mark) while a guard process watches the driver. The mark is an id in the environment of session
    processes. On an existing cluster, the guard only records the driver's death."""
    folder = _make_folder()
    mark = uuid.uuid4().hex
    (folder / MARK_FILE).write_text(mark)
    # -I -S: only the standard library, for a fast start. start_new_session: Ctrl-C does not reach the guard.
    command = [sys.executable, "-I", "-S", session_guard.__file__, str(os.getpid()), mark, str(folder)]
    if run_folder is not None:
        command.append(str(run_folder.resolve() / SUMMARY_FILE))
    guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        yield folder, mark
    finally:
        assert guard.stdin is not None
        try:
            guard.stdin.write(b".")
            guard.stdin.close()
            guard.wait(session_guard.PATIENCE_SECONDS + 5)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            logger.warning("the guard of the Ray session did not end as it should; removing %s without it", folder)
            session_guard.remove_session(folder)


def _make_folder() -> Path:
    base = Path(tempfile.gettempdir())
    if len(str(base)) > LONGEST_BASE:
        base = Path("/tmp")
    _purge(base)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=base))
    (folder / OWNER_FILE).write_text(_identity(os.getpid()))
    return folder


def _identity(process: int) -> str:
    """Return a process's unique name: pid, start time, pid namespace. Pids alone are reused."""
    start_tick = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{process} {start_tick} {_pid_namespace()}"


def _pid_namespace() -> str:
    return str(Path("/proc/self/ns/pid").readlink())


def _purge(base: Path) -> None:
    for folder in base.glob(FOLDER_PREFIX + "*"):
        try:
            owner = (folder / OWNER_FILE).read_text()
            process, _, namespace = owner.split(" ")
        except (OSError, ValueError):
            continue
        if namespace != _pid_namespace():
            continue
        try:
            is_alive = _identity(int(process)) == owner
        except FileNotFoundError:
            is_alive = False
        if not is_alive:
            logger.info("removing %s, left behind by process %s", folder, process)
            if (folder / MARK_FILE).is_file():
                session_guard.end_processes((folder / MARK_FILE).read_text(), folder, grace_s=0.0)
            session_guard.remove_session(folder)
