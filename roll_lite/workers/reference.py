"""The frozen policy that KL is measured against."""

from __future__ import annotations

from roll_lite.distributed.dataflow import Block, Shard
from roll_lite.workers.model import ModelWorker


class ReferenceWorker(ModelWorker):
    def log_probs(self, shard: Shard, distribution: bool = False) -> Block | None:
        """`distribution`: those of the whole vocabulary as well. With kept_ids in the shard, over the kept tokens only."""
        whole = {"distribution": "ref_distribution"} if distribution else {}
        return self._forward(shard, {"log_probs": "ref_log_probs", **whole})
