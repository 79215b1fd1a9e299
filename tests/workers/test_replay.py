"""What the rollout service dumps and a replay gives back, on Ray: the same batch for the driver, the same tokens in the object store."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pandas
import pytest
from rollout_cases import changed, engines, rollouts, spec_of, toy_model, with_baselines
from support_dumps import assert_same

from roll_lite.config.schema.domains import GroupFilterConfig
from roll_lite.config.schema.models import ModelConfig
from roll_lite.data.dump_files import dump_file, found_dumps
from roll_lite.data.dumps import load_dump
from roll_lite.data.proto import DataProto
from roll_lite.distributed.cluster import ClusterSpec, RankFailed, start_cluster
from roll_lite.distributed.dataflow import Batch
from roll_lite.distributed.placement import anywhere
from roll_lite.scheduler.stats import RolloutStats
from roll_lite.workers.replay import ReplayWorker, recorded_stats
from roll_lite.workers.rollout import RolloutBatch, RolloutSpec, RolloutWorker
from roll_lite.workers.rollout_output import DumpSpec

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return toy_model(tmp_path_factory.mktemp("model"))


def whole(batch: RolloutBatch) -> DataProto:
    """Rows and tokens, as a training rank gets them that has all of them."""
    travelling = Batch(batch.rows, batch.blocks)
    (shard,) = travelling.shards([np.arange(len(batch.rows))], travelling.keys())
    return shard.materialize()


def dumping(spec: RolloutSpec, folder: Path) -> RolloutSpec:
    return replace(with_baselines(spec), dumps=DumpSpec(folder, {"seed": spec.config.seed}, "a checksum"))


def test_a_replay_gives_what_was_dumped_and_the_dump_what_trained(model: ModelConfig, tmp_path: Path) -> None:
    folder = tmp_path / "dumps"
    with engines(model, 2, response_tokens=6, failure_rate=0.2) as infer:
        with rollouts(dumping(spec_of(model, tmp_path), folder), infer) as service:
            batches = [service.one(RolloutWorker.next_batch, 8, step) for step in (1, 2)]
            expected = [whole(batch) for batch in batches]
        assert sorted(found_dumps(folder)) == [1, 2], "written when the service has ended"
        for step, batch in enumerate(expected, 1):
            assert_same(load_dump(dump_file(folder, step)), batch)
        replay = start_cluster(ClusterSpec("replay", anywhere(1)), ReplayWorker, found_dumps(folder), 2)
        for step, (batch, then) in enumerate(zip(expected, batches, strict=True), 1):
            again = replay.one(ReplayWorker.next_batch, step)
            assert_same(whole(again), batch)
            assert asdict(again.stats)["domains"].keys() == then.stats.domains.keys()
            assert again.stats.wall_s == then.stats.wall_s
            assert again.stats.domains["long"] == then.stats.domains["long"]
        assert_same(whole(replay.one(ReplayWorker.next_batch, 1)), expected[0])
        replay.shutdown()


@pytest.mark.nightly
def test_what_was_filtered_is_in_the_dump_with_its_cause_and_does_not_train(model: ModelConfig, tmp_path: Path) -> None:
    """The reward of `math` is 1 for all, `long` scores the length: all of its groups are flat."""
    spec = dumping(spec_of(model, tmp_path), tmp_path / "dumps")
    chosen = GroupFilterConfig(name="mean", above=2.0, tries=3, when_short="continue")
    spec = changed(spec, rollout=spec.config.rollout.model_copy(update={"filter": chosen}))
    with engines(model, 1, response_tokens=6) as infer, rollouts(spec, infer) as service:
        expected = whole(service.one(RolloutWorker.next_batch, 8, 1))
    assert set(expected.objects("domain").tolist()) == {"long"}
    frame = pandas.read_parquet(dump_file(tmp_path / "dumps", 1))
    filtered = frame[frame["outcome"] == "filtered"]
    assert set(filtered["domain"]) == {"math"} and set(filtered["failure"]) == {"mean not above 2"} and filtered["sample"].isna().all()
    assert filtered["input_ids"].notna().all() and set(filtered["score"]) == {1.0}
    assert frame["group"].is_monotonic_increasing
    assert_same(load_dump(dump_file(tmp_path / "dumps", 1)), expected)


@pytest.mark.nightly
def test_a_dump_that_cannot_be_written_is_a_failure_of_the_run(model: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "dumps").write_text("in the way")
    with engines(model, 1, response_tokens=6) as infer, pytest.raises(RankFailed, match="FileExistsError|NotADirectoryError"):
        with rollouts(dumping(spec_of(model, tmp_path), tmp_path / "dumps"), infer) as service:
            service.one(RolloutWorker.next_batch, 4, 1)
            service.one(RolloutWorker.next_batch, 4, 2)


def test_a_damaged_dump_ends_the_run_with_its_name(tmp_path: Path) -> None:
    (tmp_path / "step_000001.parquet").write_bytes(b"PAR1 and no more")
    replay = start_cluster(ClusterSpec("replay", anywhere(1)), ReplayWorker, found_dumps(tmp_path), 1)
    with pytest.raises(RankFailed, match=r"step_000001.parquet is damaged"):
        replay.one(ReplayWorker.next_batch, 1)


def test_counts_of_another_version_are_left_out() -> None:
    recorded = {"domains": {"add": {"delivered": 3, "finish_reasons": {"stop": 4}, "unheard_of": 1}}, "version": 2, "later": 1.0}
    stats = recorded_stats(recorded)
    assert isinstance(stats, RolloutStats) and stats.version == 2
    assert stats.domains["add"].delivered == 3 and stats.domains["add"].finish_reasons["stop"] == 4
    assert stats.domains["add"].finish_reasons["length"] == 0
