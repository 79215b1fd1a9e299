"""Checks of `simulation`. Only `roll-lite simulate` uses them; a run does not read the section."""

from __future__ import annotations

from collections.abc import Iterator

from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.schema.simulation import SimulatedResponsesConfig


def _simulated_domains(config: RunConfig) -> Iterator[Problem]:
    for name in config.simulation.domains:
        if name not in config.domains:
            yield Problem(f"simulation.domains.{name}", f"no such domain; {did_you_mean(name, config.domains)}")


def _distributions(config: RunConfig) -> Iterator[Problem]:
    sections = {"simulation.responses": config.simulation.responses}
    sections |= {f"simulation.domains.{name}": section for name, section in config.simulation.domains.items()}
    for path, section in sections.items():
        yield from _of(path, section)


def _of(path: str, section: SimulatedResponsesConfig) -> Iterator[Problem]:
    if section.median is not None and section.p99 is not None and section.p99 < section.median:
        yield Problem(f"{path}.p99", f"is less than the median, {section.median:g}", section.p99)
    if section.reward_p99_s is not None and section.reward_p99_s < section.reward_s:
        yield Problem(f"{path}.reward_p99_s", f"is less than the median, {section.reward_s:g}", section.reward_p99_s)
    if section.reward_p99_s is not None and section.reward_s == 0:
        yield Problem(f"{path}.reward_s", "a median of 0 leaves no room for longer times; use a positive one", section.reward_s)
    if section.quantiles is not None and section.quantiles != sorted(section.quantiles):
        yield Problem(f"{path}.quantiles", "go from the shortest to the longest", section.quantiles)
    for name in ("median", "p99"):
        if section.quantiles is not None and getattr(section, name) is not None:
            yield Problem(f"{path}.{name}", "the quantiles say how long responses are", getattr(section, name))
    if section.all_right + section.all_wrong > 1:
        yield Problem(f"{path}.all_wrong", f"with all_right {section.all_right:g} that is more than all prompts", section.all_wrong)


SIMULATION_CHECKS = (_simulated_domains, _distributions)
