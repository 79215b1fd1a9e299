"""Base classes of workers. torch, which takes seconds to import, is imported when needed."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import psutil
import ray

from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import find_gpus

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.base import RankLayout

ROLE = "ROLL_LITE_ROLE"
LOG_FILE = "ROLL_LITE_LOG_FILE"
STACK_FRAMES = 10
IN_COLLECTIVE = "waits in collective"
MOST_COLLECTIVES = 5
TASKS = 20


@dataclass(frozen=True)
class Address:
    host: str
    port: int


class Stand(NamedTuple):
    """Collectives that a process has begun, and its threads' stacks."""

    begun: Mapping[str, int]
    """{process group: number of the last collective begun}."""
    unfinished: Sequence[str]
    stacks: str

    def __str__(self) -> str:
        return "".join(f"  {one}\n" for one in self.unfinished) + self.stacks


class Worker:
    """Base class whose methods run one at a time, off the main thread. A worker that needs the main thread sets `watched = False`: its
    death is noticed at the next call."""

    watched: ClassVar[bool] = True
    lives_alone: ClassVar[bool] = False
    """True if a `Fleet` handles a worker's death."""
    max_restarts: ClassVar[int] = 0
    """Maximum restarts by Ray; -1: unlimited. Needs `watched = False`. The caller initializes the worker again."""

    def __init__(self) -> None:
        self.role = os.environ[ROLE]
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        # Rank 0 keeps its socket for the rendezvous store: another process could take a port that was only looked up.
        self._listener = socket.create_server(("", 0)) if self.rank == 0 else None
        redirect_output()
        find_gpus()
        faulthandler.register(signal.SIGUSR1, file=2)  # lets the driver ask a silent process for its stacks

    # ------------------------------------------------------------ rendezvous

    def rendezvous(self) -> Address:
        assert self._listener is not None, "only rank 0 listens"
        return Address(ray.util.get_node_ip_address(), self._listener.getsockname()[1])

    def meet_at(self, address: Address) -> Place:
        os.environ["MASTER_ADDR"] = address.host
        os.environ["MASTER_PORT"] = str(address.port)
        return Place.here()

    def init_process_group(self) -> None:
        """Create the process group (collective): gloo for host memory, NCCL with GPUs."""
        # torch takes seconds to import, and workers without a process group never need it
        import torch
        import torch.distributed as dist
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        from roll_lite.distributed.strategy.base import GROUP_TIMEOUT

        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        use_interface_of(ray.util.get_node_ip_address())
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        listener = self._listener
        store = TCPStore(
            host,
            port,
            self.world_size,
            is_master=listener is not None,
            timeout=GROUP_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=listener.detach() if listener else None,
        )
        self._listener = None
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=GROUP_TIMEOUT)

    # ------------------------------------------------------------ facts

    def layout(self) -> RankLayout | None:
        """Parallel layout; None: each rank is a data-parallel rank."""
        return getattr(getattr(self, "strategy", None), "layout", None)

    # ------------------------------------------------------------ watch

    def until_death(self) -> None:
        """Block forever: the call fails when this process dies."""
        threading.Event().wait()

    def place(self) -> Place:
        """Return node and pid. Also the heartbeat call."""
        return Place.here()

    def stand(self) -> Stand:
        return Stand(*begun_collectives(), other_stacks())


class AsyncWorker(Worker):
    def __init__(self) -> None:
        super().__init__()
        self._end: Exception | None = None
        self._has_ended = asyncio.Event()

    async def until_death(self) -> None:  # type: ignore[override]
        """Raise when this worker can no longer serve, even if its process lives."""
        await self._has_ended.wait()
        assert self._end is not None
        raise self._end

    def tell_end(self, error: Exception) -> None:
        self._end = self._end or error
        self._has_ended.set()

    async def place(self) -> Place:  # type: ignore[override]
        return super().place()

    async def stand(self) -> Stand:  # type: ignore[override]
        return Stand({}, [], f"{other_stacks()}\n{task_stacks()}")


def reserve_port(host: str, port: int = 0) -> socket.socket:
    """Return a socket that holds a port (0: any free) for a later server, which must use SO_REUSEADDR."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, port))
    return holder


def use_interface_of(host: str) -> None:
    """Make gloo use this address's network interface: its default, the host name, often does not resolve in containers."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def freeze_heap() -> None:
    """Exclude existing objects from garbage collection: with an engine loaded, a full collection takes 0.25 s."""
    gc.collect()
    gc.freeze()


def redirect_output() -> None:
    """Write the output of this process and its children to the run's folder, if writable."""
    path = os.environ.get(LOG_FILE)
    if not path:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(target, 1)
    os.dup2(target, 2)
    os.close(target)


def begun_collectives() -> tuple[dict[str, int], list[str]]:
    """Return ({process group: number of the last collective begun}, descriptions of unfinished collectives). Stack traces do not show GPU
    collectives, which are launched early without blocking."""
    begun, unfinished = dict[str, int](), list[str]()
    with suppress(Exception):  # another torch may have another format, and the stacks matter more
        for entry in _recorded_collectives():
            name, number, group = entry["profiling_name"], entry["collective_seq_id"], " ".join(entry["process_group"])
            key = f"{name.partition(':')[0]} {group}"  # a group may have two backends, which count by themselves
            begun[key] = max(number, begun.get(key, 0))
            if not entry["retired"] and entry["state"] != "completed":
                unfinished.append(f"{IN_COLLECTIVE} {name} number {number} of {group}, sizes {entry['input_sizes']}")
    return begun, unfinished[-MOST_COLLECTIVES:]


def _recorded_collectives() -> Iterator[dict[str, Any]]:
    """Read torch's flight recorder, on by default, without sends and receives, whose state is not kept up to date."""
    recorder = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):
        entries = json.loads(getattr(recorder, name)(True, False)).get("entries", []) if hasattr(recorder, name) else []
        yield from (one for one in entries if not one["is_p2p"] and ":coalesced" not in one["profiling_name"])


def other_stacks() -> str:
    """Return stacks of this process's other threads, without Ray's and idle threads."""
    texts = []
    for thread, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        waiting = any(entry.name in ("until_death", "main_loop") or entry.filename.endswith("gc_collect_manager.py") for entry in frames)
        if thread != threading.get_ident() and not waiting:
            texts.append("".join(traceback.format_list(frames[-STACK_FRAMES:])))
    return "\n".join(texts)


def task_stacks() -> str:
    texts = []
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        places = [f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in task.get_stack()]
        if places and not any("until_death" in place for place in places):
            texts.append(f"  task at {' < '.join(reversed(places))}")
    return "\n".join(dict.fromkeys(texts[:TASKS]))
