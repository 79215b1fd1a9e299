"""Workers for the cluster tests: no model, and torch only where a collective needs it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import ray

from roll_lite.distributed.failures import FleetDown, MemberLost
from roll_lite.distributed.worker import AsyncWorker, Worker

if TYPE_CHECKING:
    from roll_lite.distributed.strategy.base import RankLayout


class Adder(Worker):
    def __init__(self, base: int = 0) -> None:
        super().__init__()
        self.base = base

    def add(self, a: int, b: int = 0) -> int:
        return self.base + 100 * self.rank + a + b

    def environment(self, names: list[str]) -> dict[str, str | None]:
        return {name: os.environ.get(name) for name in names}

    @ray.method(num_returns=2)
    def sum_and_ones(self, count: int) -> tuple[int, np.ndarray]:
        return count, np.full(count, 1 + self.rank, np.uint8)

    def fetch(self, refs: list[ray.ObjectRef]) -> int:
        """Raises what Ray raises for a lost object, if there are none."""
        if not refs:
            raise ray.exceptions.ObjectReconstructionFailedError("00", None, "")
        return int(ray.get(refs[self.rank]).sum())

    def thread(self) -> tuple[int, bool]:
        return threading.get_ident(), threading.current_thread() is threading.main_thread()

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def sleep_where(self, rank: int, seconds: float) -> int:
        if self.rank == rank:
            time.sleep(seconds)
        return self.rank

    def exit_code(self) -> int:
        return subprocess.run(["sh", "-c", "exit 3"], check=False).returncode

    def start_child(self) -> int:
        """A child that has left its parent's process group, as engines' own processes may."""
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid


class MainThreadAdder(Adder):
    watched: ClassVar[bool] = False


class Grid(Worker):
    """Four ranks as two data ranks of two tensor ranks each; data ranks count backwards, and the second of each pair is the head."""

    def layout(self) -> RankLayout:
        from roll_lite.distributed.strategy.base import RankLayout

        return RankLayout(
            self.rank,
            self.world_size,
            data_rank=1 - self.rank // 2,
            data_size=2,
            tensor_rank=self.rank % 2,
            pipeline_rank=0,
            context_rank=0,
            is_head=self.rank % 2 == 1,
        )

    def total(self, shard: list[int], plus: int) -> tuple[int, int]:
        self.last = sum(shard) + plus
        return self.rank, self.last

    def last_total(self) -> int | None:
        return getattr(self, "last", None)

    def who(self) -> int:
        return self.rank


class Collective(Worker):
    def reduce(self) -> float:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            self.init_process_group()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    def fail_in_collective(self, how: str) -> float:
        """Rank 1 fails, the others wait for it in a collective."""
        if self.rank == 1:
            if how == "raise":
                raise ValueError("the data is broken")
            if how == "exit":
                print("about to leave", flush=True)
                os._exit(7)
            if how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return self.reduce()

    def hang_before_a_collective(self) -> float:
        """Rank 1 never comes, the others wait for it."""
        if self.rank == 1:
            threading.Event().wait()
        return self.reduce()

    def hang_with_the_lock(self) -> float:
        """Rank 1 keeps Python's lock for ever, the others wait for it."""
        if self.rank == 1:
            backtracks()
        time.sleep(60)
        return 0.0


def backtracks() -> None:
    re.fullmatch("(a+)+", "a" * 60 + "b")


class Unbuildable(Worker):
    def __init__(self, path: str) -> None:
        super().__init__()
        raise FileNotFoundError(f"no model at {path}")


class Service(AsyncWorker):
    async def twice(self, number: int) -> int:
        await asyncio.sleep(0)
        return 2 * number

    async def forever(self) -> None:
        await asyncio.Event().wait()


class Keeper(AsyncWorker):
    """Has a fleet, whose last member it gives up."""

    async def give_up(self, member: ray.actor.ActorHandle, cause: str) -> None:
        ray.kill(member)
        asyncio.get_running_loop().call_later(0.5, self.tell_end, FleetDown("members", 0, cause))


class Loner(AsyncWorker):
    lives_alone: ClassVar[bool] = True

    async def number(self) -> int:
        return self.rank

    async def die(self, how: str) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "lost":
            raise MemberLost("worn out")
        elif how:
            raise ValueError(how)
