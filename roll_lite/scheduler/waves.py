"""Waves: in a deterministic run an engine must get the same requests at the same moment every time."""

from __future__ import annotations

import asyncio


class WaveGate:
    """Holds requests back until every live sample is either at the gate or done, then lets all of them through in one event-loop turn.

    What is in a wave then depends on what happened, never on when: retries of a wave form the next one.
    """

    def __init__(self) -> None:
        self._members = 0
        self._waiting: list[asyncio.Future[None]] = []

    def join(self) -> None:
        """A sample starts."""
        self._members += 1

    def leave(self) -> None:
        """A sample is done."""
        self._members -= 1
        self._open_if_complete()

    async def enter(self) -> None:
        """A sample wants to send a request."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        self._open_if_complete()
        try:
            await place
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            raise

    def _open_if_complete(self) -> None:
        if len(self._waiting) < self._members:
            return
        wave, self._waiting = self._waiting, []
        for place in wave:
            if not place.done():
                place.set_result(None)
