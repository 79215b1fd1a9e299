from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import ResponseSuspected, RewardFailed, RewardFunction
from roll_lite.rewards.registry import build_reward
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited
from roll_lite.rewards.terms import Reward
from roll_lite.rewards.text.format import FormatCheck, format_check

WAIT_SECONDS = 0.1
"""Maximum wait for async functions; then the next call can add samples."""
LINGER_SECONDS = 0.005
LEAST_SECONDS = 0.01
"""Minimum time limit of a function, even if the sample's is used up."""
KILL_FACTOR = 3
"""Multiple of the time limit after which reward processes are killed: CPU time limits take longer on busy machines."""


@dataclass
class Scored:
    results: dict[int, Score | str | None] = field(default_factory=dict)
    """{item number: score, cause of failure, or None if not scored yet}. Pass an item with None in again."""
    seconds: float = 0.0
    interrupted: bool = False
    """The process must be replaced: a time limit interrupted a function."""
    suspects: set[int] = field(default_factory=set)
    """Samples whose shared call timed out; any of them may be the cause."""


def time_out(name: str, seconds: float) -> str:
    return f"reward {name}: time-out: no score within {seconds:g} s"


def slow_start(config: RewardConfig, path: str) -> str:
    return (
        f"{path}: the reward {config.name!r} was not ready within {config.start_timeout_s:g} s; "
        f"see what its module does when it is imported, or raise {path}.start_timeout_s"
    )


@dataclass
class _Entry:
    number: int
    item: RewardInput
    parts: dict[RewardFunction, Score | RewardFailed] = field(default_factory=dict)
    format_ok: bool | None = None
    seconds: float = 0.0
    failure: str | None = None
    is_suspect: bool = False


class _Loop(asyncio.SelectorEventLoop):
    """Event loop whose clock stops while the loop is blocked and receives no answers."""

    _stopped_at = _stood_s = 0.0

    def time(self) -> float:
        return super().time() - self._stood_s

    def run_forever(self) -> None:
        self._stood_s += super().time() - self._stopped_at
        try:
            super().run_forever()
        finally:
            self._stopped_at = super().time()


class BatchScorer:
    """Scores samples, each within its own time limit. Sync functions run in the main thread, outside the event loop."""

    def __init__(self, reward: Reward, timeout_s: float, format_check: FormatCheck | None = None) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._format_check = format_check
        functions = reward.functions
        self._single = [one for one in functions if not one.is_async and not one.is_batched]
        self._lists = [one for one in functions if not one.is_async and one.is_batched]
        self._asyncs = [one for one in functions if one.is_async]
        self._turns = {one: asyncio.Semaphore(one.type.concurrent_calls() or sys.maxsize) for one in self._asyncs}
        self._runner: asyncio.Runner | None = None
        self._under_way: list[_Entry] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    def of(cls, config: RewardConfig, path: str) -> tuple[Self, Reward]:
        reward = build_reward(config, path)
        reward.warm()
        return cls(reward, config.timeout_s, format_check(config)), reward

    def __call__(self, items: Mapping[int, RewardInput], slice_s: float) -> Scored:
        """Score items. Those not begun within `slice_s` get None; a later call may return an async item's result."""
        started = time.monotonic()
        entries = [_Entry(number, item) for number, item in items.items()]
        scored = Scored(dict.fromkeys(items))
        begun = self._one_by_one(entries, started + slice_s, scored)
        for function in self._lists:
            self._in_lists(function, begun, started + slice_s, scored)
        if self._asyncs:
            begun = self._side_by_side(begun, scored)
        for entry in begun:
            scored.results[entry.number] = self._result(entry)
        scored.seconds = time.monotonic() - started
        return scored

    def one(self, item: RewardInput) -> tuple[Score | str, Scored]:
        scored = self({0: item}, 0.0)
        while 0 not in scored.results:
            scored = self({}, 0.0)
        return scored.results[0] or time_out(self._reward.name, self._timeout_s), scored

    def _one_by_one(self, entries: list[_Entry], until: float, scored: Scored) -> list[_Entry]:
        for count, entry in enumerate(entries):
            started = time.monotonic()
            if count and started > until:
                return entries[:count]
            try:
                limited(self._timeout_s, lambda entry=entry: self._parts_of_one(entry), waiting=True)  # type: ignore[misc]
            except TimeLimitExceeded:
                entry.failure = time_out(self._reward.name, self._timeout_s)
                scored.interrupted = True
                return entries[: count + 1]
            entry.seconds = time.monotonic() - started
        return entries

    def _parts_of_one(self, entry: _Entry) -> None:
        if self._format_check is not None:
            entry.format_ok = self._format_check(entry.item.response)
        for function in self._single:
            [part] = function.run(function.scores([entry.item]))
            entry.parts[function] = part
            if isinstance(part, RewardFailed):
                return

    def _in_lists(self, function: RewardFunction, entries: list[_Entry], until: float, scored: Scored) -> None:
        open_ = self._unfailed(entries)
        if not open_ or scored.suspects:
            return
        calls = _calls(function, open_)
        while calls:
            call = calls.pop(0)
            started = time.monotonic()
            if len(open_) > 1 and call[0] is not open_[0] and started > until:
                return
            try:
                scores = limited(self._rest(call), lambda call=call: function.run(function.scores(_items(call))), waiting=True)  # type: ignore[misc]
                calls = [[one] for one in _note(function, call, scores)] + calls
            except TimeLimitExceeded:
                scored.interrupted = True
                if len(call) > 1:
                    scored.suspects |= {one.number for one in call}
                else:
                    call[0].failure = time_out(self._reward.name, self._timeout_s)
                return
            for one in call:
                one.seconds += time.monotonic() - started

    def _side_by_side(self, begun: list[_Entry], scored: Scored) -> list[_Entry]:
        waiting = [] if scored.interrupted or scored.suspects else self._unfailed(begun)
        self._under_way += waiting
        if self._under_way:
            self._runner = self._runner or asyncio.Runner(loop_factory=_Loop)
            self._runner.run(self._advance(waiting))
        done = [entry for entry in self._under_way if self._is_done(entry)]
        self._under_way = [entry for entry in self._under_way if not self._is_done(entry)]
        for entry in self._under_way:
            scored.results.pop(entry.number, None)
        scored.suspects |= {entry.number for entry in done if entry.is_suspect}
        known = {entry.number for entry in (*waiting, *done)}
        return done + [entry for entry in begun if entry.number not in known]

    async def _advance(self, fresh: list[_Entry]) -> None:
        for function in self._asyncs if fresh else []:
            calls = _calls(function, fresh) if function.is_batched else [[entry] for entry in fresh]
            self._tasks |= {asyncio.create_task(self._call_async(function, call)) for call in calls}
        for seconds, until in ((WAIT_SECONDS, asyncio.FIRST_COMPLETED), (LINGER_SECONDS, asyncio.ALL_COMPLETED)):
            if self._tasks:
                ended, self._tasks = await asyncio.wait(self._tasks, timeout=seconds, return_when=until)
                for task in ended:
                    task.result()

    async def _call_async(self, function: RewardFunction, entries: list[_Entry]) -> None:
        try:
            async with self._turns[function], asyncio.timeout(self._rest(entries)):
                alone = _note(function, entries, await function.scores(_items(entries)))
        except TimeoutError:
            for entry in entries:
                entry.is_suspect = len(entries) > 1
                entry.failure = None if entry.is_suspect else time_out(self._reward.name, self._timeout_s)
        else:
            await asyncio.gather(*(self._call_async(function, [entry]) for entry in alone))

    def _is_done(self, entry: _Entry) -> bool:
        return entry.is_suspect or not self._unfailed([entry]) or all(function in entry.parts for function in self._asyncs)

    def _rest(self, entries: Sequence[_Entry]) -> float:
        return max(LEAST_SECONDS, self._timeout_s - max(entry.seconds for entry in entries))

    def _unfailed(self, entries: list[_Entry]) -> list[_Entry]:
        return [one for one in entries if one.failure is None and not any(isinstance(part, RewardFailed) for part in one.parts.values())]

    def _result(self, entry: _Entry) -> Score | str | None:
        if entry.failure is not None:
            return entry.failure
        parts = [entry.parts.get(function) for function in self._reward.functions]
        if None in parts and not any(isinstance(part, RewardFailed) for part in parts):
            return None
        try:
            score = self._reward.combined(parts)
        except RewardFailed as failure:
            return failure.cause
        return replace(score, format_ok=entry.format_ok)


def _calls(function: RewardFunction, entries: list[_Entry]) -> list[list[_Entry]]:
    at_once = function.type.at_once() or len(entries)
    return [entries[start : start + at_once] for start in range(0, len(entries), at_once)]


def _items(entries: Sequence[_Entry]) -> list[RewardInput]:
    return [entry.item for entry in entries]


def _note(function: RewardFunction, entries: Sequence[_Entry], scores: Sequence[Score | RewardFailed]) -> list[_Entry]:
    """Record scores. Return entries with suspected responses, to score alone."""
    suspected: list[_Entry] = []
    for entry, score in zip(entries, scores, strict=True):
        if isinstance(score, ResponseSuspected):
            suspected.append(entry)
        else:
            entry.parts[function] = score
    return suspected
