"""Finds reference answers that a domain's reward cannot read, so that no response to their prompts gets a score."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.prompts import PromptSet
from roll_lite.data.samples import FinishReason, RewardInput
from roll_lite.rewards.running.reward_process import RewardProcess

PROMPTS_A_PROCESS = 500
MOST_PROCESSES = 8


@dataclass(frozen=True)
class References:
    """Result of reading a split's references."""

    total: int
    unreadable: dict[int, str]
    """Cause of failure by prompt."""
    read: int
    """Number of references read; less than all if the time ran out."""

    def summary(self) -> str:
        of_all = "" if self.read == self.total else f" looked at, spread over all {self.total} (--limit 0 looks at every one)"
        if not self.unreadable:
            return f"references: {'all ' if not of_all else ''}{self.read}{of_all}{',' if of_all else ''} can be read"
        share = len(self.unreadable) / max(self.read, 1)
        return f"references: {len(self.unreadable)} of {self.read}{of_all} cannot be read ({share:.2%})"


def read_references(
    config: RewardConfig, path: str, prompts: PromptSet, seconds: float | None, progress: Callable[[int], None]
) -> References:
    """Read references of prompts in random order for at most `seconds`. ValueError for a mistake in the reward's section at `path`."""
    plain = config.model_copy(update={"terms": [], "format": None})
    order = iter(random.Random(0).sample(range(len(prompts)), len(prompts)))
    found = _Found({}, 0, threading.Lock(), threading.Event())
    processes = min(os.cpu_count() or 1, MOST_PROCESSES, 1 + len(prompts) // PROMPTS_A_PROCESS)

    def serve() -> None:
        with RewardProcess(plain, path) as reward:
            until = time.monotonic() + seconds if seconds is not None else None
            for number in found.turns(order, until):
                prompt = prompts[number]
                score, _ = reward.score(RewardInput.of(prompt, "", FinishReason.STOP))
                found.note(prompt.uid, score if isinstance(score, str) else None, progress)

    with ThreadPoolExecutor(processes) as threads:
        try:
            done, _ = wait([threads.submit(serve) for _ in range(processes)], return_when=FIRST_EXCEPTION)
        finally:
            found.over.set()
    for one in done:
        one.result()
    return References(len(prompts), dict(sorted(found.unreadable.items())), found.read)


@dataclass
class _Found:
    """State shared by the threads."""

    unreadable: dict[int, str]
    read: int
    lock: threading.Lock
    over: threading.Event

    def turns(self, order: Iterator[int], until: float | None) -> Iterator[int]:
        while not self.over.is_set() and (until is None or time.monotonic() < until):
            with self.lock:
                number = next(order, None)
            if number is None:
                return
            yield number

    def note(self, uid: int, cause: str | None, progress: Callable[[int], None]) -> None:
        with self.lock:
            self.read += 1
            if cause is not None:
                self.unreadable[uid] = cause
            progress(self.read)
