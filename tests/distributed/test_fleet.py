"""A fleet of scripted members on a virtual clock: every way in which a member can come and go."""

from __future__ import annotations

import asyncio
import pickle
from collections import deque
from collections.abc import Coroutine
from typing import Any

import pytest

from roll_lite.distributed import failures
from roll_lite.distributed.failures import FleetDown, MemberLost, RestartBudget
from roll_lite.distributed.fleet import Fleet, MemberState, Policy, SlowStart
from roll_lite.simulator.clock import run_virtual

NEVER = float("inf")


class Scripted:
    """Each start has a life: how long the start takes and how long it lives after that, or the error that the start raises."""

    def __init__(self, name: str, *lives: tuple[float, float] | Exception) -> None:
        self.name = name
        self.log: list[str] = []
        self._lives = deque(lives)
        self._life = NEVER

    async def start(self) -> None:
        life = self._lives.popleft() if self._lives else (0.0, NEVER)
        self._note("starts")
        if isinstance(life, Exception):
            raise life
        await asyncio.sleep(life[0])
        self._life = life[1]
        self._note("serves")

    async def until_lost(self) -> str:
        await asyncio.sleep(self._life if self._life < NEVER else 1e9)
        return f"{self.name} died"

    def kill(self) -> None:
        self._note("killed")

    def _note(self, what: str) -> None:
        self.log.append(f"{asyncio.get_running_loop().time():g} {what}")


class Desk:
    """What a user of a fleet is: pieces of work that members take, do in some seconds, and lose with their lives."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds
        self.waiting: deque[int] = deque()
        self.done: list[tuple[float, str, int]] = []
        self.losses: list[tuple[float, str, str, int | None]] = []
        self.ends: list[FleetDown] = []
        self.under_way: dict[str, int] = {}
        self.error: Exception | None = None
        self.fleet: Fleet[Scripted]

    def staffed_with(self, *members: Scripted, **policy: Any) -> Fleet[Scripted]:
        self.fleet = Fleet("crew", members, Policy(**{"start_timeout_s": 60.0, **policy}), self.serve, self.lost, self.ends.append)
        return self.fleet

    async def serve(self, member: Scripted) -> None:
        while True:
            while not self.waiting:  # noqa: ASYNC110 (the clock is a virtual one)
                await asyncio.sleep(0.25)
            async with self.fleet.at_work(member):
                piece = self.under_way[member.name] = self.waiting.popleft()
                await asyncio.sleep(self.seconds)
                if self.error is not None:
                    raise self.error
                del self.under_way[member.name]
                self.done.append((asyncio.get_running_loop().time(), member.name, piece))

    def lost(self, member: Scripted, cause: str) -> None:
        piece = self.under_way.pop(member.name, None)
        self.losses.append((asyncio.get_running_loop().time(), member.name, cause, piece))
        if piece is not None:
            self.waiting.appendleft(piece)


def virtual(main: Coroutine[Any, Any, None]) -> None:
    """A wait for something that never comes is an error there, not a test that hangs."""
    run_virtual(main)


def test_members_start_side_by_side_and_share_the_work() -> None:
    async def main() -> None:
        desk = Desk()
        fleet = desk.staffed_with(Scripted("a", (2.0, NEVER)), Scripted("b", (3.0, NEVER)))
        desk.waiting.extend(range(4))
        await fleet.start()
        assert asyncio.get_running_loop().time() == 3.0
        await asyncio.sleep(2.5)
        assert desk.done == [(4.0, "a", 0), (4.0, "b", 1), (5.0, "a", 2), (5.0, "b", 3)]
        assert fleet.serving == fleet.members and fleet.replaced == 0
        fleet.close()

    virtual(main())


def test_a_mistake_at_the_start_is_raised_as_it_is_and_nothing_is_left() -> None:
    async def main() -> None:
        good, bad = Scripted("good", (5.0, NEVER)), Scripted("bad", ValueError("domains.toy.reward.name: 'x'"))
        fleet = Desk().staffed_with(good, bad)
        with pytest.raises(ValueError, match=r"^domains\.toy\.reward\.name: 'x'$"):
            await fleet.start()
        assert good.log == ["0 starts", "0 killed"] and bad.log == ["0 starts", "0 killed"]
        assert not fleet.is_tended

    virtual(main())


def test_a_start_that_takes_too_long_is_ended_and_told() -> None:
    async def main() -> None:
        slow = Scripted("slow", (100.0, NEVER))
        with pytest.raises(SlowStart, match=r"^slow was not ready within 60 s \(judges\.main\.start_timeout_s\)$"):
            await Desk().staffed_with(slow, path="judges.main").start()
        assert slow.log == ["0 starts", "60 killed"]
        own = Scripted("own", TimeoutError("the port does not answer"))
        with pytest.raises(TimeoutError, match="the port"):
            await Desk().staffed_with(own).start()

    virtual(main())


def test_one_that_dies_idle_is_replaced_at_once() -> None:
    async def main() -> None:
        desk = Desk()
        member = Scripted("a", (1.0, 10.0), (2.0, NEVER))
        fleet = desk.staffed_with(member)
        await fleet.start()
        await asyncio.sleep(10.5)
        assert fleet.state(member) is MemberState.STARTING and fleet.serving == []
        await fleet.in_service()
        assert asyncio.get_running_loop().time() == 13.0
        assert member.log == ["0 starts", "1 serves", "11 killed", "11 starts", "13 serves"]
        assert desk.losses == [(11.0, "a", "a died", None)]
        assert (fleet.newly_replaced(), fleet.newly_replaced()) == (["a died"], [])
        fleet.close()

    virtual(main())


def test_what_a_dying_member_had_is_given_back_and_done_by_others() -> None:
    async def main() -> None:
        desk = Desk(seconds=4.0)
        fleet = desk.staffed_with(Scripted("a", (0.0, 6.0), (10.0, NEVER)), Scripted("b"))
        desk.waiting.extend(range(4))
        await fleet.start()
        await asyncio.sleep(16.5)
        assert desk.losses == [(6.0, "a", "a died", 2)]
        assert desk.done == [(4.0, "a", 0), (4.0, "b", 1), (8.0, "b", 3), (12.0, "b", 2)]
        fleet.close()

    virtual(main())


@pytest.mark.parametrize(
    ("error", "cause"), [(MemberLost("no answer within 9 s"), "no answer within 9 s"), (KeyError("a bug"), "a: KeyError: 'a bug'")]
)
def test_whatever_ends_a_members_work_makes_it_a_lost_one_and_its_work_comes_back(error: Exception, cause: str) -> None:
    async def main() -> None:
        desk = Desk()
        member = Scripted("a", (0.0, NEVER), (1.0, NEVER))
        fleet = desk.staffed_with(member)
        desk.waiting.append(7)
        desk.error = error
        await fleet.start()
        await asyncio.sleep(1.5)
        desk.error = None
        assert desk.losses == [(1.0, "a", cause, 7)]
        await asyncio.sleep(2.0)
        assert desk.done == [(3.0, "a", 7)]
        assert member.log == ["0 starts", "0 serves", "1 killed", "1 starts", "2 serves"]
        fleet.close()

    virtual(main())


def test_restarts_are_tried_again_and_each_starts_from_nothing() -> None:
    async def main() -> None:
        member = Scripted("a", (0.0, 5.0), RuntimeError("out of memory"), (70.0, NEVER), (1.0, NEVER))
        desk = Desk()
        fleet = desk.staffed_with(member, attempts=3)
        await fleet.start()
        await asyncio.sleep(5.5)
        await fleet.in_service()
        assert member.log[2:] == ["5 killed", "5 starts", "5 killed", "5 starts", "65 killed", "65 starts", "66 serves"]
        assert fleet.replaced == 1 and desk.ends == []
        fleet.close()

    virtual(main())


def test_one_that_dies_while_it_is_started_again_is_given_up_when_its_attempts_are_used_up() -> None:
    async def main() -> None:
        gone = Scripted("a", (0.0, 5.0), RuntimeError("no memory"), RuntimeError("still none\nat all"))
        desk = Desk()
        fleet = desk.staffed_with(gone, Scripted("b"), attempts=2)
        await fleet.start()
        await asyncio.sleep(6)
        assert fleet.state(gone) is MemberState.DOWN and [member.name for member in fleet.serving] == ["b"]
        assert desk.ends == [], "others serve"
        await fleet.in_service()
        fleet.close()

    virtual(main())


def test_the_last_one_that_is_given_up_is_the_end_and_whoever_waits_hears_both_causes() -> None:
    async def main() -> None:
        lives = [(0.0, 5.0), RuntimeError("no memory"), RuntimeError("no memory")]
        desk = Desk()
        fleet = desk.staffed_with(Scripted("a", *lives), Scripted("b", (0.0, 7.0), *lives[1:]), attempts=2)
        await fleet.start()
        await asyncio.sleep(7.5)
        with pytest.raises(FleetDown, match=r"^b died; it could not be started again: b: RuntimeError: no memory$") as end:
            await fleet.in_service()
        assert desk.ends == [end.value] and (end.value.fleet, end.value.place) == ("crew", 1)
        fleet.close()

    virtual(main())


def test_waiting_for_service_ends_with_the_fleet() -> None:
    async def main() -> None:
        fleet = Desk().staffed_with(Scripted("a", (0.0, 1.0), (50.0, 0.0), RuntimeError("x")), attempts=1)
        await fleet.start()
        await asyncio.sleep(2)
        waiting = asyncio.create_task(fleet.in_service())
        await asyncio.sleep(48)
        assert not waiting.done()
        await waiting  # it serves for a moment
        await asyncio.sleep(1)
        with pytest.raises(FleetDown, match="a died; it could not be started again: a: RuntimeError: x"):
            await fleet.in_service()

    virtual(main())


def test_a_budget_of_restarts_is_each_members_own_and_named_with_its_setting() -> None:
    async def main() -> None:
        desk = Desk()
        member = Scripted("a", (0.0, 1.0), (0.0, 1.0), (0.0, 1.0), (0.0, NEVER))
        fleet = desk.staffed_with(member, Scripted("b", (0.0, 1.5)), restarts=2, path="judges.main")
        await fleet.start()
        await asyncio.sleep(10)
        assert [when for when, name, *_ in desk.losses if name == "a"] == [1.0, 2.0, 3.0]
        assert fleet.state(member) is MemberState.DOWN and member.log[-1] == "3 killed" and len(fleet.serving) == 1
        fleet.close()
        alone = Desk()
        fleet = alone.staffed_with(Scripted("a", (0.0, 1.0), (0.0, 1.0)), restarts=1, path="judges.main")
        await fleet.start()
        await asyncio.sleep(3)
        assert str(alone.ends[0]) == "a died (after 1 restarts within an hour, judges.main.restarts)"

    virtual(main())


def test_restarts_of_the_last_hour_count_for_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 1800.0, 3599.0, 3599.0, 3599.0, 3600.0, 3601.0, 5400.0))
    monkeypatch.setattr(failures.time, "monotonic", lambda: next(times))
    budget = RestartBudget()
    assert [budget.allows("a", 2) for _ in range(3)] == [True, True, False]
    assert budget.allows("b", 1) and not budget.allows("c", 0)
    assert [budget.allows("a", 2) for _ in range(3)] == [True, False, True]


def test_without_restarts_the_others_go_on_and_the_last_death_is_the_end() -> None:
    """What engines are to a run."""

    async def main() -> None:
        desk = Desk()
        members = [Scripted("a", (0.0, 6.0)), Scripted("b", (0.0, 3.0))]
        fleet = Fleet("actor_infer", members, Policy(60.0, restarts=0), down=desk.ends.append)
        fleet.tend()
        await fleet.in_service()
        await asyncio.sleep(3.5)
        assert (desk.ends, fleet.lost, fleet.serving) == ([], {1: "b died"}, [members[0]])
        assert members[1].log == ["0 starts", "0 serves", "3 killed"], "not started again"
        await asyncio.sleep(3.0)
        assert [(end.fleet, end.place, end.cause) for end in desk.ends] == [("actor_infer", 0, "a died")]
        assert fleet.lost == {0: "a died", 1: "b died"}
        copy = pickle.loads(pickle.dumps(desk.ends[0]))
        assert (copy.fleet, copy.place, copy.cause) == ("actor_infer", 0, "a died")
        fleet.close()

    virtual(main())


def test_a_bug_in_what_the_fleet_was_given_is_its_end_and_leaves_nobody_waiting() -> None:
    async def main() -> None:
        ends: list[FleetDown] = []

        def broken(member: Scripted, cause: str) -> None:
            raise KeyError("nobody knows this member")

        fleet = Fleet("crew", [Scripted("a", (0.0, 1.0))], Policy(60.0), lost=broken, down=ends.append)
        await fleet.start()
        await asyncio.sleep(2)
        with pytest.raises(FleetDown, match="crew: KeyError: 'nobody knows this member'"):
            await fleet.in_service()
        assert len(ends) == 1

    virtual(main())


def test_a_drained_fleet_has_nothing_under_way_and_begins_nothing() -> None:
    async def main() -> None:
        desk = Desk(seconds=2.0)
        fleet = desk.staffed_with(Scripted("a"), Scripted("b"))
        desk.waiting.extend(range(4))
        await fleet.start()
        await asyncio.sleep(0.5)
        async with fleet.drained():
            assert asyncio.get_running_loop().time() == 2.0 and [piece for *_, piece in desk.done] == [0, 1]
            await asyncio.sleep(10)
            assert len(desk.done) == 2 and desk.under_way == {}
        await asyncio.sleep(2.5)
        assert [(when, piece) for when, _, piece in desk.done[2:]] == [(14.0, 2), (14.0, 3)]
        fleet.close()

    virtual(main())


def test_draining_waits_for_those_that_are_started_again_and_for_each_other() -> None:
    async def main() -> None:
        desk = Desk()
        fleet = desk.staffed_with(Scripted("a", (0.0, 1.0), (9.0, NEVER)))
        await fleet.start()
        await asyncio.sleep(1.5)

        async def hold(seconds: float) -> None:
            async with fleet.drained():
                assert asyncio.get_running_loop().time() == 10.0
                await asyncio.sleep(seconds)

        holding = asyncio.gather(hold(1.0), hold(3.0))
        desk.waiting.append(0)
        await holding
        assert desk.done == []
        await asyncio.sleep(1.5)
        assert desk.done == [(14.0, "a", 0)]
        fleet.close()

    virtual(main())


def test_a_member_that_is_lost_while_the_fleet_is_drained_is_started_again_afterwards() -> None:
    async def main() -> None:
        desk = Desk()
        member = Scripted("a", (0.0, 3.0), (1.0, NEVER))
        fleet = desk.staffed_with(member)
        await fleet.start()
        await asyncio.sleep(1.0)
        async with fleet.drained():
            await asyncio.sleep(9.0)
            assert fleet.state(member) is MemberState.LOST and member.log[-1] == "3 killed"
        await asyncio.sleep(2.0)
        assert member.log[-2:] == ["10 starts", "11 serves"]
        fleet.close()

    virtual(main())


def test_nobody_waits_for_a_fleet_that_ended_through_a_bug() -> None:
    async def main() -> None:
        desk = Desk()
        fleet = desk.staffed_with(Scripted("a", (0.0, 1.0)))

        def broken(member: Scripted, cause: str) -> None:
            raise LookupError("a bug")

        fleet._lost = broken
        await fleet.start()
        await asyncio.sleep(2.0)
        assert fleet.end is not None and "a bug" in str(fleet.end)
        async with asyncio.timeout(1.0), fleet.drained():
            pass
        fleet.close()

    virtual(main())


@pytest.mark.parametrize("when", [0.5, 2.5, 6.5])
def test_closing_ends_members_whatever_they_do(when: float) -> None:
    """While they start, serve, and are started again."""

    async def main() -> None:
        desk = Desk()
        member = Scripted("a", (1.0, 5.0), (1.0, NEVER))
        fleet = desk.staffed_with(member)
        desk.waiting.extend(range(100))
        fleet.tend()
        await asyncio.sleep(when)
        fleet.close()
        known = list(member.log)
        assert known[-1] == f"{when:g} killed"
        done = len(desk.done)
        await asyncio.sleep(20)
        assert member.log == known and len(desk.done) == done
        assert len(asyncio.all_tasks()) == 1

    virtual(main())


def test_members_that_are_somebody_elses_are_left_alone_at_the_close() -> None:
    async def main() -> None:
        member = Scripted("a")
        fleet = Desk().staffed_with(member)
        await fleet.start()
        fleet.close(kill=False)
        await asyncio.sleep(1)
        assert member.log == ["0 starts", "0 serves"]

    virtual(main())
