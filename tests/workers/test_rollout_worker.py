"""The whole way on Ray: rollout worker, engine workers with scripted engines, reward workers."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle
from ray.exceptions import RayActorError
from rollout_cases import USER, DoomedWorker, changed, domain, engines, role_of, rollouts, spec_of, toy_model, with_baselines
from support_local_engine import ask

from roll_lite.config.schema.domains import FormatConfig, RewardConfig, RewardTermConfig, SamplingConfig
from roll_lite.config.schema.models import ModelConfig
from roll_lite.data.samples import GenerationRequest, Sampling, TokenRow, Turn
from roll_lite.distributed.cluster import Cluster, ClusterSpec, Pending, RankFailed, start_cluster
from roll_lite.distributed.dataflow import Batch
from roll_lite.distributed.liveness import is_running
from roll_lite.distributed.placement import anywhere
from roll_lite.scheduler.engines import EngineLost
from roll_lite.scheduler.stats import RolloutStats
from roll_lite.workers.infer import InferWorker, RemoteEngine
from roll_lite.workers.judge import JudgeAddress
from roll_lite.workers.rollout import RolloutBatch, RolloutWorker, sampling_of

pytestmark = pytest.mark.usefixtures("ray_local")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return toy_model(tmp_path_factory.mktemp("model"))


def contents(result: Any) -> tuple[dict[str, Any], list[int]]:
    (shard,) = Batch(result.rows, result.blocks).shards([np.arange(len(result.rows))], ["input_ids"])
    columns = {name: result.rows[name].tolist() for name in ("group", "index", "attempt", "prompt_uid", "epoch", "domain")}
    return columns, shard.materialize()["input_ids"].values.tolist()


def test_batches_repeat_and_resume_and_their_tokens_stay_in_the_object_store(model: ModelConfig, tmp_path: Path) -> None:
    spec = spec_of(model, tmp_path)
    with engines(model, 2, response_tokens=6, failure_rate=0.2) as infer:
        with rollouts(spec, infer) as service:
            service.one(RolloutWorker.set_version, 5)
            first = service.one(RolloutWorker.next_batch, 8, 1)
            state = service.one(RolloutWorker.state_dict)
            second = contents(service.one(RolloutWorker.next_batch, 8, 2))
            validated, stats = service.one(RolloutWorker.evaluate, 2, GREEDY, 2)
            check_batch(first)
        with rollouts(spec, infer) as service:
            service.one(RolloutWorker.load_state_dict, state)
            assert contents(service.one(RolloutWorker.next_batch, 8, 2)) == second
    assert max(second[0]["attempt"]) > 0, "nothing failed, the test proves too little"
    assert stats.version == 5
    assert len(validated) == 10 - stats.domains["long"].failed
    assert set(validated["epoch"].tolist()) == {-1}
    assert {path.name for path in (tmp_path / "samples").iterdir()} == {f"{name}.jsonl" for name in WRITTEN}


GREEDY = dict.fromkeys(("long", "math"), SamplingConfig(max_tokens=40).model_copy(update={"temperature": 0.0}))
WRITTEN = ("step_000001", "step_000002", "validation_000002")


@pytest.mark.nightly
def test_a_reward_that_cannot_score_is_told_before_the_engines_are_ready(model: ModelConfig, tmp_path: Path) -> None:
    broken = domain(tmp_path, "sums", 1.0, f"{USER}.raises")
    spec = changed(spec_of(model, tmp_path), domains={"sums": broken.model_copy(update={"reward": RewardConfig(name=f"{USER}.raises")})})
    with engines(model, 1) as infer, pytest.raises(RankFailed) as told, rollouts(spec, infer):
        raise AssertionError("it started")
    message = str(told.value)
    assert "domains.sums.reward: scoring a first response, 'The answer is 1.', failed" in message
    assert "roll-lite reward --domain sums" in message


@pytest.mark.nightly
def test_beside_a_judge_of_the_run_every_other_part_is_tried_before_any_engine(model: ModelConfig, tmp_path: Path) -> None:
    """There is no engine here, and no judge answers at the address."""
    terms = [RewardTermConfig(name=name) for name in (f"{USER}.raises", f"{USER}.length", "repetition", f"{USER}.short")]
    judge = RewardConfig(name="judge", args={"server": "main"}, terms=terms, retries=0)
    own = RewardConfig(name=f"{USER}.raises", terms=[RewardTermConfig(name="judge", args={"server": "main"})], retries=0)
    sound = RewardConfig(name="judge", args={"server": "main"}, terms=terms[1:3])
    rewards = {"judged": judge, "own": own, "sound": sound}
    found = {name: domain(tmp_path, name, 1.0, "math").model_copy(update={"reward": reward}) for name, reward in rewards.items()}
    service = start_cluster(ClusterSpec("rollouts", anywhere(1)), RolloutWorker, changed(spec_of(model, tmp_path), domains=found))
    try:
        with pytest.raises(RankFailed) as told:
            service.one(RolloutWorker.prepare, {}, {"main": JudgeAddress(("http://127.0.0.1:9/v1",), "main")})
    finally:
        service.shutdown()
    places = re.findall(r"(domains\.\S+): scoring a first response, .* failed: reward", str(told.value))
    assert sorted(set(places)) == ["domains.judged.reward.terms.0", "domains.judged.reward.terms.3", "domains.own.reward"]


@pytest.mark.nightly
def test_groups_that_are_finished_can_be_had_before_their_batch(model: ModelConfig, tmp_path: Path) -> None:
    spec = changed(replace(spec_of(model, tmp_path), samples_folder=None), actor_infer=role_of(running=4), deterministic=False)
    with engines(model, 2, response_tokens=6, seconds_per_token=0.1) as infer, rollouts(spec, infer) as service:
        making = service.start_one(RolloutWorker.next_batch, 8, 1)
        parts: list[RolloutBatch] = []
        known: set[int] = set()
        while making.answer() is None:
            rows, tokens = service.one(RolloutWorker.finished, known, 2)
            groups = set(rows["group"].tolist())
            assert not groups & known and (len(groups) >= 2 or not groups)
            if groups:
                known |= groups
                parts.append(RolloutBatch(rows, [tokens], RolloutStats({})))
            time.sleep(0.1)
        whole = named_tokens(making.result())
        assert parts and len(known) < 8, "some of it early, not all at once"
        for part in parts:
            assert named_tokens(part).items() <= whole.items()
        assert len(service.one(RolloutWorker.finished, [], 0)[0]) == 0, "the next one was not asked for"


def named_tokens(batch: RolloutBatch) -> dict[tuple[int, int], list[int]]:
    (shard,) = Batch(batch.rows, batch.blocks).shards([np.arange(len(batch.rows))], ["input_ids"])
    tokens = [row.tolist() for row in shard.materialize().ragged("input_ids").rows()]
    return dict(zip(zip(batch.rows["group"].tolist(), batch.rows["index"].tolist(), strict=True), tokens, strict=True))


def check_batch(result: RolloutBatch) -> None:
    rows = result.rows
    assert rows["sample"].tolist() == list(range(len(rows)))
    assert len(set(rows["group"].tolist())) == 8
    of_group = dict(zip(rows["group"].tolist(), rows["domain"].tolist(), strict=True))
    assert sorted(of_group.values()) == ["long"] * 6 + ["math"] * 2
    assert not {"input_ids", "response_mask", "rollout_log_probs"} & set(rows.keys())
    assert set(rows["response_length"].tolist()) == {6}
    assert set(rows["score"].tolist()) == {1.0, float(len("6 tokens"))}
    halves = [np.arange(0, len(rows), 2), np.arange(1, len(rows), 2)]
    odd = Batch(rows, result.blocks).shards(halves, ["sample", "input_ids", "response_mask", "rollout_log_probs"])[1].materialize()
    assert odd["sample"].tolist() == halves[1].tolist()
    assert odd["input_ids"].lengths.tolist() == [length + 6 for length in rows["prompt_length"].tolist()[1::2]]
    assert int(odd["response_mask"].values.sum()) == len(halves[1]) * 6


@pytest.mark.nightly
def test_what_passes_through_service_and_driver_does_not_grow_with_the_responses(model: ModelConfig, tmp_path: Path) -> None:
    def traffic(tokens: int) -> tuple[int, int]:
        """Bytes from an engine's worker to the service for eight samples, and from the service to the driver for a batch."""
        maths = domain(tmp_path, "math", 1, f"{USER}.tricky").model_copy(update={"sampling": SamplingConfig(max_tokens=tokens)})
        spec = changed(replace(spec_of(model, tmp_path), samples_folder=None), domains={"math": maths})
        with engines(model, 1, response_tokens=tokens) as infer, rollouts(spec, infer) as service:
            worker = infer.group.actors[0]
            sampling = Sampling(temperature=1.0, max_tokens=tokens)
            ray.get(worker.submit.remote([GenerationRequest(f"r{i}", (1, 2), sampling) for i in range(8)]))
            collected: list[Any] = []
            while len(collected) < 8:
                collected += ray.get(worker.collect.remote())[0].turns
            assert {turn.length for turn in collected} == {tokens}
            batch = service.one(RolloutWorker.next_batch, 4, 1)
            assert set(batch.rows["response_length"].tolist()) == {tokens}
            return len(cloudpickle.dumps(collected)), len(cloudpickle.dumps((batch.rows, batch.blocks)))

    short, long = traffic(1000), traffic(4000)
    # Tokens and log-probs of 8 samples and 16 are 100 and 200 KB, and four times that; a block more or less to refer to is a hundred bytes.
    # (Ray sends what is smaller than 100 KB along with its reference.)
    assert abs(long[0] - short[0]) < 500, "what an engine's worker hands on"
    assert abs(long[1] - short[1]) < 500, "what the driver gets"


@pytest.mark.nightly
def test_greedy_baselines_and_forms_reach_rows_and_dumps(model: ModelConfig, tmp_path: Path) -> None:
    spec = with_baselines(spec_of(model, tmp_path))
    maths = spec.config.domains["math"]
    form = RewardConfig(name=f"{USER}.tricky", format=FormatConfig(pattern=r"^6 tok"))
    spec = changed(spec, domains={**spec.config.domains, "math": maths.model_copy(update={"reward": form})})
    with engines(model, 2, response_tokens=6, failure_rate=0.2) as infer, rollouts(spec, infer) as service:
        result = service.one(RolloutWorker.next_batch, 8, 1)
        validated, _ = service.one(RolloutWorker.evaluate, 1, GREEDY, 1)
    rows = result.rows
    scores = {"long": float(len("6 tokens")), "math": 1.0}
    assert rows["baseline_score"].tolist() == [scores[name] for name in rows["domain"].tolist()]
    assert rows["format_ok"].tolist() == [float(name == "math") for name in rows["domain"].tolist()]
    assert set(rows["index"].tolist()) == {0, 1, 2, 3}
    assert "baseline_score" not in validated
    lines = [json.loads(line) for line in (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()]
    assert [line["index"] for line in lines if line["baseline"]] == [4] * 8
    assert {line["outcome"] for line in lines if line["baseline"]} == {"accepted"}


def test_keep_masks_are_asked_for_where_something_is_truncated() -> None:
    full, cut = (
        SamplingConfig(),
        [SamplingConfig(top_p=0.9), SamplingConfig(top_k=5), SamplingConfig(min_p=0.1), SamplingConfig(min_tokens=2)],
    )
    assert not sampling_of(full, keep_mask=True).keep_mask
    assert all(sampling_of(config, keep_mask=True).keep_mask for config in cut)
    assert not any(sampling_of(config).keep_mask for config in cut)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", ["works", pytest.param("rests", marks=pytest.mark.nightly), "is stopped"])
def test_the_death_of_the_last_engine_ends_the_run(model: ModelConfig, tmp_path: Path, how: str) -> None:
    """With its own role, rank and cause, although the rollout service is the one that watches over it, and fails too without an engine."""
    script = {"response_tokens": 6} if how == "rests" else {"response_tokens": 500, "seconds_per_token": 1.0}
    with engines(model, 1, **script) as infer:
        victim = infer.one(InferWorker.place).pid
        spec = changed(spec_of(model, tmp_path), engine_silence_s=5.0 if how == "is stopped" else 0.0)
        service = start_cluster(ClusterSpec("rollouts", anywhere(1)), RolloutWorker, spec)
        service.one(RolloutWorker.prepare, {}, {})
        service.one(RolloutWorker.initialize, infer.group.actors)
        waiting: Pending[Any] = service.start_one(RolloutWorker.next_batch, 8, 1)
        if how == "rests":
            waiting.result()
            waiting = infer.start_one(InferWorker.collect, 1, 60.0)
        number = signal.SIGSTOP if how == "is stopped" else signal.SIGKILL
        ended: list[float] = []

        def end() -> None:
            os.kill(victim, number)
            ended.append(time.monotonic())

        threading.Timer(1.0, end).start()
        silence = r"nothing was heard of its process for [\d.]+ s \(limits.engine_silence: 5 s\)"
        cause = silence if how == "is stopped" else f"its process {victim} died"
        with pytest.raises(RankFailed, match=rf"actor_infer rank 0 failed in \w+: {cause}"):
            waiting.result()
        assert time.monotonic() - ended[0] < 60.0
        service.shutdown()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.nightly)])
def test_the_loss_of_one_of_two_engines_is_told_and_costs_no_sample(model: ModelConfig, tmp_path: Path, number: signal.Signals) -> None:
    """Nor the tokens that it had handed out: the other engine goes on from them."""
    with engines(model, 2, DoomedWorker, response_tokens=30, seconds_per_token=0.15) as infer:
        first, second = infer.all(InferWorker.place)
        spec = changed(spec_of(model, tmp_path), engine_silence_s=5.0 if number == signal.SIGSTOP else 0.0, deterministic=False)
        with rollouts(spec, infer) as service:
            ray.get(infer.actors[1].end_once_parts_are_out.remote(number))
            batch = service.one(RolloutWorker.next_batch, 8, 1)
            assert len(batch.rows) == 32 and sum(domain.failed for domain in batch.stats.domains.values()) == 0
            (told,) = service.one(RolloutWorker.lost_engines).items()
            assert told[0] == 1 and re.search("its process" if number == signal.SIGKILL else "limits.engine_silence: 5 s", told[1])
            assert list(infer.lost) == [1] and infer.left == [0]
            assert infer.each(InferWorker.place) == {0: first}
            (silent_s,) = batch.silences
            assert (0 if number == signal.SIGKILL else 5) < silent_s <= 5 + 2 + 1, "asked every 2 s, with 1 s for a look"
            assert len(seams(batch)) >= 4 and max(seams(batch)) >= 2, "of each part a token or more"
            assert not is_running(psutil.Process(second.pid)) if psutil.pid_exists(second.pid) else True
            assert len(service.one(RolloutWorker.next_batch, 8, 2).rows) == 32


def seams(batch: RolloutBatch) -> list[int]:
    """Where another engine went on, of each response: what a scripted engine says goes up by one from token to token."""
    columns = [batch.rows[name].tolist() for name in ("group", "index", "prompt_length", "response_length")]
    tokens = named_tokens(batch)
    found: list[int] = []
    for group, index, prompt, length in zip(*columns, strict=True):
        response = np.array(tokens[group, index][prompt:])
        assert len(response) == length == 30
        found += (np.flatnonzero(np.diff(response) % 97 != 1) + 1).tolist()
    return found


def test_an_engines_death_is_noticed_within_seconds(model: ModelConfig) -> None:
    async def until_noticed(infer: Cluster[InferWorker]) -> float:
        engine = RemoteEngine("e", infer.group.actors[0])
        answer = ask(engine, GenerationRequest("r", (1, 2), Sampling(temperature=1.0, max_tokens=1000)))
        await asyncio.sleep(1.0)
        killed = time.monotonic()
        ray.kill(infer.group.actors[0])
        with pytest.raises(EngineLost, match="its process died"):
            await answer
        return time.monotonic() - killed

    with engines(model, 1, response_tokens=500, seconds_per_token=1.0) as infer:
        assert asyncio.run(until_noticed(infer)) < 60


@pytest.mark.parametrize("tokens", [6, 50_000])  # what Ray keeps in the caller's memory, and in shared memory
def test_what_an_engine_has_delivered_outlives_it(model: ModelConfig, tokens: int) -> None:
    async def generate(infer: Cluster[InferWorker]) -> Turn:
        engine = RemoteEngine("e", infer.group.actors[0])
        return await ask(engine, GenerationRequest("r", (1, 2), Sampling(temperature=1.0, max_tokens=tokens)))

    with engines(model, 1, response_tokens=tokens) as infer:
        turn = asyncio.run(generate(infer))
        os.kill(infer.one(InferWorker.place).pid, signal.SIGKILL)
        with pytest.raises(RayActorError):
            ray.get(infer.actors[0].place.remote())
        assert turn.tokens is not None
        assert read_elsewhere(turn.tokens.block) == tokens + 2
        request, lost = GenerationRequest("r", (1, 2), Sampling(temperature=1.0, max_tokens=9)), infer.actors[0].collect.remote()
        with pytest.raises(ConnectionError, match="^its process died: "):
            asyncio.run(RemoteEngine("e", None)._joined(request, [TokenRow(lost, 0, 3)]))


def read_elsewhere(block: ray.ObjectRef) -> int:
    """Tokens of the block, as another process finds them."""

    @ray.remote(num_cpus=0)
    def length(refs: list[ray.ObjectRef]) -> int:
        return len(ray.get(refs[0]).ragged("input_ids").values)

    found: int = ray.get(length.remote([block]), timeout=30.0)
    return found
