"""Reward functions of an imaginary user, imported by reward workers under test as tests.workers.reward_functions."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Sequence

from roll_lite.data.samples import RewardInput
from roll_lite.rewards.base import RewardFailed


def length(sample: RewardInput) -> float:
    return float(len(sample.response))


def in_main_thread(sample: RewardInput) -> bool:
    return threading.current_thread() is threading.main_thread()


def tricky(sample: RewardInput) -> float:
    match sample.response:
        case "hang":
            time.sleep(1000)
        case "die":
            os._exit(3)
        case "raise":
            raise KeyError("no such thing")
        case "nan":
            return float("nan")
    return 1.0


def raises(sample: RewardInput) -> float:
    raise KeyError("no such thing")


def slow(sample: RewardInput) -> float:
    time.sleep(0.2)
    return 1.0


def where(sample: RewardInput) -> float:
    """Slow, and says which process was so slow."""
    time.sleep(0.2)
    return float(os.getpid())


def costly(sample: RewardInput) -> float:
    """10 ms of sleep: several fit into one call."""
    time.sleep(0.01)
    return 1.0


async def waiting(sample: RewardInput) -> float:
    await asyncio.sleep(1000 if sample.response == "hang" else 0.3)
    return 0.5


def listed(samples: list[RewardInput]) -> list[float | RewardFailed]:
    """All at once: 50 ms, whatever their number."""
    for sample in samples:
        match sample.response:
            case "hang":
                time.sleep(1000)
            case "die":
                os._exit(3)
            case "raise":
                raise KeyError("no such thing")
    time.sleep(0.05)
    return [RewardFailed("no score for this one") if sample.response == "fail" else float(len(samples)) for sample in samples]


async def listed_async(samples: Sequence[RewardInput], *, bonus: float = 0.0) -> list[float]:
    if any(sample.response == "raise" for sample in samples):
        raise KeyError("no such thing")
    await asyncio.sleep(1000 if any(sample.response == "hang" for sample in samples) else 0.05)
    return [len(samples) + bonus for _ in samples]


def short(samples: list[RewardInput]) -> list[float]:
    return [1.0 for _ in samples[1:]]


class Marked:
    batched = True

    def __call__(self, samples: object) -> list[float]:
        return [2.0 for _ in samples]  # type: ignore[attr-defined]


marked = Marked()


def half(sample: RewardInput) -> dict[str, object]:
    if sample.response == "half fails":
        raise ValueError("no half")
    if sample.response == "half hangs":
        time.sleep(1000)
    return {"value": 0.5, "correct": True, "details": {"kind": "half"}}


def deaf(sample: RewardInput) -> float:
    """Cannot be interrupted."""
    if sample.response == "hang":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(1000)
    return 1.0


def stopping(sample: RewardInput) -> float:
    """Stands still: no limit inside its process is kept any more."""
    if sample.response == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    return 1.0
