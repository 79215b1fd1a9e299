"""What a worker's process does for itself."""

from __future__ import annotations

import gc
import weakref

from roll_lite.distributed.worker import freeze_heap


class Node:
    def __init__(self) -> None:
        self.itself = self


def test_the_collector_leaves_alone_what_is_loaded_and_takes_what_is_not() -> None:
    kept, frozen = [Node() for _ in range(10)], gc.get_freeze_count()
    before = weakref.ref(Node())
    freeze_heap()
    assert before() is None, "garbage is not kept for ever"
    assert gc.get_freeze_count() >= frozen + len(kept) and not any(node in kept for node in gc.get_objects())
    after = weakref.ref(Node())
    gc.collect()
    assert after() is None
