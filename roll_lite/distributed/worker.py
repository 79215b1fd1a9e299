"""What every rank of a cluster is: a process that knows its place among the others. Imports stay light, torch comes when it is needed."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import psutil
import ray

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from roll_lite.distributed.strategy.base import RankLayout

ROLE = "ROLL_LITE_ROLE"
LOG_FILE = "ROLL_LITE_LOG_FILE"
STACK_FRAMES = 10
TASKS = 20
"""Of an event loop with thousands, the first say enough."""


@dataclass(frozen=True)
class Address:
    host: str
    port: int


class Worker:
    """Base of synchronous workers. The cluster sets RANK, WORLD_SIZE, LOCAL_RANK before the process starts.

    Methods run on one thread, one after another. It is not the process's main thread: the call that watches over the process
    needs a thread beside it. A worker whose work insists on the main thread sets `watched = False`; its death is then
    noticed when it is called.
    """

    watched: ClassVar[bool] = True
    lives_alone: ClassVar[bool] = False
    """Its death is not the end of its cluster: a `Fleet` decides what it means."""
    max_restarts: ClassVar[int] = 0
    """How often Ray starts another process in the place of a dead one, -1 without limit: for workers that are not watched, whose callers
    initialize them again."""

    def __init__(self) -> None:
        self.role = os.environ[ROLE]
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        # How ranks find each other: rank 0 listens on a port that the system has chosen, on all interfaces, and the listening socket
        # itself becomes the store. A port that was only believed free can be taken before it is used; one that is bound stays ours.
        self._listener = socket.create_server(("", 0)) if self.rank == 0 else None
        redirect_output()

    # ------------------------------------------------------------ rendezvous

    def rendezvous(self) -> Address:
        """Where rank 0 listens."""
        assert self._listener is not None, "only rank 0 listens"
        return Address(ray.util.get_node_ip_address(), self._listener.getsockname()[1])

    def meet_at(self, address: Address) -> None:
        os.environ["MASTER_ADDR"] = address.host
        os.environ["MASTER_PORT"] = str(address.port)

    def init_process_group(self, timeout_s: float = 1800.0) -> None:
        """Collective over the cluster. gloo for tensors in host memory and, where this rank has a GPU, NCCL for those on it."""
        import torch
        import torch.distributed as dist

        address = Address(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        use_interface_of(ray.util.get_node_ip_address())
        if torch.cuda.is_available():
            torch.cuda.set_device(self.local_rank)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        store = process_group_store(address, self.world_size, self._listener, timeout_s)
        self._listener = None
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timedelta(seconds=timeout_s))

    # ------------------------------------------------------------ facts

    def layout(self) -> RankLayout | None:
        """Of the strategy, once there is one. None: every rank holds a share of the data of its own."""
        return getattr(getattr(self, "strategy", None), "layout", None)

    def process_id(self) -> int:
        return os.getpid()

    # ------------------------------------------------------------ watch

    def until_death(self) -> None:
        """Never returns: the caller learns of the end of this process by the failure of the call."""
        threading.Event().wait()

    def place(self) -> tuple[str, int]:
        """Node and number of this process. That it answers is what counts."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def stacks(self) -> str:
        return other_stacks()


class AsyncWorker(Worker):
    """Base of workers whose methods are coroutines: all run in one event loop."""

    def __init__(self) -> None:
        super().__init__()
        self._end: Exception | None = None
        self._has_ended = asyncio.Event()

    async def until_death(self) -> None:  # type: ignore[override]
        """Ends with an error, too, where this process lives but what it stands for cannot be kept alive."""
        await self._has_ended.wait()
        assert self._end is not None
        raise self._end

    def tell_end(self, error: Exception) -> None:
        """To whoever watches over this worker."""
        self._end = self._end or error
        self._has_ended.set()

    async def place(self) -> tuple[str, int]:  # type: ignore[override]
        return super().place()

    async def stacks(self) -> str:  # type: ignore[override]
        return f"{other_stacks()}\n{task_stacks()}"


def process_group_store(address: Address, world_size: int, listener: socket.socket | None, timeout_s: float) -> TCPStore:
    """`listener`: rank 0's socket, which the store takes over; None on other ranks."""
    # torch takes seconds to import; workers without a process group never need it
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address.host,
        address.port,
        world_size,
        is_master=listener is not None,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach() if listener else None,
    )


def reserve_port(host: str) -> socket.socket:
    """Bound, and never listened on: the system gives the port to nobody, but a server that binds it with SO_REUSEADDR gets it."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((host, 0))
    return holder


def use_interface_of(host: str) -> None:
    """Gloo asks the machine's name for its address otherwise, which laptops and containers often cannot resolve."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def freeze_heap() -> None:
    """What a process has loaded by now is no garbage. The collector would walk through all of it time and again: a quarter of a second
    where there is an engine, as long as that takes for a batch of short responses."""
    gc.collect()
    gc.freeze()


def redirect_output() -> None:
    """What this process and its children print goes to the run's folder. Where that cannot be written (another node), Ray keeps it."""
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


def other_stacks() -> str:
    """Where the threads of this process stand, without those that only wait for calls or belong to Ray."""
    texts = []
    for thread, frame in sys._current_frames().items():
        frames = traceback.extract_stack(frame)
        waiting = any(entry.name in ("until_death", "main_loop") or entry.filename.endswith("gc_collect_manager.py") for entry in frames)
        if thread != threading.get_ident() and not waiting:
            texts.append("".join(traceback.format_list(frames[-STACK_FRAMES:])))
    return "\n".join(texts)


def task_stacks() -> str:
    """Where the coroutines of this event loop wait, the innermost place first."""
    texts = []
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        places = [f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" for frame in task.get_stack()]
        if places and not any("until_death" in place for place in places):
            texts.append(f"  task at {' < '.join(reversed(places))}")
    return "\n".join(dict.fromkeys(texts[:TASKS]))
