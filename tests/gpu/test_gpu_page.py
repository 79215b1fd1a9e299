"""docs/gpu.md names every module whose code, comments apart, mentions GPUs, CUDA or NCCL; `make test-gpu` runs every test for them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MENTION = re.compile("cuda|(?<!asy)nccl|pin_memory|(?<![a-z])gpus?(?![a-z])", re.IGNORECASE)


def mentions(source: str) -> bool:
    """In names and strings; strings that stand alone are documentation."""
    tree = ast.parse(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)}
    words: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            words.append(node.value)
        words += [value for value in vars(node).values() if isinstance(value, str) and not isinstance(node, ast.Constant)]
    return any(MENTION.search(word) for word in words)


def test_what_counts_as_a_mention() -> None:
    assert mentions("import torch\ntorch.cuda.synchronize()") and mentions("device = 'cuda'") and mentions("def f(on_cuda): ...")
    assert not mentions('"""About CUDA."""\nx = 1  # cuda') and not mentions("AsyncClient")


def test_every_such_module_stands_on_the_page() -> None:
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(roll_lite/[\w/]+\.py)`", page))
    modules = {str(file.relative_to(ROOT)): file for file in (ROOT / "roll_lite").rglob("*.py") if "examples" not in file.parts}
    found = {name for name, file in modules.items() if mentions(file.read_text(encoding="utf-8"))}
    assert found - named == set(), "modules that docs/gpu.md leaves out"
    assert named <= set(modules), "modules that are not there"


def test_the_target_runs_every_test_that_wants_a_gpu() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (targets,) = re.findall(r"^ON_GPU := (.+)$", makefile, re.MULTILINE)
    assert re.search(r"^test-gpu:.*\n\t@TEST_DEVICE=cuda .*-m gpu .*\$\(ON_GPU\)$", makefile, re.MULTILINE)
    run = [ROOT / target for target in targets.split()]
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if re.search(r"\bmark\.gpu\b", file.read_text(encoding="utf-8"))]
    assert len(files) > 1
    assert [str(file) for file in files if not any(file.is_relative_to(target) for target in run)] == []


CONTRACT = {
    "numbers": "test_log_probs_are_the_trainers",
    "requests": "test_abort_one_many_unknown_all",
    "ends": "test_an_interruption_does_not_start_min_tokens_again",
    "continues": "test_sampled_under_truncation_and_three_sets_of_weights",
    "weights": "test_nothing_of_the_old_weights_stays_in_the_prefix_cache",
    "adapters": "test_an_update_that_breaks_off_half_way_changes_nothing",
    "experts": "test_the_engine_says_where_its_tokens_went",
}
"""Of each part of the engines' contract a test."""


@pytest.mark.slow
def test_the_target_collects_more_than_three_hundred_tests_without_an_error() -> None:
    (targets,) = re.findall(r"^ON_GPU := (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "gpu", *targets.split()]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"TEST_DEVICE": "cuda"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and " error" not in done.stdout, done.stdout + done.stderr
    (collected,) = re.findall(r"^(\d+)/\d+ tests collected", done.stdout, re.MULTILINE)
    assert int(collected) > 300
    for part, name in CONTRACT.items():
        makes = set(re.findall(rf"test_contract_{part}\.py::{name}\[(vllm|sglang)", done.stdout))
        assert makes == {"vllm", "sglang"}, part
