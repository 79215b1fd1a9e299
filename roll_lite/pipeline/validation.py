"""Timing of validations: training waits for them, or they run beside the next steps if generation runs beside training."""

from __future__ import annotations

from dataclasses import dataclass

from roll_lite.config.arithmetic import generates_ahead, held_out_sampling
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.cluster import Pending
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.sources import BatchSource, HeldOut


@dataclass(frozen=True)
class Running:
    step: int
    """Step after which it began; its metrics are reported under this step."""
    answers: Pending[HeldOut]


class Validation:
    """Starts and finishes validations, one at a time."""

    def __init__(self, config: RunConfig, source: BatchSource, journal: Journal) -> None:
        self._config = config
        self._source = source
        self._journal = journal
        self._running: Running | None = None

    def begin(self, step: int) -> None:
        """Start a validation with the engines' weights. Waits for it unless further steps run beside generation."""
        assert self._running is None
        config = self._config
        sampling = {name: held_out_sampling(config, domain) for name, domain in config.domains.items()}
        self._running = Running(step, self._source.start_validation(config.validation.samples_per_prompt, sampling, step))
        if step == config.steps or not generates_ahead(config):
            self.finish()

    def look(self) -> None:
        """Finish the validation if it is complete."""
        if self._running is not None and self._running.answers.answer() is not None:
            self.finish()

    def finish(self) -> None:
        """Wait for the running validation and report it."""
        if self._running is not None:
            running, self._running = self._running, None
            self._journal.validation(running.step, *self._source.finish_validation(running.answers))
