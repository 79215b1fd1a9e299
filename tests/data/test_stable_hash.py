"""Seeds that are derived, never added up."""

from __future__ import annotations

import ast
from itertools import product
from pathlib import Path

from roll_lite.data.stable_hash import derived_seed, stable_hash

PACKAGE = Path(__file__).resolve().parents[2] / "roll_lite"


def test_the_hash_is_the_same_in_every_process_and_version() -> None:
    """blake2b with 8 bytes of b"1\\x1fadd", as `b2sum -l 64` has it, without its lowest bit."""
    assert stable_hash(1, "add") == 0xB835_D677_D954_8925 >> 1


def test_neighbouring_runs_and_steps_share_no_seed() -> None:
    seeds = [derived_seed(run, purpose, step) for run, purpose, step in product(range(20), ("mini_batches", "actor_infer"), range(50))]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_a_parts_end_is_not_anothers_beginning() -> None:
    assert derived_seed(1, "mini_batches", 12) != derived_seed(1, "mini_batches", 1, 2)


def test_nobody_calculates_with_seeds() -> None:
    def is_seed(node: ast.expr) -> bool:
        return (isinstance(node, ast.Name) and node.id.endswith("seed")) or (isinstance(node, ast.Attribute) and node.attr.endswith("seed"))

    sums = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.BitXor)
        and (is_seed(node.left) or is_seed(node.right))
    ]
    assert sums == []
