"""Pickled messages between the hosting process and the SGLang server, over a socket pair."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from dataclasses import dataclass
from typing import Any

from roll_lite.distributed.strategy.base import EngineSpec

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class Start:
    spec: EngineSpec
    cuda: bool
    scratch: str


class Closed(ConnectionError):
    """Error: the peer process has ended."""


class PickleChannel:
    """Sends and receives pickled messages. Several tasks may send, one may receive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def over(cls, end: socket.socket) -> PickleChannel:
        return cls(*await asyncio.open_connection(sock=end))

    def send(self, message: Any) -> None:
        """Send without waiting; the message is lost if the peer is dead."""
        if not self._writer.is_closing():
            data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
            self._writer.write(_LENGTH.pack(len(data)) + data)

    async def receive(self) -> Any:
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            return pickle.loads(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError) as error:
            raise Closed("the other end is gone") from error

    def close(self) -> None:
        self._writer.close()
