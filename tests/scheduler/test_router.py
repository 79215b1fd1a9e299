from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import pytest
from scheduler_support import by_tokens, make_domain, make_service, prompt_of
from support_local_engine import LocalEngine, ask
from support_scripted import Response, ScriptedEngine

from roll_lite.data.samples import FinishReason, GenerationRequest, Sampling, TokenRow, Turn, VersionSpan
from roll_lite.scheduler.choice import EngineLoad
from roll_lite.scheduler.engines import Asked, EngineLost
from roll_lite.scheduler.flight import ExpectedLength, Flight, RequestFailed
from roll_lite.scheduler.router import NoEngineLeft, Router
from roll_lite.simulator.clock import run_virtual


def answer(engine: HeldEngine, name: str) -> None:
    engine.held.pop(name).set_result(Turn(name, 3, finish_reason=FinishReason.STOP))


def request(name: str, prompt_tokens: int = 4, max_tokens: int = 100) -> GenerationRequest:
    return GenerationRequest(name, tuple(range(prompt_tokens)), Sampling(temperature=1.0, max_tokens=max_tokens))


class HeldEngine:
    """Answers when told to. `begins`: with every request, as soon as it gets it."""

    def __init__(self, name: str, begins: bool = True) -> None:
        self.name = name
        self.begins = begins
        self.tell: dict[str, Asked] = {}
        self.held: dict[str, asyncio.Future[Turn | None]] = {}
        self.aborted: list[str] = []
        self.aborted_before: set[str] = set()
        """They came."""
        self.asked: list[GenerationRequest] = []

    def send(self, asked: Asked) -> None:
        request = asked.request
        self.asked.append(request)
        if request.request_id in self.aborted_before:
            self.aborted_before.remove(request.request_id)
            asked.answer.set_result(Turn(request.request_id, finish_reason=FinishReason.ABORT))
            return
        self.held[request.request_id] = asked.answer
        self.tell[request.request_id] = asked
        if self.begins:
            asyncio.get_running_loop().call_soon(self.say, request.request_id, 0)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            if request_id not in self.held:
                self.aborted_before.add(request_id)
            elif not self.held[request_id].done():
                self.held.pop(request_id).set_result(Turn(request_id, finish_reason=FinishReason.ABORT))

    def say(self, request_id: str, tokens: int) -> None:
        """So many it has generated."""
        self.tell[request_id].generated(tokens)

    def answer(self, request_id: str, tokens: int = 10, error: str | None = None) -> None:
        self.held.pop(request_id).set_result(Turn(request_id, tokens, finish_reason=FinishReason.STOP, error=error))


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_long_request_weighs_as_much_as_many_short_ones() -> None:
    a, b = HeldEngine("a", begins=False), HeldEngine("b", begins=False)
    router = Router([a, b], timeout_s=60)
    tasks = [asyncio.create_task(router.generate("long", request("long", prompt_tokens=400, max_tokens=600)))]
    await settle()
    tasks += [asyncio.create_task(router.generate("short", request(f"short {i}", prompt_tokens=40, max_tokens=60))) for i in range(11)]
    await settle()
    # 10 short ones weigh 1000 tokens as the long one does; the tie goes to the first engine.
    assert list(a.held) == ["long", "short 10"]
    assert list(b.held) == [f"short {i}" for i in range(10)]
    for engine in (a, b):
        for name in list(engine.held):
            engine.answer(name)
    await asyncio.gather(*tasks)
    assert [(load.tokens, load.requests) for load in router.engines] == [(0, 0), (0, 0)]


async def test_expected_lengths_are_learned_per_domain() -> None:
    a, b = HeldEngine("a"), HeldEngine("b")
    router = Router([a, b], timeout_s=60)
    for domain, tokens in (("long", 1000), ("short", 10)):
        for i in range(2000):
            task = asyncio.create_task(router.generate(domain, request(f"{domain} {i}", prompt_tokens=10, max_tokens=1000)))
            await settle()
            (a if a.held else b).answer(f"{domain} {i}", tokens)
            await task
    task = asyncio.create_task(router.generate("long", request("L", prompt_tokens=10, max_tokens=1000)))
    await settle()
    loaded = next(load for load in router.engines if load.requests)
    assert loaded.tokens == pytest.approx(1010, rel=0.01)
    task.cancel()
    task = asyncio.create_task(router.generate("short", request("S", prompt_tokens=10, max_tokens=1000)))
    await settle()
    loaded = next(load for load in router.engines if load.requests)
    assert loaded.tokens == pytest.approx(20, rel=0.15)
    task.cancel()


async def test_a_response_that_was_interrupted_after_its_last_token_asks_no_engine() -> None:
    engine = HeldEngine("a")
    so_far = Turn("", 10, finish_reason=FinishReason.ABORT, tokens=TokenRow("block", 0, 14))
    turn = await Router([engine], timeout_s=60).generate("d", request("full", max_tokens=10), so_far)
    assert turn == so_far._replace(finish_reason=FinishReason.LENGTH) and not engine.asked


async def test_load_is_released_on_failure_cancellation_and_time_out() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=0.05)
    failing = asyncio.create_task(router.generate("d", request("failing")))
    cancelled = asyncio.create_task(router.generate("d", request("cancelled")))
    late = asyncio.create_task(router.generate("d", request("late")))
    await settle()
    assert router.engines[0].tokens == 3 * 104
    engine.answer("failing", error="out of cache")
    with pytest.raises(RequestFailed, match="out of cache"):
        await failing
    cancelled.cancel()
    with pytest.raises(RequestFailed, match=r"time-out: no response within 0\.05 s"):
        await late
    await settle()
    assert (router.engines[0].tokens, router.engines[0].requests) == (0, 0)
    assert engine.aborted == ["cancelled", "late"]


async def test_an_aborted_completion_is_a_failure_not_a_short_sample() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("r")))
    await settle()
    engine.held["r"].set_result(Turn("r", 2, "half", FinishReason.ABORT))
    with pytest.raises(RequestFailed, match="aborted"):
        await task


async def test_engines_that_are_lost_while_idle_get_nothing_and_count_for_nothing() -> None:
    """They would be the first choice, and three of them the end of a request."""
    dead, alive = [HeldEngine(f"dead {i}") for i in range(3)], HeldEngine("alive")
    router = Router([*dead, alive], timeout_s=60, engine_slots=4)
    for engine in dead:
        router.engine_lost(engine.name, "its node is gone")
    assert router.takes(0) == 5
    tasks = [asyncio.create_task(router.generate("d", request(f"r{i}"))) for i in range(2)]
    await settle()
    assert sorted(alive.held) == ["r0", "r1"] and not any(engine.held for engine in dead)
    router.engine_lost("alive", "power")
    alive.held["r0"].set_exception(EngineLost("alive", "power"))
    with pytest.raises(NoEngineLeft, match="dead 2: its node is gone; alive: power"):
        await tasks[0]
    tasks[1].cancel()


async def test_requests_of_a_dead_engine_go_elsewhere() -> None:
    dying, sound = HeldEngine("dying"), HeldEngine("sound")
    router = Router([dying, sound], timeout_s=60)
    tasks = [asyncio.create_task(router.generate("d", request(f"r{i}"))) for i in range(4)]
    await settle()
    moved = list(dying.held)
    assert len(moved) == 2
    for name in moved:
        dying.held[name].set_exception(EngineLost("dying", "CUDA error"))
    await settle()
    assert sorted(sound.held) == ["r0", "r1", "r2", "r3"]
    assert dying.aborted == []
    for name in list(sound.held):
        sound.answer(name)
    await asyncio.gather(*tasks)
    later = asyncio.create_task(router.generate("d", request("later")))
    await settle()
    assert list(sound.held) == ["later"]
    sound.held["later"].set_exception(EngineLost("sound", "process killed"))
    with pytest.raises(NoEngineLeft, match="dying: CUDA error; sound: process killed"):
        await later


# ---------------------------------------------------------------- load as engines report it


def test_a_response_that_has_outlived_most_has_more_to_come_than_a_new_one() -> None:
    known = ExpectedLength(1000)
    for _ in range(600):
        known.observe(20)
    for _ in range(100):
        known.observe(400)
    # Of the last 512 responses 412 had 20 tokens and 100 had 400, or a few less; one of max_tokens always counts among them.
    assert known.left(0) == pytest.approx((412 * 20 + 100 * 400 + 1000) / 513, rel=0.2)
    assert known.left(30) == pytest.approx((100 * 400 + 1000) / 101 - 30, rel=0.02)
    assert known.left(400) == pytest.approx(600)
    assert known.left(1000) == 0


async def test_an_engine_stuck_with_long_responses_gets_nothing_new_before_the_others() -> None:
    """Each has as many requests of the same domain. Before the engines report, the loads are equal."""
    a, b = HeldEngine("a", begins=False), HeldEngine("b", begins=False)
    router = Router([a, b], timeout_s=60)
    for i in range(600):
        task = asyncio.create_task(router.generate("d", request(f"warm {i}", prompt_tokens=10, max_tokens=1000)))
        await settle()
        (a if a.held else b).answer(f"warm {i}", 1000 if i % 10 == 0 else 20)
        await task
    tasks = [asyncio.create_task(router.generate("d", request(f"r{i}", prompt_tokens=10, max_tokens=1000))) for i in range(8)]
    await settle()
    assert len(a.held) == len(b.held) == 4
    for name in a.held:
        a.say(name, 300)  # the long ones all are here
    for name in b.held:
        b.say(name, 10)
    assert router.engines[0].left == pytest.approx(4 * 700)
    assert router.engines[1].left < 4 * 130
    tasks += [asyncio.create_task(router.generate("d", request(f"new {i}", prompt_tokens=10, max_tokens=1000))) for i in range(8)]
    await settle()
    assert not any(name.startswith("new") for name in a.held), "by expected lengths alone half of them would go there"
    for engine in (a, b):
        for name in list(engine.held):
            engine.answer(name)
    await asyncio.gather(*tasks)
    assert [(load.tokens, load.done) for load in router.engines] == [(0, 0), (0, 0)]


async def test_a_prompt_counts_until_the_engine_has_begun_with_it() -> None:
    engine = HeldEngine("a", begins=False)
    router = Router([engine], timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("r", prompt_tokens=4000, max_tokens=100)))
    await settle()
    assert router.engines[0].left == 4100
    engine.say("r", 1)
    assert (router.engines[0].left, router.engines[0].tokens) == (99, 4100)
    engine.say("r", 98)
    assert router.engines[0].left == 2
    engine.answer("r")
    await task
    assert router.engines[0].left == 0


class RoundRobin(Router):
    """The baseline: as many requests for each engine."""

    _turn: itertools.count[int]

    def _choose(self, flight: Flight) -> tuple[EngineLoad, float]:
        self._turn = getattr(self, "_turn", itertools.count())
        return self.engines[next(self._turn) % len(self.engines)], 0.0


def makespan(router_class: type[Router]) -> float:
    """Time for four engines to serve two domains, lengths 20 and 400, that take turns in a pattern of four."""

    async def main() -> float:
        def script(request: GenerationRequest) -> Response:
            return Response(400 if request.sampling.max_tokens == 500 else 20, 0.01)

        engines = [ScriptedEngine(script, slots=2) for _ in range(4)]
        router = router_class([LocalEngine(f"e{i}", engine) for i, engine in enumerate(engines)], timeout_s=1e9)
        calls = []
        for i in range(80):
            domain, limit = ("long", 500) if i % 4 == 0 else ("short", 50)
            calls.append(router.generate(domain, request(f"r{i}", max_tokens=limit)))
        await asyncio.gather(*calls)
        return asyncio.get_running_loop().time()

    return run_virtual(main())


def test_tokens_in_flight_beat_round_robin_by_a_third_at_least() -> None:
    # In turns, one engine gets every long request: 20 * 400 tokens in 2 slots are 40 s. Spread evenly, an engine has
    # (20 * 400 + 60 * 20) / 4 tokens in 2 slots, 11.5 s, plus at most one long request that starts last.
    assert makespan(RoundRobin) == pytest.approx(40.0, rel=0.01)
    assert makespan(Router) < 40.0 * 2 / 3
    assert makespan(Router) <= 11.5 + 4.0


async def test_deterministic_routing_depends_on_the_id_only() -> None:
    async def chosen(names: list[str]) -> dict[str, str]:
        engines = [HeldEngine(f"e{i}") for i in range(3)]
        router = Router(engines, timeout_s=60, deterministic=True)
        tasks = [asyncio.create_task(router.generate("d", request(name))) for name in names]
        await settle()
        found = {name: engine.name for engine in engines for name in engine.held}
        for task in tasks:
            task.cancel()
        return found

    names = [f"r{i}" for i in range(60)]
    assert await chosen(names) == await chosen(names[::-1])
    assert set((await chosen(names)).values()) == {"e0", "e1", "e2"}


async def test_a_wave_that_lost_an_engine_starts_again_there_with_what_it_had_answered() -> None:
    """Its successor gets the same requests as in an undisturbed run, together; those of other engines stay answered."""
    engines = [HeldEngine("a"), HeldEngine("b")]
    router = Router(engines, timeout_s=60, deterministic=True, engines_restart=True)
    names = [f"r{number}" for number in range(12)]
    tasks = {name: asyncio.create_task(router.generate("d", request(name))) for name in names}
    await settle()
    at = {name: engine for engine in engines for name in engine.held}
    first = [request.request_id for request in engines[0].asked]
    assert set(at) == set(names) and len(first) > 2
    answer(at[first[0]], first[0])
    for name in first[1:]:
        engines[0].held[name].set_exception(EngineLost("a", "killed", Turn(name, 5)))
    await settle()
    for name in names:
        if name not in first:
            answer(engines[1], name)
    await settle()
    assert not any(task.done() for task in tasks.values()), "the wave waits for the engine's successor"
    successor = HeldEngine("a")
    router.add(successor)
    await settle()
    assert successor.asked == engines[0].asked and len(engines[1].asked) == len(names) - len(first)
    for name in first:
        answer(successor, name)
    await settle()
    assert [(await tasks[name]).length for name in names] == [3] * len(names)


async def test_a_wave_goes_on_without_an_engine_that_is_given_up() -> None:
    engines = [HeldEngine("a"), HeldEngine("b")]
    router = Router(engines, timeout_s=60, deterministic=True, engines_restart=True)
    tasks = [asyncio.create_task(router.generate("d", request(f"r{number}"))) for number in range(6)]
    await settle()
    router.engine_lost("a", "killed")
    for name in list(engines[0].held):
        engines[0].held.pop(name).set_exception(EngineLost("a", "killed"))
    for name in list(engines[1].held):
        answer(engines[1], name)
    await settle()
    router.give_up("a")
    await settle()
    assert len(engines[1].held) == len(engines[0].asked)
    for name in list(engines[1].held):
        answer(engines[1], name)
    assert len(await asyncio.gather(*tasks)) == 6


def test_a_request_that_starts_again_has_its_whole_time() -> None:
    """Six of its ten seconds were used when its engine was lost; at the successor it takes eight."""

    async def main() -> tuple[int, list[str]]:
        engine, successor = HeldEngine("a"), HeldEngine("a")
        router = Router([engine], timeout_s=10, deterministic=True, engines_restart=True)
        task = asyncio.create_task(router.generate("d", request("r0")))
        await asyncio.sleep(6)
        engine.held.pop("r0").set_exception(EngineLost("a", "killed"))
        await asyncio.sleep(1)
        router.add(successor)
        await asyncio.sleep(8)
        answer(successor, "r0")
        return (await task).length, successor.aborted

    assert run_virtual(main()) == (3, [])


async def test_a_request_that_fails_in_a_wave_holds_up_no_other() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60, deterministic=True)
    tasks = [asyncio.create_task(router.generate("d", request(f"r{number}"))) for number in range(3)]
    await settle()
    engine.held.pop("r0").set_result(Turn("r0", error="too long"))
    tasks[1].cancel()
    answer(engine, "r2")
    assert (await tasks[2]).length == 3
    with pytest.raises(RequestFailed, match="too long"):
        await tasks[0]


def test_domains_share_one_view_of_the_engines() -> None:
    async def main() -> list[float]:
        domains = [make_domain("long", 0, share=1, max_tokens=500), make_domain("short", 1, share=3, max_tokens=50)]

        def script(request: GenerationRequest) -> Response:
            return Response(400 if prompt_of(request)[0] == 0 else 40, 0.01)

        service, _, _ = make_service(domains, [script, script], slots=4)
        tokens = []
        for _ in range(3):
            result = await service.next_batch(16)
            tokens.append(result.stats.wall_s)
        return tokens

    # 4 long groups of 4 * 400 and 12 short ones of 4 * 40 tokens: 8320 tokens over 8 slots are 10.4 s at best.
    walls = run_virtual(main())
    assert all(10.4 - 1e-6 <= wall <= 14.5 for wall in walls), walls


async def test_by_tokens_helper_ends_with_stop() -> None:
    engine = LocalEngine("e", ScriptedEngine(by_tokens(3, 0.0)))
    turn = await ask(engine, request("r"))
    assert (turn.length, turn.finish_reason) == (3, FinishReason.STOP)


# ---------------------------------------------------------------- prefixes, domains in turns, engines that come and go


async def test_a_prompt_goes_where_it_is_held_as_long_as_that_costs_no_balance() -> None:
    a, b = HeldEngine("a"), HeldEngine("b")
    router = Router([a, b], timeout_s=60)
    others = [request(f"d/{i}/0/{i}/0/0", prompt_tokens=3000, max_tokens=100) for i in range(2)]
    members = [request(f"d/7/0/7/{i}/0", prompt_tokens=1000, max_tokens=100) for i in range(14)]
    tasks = [asyncio.create_task(router.generate("d", each)) for each in (*others, members[0])]
    await settle()
    assert "d/7/0/7/0/0" in a.held
    b_had = router.engines[1].tokens
    tasks += [
        asyncio.create_task(router.generate("d", request(f"d/{i}/0/{i}/0/0", prompt_tokens=0, max_tokens=100))) for i in range(10, 20)
    ]
    await settle()
    assert router.engines[1].tokens > b_had
    tasks += [asyncio.create_task(router.generate("d", each)) for each in members[1:]]
    await settle()
    # Both have as much to do. Where the prompt is held, ten responses more take as long as computing it once more elsewhere.
    assert [sum(name.startswith("d/7/") for name in engine.held) for engine in (a, b)] == [12, 2]
    for task in tasks:
        task.cancel()


async def test_a_later_turn_goes_back_to_the_engine_of_the_earlier_ones() -> None:
    """Not to another that has a sample of the same group: that one has the prompt alone."""
    engines = [HeldEngine(f"e{i}") for i in range(4)]
    router = Router(engines, timeout_s=60)
    tasks = [asyncio.create_task(router.generate("d", request(f"d/7/0/7/{i}/0", prompt_tokens=1, max_tokens=100))) for i in range(3)]
    await settle()
    assert [list(engine.held) for engine in engines[:3]] == [[f"d/7/0/7/{i}/0"] for i in range(3)]
    engines[2].answer("d/7/0/7/2/0", tokens=500)
    await settle()
    turn = GenerationRequest("d/7/0/7/2/0/turn1", (1, 2), Sampling(1.0, 100), TokenRow(None, 0, 501))
    tasks += [asyncio.create_task(router.generate("d", request(f"d/{i}/0/{i}/0/0", max_tokens=100))) for i in (20, 21)]  # both are busy
    await settle()
    tasks.append(asyncio.create_task(router.generate("d", turn)))
    await settle()
    assert turn.request_id in engines[2].held
    for task in tasks:
        task.cancel()


@pytest.mark.parametrize("changed", [False, True])
async def test_nobody_holds_a_prompt_under_new_weights(changed: bool) -> None:
    a, b = HeldEngine("a"), HeldEngine("b")
    router = Router([a, b], timeout_s=60)
    first = asyncio.create_task(router.generate("d", request("d/7/0/7/0/0", prompt_tokens=1000, max_tokens=100)))
    await settle()
    a.answer("d/7/0/7/0/0")
    await first
    if changed:
        router.weights_changed()
    busy = asyncio.create_task(router.generate("d", request("d/8/0/8/0/0", prompt_tokens=10, max_tokens=100)))
    await settle()
    member = asyncio.create_task(router.generate("d", request("d/7/0/7/1/0", prompt_tokens=1000, max_tokens=100)))
    await settle()
    assert (list(a.held), list(b.held)) == ((["d/8/0/8/0/0"], ["d/7/0/7/1/0"]) if changed else (["d/8/0/8/0/0", "d/7/0/7/1/0"], []))
    for task in (busy, member):
        task.cancel()


@pytest.mark.parametrize("turns", range(6))
async def test_a_place_that_was_found_before_a_hold_is_not_used_in_it(turns: int) -> None:
    """Weights may be on their way to the engine by then."""
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60, engine_slots=1)
    tasks = [asyncio.create_task(router.generate("d", request(f"d/{i}/0/{i}/0/0"))) for i in range(4)]
    await settle()
    engine.answer("d/0/0/0/0/0")
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(5):
        await router.hold(interrupt=True)
    await settle()
    assert not engine.held
    router.release()
    await settle()
    for _ in range(3):
        for request_id in list(engine.held):
            engine.answer(request_id)
        await settle()
    assert [task.result().length for task in tasks] == [10] * 4


async def test_a_place_at_an_engine_that_leaves_meanwhile_is_not_used() -> None:
    engines = [HeldEngine("a"), HeldEngine("b")]
    router = Router(engines, timeout_s=60, engine_slots=1)
    tasks = [asyncio.create_task(router.generate("d", request(f"d/{i}/0/{i}/0/0"))) for i in range(5)]
    await settle()
    first = next(iter(engines[0].held))
    engines[0].answer(first)
    for _ in range(10):
        await asyncio.sleep(0)
        if router.engines[0].requests > len(engines[0].held):  # a place is found, and nobody has come yet
            break
    else:
        raise AssertionError("the moment has passed")
    router.remove("a")
    await settle()
    assert not engines[0].held
    for task in tasks:
        task.cancel()


async def test_lengths_of_a_shorter_validation_bound_nothing() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60)
    tasks = [asyncio.create_task(router.generate("d", request(f"d/{i}/-1/{i}/0/0", prompt_tokens=0, max_tokens=64))) for i in range(2)]
    await settle()
    before = router.engines[0].tokens
    tasks.append(asyncio.create_task(router.generate("d", request("d/9/0/9/0/0", prompt_tokens=0, max_tokens=4096))))
    await settle()
    assert router.engines[0].tokens - before == 4096
    for task in tasks:
        task.cancel()


async def test_domains_with_long_answers_do_not_keep_the_others_waiting() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60, engine_slots=8)
    calls = [router.generate("long", request(f"long/{i}/0/{i}/0/0")) for i in range(100)]
    tasks = [asyncio.create_task(call) for call in calls]
    await settle()
    tasks += [asyncio.create_task(router.generate("short", request(f"short/{i}/0/{i}/0/0"))) for i in range(5)]
    await settle()
    assert len(engine.held) == 10
    for name in list(engine.held)[:5]:
        engine.answer(name)
        await settle()
    assert sum(name.startswith("short") for name in engine.held) == 5
    for task in tasks:
        task.cancel()


async def test_an_engine_that_comes_gets_what_waits_and_one_that_leaves_ends_what_it_has() -> None:
    first, second = HeldEngine("first"), HeldEngine("second")
    router = Router([first], timeout_s=60, engine_slots=4)
    rooms: list[bool] = []
    router.on_room = lambda: rooms.append(router.has_room())
    tasks = [asyncio.create_task(router.generate("d", request(f"d/{i}/0/{i}/0/0"))) for i in range(10)]
    await settle()
    assert (len(first.held), router.has_room()) == (5, False)
    router.add(second)
    await settle()
    assert (len(first.held), len(second.held), rooms[-1]) == (5, 5, True)
    draining = asyncio.create_task(router.drain("first"))
    await settle()
    for name in list(first.held):
        assert not draining.done()
        first.answer(name)
        await settle()
    assert draining.done() and [load.client.name for load in router.engines] == ["second"]
    router.add(first)
    for name in list(second.held):
        second.held[name].set_exception(EngineLost("second", "power"))
    await settle()
    assert len(first.held) == 5
    for name in list(first.held):
        first.answer(name)
    await asyncio.gather(*tasks)


async def test_requests_wait_for_the_successor_of_the_last_engine_which_takes_its_place() -> None:
    lost, other, successor = HeldEngine("a"), HeldEngine("b"), HeldEngine("a")
    router = Router([lost, other], timeout_s=60, engines_restart=True)
    router.engine_lost("b", "power")
    task = asyncio.create_task(router.generate("d", request("r")))
    await settle()
    lost.held.pop("r").set_exception(EngineLost("a", "power"))
    await settle()
    assert not task.done() and router.has_room()
    router.add(successor)
    await settle()
    successor.answer("r")
    assert (await task).length == 10
    assert [(load.client, load.dead) for load in router.engines] == [(successor, None), (other, "power")], "hashes choose by place"


async def test_of_an_engine_that_is_removed_the_rest_goes_on_elsewhere_with_its_tokens() -> None:
    class Partial(HeldEngine):
        def abort(self, request_ids: Sequence[str]) -> None:
            for request_id in request_ids:
                span = (VersionSpan(0, 3),)
                row = TokenRow(request_id, 0, 4 + 7)
                self.held.pop(request_id).set_result(Turn(request_id, 7, "seven", FinishReason.ABORT, span, tokens=row))

    first, second = Partial("first"), HeldEngine("second")
    router = Router([first], timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("d/1/0/1/0/0", max_tokens=100)))
    await settle()
    router.add(second)
    router.remove("first")
    await settle()
    (went_on,) = second.asked
    assert (went_on.request_id, went_on.prompt_ids, went_on.resumed_tokens) == ("d/1/0/1/0/0~1", (), 7)
    assert (went_on.sampling.max_tokens, went_on.context) == (93, TokenRow("d/1/0/1/0/0", 0, 11))
    second.held[went_on.request_id].set_result(
        Turn(
            went_on.request_id, 5, "seven and five", FinishReason.STOP, (VersionSpan(0, 3), VersionSpan(2, 4)), tokens=TokenRow("b", 0, 16)
        )
    )
    turn = await task
    assert (turn.request_id, turn.length, turn.text) == ("d/1/0/1/0/0", 12, "seven and five")
    assert turn.versions == (VersionSpan(0, 3), VersionSpan(9, 4))
    assert turn.tokens == TokenRow("b", 0, 16)


async def test_requests_of_an_engine_that_is_drained_in_a_hurry_continue_elsewhere() -> None:
    class Answers(HeldEngine):
        def abort(self, request_ids: Sequence[str]) -> None:
            for request_id in request_ids:
                partial = Turn(request_id, 7, "seven", FinishReason.ABORT, (VersionSpan(0, 3),), tokens=TokenRow(request_id, 0, 11))
                asyncio.get_running_loop().call_later(0.01, self.held.pop(request_id).set_result, partial)

    first, second = Answers("first"), HeldEngine("second")
    router = Router([first], timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("r", max_tokens=100)))
    await settle()
    router.add(second)
    draining = asyncio.create_task(router.drain("first", interrupt=True))
    await settle()
    assert not draining.done(), "it is done only when the engine has handed out its tokens"
    await draining
    await settle()
    assert [load.client.name for load in router.engines] == ["second"]
    (went_on,) = second.asked
    assert (went_on.resumed_tokens, went_on.sampling.max_tokens) == (7, 93)
    task.cancel()


async def test_a_drained_engine_may_be_removed_before_it_has_ended_what_it_had() -> None:
    first, second = HeldEngine("first"), HeldEngine("second")
    router = Router([first], timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("r")))
    await settle()
    router.add(second)
    draining = asyncio.create_task(router.drain("first"))
    await settle()
    router.remove("first")
    await settle()
    await draining
    assert [load.client.name for load in router.engines] == ["second"]
    second.answer("r")
    assert (await task).length == 10


async def test_what_is_held_waits_and_what_was_interrupted_comes_first() -> None:
    engine = HeldEngine("a")
    router = Router([engine], timeout_s=60, engine_slots=2)
    tasks = [asyncio.create_task(router.generate("d", request(f"d/{i}/0/{i}/0/0"))) for i in range(4)]
    await settle()
    assert len(engine.held) == 3
    await router.hold(interrupt=True)
    assert not engine.held and not router.has_room()
    await settle()
    assert not engine.held
    router.release()
    await settle()
    assert len(engine.held) == 3
    for _ in range(2):
        for name in list(engine.held):
            engine.answer(name)
        await settle()
    await asyncio.gather(*tasks)


async def test_a_request_that_engines_die_of_is_not_given_to_all_of_them() -> None:
    engines = [HeldEngine(f"e{i}") for i in range(4)]
    router = Router(engines, timeout_s=60)
    task = asyncio.create_task(router.generate("d", request("d/1/0/1/0/0")))
    for _ in range(3):
        await settle()
        (engine,) = (engine for engine in engines if "d/1/0/1/0/0" in engine.held)
        engine.held.pop("d/1/0/1/0/0").set_exception(EngineLost(engine.name, "illegal memory access"))
    with pytest.raises(RequestFailed, match="request given up: 3 engines died while running it") as failure:
        await task
    assert failure.value.final
    assert router._choice.serving == 1
