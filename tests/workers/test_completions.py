"""The engine's side: what finishes is fetched in batches, its tokens are in blocks, a dying engine answers for all that it had."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pytest
from support_local_engine import LocalEngine, ask, collect, fetch_block
from support_scripted import LOG_PROB, Response, ScriptedEngine

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, Sampling, TokenRow, Turn, VersionSpan
from roll_lite.scheduler.engines import Collected, EngineLost
from roll_lite.scheduler.router import Router
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.completions import CompletionPump
from roll_lite.workers.token_blocks import BLOCK_TOKENS, TokenRecord, token_block


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), Sampling(temperature=1.0, max_tokens=100))


async def generated(engine: LocalEngine, asked: GenerationRequest) -> Turn:
    return await ask(engine, asked)


def test_completions_that_finish_close_together_are_fetched_together() -> None:
    async def main() -> tuple[list[int], float]:
        pump = CompletionPump(ScriptedEngine(lambda r: Response(1, 0.001 * int(r.request_id))), fetch_block, linger_s=0.03)
        await pump.submit([request(str(i)) for i in range(1, 101)], frozen=False)
        sizes = []
        while sum(sizes) < 100:
            sizes.append(len((await collect(pump, 10.0)).turns))
        return sizes, asyncio.get_running_loop().time()

    sizes, now = run_virtual(main())
    assert len(sizes) <= 5
    # The last completion is not made to wait for neighbours that cannot come.
    assert now == pytest.approx(0.1, abs=0.031)


def test_collect_comes_back_empty_after_its_time() -> None:
    async def main() -> tuple[Collected, float]:
        pump = CompletionPump(ScriptedEngine(lambda r: Response(1, 100.0)), fetch_block)
        await pump.submit([request("slow")], frozen=False)
        assert await collect(pump, 5.0) == Collected([], {"slow": 0})
        return await collect(pump, 5.0), asyncio.get_running_loop().time()

    assert run_virtual(main()) == (Collected([]), 5.0)


def test_a_failed_request_of_a_living_engine_is_only_that() -> None:
    async def main() -> list[Turn]:
        engine = LocalEngine("e", ScriptedEngine(lambda r: Response(3, 0.1, error="too long" if r.request_id == "bad" else None)))
        return await asyncio.gather(ask(engine, request("bad")), ask(engine, request("good")))

    bad, good = run_virtual(main())
    assert bad.error == "too long"
    assert (good.error, good.finish_reason) == (None, FinishReason.STOP)


def test_completions_that_were_ready_survive_the_engines_death() -> None:
    async def main() -> list[Turn | BaseException]:
        def script(r: GenerationRequest) -> Response:
            return Response(1, 1.0) if r.request_id == "quick" else Response(2, 1.0, error="lightning", fatal=r.request_id == "fatal")

        engine = LocalEngine("e", ScriptedEngine(script), linger_s=5.0)
        return await asyncio.gather(*(ask(engine, request(name)) for name in ("quick", "fatal", "other")), return_exceptions=True)

    quick, fatal, other = run_virtual(main())
    assert isinstance(quick, Turn)
    assert all(isinstance(answer, EngineLost) and answer.cause == "lightning" for answer in (fatal, other))


class Exploding(ScriptedEngine):
    def generate(self, request, report=None):  # type: ignore[no-untyped-def, override]
        answer = asyncio.get_running_loop().create_future()
        if request.request_id == "r0":
            answer.set_result(Completion(request.request_id, (1,), (0.0,), finish_reason=FinishReason.STOP))
        else:
            answer.set_exception(RuntimeError("broken inside"))
        return answer


def test_an_engine_that_raises_answers_for_every_request() -> None:
    async def main() -> list[Turn]:
        engine = LocalEngine("e", Exploding())
        return await asyncio.gather(*(ask(engine, request(f"r{i}")) for i in range(3)))

    first, *others = run_virtual(main())
    assert first.error is None
    assert [turn.error for turn in others] == ["RuntimeError: broken inside"] * 2


def test_frozen_admission_shows_the_engine_everything_before_it_starts() -> None:
    async def main() -> tuple[list[str], list[str]]:
        strategy = ScriptedEngine(lambda r: Response(1, 1.0), slots=1)
        log: list[str] = []
        pause, resume, generate = strategy.pause, strategy.resume, strategy.generate
        strategy.pause = lambda mode: (log.append(f"pause {mode}"), pause(mode))[1]  # type: ignore[method-assign]
        strategy.resume = lambda: (log.append(f"resume with {len(strategy._waiting)} waiting"), resume())[1]  # type: ignore[method-assign]
        strategy.generate = lambda r, report: (log.append(r.request_id), generate(r, report))[1]  # type: ignore[method-assign, misc, assignment]
        engine = LocalEngine("e", strategy, frozen_admission=True)
        order: list[str] = []

        async def one(name: str) -> None:
            await ask(engine, request(name))
            order.append(name)

        await asyncio.gather(*map(one, ["c", "a", "b"]))
        return log, order

    log, order = run_virtual(main())
    assert log == ["pause keep", "a", "b", "c", "resume with 3 waiting"]
    assert order == ["a", "b", "c"]


# ---------------------------------------------------------------- tokens


class Remembering(ScriptedEngine):
    """Knows which prompts it got."""

    prompts: list[tuple[int, ...]]

    def generate(self, request, report):  # type: ignore[no-untyped-def, override]
        self.prompts = [*getattr(self, "prompts", []), request.prompt_ids]
        return super().generate(request, report)


def test_what_comes_back_refers_to_its_tokens() -> None:
    turn = run_virtual(generated(LocalEngine("e", ScriptedEngine(lambda r: Response(3, 1.0))), request("r")))
    assert (turn.length, turn.text, turn.finish_reason, turn.versions) == (3, "3 tokens", FinishReason.STOP, (VersionSpan(0, 0),))
    assert turn.tokens is not None and turn.tokens.length == 5
    block = turn.tokens.block
    assert block.ragged("input_ids").row(turn.tokens.row)[:2].tolist() == [1, 2]
    assert block.ragged("response_mask").row(turn.tokens.row).int().tolist() == [0, 0, 1, 1, 1]
    assert block.ragged("rollout_log_probs").row(turn.tokens.row).tolist() == [0, LOG_PROB, LOG_PROB, LOG_PROB]


def test_a_turn_does_not_grow_with_its_response() -> None:
    def size(tokens: int) -> int:
        strategy = ScriptedEngine(lambda r: Response(tokens, text="same"))
        sampling = Sampling(temperature=1.0, max_tokens=10**6)
        turn = run_virtual(generated(LocalEngine("e", strategy), GenerationRequest("r", (1, 2), sampling)))
        assert turn.tokens is not None and turn.length == tokens
        return len(pickle.dumps(turn._replace(length=1, tokens=turn.tokens._replace(block="a reference", length=1))))

    assert size(4000) == size(40)


def test_a_block_holds_a_bounded_number_of_tokens() -> None:
    async def main() -> list[Turn]:
        engine = LocalEngine("e", ScriptedEngine(lambda r: Response(BLOCK_TOKENS // 4, 0.0)), linger_s=1.0)
        sampling = Sampling(temperature=1.0, max_tokens=10**6)
        return await asyncio.gather(*(ask(engine, GenerationRequest(f"r{i}", (1, 2), sampling)) for i in range(10)))

    rows = [turn.tokens for turn in run_virtual(main())]
    assert sorted(row.row for row in rows if row) == [0, 0, 0, 1, 1, 1, 2, 2, 3, 3]
    assert len({id(row.block) for row in rows if row}) == 3


def test_a_request_goes_on_where_another_ended() -> None:
    """Two turns: what the engine gets is the whole prompt, what is written is the whole sample."""
    strategy = Remembering(lambda r: Response(2, 1.0))

    async def main() -> tuple[Turn, Turn]:
        engine = LocalEngine("e", strategy)
        first = await ask(engine, request("r"))
        second = await ask(engine, replace(request("r/turn1"), prompt_ids=(50, 51, 52), context=first.tokens))
        return first, second

    first, second = run_virtual(main())
    assert first.tokens and second.tokens
    said = first.tokens.block.ragged("input_ids").row(0).tolist()
    assert strategy.prompts == [(1, 2), (*said, 50, 51, 52)]
    block = second.tokens.block
    whole = block.ragged("input_ids").row(0).tolist()
    assert whole[:7] == [*said, 50, 51, 52] and len(whole) == second.tokens.length == 9
    assert block.ragged("response_mask").row(0).int().tolist() == [0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert block.ragged("rollout_log_probs").row(0).tolist() == [0, LOG_PROB, LOG_PROB, 0, 0, 0, LOG_PROB, LOG_PROB]


def test_a_response_goes_on_with_another_request() -> None:
    """What comes back is the whole response's text and row, and the new tokens' number and versions."""
    strategy = Remembering(lambda r: Response(10, 1.0))

    async def main() -> tuple[Turn, Turn, Turn]:
        engine = LocalEngine("e", strategy)
        begun = ask(engine, request("r"))
        await asyncio.sleep(4.5)
        engine.abort(["r"])
        first = await begun
        rest = GenerationRequest("r/part1", (), Sampling(temperature=1.0, max_tokens=96), first.tokens, resumed_tokens=first.length)
        waiting = ask(engine, rest)
        await asyncio.sleep(0.1)
        engine.abort(["r/part1"])
        return first, await waiting, await ask(engine, replace(rest, request_id="r/part2"))

    first, nothing, second = run_virtual(main())
    assert first.tokens and second.tokens
    said = first.tokens.block.ragged("input_ids").row(0).tolist()
    assert strategy.prompts == [(1, 2), tuple(said), tuple(said)]
    assert (first.length, first.text, first.finish_reason) == (4, "4 tokens", FinishReason.ABORT)
    assert (nothing.length, nothing.finish_reason, nothing.tokens) == (0, FinishReason.ABORT, None)
    assert (second.length, second.text, second.finish_reason) == (6, "10 tokens", FinishReason.STOP)
    block = second.tokens.block
    assert block.ragged("input_ids").row(0)[:6].tolist() == said and second.tokens.length == 12
    assert block.ragged("response_mask").row(0).int().tolist() == [0, 0, *[1] * 10]


def test_a_failed_request_and_an_empty_abort_have_no_tokens_and_a_partial_one_has() -> None:
    async def main() -> list[Turn]:
        strategy = ScriptedEngine(lambda r: Response(10, 1.0, error="bad" if r.request_id == "bad" else None), slots=2)
        engine = LocalEngine("e", strategy)
        tasks = [ask(engine, request(name)) for name in ("bad", "begun", "queued")]
        await asyncio.sleep(4.5)
        engine.abort(["begun", "queued"])
        return await asyncio.gather(*tasks)

    bad, begun, queued = run_virtual(main())
    assert bad.error == "bad" and bad.tokens is None
    assert (queued.finish_reason, queued.length, queued.tokens) == (FinishReason.ABORT, 0, None)
    assert (begun.finish_reason, begun.length) == (FinishReason.ABORT, 4)
    assert isinstance(begun.tokens, TokenRow) and begun.tokens.length == 6


async def slowly(block: DataProto) -> DataProto:
    await asyncio.sleep(10.0)
    return block


def test_an_abort_that_comes_while_earlier_turns_are_fetched_is_not_lost() -> None:
    async def main() -> tuple[list[Turn], float, int]:
        strategy = ScriptedEngine(lambda r: Response(100, 1.0))
        pump = CompletionPump(strategy, slowly)
        reference = token_block([TokenRecord.given((1, 2, 3))])
        late = replace(request("late"), context=TokenRow(reference, 0, 3))
        entering = asyncio.create_task(pump.submit([late, request("fresh")], frozen=False))
        await asyncio.sleep(5.0)
        await pump.abort(["late"])
        (turn,) = (await collect(pump, 1.0)).turns
        await entering
        await asyncio.sleep(1.0)
        await pump.abort()
        assert list((await collect(pump, 1.0)).generated) == ["fresh"]
        return [turn, *(await collect(pump, 1.0)).turns], asyncio.get_running_loop().time(), (await strategy.health()).running

    (late, fresh), seconds, running = run_virtual(main())
    assert (late.request_id, late.finish_reason, late.length) == ("late", FinishReason.ABORT, 0)
    assert (fresh.request_id, fresh.finish_reason, fresh.length) == ("fresh", FinishReason.ABORT, 1)
    assert seconds < 12.0 and running == 0


def test_nothing_is_left_of_the_requests_of_a_service_that_has_died() -> None:
    async def main() -> None:
        strategy = ScriptedEngine(lambda r: Response(5, 0.2))
        pump = CompletionPump(strategy, fetch_block)
        await pump.submit([request("done")], frozen=False)
        await asyncio.sleep(2.0)
        await pump.submit([request("running")], frozen=False)
        await asyncio.sleep(0.5)
        await pump.forget()
        assert (await strategy.health()).running == 0
        assert await collect(pump, 1.0) == Collected([])
        await pump.submit([request("running")], frozen=False)  # the next service may ask for the same again
        await asyncio.sleep(2.0)
        (turn,) = (await collect(pump, 1.0)).turns
        assert (turn.request_id, turn.length, turn.finish_reason) == ("running", 5, FinishReason.STOP)

    run_virtual(main())


@pytest.mark.parametrize("lost_at", [0.5, 1.02], ids=["waits for a completion", "waits for more of them"])
def test_a_dead_services_call_takes_nothing_of_the_next_ones(lost_at: float) -> None:
    async def main() -> None:
        pump = CompletionPump(ScriptedEngine(lambda r: Response(50 if r.request_id == "longer" else 5, 0.2)), fetch_block)
        await pump.submit([request("old"), request("longer")], frozen=False)
        assert (await collect(pump, 10.0)).generated == {"old": 0, "longer": 0}
        old = asyncio.create_task(collect(pump, 10.0))
        await asyncio.sleep(lost_at - asyncio.get_running_loop().time())
        await pump.forget()
        await pump.submit([request("new")], frozen=False)
        turns: list[Turn] = []
        while not turns:
            turns += (await collect(pump, 10.0)).turns
        assert await old == Collected([]) and [turn.request_id for turn in turns] == ["new"]

    run_virtual(main())


async def forgotten(reference: object) -> DataProto:
    raise ConnectionError("its owner has died")


def test_a_request_whose_earlier_turns_are_lost_fails_alone() -> None:
    async def main() -> list[Turn]:
        pump = CompletionPump(ScriptedEngine(lambda r: Response(1, 1.0)), forgotten)
        late = replace(request("late"), context=TokenRow("a reference", 0, 5))
        await pump.submit([late, request("fresh")], frozen=False)
        collected = [await collect(pump, 10.0) for _ in range(3)]
        assert [list(one.generated) for one in collected] == [["fresh"], [], []]
        return [turn for one in collected for turn in one.turns]

    late, fresh = run_virtual(main())
    assert late.error == "the tokens of its earlier turns are lost: ConnectionError: its owner has died"
    assert (fresh.error, fresh.length) == (None, 1)


# ---------------------------------------------------------------- how far it is, and parts


def test_a_caller_hears_when_its_request_is_begun_with_and_every_five_seconds_how_far_it_is() -> None:
    async def main() -> list[tuple[str, int, int]]:
        engine = LocalEngine("e", ScriptedEngine(lambda r: Response(12, 1.0), slots=1))
        clock, told = asyncio.get_running_loop().time, []

        async def one(name: str) -> None:
            await ask(engine, request(name), lambda tokens: told.append((name, int(clock()), tokens)))

        await asyncio.gather(one("a"), one("b"))
        return told

    assert run_virtual(main()) == [("a", 0, 0), ("a", 5, 5), ("a", 10, 10), ("b", 12, 0), ("b", 15, 3), ("b", 20, 8)]


def lost_after(seconds: float, strategy: ScriptedEngine, *requests: GenerationRequest) -> list[Turn | BaseException]:
    async def main() -> list[Turn | BaseException]:
        engine = LocalEngine("e", strategy)
        asyncio.get_running_loop().call_later(seconds, strategy.kill, "lightning")
        return await asyncio.gather(*(ask(engine, one) for one in requests), return_exceptions=True)

    return run_virtual(main())


def test_what_an_engine_had_handed_out_survives_it() -> None:
    """Every 5 s all but the newest token; of a request that had not begun there is nothing."""
    strategy = ScriptedEngine(lambda r: Response(100, 1.0), slots=1)
    begun, queued = lost_after(12.5, strategy, request("begun"), request("queued"))
    assert isinstance(begun, EngineLost) and isinstance(queued, EngineLost)
    assert begun.partial is not None and queued.partial is None
    partial = begun.partial
    assert (partial.request_id, partial.length, partial.finish_reason, partial.error) == ("begun", 9, FinishReason.ABORT, None)
    assert partial.versions == (VersionSpan(0, 0),)
    assert partial.tokens is not None and partial.tokens.length == 11
    block = partial.tokens.block
    (whole,) = run_virtual(asyncio.wait_for(until_aborted(), None))
    assert block.ragged("input_ids").row(0).tolist() == whole
    assert block.ragged("response_mask").row(0).int().tolist() == [0, 0, *[1] * 9]
    assert block.ragged("rollout_log_probs").row(0).tolist() == [0, *[LOG_PROB] * 9]


async def until_aborted() -> list[list[int]]:
    """The tokens of the same request, after 9 s."""
    engine = LocalEngine("e", ScriptedEngine(lambda r: Response(100, 1.0)))
    task = ask(engine, request("begun"))
    await asyncio.sleep(9.001)
    engine.abort(["begun"])
    tokens = (await task).tokens
    assert tokens is not None
    return [tokens.block.ragged("input_ids").row(0).tolist()]


def test_parts_of_a_later_turn_and_of_two_versions_are_joined() -> None:
    strategy = ScriptedEngine(lambda r: Response(100, 1.0))

    async def main() -> Turn:
        engine = LocalEngine("e", strategy)
        reference = token_block([TokenRecord.given((7, 8, 9))])
        later = GenerationRequest("r", (50,), Sampling(temperature=1.0, max_tokens=100), context=TokenRow(reference, 0, 3))
        waiting = ask(engine, later)
        await asyncio.sleep(7.5)
        await strategy.begin_weight_update([])
        strategy.life.receive()
        await strategy.finish_weight_update(1)
        await asyncio.sleep(5.0)
        strategy.kill("lightning")
        with pytest.raises(EngineLost) as lost:
            await waiting
        assert lost.value.partial is not None
        return lost.value.partial

    partial = run_virtual(main())
    assert (partial.length, partial.versions) == (9, (VersionSpan(0, 0), VersionSpan(7, 1)))
    assert partial.tokens is not None
    assert partial.tokens.block.ragged("input_ids").row(0)[:4].tolist() == [7, 8, 9, 50]
    assert partial.tokens.block.ragged("response_mask").row(0).int().tolist() == [0] * 4 + [1] * 9


def test_another_engine_goes_on_from_there() -> None:
    first = ScriptedEngine(lambda r: Response(30, 1.0))
    second = Remembering(lambda r: Response(30, 1.0))

    async def main() -> tuple[Turn, float]:
        router = Router([LocalEngine("a", first), LocalEngine("b", second)], timeout_s=100.0)
        asyncio.get_running_loop().call_later(12.5, first.kill, "lightning")
        turn = await router.generate("domain", request("r"))
        return turn, asyncio.get_running_loop().time()

    turn, seconds = run_virtual(main())
    assert (turn.length, turn.text, turn.finish_reason, turn.error) == (30, "30 tokens", FinishReason.STOP, None)
    assert turn.tokens is not None and turn.tokens.length == 32 and len(second.prompts[0]) == 11
    assert 33.0 < seconds < 34.5, "3.5 s are lost, no more"


class SlowToAnswer(ScriptedEngine):
    """A response has had its last token for a second before it ends."""

    def _finish(self, run) -> None:  # type: ignore[no-untyped-def]
        asyncio.get_running_loop().call_later(1.0, super()._finish, run)


def test_whoever_goes_on_does_not_go_past_the_end_and_has_the_text() -> None:
    """The first engine is lost after the last token of a response, and before it has answered."""
    first = SlowToAnswer(lambda r: Response(10, 1.0))
    second = ScriptedEngine(lambda r: Response(10, 1.0))

    async def main() -> Turn:
        router = Router([LocalEngine("a", first), LocalEngine("b", second)], timeout_s=100.0)
        asyncio.get_running_loop().call_later(10.5, first.kill, "lightning")
        return await router.generate("domain", GenerationRequest("r", (1, 2), Sampling(temperature=1.0, max_tokens=10)))

    turn = run_virtual(main())
    assert (turn.length, turn.text, turn.tokens.length if turn.tokens else 0) == (10, "10 tokens", 12)
