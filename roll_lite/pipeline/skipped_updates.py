"""Count optimizer steps skipped because loss or gradient was not finite. The first of each series is reported; too long a series ends the
run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from roll_lite.config.schema.run import RunConfig
from roll_lite.workers.model import Update

SECTIONS = {"actor": "actor_train", "critic": "critic"}


class NotFinite(RuntimeError):
    """Error: too many updates in a row were skipped."""


@dataclass(frozen=True)
class Skipped:
    role: str
    step: int
    update: int
    """Number of the update within its step, from 1."""
    loss: float
    grad_norm: float
    row_losses: Mapping[int, float]

    @property
    def folder(self) -> str:
        return folder_of(self.role, self.step, self.update)


def folder_of(role: str, step: int, update: int) -> str:
    return f"skipped/step_{step:06d}_{role}_update_{update:02d}"


@dataclass
class SkippedSeries:
    """Consecutive skipped updates of a role. An update is (step, number within the step, from 1)."""

    length: int = 0
    first: tuple[int, int] = (0, 0)
    last: tuple[int, int] = (0, 0)
    last_finite: tuple[int, int] | None = None


@dataclass
class SkippedUpdates:
    """Counts each role's consecutive skipped updates across steps and resumed runs."""

    limits: Mapping[str, int]
    """{role: consecutive skipped updates that end the run}; 0: no limit."""
    with_ptx: bool = False
    _series: dict[str, SkippedSeries] = field(default_factory=dict)
    _too_long: str | None = None

    @staticmethod
    def of(config: RunConfig) -> SkippedUpdates:
        roles = {"actor": config.actor_train, "critic": config.critic}
        limits = {name: role.optimizer.stop_after_skipped for name, role in roles.items() if role is not None}
        return SkippedUpdates(limits, config.algorithm.ptx is not None)

    def count(self, step: int, updates: Mapping[str, Sequence[Sequence[Update]]]) -> list[Skipped]:
        """Count a step's updates. Return the skipped ones that begin a series."""
        begun: list[Skipped] = []
        for role, ranks in updates.items():
            series = self._series.setdefault(role, SkippedSeries())
            for number, of_ranks in enumerate(zip(*ranks, strict=True), start=1):
                result = of_ranks[0].result
                if not result.skipped:
                    self._series[role] = series = SkippedSeries(last_finite=(step, number))
                    continue
                series.length, series.last = series.length + 1, (step, number)
                if series.length == 1:
                    series.first = series.last
                    losses = {sample: loss for update in of_ranks for sample, loss in update.row_losses.items()}
                    begun.append(Skipped(role, step, number, result.loss, result.grad_norm, losses))
                if 0 < self.limits[role] <= series.length and self._too_long is None:
                    self._too_long = _described(role, series, self.with_ptx and role == "actor")
        return begun

    def check(self) -> None:
        if self._too_long is not None:
            raise NotFinite(self._too_long)

    def state_dict(self) -> dict[str, Any]:
        return {role: asdict(series) for role, series in self._series.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._series, self._too_long = {role: SkippedSeries(**series) for role, series in state.items()}, None


def _described(role: str, series: SkippedSeries, with_ptx: bool) -> str:
    section = SECTIONS[role]
    finite = f"the last finite one was {_named(series.last_finite)}" if series.last_finite else "none before them was finite"
    step = series.first[0]
    again = f"go on from a checkpoint before step {step} (checkpoint.resume)" if step > 1 else "start again"
    of_ptx = (
        "- where rows of algorithm.ptx alone have a loss that is not finite (supervised.parquet), they are the cause\n" if with_ptx else ""
    )
    return (
        f"{role}: {series.length} updates in a row were skipped, because loss or gradient was not finite, up to {_named(series.last)}; "
        f"{finite}. {section}.optimizer.stop_after_skipped allows less than {series.length}.\n"
        f"The samples of the first one, {_named(series.first)}, are in {folder_of(role, *series.first)} of the folder of the run that made "
        "it, each with its loss (roll-lite docs recompute).\n"
        "What to do:\n"
        "- where a sample whose loss is not finite has a column there that is not (reward, advantages, log-probs), that is the cause\n"
        f"{of_ptx}"
        f"- where all columns are finite, the weights are to blame: {again} with a smaller {section}.optimizer.lr or clip_grad, "
        "or a longer warm-up\n"
        f"- {section}.optimizer.stop_after_skipped: 0 lets a run go on however many are skipped"
    )


def _named(update: Sequence[int]) -> str:
    step, number = update
    return f"update {number} of step {step}"
