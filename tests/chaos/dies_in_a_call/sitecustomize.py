"""Python runs this in every process that finds it on its path: the second training rank dies in a call to its strategy, a second after the
call began, when the first rank may have answered; or it stays in the call for ever, and the first rank waits for it in a collective."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

MARK, METHOD, CALL, HANGS = "DIES_MARK", "DIES_IN", "DIES_AT_CALL", "HANGS"
"""Variables: a file, which the rank makes when it dies; method of the strategy; number of the call; set if the rank hangs instead."""
OTHERS_S = 1.0


def _change(strategy: Any) -> None:
    method = getattr(strategy, os.environ[METHOD])
    calls = 0

    def call_or_die(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if self.layout.rank == 1 and calls == int(os.environ[CALL]) and not Path(os.environ[MARK]).exists():
            Path(os.environ[MARK]).touch()
            if HANGS in os.environ:
                threading.Event().wait()
            time.sleep(OTHERS_S)
            os.kill(os.getpid(), signal.SIGKILL)
        return method(self, *args, **kwargs)

    setattr(strategy, os.environ[METHOD], call_or_die)


if MARK in os.environ:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from when_imported import WhenImported

    sys.path.pop(0)
    name = "roll_lite.distributed.strategy.megatron.strategy"
    sys.meta_path.insert(0, WhenImported(name, lambda module: _change(module.MegatronStrategy)))
