"""Where a member of the transfer group lives: what decides which transports connect it with others."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Home:
    machine: str
    """The same for processes that can map each other's memory: of one machine, container and user."""
    device: str = ""
    """UUID of the GPU that it computes on, the same whatever number a process's list of devices gives it. Empty: the CPU."""
    visible: tuple[str, ...] = ()
    """UUIDs of all GPUs that it may open, and that its own reads from."""
    process: int = 0
    """Its number there."""

    @staticmethod
    def of(plain: Mapping[str, Any]) -> Home:
        return Home(**{**plain, "visible": tuple(plain["visible"])})

    @staticmethod
    def here() -> Home:
        if not torch.cuda.is_available():
            return Home(this_machine(), process=os.getpid())
        own = torch.cuda.current_device()
        near = [one for one in range(torch.cuda.device_count()) if one == own or torch.cuda.can_device_access_peer(own, one)]
        return Home(this_machine(), uuid_of(own), tuple(uuid_of(one) for one in near), os.getpid())


def this_machine() -> str:
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {Path('/proc/self/ns/pid').readlink()} {os.getuid()}"
    except OSError:  # not Linux: each is for itself
        return f"{socket.gethostname()} {os.getpid()}"


def uuid_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def local_number(uuid: str) -> int:
    """The number that this process knows a GPU by."""
    return [uuid_of(number) for number in range(torch.cuda.device_count())].index(uuid)


def settle(tensor: torch.Tensor) -> None:
    """What was asked of its device has been done: others may read it."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def compute_beside(tensor: torch.Tensor) -> None:
    """This thread works on the tensor's GPU: a new thread is on the first one that the process sees, and would take memory there."""
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
