"""Muon and moments in float16 are refused where Megatron-Core has none, and without their packages."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from config_project import Project

from roll_lite.config.checkpoint_files import SCHEMA_VERSION
from roll_lite.config.checks import gpu_only as check_gpu_only
from roll_lite.config.checks import layout as check_layout
from roll_lite.config.checks import optimizers as check_optimizers
from roll_lite.config.problems import Problem

REPLICATED = "strategy: {distributed_optimizer: false}"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (check_optimizers, check_gpu_only):
        monkeypatch.setattr(module, "find_spec", lambda name: object())


def assert_told(problems: Sequence[Problem], path: str | None, fragment: str) -> None:
    """At this place of the actor's; None: there are none."""
    if path is None:
        assert problems == []
    else:
        assert any(fragment in problem.message for problem in problems if problem.path == f"actor_train.{path}"), problems


@pytest.mark.parametrize(
    ("role", "path", "fragment"),
    [
        (f"optimizer: {{muon: {{}}}}, {REPLICATED}", None, ""),
        ("optimizer: {muon: {}}", None, ""),
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
    assert_told(problems, path, fragment)


def test_a_run_goes_on_with_the_optimizer_that_it_had(project: Project, installed: None) -> None:
    """Of both roles, before anything starts. An older version had no Muon, and does not mention it."""
    adam, muon = "optimizer: {lr: 1.0e-5}", "optimizer: {muon: {}}"
    yaml = "actor_train: {%s}\ncritic: {%s}\nalgorithm: {advantage: {name: gae}}"
    saved: dict[str, dict[str, object]] = {adam: {"lr": 1e-6}, muon: {"lr": 1e-6, "muon": {"momentum": 0.95}}}
    for actor, critic in ((adam, muon), (muon, adam)):
        made = {"actor_train": {"optimizer": saved[actor]}, "critic": {"optimizer": saved[critic]}}
        state = {"schema_version": SCHEMA_VERSION, "pipeline": {}, "rollouts": {}, "config": made}
        checkpoint = project.write("old/checkpoints/step_000001/state.json", json.dumps(state)).parent
        for role in made:
            project.write(f"{checkpoint}/{role}/weights", "")
        resume = f"checkpoint.resume={checkpoint}"
        assert project.problems_of(yaml % (actor, critic), resume) == []
        for now, role, was in (((critic, critic), "actor_train", actor), ((actor, actor), "critic", critic)):
            (problem,) = project.problems_of(yaml % now, resume)
            held, remedy = ("Muon's", "set it") if was == muon else ("AdamW's", "remove it")
            assert problem.path == "checkpoint.resume"
            assert problem.message.endswith(
                f"it holds {held} state for {role}; {role}.optimizer.muon decides what trains matrices: {remedy}"
            )


def test_muon_needs_its_package(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(check_optimizers, "find_spec", lambda name: None)
    yaml = f"actor_train: {{optimizer: {{muon: {{}}}}, {REPLICATED}}}\n"
    (problem,) = project.problems_of(yaml)
    assert problem.path == "actor_train.optimizer.muon"
    assert problem.message == "the package emerging-optimizers is not installed; install it (docs/parallelism.md), or remove the section"
    assert project.problems_of(yaml + "ray: {address: 'head:6379'}") == [], "its nodes may have it, and tell at their start"


HALF = "model: {dtype: bfloat16}\nactor_train: {optimizer: {moments: float16}}\n"


@pytest.mark.parametrize(
    ("yaml", "path", "fragment"),
    [
        (HALF, None, ""),
        (HALF.replace("bfloat16", "float32"), "optimizer.moments", "is for weights in bfloat16, model.dtype is float32; use float32"),
        (HALF.replace("}}", f"}}, {REPLICATED}}}"), "strategy.distributed_optimizer", "in its distributed optimizer only; use true, or"),
        (HALF.replace("float16}}", "float16, on_host: true}}"), "optimizer.moments", "use float32, or on_host: false"),
        (HALF.replace("float16}}", "float16, muon: {}}}"), "optimizer.moments", "has none beside Muon; use float32, or no optimizer.muon"),
    ],
)
def test_what_goes_with_half_moments(
    project: Project, installed: None, monkeypatch: pytest.MonkeyPatch, yaml: str, path: str | None, fragment: str
) -> None:
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: True)
    problems = project.problems_of(yaml)
    assert_told(problems, path, fragment)


def test_half_moments_need_a_gpu_and_a_package(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(check_gpu_only, "find_spec", lambda name: None)
    for gpus, fragment in ((False, "none are visible here; use float32"), (True, "the package transformer-engine is not installed")):
        monkeypatch.setattr(check_layout, "gpus_visible", lambda gpus=gpus: gpus)
        (problem,) = project.problems_of(HALF)
        assert (problem.path, problem.value) == ("actor_train.optimizer.moments", "float16") and fragment in problem.message
    assert project.problems_of(HALF + "ray: {address: 'head:6379'}") == [], "its nodes tell at their start"
