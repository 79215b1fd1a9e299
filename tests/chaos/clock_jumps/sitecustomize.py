"""Python runs this in every process that finds it on its path: the wall clock jumps by the seconds in the file $CLOCK_JUMP, once it is
there. Ray's own processes keep their clock."""

from __future__ import annotations

import os
import time

_now, _file = time.time, os.environ.get("CLOCK_JUMP", "")


def _jumped() -> float:
    try:
        with open(_file) as jump:  # noqa: PTH123 - nothing more is imported into every process
            return _now() + float(jump.read() or 0)
    except OSError:
        return _now()


time.time = _jumped
