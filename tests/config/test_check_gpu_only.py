"""What only GPUs have is refused without one, and where it does not go with the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from config_project import Project

from roll_lite.config.checks import gpu_only
from roll_lite.config.checks import layout as check_layout

FP8 = "model: {dtype: bfloat16}\nactor_infer: {strategy: {quantization: fp8}}\n"
CORRECTED = FP8 + "algorithm: {mismatch_correction: {weight: {high: 2.0}}}\n"
QUANTIZATION = "actor_infer.strategy.quantization"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: True)


def test_fp8_rollouts_without_a_gpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (problem,) = project.problems_of(CORRECTED)
    assert (problem.path, problem.value) == (QUANTIZATION, "fp8") and "none are visible here; use none" in problem.message
    assert project.problems_of(CORRECTED + "ray: {address: 'head:6379'}") == [], "its nodes may have GPUs"


@pytest.mark.parametrize(
    ("yaml", "path", "fragment"),
    [
        (FP8, QUANTIZATION, "set algorithm.mismatch_correction (weight: {level: token"),
        (CORRECTED.replace("bfloat16", "float32"), QUANTIZATION, "model.dtype) is float32"),
        (CORRECTED + "weight_sync: {verify: full}", "weight_sync.verify", "bit for bit; use sampled, which leaves them out"),
        (CORRECTED + "weight_sync: {verify: sampled}", None, ""),
        (CORRECTED + "weight_sync: {verify: full}\nactor_train: {lora: {engines: adapter}}", None, ""),
        (CORRECTED, None, ""),
        (FP8 + "algorithm: {old_log_probs: rollout}", None, ""),
        (FP8 + "mode: rollout_only", None, ""),
    ],
)
def test_what_goes_with_fp8_rollouts(project: Project, gpus: None, yaml: str, path: str | None, fragment: str) -> None:
    problems = project.problems_of(yaml)
    assert [problem.path for problem in problems] == ([path] if path else [])
    assert all(fragment in problem.message for problem in problems)


def test_what_is_not_compared_with_the_engines_is_told(project: Project, gpus: None) -> None:
    fp8 = "model.dtype=bfloat16", f"{QUANTIZATION}=fp8", "algorithm.mismatch_correction={weight: {high: 2.0}}"
    assert check_layout.verify_notes(project.load(*fp8))[0].startswith("weight_sync.verify leaves out matrices of layers")
    assert check_layout.verify_notes(project.load(*fp8, "weight_sync.verify=none")) == check_layout.verify_notes(project.load()) == []


def test_sglang_replaces_fp8_weights_of_some_families(project: Project, gpus: None) -> None:
    sglang = CORRECTED.replace("{quantization", "{name: sglang, quantization")
    assert project.problems_of(sglang) == []
    file: Path = project.folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "llama"}))
    messages = [one.message for one in project.problems_of(sglang) if one.path == QUANTIZATION]
    assert len(messages) == 1 and "the model is a llama; use vllm, or none" in messages[0]


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_transports_between_gpus(project: Project, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: False)
    (problem,) = project.problems_of(f"weight_sync: {{transport: {transport}}}")
    assert (problem.path, problem.value) == ("weight_sync.transport", transport) and "none are visible here; use auto" in problem.message
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: True)
    assert project.problems_of(f"weight_sync: {{transport: {transport}}}") == []


TE = "actor_train: {strategy: {layers: transformer_engine}}\n"


def test_layers_of_transformer_engine(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(yaml: str, gpus: bool, installed: bool) -> list[str]:
        monkeypatch.setattr(check_layout, "gpus_visible", lambda: gpus)
        monkeypatch.setattr(gpu_only, "find_spec", lambda name: object() if installed else None)
        problems = project.problems_of(yaml)
        assert {problem.path for problem in problems} <= {"actor_train.strategy.layers"}
        return [problem.message for problem in problems]

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (message,) = told(TE, gpus=False, installed=True)
    assert "none are visible here" in message
    (message,) = told(TE, gpus=True, installed=False)
    assert "transformer-engine is not installed" in message
    assert told(TE, gpus=True, installed=True) == []
    assert told(TE + "ray: {address: 'head:6379'}", gpus=False, installed=False) == []
    (message,) = told("actor_train: {lora: {}, strategy: {layers: transformer_engine}}", gpus=True, installed=True)
    assert "adapters (lora)" in message


def test_a_judge_in_fp8_without_a_gpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: False)
    judge = "judges: {main: {path: model, strategy: {quantization: fp8}}}\n"
    problems = project.problems_of(judge + "domains: {add: {reward: {name: judge, args: {server: main, api: completions}}}}")
    assert "judges.main.strategy.quantization" in [problem.path for problem in problems]
