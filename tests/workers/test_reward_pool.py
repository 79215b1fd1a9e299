"""Reward workers on a real Ray: batches, time-outs, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import psutil
import pytest
import ray

from roll_lite.config.schema.domains import FormatConfig, RewardConfig, RewardTermConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.distributed import fleet, place
from roll_lite.observability.timers import POOL_WORK
from roll_lite.rewards.base import RewardFailed
from roll_lite.workers import reward
from roll_lite.workers.reward import RewardPool, RewardWorker

pytestmark = pytest.mark.usefixtures("ray_local")
USER = "tests.workers.reward_functions"


def item(response: str = "abc") -> RewardInput:
    return RewardInput("toy", "prompt", response, "answer", {}, "stop")


def serving(rewards: RewardPool) -> list[Any]:
    return [member.actor for member in rewards._fleet.serving]


@asynccontextmanager
async def pool(
    reward: str, workers: int = 1, timeout_s: float = 30.0, pattern: str | None = None, **args: Any
) -> AsyncIterator[RewardPool]:
    form = FormatConfig(pattern=pattern) if pattern else None
    rewards = RewardPool("toy", RewardConfig(name=reward, workers=workers, timeout_s=timeout_s, args=args, format=form))
    await rewards.start()
    try:
        yield rewards
    finally:
        rewards.close()


async def outcome(rewards: RewardPool, response: str) -> Score | str:
    try:
        return await rewards.score(item(response))
    except RewardFailed as failure:
        return failure.cause


async def test_scores_come_back_to_their_samples_from_several_workers() -> None:
    async with pool(f"{USER}.length", workers=2) as rewards:
        scores = await asyncio.gather(*(rewards.score(item("x" * i)) for i in range(200)))
    assert [score.value for score in scores] == [float(i) for i in range(200)]


async def test_scoring_that_asks_a_judge_is_the_judges_work() -> None:
    judge = {"server": "grader", "url": ["http://127.0.0.1:9/v1"], "model": "m"}
    asking = RewardPool("toy", RewardConfig(name="judge", args=judge, terms=[RewardTermConfig(name="judge", args=judge)]))
    assert asking._judges == ["judges.grader"]
    POOL_WORK.take()
    async with pool(f"{USER}.length", workers=2) as rewards:
        await rewards.score(item())
        assert POOL_WORK.take() == []
        rewards._judges = asking._judges
        await asyncio.gather(*(rewards.score(item("x" * i)) for i in range(20)))
    work = POOL_WORK.take()
    assert {(one.name, one.rank) for one in work} == {("judges.grader[0] score", 0)}
    assert all(one.start + one.seconds < other.start for one, other in pairwise(work)), "overlapping calls are one span"


async def test_functions_run_in_the_main_thread() -> None:
    async with pool(f"{USER}.in_main_thread") as rewards:
        assert (await rewards.score(item())).correct is True


async def test_math_works_in_a_small_process_without_torch() -> None:
    async with pool("math") as rewards:
        right = await rewards.score(RewardInput("toy", "p", "the answer is $\\frac{2}{4}$", "0.5", {}, "stop"))
        wrong = await rewards.score(RewardInput("toy", "p", "the answer is 7", "0.5", {}, "stop"))
        modules = await serving(rewards)[0].__ray_call__.remote(lambda _: sorted({name.partition(".")[0] for name in sys.modules}))
    assert (right.value, wrong.value) == (1.0, 0.0)
    assert "roll_lite" in modules
    assert not {"torch", "transformers", "vllm", "megatron"} & set(modules)


async def test_few_calls_carry_many_samples() -> None:
    calls = 0
    async with pool(f"{USER}.length") as rewards:
        await rewards.score(item())  # tells how long a sample takes
        take = rewards._take

        async def counting(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            return await take(*args)

        rewards._take = counting  # type: ignore[method-assign]
        await asyncio.gather(*(rewards.score(item()) for _ in range(256)))
    assert calls <= 256 / 64 + 2


async def test_failures_are_failures_of_their_samples_and_not_zeros() -> None:
    async with pool(f"{USER}.tricky") as rewards:
        await rewards.score(item())  # fast so far: the next call carries several samples
        raised, died, nan, fine = await asyncio.gather(*(outcome(rewards, name) for name in ("raise", "die", "nan", "fine")))
    assert isinstance(raised, str)
    assert "KeyError" in raised
    assert isinstance(died, str)
    assert "its process died" in died
    assert isinstance(nan, str)
    assert "not finite" in nan
    assert isinstance(fine, Score)
    assert fine.value == 1.0


async def test_a_hanging_sample_costs_itself_and_not_its_neighbours() -> None:
    async with pool(f"{USER}.tricky", timeout_s=1.0) as rewards:
        await rewards.score(item())  # fast so far: the next call carries several samples
        first = serving(rewards)[0]
        names = ["a", "b", "hang", "c", "d"]
        started = time.monotonic()
        results = await asyncio.gather(*(outcome(rewards, name) for name in names))
        took = time.monotonic() - started
        assert [type(result) for result in results] == [Score, Score, str, Score, Score]
        assert "time-out: no score within 1 s" in str(results[2])
        assert took < 120
        later = await rewards.score(item())
        assert later.value == 1.0
        assert len(serving(rewards)) == 1
        assert serving(rewards)[0] != first
        with pytest.raises(ray.exceptions.RayActorError):
            await first.place.remote()


async def test_a_killed_worker_is_replaced_and_its_samples_are_not_charged() -> None:
    async with pool(f"{USER}.costly", workers=2) as rewards:
        running = [asyncio.create_task(outcome(rewards, str(i))) for i in range(100)]
        await asyncio.sleep(0.15)
        ray.kill(serving(rewards)[0])
        results = await asyncio.gather(*running)
        # One sample may have been alone in the call that died.
        assert sum(isinstance(result, Score) for result in results) >= 99
        assert (await rewards.score(item())).value == 1.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("times", [1, 10**6])
async def test_an_error_in_the_pool_itself_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """A bug there ended the task that served, and whoever waited waited for ever."""
    monkeypatch.setattr(reward, "LOST_IN_A_ROW", 3)
    async with pool(f"{USER}.length") as rewards:
        answer, left = rewards._hand_out, iter(range(times))

        def faulty(*args: Any) -> None:
            if next(left, None) is not None:
                raise LookupError("no such sample")
            answer(*args)

        rewards._hand_out = faulty  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            results = await asyncio.gather(*(outcome(rewards, "x" * i) for i in range(1, 9)))
        failed = [result for result in results if isinstance(result, str)]
        assert len(failed) == (1 if times == 1 else 8) and all("LookupError: no such sample" in cause for cause in failed)
        assert rewards.replaced >= 1


@pytest.mark.nightly
async def test_functions_that_stop_their_process_cost_a_bounded_number_of_time_outs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing inside a stopped process keeps a limit, and 200 time-outs one after the other are none."""
    monkeypatch.setattr(reward, "LOST_IN_A_ROW", 4)
    async with pool(f"{USER}.stopping", workers=2, timeout_s=0.3) as rewards:
        processes = [(await worker.place.remote()).pid for worker in serving(rewards)]
        async with asyncio.timeout(120):
            causes = await asyncio.gather(*(outcome(rewards, "stop") for _ in range(200)))
        assert sum(cause == f"reward {USER}.stopping: time-out: no score within 0.3 s" for cause in causes) <= 5
        assert "4 workers were lost one after the other, and nothing was scored in between; the last: " in str(causes[-1])
        assert rewards.replaced <= 6
        assert (await rewards.score(item("fine"))).value == 1.0, "another attempt may succeed"
        _, left = psutil.wait_procs([psutil.Process(process) for process in processes if psutil.pid_exists(process)], timeout=10)
        assert not left, "a stopped process does not hear Ray, which asks it to end"


async def test_a_worker_that_dies_while_it_has_nothing_to_do_is_replaced_before_anybody_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cause names its node if there are several."""
    monkeypatch.setattr(fleet, "ASK_SECONDS", 0.1)
    nodes = ray.nodes()
    monkeypatch.setattr(ray, "nodes", lambda: 2 * nodes)
    async with pool(f"{USER}.length") as rewards:
        await asyncio.sleep(0.3)
        os.kill((await serving(rewards)[0].place.remote()).pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while rewards.replaced == 0:  # noqa: ASYNC110 (nobody else waits for that)
                await asyncio.sleep(0.05)
        (cause,) = rewards.newly_replaced()
        assert cause.startswith(f"reward {USER}.length on {nodes[0]['NodeManagerAddress']}: its process died")
        assert (await rewards.score(item())).value == 3.0


async def test_a_worker_that_is_stopped_at_work_is_replaced_long_before_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "LOOK_SECONDS", 0.2)
    async with pool(f"{USER}.stopping", timeout_s=100.0) as rewards:
        async with asyncio.timeout(60):
            assert await outcome(rewards, "stop") == f"reward {USER}.stopping: its process is stopped, as by SIGSTOP"
            assert (await rewards.score(item("fine"))).value == 1.0


async def test_another_configuration_restarts_the_workers_and_the_same_does_not() -> None:
    async with pool(f"{USER}.length", workers=2) as rewards:
        before = serving(rewards)
        rewards.configure(rewards._config)
        assert (await rewards.score(item())).value == 3.0 and serving(rewards) == before
        rewards.configure(rewards._config.model_copy(update={"name": f"{USER}.waiting"}))
        async with asyncio.timeout(60):
            while rewards.replaced < 2:
                await outcome(rewards, "abc")
        assert [await outcome(rewards, "abc") for _ in range(4)] == 4 * [Score(0.5)]


@pytest.mark.parametrize("count", [1, 3])
async def test_samples_under_way_are_not_to_blame_for_another_configuration(count: int) -> None:
    async with pool(f"{USER}.waiting", timeout_s=60.0) as rewards:
        hanging = [asyncio.create_task(outcome(rewards, "hang")) for _ in range(count)]
        while len(rewards._fleet.members[0].under_way) < count:  # noqa: ASYNC110 (a pool makes no event of it)
            await asyncio.sleep(0.05)
        jobs = list(rewards._fleet.members[0].under_way.values())
        rewards.configure(rewards._config.model_copy(update={"name": f"{USER}.length"}))
        async with asyncio.timeout(60):
            assert await asyncio.gather(*hanging) == count * [Score(4.0)]
        assert not any(job.alone for job in jobs)


async def test_members_start_on_the_given_nodes_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ray.get_runtime_context().get_node_id()
    monkeypatch.setattr(place.ActorMember, "nodes", (here, "1" * len(here)))
    async with pool(f"{USER}.length", workers=2) as rewards:
        assert {(await worker.place.remote()).node for worker in serving(rewards)} == {here}, "one node is gone: any other will do"


async def test_slow_functions_are_spread_over_the_workers() -> None:
    async with pool(f"{USER}.where", workers=3) as rewards:
        scores = await asyncio.gather(*(rewards.score(item()) for _ in range(9)))
        assert len({score.value for score in scores}) >= 2


async def test_async_functions_wait_side_by_side_and_time_out_alone() -> None:
    """One after the other they would take 3 s, and all but the first would have waited for the one that hangs."""
    async with pool(f"{USER}.waiting", timeout_s=2.0) as rewards:
        results = await asyncio.gather(*(outcome(rewards, name) for name in ["hang", *"abcdefghij"]))
        assert "time-out" in str(results[0])
        assert all(isinstance(result, Score) and result.value == 0.5 for result in results[1:])
        worker = serving(rewards)[0]
        await rewards.score(item())
        assert serving(rewards) == [worker]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", ["waiting", "listed_async"])
async def test_a_slow_async_sample_holds_up_neither_its_neighbours_nor_those_that_come_later(function: str) -> None:
    async with pool(f"{USER}.{function}", timeout_s=60.0) as rewards:
        hanging = asyncio.create_task(outcome(rewards, "hang"))
        await asyncio.sleep(0)
        if function == "waiting":  # in one call with it, of which each sample returns by itself
            assert all(isinstance(score, Score) for score in await asyncio.gather(*(rewards.score(item()) for _ in range(5))))
        await asyncio.sleep(0.5)
        assert isinstance(await rewards.score(item()), Score)
        assert all(isinstance(score, Score) for score in await asyncio.gather(*(rewards.score(item()) for _ in range(100))))
        assert not hanging.done() and rewards.replaced == 0
        hanging.cancel()


@pytest.mark.nightly
async def test_samples_under_way_in_a_worker_that_dies_are_scored_by_another() -> None:
    async with pool(f"{USER}.waiting", workers=2) as rewards:
        running = [asyncio.create_task(outcome(rewards, str(i))) for i in range(40)]
        await asyncio.sleep(0.1)
        ray.kill(serving(rewards)[0])
        assert all(isinstance(result, Score) for result in await asyncio.gather(*running))
        async with asyncio.timeout(60):
            while rewards.replaced == 0:  # noqa: ASYNC110 (nobody else waits for that)
                await asyncio.sleep(0.05)


async def test_an_item_that_cannot_travel_is_the_only_one_that_fails() -> None:
    async with pool(f"{USER}.waiting") as rewards:
        others = [asyncio.create_task(outcome(rewards, "a")) for _ in range(3)]
        await asyncio.sleep(0.1)
        odd = RewardInput("toy", "prompt", "abc", "answer", {"loop": asyncio.get_running_loop()}, "stop")
        with pytest.raises(RewardFailed, match="TypeError: Could not serialize"):
            await rewards.score(odd)
        assert all(isinstance(result, Score) for result in await asyncio.gather(*others))
        assert rewards.replaced == 0


async def test_a_mistake_in_the_configuration_is_a_value_error_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"domains\.toy\.reward\.name: 'exactly'.*did you mean 'exact'"):
        async with pool("exactly"):
            pass
    with pytest.raises(ValueError, match=r"domains\.toy\.reward\.args\.stripp"):
        async with pool("exact", stripp=True):
            pass


async def test_a_function_that_cannot_be_imported_in_time_stops_the_start_with_its_domain() -> None:
    rewards = RewardPool("toy", RewardConfig(name="tests.workers.slow_import.one", start_timeout_s=1.0))
    with pytest.raises(ValueError, match=r"domains\.toy\.reward: the reward .*slow_import\.one' was not ready within 1 s.*start_timeout_s"):
        await rewards.start()
    assert serving(rewards) == []


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", ["length", "waiting"])
async def test_forms_come_with_scores_and_a_runaway_pattern_costs_its_own_samples(function: str) -> None:
    """A response that makes the pattern run out of time has chosen its outcome: it does not match, and the score stays."""
    responses = ["aaa", "b", "a" * 60 + "b", "caa", "a" * 50 + "c"]
    async with pool(f"{USER}.{function}", pattern=r"^(a+)+$") as rewards:
        worker = serving(rewards)[0]
        results = await asyncio.gather(*(outcome(rewards, response) for response in responses))
        assert serving(rewards) == [worker], "the search had to be ended with its process"
        again = await rewards.score(item("a"))
    assert [result.format_ok for result in results if isinstance(result, Score)] == [True, False, False, False, False]
    assert again.format_ok is True


async def test_without_a_pattern_the_form_is_unknown() -> None:
    async with pool(f"{USER}.length") as rewards:
        assert (await rewards.score(item())).format_ok is None


async def test_a_bad_pattern_is_a_value_error_at_the_start() -> None:
    with pytest.raises(ValueError, match=r"(?s)pattern.*not a regular expression: missing \)"):
        async with pool("exact", pattern="("):
            pass


def test_a_slice_ends_with_what_it_has() -> None:
    worker = RewardWorker(RewardConfig(name=f"{USER}.slow"), "reward")
    worker.prepare()
    scored = worker.score(dict(enumerate([item() for _ in range(6)])))
    done = [result for result in scored.results.values() if result is not None]
    assert len(scored.results) == 6
    assert 3 <= len(done) <= 4
    assert list(scored.results.values())[len(done) :] == [None] * (6 - len(done))
