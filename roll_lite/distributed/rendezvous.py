"""How ranks find each other: rank 0 listens on a port that the system has chosen, and the listening socket itself becomes the store.

A port that was only believed free can be taken before it is used; one that is bound stays ours.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Address:
    host: str
    port: int


def listen() -> socket.socket:
    """Bound to port 0, on all interfaces."""
    return socket.create_server(("", 0))


def open_store(address: Address, world_size: int, listener: socket.socket | None, timeout_s: float) -> TCPStore:
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


def use_interface_of(host: str) -> None:
    """Gloo asks the machine's name for its address otherwise, which laptops and containers often cannot resolve."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.address == host for address in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
