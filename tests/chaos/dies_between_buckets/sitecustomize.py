"""Python runs this in every process that finds it on its path: one engine of a run dies in the middle of an update of weights.

It does so with the third bucket in its hands: then every engine has loaded the first, and none has got the last. Or when it has answered
that it has all of the update, while its neighbour, which reads from it, has not begun."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK, UPDATES, VICTIM = "DIES_MARK", "DIES_AFTER_UPDATES", "DIES_VICTIM"
"""Variables: a file, which the first to die makes; updates before that; who is killed, the engine, its host, nobody (it hangs, or
raises), or the first engine when it has answered."""
BUCKETS = 3
FIRST_ENGINE = 1
"""Its worker's number in the transfer group, where one trainer rank has number 0."""
ANSWERED_S = 2.0


def _change(receiver: Any) -> None:
    load, finish = receiver.load, receiver.finish
    updates = buckets = 0

    answered = os.environ[VICTIM] == "engine that has answered"

    def load_or_die(self: Any, routes: Any, begin: Any, into_model: Callable[[Any], object], *following: Any) -> None:
        if answered:
            while (
                updates == int(os.environ[UPDATES]) and self._transport.group.number > FIRST_ENGINE and not Path(os.environ[MARK]).exists()
            ):
                time.sleep(0.05)
            load(self, routes, begin, into_model, *following)
            return

        def into_model_or_die(arrived: Any) -> None:
            nonlocal buckets
            buckets += 1
            if (updates, buckets) == (int(os.environ[UPDATES]), BUCKETS):
                _die_if_first()
            into_model(arrived)

        load(self, routes, begin, into_model_or_die, *following)

    def counted_finish(self: Any, put_in_place: Any) -> Any:
        nonlocal updates, buckets
        updates, buckets = updates + 1, 0
        if answered and updates == int(os.environ[UPDATES]) + 1 and self._transport.group.number == FIRST_ENGINE:
            threading.Timer(ANSWERED_S, _die_if_first).start()
        return finish(self, put_in_place)

    receiver.load, receiver.finish = load_or_die, counted_finish


def _die_if_first() -> None:
    try:
        Path(os.environ[MARK]).touch(exist_ok=False)
    except FileExistsError:
        return
    if os.environ[VICTIM] == "nobody, it raises":
        raise ValueError("a bucket that it cannot load")
    if os.environ[VICTIM] != "nobody":
        os.kill(int(os.environ["ROLL_LITE_ENGINE_HOST_PID"]) if os.environ[VICTIM] == "host" else os.getpid(), signal.SIGKILL)
    signal.pause()  # nothing of it goes on until the host's end has ended it


if MARK in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from when_imported import change_receiver

    sys.path.pop(0)
    change_receiver(_change)
