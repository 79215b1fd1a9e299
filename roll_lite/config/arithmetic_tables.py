"""Derived values of a configuration as tables, for `roll-lite check`."""

from __future__ import annotations

from fractions import Fraction

from roll_lite.config.arithmetic import BatchArithmetic
from roll_lite.config.placement import ranges


def render(arithmetic: BatchArithmetic) -> str:
    clusters = [
        [cluster.role, ranges(cluster.devices), cluster.layout, ", ".join(cluster.shares_with) or "nobody"]
        for cluster in arithmetic.clusters
    ]
    domains = [
        [
            one.name,
            f"{float(one.share):.1%}",
            _number(one.prompts_per_step),
            str(one.samples_per_prompt),
            _number(one.samples_per_step),
            str(one.max_tokens),
        ]
        for one in arithmetic.domains
    ]
    passes = [
        [
            one.role,
            one.what,
            _with_bound(one.rows, one.most_rows),
            str(one.micro_batches),
            f"{one.tokens} tokens",
        ]
        for one in arithmetic.passes
    ]
    updates_per_step = f"{arithmetic.updates_per_step} (ppo_epochs {arithmetic.ppo_epochs} x mini_batches {arithmetic.mini_batches})"
    batch = [
        ["prompts per step", str(arithmetic.prompts_per_step)],
        ["samples per step", _number(arithmetic.samples_per_step)],
        ["samples per mini-batch", _number(arithmetic.mini_batch_samples)],
        *([["updates per step", updates_per_step]] if arithmetic.passes else []),
        *([f"learning rate of {one.role}", one.describe()] for one in arithmetic.learning_rates),
        ["longest sequence", f"{arithmetic.max_model_len} tokens"],
        *([["engine replicas", str(arithmetic.engine_replicas)]] if arithmetic.generates else []),
        ["devices in all", str(arithmetic.device_count)],
    ]
    return "\n\n".join(
        [
            table(["role", "devices", "layout", "shares devices with"], clusters),
            table(["domain", "share", "prompts per step", "samples per prompt", "samples per step", "longest sequence"], domains),
            table(["batch", ""], batch),
            *([table(["role", "pass", "samples of a rank", "micro-batches, of the longest", "largest"], passes)] if passes else []),
        ]
    )


def table(header: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _with_bound(number: int, most: int) -> str:
    """Number for rows of equal length, with the bound for others."""
    return str(number) if most == number else f"{number} (at most {most})"


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f} on average"
