from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from roll_lite.data.dump_files import damaged, read_header
from roll_lite.data.dumps import dump_parts
from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import DataProto
from roll_lite.distributed.dataflow import Block, put_block
from roll_lite.distributed.worker import Worker
from roll_lite.scheduler.stats import DomainStats, RolloutStats
from roll_lite.workers.rollout import RolloutBatch

T = TypeVar("T")


class ReplayWorker(Worker):
    """Reads a step's batch and prefetches the next one. Tokens go into the object store."""

    def __init__(self, dumps: Mapping[int, Path], steps: int) -> None:
        super().__init__()
        self._dumps = dumps
        self._steps = steps
        self._reader = ThreadPoolExecutor(1, "dumps")
        self._ahead: dict[int, Future[RolloutBatch]] = {}

    def next_batch(self, step: int) -> RolloutBatch:
        batch = (self._ahead.pop(step, None) or self._reader.submit(read_batch, self._dumps[step])).result()
        if step < self._steps:
            self._ahead = {step + 1: self._reader.submit(read_batch, self._dumps[step + 1])}
        return batch


def read_batch(path: Path) -> RolloutBatch:
    rows: list[DataProto] = []
    blocks: list[Block] = []
    for part in dump_parts(path):
        per_token = [name for name in part.columns if KEYS[name].kind in (Kind.TOKENS, Kind.TRANSITIONS)]
        rows.append(part.select(name for name in part.columns if name not in per_token))
        if len(part):
            blocks.append(put_block(part.select(["sample", *per_token])))
    try:
        return RolloutBatch(DataProto.concat(rows), blocks, recorded_stats(read_header(path).stats))
    except (KeyError, TypeError) as error:
        raise damaged(path, error) from error


def recorded_stats(recorded: Mapping[str, Any]) -> RolloutStats:
    domains = {name: _known(DomainStats, counts) for name, counts in recorded["domains"].items()}
    return _known(RolloutStats, {**recorded, "domains": domains})


def _known(cls: type[T], recorded: Mapping[str, Any]) -> T:
    found = {}
    for name in (field.name for field in fields(cls) if field.name in recorded):  # type: ignore[arg-type]
        value = recorded[name]
        counts = isinstance(value, dict) and all(isinstance(count, int) for count in value.values())
        found[name] = Counter(value) if counts else value
    return cls(**found)
