"""Nodes of a cluster: links between processes of this machine, and, nightly, two hosts."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from support_hosts import hosts

from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import Slot
from roll_lite.doctor import nodes
from roll_lite.doctor.nodes import NodeWorker, check_nodes, judge_links
from roll_lite.pipeline.node_facts import NodeFacts


def test_bandwidth_is_measured_in_each_group(ray_local: object) -> None:
    cluster = start_cluster(ClusterSpec("doctor", [Slot(), Slot(), Slot()], timeout_s=120), NodeWorker)
    try:
        # A rank outside of the group has no such device: it makes nothing on it.
        speeds = [cluster.all(NodeWorker.measure, "cpu", ranks) for ranks in ((0, 1), (1, 2), (0, 1, 2))]
    finally:
        cluster.shutdown()
    assert [[speed > 0 for speed in own] for own in speeds] == [[True, True, False], [False, True, True], [True, True, True]]
    assert max(map(max, speeds)) < 1e12


def test_a_link_that_is_slower_than_the_others_is_named() -> None:
    measured, slow = judge_links("gloo", ["a", "b", "c", "d"], [1e9, 1e8, 1.2e9, 9e8])
    assert measured.status == "ok" and measured.value == "0.10 to 1.20 GB/s between neighbours, 0.90 GB/s in an all-reduce over all"
    assert slow.status == "warning" and slow.value == "b to c: 0.10 GB/s" and "GLOO_SOCKET_IFNAME" in slow.remedy
    assert len(list(judge_links("NCCL", ["a", "b"], [1e8, 1e8]))) == 1


def test_nodes_are_shown_in_a_table_with_their_faults(ray_local: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one node of this machine, and facts of a second one."""
    monkeypatch.setattr(nodes, "ray_session", lambda *_: nullcontext())
    here, *rest = check_nodes("auto", tmp_path)
    header, _, row = here.value.splitlines()[1:]
    assert header.split("  ")[0] == "node" and "open files" in header and " at most " in row
    assert all(one.node and one.status == "ok" for one in rest if one.check in ("versions", "sandbox"))
    look_at = nodes.look_at

    def looked_at(ids: list[str], run_folder: Path) -> dict[str, NodeFacts]:
        ((node, own),) = look_at(ids, run_folder).items()
        return {node: NodeFacts(own.versions, 8.0, 0.5, {"10.0.0.2": "timed out"}, -60.0)}

    monkeypatch.setattr(nodes, "look_at", looked_at)
    told = {one.value: one for one in check_nodes("auto", tmp_path) if one.remedy}
    (unreachable,) = (one for value, one in told.items() if "cannot connect to 10.0.0.2: timed out" in value)
    (clock,) = (one for value, one in told.items() if "its clock differs from the driver's by -60 s" in value)
    assert unreachable.status == "fault" and clock.status == "warning"
    assert any("0.5 GiB are free" in value for value in told)


@pytest.mark.nightly
@pytest.mark.timeout(590)
def test_two_hosts() -> None:
    with hosts(2) as both:
        command = [sys.executable, "-m", "roll_lite.cli", "doctor", "--nodes"]
        done = subprocess.run(both.on_first(command), capture_output=True, text=True, env=both.environment, check=False)
        told = done.stdout + done.stderr
        assert done.returncode == 0 and "Traceback" not in told, told
        assert re.search(r"2 nodes, all with python 3\.\d+, torch ", told)
        for address in both.addresses:
            assert re.search(rf"^{address} +none +\d+\.\d\d GiB free +\d+ at most +(namespaces|landlock) ", told, re.MULTILINE), told
        assert re.search(
            r"^ok +gloo +\d+\.\d\d to \d+\.\d\d GB/s between neighbours, \d+\.\d\d GB/s in an all-reduce over all$", told, re.M
        )
        both.set_link(1, "down")
        done = subprocess.run(both.on_first(command), capture_output=True, text=True, env=both.environment, check=False)
        assert done.returncode == 1 and "Traceback" not in done.stdout + done.stderr, done.stdout + done.stderr
