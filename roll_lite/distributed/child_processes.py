"""Exit codes of child processes, which a Ray that cleans up after killed workers would take away.

A file of its own: every worker of Ray's imports it at its start, and nothing else should come with it.
"""

from __future__ import annotations

import signal


def keep_exit_codes() -> None:
    """With its subreaper on, Ray 2.60 ignores SIGCHLD in drivers and workers: the kernel then forgets how children ended, and
    subprocess reports 0 for every one of them. The price of asking for it again is a zombie for each orphan that a worker adopts,
    until the worker ends. Main thread only."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
