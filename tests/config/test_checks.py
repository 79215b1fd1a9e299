"""Checks of the whole configuration: mistakes (a problem at exactly this path, that says this) and settings that go together, in cases/."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from config_project import MODEL, Project
from safetensors.torch import save_file
from support_cases import cases, records
from support_models import make_tiny_model
from support_weights import tensors, write_safetensors

from roll_lite.config.arithmetic import max_model_len
from roll_lite.config.checks import layout as check_layout
from roll_lite.config.checks.gpu_only import VLLM_CPU_HEADS
from roll_lite.config.checks.layout import sharing_notes
from roll_lite.config.checks.rollout import staleness_notes
from roll_lite.config.schema.base import readable
from roll_lite.files import record
from roll_lite.pipeline.checkpoint_files import resumption_notes, write_list

CRITIC = "critic: {}\nalgorithm: {advantage: {name: gae}}\n"


@pytest.mark.parametrize(("yaml", "path", "says"), cases("config/mistakes"))
def test_one_mistake_is_one_problem_at_its_path(project: Project, yaml: str, path: str, says: str) -> None:
    (problem,) = project.problems_of(yaml)
    assert problem.path == path and says in problem.message


@pytest.mark.parametrize("yaml", cases("config/right"))
def test_settings_that_go_together(project: Project, yaml: str) -> None:
    assert project.problems_of(yaml) == []


@pytest.mark.parametrize(("yaml", "path", "says"), cases("config/rewards"))
def test_rewards_are_looked_up(project: Project, yaml: str, path: str, says: str) -> None:
    project.write("mine/__init__.py", "")
    project.write("mine/rules.py", "def score(sample, exact, *, bonus=0): return 1\ndef nothing(): return 1\n")
    (problem,) = project.problems_of(yaml)
    assert problem.path == path and says in problem.message


def test_a_users_own_reward_is_accepted(project: Project) -> None:
    project.write("mine/__init__.py", "")
    project.write("mine/rules.py", "import math\nasync def score(sample, exact, *, bonus=0): return 1\nalias = score\n")
    assert project.problems_of("domains: {add: {reward: {name: mine.rules.score, args: {exact: true}}}}") == []
    assert project.problems_of("domains: {add: {reward: {name: mine.rules.alias, args: {exact: true}}}}") == []


def test_model_files(project: Project) -> None:
    project.write_model("gpt", model_type="gpt2")
    project.write_model("short", vocab_size=None)
    project.write_model("small", vocab_size=50)
    project.write_model("bare").joinpath("model.safetensors").unlink()
    project.write_model("mute").joinpath("tokenizer.json").unlink()
    project.write("broken/config.json", "{")
    for name, stored in (("integers", "I8"), ("floats", "F8_E4M3")):
        types = {"model.layers.1.mlp.up_proj.weight": stored}
        write_safetensors(project.write_model(name) / "model.safetensors", tensors(MODEL), types)
    for folder, fragment in {
        "gpt": "'gpt2' is not supported; supported are qwen2, qwen3, qwen3_moe, llama",
        "short": "has no 'vocab_size'",
        "bare": "no model.safetensors",
        "mute": "no tokenizer",
        "broken": "cannot be read",
        "integers": "model.layers.1.mlp.up_proj.weight holds I8 in its safetensors",
        "floats": "model.layers.1.mlp.up_proj.weight holds F8_E4M3 in its safetensors",
    }.items():
        problems = project.problems_of(f"model: {{path: {folder}}}")
        assert [problem.path for problem in problems] == ["model.path"], folder
        assert fragment in problems[0].message


@pytest.mark.parametrize("init", ["path", "reward_model"])
def test_a_critics_files(project: Project, init: str) -> None:
    project.write_model("whole", value_head=1)
    project.write_model("headless")
    project.write_model("labels", value_head=2)
    project.write_model("small", value_head=1, vocab_size=50)
    told = {
        folder: [(problem.path, problem.message) for problem in project.problems_of(CRITIC, f"critic.init={init}", f"critic.path={folder}")]
        for folder in ("whole", "headless", "labels", "small")
    }
    assert told.pop("whole") == []
    for folder, fragment in {
        "headless": "have no score.weight, the value head of a critic or reward model; use init: actor",
        "labels": "score.weight has the shape [2, 256] in its safetensors; by config.json it is [1, 256]",
        "small": "smaller than the model's (100)",
    }.items():
        ((path, message),) = told[folder]
        assert path == "critic.path" and fragment in message, folder


def test_layouts_of_experts(project: Project) -> None:
    """The weights are those that transformers writes."""
    make_tiny_model(project.folder / "experts", "qwen3_moe", hidden=128, vocab_size=100)
    model = "model: {path: experts, dtype: float32}\nactor_infer: {strategy: {name: sglang}}\n"
    assert project.problems_of(model + "actor_train: {devices: 4, strategy: {expert_parallel: 4}}") == []
    for case in records("config/experts"):
        (problem,) = project.problems_of(model + case["yaml"])
        assert problem.path == case["path"] and case["says"] in problem.message, case
    make_tiny_model(project.folder / "narrow", "qwen3_moe", hidden=128, vocab_size=100, moe_intermediate_size=63)
    (problem,) = project.problems_of("model: {path: narrow}\nactor_infer: {devices: 2, strategy: {name: sglang, tensor_parallel: 2}}")
    assert problem.path == "actor_infer.strategy.tensor_parallel" and "size of 63; expert_parallel leaves" in problem.message
    whole = "{devices: 2, strategy: {name: sglang, tensor_parallel: 2, expert_parallel: 2}}"
    assert project.problems_of(f"model: {{path: narrow}}\nactor_infer: {whole}") == []
    yaml = "model: {path: odd, dtype: float32}\nactor_infer: {strategy: {name: sglang}}\nactor_train: {devices: 2, strategy: {"
    yaml += "tensor_parallel: 2, sequence_parallel: true}}"
    for options, refused in (({}, False), ({"mlp_only_layers": [1]}, True)):
        make_tiny_model(project.folder / "odd", "qwen3_moe", hidden=128, vocab_size=100, intermediate_size=97, **options)
        assert any("feed-forward size of 97" in problem.message for problem in project.problems_of(yaml)) is refused
    make_tiny_model(project.folder / "three", "qwen3_moe", hidden=128, vocab_size=100, num_experts=3)
    for model, fragment in (("three", "the model's 3 experts"), ("experts", "share the experts, or none; use 1 or tensor_parallel (2)")):
        yaml = whole if model == "three" else whole.replace("expert_parallel: 2", "expert_parallel: 4")
        (problem,) = project.problems_of(f"model: {{path: {model}}}\nactor_infer: {yaml}")
        assert problem.path == "actor_infer.strategy.expert_parallel" and fragment in problem.message


def test_engines_that_do_not_say_where_tokens_went(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: False)
    make_tiny_model(project.folder / "experts", "qwen3_moe", hidden=128, vocab_size=100)
    yaml = "model: {path: experts, dtype: float32}\nalgorithm: {routing_replay: rollout}\n"
    assert project.problems_of(yaml + "actor_infer: {strategy: {name: sglang}}") == []
    (problem,) = project.problems_of(yaml)
    assert problem.path == "algorithm.routing_replay" and "vLLM on a CPU does not say which experts it used" in problem.message
    assert project.problems_of(yaml + "ray: {address: 'head:6379'}") == [], "there may be GPUs"
    (problem,) = project.problems_of(yaml + "ray: {address: 'head:6379'}\nactor_infer: {strategy: {speculation: {}}}")
    assert problem.path == "actor_infer.strategy.speculation" and "experts of drafted tokens" in problem.message
    make_tiny_model(project.folder / "mixed", "qwen3_moe", hidden=128, vocab_size=100, mlp_only_layers=[0])
    (problem,) = project.problems_of("model: {path: mixed, dtype: float32}\nactor_infer: {strategy: {name: sglang}}")
    assert problem.path == "actor_infer.strategy.name" and "takes every layer of the model for one with experts" in problem.message
    problems = project.problems_of(yaml + "mode: train_only\nactor_infer: {strategy: {name: sglang}}")
    assert [problem.message for problem in problems if "dumps of past rollouts do not say" in problem.message]


def test_a_critics_layout_is_held_against_its_own_model(project: Project) -> None:
    project.write_model("deep", value_head=1, num_hidden_layers=8)
    layout = ("critic.devices=7", "critic.strategy.pipeline_parallel=7")
    assert project.problems_of(CRITIC, "critic.init=path", "critic.path=deep", *layout) == []
    assert [problem.path for problem in project.problems_of(CRITIC, *layout)] == ["critic.strategy.pipeline_parallel"]


WAITING = {
    "a constant": "algorithm: {aggregation_constant: 10}",
    "early stop of one update": "algorithm: {early_stop_kl: 0.1}",
    "checkpoints to keep": "checkpoint: {every: 0, keep_every: 10}",
    "decay_steps": "actor_train: {optimizer: {decay: linear, decay_steps: 1}}",
    "decay_shape": "actor_train: {optimizer: {decay_shape: cosine}}",
    "modules to recompute": "actor_train: {strategy: {recompute: full, recompute_modules: [mlp]}}",
    "sampling of no held-out prompts": "domains: {copy: {validation_sampling: {temperature: 0}}}",
    "difficulties": "domains: {copy: {data: {filter: {difficulty: answer_length}}}}",
}
"""Settings that act once another one switches them on."""


@pytest.mark.parametrize("name", WAITING)
def test_a_setting_may_wait_for_its_switch(name: str, project: Project) -> None:
    project.write("train.jsonl", '{"prompt": "1+1=", "answer": "2", "answer_length": 1}\n')
    assert project.problems_of(WAITING[name]) == []


ODD_MODELS: dict[str, tuple[dict[str, object], str]] = {
    "end beyond the vocabulary": ({"eos_token_id": [3, 100]}, "config.json: eos_token_id is 100; the vocabulary (vocab_size) has 100 rows"),
    "padding beyond the vocabulary": ({"pad_token_id": 151643}, "config.json: pad_token_id is 151643; the vocabulary"),
    "too few layer types": ({"layer_types": ["full_attention"] * 5}, "layer_types has 5 entries; num_hidden_layers is 6"),
    "heads of their own size": ({"head_dim": 64}, "head_dim is 64; engines take hidden_size / num_attention_heads = 32"),
    "another name of the function": ({"hidden_act": "swish"}, "hidden_act is 'swish'; only 'silu' is supported"),
}


@pytest.mark.parametrize("name", ODD_MODELS)
def test_models_that_cannot_work(name: str, project: Project) -> None:
    changes, message = ODD_MODELS[name]
    project.write_model("model", **changes)
    told = [problem.message for problem in project.problems() if problem.path == "model.path"]
    assert len(told) == 1 and message in told[0], told


def test_files_that_only_engines_read(project: Project) -> None:
    project.write("model/generation_config.json", '{"eos_token_id": 200}')
    (problem,) = project.problems()
    assert "generation_config.json: eos_token_id is 200" in problem.message
    project.write("model/generation_config.json", "[1]")
    (problem,) = project.problems()
    assert problem.path == "model.path" and "generation_config.json holds no JSON object" in problem.message


def test_weights_that_no_model_of_the_family_has(project: Project) -> None:
    folder = project.folder / "model"
    write_safetensors(
        folder / "model.safetensors", tensors(MODEL) | {"model.layers.6.mlp.up_proj.weight": [96, 256], "score.weight": [1, 256]}
    )
    (problem,) = project.problems()
    assert problem.path == "model.path"
    assert "a qwen2 model has no place for: model.layers.6.mlp.up_proj.weight, score.weight" in problem.message
    write_safetensors(folder / "model.safetensors", tensors(MODEL) | {"model.layers.0.self_attn.rotary_emb.inv_freq": [16]})
    assert project.problems() == []
    weights = {name: torch.zeros(shape) for name, shape in tensors(MODEL).items()}
    save_file(weights | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16).double()}, folder / "model.safetensors")
    assert project.problems() == [], "of a type that no weight has"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), 6e4])
def test_weights_that_are_no_numbers(dtype: torch.dtype, number: float, project: Project) -> None:
    weights = {name: torch.zeros(shape, dtype=dtype) for name, shape in tensors(MODEL).items()}
    weights["model.norm.weight"][3] = number
    save_file(weights, project.folder / "model" / "model.safetensors")
    told = [problem.message for problem in project.problems()]
    assert told == ([] if number == 6e4 else [one for one in told if "model.norm.weight in model.safetensors holds NaN" in one])
    assert len(told) == (number != 6e4)


def test_heads_that_vllm_has_no_attention_for_on_a_cpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert list(VLLM_CPU_HEADS) == CPUAttentionBackend.get_supported_head_sizes()
    project.write_model("model", hidden_size=128)
    (problem,) = project.problems()
    assert problem.path == "actor_infer.strategy.name" and "no attention for the model's heads of 16 numbers" in problem.message
    assert project.problems("actor_infer.strategy=sglang") == []
    monkeypatch.setattr("roll_lite.config.checks.layout.gpus_visible", lambda: True)
    assert project.problems() == []


def test_a_reward_model_that_no_domain_uses_is_told_beside_code(project: Project) -> None:
    judge = "judges: {main: {path: model}}\ndomains: {copy: {reward: {name: code}}}"
    assert [problem.path for problem in project.problems_of(judge)] == ["judges.main"]
    model = "reward_models: {main: {path: model}}\ndomains: {copy: {reward: {name: code}}}"
    assert "reward_models.main" in [problem.path for problem in project.problems_of(model)]


@pytest.mark.parametrize("value", ["[j]", "{j: 1}", "3"])
def test_names_of_judges_are_texts(value: str, project: Project) -> None:
    problems = project.problems_of(
        f"judges: {{j: {{path: model}}}}\ndomains: {{add: {{reward: {{name: judge, args: {{server: {value}}}}}}}}}"
    )
    assert "domains.add.reward.args.server" in [problem.path for problem in problems]


def test_data_that_cannot_be_read(project: Project) -> None:
    for text, fragment in (("\n\n", "empty"), ("{'a': 1}", "not valid JSON"), ("[1]", "must be a JSON object")):
        project.write("odd.jsonl", text)
        problems = project.problems("domains.copy.data.train=odd.jsonl")
        assert [problem.path for problem in problems] == ["domains.copy.data.train"]
        assert fragment in problems[0].message


def test_every_row_of_the_data_is_looked_at(project: Project) -> None:
    row = '{"prompt": "1+1=", "answer": "2"}\n'
    project.write("odd.jsonl", row + '{"prompt": "3"}\n' + row)
    (problem,) = project.problems("domains.copy.data.train=odd.jsonl")
    assert problem.path == "domains.copy.data.train" and "'answer': line 2" in problem.message
    project.write("odd.jsonl", row + "{\n" + row + "[1]\n")
    (problem,) = project.problems("domains.copy.data.train=odd.jsonl")
    assert "line 2, character 3: not valid JSON" in problem.message and "line 4: must be a JSON object" in problem.message


def write_state(project: Project, file: Path | str, state: str) -> Path:
    """Write a checkpoint's state, and the list of its files; returns the checkpoint."""
    folder = project.write(str(file), state).parent
    write_list(folder, {"state.json": record(folder / "state.json")})
    return folder


def test_a_resumed_run_names_no_path_through_the_link_to_the_newest_run(project: Project) -> None:
    """The link leads to another run at each start: the reference would be another model, the data other prompts."""
    model = project.write_model("runs/first/model")
    project.write("runs/first/train.jsonl", (project.folder / "train.jsonl").read_text())
    (project.folder / "runs/latest").symlink_to("first")
    (project.folder / "models").mkdir(exist_ok=True)
    (project.folder / "models/latest").symlink_to("../runs/first/model")
    text = "model: {path: runs/latest/model}\ncheckpoint: {resume: auto}\n"
    weighted = "domains.copy.data.train={runs/latest/train.jsonl: 1.0, train.jsonl: 2.0}"
    assert project.problems_of(text, weighted, "checkpoint.resume=null") == []
    assert project.problems_of(text, "model.path=models/latest") == [], "a link of the user's"
    project.write("runs/first/config.yaml", "")
    told = project.problems_of(text, weighted)
    assert [problem.path for problem in told] == ["model.path", "domains.copy.data.train.runs/latest/train.jsonl"]
    assert told[0].value == "runs/latest/model" and "name the run itself" in told[0].message
    assert project.problems_of(text, f"model.path={model}") == []


def test_what_a_run_is_resumed_from(project: Project) -> None:
    run = project.folder / "runs" / "first"
    run.mkdir(parents=True)
    (run.parent / "latest").symlink_to("first")
    for given in ("runs/nothing", "runs/latest"):
        (problem,) = project.problems(f"checkpoint.resume={given}")
        assert problem.path == "checkpoint.resume"
    state = run / "checkpoints" / "step_000002" / "state.json"
    state.parent.mkdir(parents=True)
    for whole in ('{"schema_version": 6}', '{"schema_version": 6, "pipeline": {}, "rollouts": {}}'):
        write_state(project, state, whole)
        (problem,) = project.problems("checkpoint.resume=runs/latest")
        assert ("holds nothing for actor_train" if "rollouts" in whole else "has no pipeline and no rollouts") in problem.message
    project.write(f"{state.parent}/actor_train/weights", "")
    assert project.load("checkpoint.resume=runs/latest").checkpoint.resume == run, "the link will lead elsewhere once a run has started"
    model = project.write_model("runs/first/model")
    assert project.load("model.path=runs/latest/model").model.path == model
    assert project.problems(f"checkpoint.resume={state.parent}") == []
    critic = "critic: {}\nalgorithm: {advantage: {name: gae}}\nrollout: {samples_per_prompt: 1}"
    (problem,) = project.problems_of(critic, f"checkpoint.resume={state.parent}")
    assert "holds nothing for critic; its run had no critic" in problem.message and "steps=2" in problem.message
    refreshed = "reference: {refresh: {every: 1}}\nalgorithm: {kl_in_loss: {coef: 0.1}}"
    assert project.problems_of(refreshed, f"checkpoint.resume={state.parent}") == [], "it was the start model until now"
    project.write(f"{state.parent}/actor_train/model.json", '{"layers": 99, "norm_eps": 1, "model.dtype": "float32", "outputs": "tokens"}')
    (problem,) = project.problems("checkpoint.resume=runs/latest")
    assert problem.path == "checkpoint.resume" and "actor_train holds another model: layers is 99 there, 6 here" in problem.message
    (state.parent / "actor_train" / "model.json").unlink()
    write_state(project, state, '{"schema_version": 6, "pipeline": {}, "rollouts": {}, "config": {"mode": "rollout_only"}}')
    assert project.problems_of(f"mode: rollout_only\n{refreshed}", f"checkpoint.resume={state.parent}") == [], (
        "no reference where nothing trains"
    )
    write_state(project, state, "{")
    (problem,) = project.problems("checkpoint.resume=runs/latest")
    assert problem.path == "checkpoint.resume" and f"{state} cannot be read as JSON" in problem.message


def test_no_validation_can_be_written_as_null(project: Project) -> None:
    assert project.load("checkpoint=null").checkpoint == project.load().checkpoint, "nothing is inherited"
    assert not project.load("validation=null").validation.enabled and project.load().validation.enabled


def test_a_resumed_run_says_which_settings_differ(project: Project) -> None:
    made = project.load().model_dump(mode="json")
    for changed, told in (
        ({}, ["checkpoint.resume: every setting is as it was"]),
        ({"steps": 7}, [f"  steps: 7 -> {made['steps']}"]),
        (
            {"domains": {"old": {"share": 2.0}}, "experiment": "another"},
            ['  domains.old: {"share": 2.0} -> absent', f"  domains.{next(iter(made['domains']))}: absent -> {{"],
        ),
    ):
        state = {"schema_version": 6, "pipeline": {}, "rollouts": {}, "config": made | changed}
        checkpoint = write_state(project, "old/checkpoints/step_000001/state.json", json.dumps(state))
        project.write(f"{checkpoint}/actor_train/weights", "")
        config = project.load(f"checkpoint.resume={checkpoint}")
        (note,) = [note for note in resumption_notes(config) if "setting" in note]
        assert all(part in note for part in told), note


def test_models_that_cannot_be_trained_are_refused_at_once(project: Project) -> None:
    project.write_model("window", use_sliding_window=True)
    project.write_model("rope", rope_scaling={"rope_type": "yarn", "factor": 4.0})
    project.write_model("odd", intermediate_size=97)
    for folder, fragment in {"window": "use_sliding_window", "rope": "'yarn' is not supported"}.items():
        (problem,) = project.problems_of(f"model: {{path: {folder}}}")
        assert problem.path == "model.path" and fragment in problem.message
    (problem,) = project.problems_of("model: {path: odd}\nactor_train: {devices: 2, strategy: {tensor_parallel: 2}}")
    assert problem.path == "actor_train.strategy.tensor_parallel" and "feed-forward size of 97" in problem.message


def test_a_missing_file_says_where_it_would_have_been_right(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    below = project.folder / "deeper"
    below.mkdir()
    monkeypatch.chdir(below)
    problem = next(one for one in project.problems() if one.path == "model.path")
    assert f"no such folder: {below / 'model'}" in problem.message
    assert f"start from {project.folder}" in problem.message


def test_a_run_in_place_of_its_model_is_told(project: Project) -> None:
    trained, evaluated = project.folder / "trained", project.folder / "evaluated"
    project.write_model("trained/model")
    evaluated.mkdir()
    (evaluated / "evaluation.json").touch()
    for folder, said in ((trained, f"expected {trained / 'model'}, the model"), (evaluated / "model", f"({evaluated} is an evaluation")):
        problem = next(one for one in project.problems(f"model.path={folder}") if one.path == "model.path")
        assert said in problem.message


def test_deterministic_runs_need_a_cpu(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: True)
    assert [problem.path for problem in project.problems("deterministic=true")] == ["deterministic"]
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: False)
    assert project.problems("deterministic=true") == []


def test_gpus_can_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([self / "nvidia0"]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check_layout.gpus_visible()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not check_layout.gpus_visible()


def test_layers_that_do_not_divide_by_the_stages(project: Project) -> None:
    project.write_model("model", num_hidden_layers=7)
    stages = "actor_train: {devices: 2, strategy: {pipeline_parallel: 2"
    for further in ("", ", virtual_pipeline_parallel: 2", ", virtual_pipeline_parallel: 2, pipeline_layers: [0, 4, 3, 0]"):
        assert project.problems_of(stages + further + "}}") == []


def test_trainers_cut_the_heads_that_they_share(project: Project) -> None:
    """2 x 2 of 12 heads of 128, and key/value heads of them, in six: Megatron cuts rows of which there is no sixth. Engines do not cut."""
    project.write_model("model", num_attention_heads=12, num_key_value_heads=2, hidden_size=12 * 128, intermediate_size=96)
    (problem,) = project.problems_of("actor_train: {devices: 6, strategy: {tensor_parallel: 6}}")
    assert problem.path == "actor_train.strategy.tensor_parallel" and problem.message.endswith("use one of 1, 2, 4")
    assert project.problems_of("actor_infer: {devices: 6, strategy: {tensor_parallel: 6}}") == []


def test_an_engine_that_knows_no_window(project: Project) -> None:
    """Where prompt and response stay within it, there is nothing to know."""
    needed = max_model_len(project.load())
    sglang = "actor_infer: {strategy: {name: sglang}}"
    for window, found in ((needed, []), (needed - 1, ["actor_infer.strategy.name"])):
        project.write_model("model", model_type="mistral", sliding_window=window, architectures=["MistralForCausalLM"])
        assert [problem.path for problem in project.problems_of(sglang)] == found
        replayed = [problem.path for problem in project.problems_of(f"mode: train_only\n{sglang}")]
        assert "actor_infer.strategy.name" not in replayed, "no engine"
    assert project.problems() == []


def test_a_bug_in_a_check_is_not_taken_for_a_refused_field() -> None:
    with pytest.raises(AttributeError):
        readable(iter([SimpleNamespace().nothing]) for _ in range(1))  # type: ignore[arg-type]


def test_a_refused_field_ends_only_the_rules_that_read_it(project: Project) -> None:
    section = "{median: many, p99: 3, reward_s: 2, reward_p99_s: 1, all_right: 0.8, all_wrong: 0.4}"
    problems = project.problems_of(f"simulation: {{responses: {section}}}")
    assert [problem.path.rpartition(".")[2] for problem in problems] == ["median", "reward_p99_s", "all_wrong"]
    assert [problem.value for problem in problems] == ["many", 1, 0.4]


def test_roles_that_stay_on_the_same_gpus_are_told(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    both = ("actor_train.devices=[0,1]", "actor_infer.devices=[1,2]")
    assert sharing_notes(project.load(*both)) == [], "without GPUs a device is a share of the processor"
    monkeypatch.setattr(check_layout, "gpus_visible", lambda: True)
    (note,) = sharing_notes(project.load(*both))
    assert note.startswith("actor_train and actor_infer share device 1 and both stay in its memory")
    assert sharing_notes(project.load(*both, "actor_infer.offload=true")) == []
    assert sharing_notes(project.load("actor_train.devices=[0]", "actor_infer.devices=[1]")) == []


def test_stale_samples_that_nothing_weighs_are_told(project: Project) -> None:
    (note,) = staleness_notes(project.load("rollout.supply=async"))
    assert note.startswith("rollout.supply: async trains on samples of older weights")
    for fine in ("algorithm.old_log_probs=rollout", "algorithm.mismatch_correction={weight: {high: 2.0}}", "rollout.max_staleness=0"):
        assert staleness_notes(project.load("rollout.supply=async", fine)) == []
    assert staleness_notes(project.load()) == []
