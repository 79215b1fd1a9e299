from __future__ import annotations

import pytest

from roll_lite.scheduler.elastic import leaving


@pytest.mark.parametrize(
    ("nodes", "draining", "leave"),
    [
        ({0: "a", 1: "b"}, {"b"}, [1]),
        ({0: "a", 1: "b", 2: "b"}, {"b", "c"}, [1, 2]),
        ({0: "a", 1: "a"}, {"a"}, [1]),  # one stays until another serves
        ({1: "a"}, {"a"}, []),
        ({0: "a"}, set(), []),
    ],
)
def test_engines_leave_draining_nodes_unless_nobody_else_serves(nodes: dict[int, str], draining: set[str], leave: list[int]) -> None:
    assert leaving(nodes, draining) == leave
