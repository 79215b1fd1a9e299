"""Batches by reference: joins, missing columns, and what passes through the driver."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import ray
import torch
from ray import cloudpickle

from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.cluster import Cluster, ClusterSpec, start_cluster
from roll_lite.distributed.dataflow import Batch, BatchShard, Block, put_block
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.worker import Worker


def rows_of(samples: list[int]) -> DataProto:
    return DataProto(
        {
            "sample": torch.tensor(samples),
            "score": torch.tensor([sample / 10 for sample in samples]),
            "domain": object_column(f"d{sample % 2}" for sample in samples),
        }
    )


def tokens_of(samples: list[int], length: int = 0) -> Block:
    """Sample s has s + 2 tokens (or `length`), all of them s."""
    ids = [torch.full((length or sample + 2,), sample) for sample in samples]
    return put_block(DataProto({"sample": torch.tensor(samples, dtype=torch.int64), "input_ids": Ragged.from_rows(ids, torch.int64)}))


def values_of(samples: list[int]) -> Block:
    values = [torch.full((sample + 1,), sample / 2) for sample in samples]
    return put_block(DataProto({"sample": torch.tensor(samples, dtype=torch.int64), "values": Ragged.from_rows(values, torch.float32)}))


def test_columns_are_joined_by_sample(ray_local: object) -> None:
    batch = Batch(rows_of([4, 1, 3, 2, 0]), [tokens_of([0, 1, 2]), tokens_of([4, 3])])
    batch.add([values_of([3, 0]), values_of([2, 4, 1])])
    first, second = batch.shards([np.array([2, 0, 4]), np.array([1, 3])], ["input_ids", "values", "score", "domain"])
    rows = first.materialize()
    assert rows.keys() == ("sample", "input_ids", "values", "score", "domain")
    assert rows.tensor("sample").tolist() == [3, 4, 0]
    assert [row.tolist() for row in rows.ragged("input_ids").rows()] == [[3] * 5, [4] * 6, [0] * 2]
    assert [row.tolist() for row in rows.ragged("values").rows()] == [[1.5] * 4, [2.0] * 5, [0.0]]
    assert rows.tensor("score").tolist() == pytest.approx([0.3, 0.4, 0.0])
    assert rows.objects("domain").tolist() == ["d1", "d0", "d0"]
    assert [row.tolist() for row in second.materialize().ragged("values").rows()] == [[0.5] * 2, [1.0] * 3]


def test_columns_of_some_rows_come_first_under_other_numbers_and_the_rest_later(ray_local: object) -> None:
    """What was computed of samples 7, 8 and 9 belongs to the batch's 3 and 1, and to nobody."""
    batch = Batch(rows_of([4, 1, 3, 2]), [tokens_of([4, 1, 3, 2])])
    assert batch.lacking(["input_ids", "score"]).tolist() == [] and batch.lacking(["values"]).tolist() == [0, 1, 2, 3]
    early = values_of([7, 8, 9])
    batch.add([early.renumbered({9: 1, 7: 3})])
    assert batch.lacking(["input_ids", "values"]).tolist() == [0, 3] and "values" not in batch
    rest = batch.take(batch.lacking(["values"]))
    assert rest.rows.tensor("sample").tolist() == [4, 2]
    batch.add([values_of([2, 4])])
    (shard,) = batch.shards([np.arange(4)], ["values"])
    assert [row.tolist() for row in shard.materialize().ragged("values").rows()] == [[2.0] * 5, [4.5] * 10, [3.5] * 8, [1.0] * 3]
    assert len(early.renumbered({}).samples) == 0
    with pytest.raises(AssertionError, match="'values' is there already for samples .3."):
        batch.add([early.renumbered({8: 3})])


def test_a_shard_names_only_the_objects_that_have_some_of_its_rows(ray_local: object) -> None:
    """One block over three objects, as engines write them: sample s has s + 2 tokens s, and rows that are nobody's lie beside them."""
    stored = [tokens_of(samples).refs[0] for samples in ([9, 0, 1], [2, 8], [3])]
    block = Block(tuple(stored), ("input_ids",), np.arange(4), np.array([0, 0, 1, 2], np.int32), np.array([1, 2, 0, 0], np.int32))
    first, second = Batch(rows_of([0, 1, 2, 3]), [block]).shards([np.array([3, 0, 1]), np.array([2])], ["input_ids"])
    assert [set(shard.pieces[0].refs) for shard in (first, second)] == [{stored[0], stored[2]}, {stored[1]}]
    assert [row.tolist() for row in first.materialize().ragged("input_ids").rows()] == [[3] * 5, [0] * 2, [1] * 3]
    assert second.materialize().ragged("input_ids").values.tolist() == [2] * 4


def test_an_empty_shard_has_all_columns(ray_local: object) -> None:
    batch = Batch(rows_of([0, 1]), [tokens_of([0, 1])])
    empty, full = batch.shards([np.array([], dtype=np.int64), np.array([0, 1])], ["input_ids", "score"])
    assert len(empty) == 0 and len(full) == 2
    rows = empty.materialize()
    assert len(rows) == 0 and rows.keys() == ("sample", "input_ids", "score")
    assert rows.ragged("input_ids").dtype == torch.int64


def test_what_a_worker_gets_is_its_own(ray_local: object) -> None:
    (shard,) = Batch(rows_of([0, 1]), [tokens_of([0, 1])]).shards([np.array([0, 1])], ["input_ids"])
    shard.materialize().ragged("input_ids").values.fill_(7)
    assert shard.materialize().ragged("input_ids").values.tolist() == [0, 0, 1, 1, 1]


def test_missing_columns_name_key_and_samples(ray_local: object) -> None:
    batch = Batch(rows_of([5, 6, 7]), [tokens_of([5, 6, 7]), values_of([5])])
    with pytest.raises(AssertionError, match=r"values: missing for samples \[6 7\]"):
        batch.shards([np.array([0, 1, 2])], ["values"])
    assert [shard.materialize().ragged("values").values.tolist() for shard in batch.shards([np.array([0])], ["values"])] == [[2.5] * 6]
    with pytest.raises(KeyError, match="returns"):
        batch.shards([np.array([0])], ["returns"])
    assert batch.keys() == ["sample", "score", "domain", "input_ids"]


def test_blocks_that_do_not_belong(ray_local: object) -> None:
    batch = Batch(rows_of([0, 1]), [tokens_of([0])])
    with pytest.raises(AssertionError, match=r"input_ids has rows for samples \[9\], not in this batch"):
        batch.add([tokens_of([9])])
    with pytest.raises(AssertionError, match=r"'input_ids' is there already for samples \[0\]"):
        batch.add([tokens_of([0, 1])])
    with pytest.raises(AssertionError, match="do not pass through the driver"):
        Batch(DataProto({"sample": torch.tensor([0]), "input_ids": Ragged.from_rows([torch.tensor([1])])}))
    with pytest.raises(AssertionError, match="unique"):
        Batch(rows_of([1, 1]))


def test_driver_adds_row_columns(ray_local: object) -> None:
    batch = Batch(rows_of([2, 0]), [tokens_of([0, 2])]).with_rows(loss_weight=torch.tensor([0.25, 0.75]))
    (shard,) = batch.shards([np.array([1, 0])], ["loss_weight", "input_ids"])
    assert shard.materialize().tensor("loss_weight").tolist() == [0.75, 0.25]


# ---------------------------------------------------------------- with workers


class Producer(Worker):
    def produce(self, samples: list[int], length: int) -> Block:
        return tokens_of(samples, length)

    def look(self, shard: BatchShard) -> tuple[int, Block]:
        rows = shard.materialize()
        values = Ragged(
            torch.zeros(int((rows.lengths - 1).sum())), torch.cat([torch.zeros(1, dtype=torch.int64), (rows.lengths - 1).cumsum(0)])
        )
        return int(rows.lengths.sum()), put_block(DataProto({"sample": rows.tensor("sample"), "values": values}))


@pytest.fixture(scope="module")
def producers(ray_local: object) -> Iterator[Cluster[Producer]]:
    cluster = start_cluster(ClusterSpec("producers", anywhere(1)), Producer)
    yield cluster
    cluster.shutdown()


def test_bytes_through_the_driver_do_not_grow_with_the_response_length(producers: Cluster[Producer]) -> None:
    def traffic(length: int) -> int:
        """Bytes of all that the driver holds, sends and receives in one round trip."""
        samples = list(range(64))
        produced = producers.one(Producer.produce, samples, length)
        batch = Batch(rows_of(samples), [produced])
        shards = batch.shards([np.arange(64)], ["input_ids", "score"])
        (answer,) = producers.start_scatter(Producer.look, shards).result()
        batch.add([answer[1]])
        assert answer[0] == 64 * length
        return sum(len(cloudpickle.dumps(thing)) for thing in (produced, batch, shards, answer))

    short, long = traffic(10), traffic(10_000)
    assert abs(long - short) < 64, f"{short} bytes at 10 tokens a sample, {long} at 10,000"
    assert long < 64 * 400, "a few hundred bytes a sample"


def test_the_store_does_not_fill(producers: Cluster[Producer]) -> None:
    """Each round puts 40 MB; the session's store has 200 MB. Spilling to disk would hide a leak, so used memory is what counts."""
    total = ray.cluster_resources()["object_store_memory"]
    for _ in range(12):
        block = producers.one(Producer.produce, list(range(5)), 1_000_000)
        batch = Batch(rows_of(list(range(5))), [block])
        producers.start_scatter(Producer.look, batch.shards([np.arange(5)], ["input_ids"])).result()
        del block, batch
    used = total - ray.available_resources()["object_store_memory"]
    assert used < 0.6 * total, f"{used / 1e6:.0f} of {total / 1e6:.0f} MB are still taken"
    assert not has_spilled()


def has_spilled() -> bool:
    """Whether Ray had to move objects to disk because the store was full."""
    from ray._private.internal_api import memory_summary

    return "Spilled" in memory_summary(address=ray.get_runtime_context().gcs_address, stats_only=True)
