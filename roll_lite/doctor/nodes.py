"""Check every node of a Ray cluster; measure the bandwidth between nodes with gloo and NCCL."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import ray

from roll_lite.config.schema.run import RayConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.place import on_node
from roll_lite.distributed.placement import Slot
from roll_lite.distributed.ray_session import ray_session
from roll_lite.distributed.worker import Worker
from roll_lite.doctor.machine import check_machine
from roll_lite.doctor.packages import Diagnosis
from roll_lite.files import first_line
from roll_lite.pipeline.node_facts import differences, look_at, node_table, warnings

BYTES, REPEATS = 32 << 20, 4
"""Size of a measured message, and number of tries; the fastest counts."""
CALL_SECONDS = 120.0
SLOW = 4.0
"""Factor by which the median pair of nodes is faster than a slow pair."""
COLUMNS = ("gpus", "shared memory", "open files", "sandbox")
LINK = "look at this link: its interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), cable and switch port"


class NodeWorker(Worker):
    """Process on each node; together they form a process group."""

    def check(self, run_folder: Path) -> list[Diagnosis]:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # Ray hides GPUs from workers that reserve none
        return [replace(one, node=ray.util.get_node_ip_address()) for one in check_machine(run_folder)]

    def measure(self, device: str, ranks: Sequence[int]) -> float:
        """Measure an all-reduce among `ranks`, in bytes per second sent by each; 0 on other ranks. All ranks must call this."""
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            self.init_process_group()
        group = dist.new_group(list(ranks))
        if self.rank not in ranks:
            return 0.0
        data, best = torch.zeros(BYTES, dtype=torch.uint8, device=device), float("inf")
        for _ in range(REPEATS):
            started = time.perf_counter()
            dist.all_reduce(data, group=group)
            data[0].item()  # waits for a GPU
            best = min(best, time.perf_counter() - started)
        return 2 * BYTES * (1 - 1 / len(ranks)) / best


def check_nodes(address: str, run_folder: Path) -> Iterator[Diagnosis]:
    """Yield a table of the cluster's nodes, and diagnoses of nodes and links."""
    with ray_session(RayConfig(address=address), None):
        alive = sorted(
            (node for node in ray.nodes() if node["Alive"]), key=lambda node: node["NodeID"] != ray.get_runtime_context().get_node_id()
        )
        names = {node["NodeID"]: node["NodeManagerAddress"] for node in alive}
        facts = {names[node]: own for node, own in look_at(list(names), run_folder).items()}
        slots = [Slot(on_node(node)) for node in names]
        cluster = start_cluster(ClusterSpec("doctor", slots, timeout_s=CALL_SECONDS), NodeWorker)
        found = [one for own in cluster.all(NodeWorker.check, run_folder) for one in own]
        cells = {name: {one.node: one.value.partition(",")[0] for one in found if one.check == name} for name in COLUMNS}
        yield Diagnosis("nodes", node_table(facts, cells))
        yield from found
        with_gpus = [rank for rank, node in enumerate(alive) if node["Resources"].get("GPU")]
        with_engines = {names[alive[rank]["NodeID"]]: {"actor_infer"} for rank in with_gpus or range(len(alive))}
        for problem in differences(facts, defaultdict(set, with_engines)):
            yield Diagnosis("nodes", problem, "until then a run over these nodes ends at its start")
        for warning in warnings(facts):
            yield Diagnosis("nodes", warning, "have a time server keep the clocks; remove files", "warning")
        for device, backend, ranks in ("cpu", "gloo", range(len(alive))), ("cuda", "NCCL", with_gpus):
            places = [names[alive[rank]["NodeID"]] for rank in ranks]
            speeds: list[float] = []
            for group in [*pairwise(ranks), tuple(ranks)] if len(ranks) > 1 else ():
                try:
                    speeds.append(max(cluster.all(NodeWorker.measure, device, group)))
                except RuntimeError as error:  # also after CALL_SECONDS
                    between = " to ".join(names[alive[rank]["NodeID"]] for rank in group)
                    yield Diagnosis(backend, f"{between}: {first_line(error)}", LINK)
                    return
            if speeds:
                yield from judge_links(backend, places, speeds)


def judge_links(backend: str, places: Sequence[str], speeds: Sequence[float]) -> Iterator[Diagnosis]:
    """Report bandwidths, and warn of slow links. `places`: node addresses. `speeds`: bytes per second between neighbours in `places`, then
    in an all-reduce over all."""
    *pairs, together = speeds
    told = f"{min(pairs) / 1e9:.2f} to {max(pairs) / 1e9:.2f} GB/s between neighbours, {together / 1e9:.2f} GB/s in an all-reduce over all"
    yield Diagnosis(backend, told)
    for pair, speed in zip(pairwise(places), pairs, strict=True):
        if speed * SLOW < statistics.median(pairs):
            yield Diagnosis(backend, f"{' to '.join(pair)}: {speed / 1e9:.2f} GB/s", LINK, "warning")
