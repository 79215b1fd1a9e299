"""How an engine's silence is told from its work, on the virtual clock, with a worker that answers as it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from roll_lite.distributed import place
from roll_lite.distributed.failures import FleetDown, MemberLost
from roll_lite.distributed.fleet import Fleet, MemberState, Policy
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.infer import EngineSeat, RemoteEngine


def worker(answer: Callable[[float], float | None]) -> Any:
    """`answer`: seconds that an answer takes to a question asked at a time; None: it never comes."""
    loop = asyncio.get_running_loop()

    def answer_place() -> asyncio.Future[tuple[str, int]]:
        future: asyncio.Future[tuple[str, int]] = loop.create_future()
        seconds = answer(loop.time())
        if seconds is not None:
            loop.call_later(seconds, lambda: future.cancelled() or future.set_result(("node", 7)))
        return future

    return SimpleNamespace(
        place=SimpleNamespace(remote=answer_place), until_death=SimpleNamespace(remote=lambda: loop.create_future()), killed=[]
    )


def lost_after(answer: Callable[[float], float | None], silence_s: float | None, watched_s: float = 100.0) -> tuple[float, str] | None:
    async def main() -> tuple[float, str] | None:
        engine = RemoteEngine("e", worker(answer), silence_s=silence_s)
        try:
            async with asyncio.timeout(watched_s):
                cause = await engine.until_lost()
        except TimeoutError:
            return None
        return asyncio.get_running_loop().time(), cause

    return run_virtual(main())


def test_an_engine_that_answers_late_is_not_lost() -> None:
    assert lost_after(lambda asked: 6.0, silence_s=7.0) is None


def test_one_that_never_answers_is_lost_within_ten_seconds_of_its_last_answer() -> None:
    """At worst it stops just after it has answered."""
    found = lost_after(lambda asked: 0.0 if asked < 50.0 else None, silence_s=7.0)
    assert found is not None
    assert 9.0 < found[0] - 48.0 < 10.0, "asked every 2 s, it has answered at 48 s"
    assert found[1] == f"nothing was heard of its process for {found[0] - 48.0:.1f} s (limits.engine_silence: 7 s)"


def test_without_a_limit_it_is_waited_for() -> None:
    assert lost_after(lambda asked: None, silence_s=None) is None


def test_what_is_killed_is_killed_also_where_it_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(place.ray, "kill", lambda actor, no_restart: killed.append("asked"))
    monkeypatch.setattr(place, "stopped_at", lambda places: killed.extend(places) or [])

    async def main() -> None:
        engine = RemoteEngine("e", worker(lambda asked: 0.0), silence_s=7.0)
        engine.kill()
        watching = asyncio.create_task(engine.until_lost())
        await asyncio.sleep(1.0)
        engine.kill()
        watching.cancel()

    run_virtual(main())
    assert killed == ["asked", None, "asked", ("node", 7)]


def test_an_engine_whose_process_is_gone_says_so() -> None:
    async def main() -> str:
        loop = asyncio.get_running_loop()
        dead: asyncio.Future[None] = loop.create_future()
        actor = worker(lambda asked: 0.0)
        actor.until_death.remote = lambda: dead
        loop.call_later(3.5, dead.set_exception, RayActorError())
        engine = RemoteEngine("e", actor, silence_s=7.0)
        cause = await engine.until_lost()
        engine.fail(cause)
        await asyncio.sleep(1.0)
        engine.fail("once more")
        assert engine.silent_s == pytest.approx(1.5), "it has answered at 2 s"
        return cause

    assert run_virtual(main()).startswith("its process died: ")


@pytest.mark.parametrize(("says_itself", "cause", "after_s"), [(True, "out of memory", 3.0), (False, "ObjectStoreFullError", 12.0)])
def test_an_engine_whose_calls_fail_is_lost_though_its_process_lives(says_itself: bool, cause: str, after_s: float) -> None:
    async def main() -> tuple[str, float]:
        loop = asyncio.get_running_loop()
        actor = worker(lambda asked: 0.0)
        death: asyncio.Future[str] = loop.create_future()
        actor.until_death.remote = lambda: death
        engine = RemoteEngine("e", actor, silence_s=7.0)
        loop.call_later(2.0, engine.fail, "ObjectStoreFullError")
        if says_itself:
            loop.call_later(3.0, death.set_result, "out of memory")
        return await engine.until_lost(), loop.time()

    assert run_virtual(main()) == (cause, pytest.approx(after_s))


class Engine:
    """Engine that is lost a second after it was handed over, or never."""

    def __init__(self, name: str, lives: bool) -> None:
        self.name, self._lives = name, lives
        self.killed = False

    async def start(self) -> None:
        pass

    async def until_lost(self) -> str:
        await asyncio.sleep(1e6 if self._lives else 1.0)
        return f"{self.name} died"

    def kill(self) -> None:
        self.killed = True


def test_a_seat_waits_for_the_next_successor_when_one_dies_at_once_and_is_given_up_when_none_comes() -> None:
    async def main() -> None:
        first, second, third = Engine("first", lives=False), Engine("second", lives=False), Engine("third", lives=False)
        seat, ends = EngineSeat(first), list[FleetDown]()  # type: ignore[arg-type]
        fleet = Fleet("actor_infer", [seat], Policy(start_timeout_s=None, attempts=1), down=ends.append)
        fleet.tend()
        for died, successor in ((first, second), (second, third)):
            await fleet.until(seat, MemberState.SERVING)
            await fleet.until(seat, MemberState.STARTING)
            assert died.killed and not ends and fleet.lost == {0: f"{died.name} died"}
            seat.successors.put_nowait(successor)  # type: ignore[arg-type]
            await fleet.until(seat, MemberState.SERVING)
            assert seat.engine is successor and fleet.lost == {}
        await fleet.until(seat, MemberState.STARTING)
        seat.successors.put_nowait(MemberLost("it died too often"))
        await fleet.until(seat, MemberState.DOWN)
        assert [str(end) for end in ends] == ["third died; it could not be started again: it died too often"]

    run_virtual(main())


@pytest.mark.parametrize("comes", [True, False])
def test_an_absent_engine_serves_only_with_its_replacement(comes: bool) -> None:
    async def main() -> None:
        absent, replacement = Engine("absent", lives=True), Engine("replacement", lives=True)
        seat, ends = EngineSeat(absent, is_absent=True), list[FleetDown]()  # type: ignore[arg-type]
        fleet = Fleet("actor_infer", [seat], Policy(start_timeout_s=None, attempts=1), down=ends.append)
        fleet.tend()
        await asyncio.sleep(100.0)
        assert fleet.state(seat) is MemberState.STARTING
        seat.successors.put_nowait(replacement if comes else MemberLost("it died too often"))  # type: ignore[arg-type]
        await fleet.until(seat, MemberState.SERVING, MemberState.DOWN)
        assert (fleet.state(seat) is MemberState.SERVING, len(ends)) == ((True, 0) if comes else (False, 1))
        assert seat.engine is (replacement if comes else absent)

    run_virtual(main())
