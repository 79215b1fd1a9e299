"""A driver program for the session tests: starts a session with an actor that has a child, says so, and ends as it is told."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from cluster_workers import Adder

from roll_lite.config.schema.run import RayConfig
from roll_lite.distributed.cluster import ClusterSpec, start_cluster
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.ray_session import ray_session


def main() -> None:
    how, address, run_folder = sys.argv[1], sys.argv[2] or None, Path(sys.argv[3])
    with ray_session(RayConfig(address=address, object_store_mb=100), run_folder) as session:
        cluster = start_cluster(ClusterSpec("actor_infer", anywhere(1), log_folder=session.log_folder), Adder)
        child = cluster.one(Adder.start_child)
        waiting = cluster.start_all(Adder.sleep, 1000.0)
        print(f"{session.started} {cluster.group.actors[0]._actor_id.hex()} {child}", flush=True)
        if how == "raise":
            raise ValueError("as told")
        if how == "wait":
            waiting.result()
        if how == "return":
            return
        time.sleep(1000)


main()
