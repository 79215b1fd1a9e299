"""Restores the exit codes of child processes, which Ray's subreaper hides.

Every Ray worker imports this file at its start, so it imports nothing else.
"""

from __future__ import annotations

import signal


def keep_exit_codes() -> None:
    """Restore the default handling of SIGCHLD.

    With its subreaper on, Ray 2.60 ignores SIGCHLD in drivers and workers. The kernel then forgets exit codes, and subprocess reports 0 for
    every child. The price: orphans that a worker adopts stay zombies until the worker ends.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
