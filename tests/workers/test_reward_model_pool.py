"""Batches for reward models: how samples of several domains come together, and what a failing rank costs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError
from support_models import hf_scores, make_tiny_reward_model, make_tokenizer

from roll_lite.config.schema.domains import FormatConfig, RewardConfig, RewardTermConfig
from roll_lite.config.schema.models import MegatronStrategyConfig, RewardModelConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed import fleet
from roll_lite.distributed.cluster import Cluster, ClusterSpec, start_cluster
from roll_lite.distributed.place import Place
from roll_lite.distributed.placement import anywhere
from roll_lite.distributed.strategy.base import RankLayout
from roll_lite.observability.device_memory import PeaksByPhase
from roll_lite.observability.timers import POOL_WORK
from roll_lite.rewards.base import RewardFailed
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers import reward_model_pool
from roll_lite.workers.reward_model import RewardModelSpec, RewardModelWorker
from roll_lite.workers.reward_model_pool import RewardModelClient, RewardModelPool

USER = "tests.workers.reward_functions"


class Method:
    """Stands for a method of an actor's handle."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def remote(self, *args: Any) -> Awaitable[Any]:
        return asyncio.ensure_future(self._call(*args))


class FakeRank:
    """Scores a text with its length; says what it was asked and in which order."""

    def __init__(self, layout: RankLayout, seconds: float = 0.0) -> None:
        self.own = layout
        self.seconds = seconds
        self.calls: list[list[str]] = []
        self.moves: list[str] = []
        self.error: Exception | None = None
        self.hangs = False
        self.dies_idle = False
        self.comes_back = True
        self.kills = 0
        self.stands_at = Place("another node", 1)
        self.layout, self.score = Method(self._layout), Method(self._measured)
        self.place, self.initialize = Method(self._place), Method(self._initialize)
        self.rendezvous, self.meet_at = Method(self._rendezvous), Method(self._meet_at)
        self.memory: PeaksByPhase = {}
        self.load_s = 0.0
        self.load, self.offload = Method(self._loaded), Method(self._offloaded)

    async def _layout(self) -> RankLayout:
        return self.own

    async def _place(self) -> Place:
        if self.dies_idle:
            self.dies_idle = False
            raise ActorDiedError
        return self.stands_at

    async def _rendezvous(self) -> str:
        return "here"

    async def _meet_at(self, address: str) -> None:
        assert address == "here"

    async def _initialize(self) -> None:
        if not self.comes_back:
            raise RuntimeError("out of memory")
        self.moves.append("initialize")
        self.error, self.hangs = None, False

    async def _measured(self, texts: Any) -> tuple[list[float | str] | None, PeaksByPhase]:
        return await self._score(texts), self.memory

    async def _score(self, texts: Any) -> list[float | str] | None:
        texts = ray.get(texts) if isinstance(texts, ray.ObjectRef) else texts
        self.calls.append(texts)
        await asyncio.sleep(1000 if self.hangs else self.seconds)
        if self.error is not None:
            raise self.error
        return [float(len(text)) if text else "the text has no tokens" for text in texts] if self.own.is_head else None

    async def _loaded(self, groups: Any) -> PeaksByPhase:
        self.moves.append("load")
        await asyncio.sleep(self.load_s)
        return {}

    async def _offloaded(self, groups: Any) -> PeaksByPhase:
        self.moves.append("offload")
        return {"offload": {"device": 5}} if self.memory else {}


def ranks(copies: int, tensor: int = 1, seconds: float = 0.0) -> list[FakeRank]:
    """In rank order; the last tensor rank of a copy is its head, so that nobody takes the first for granted."""
    size = copies * tensor
    return [
        FakeRank(RankLayout(rank, size, rank // tensor, copies, rank % tensor, 0, 0, rank % tensor == tensor - 1), seconds)
        for rank in range(size)
    ]


@pytest.fixture(autouse=True)
def kill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fakes as well as of real actors."""
    real = ray.kill

    def either(actor: Any, **options: Any) -> None:
        if isinstance(actor, FakeRank):
            actor.kills += 1
        else:
            real(actor, **options)

    monkeypatch.setattr(ray, "kill", either)
    monkeypatch.setattr(reward_model_pool, "KILL_SECONDS", 0.1)


@asynccontextmanager
async def client(actors: Any, **settings: Any) -> AsyncIterator[RewardModelPool]:
    one = RewardModelPool("toy", actors, RewardModelConfig(path=Path("model"), **settings))
    try:
        yield one
    finally:
        one.close()


async def outcome(score: Awaitable[Any]) -> Any:
    try:
        return await score
    except RewardFailed as failure:
        return failure.cause


async def until_restarted(model: RewardModelPool) -> None:
    while model.replaced == 0:  # noqa: ASYNC110 (nobody else waits for that)
        await asyncio.sleep(0.01)


async def test_scores_come_back_to_their_texts_in_batches_over_the_copies() -> None:
    actors = ranks(2, seconds=0.02)
    async with client(actors, micro_batch_size=8) as model:
        POOL_WORK.take()
        scores = await asyncio.gather(*(model.score("x" * i) for i in range(1, 65)))
    assert scores == [float(i) for i in range(1, 65)]
    seconds = dict.fromkeys([(f"reward_models.{model.name}", 0), (f"reward_models.{model.name}", 1)], 0.0)
    for one in POOL_WORK.take():
        seconds[one.role, one.rank or 0] += one.seconds
    assert len(seconds) == 2 and all(one >= 4 * 0.02 for one in seconds.values()), "four calls of each copy"
    sizes = [[len(call) for call in actor.calls] for actor in actors]
    assert sizes == [[8] * 4, [8] * 4]


async def test_few_samples_are_shared_out_and_late_ones_join() -> None:
    actors = ranks(2, seconds=0.02)
    async with client(actors, micro_batch_size=8) as model:
        await asyncio.gather(*(model.score("x") for _ in range(6)))
        assert [len(actor.calls[0]) for actor in actors] == [3, 3]

        async def late(seconds: float) -> float:
            await asyncio.sleep(seconds)
            return await model.score("x")

        await asyncio.gather(late(0), late(0.001), late(0.0015))
    assert sum(len(actor.calls) for actor in actors) <= 4, "each sample went on its own"


async def test_the_copy_with_less_to_do_gets_more() -> None:
    slow, fast = ranks(2)
    slow.seconds, fast.seconds = 1.0, 0.01
    async with client([slow, fast], micro_batch_size=2) as model:
        await asyncio.gather(*(model.score("x") for _ in range(24)))
    assert len(fast.calls) > 5 * len(slow.calls)


async def test_a_text_that_cannot_be_scored_costs_its_neighbours_nothing() -> None:
    async with client(ranks(1)) as model:
        results = await asyncio.gather(*(outcome(model.score(text)) for text in ("a", "", "ccc")))
    assert results == [1.0, "reward model toy: the text has no tokens", 3.0]


async def test_an_error_of_a_single_rank_fails_its_samples_and_it_goes_on() -> None:
    (actor,) = ranks(1)
    actor.error = RuntimeError("out of memory")
    async with client([actor]) as model:
        assert await outcome(model.score("a")) == "reward model toy: RuntimeError: out of memory"
        actor.error = None
        assert await model.score("a") == 1.0


async def test_a_dead_copy_fails_its_samples_and_comes_back_while_the_others_serve() -> None:
    dead, alive = ranks(2, seconds=0.01)
    dead.error = ActorDiedError()
    async with client([dead, alive], micro_batch_size=2) as model:
        results = await asyncio.gather(*(outcome(model.score("xx")) for _ in range(12)))
        failed = [result for result in results if isinstance(result, str)]
        assert len(failed) == 2 and all("reward model toy: its process died" in cause for cause in failed)
        assert results.count(2.0) == 10
        await until_restarted(model)
        before = len(dead.calls)
        assert await asyncio.gather(*(model.score("xx") for _ in range(12))) == [2.0] * 12
    assert len(dead.calls) > before
    assert (len(model.newly_replaced()), len(model.newly_replaced())) == (1, 0)
    assert (dead.kills, alive.kills) == (0, 0)


async def test_the_node_of_a_lost_model_is_named_if_there_are_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{}, {}])
    (actor,) = ranks(1)
    actor.stands_at = Place("its node", 1, "10.0.0.2")
    actor.error, actor.comes_back = ActorDiedError(), False
    async with client([actor]) as model:
        assert (await outcome(model.score("x"))).startswith("reward model toy on 10.0.0.2: its process died")
        assert "started again: reward model toy: RuntimeError: out of memory" in await outcome(model.score("x")), "not where it was before"


async def test_whoever_waits_for_the_last_copy_hears_of_its_death_and_may_ask_again() -> None:
    (actor,) = ranks(1)
    actor.error = ActorDiedError()
    async with client([actor], micro_batch_size=2) as model:
        pool = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy"}), model)
        results = await asyncio.gather(*(outcome(pool.score(item())) for _ in range(6)))
        assert all("its process died" in result for result in results)
        assert await asyncio.gather(*(pool.score(item()) for _ in range(6)))
        actor.error = ActorDiedError()

        async def tried_twice() -> Score:
            try:
                return await pool.score(item())
            except RewardFailed:
                return await pool.score(item())

        assert all(isinstance(score, Score) for score in await asyncio.gather(*(tried_twice() for _ in range(6)))), "one retry is enough"
        assert len(pool.newly_replaced()) == 2


async def test_a_model_that_does_not_come_back_fails_every_sample_with_both_causes() -> None:
    (actor,) = ranks(1)
    actor.error, actor.comes_back = ActorDiedError(), False
    async with client([actor]) as model:
        assert "its process died" in await outcome(model.score("x"))
        cause = await outcome(model.score("x"))
    assert "its process died" in cause and "could not be started again: reward model toy: RuntimeError: out of memory" in cause


def test_a_samples_time_is_the_models_not_that_in_its_queue() -> None:
    async def main() -> None:
        (actor,) = ranks(1, seconds=1.0)
        actor.load_s = 60.0
        async with client([actor], offload=True, micro_batch_size=1) as model:
            pool = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy"}, timeout_s=2.0, retries=0), model)
            assert [score.value for score in await asyncio.gather(*(pool.score(item()) for _ in range(10)))] == [7.0] * 10
            actor.seconds = 2.5
            assert await outcome(pool.score(item())) == "reward model toy: time-out: no score within 2 s"
            actor.seconds = 1.0
            assert (await pool.score(item())).value == 7.0, "the replica is as good as before"
            assert model.replaced == 0

    run_virtual(main())


def test_no_sample_waits_for_ever_behind_a_copy_that_hangs() -> None:
    """Those that it has end in their own time, the others when it is found to hang; the next attempt is served by the one started again."""

    async def main() -> None:
        hanging, healthy = ranks(2)
        hanging.hangs = True
        reward = RewardConfig(name="model", args={"model": "toy"}, timeout_s=30.0)
        clock = asyncio.get_running_loop().time
        async with client([hanging], micro_batch_size=1) as model:
            pool = RewardModelClient("toy", reward, model)

            async def timed() -> tuple[Any, float]:
                return await outcome(pool.score(item())), round(clock())

            first, *others = await asyncio.gather(*(timed() for _ in range(3)))
            assert first == ("reward model toy: time-out: no score within 30 s", 30)
            assert others == [("reward model toy: it hangs: no scores within 600 s", 600)] * 2
            assert (await pool.score(item())).value == 7.0
            assert (hanging.kills, model.replaced) == (1, 1)
        hanging.hangs = True
        async with client([hanging, healthy], micro_batch_size=1) as model:
            pool = RewardModelClient("toy", reward, model)
            started = clock()
            results = await asyncio.gather(*(outcome(pool.score(item())) for _ in range(8)))
            assert clock() - started < 31
            assert sorted(map(str, (getattr(result, "value", result) for result in results))) == ["7.0"] * 7 + [first[0]]

    run_virtual(main())


async def test_a_copy_that_hangs_is_ended_and_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_model_pool, "HANG_SECONDS", 0.3)
    (actor,) = ranks(1)
    actor.hangs = True
    async with client([actor]) as model:
        assert await outcome(model.score("a")) == "reward model toy: it hangs: no scores within 0.3 s"
        assert await model.score("a") == 1.0
    assert (actor.kills, model.replaced) == (1, 1)


@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("is_stopped", [True, False])
def test_a_stopped_process_of_a_lost_rank_is_killed(monkeypatch: pytest.MonkeyPatch, is_stopped: bool) -> None:
    """Ray asks a process to end, which a stopped one does not hear. One that runs is left to Ray, and so is the model's next process."""
    monkeypatch.setattr(reward_model_pool, "HANG_SECONDS", 0.3)
    (actor,) = ranks(1)
    actor.hangs = True

    async def lost_and_back() -> None:
        async with client([actor]) as model:
            assert await outcome(model.score("a")) == "reward model toy: it hangs: no scores within 0.3 s"
            assert await model.score("a") == 1.0

    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            actor.stands_at = Place(ray.get_runtime_context().get_node_id(), process.pid)
            if is_stopped:
                process.send_signal(signal.SIGSTOP)
                os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            asyncio.run(lost_and_back())
            assert process.poll() == (-signal.SIGKILL if is_stopped else None)
        finally:
            process.kill()


async def test_a_copy_that_dies_with_nothing_to_do_is_started_again_at_no_samples_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet, "ASK_SECONDS", 0.02)
    (actor,) = ranks(1)
    async with client([actor]) as model:
        assert await model.score("a") == 1.0
        actor.dies_idle = True
        await until_restarted(model)
        assert await model.score("a") == 1.0
    assert actor.kills == 0


async def test_an_error_in_the_client_itself_leaves_nobody_waiting() -> None:
    async with client(ranks(1)) as model:
        model._hand_out = lambda batch, results: 1 / 0  # type: ignore[method-assign, assignment]
        assert await outcome(model.score("a")) == "reward model toy: ZeroDivisionError: division by zero"


async def test_a_model_that_gives_its_memory_back_is_loaded_when_there_is_something_to_score() -> None:
    actors = ranks(2, seconds=0.01)
    async with client(actors, offload=True) as model:
        await asyncio.gather(*(model.score("x") for _ in range(20)))
        late = asyncio.create_task(model.score("x"))
        await asyncio.sleep(0)
        await asyncio.gather(model.rest(), model.rest())
        assert late.done(), "it left while it was needed"
        assert all(actor.moves == ["load", "offload"] for actor in actors)
        assert await model.score("xx") == 2.0
    assert sorted(len(actor.moves) for actor in actors) == [2, 3], "only the copy that scores is loaded"
    staying = ranks(1)
    async with client(staying) as model:
        await model.leave_devices()
        await model.score("x")
        await model.rest()
    assert staying[0].moves == []


async def test_a_model_that_is_started_again_is_offloaded_until_there_is_something_to_score(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have died at rest, while others train on its devices."""
    monkeypatch.setattr(fleet, "ASK_SECONDS", 0.02)
    (actor,) = ranks(1, seconds=0.01)
    async with client([actor], offload=True) as model:
        await model.score("x")
        await model.rest()
        actor.dies_idle = True
        await until_restarted(model)
        assert actor.moves == ["load", "offload", "initialize", "offload"]
        actor.error = ActorDiedError()
        assert "its process died" in await outcome(model.score("x"))
        assert await model.score("x") == 1.0
        assert actor.moves[4:] == ["load", "initialize", "offload", "load"]
        await model.rest()
        assert actor.moves[8:] == ["offload"]
    (staying,) = ranks(1)
    staying.error = ActorDiedError()
    async with client([staying]) as model:
        assert "its process died" in await outcome(model.score("x"))
        assert await model.score("x") == 1.0
    assert staying.moves == ["initialize"]


async def test_the_fullest_rank_s_memory_is_told_once() -> None:
    actors = ranks(2, seconds=0.01)
    for number, actor in enumerate(actors):
        actor.memory = {"score": {"allocated": 10 + number}}
    async with client(actors, offload=True) as model:
        await asyncio.gather(*(model.score("x") for _ in range(20)))
        await model.rest()
        assert model.take_memory() == {"score": {"allocated": 11}, "offload": {"device": 5}}
        assert model.take_memory() == {}


async def test_a_model_that_a_lost_service_left_on_its_devices_is_offloaded_by_the_next() -> None:
    actors = ranks(2)
    async with client(actors, offload=True) as model:
        await model.leave_devices()
        assert all(actor.moves == ["offload"] for actor in actors)
        await asyncio.gather(*(model.score("x") for _ in range(20)))
    assert all(actor.moves == ["offload", "load"] for actor in actors)


# ---------------------------------------------------------------- on Ray


def item(response: str = "abc") -> RewardInput:
    return RewardInput("toy", "1+1=", response, "answer", {}, "stop")


@pytest.mark.usefixtures("ray_local")
async def test_all_ranks_of_a_copy_take_part_and_its_head_answers() -> None:
    actors = ranks(2, tensor=2, seconds=0.01)
    async with client(actors, micro_batch_size=4, strategy=MegatronStrategyConfig(tensor_parallel=2)) as model:
        assert await asyncio.gather(*(model.score("x" * i) for i in range(1, 17))) == [float(i) for i in range(1, 17)]
    assert actors[0].calls == actors[1].calls
    assert actors[2].calls == actors[3].calls
    assert len(actors[0].calls) + len(actors[2].calls) == 4


@pytest.mark.usefixtures("ray_local")
async def test_connected_ranks_are_all_started_again_when_one_of_them_fails() -> None:
    """The one beside it may wait in a collective for ever, and no rank can join the others' process group later."""
    broken, stuck, *healthy = actors = ranks(2, tensor=2)
    broken.error, stuck.hangs = RuntimeError("out of memory"), True
    for actor in healthy:
        actor.hangs = True
    async with client(actors, strategy=MegatronStrategyConfig(tensor_parallel=2), micro_batch_size=1) as model:
        first, second = await asyncio.gather(*(outcome(model.score("a")) for _ in range(2)))
        assert first == "reward model toy: RuntimeError: out of memory"
        assert second == "reward model toy: its ranks are started again, because one of them was lost"
        assert await asyncio.gather(*(model.score("a") for _ in range(2))) == [1.0, 1.0]
    assert [actor.kills for actor in actors] == [1] * 4
    assert model.replaced == 1


@pytest.mark.usefixtures("ray_local")
async def test_terms_and_forms_are_added_to_the_models_output() -> None:
    reward = RewardConfig(name="model", args={"model": "toy", "template": "{response}"}, format=FormatConfig(pattern="^a"))
    async with client(ranks(1)) as model:
        pool = RewardModelClient("toy", reward, model)
        await pool.start()
        scores = await asyncio.gather(*(pool.score(item(text)) for text in ("abc", "bc")))
        pool.close()
    assert [(score.value, score.format_ok) for score in scores] == [(3.0, True), (2.0, False)]
    assert scores[0].details == {"reward_model": 3.0} and scores[0].terms == {}


@pytest.mark.usefixtures("ray_local")
async def test_further_terms_of_a_models_reward() -> None:
    terms = [RewardTermConfig(name=f"{USER}.length", weight=-0.5)]
    async with client(ranks(1)) as model:
        pool = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy"}, terms=terms), model)
        await pool.start()
        score = await pool.score(item("abc"))
        pool.close()
        terms[0] = RewardTermConfig(name=f"{USER}.length", weight=3e38 / 3)
        beyond = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy"}, terms=terms), model)
        await beyond.start()
        model._hand_out = lambda batch, results: [model._resolve(job, 3e38) for job in batch]  # type: ignore[method-assign, assignment, func-returns-value]
        cause = await outcome(beyond.score(item("abc")))
        beyond.close()
    assert score.value == 7 - 0.5 * 3  # "1+1=abc" has 7 characters
    assert score.terms == {"base": 7.0, "length": -1.5}
    assert score.details == {"base": 7.0, "length": 3.0, "reward_model": 7.0}
    assert cause == "reward model with its terms: returned 6e+38, which is beyond float32, whose largest number is 3.4028e+38"


async def test_a_mistake_in_the_arguments_is_a_value_error_at_the_start() -> None:
    async with client(ranks(1)) as model:
        with pytest.raises(ValueError, match=r"domains\.toy\.reward\.args\.scale = .log.: expected one of none, sigmoid"):
            await RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy", "scale": "log"}), model).start()


@contextmanager
def cluster(path: Path, world_size: int, **settings: Any) -> Iterator[tuple[Cluster[RewardModelWorker], RewardModelConfig]]:
    """Four samples at a time, in one pass where they are short."""
    config = RewardModelConfig(path=path, dtype="float32", micro_batch_size=4, micro_batch_tokens=40, devices=world_size, **settings)
    spec = RewardModelSpec("toy", config, seed=1, deterministic=False)
    one = start_cluster(ClusterSpec("reward_models.toy", anywhere(world_size)), RewardModelWorker, spec)
    try:
        one.all(RewardModelWorker.initialize)
        yield one, config
    finally:
        one.shutdown()


async def scored(actors: list[Any], config: RewardModelConfig) -> list[Score]:
    model = RewardModelPool("toy", actors, config)
    pools = [RewardModelClient(name, RewardConfig(name="model", args={"model": "toy"}), model) for name in ("one", "two")]
    try:
        return await asyncio.gather(*(pools[i % 2].score(item("x" * i)) for i in range(20)))
    finally:
        model.close()


LAYOUTS = {"hf": (2, {}), "megatron TP2": (2, {"strategy": MegatronStrategyConfig(tensor_parallel=2)})}


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_models_score_as_transformers_does(tmp_path: Path, layout: str) -> None:
    path = make_tiny_reward_model(tmp_path / "model", "llama")
    expected = hf_scores(path, [make_tokenizer()("1+1=" + "x" * i)["input_ids"] for i in range(20)])
    world_size, settings = LAYOUTS[layout]
    with cluster(path, world_size, **settings) as (ranks_, config):
        scores = asyncio.run(scored(ranks_.actors, config))
        again = asyncio.run(scored(ranks_.actors, config))
    assert [score.value for score in scores] == pytest.approx(expected, abs=1e-4)
    assert [score.value for score in again] == pytest.approx(expected, abs=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.usefixtures("ray_local")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_killed_process_is_replaced_and_scores_as_before(tmp_path: Path, layout: str) -> None:
    path = make_tiny_reward_model(tmp_path / "model", "llama")
    world_size, settings = LAYOUTS[layout]

    async def through_a_kill(actors: list[Any], config: RewardModelConfig) -> tuple[float, list[Any], int]:
        model = RewardModelPool("toy", actors, config)
        pool = RewardModelClient("toy", RewardConfig(name="model", args={"model": "toy"}), model)
        try:
            before = (await pool.score(item())).value
            os.kill((await actors[0].place.remote()).pid, signal.SIGKILL)
            seen: list[Any] = []
            while model.replaced == 0:
                seen += await asyncio.gather(*(outcome(pool.score(item())) for _ in range(8)))
            seen += await asyncio.gather(*(pool.score(item()) for _ in range(8)))
            return before, seen, model.replaced
        finally:
            model.close()

    with cluster(path, world_size, **settings) as (ranks_, config):
        before, seen, restarts = asyncio.run(through_a_kill(ranks_.actors, config))
        assert ranks_.group.end is None, "the driver does not hold it for dead"
    causes = [result for result in seen if isinstance(result, str)]
    assert restarts == 1
    assert causes and all(cause.startswith("reward model toy: ") for cause in causes)
    assert [result.value for result in seen if isinstance(result, Score)][-8:] == pytest.approx([before] * 8, abs=1e-5)
