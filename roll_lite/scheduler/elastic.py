"""Choice of engines that leave when nodes are drained, shared by the pipeline and the simulator."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def leaving(nodes: Mapping[int, str], draining: Collection[str]) -> Sequence[int]:
    """Return the engines on draining nodes, except one if no other engine serves. `nodes`: node of each serving engine."""
    doomed = [engine for engine, node in nodes.items() if node in draining]
    return doomed if len(doomed) < len(nodes) else doomed[1:]
