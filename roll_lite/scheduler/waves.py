"""Waves of requests, for deterministic runs."""

from __future__ import annotations

import asyncio


class WaveGate:
    """Holds requests back until every live sample waits here or is done, then releases all of them in one event-loop turn.

    So an engine gets the same requests together in every repetition of a run; their timing has no influence. Retries form the next wave.
    """

    def __init__(self) -> None:
        self._members = 0
        self._waiting: dict[str, asyncio.Future[None]] = {}

    def join(self) -> None:
        """Count a new sample."""
        self._members += 1

    def leave(self) -> None:
        """Discount a finished sample."""
        self._members -= 1
        self._open_if_complete()

    async def enter(self, request_id: str) -> None:
        """Wait for the wave to be released. Requests leave in the order of their ids."""
        loop = asyncio.get_running_loop()
        place = self._waiting[request_id] = loop.create_future()
        loop.call_soon(self._open_if_complete)  # later: at once, the last sample would leave before all others
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
