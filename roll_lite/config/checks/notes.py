"""Notes on settings that are legal but suspicious; `check` and the start of a run print them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from roll_lite.config.checks.gpu_only import gpu_notes
from roll_lite.config.checks.layout import sharing_notes
from roll_lite.config.checks.lora import engine_notes, reference_notes
from roll_lite.config.checks.replay import mode_notes
from roll_lite.config.checks.rollout import staleness_notes
from roll_lite.config.checks.secrets import plain_secrets
from roll_lite.config.schema.base import Refused
from roll_lite.config.schema.run import RunConfig


def notes_on(config: RunConfig, *further: Callable[[RunConfig], list[str]]) -> list[str]:
    """`further`: notes that other packages add."""
    notes_of_parts = (
        mode_notes,
        gpu_notes,
        sharing_notes,
        staleness_notes,
        reference_notes,
        engine_notes,
        plain_secrets,
        *further,
    )
    found: list[str] = []
    for notes in notes_of_parts:
        with suppress(Refused):  # values are missing
            found += notes(config)
    return found
