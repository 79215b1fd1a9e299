"""Reward models in a configuration: every mistake is found before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from config_project import MODEL, Project
from support_cases import cases
from support_weights import tensors, write_safetensors

from roll_lite.config.arithmetic import derive, roles
from roll_lite.config.arithmetic_tables import render
from roll_lite.config.loading import load_config

SECTION = """
reward_models:
  helpful: {path: helpful, dtype: float32, devices: [1, 2], %s}
domains:
  add:
    reward: {name: model, args: {model: helpful, %s}}
"""


@pytest.fixture
def helpful(project: Project) -> Project:
    write_reward_model(project, "helpful")
    return project


def write_reward_model(project: Project, name: str, head: tuple[int, ...] | None = (1, 256), **changes: object) -> Path:
    given = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}, **changes}
    folder = project.write_model(name, **given)
    weights = {name: shape for name, shape in tensors(MODEL).items() if name != "lm_head.weight"}
    write_safetensors(folder / "model.safetensors", weights if head is None else weights | {"score.weight": list(head)})
    return folder


def found(project: Project, settings: str = "", args: str = "") -> dict[str, str]:
    return {problem.path: problem.message for problem in project.problems_of(SECTION % (settings, args))}


@pytest.mark.parametrize(
    "settings", ["", "strategy: {name: megatron}, micro_batch_tokens: 32", "strategy: {name: megatron, tensor_parallel: 2}, max_length: 64"]
)
def test_what_is_right_passes_and_has_its_place_in_the_plan(helpful: Project, settings: str) -> None:
    assert found(helpful, settings, "template: '{prompt} -> {response}', scale: sigmoid") == {}
    config = helpful.load(name="changed")
    assert list(roles(config)) == ["actor_train", "actor_infer", "reward_models.helpful"]
    cluster = derive(config).clusters["reward_models.helpful"]
    assert cluster.devices == (1, 2)
    assert cluster.copies == (1 if "tensor_parallel" in settings else 2)
    assert "reward_models.helpful" in render(derive(config))


def test_none_leaves_its_devices_while_others_generate(helpful: Project) -> None:
    assert found(helpful, "offload: true") == {}
    (problem,) = helpful.problems_of(SECTION % ("offload: true", "") + "rollout: {supply: one_step_off}\n")
    assert problem.path == "reward_models.helpful.offload" and "use false, or rollout.supply: sync" in problem.message
    surplus = SECTION % ("offload: true", "") + "rollout: {oversample: 2, max_staleness: %d}\nactor_infer: {offload: %s}\n"
    (problem,) = helpful.problems_of(surplus % (1, "false"))
    assert problem.path == "reward_models.helpful.offload" and "use false, or rollout.max_staleness: 0" in problem.message
    assert helpful.problems_of(surplus % (0, "false")) == helpful.problems_of(surplus % (1, "true")) == [], "nothing goes on in training"


def test_names_have_to_meet(helpful: Project) -> None:
    problems = {one.path: one.message for one in helpful.problems_of(SECTION.replace("model: helpful", "model: helpfull") % ("", ""))}
    assert problems["domains.add.reward.args.model"] == "no such reward model; did you mean 'helpful'?"
    assert "reward_models.helpful" not in problems, "the misspelt name means it"
    alone = helpful.problems_of("domains: {add: {reward: {name: model, args: {model: helpful}}}}")
    assert [(one.path, one.message) for one in alone] == [
        ("domains.add.reward.args.model", "no such reward model; there is no section `reward_models` yet")
    ]
    missing = helpful.problems_of("domains: {add: {reward: {name: model}}}")
    assert [(one.path, one.message) for one in missing] == [("domains.add.reward.args.model", "is missing; expected text")]


CHECKPOINTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a language model": ({"architectures": ["Qwen2ForCausalLM"]}, "path", "names the architecture Qwen2ForCausalLM"),
    "no architecture": ({"architectures": None}, "path", "names the architecture (none)"),
    "three labels": ({"id2label": {"0": "a", "1": "b", "2": "c"}}, "path", "has 3 labels"),
    "transformers' default of two labels": ({"id2label": None}, "path", "has 2 labels"),
    "a head of another size": ({"head": (3, 256)}, "path", "its score.weight has the shape [3, 256]"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_the_checkpoint_is_a_reward_models(project: Project, case: str) -> None:
    changes, key, message = CHECKPOINTS[case]
    write_reward_model(project, "helpful", **changes)
    assert message in found(project)[f"reward_models.helpful.{key}"]


def test_the_checkpoint_is_complete(project: Project) -> None:
    assert "no such folder" in found(project)["reward_models.helpful.path"]
    folder = write_reward_model(project, "helpful")
    weights = folder / "model.safetensors"
    weights.write_bytes(b"")
    assert "safetensors cannot be read" in found(project)["reward_models.helpful.path"]
    weights.unlink()
    assert "no model.safetensors" in found(project)["reward_models.helpful.path"]
    folder = write_reward_model(project, "helpful")
    (folder / "tokenizer.json").unlink()
    assert "no tokenizer in this folder" in found(project)["reward_models.helpful.path"]


def test_a_head_of_another_name_is_for_transformers(project: Project) -> None:
    write_reward_model(project, "helpful", head=None)
    assert found(project) == {}
    assert "have no score.weight" in found(project, "strategy: {name: megatron}")["reward_models.helpful.path"]


def test_heads_in_several_files(project: Project) -> None:
    folder = write_reward_model(project, "helpful", head=(2, 256))
    (folder / "model.safetensors").rename(folder / "model-2.safetensors")
    write_safetensors(folder / "model-1.safetensors", {"a": [1], "classifier.weight": [1]})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "score.weight": "model-2.safetensors"}}))
    assert "has the shape [2, 256]" in found(project)["reward_models.helpful.path"]
    index.write_text(json.dumps({"weight_map": {"classifier.weight": "model-1.safetensors"}}))
    assert found(project) == {}


@pytest.mark.parametrize(("settings", "args", "path", "says"), cases("config/reward_models"))
def test_layouts_and_templates(helpful: Project, settings: str, args: str, path: str, says: str) -> None:
    assert says in found(helpful, settings, args)[path]


def test_families(project: Project) -> None:
    write_reward_model(project, "helpful", model_type="gemma2", architectures=["Gemma2ForSequenceClassification"])
    assert found(project) == {}
    message = found(project, "strategy: {name: megatron}")["reward_models.helpful.strategy.name"]
    assert message == "model_type 'gemma2' does not run on Megatron (qwen2, qwen3, qwen3_moe, llama, mistral do); use hf"


def test_chat_templates_of_policy_and_reward_model_go_together(helpful: Project) -> None:
    for name in ("helpful", "model"):
        helpful.write(f"{name}/chat_template.jinja", "{{ messages }}")
    assert found(helpful, "", "template: chat") == {}
    policy = SECTION.replace("  add:", "  add:\n    template: {name: chat}")
    assert helpful.problems_of(policy % ("", "template: chat")) == []
    assert helpful.problems_of(policy % ("", "template: chat, question: '{question}'")) == []


def test_a_model_is_no_further_term(helpful: Project) -> None:
    terms = "domains: {copy: {reward: {terms: [{name: model, args: {model: helpful}}]}}}"
    problems = {one.path: one.message for one in helpful.problems_of(terms)}
    assert "not a further term" in problems["domains.copy.reward.terms.0.name"]


def test_a_written_configuration_loads_again(helpful: Project) -> None:
    """As the run's folder keeps it."""
    config = helpful.load()
    helpful.write("configs/again.yaml", yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))
    assert load_config("again", helpful.folder / "configs") == config
