"""Location of the members of a transfer group, which decides the transports between them."""

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
    """Machine, GPU and process of a member."""

    machine: str
    """Equal for processes that can map each other's memory: same machine, container and user."""
    device: str = ""
    """UUID of its GPU, which unlike a device number means the same in every process. Empty: CPU."""
    visible: tuple[str, ...] = ()
    """UUIDs of the GPUs whose memory it can read, its own included."""
    process: int = 0
    """Process id."""

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
    except OSError:  # not Linux: no process shares memory with another
        return f"{socket.gethostname()} {os.getpid()}"


def uuid_of(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def local_number(uuid: str) -> int:
    """Device number of a GPU in this process."""
    return [uuid_of(number) for number in range(torch.cuda.device_count())].index(uuid)


def settle(tensor: torch.Tensor) -> None:
    """Wait for the device's pending work, so that other processes may read the tensor."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


def compute_beside(tensor: torch.Tensor) -> None:
    """Switch this thread to the tensor's GPU. A new thread starts on the first visible GPU and would allocate memory there."""
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
