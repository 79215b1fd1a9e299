from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from roll_lite.config.arithmetic import BatchArithmetic
from roll_lite.config.placement import ranges


def render(arithmetic: BatchArithmetic) -> str:
    clusters = [
        [role, ranges(one.devices), one.layout, ", ".join(one.shares_with) or "nobody"] for role, one in arithmetic.clusters.items()
    ]
    domains = []
    for one in arithmetic.domains:
        counts = [_number(one.prompts_per_step), str(one.samples_per_prompt), _number(one.samples_per_step), str(one.max_tokens)]
        domains.append([one.name, f"{float(one.share):.1%}", *counts])
    passes = []
    for each in arithmetic.passes:
        passes.append([each.role, each.what, str(each.rows), str(each.micro_batches), f"{each.tokens} tokens"])
    epochs, parts = arithmetic.ppo_epochs, arithmetic.mini_batches
    updates = f"{epochs * parts} (ppo_epochs {epochs} x mini_batches {parts})"
    batch = {
        "prompts per step": str(arithmetic.prompts_per_step),
        "samples per step": _number(arithmetic.samples_per_step),
        "samples per mini-batch": _number(arithmetic.mini_batch_samples),
        "updates per step": updates if passes else "",
        "longest sequence": f"{arithmetic.max_model_len} tokens",
        "engine replicas": str(arithmetic.engine_replicas or ""),
        "devices in all": str(arithmetic.device_count),
    }
    tables = [
        table(["role", "devices", "layout", "shares devices with"], clusters),
        table(["domain", "share", "prompts per step", "samples per prompt", "samples per step", "longest sequence"], domains),
        table(["batch", ""], [[name, text] for name, text in batch.items() if text]),
    ]
    if passes:
        tables.append(table(["role", "pass", "samples of a rank", "micro-batches, of the longest", "largest"], passes))
    return "\n\n".join(tables)


def table(header: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool = False) -> str:
    aligned: list[list[str]] = []
    for column in zip(header, *rows, strict=True):
        width = max(map(len, column))
        aligned.append([cell.rjust(width) if numbers and aligned else cell.ljust(width) for cell in column])
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _number(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.2f} on average"
