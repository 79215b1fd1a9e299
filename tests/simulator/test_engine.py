from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulator_support import engine_of, finished, request
from support_local_engine import ask

from roll_lite.data.samples import FinishReason, Turn, VersionSpan
from roll_lite.scheduler.engines import EngineLost
from roll_lite.simulator.clock import run_virtual
from roll_lite.simulator.engine import EngineRates, Span


def test_passes_slow_down_as_more_runs_and_as_the_cache_fills() -> None:
    """10 passes of 2 requests: 10 * (1 + 2 * 0.5), and the cache, which holds 100, 102, ... 118 tokens (fluid: on average 110)."""
    rates = EngineRates(pass_s=1.0, request_s=0.5, cached_token_s=0.01)
    assert rates.seconds(10, 2, 100) == pytest.approx(20 + 10 * 110 * 0.01)
    assert rates.tokens(31, 2, 100) == pytest.approx(10)


@given(st.floats(1e-4, 1), st.floats(0, 0.1), st.floats(0, 1e-4), st.integers(1, 512), st.floats(0, 1e6), st.floats(0, 1e5))
def test_tokens_are_the_inverse_of_seconds(pass_s: float, request_s: float, cached_s: float, running: int, cached: float, n: float) -> None:
    rates = EngineRates(pass_s, request_s, cached_s)
    assert rates.tokens(rates.seconds(n, running, cached), running, cached) == pytest.approx(n, rel=1e-6, abs=1e-6)


def test_the_work_of_responses_is_the_time_of_full_slots() -> None:
    """4 responses of 10 tokens to prompts of 6 always keep 4 slots busy: 10 passes."""
    rates = EngineRates(pass_s=1.0, request_s=0.5, cached_token_s=0.01, prefill_token_s=0.1)
    whole = rates.seconds(10, 4, 4 * 6) + 4 * 6 * 0.1
    assert 4 * rates.work(6, 10, slots=4, prefilled=6) == pytest.approx(whole)


def test_requests_run_side_by_side_and_the_rest_waits_its_turn() -> None:
    """Two slots: a and b from 0; c takes a's place at 3 and ends at 3 + 4."""

    async def main() -> list[tuple[float, int]]:
        engine = engine_of({"a": 3, "b": 5, "c": 4}, slots=2)
        done = await asyncio.gather(*(finished(engine, request(name)) for name in "abc"))
        return [(at, turn.length) for at, turn in done]

    assert run_virtual(main()) == [(pytest.approx(3), 3), (pytest.approx(5), 5), (pytest.approx(7), 4)]


def test_a_second_request_slows_the_first_one_down() -> None:
    """1.5 s a pass alone, 2 s side by side. a has 4 tokens at 6 s, then both get 3 more until 12 s; b's fourth comes alone, in 1.5 s."""

    async def main() -> list[float]:
        engine = engine_of({"a": 7, "b": 4}, EngineRates(pass_s=1.0, request_s=0.5))
        done = await asyncio.gather(finished(engine, request("a")), finished(engine, request("b"), after=6.0))
        return [at for at, _ in done]

    assert run_virtual(main()) == pytest.approx([12.0, 13.5])


def test_a_prompt_is_computed_once_and_everything_else_waits_for_it() -> None:
    """100 tokens at 0.1 s: 10 s before the first pass. b comes at 12 with the same prompt: 1 token of it is computed."""
    rates = EngineRates(pass_s=1.0, prefill_token_s=0.1)

    async def main() -> list[tuple[float, int]]:
        engine = engine_of({"a": 5, "b": 2}, rates)
        done = await asyncio.gather(finished(engine, request("a", prompt=100)), finished(engine, request("b", prompt=100), after=12.0))
        assert engine.prefilled == 101
        return [(at, turn.cached_tokens) for at, turn in done]

    assert run_virtual(main()) == [(pytest.approx(15.1), 0), (pytest.approx(14.1), 99)]


def test_max_tokens_ends_a_response_and_says_so() -> None:
    async def main() -> list[Turn]:
        engine = engine_of({"a": 9, "b": 4})
        done = await asyncio.gather(finished(engine, request("a", max_tokens=5)), finished(engine, request("b", max_tokens=5)))
        return [turn for _, turn in done]

    assert [(turn.length, turn.finish_reason) for turn in run_virtual(main())] == [(5, FinishReason.LENGTH), (4, FinishReason.STOP)]


def test_an_aborted_response_goes_on_elsewhere_to_the_same_length() -> None:
    async def main() -> None:
        engine, other = engine_of({"a": 10}), engine_of({"a": 10})
        asked = asyncio.ensure_future(finished(engine, request("a", prompt=6)))
        await asyncio.sleep(3.5)
        engine.abort(["a/p/0/0/a/0"])
        at, turn = await asked
        assert (at, turn.length, turn.finish_reason) == (3.5, 3, FinishReason.ABORT)
        assert turn.tokens is not None and turn.tokens.length == 9
        at, turn = await finished(other, request("a", context=9, resumed=3))
        assert (at, turn.length, turn.finish_reason, turn.versions) == (pytest.approx(10.5), 7, FinishReason.STOP, (VersionSpan(0, 0),))
        assert turn.tokens is not None and turn.tokens.length == 16
        assert engine.running == other.running == 0

    run_virtual(main())


def test_what_waits_is_aborted_with_nothing() -> None:
    async def main() -> None:
        engine = engine_of({"a": 10, "b": 10}, slots=1)
        first, second = (asyncio.ensure_future(finished(engine, request(name))) for name in "ab")
        await asyncio.sleep(1)
        engine.abort(["a/p/0/0/b/0", "unknown"])
        _, turn = await second
        assert (turn.length, turn.finish_reason) == (0, FinishReason.ABORT)
        assert (await first)[0] == pytest.approx(10)

    run_virtual(main())


def test_an_update_stops_everything_and_stamps_what_comes_after_it() -> None:
    """Frozen from 2.5 to 6.5: the token in the making waits as well. b is admitted afterwards and has one version only."""

    async def main() -> None:
        engine = engine_of({"a": 4, "b": 2})
        a = asyncio.ensure_future(finished(engine, request("a")))
        await asyncio.sleep(2.5)
        engine.freeze()
        b = asyncio.ensure_future(finished(engine, request("b")))
        await asyncio.sleep(4)
        engine.update(7)
        at, turn = await a
        assert (at, turn.versions) == (pytest.approx(8), (VersionSpan(0, 0), VersionSpan(2, 7)))
        at, turn = await b
        assert (at, turn.versions) == (pytest.approx(8.5), (VersionSpan(0, 7),))

    run_virtual(main())


def test_an_update_computes_keys_and_values_of_what_runs_anew() -> None:
    """0.1 s a token. The prompt of 100 is computed once, of b its last token: 10.1 s. At 12.1 both have 2 tokens. The update at 13.1 costs
    100 + 2 and 1 + 2 tokens, 10.5 s; a's last 3 tokens end at 26.6. b ended then too, and c finds nothing of the prompt."""

    async def main() -> None:
        engine = engine_of({"a": 5, "b": 5, "c": 1}, EngineRates(pass_s=1.0, prefill_token_s=0.1))
        asked = [asyncio.ensure_future(finished(engine, request(name, prompt=100))) for name in "ab"]
        await asyncio.sleep(12.1)
        engine.freeze()
        await asyncio.sleep(1)
        engine.update(1)
        for at, turn in await asyncio.gather(*asked):
            assert (at, turn.length, turn.versions) == (pytest.approx(26.6), 5, (VersionSpan(0, 0), VersionSpan(2, 1)))
        assert engine.prefilled == 101 + 105
        at, turn = await finished(engine, request("c", prompt=100))
        assert (at, turn.cached_tokens) == (pytest.approx(26.6 + 10 + 1), 0)

    run_virtual(main())


def test_a_full_cache_puts_the_newest_back_which_is_prefilled_again() -> None:
    """20 tokens of cache. a and b start with 5 each and have 5 more at 5 s: full. b gives way with its 5; a ends at 7, and b needs its
    10 tokens of prefill (0.1 s each) and 3 passes."""

    async def main() -> None:
        engine = engine_of({"a": 7, "b": 8}, EngineRates(pass_s=1.0, prefill_token_s=0.1), cached_tokens=20)
        done = await asyncio.gather(*(finished(engine, request(name, prompt=5)) for name in "ab"))
        # One prompt is computed, of the other its last token.
        start = 6 * 0.1
        assert [at for at, _ in done] == pytest.approx([start + 7, start + 7 + 1.0 + 3])
        assert [turn.length for _, turn in done] == [7, 8]
        assert (engine.put_back, engine.prefilled) == (1, 6 + 10)

    run_virtual(main())


def test_a_prompt_that_does_not_fit_beside_the_others_waits() -> None:
    async def main() -> list[float]:
        engine = engine_of({"a": 4, "b": 4}, cached_tokens=20)
        return [at for at, _ in await asyncio.gather(*(finished(engine, request(name, prompt=12)) for name in "ab"))]

    assert run_virtual(main()) == pytest.approx([4, 8])


@pytest.mark.parametrize(("hangs_at", "kept", "versions"), [(99, 10, (0, 3)), (9, 5, (0, 3)), (5.5, 5, (0, 3)), (2, 0, ())])
def test_what_a_dead_engine_has_reported_goes_on_elsewhere(hangs_at: float, kept: int, versions: tuple[int, ...]) -> None:
    """Every 5 s, until it stands still: of a, which runs under version 0 and from its fourth token on under 3. b waits for its slot."""

    async def main() -> None:
        engine, other = engine_of({"a": 20, "b": 9}, slots=1), engine_of({"a": 20})
        asked = [asyncio.ensure_future(finished(engine, request(name, prompt=6))) for name in "ab"]
        asyncio.get_running_loop().call_later(3.5, engine.freeze)
        asyncio.get_running_loop().call_later(3.5, engine.update, 3)
        asyncio.get_running_loop().call_later(hangs_at, engine.hang)
        await asyncio.sleep(14.5)
        engine.kill("power")
        lost = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(one, EngineLost) and one.cause == "power" for one in lost)
        partial, nothing = (one.partial for one in lost if isinstance(one, EngineLost))
        assert nothing is None and (partial is None) == (kept == 0)
        if partial is not None:
            assert partial.tokens is not None
            assert (partial.length, partial.tokens.length, partial.finish_reason) == (kept, 6 + kept, FinishReason.ABORT)
            assert tuple(span.version for span in partial.versions) == versions
            at, turn = await finished(other, request("a", context=6 + kept, resumed=kept))
            assert (at, turn.length) == (pytest.approx(14.5 + 20 - kept), 20 - kept)
        with pytest.raises(EngineLost):
            await ask(engine, request("a"))

    run_virtual(main())


def test_it_tells_when_it_begins_and_from_then_on_how_far_it_is() -> None:
    async def main() -> list[tuple[str, float, int]]:
        engine, clock, told = engine_of({"a": 13, "b": 1}, slots=1), asyncio.get_running_loop().time, []

        async def one(name: str) -> None:
            await ask(engine, request(name), lambda tokens: told.append((name, round(clock(), 3), tokens)))

        await asyncio.gather(one("a"), one("b"))
        return told

    assert run_virtual(main()) == [("a", 0, 0), ("a", 5, 5), ("a", 10, 10), ("b", 13, 0)]


def test_what_ran_is_written_down_by_slot_and_version() -> None:
    spans: list[Span] = []

    async def main() -> None:
        engine = engine_of({"a": 4, "b": 2}, spans=spans)
        asked = asyncio.gather(*(finished(engine, request(name)) for name in "ab"))
        await asyncio.sleep(3)
        engine.freeze()
        await asyncio.sleep(1)
        engine.update(1)
        await asked

    run_virtual(main())
    assert [(span.slot, span.start, span.end, span.version, span.domain) for span in spans] == [
        (1, 0.0, pytest.approx(2), 0, "a"),
        (0, 0.0, pytest.approx(3), 0, "a"),
        (0, pytest.approx(4), pytest.approx(5), 1, "a"),
    ]


def test_a_thousand_engines_take_events_not_tokens() -> None:
    """800 million tokens would take hours one by one."""

    async def main() -> int:
        lengths = {str(number): 100_000 for number in range(8)}
        engines = [engine_of(lengths, EngineRates(0.01, 1e-5, 1e-9)) for _ in range(1000)]
        numbered = [request(name, max_tokens=10**6) for name in lengths]
        turns = await asyncio.gather(*(ask(engine, one) for one in numbered for engine in engines))
        return sum(turn.length for turn in turns)

    assert run_virtual(main()) == 8 * 1000 * 100_000


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_request_ends_once_whatever_happens(data: st.DataObject) -> None:
    """Continued after every abort, a response has exactly its length, and its tokens' versions only grow."""
    count = data.draw(st.integers(1, 8))
    lengths = {str(number): data.draw(st.integers(1, 30)) for number in range(count)}
    cached = data.draw(st.sampled_from([None, 60, 90]))
    events = data.draw(st.lists(st.tuples(st.floats(0.1, 9), st.sampled_from(["abort", "abort all", "freeze", "update"])), max_size=12))

    async def main() -> None:
        engine = engine_of(lengths, EngineRates(1.0, 0.1, 0.001, 0.01), slots=3, cached_tokens=cached)
        done: dict[str, int] = {}

        async def whole(name: str) -> None:
            total, legs, one = 0, 0, request(name, prompt=4)
            while True:
                turn = await ask(engine, one)
                assert [span.start for span in turn.versions] == sorted({span.start for span in turn.versions})
                assert [span.version for span in turn.versions] == sorted({span.version for span in turn.versions})
                total += turn.length
                assert turn.tokens is not None and turn.tokens.length == 4 + total
                if turn.finish_reason is not FinishReason.ABORT:
                    break
                legs += 1
                one = request(name, context=4 + total, resumed=total)
            assert name not in done
            done[name] = total

        async def disturb() -> None:
            version = 0
            for pause, event in events:
                await asyncio.sleep(pause)
                if event == "freeze":
                    engine.freeze()
                elif event == "update":
                    version += 1
                    engine.update(version)
                else:
                    names = list(lengths)[: 1 if event == "abort" else None]
                    engine.abort([f"a/p/0/0/{name}/0" for name in names])
            engine.update(version + 1)

        await asyncio.gather(disturb(), *(whole(name) for name in lengths))
        assert done == lengths
        assert engine.generated == sum(lengths.values())
        assert engine.running == 0 and engine._cached == 0.0

    run_virtual(main())
