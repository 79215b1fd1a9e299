"""Composition, overrides, schema, and that all mistakes come together."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pydantic
import pytest
import yaml
from config_project import Project
from support_cases import cases

from roll_lite.config.checks.notes import plain_secrets
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.models import VllmStrategyConfig

# ---------------------------------------------------------------- everything at once

TEN_MISTAKES = """
defaults: [run, missing_file]
stepps: 3
model: {dtype: float16}
actor_train: {devices: 3, strategy: {tensor_parallel: 2}}
rollout: {prompts_per_step: 0}
domains:
  copy: {share: -1, reward: {name: exakt}}
  empty: {data: {train: train.jsonl}, sampling: {max_prompt_tokens: 9, max_tokens: 9}, reward: 3}
algorithm: {kl_in_loss: {coef: 0.1}}
experiment: ${nothing.there}
"""


def test_ten_mistakes_are_reported_together(project: Project) -> None:
    project.write("configs/wrong.yaml", TEN_MISTAKES)
    with pytest.raises(ConfigError) as caught:
        project.load("rollout.samples_per_prompt: 3", "~actor_infer.devices", "trackers.0.name=jsonl", name="wrong")
    assert {problem.path: problem.message.split(";")[-1].strip() for problem in caught.value.problems} == {
        "wrong.yaml: defaults[1]": "valid here: run, wrong.",
        "rollout.samples_per_prompt: 3": "write key=value, +key=value to add, or ~key to delete",
        "~actor_infer.devices": "did you mean 'actor_train'?",
        "trackers.0.name=jsonl": "give the whole list: trackers=[...]",
        "experiment": "Interpolation key 'nothing.there' not found",
        "stepps": "did you mean 'steps'?",
        "model.dtype": "did you mean 'bfloat16' or 'float32'?",
        "rollout.prompts_per_step": "expected integer > 0",
        "domains.copy.share": "expected number > 0",
        "domains.copy.reward.name": "did you mean 'exact'? A function of your own is a dotted path, package.module.function",
        "domains.empty.reward": "expected a section with the keys "
        "name, args, terms, workers, timeout_s, start_timeout_s, retries, weight, format",
        "actor_train.devices": "use a multiple of 2",
        "algorithm.kl_in_loss.coef": "add a `reference` section, or use 0",
    }
    assert len(caught.value.problems) == 13
    text = str(caught.value)
    assert text.startswith("13 mistakes in configuration 'wrong':")
    assert "- stepps = 3: unknown key; did you mean 'steps'?  [wrong.yaml:3]" in text


def test_a_refused_field_starts_no_false_alarm(project: Project) -> None:
    """Each of these would break a cross-check, had the refused value been replaced by its default."""
    assert [one.path for one in project.problems("rollout.prompts_per_step=x", "algorithm.mini_batches=7")] == ["rollout.prompts_per_step"]
    assert [one.path for one in project.problems("critic=5", "algorithm.advantage.name=gae")] == ["critic"]
    assert [one.path for one in project.problems("algorithm.advantage.name=gea", "critic={}")] == ["algorithm.advantage.name"]
    assert [one.path for one in project.problems("domains.new=null")] == ["domains.new"]
    assert [one.path for one in project.problems("domains=null")] == ["domains"]
    assert [one.path for one in project.problems("domains.add.data=${gone}")] == ["domains.add.data"]


def test_a_refused_field_hides_no_other_mistake(project: Project) -> None:
    paths = {
        one.path for one in project.problems("domains.add.share=x", "domains.add.reward.name=y", "domains.copy.sampling.min_tokens=9999")
    }
    assert paths == {"domains.add.share", "domains.add.reward.name", "domains.copy.sampling.min_tokens"}


# ---------------------------------------------------------------- schema


@pytest.mark.parametrize(("override", "path", "says"), cases("config/values"))
def test_a_wrong_value(project: Project, override: str, path: str, says: str) -> None:
    (problem,) = project.problems(override)
    assert problem.path == path and says in problem.message and problem.source == "command line"


def test_missing_keys(project: Project) -> None:
    assert [str(one) for one in project.problems("~domains.copy.reward.name")] == [
        "domains.copy.reward.name: is missing; expected text  [command line]"
    ]
    problems = project.problems("~domains.copy.reward", "domains.copy.rewards={name: exact}")
    assert [one.path for one in problems] == ["domains.copy.rewards"], "a misspelt key is not reported as missing too"
    assert [one.path for one in project.problems("~domains.add", "~domains.copy")] == ["domains"]


def test_the_name_of_a_variant_follows_from_the_default(project: Project) -> None:
    config = project.load("actor_infer.strategy.max_running_requests=7")
    assert config.actor_infer.strategy == VllmStrategyConfig(max_running_requests=7)


def test_nothing_can_be_changed(project: Project) -> None:
    config = project.load()
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.steps = 3
    with pytest.raises(pydantic.ValidationError, match="frozen"):
        config.domains["add"].sampling.top_p = 0.5


def test_paths_are_absolute_from_the_current_folder(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(project.folder / "home"))
    config = project.load("run_dir=~/runs")
    assert config.model.path == project.folder / "model"
    assert config.run_dir == project.folder / "home" / "runs"
    assert project.load().run_dir == project.folder / "runs"


# ---------------------------------------------------------------- composition


def test_a_file_wins_over_its_defaults_and_self_moves_it(project: Project) -> None:
    project.write("configs/one.yaml", "defaults: [run]\nsteps: 1\n")
    project.write("configs/two.yaml", "defaults: [one, _self_]\nsteps: 2\n")
    project.write("configs/first.yaml", "defaults: [_self_, two]\nsteps: 3\nseed: 4\n")
    assert project.load(name="one").steps == 1
    assert project.load(name="two.yaml").steps == 2
    assert (project.load(name="first").steps, project.load(name="first").seed) == (2, 4)


def test_mappings_are_merged_and_lists_replaced(project: Project) -> None:
    project.write("configs/more.yaml", "defaults: [run]\ntrackers: [{name: jsonl}]\ndomains: {copy: {share: 3}}\n")
    project.write("configs/most.yaml", "defaults: [more]\ntrackers: [{name: tensorboard}]\n")
    config = project.load(name="most")
    assert [tracker.name for tracker in config.trackers] == ["tensorboard"]
    assert (config.domains["copy"].share, config.domains["copy"].reward.name) == (3, "exact")


def test_files_in_folders_and_a_name_alone(project: Project) -> None:
    project.write("configs/paces/slow.yaml", "defaults: run\nsteps: 9\n")
    project.write("configs/one.yaml", "defaults: paces/slow.yaml\nseed: 2\n")
    assert (project.load(name="one").steps, project.load(name="one").seed, project.load(name="paces/slow").steps) == (9, 2, 9)


@pytest.mark.parametrize(("text", "path", "says"), cases("config/composition"))
def test_mistakes_of_composition(project: Project, text: str, path: str, says: str) -> None:
    project.write("configs/tracked.yaml", "defaults: [run]\ntrackers: [{name: jsonl}]\n")
    project.write("configs/wrong.yaml", text)
    problems = [one for one in project.problems(name="wrong") if one.path == path]
    assert len(problems) == 1, project.problems(name="wrong")
    assert says in problems[0].message
    assert problems[0].path.startswith("wrong.yaml") or problems[0].source.startswith("wrong.yaml:")


@pytest.mark.parametrize("defaults", ["[Run_]", "[first]", "[wrong]", "['../conf/x']", "[/etc/passwd]"])
def test_what_an_unreadable_file_would_have_set_is_not_missing(project: Project, defaults: str) -> None:
    project.write("configs/first.yaml", "defaults: [wrong]\n")
    project.write("configs/wrong.yaml", f"defaults: {defaults}\nseed: 3\n")
    (problem,) = project.problems(name="wrong")
    assert "defaults[0]" in problem.path, problem


def test_yaml_that_cannot_be_read(project: Project) -> None:
    project.write("configs/wrong.yaml", "defaults: [run]\nmodel: {path: [}\n")
    assert any(one.path == "wrong.yaml" and "line 2, column 16" in one.message for one in project.problems(name="wrong"))
    project.write("configs/latin.yaml", "").write_bytes(b"experiment: \xe9\n")
    assert "cannot be read" in project.problems(name="latin")[0].message
    project.write("configs/listed.yaml", "- 1\n- 2\n")
    assert any("a mapping of keys" in one.message for one in project.problems(name="listed"))


def test_interpolation(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_STEPS", "11")
    project.write(
        "configs/linked.yaml", "defaults: [run]\nseed: ${rollout.samples_per_prompt}\nsteps: ${oc.decode:${oc.env:PROBE_STEPS}}\n"
    )
    assert (project.load(name="linked").seed, project.load(name="linked").steps) == (4, 11)
    assert project.load("rollout.samples_per_prompt=8", name="linked").seed == 8


def test_numbers_and_switches_come_from_the_environment(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROBE_STEPS", "11")
    monkeypatch.setenv("PROBE_REPEATS", "false")
    project.write("configs/linked.yaml", "defaults: [run]\nsteps: ${oc.env:PROBE_STEPS}\ndeterministic: ${oc.env:PROBE_REPEATS}\n")
    config = project.load("seed=${oc.env:PROBE_STEPS}", name="linked")
    assert (config.steps, config.seed, config.deterministic) == (11, 11, False)


@pytest.mark.parametrize("text", ["{prompt}", "Q: {prompt} A:", "{prompt}: what, then?", "[{prompt}]", "{{x}} {prompt}"])
def test_text_settings_keep_their_braces_and_colons(project: Project, text: str) -> None:
    project.write("configs/text.yaml", "defaults: [run]\ndomains: {copy: {template: plain}}\n")
    assert project.load(f"domains.copy.template.text={text}", name="text").domains["copy"].template.text == text  # type: ignore[union-attr]


SECRET = "sk-0123456789"


def test_what_comes_from_the_environment_is_never_written_down(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in config.yaml and what `check` prints, which are dumps; used it is all the same."""
    monkeypatch.setenv("MY_KEY", SECRET)
    project.write("configs/keyed.yaml", "defaults: [run]\nray: {address: '${oc.env:MY_KEY}'}\n")
    config = project.load(
        "domains.add.template.system=null",
        "domains.copy.sampling.stop=['${ray.address}', end]",
        "domains.copy.template.text='x ${oc.env:MY_KEY} {prompt}'",
        "seed=${oc.decode:${oc.env:MY_SEED,7}}",
        name="keyed",
    )
    assert (config.ray.address, config.domains["copy"].sampling.stop, config.seed) == (SECRET, [SECRET, "end"], 7)
    for dump in (config.model_dump(mode="json"), json.loads(config.model_dump_json()), pickle.loads(pickle.dumps(config)).model_dump()):
        assert SECRET not in str(dump)
        assert dump["ray"]["address"] == "${oc.env:MY_KEY}" and dump["domains"]["copy"]["sampling"]["stop"] == ["${ray.address}", "end"]
    project.write("configs/again.yaml", yaml.safe_dump(config.model_dump(mode="json")))
    assert project.load(name="again") == config


def test_a_secret_that_is_written_plainly_is_written_nowhere_else(project: Project) -> None:
    """config.yaml and state.json are dumps, and nobody resumes from what they say of it."""
    (project.folder / "keyed.py").write_text("def score(sample, api_key, headers):\n    return 0.0\n")
    reward = "domains.add.reward={name: keyed.score, args: {api_key: %s, headers: {x-token: [%s]}}}"
    config = project.load(reward % (SECRET, SECRET), "domains.add.template.system=null")
    assert config.domains["add"].reward.args == {"api_key": SECRET, "headers": {"x-token": [SECRET]}}
    written = config.model_dump(mode="json")
    assert SECRET not in str(written) and written["domains"]["add"]["reward"]["args"] == {"api_key": "???", "headers": {"x-token": ["???"]}}
    assert [note.partition(" ")[0] for note in plain_secrets(config)] == [
        "domains.add.reward.args.api_key",
        "domains.add.reward.args.headers.x-token.0",
    ]
    project.write("configs/again.yaml", yaml.safe_dump(written))
    assert {problem.path for problem in project.problems(name="again")} >= {"domains.add.reward.args.api_key"}
    assert plain_secrets(project.load()) == []


@pytest.mark.parametrize(
    "override",
    [
        "steps=${oc.env:MY_KEY}",
        "model.path=${oc.env:MY_KEY}",
        "experiment=a/${oc.env:MY_KEY}",
        "nothing=${oc.env:MY_KEY}",
        "domains.add.reward.typ=${oc.env:MY_KEY}",
        "domains.copy.reward.args={no_such: '${oc.env:MY_KEY}'}",
        "actor_infer.strategy.name=${oc.env:MY_KEY}",
        "trackers=${oc.env:MY_KEY}",
        "steps=${oc.decode:'[${oc.env:MY_KEY}'}",
        "rollout={x: {y: ['${oc.env:MY_KEY}']}}",
        "domains.add.data.train=${oc.env:MY_KEY}.jsonl",
    ],
)
def test_a_mistake_does_not_tell_a_secret(project: Project, monkeypatch: pytest.MonkeyPatch, override: str) -> None:
    monkeypatch.setenv("MY_KEY", SECRET)
    text = "\n".join(map(str, project.problems(override)))
    assert text and SECRET not in text, text


def test_an_override_repairs_what_a_file_leaves_open(project: Project) -> None:
    project.write("configs/open.yaml", "defaults: [run]\nseed: ${gone}\nsteps: ???\ncritic: null\n")
    assert {one.path for one in project.problems(name="open")} == {"seed", "steps"}
    assert project.load("seed=1", "steps=2", name="open").steps == 2
    assert project.problems("seed=1", "steps=2", "critic.init=actor", "algorithm.advantage.name=gae", name="open") == []


def test_an_unknown_name_lists_those_there_are(project: Project) -> None:
    problem = project.problems(name="rnu")[0]
    assert (problem.path, problem.value) == ("--config-name", "rnu")
    assert "did you mean 'run'?" in problem.message
    project.write("configs/another.yaml", "")
    assert "valid here: another, run." in project.problems(name="xyz")[0].message
    assert f"no xyz.yaml in {project.folder / 'configs'}, nor among the shipped ones in " in project.problems(name="xyz")[0].message
    with pytest.raises(ConfigError, match="no such folder: /no/where"):
        load_config("run", Path("/no/where"))
    with pytest.raises(ConfigError, match="no such folder: .*/conf; did you mean 'configs'"):
        load_config("run", project.folder / "conf")


@pytest.mark.parametrize("base", ["", "sampling: {max_tokens: 16}", "sampling: {max_tokens: 16, min_tokens: 2}"])
def test_the_nearest_key_is_offered_whatever_a_base_has_set(project: Project, base: str) -> None:
    project.write("configs/base.yaml", f"defaults: [run, _self_]\ndomains: {{add: {{{base}}}}}\n")
    (problem,) = project.problems("domains.add.sampling.max_tokns=3", name="base")
    assert problem.path == "domains.add.sampling.max_tokns" and "did you mean 'max_tokens'" in problem.message


def test_where_and_why(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOPE", raising=False)
    (twice,) = project.problems_of("seed: 1\nsteps: 3\nrun_dir: runs\nsteps: 4\n")
    assert (twice.path, twice.source) == ("steps", "changed.yaml:5")
    (unset,) = project.problems_of("run_dir: ${oc.env:NOPE}\n")
    assert unset.message == "the environment variable NOPE is not set"
    with pytest.raises(ConfigError, match="is a file; name its folder here"):
        load_config("run", project.folder / "configs/run.yaml")
