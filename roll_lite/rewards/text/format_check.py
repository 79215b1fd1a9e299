"""Does a response have the form that its domain asks for? Evaluated beside the score, in the reward worker."""

from __future__ import annotations

from roll_lite.config.checks.rewards import compile_format
from roll_lite.config.schema.domains import RewardConfig
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited

FORMAT_SECONDS = 1.0
"""Computing time of one search, unless the domain's own limit is shorter: what takes longer backtracks without end."""


class FormatCheck:
    """Searches responses for a domain's pattern. The search looks for signals now and then, so that a runaway one can be stopped."""

    def __init__(self, config: RewardConfig, path: str = "reward") -> None:
        """`path` is the reward section's place in the configuration; ValueError if its pattern is no pattern."""
        assert config.format is not None
        self._name = config.type
        self.seconds = min(FORMAT_SECONDS, config.timeout_s / 2)
        try:
            self._pattern = compile_format(config.format.pattern)
        except ValueError as error:
            raise ValueError(f"{path}.format.pattern: {config.format.pattern!r}: {error}") from error

    def __call__(self, response: str) -> bool:
        """RewardFailed where the search does not end in time: an unknown form is neither a good nor a bad one."""
        try:
            return limited(self.seconds, lambda: self._pattern.search(response)) is not None
        except TimeLimitExceeded as error:
            raise RewardFailed(f"reward {self._name}: time-out: format pattern {self._pattern.pattern!r:.80}: {error}") from error
