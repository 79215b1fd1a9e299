"""Weight transfer through memory that both sides can read: host memory on one machine, or memory of a GPU that both see.

A trainer writes a bucket into a segment, and every engine worker reads it there without a copy, while the trainer fills the next segment. A
segment is reused once every worker is done with the bucket and keeps none of its tensors: an engine may hold tensors until a layer is
complete.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roll_lite.distributed.weight_sync.devices import settle
from roll_lite.distributed.weight_sync.group import TransferError, TransferGroup
from roll_lite.distributed.weight_sync.memory import Open, Segment, Watched, name_of_export
from roll_lite.distributed.weight_sync.plan import Route
from roll_lite.distributed.weight_sync.transport import (
    Await,
    BufferedSender,
    FlatLayout,
    TransportReceiver,
    flat_layout,
    unflatten,
)


def announce(group: TransferGroup, route: Route, layout: FlatLayout, segment: Segment) -> Await:
    """Announce a segment to the receivers, which may read it from now on. The result waits until they are done."""
    step = group.step(route)
    group.tell(route, step, "here", layout.announcement(segment.handle))

    def done() -> Mapping[int, set[str]]:
        return {receiver: set(said.handle.split()) for receiver, said in group.hear(route, step, "done").items()}

    return done


class FetchSender(BufferedSender):
    def _dispatch(self, route: Route, layout: FlatLayout, segment: Segment) -> Await:
        return announce(self.group, route, layout, segment)


class FetchReceiver(TransportReceiver):
    def __init__(
        self,
        group: TransferGroup,
        open_segment: Open,
        gives_back: bool = False,
        otherwise: str = "weight_sync.transport: gloo does without",
    ) -> None:
        """`gives_back`: the sender needs to know which exports were opened. `otherwise`: remedy if memory cannot be opened."""
        super().__init__(group)
        self._open = open_segment
        self._gives_back = gives_back
        self._otherwise = otherwise
        self._opened: dict[int, dict[str, Watched]] = {}
        """Opened segments by sender and handle."""
        self._received: list[tuple[Route, int]] = []
        """Buckets received since the last release."""

    def receive(self, route: Route) -> dict[str, torch.Tensor]:
        layout = flat_layout(route.tensors)
        with self.group.exchange():
            step = self.group.step(route)
            heard = self.group.hear(route, step, "here")
            self.group.compare(layout.announcement(), heard)
            segment = self._segment(route, heard[route.sender].handle)
            self._received.append((route, step))
            return unflatten(segment.whole, route.tensors, layout)

    def _segment(self, route: Route, handle: str) -> Watched:
        opened = self._opened.setdefault(route.sender, {})
        if handle not in opened:
            place = route.receivers.index(self.group.number)
            if self._gives_back:
                self.group.opens(name_of_export(handle, place))
            try:
                opened[handle] = Watched(self._open(handle, place))
            except (OSError, RuntimeError, ValueError) as error:  # from the system, from CUDA, or a GPU that is not visible here
                them = self.group.membership.members[route.sender]
                cannot = f"{self.group.name} cannot open the memory of {them}: {error}"
                raise TransferError(f"weight transfer: {cannot}; {self._otherwise}") from error
        return opened[handle]

    def release(self) -> None:
        received, self._received = self._received, []
        with self.group.exchange():
            for segment in (one for opened in self._opened.values() for one in opened.values()):
                settle(segment.whole)
            for route, step in received:
                kept = [handle for handle, segment in self._opened[route.sender].items() if segment.is_kept()]
                self.group.tell(route, step, "done", flat_layout(route.tensors).announcement(" ".join(kept)))

    def close(self) -> None:
        super().close()
        self._opened.clear()
