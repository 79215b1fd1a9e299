"""Waves of requests, for runs that repeat."""

from __future__ import annotations

import asyncio


class WaveGate:
    """Waves: in a deterministic run an engine must get the same requests at the same moment every time. The gate holds requests back
    until every live sample is either at the gate or done, then lets all of them through in one event-loop turn.

    What is in a wave then depends on what happened, never on when: retries of a wave form the next one.
    """

    def __init__(self) -> None:
        self._members = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def join(self) -> None:
        """A sample starts."""
        self._members += 1

    def leave(self) -> None:
        """A sample is done."""
        self._members -= 1
        self._open_if_complete()

    async def enter(self, request_id: str) -> None:
        """A sample wants to send a request. They leave in the order of their ids, in which an engine will get them."""
        loop = asyncio.get_running_loop()
        place = self._waiting[request_id] = loop.create_future()
        loop.call_soon(self._open_if_complete)  # not at once: the last to come would not wait, and leave before all others
        try:
            await place
        finally:
            self._waiting.pop(request_id, None)

    def _open_if_complete(self) -> None:
        if len(self._waiting) < self._members:
            return
        wave, self._waiting = self._waiting, {}
        for _, place in sorted(wave.items()):
            if not place.done():
                place.set_result(None)
