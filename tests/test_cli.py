"""The command line, from outside: what it prints, how it exits, what it does not import."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from support_weights import tensors, write_safetensors

from roll_lite.cli import main
from roll_lite.config.checks import layout
from roll_lite.config.schema.run import RunConfig
from roll_lite.pipeline import sweep

ROOT = Path(__file__).resolve().parents[1]
QWEN = "qwen2.5_7b_grpo"


@pytest.fixture(autouse=True)
def repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))


def command(*arguments: str, flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *flags, "-m", "roll_lite.cli", *arguments], capture_output=True, text=True, env=environment, cwd=ROOT
    )


@pytest.mark.parametrize("name", ["tiny_base", "tiny_grpo", "tiny_ppo"])
def test_shipped_configurations_are_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config-name", name]) == 0
    resolved, tables = capsys.readouterr()
    config = RunConfig.model_validate(yaml.safe_load(resolved))
    assert config.model.path == ROOT / "examples/models/tiny"
    assert list(config.domains) == ["add", "make", "repeat"]
    assert "updates per step" in tables


def test_the_gpu_example_asks_for_its_paths_and_is_right_with_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The tiny model's tokenizer has no chat template and its shape is another; what is left are the paths' own problems."""
    assert main(["check", "--config-name", QWEN]) == 2
    error = capsys.readouterr().err
    asked = {"model.path", "domains.math.data.train", "domains.math.data.validation"}
    assert {line.split(":")[0].removeprefix("  - ") for line in error.splitlines() if line.startswith("  - ")} == asked
    shape = {
        "model_type": "qwen2",
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    }
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "..."}')
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    write_safetensors(tmp_path / "model.safetensors", tensors(shape))
    data = "examples/data/add_train.jsonl"
    given = [f"model.path={tmp_path}", f"domains.math.data.train={data}", f"domains.math.data.validation={data}"]
    assert main(["check", "--config-name", QWEN, *given]) == 0
    assert "megatron: TP 2 x DP 4" in capsys.readouterr().err


def test_an_evaluation_is_a_run_of_another_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "examples/models/tiny", "--config-name", "tiny_grpo", "seed=5", "--cfg", "job"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert (config["mode"], config["seed"], list(config["domains"])) == ("evaluate", 5, ["add", "make", "repeat"])


def test_an_evaluation_of_data_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    files = [*("--data", "examples/data/add_validation.jsonl", "--data", "examples/data/gsm8k_tiny_test.jsonl")]
    settings = ["{sampling: {max_tokens: 9, max_prompt_tokens: 9}, reward: exact}"] * 2
    given = [f"domains.{name}={text}" for name, text in zip(("add_validation", "gsm8k_tiny_test"), settings, strict=True)]
    prompt = "domains.gsm8k_tiny_test={data: {prompt: question, filter: {prompt_tokens: [1, 9]}}}"
    assert main(["evaluate", "examples/models/tiny", *files, *given, prompt, "--cfg=job", "model.dtype=float32"]) == 0
    config = yaml.safe_load(capsys.readouterr().out)
    assert list(config["domains"]) == ["add_validation", "gsm8k_tiny_test"] and config["validation"]["sampling"]["temperature"] == 0


def test_several_models_are_evaluated_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    models = ["examples/models/tiny", "examples/models/tiny_chat"]
    assert main(["evaluate", *models, "--config-name", "tiny_grpo", "~domains.make", "--cfg", "job"]) == 0
    configs = list(yaml.safe_load_all(capsys.readouterr().out))
    assert [Path(config["model"]["path"]).name for config in configs] == ["tiny", "tiny_chat"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "model.path: has to be given"),
        (["examples/models/tiny"], 'domains.gsm8k.template.name = "chat": the tokenizer in'),
        (["examples/models/none", "--data", "gsm8"], "no such preset; did you mean 'gsm8k'?"),
        (["x", "--data", "hf://acme/sums/main?split=test", "--data", "hf://acme/sums?split=dev"], "domains.sums_1.reward: is needed"),
    ],
)
def test_an_evaluation_says_what_is_missing(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_gpus_that_are_not_there_end_a_run_and_are_noted_by_a_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(layout, "gpus_visible", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    given = ["--config-name", "tiny_grpo", "placement=split"]
    message = "actor_infer.devices: device 1 is not there: this machine has 1 GPU"
    assert main(["check", *given]) == 0
    assert f"note: {message}" in capsys.readouterr().err
    assert main(["run", *given]) == 2
    assert "actor_infer.devices = [1]: device 1 is not there: this machine has 1 GPU" in capsys.readouterr().err


def test_mistakes_go_to_stderr_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config-name", "tiny_grpo", "stepps=1", "model.dtype=int8"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == [
        "2 mistakes in configuration 'tiny_grpo':",
        "  - stepps = 1: unknown key; did you mean 'steps'?  [command line]",
        '  - model.dtype = "int8": expected one of float32, bfloat16  [command line]',
    ]


def test_an_unknown_name_lists_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config_name", "tinygrpo"]) == 2
    assert "did you mean 'tiny_grpo'" in capsys.readouterr().err


def test_overrides_may_stand_anywhere_and_both_spellings_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text((ROOT / "examples/configs/tiny_base.yaml").read_text())
    assert main(["check", "steps=5", "--config_path", str(tmp_path), "seed=6", "--config_name=mine", "~trackers"]) == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert (resolved["steps"], resolved["seed"], len(resolved["trackers"])) == (5, 6, 2)


def test_no_arguments_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "usage: roll-lite" in capsys.readouterr().out


def test_unknown_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["run", "--config-name", "tiny_grpo", "--stepps", "1"])
    assert stopped.value.code == 2
    assert "--stepps" in capsys.readouterr().err


def test_run_hands_the_configuration_over_and_passes_the_exit_code_on(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[RunConfig] = []

    def run(config: RunConfig) -> int:
        received.append(config)
        return 7

    monkeypatch.setitem(sys.modules, "roll_lite.pipeline.run", SimpleNamespace(run=run))
    assert main(["run", "--config-name", "tiny_grpo", "steps=3"]) == 7
    assert received[0].steps == 3
    assert main(["run", "--config-name", "tiny_grpo", "steps=0"]) == 2
    assert len(received) == 1, "nothing starts with a wrong configuration"


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-m", "roll_lite.cli", "check", "--config-name", "tiny_grpo"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.wait(60) == 141 and process.stderr.read() == ""


def test_checking_is_fast_and_imports_nothing_heavy() -> None:
    """Compared with a few imports, in processor time: the machine may be slow, or busy."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    times = [spent()]
    for _ in range(2):
        subprocess.run([sys.executable, "-c", "import numpy, pydantic, yaml, psutil"], check=True)
        times.append(spent())
    done = command("check", "--config-name", "tiny_ppo", flags=("-X", "importtime"))
    times.append(spent())
    assert done.returncode == 0
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines()}
    assert not imported & {"torch", "ray", "numpy", "transformers", "vllm", "megatron"}
    assert times[3] - times[2] < 8 * (times[2] - times[0]) / 2


HEAVY = {"torch", "ray", "transformers", "vllm", "sglang", "megatron", "duckdb", "huggingface_hub", "aiohttp"}
LOOK = f"""
import sys
from contextlib import suppress
from roll_lite.cli import main
with suppress(SystemExit):
    main(sys.argv[1:])
print(*sorted({HEAVY} & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "line", ["init --help", "doctor --help", "plan --help", "view --help", "data list", "docs", "launch slurm --config-name tiny_grpo"]
)
def test_a_command_that_starts_nothing_imports_nothing_heavy(line: str) -> None:
    done = subprocess.run([sys.executable, "-c", LOOK, *line.split()], capture_output=True, text=True, cwd=ROOT, check=True)
    *shown, imported = done.stdout.splitlines()
    assert shown and imported == ""


def test_the_entry_point_is_the_run_command() -> None:
    arguments = [sys.executable, "examples/start_rlvr_pipeline.py", "--config_name", "tiny_grpo", "steps=none"]
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert 'steps = "none": expected integer > 0' in done.stderr
    assert "Traceback" not in done.stderr


def test_hydras_options(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: tiny_grpo\nsteps: 3\n")
    assert main(["run", "-cn", "mine", "--config-dir", str(tmp_path), "--cfg", "job", "++seed=4"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert (printed["experiment"], printed["steps"], printed["seed"]) == ("tiny_grpo", 3, 4)


def test_a_sweep_runs_every_combination_and_ends_with_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a program in place of each run that writes what a run leaves behind."""
    program = """
import json, pathlib, sys
given = dict(one.split("=", 1) for one in sys.argv[1:] if "=" in one)
folder = pathlib.Path(given["run_dir"], "tiny", given["seed"] + given["algorithm.policy_loss"])
folder.mkdir(parents=True)
latest = folder.parents[1] / "latest"
latest.unlink(missing_ok=True)
latest.symlink_to(folder)
folder.joinpath("summary.json").write_text(json.dumps({"exit": "completed", "accuracy": {"overall": {"before": 0.25, "after": None}}}))
sys.exit(3 if given["seed"] == "2" else 0)
"""
    monkeypatch.setattr(
        sweep, "run_forwarding_signals", lambda command: subprocess.run([sys.executable, "-c", program, *command[3:]]).returncode
    )
    arguments = ["run", "-m", "-cn", "tiny_grpo", "seed=1,2", "algorithm.policy_loss=ppo,gspo", f"run_dir={tmp_path}"]
    assert main(arguments) == 3
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("seed=")]
    assert [row[:2] for row in rows] == [["seed=1", f"algorithm.policy_loss={one}"] for one in ("ppo", "gspo")] + [
        ["seed=2", f"algorithm.policy_loss={one}"] for one in ("ppo", "gspo")
    ]
    assert rows[3][3:5] == ["3", "completed"] and rows[0][6:9] == ["25.0%", "->", "?"] and rows[2][-1] == str(tmp_path / "tiny/2ppo")


def test_models_of_the_latest_run_stay_those_while_several_are_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first evaluation is itself the newest run; the second must not look for a model there."""
    run = tmp_path / "runs/demo/first"
    shutil.copytree(ROOT / "examples/models/tiny", run / "model")
    (tmp_path / "runs/latest").symlink_to(run)
    started: list[str] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "run_forwarding_signals", lambda command: started.append(command[-1]) or 0)
    main(["evaluate", "examples/models/tiny", "runs/latest/model", "-cn", "tiny_grpo"])
    assert started == ["model.path=examples/models/tiny", f"model.path={run}/model"]


def test_nothing_of_a_sweep_runs_where_one_combination_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep, "run_each", lambda *_: pytest.fail("ran"))
    assert main(["run", "-m", "-cn", "tiny_grpo", "seed=1,-2"]) == 2
    assert "seed = -2" in capsys.readouterr().err
    assert main(["run", "-m", "-cn", "tiny_grpo", "seed=interval(0,1)"]) == 2
    assert "seed=interval(0,1): a sweep does not know interval()" in capsys.readouterr().err
    assert main(["run", "-m", "-cn", "tiny_grpo", "seed=range(1,3)", "steps=0"]) == 2
    assert "steps = 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["reward", "-cn", "tiny_grpo", "--limit", "-5"], "--limit: -5: expected a whole number, 0 or more\n"),
        (["reward", "-cn", "tiny_grpo", "--episodes", "0"], "--episodes: 0: expected a whole number, 1 or more\n"),
        (["plan", "-cn", "tiny_grpo", "--search", "many"], "--search: many: expected a whole number, 1 or more\n"),
        (["view", "--port", "99999"], "--port: 99999: expected a whole number from 0 to 65535\n"),
    ],
)
def test_numbers_of_options_are_checked(arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.endswith(expected)


def test_a_key_for_a_function_of_ones_own_is_not_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scoring_with_a_key.py").write_text("def score(sample, api_key='', model=''):\n    return 0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = "domains.repeat.reward={name: scoring_with_a_key.score, args: {api_key: sk-LITERAL, model: shown}}"
    for printed in ("--cfg=job", "-m"):
        command = ["run", "-cn", "tiny_grpo", reward, "domains.repeat.reward.terms=[]", "--cfg=job"]
        assert main([*command, printed]) == 0
        output = "".join(capsys.readouterr())
        assert "model: shown" in output and "sk-LITERAL" not in output
    with pytest.raises(SystemExit):
        main(["check", "-cn", "tiny_grpo", "--api_key=sk-LITERAL"])
    assert "sk-LITERAL" not in capsys.readouterr().err


def test_a_run_of_a_part_is_noted_and_not_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config-name", "tiny_grpo", "mode=rollout_only"]) == 0
    assert "note: mode: rollout_only: actor_train and validation are left out" in capsys.readouterr().err
    assert main(["simulate", "--config-name", "tiny_grpo", "mode=rollout_only"]) == 2
    assert "whole runs are simulated" in capsys.readouterr().err


SHELL = 'cd "$0" && exec python -m roll_lite.cli '
FULL = "the output cannot be written: No space left on device"
ODD_PLACES = {
    "a full disk": (f"{SHELL} check -cn tiny_grpo >/dev/full", 74, FULL),
    "a full disk for a simulation": (f"{SHELL} simulate -cn tiny_grpo steps=2 >/dev/full", 74, FULL),
    "a full disk for mistakes": (f"{SHELL} check -cn tiny_grpo steps=x 2>/dev/full", 74, ""),
    "closed outputs": (f"{SHELL} run -cn tiny_grpo --cfg job >&- 2>&-", 0, ""),
    "a closed input": (f"{SHELL} reward -cn tiny_grpo --domain repeat --limit 2 0<&-", 0, ""),
    "ASCII": (f"export PYTHONIOENCODING=ascii; {SHELL} check -cn tiny_grpo 'domains.add.template.text=\"größer {{prompt}}\"'", 0, ""),
    "no language": (f"export PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 LC_ALL=C; {SHELL} simulate -cn tiny_grpo steps=2", 0, ""),
    "a folder that is gone": (
        'mkdir "$1/gone" && cd "$1/gone" && rmdir "$1/gone" && exec python -m roll_lite.cli check -cn tiny_grpo',
        2,
        "the current folder is gone",
    ),
    "a long name": (f"{SHELL} run -cn tiny_grpo experiment={'x' * 300}", 2, "names a folder, and has 300 letters; use at most 200"),
    "a run's folder that is a file": (f"{SHELL} run -cn tiny_grpo run_dir=README.md/runs", 2, "README.md is a file; name a folder"),
    "a picture nowhere": (
        f"{SHELL} simulate -cn tiny_grpo steps=2 --picture nowhere/x.png",
        2,
        "--picture: nowhere/x.png cannot be written: No such file or directory",
    ),
    "a picture with a long name": (
        f"{SHELL} simulate -cn tiny_grpo steps=2 --picture {'x' * 300}",
        2,
        "cannot be written: File name too long",
    ),
    "a picture that is a folder": (f"{SHELL} simulate -cn tiny_grpo steps=2 --picture tests", 2, "tests is a folder; name a file in it"),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ODD_PLACES)
def test_odd_places_and_outputs_end_with_a_message(name: str, tmp_path: Path) -> None:
    script, code, message = ODD_PLACES[name]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ended = subprocess.run(["bash", "-c", script, ROOT, tmp_path], capture_output=True, text=True, env=environment, errors="replace")
    assert ended.returncode == code, ended.stderr
    assert message in ended.stderr and "Traceback" not in ended.stderr and "Exception ignored" not in ended.stderr
    if name == "ASCII":
        assert yaml.safe_load(ended.stdout)["domains"]["add"]["template"]["text"] == "größer {prompt}", "escaped as YAML does"


def test_an_error_that_no_output_has_caused_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (OSError("the tokenizer has gone"), ConnectionRefusedError(111, "Connection refused")):
        monkeypatch.setattr("roll_lite.simulator.command.answer", lambda *_, error=error: (_ for _ in ()).throw(error))
        with pytest.raises(OSError, match=str(error.args[-1])):
            main(["simulate", "-cn", "tiny_grpo"])


def test_a_tokenizer_that_is_none_is_told_by_the_check_and_by_the_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from roll_lite.data.templates import load_tokenizer

    shutil.copytree(ROOT / "examples/models/tiny", tmp_path / "m")
    for text in ("{}", '{"model": null}', '{"model": {}}'):
        (tmp_path / "m/tokenizer.json").write_text(text)
        assert main(["check", "-cn", "tiny_grpo", f"model.path={tmp_path}/m"]) == 2
        assert "tokenizer.json cannot be read: it is no tokenizer's" in capsys.readouterr().err
    for file, text in (("tokenizer.json", '{"model": {"vocab": {}}}'), ("tokenizer_config.json", '{"tokenizer_class": 3}')):
        (tmp_path / "m" / file).write_text(text)
        with pytest.raises(ValueError, match=r"model.path: no tokenizer could be loaded from"):
            load_tokenizer(tmp_path / "m")


def test_a_sweep_of_nothing_or_of_a_million_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "run_each", lambda *_: pytest.fail("ran"))
    assert main(["run", "-m", "-cn", "tiny_grpo", "seed=choice()"]) == 2
    assert "seed=choice(): choice() has no value; write seed=choice(a,b)" in capsys.readouterr().err
    assert main(["run", "-m", "-cn", "tiny_grpo", "seed=range(1000)", "steps=range(1,1001)"]) == 2
    assert "these are 1,000,000 runs; at most 1,000 are started" in capsys.readouterr().err
    assert main(["run", "-m", "-cn", "tiny_grpo", "seed=1,2", "--cfg", "job"]) == 0
    assert "checking the configurations of 2 runs" in capsys.readouterr().err


MINE = "defaults: [tiny_grpo, _self_]\nexperiment: mine\ndomains: {make: null}\n"


def test_a_file_in_the_current_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By its name, with or without .yaml, and by a path; what it builds on may be shipped."""
    (tmp_path / "sub").mkdir()
    for name in ("mine.yaml", "sub/deep.yaml", "tiny_base.yaml"):
        (tmp_path / name).write_text(MINE)
    (tmp_path / "sub/deeper.yaml").write_text("defaults: [deep]\nsteps: 3\n")
    monkeypatch.chdir(tmp_path)
    for name in ("mine", "mine.yaml", "./mine.yaml", "sub/deep", "sub/deeper.yaml", str(tmp_path / "sub/deep.yaml")):
        assert main(["check", "-cn", name, "--cfg", "job"]) == 0
        resolved, said = capsys.readouterr()
        config = yaml.safe_load(resolved)
        assert (config["experiment"], list(config["domains"])) == ("mine", ["add", "repeat"])
        assert said == "", "a shipped file is built of shipped ones: tiny_grpo takes no tiny_base from here"
    for name in ("tiny_ppo", "examples/configs/tiny_ppo.yaml"):
        assert main(["check", "-cn", name, "--cfg", "job"]) == 0
        assert yaml.safe_load(capsys.readouterr().out)["experiment"] == "tiny_ppo"
    assert main(["check", "-cn", "mien", "--cfg", "job"]) == 2
    assert "did you mean 'mine'?" in capsys.readouterr().err
    (tmp_path / "sub/other.yml").write_text(MINE)
    for name in ("sub/other", "sub/other.yml"):
        assert main(["check", "-cn", name, "--cfg", "job"]) == 2
        assert "sub/other.yml ends in .yml; rename it: configurations end in .yaml" in capsys.readouterr().err


def test_a_file_that_hides_a_shipped_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny_ppo.yaml").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    assert main(["check", "-cn", "tiny_ppo", "--cfg", "job"]) == 0
    resolved, said = capsys.readouterr()
    assert yaml.safe_load(resolved)["experiment"] == "mine"
    assert said.splitlines() == [f"{tmp_path}/tiny_ppo.yaml is used; the shipped configuration tiny_ppo has the same name"]


def test_the_script_finds_it_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(MINE)
    script = [sys.executable, str(ROOT / "examples/start_rlvr_pipeline.py"), "--config-name", "mine.yaml", "--cfg", "job"]
    shown = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path, check=True).stdout
    assert yaml.safe_load(shown)["experiment"] == "mine"


@pytest.mark.parametrize("name", [QWEN, "qwen2.5_7b_fp8_grpo"])
def test_what_is_known_of_an_incomplete_configuration_is_shown(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(layout, "gpus_visible", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert main(["check", "-cn", name]) == 2
    said = capsys.readouterr().err
    assert "megatron: TP 2 x DP 4" in said and "samples per step        1024" in said and "weights + KV cache" in said
    assert "actor_train, actor_infer have 8 + 8 devices and no GPUs are visible here" in said
    assert said.count("has to be given") == 3 == said.count("  - ")
    float32 = ["model.dtype=float32", "actor_infer.strategy.quantization=none"]
    assert main(["check", "-cn", name, *float32]) == 2
    assert "have 8 + 8 devices and no GPUs are visible here" in capsys.readouterr().err, "more than the cores of a laptop"
    assert main(["check", "-cn", name, "algorithm.mini_batches=3"]) == 2
    assert "has to be given" in (said := capsys.readouterr().err) and "megatron: TP 2" not in said, "other mistakes come first"


def test_fp8_is_checked_without_a_gpu_and_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(layout, "gpus_visible", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    fp8 = ["model.dtype=bfloat16", "actor_infer.strategy.quantization=fp8", "algorithm.old_log_probs=rollout"]
    assert main(["check", "-cn", "tiny_grpo", *fp8]) == 0
    assert "note: actor_infer.strategy.quantization: engines have fp8 kernels for GPUs only" in capsys.readouterr().err
    assert main(["run", "-cn", "tiny_grpo", *fp8]) == 2
    assert "  - actor_infer.strategy.quantization" in capsys.readouterr().err


def test_without_steps_a_check_shows_the_arithmetic_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "-cn", "tiny_grpo", "steps=???"]) == 2
    shown = capsys.readouterr().err
    assert "samples per step        256" in shown and "learning rate" not in shown and "steps: has to be given" in shown


def test_batches_that_cannot_be_recomputed_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    note = (
        "note: batches.write: always: roll_lite.examples.recompute will refuse these batches, it has no formula for model.dtype: bfloat16"
    )
    for write, told in (("always", True), ("auto", False)):
        assert main(["check", "-cn", "tiny_grpo", "model.dtype=bfloat16", f"batches.write={write}"]) == 0
        assert (note in capsys.readouterr().err) == told


def test_a_check_needs_no_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    for command_, code in (("check", 0), ("run", 2)):
        assert main([command_, "-cn", "tiny_grpo", "run_dir=/proc/runs", "--cfg", "job"]) == code
    assert "run_dir" in capsys.readouterr().err


def test_a_pass_that_does_not_happen_is_not_listed(capsys: pytest.CaptureFixture[str]) -> None:
    for changes, passes in (
        (("algorithm.old_log_probs=recompute",), ["forward", "training"]),
        (("algorithm.old_log_probs=current", "algorithm.mini_batches=1"), ["training"]),
    ):
        assert main(["check", "-cn", "tiny_grpo", *changes]) == 0
        lines = capsys.readouterr().err.splitlines()
        first = next(index for index, line in enumerate(lines) if line.startswith("role ") and " pass " in line) + 2
        assert [line.split()[1] for line in lines[first : lines.index("", first)]] == passes
