"""A module of an imaginary user whose import never ends in a reward worker."""

from __future__ import annotations

import time

from roll_lite.data.samples import RewardInput

time.sleep(1000)


def one(sample: RewardInput) -> float:
    return 1.0
