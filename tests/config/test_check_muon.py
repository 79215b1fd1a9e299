"""Muon is refused where Megatron-Core has none, and without its package."""

from __future__ import annotations

import pytest
from config_project import Project

from roll_lite.config.checks import muon as check_muon

REPLICATED = "strategy: {distributed_optimizer: false}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_muon, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("role", "path", "fragment"),
    [
        (f"optimizer: {{muon: {{}}}}, {REPLICATED}", None, ""),
        ("optimizer: {muon: {}}", "strategy.distributed_optimizer", "has no distributed optimizer for Muon; use false, or no"),
        (f"optimizer: {{muon: {{}}, on_host: true}}, {REPLICATED}", "optimizer.on_host", "is AdamW's; use false, or no optimizer.muon"),
        (f"optimizer: {{muon: {{}}}}, lora: {{}}, {REPLICATED}", "optimizer.muon", "adapters are factors; remove it, or lora"),
        (
            "optimizer: {muon: {}}, devices: 8, strategy: {tensor_parallel: 8, distributed_optimizer: false}",
            "strategy.tensor_parallel",
            "key/value heads, which Muon's updates are cut by; use at most",
        ),
        (f"optimizer: {{muon: {{momentum: 1.0}}}}, {REPLICATED}", "optimizer.muon.momentum", "expected number >= 0 and < 1"),
        (f"optimizer: {{muon: {{scale: none}}}}, {REPLICATED}", "optimizer.muon.scale", "spectral"),
    ],
)
def test_what_goes_with_muon(project: Project, installed: None, role: str, path: str | None, fragment: str) -> None:
    problems = project.problems_of(f"actor_train: {{{role}}}")
    if path is None:
        assert problems == []
        return
    assert any(fragment in problem.message for problem in problems if problem.path == f"actor_train.{path}"), problems


def test_muon_needs_its_package(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(check_muon, "find_spec", lambda name: None)
    yaml = f"actor_train: {{optimizer: {{muon: {{}}}}, {REPLICATED}}}\n"
    (problem,) = project.problems_of(yaml)
    assert problem.path == "actor_train.optimizer.muon"
    assert problem.message == "the package emerging-optimizers is not installed; install it (docs/parallelism.md), or remove the section"
    assert project.problems_of(yaml + "ray: {address: 'head:6379'}") == [], "its nodes may have it, and tell at their start"
