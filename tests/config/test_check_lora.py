"""One mistake in the adapters' settings, one problem at its path."""

from __future__ import annotations

import json

import pytest
from config_project import Project
from support_cases import cases

from roll_lite.config.checks import layout as check_layout
from roll_lite.config.checks.notes import notes_on
from roll_lite.files import record
from roll_lite.pipeline.checkpoint_files import SCHEMA_VERSION, write_list

ADAPTERS = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(("settings", "path", "says"), cases("config/adapters"))
def test_a_mistake_is_named(project: Project, settings: str, path: str, says: str) -> None:
    for name, further in (("adapters", {}), ("dora", {"use_dora": True})):
        project.write(f"{name}/adapter_config.json", json.dumps(ADAPTERS | further))
        project.write(f"{name}/adapter_model.safetensors", "")
    settings = settings.replace("path: ", f"path: {project.folder}/")
    problems = project.problems_of(f"actor_train: {{lora: {settings}}}")
    assert [problem.path for problem in problems] == [path]
    assert says in problems[0].message


def test_adapters_of_peft_are_begun_with(project: Project) -> None:
    project.write("adapters/adapter_config.json", json.dumps(ADAPTERS | {"bias": "none", "use_dora": False, "modules_to_save": None}))
    project.write("adapters/adapter_model.safetensors", "")
    assert project.problems_of(f"actor_train: {{lora: {{rank: 8, alpha: 16, path: {project.folder}/adapters}}}}") == []


def of_peft(further: dict[str, object]) -> dict[str, object]:
    """What PEFT 0.21 writes, and something else in it."""
    off = dict.fromkeys(
        (
            *("auto_mapping", "revision", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save", "megatron_config"),
            *("alora_invocation_tokens", "layer_replication", "trainable_token_indices", "target_parameters", "arrow_config"),
            *("eva_config", "corda_config", "lora_ga_config", "velora_config", "kasa_config", "monteclora_config", "use_bdlora"),
        )
    )
    false = dict.fromkeys(("use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out", "ensure_weight_tying"), False)
    empty: dict[str, object] = {"rank_pattern": {}, "alpha_pattern": {}, "loftq_config": {}}
    said = {"task_type": "CAUSAL_LM", "bias": "none", "lora_dropout": 0.1, "megatron_core": "megatron.core", "qalora_group_size": 16}
    return {**ADAPTERS, **off, **false, **empty, **said, "init_lora_weights": True, "peft_version": "0.21.2", **further}


@pytest.mark.parametrize(("key", "value", "told"), cases("config/adapters_of_peft"))
def test_adapters_of_another_kind_or_base(project: Project, key: str, value: object, told: str | None) -> None:
    project.write("adapters/adapter_config.json", json.dumps(of_peft({key: value})))
    project.write("adapters/adapter_model.safetensors", "")
    problems = project.problems_of(f"actor_train: {{lora: {{rank: 8, alpha: 16, path: {project.folder}/adapters}}}}")
    assert [problem.path for problem in problems] == ["actor_train.lora.path"] * (told is not None)
    assert told is None or (f"adapter_config.json has {key} {value!r:.40}" in problems[0].message and told in problems[0].message)


def test_a_run_goes_on_with_the_adapters_that_it_had(project: Project) -> None:
    adapters = {"rank": 8, "alpha": 32.0, "targets": ["q_proj", "o_proj"], "path": None, "export": "merged"}
    state = {"schema_version": SCHEMA_VERSION, "pipeline": {}, "rollouts": {}, "config": {"actor_train": {"lora": adapters}}}
    checkpoint = project.write("old/checkpoints/step_000001/state.json", json.dumps(state)).parent
    write_list(checkpoint, {"state.json": record(checkpoint / "state.json")})
    project.write(f"{checkpoint}/actor_train/weights", "")
    resume = f"checkpoint.resume={checkpoint}"
    assert project.problems_of("actor_train: {lora: {rank: 8, targets: [q_proj, o_proj], export: adapter}}", resume) == []
    assert project.problems_of("actor_train: {lora: {rank: 8, targets: [o_proj, q_proj]}}", resume) == [], "in another order"
    for other, told in (("{rank: 4, targets: [q_proj, o_proj]}", ".rank: 8 -> 4"), ("null", ': {"rank": 8, "alpha": 32.0')):
        (problem,) = project.problems_of(f"actor_train: {{lora: {other}}}", resume)
        assert problem.path == "checkpoint.resume" and f"may not change on resume: actor_train.lora{told}" in problem.message


def test_what_the_kl_is_measured_against_is_told(project: Project) -> None:
    """Without adapters it takes a reference; with some the actor is one, unless the section is there."""
    kl, lora = "algorithm: {kl_in_loss: {coef: 0.1}}\n", "actor_train: {lora: {}}\n"
    assert [problem.path for problem in project.problems_of(kl)] == ["algorithm.kl_in_loss.coef"]
    for yaml, told in (
        (kl + lora, "against actor_train with its adapters off"),
        (kl + lora + "reference: {}", "reference holds"),
        (lora, None),
    ):
        assert project.problems_of(yaml) == []
        notes = [note for note in notes_on(project.load(name="changed")) if "adapters" in note]
        assert len(notes) == (told is not None) and all(str(told) in note for note in notes)
    assert [problem.path for problem in project.problems_of(lora + "reference: {}")] == ["reference"]


def test_adapters_alone_to_engines(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused where an engine has no place for them."""
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: False)
    alone = "actor_train: {lora: {engines: adapter, rank: 4, targets: [q_proj]}}\n"
    assert project.problems_of(alone) == []
    wide = "actor_train: {lora: {engines: adapter, rank: 513}}\nactor_infer: {strategy: {name: %s}}"
    (problem,) = project.problems_of(wide % "vllm")
    assert problem.path == "actor_train.lora.rank" and "up to rank 512" in problem.message
    assert project.problems_of(wide % "sglang") == project.problems_of("mode: rollout_only\n" + wide % "vllm") == []
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: True)
    assert ["engines' kernels for adapters compute in 16 bits" in problem.message for problem in project.problems_of(alone)] == [True]
    assert project.problems_of("actor_infer: {dtype: bfloat16}\n" + alone) == []


def test_adapters_of_experts_do_not_go_alone(project: Project) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8, "norm_topk_prob": True}
    project.write_model("model", model_type="qwen3_moe", **experts)  # whose weights are a dense model's, which is told beside

    def told(targets: str) -> list[str]:
        problems = project.problems_of(f"actor_train: {{lora: {{engines: adapter, targets: [{targets}]}}}}")
        return [problem.message for problem in problems if problem.path == "actor_train.lora.engines"]

    assert told("q_proj, v_proj") == []
    assert ["experts (up_proj of targets) in merged weights only" in message for message in told("q_proj, up_proj")] == [True]
