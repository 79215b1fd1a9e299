"""Many samples through one reward in one process: one after the other, in lists, or side by side, as its parts can."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from roll_lite.config.schema import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed, RewardFunction
from roll_lite.rewards.combine import Reward
from roll_lite.rewards.time_limit import TimeLimitExceeded, limited

LEAST_SECONDS = 0.01
"""A part always gets this much of a time limit that the parts before it have used up."""


@dataclass
class Scored:
    """What one call to a reward worker brings back."""

    results: list[Score | str | None]
    """For each sample its score, the cause of its failure, or None: to be looked at again."""
    seconds: float = 0.0
    interrupted: bool = False
    """A function was stopped somewhere inside: nothing more should be asked of this process."""
    suspects: bool = False
    """The samples without a result shared a call that took too long: one of them is to blame."""


def time_out(name: str, seconds: float) -> str:
    return f"reward {name}: time-out: no score within {seconds:g} s"


def slow_start(config: RewardConfig, path: str) -> str:
    """`path`: the reward section's place in the configuration."""
    return (
        f"{path}: the reward {config.type!r} was not ready within {config.start_timeout_s:g} s; "
        f"see what its module does when it is imported, or raise {path}.start_timeout_s"
    )


@dataclass
class _Entry:
    item: RewardInput
    parts: dict[RewardFunction, Score | RewardFailed] = field(default_factory=dict)
    format_ok: bool | None = None
    seconds: float = 0.0
    """Of its time limit that are used up."""
    failure: str | None = None


class Together:
    """Scores lists of samples, each within its own time limit. Sync parts run in the main thread, outside of the event loop."""

    def __init__(self, reward: Reward, timeout_s: float, form: Callable[[str], bool] | None = None) -> None:
        self._reward = reward
        self._timeout_s = timeout_s
        self._form = form
        functions = reward.functions
        self._single = [one for one in functions if not one.is_async and not one.is_batched]
        self._lists = [one for one in functions if not one.is_async and one.is_batched]
        self._asyncs = [one for one in functions if one.is_async]
        self._runner: asyncio.Runner | None = None

    def __call__(self, items: Sequence[RewardInput], slice_s: float) -> Scored:
        """What is not begun when the slice is over comes back without a result."""
        started = time.monotonic()
        entries = [_Entry(item) for item in items]
        scored = Scored([None] * len(entries))
        begun = self._one_by_one(entries, started + slice_s, scored)
        for function in self._lists:
            self._in_lists(function, begun, started + slice_s, scored)
        waiting = self._open(begun)
        if self._asyncs and waiting:
            self._runner = self._runner or asyncio.Runner()
            if not self._runner.run(self._side_by_side(waiting)):
                scored.suspects = True
        scored.results[: len(begun)] = [self._result(entry) for entry in begun]
        scored.seconds = time.monotonic() - started
        return scored

    def _one_by_one(self, entries: list[_Entry], until: float, scored: Scored) -> list[_Entry]:
        """Forms and the parts for single samples; those that were begun. A part that does not end is interrupted, and the call with it."""
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
            except RewardFailed as failure:
                entry.failure = failure.cause
            entry.seconds = time.monotonic() - started
        return entries

    def _parts_of_one(self, entry: _Entry) -> None:
        if self._form is not None:
            entry.format_ok = self._form(entry.item.response)
        for function in self._single:
            try:
                entry.parts[function] = function(entry.item)
            except RewardFailed as failure:
                entry.parts[function] = failure
                return

    def _in_lists(self, function: RewardFunction, entries: list[_Entry], until: float, scored: Scored) -> None:
        """One call for all. If it fails as a whole, each sample gets a call of its own, so that the right one is blamed."""
        open_ = self._open(entries)
        if not open_ or scored.suspects:
            return
        calls = [open_]
        while calls:
            call = calls.pop(0)
            started = time.monotonic()
            if len(open_) > 1 and call[0] is not open_[0] and started > until:
                return
            try:
                scores = limited(self._rest(call), lambda call=call: function.scores([one.item for one in call]), waiting=True)  # type: ignore[misc]
                _note(function, call, scores)
            except TimeLimitExceeded:
                scored.interrupted = True
                scored.suspects = len(call) > 1
                if len(call) == 1:
                    call[0].failure = time_out(self._reward.name, self._timeout_s)
                return
            except RewardFailed as failure:
                if len(call) > 1:
                    calls = [[one] for one in call]
                else:
                    call[0].parts[function] = failure
            for one in call:
                one.seconds += time.monotonic() - started

    async def _side_by_side(self, entries: list[_Entry]) -> bool:
        """False where a list took too long, so that nobody knows which of its samples did it."""
        done = await asyncio.gather(
            *(self._list_async(one, entries) if one.is_batched else self._singles_async(one, entries) for one in self._asyncs)
        )
        return all(done)

    async def _singles_async(self, function: RewardFunction, entries: list[_Entry]) -> bool:
        await asyncio.gather(*(self._one_async(function, entry, function.score(entry.item)) for entry in entries))
        return True

    async def _one_async(self, function: RewardFunction, entry: _Entry, scoring: Awaitable[Score]) -> None:
        try:
            async with asyncio.timeout(self._rest([entry])):
                entry.parts[function] = await scoring
        except TimeoutError:
            entry.failure = time_out(self._reward.name, self._timeout_s)
        except RewardFailed as failure:
            entry.parts[function] = failure

    async def _list_async(self, function: RewardFunction, entries: list[_Entry]) -> bool:
        try:
            async with asyncio.timeout(self._rest(entries)):
                _note(function, entries, await function.scores_async([entry.item for entry in entries]))
        except TimeoutError:
            if len(entries) > 1:
                return False
            entries[0].failure = time_out(self._reward.name, self._timeout_s)
        except RewardFailed as failure:
            if len(entries) > 1:
                return await self._singles_async(function, entries)
            entries[0].parts[function] = failure
        return True

    def _rest(self, entries: Sequence[_Entry]) -> float:
        return max(LEAST_SECONDS, self._timeout_s - max(entry.seconds for entry in entries))

    def _open(self, entries: list[_Entry]) -> list[_Entry]:
        """Those with a chance of a score."""
        return [one for one in entries if one.failure is None and not any(isinstance(part, RewardFailed) for part in one.parts.values())]

    def _result(self, entry: _Entry) -> Score | str | None:
        if entry.failure is not None:
            return entry.failure
        parts = [entry.parts.get(function) for function in self._reward.functions]
        known: list[Score | RewardFailed] = [part for part in parts if part is not None]
        if len(known) < len(parts) and not any(isinstance(part, RewardFailed) for part in known):
            return None
        try:
            score = self._reward.combined(known if len(known) == len(parts) else self._up_to_failure(parts))
        except RewardFailed as failure:
            return failure.cause
        return replace(score, format_ok=entry.format_ok)

    def _up_to_failure(self, parts: Sequence[Score | RewardFailed | None]) -> list[Score | RewardFailed]:
        """Parts that were not asked any more take no blame."""
        return [Score(0.0) if part is None else part for part in parts]


def _note(function: RewardFunction, entries: Sequence[_Entry], scores: Sequence[Score | RewardFailed]) -> None:
    for entry, score in zip(entries, scores, strict=True):
        entry.parts[function] = score
