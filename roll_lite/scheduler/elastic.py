"""Choice of the engines that leave a run when nodes are drained. The pipeline and the simulator share it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def leaving(nodes: Mapping[int, str], draining: Collection[str]) -> Sequence[int]:
    """Engines that leave now: those on draining nodes. One stays if no other engine serves. `nodes`: node of each engine that serves."""
    doomed = [engine for engine, node in nodes.items() if node in draining]
    return doomed if len(doomed) < len(nodes) else doomed[1:]
