"""The part of the inference engines' contract that has no numbers in it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
import torch
from support_completions import completions
from support_scripted import Response, ScriptedEngine, equal_responses

from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, Sampling, VersionSpan
from roll_lite.distributed.strategy.base import PauseMode
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Membership, Route
from roll_lite.simulator.clock import run_virtual


def request(name: str, max_tokens: int = 1000, seed: int | None = None) -> GenerationRequest:
    return GenerationRequest(name, (1, 2, 3), Sampling(temperature=1.0, max_tokens=max_tokens, seed=seed))


def engine(slots: int | None = None, **lengths: int) -> ScriptedEngine:
    """One second per token, lengths by request id."""
    return ScriptedEngine(lambda r: Response(lengths[r.request_id], 1.0), slots=slots)


async def finish(scripted: ScriptedEngine, *requests: GenerationRequest) -> list[tuple[float, Completion]]:
    return [(asyncio.get_running_loop().time(), completion) async for completion in completions(scripted, requests)]


async def alongside(main: Coroutine[Any, Any, Any], after: float, action: Coroutine[Any, Any, None]) -> Any:
    async def later() -> None:
        await asyncio.sleep(after)
        await action

    task = asyncio.create_task(later())
    result = await main
    await task
    return result


def summary(finished: list[tuple[float, Completion]]) -> list[tuple[float, str, int, str]]:
    return [(round(now, 6), c.request_id, len(c.token_ids), str(c.finish_reason)) for now, c in finished]


def test_completions_come_in_the_order_in_which_they_finish() -> None:
    finished = run_virtual(finish(engine(a=5, b=2, c=3), request("a"), request("b"), request("c", max_tokens=1)))
    assert summary(finished) == [(1, "c", 1, "length"), (2, "b", 2, "stop"), (5, "a", 5, "stop")]
    for _, completion in finished:
        assert len(completion.log_probs) == len(completion.token_ids)
        assert completion.versions == (VersionSpan(0, 0),)


def test_requests_wait_for_a_slot_in_their_order() -> None:
    finished = run_virtual(finish(engine(slots=1, a=2, b=2, c=2), request("a"), request("b"), request("c")))
    assert summary(finished) == [(2, "a", 2, "stop"), (4, "b", 2, "stop"), (6, "c", 2, "stop")]


def test_abort_yields_what_there_is_and_ignores_unknown_ids() -> None:
    async def main() -> Any:
        scripted = engine(slots=2, a=10, b=10, waiting=10)
        requests = [request("a"), request("b"), request("waiting")]
        return await alongside(finish(scripted, *requests), 3.5, scripted.abort(["a", "waiting", "nobody"]))

    assert summary(run_virtual(main())) == [(3.5, "a", 3, "abort"), (3.5, "waiting", 0, "abort"), (10, "b", 10, "stop")]


def test_abort_of_all() -> None:
    async def main() -> Any:
        scripted = engine(a=10, b=20)
        return await alongside(finish(scripted, request("a"), request("b")), 2.0, scripted.abort())

    assert summary(run_virtual(main())) == [(2, "a", 2, "abort"), (2, "b", 2, "abort")]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (PauseMode.KEEP, [(12, "short", 2, "stop"), (17, "long", 7, "stop"), (14, "late", 4, "stop")]),
        (PauseMode.ABORT, [(1, "short", 1, "abort"), (1, "long", 1, "abort"), (15, "late", 4, "stop")]),
    ],
)
def test_pause_modes(mode: PauseMode, expected: list[tuple[float, str, int, str]]) -> None:
    async def main() -> Any:
        scripted = engine(short=2, long=7, late=4)

        async def pause_and_resume() -> None:
            await asyncio.sleep(1)
            await scripted.pause(mode)
            await asyncio.sleep(11 - asyncio.get_running_loop().time())
            await scripted.resume()

        async def arrive_late() -> Any:
            await asyncio.sleep(5 if mode is not PauseMode.KEEP else 0)
            return await finish(scripted, request("late"))

        early, late, _ = await asyncio.gather(finish(scripted, request("short"), request("long")), arrive_late(), pause_and_resume())
        return [*early, *late]

    assert summary(run_virtual(main())) == expected


def test_while_anything_is_offloaded_requests_wait() -> None:
    async def main() -> list[tuple[float, Completion]]:
        scripted = engine(slots=1, a=5, b=2)

        async def away() -> None:
            await scripted.offload()
            await asyncio.sleep(1)
            await scripted.load([EngineMemory.WEIGHTS])
            await asyncio.sleep(1)
            await scripted.resume()
            await scripted.load()

        return await alongside(finish(scripted, request("a"), request("b")), 3, away())

    assert summary(run_virtual(main())) == [(3, "a", 3, "abort"), (7, "b", 2, "stop")]


def tensor(name: str, *shape: int) -> ExportedTensor:
    return ExportedTensor(name, shape, torch.float32, owner=0, bucket=0)


def way(*tensors: ExportedTensor) -> Route:
    return Route(0, 0, (1,), tensors)


async def update(scripted: ScriptedEngine, version: int, *tensors: ExportedTensor) -> None:
    await scripted.connect_weights(1, Membership(1, "gloo", "127.0.0.1", 1, 1.0, ("trainer rank 0", "engine 0 worker 0"), ((0, (1,)),)))
    await scripted.begin_weight_update(tensors)
    await scripted.receive_bucket([way(*tensors)])
    await scripted.finish_weight_update(version)


def test_a_response_over_an_update_has_a_span_for_each_version() -> None:
    async def main() -> Any:
        scripted = engine(a=6)

        async def update_frozen() -> None:
            await asyncio.sleep(2)
            await scripted.pause(PauseMode.KEEP)
            await asyncio.sleep(100)
            await update(scripted, 7, tensor("w", 2))
            await scripted.resume()

        finished, _ = await asyncio.gather(finish(scripted, request("a")), update_frozen())
        after = await finish(scripted, request("a"))
        return [*finished, *after], scripted.life.version, await scripted.health()

    finished, version, health = run_virtual(main())
    assert [completion.versions for _, completion in finished] == [(VersionSpan(0, 0), VersionSpan(2, 7)), (VersionSpan(0, 7),)]
    assert finished[0][0] == 106
    assert (health.alive, version, health.running, health.waiting) == (True, 7, 0, 0)


async def test_names_and_shapes_are_checked_before_anything_is_touched() -> None:
    scripted = ScriptedEngine(weights={"w": (2, 3), "b": (3,)})
    with pytest.raises(ValueError, match="unknown to the model: lm_head"):
        await scripted.begin_weight_update([tensor("w", 2, 3), tensor("lm_head", 2), tensor("b", 3)])
    with pytest.raises(ValueError, match=r"w \(3, 2\) instead of \(2, 3\)"):
        await scripted.begin_weight_update([tensor("w", 3, 2), tensor("b", 3)])
    await update(scripted, 1, tensor("w", 2, 3), tensor("b", 3))
    assert scripted.life.version == 1


async def test_an_update_must_be_whole_and_in_order() -> None:
    scripted = ScriptedEngine()
    with pytest.raises(RuntimeError, match="no weight update has begun"):
        await scripted.receive_bucket([way(tensor("w", 1))])
    with pytest.raises(RuntimeError, match="no weight update has begun"):
        await scripted.finish_weight_update(1)
    await scripted.begin_weight_update([tensor("w", 1), tensor("b", 1)])
    await scripted.receive_bucket([way(tensor("w", 1))])
    for refused in (scripted.begin_weight_update([tensor("w", 1)]), scripted.offload(), scripted.weight_checksums()):
        with pytest.raises(RuntimeError, match="a weight update is under way"):
            await refused
    with pytest.raises(ValueError, match="w was sent before"):
        await scripted.receive_bucket([way(tensor("w", 1))])
    with pytest.raises(RuntimeError, match="1 tensors have not arrived, among them b"):
        await scripted.finish_weight_update(1)
    assert scripted.life.version == 0


async def test_a_configured_engine_fails_as_often_as_it_says() -> None:
    scripted = ScriptedEngine(equal_responses(response_tokens=3, failure_rate=0.25))
    finished = await finish(scripted, *(request(f"r{i}") for i in range(2000)))
    failed = [completion for _, completion in finished if completion.error]
    assert 420 <= len(failed) <= 580  # 500 expected, standard deviation 19
    assert all(len(completion.token_ids) == 3 for _, completion in finished if not completion.error)


def test_death_fails_everything_now_and_later() -> None:
    async def main() -> Any:
        scripted = engine(slots=1, a=5, b=5)

        async def die() -> None:
            scripted.kill("power cut")

        first = await alongside(finish(scripted, request("a"), request("b")), 1.0, die())
        return [*first, *await finish(scripted, request("a"))], await scripted.health()

    finished, health = run_virtual(main())
    assert [(completion.request_id, completion.error) for _, completion in finished] == [(name, "power cut") for name in "aba"]
    assert not health.alive


async def test_seeded_requests_repeat_and_others_do_not() -> None:
    scripted = ScriptedEngine(equal_responses(response_tokens=8))

    async def tokens(name: str, seed: int | None) -> tuple[int, ...]:
        return (await finish(scripted, request(name, seed=seed)))[0][1].token_ids

    assert await tokens("a", 1) == await tokens("b", 1)
    assert await tokens("a", 1) != await tokens("a", 2)
    assert await tokens("a", None) != await tokens("b", None)
    assert [c.finish_reason for _, c in await finish(scripted, request("a"))] == [FinishReason.STOP]
