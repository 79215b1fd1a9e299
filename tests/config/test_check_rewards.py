"""Terms of rewards and the columns that rewards read. Arguments and time limits: cases/mistakes.jsonl, cases/right.jsonl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from config_project import Project

ROOT = Path(__file__).resolve().parents[2]

REWARD = "domains.copy.reward"


def told(project: Project, terms: str) -> list[tuple[str, str]]:
    problems = project.problems_of(f"domains: {{copy: {{reward: {{terms: {terms}}}}}}}")
    return [(problem.path, problem.message) for problem in problems]


def test_terms_are_looked_up_like_rewards(project: Project) -> None:
    project.write("mine.py", "def shorter(sample, limit, slope=1.0):\n    return 0.0\n")
    assert told(project, "[{name: exact, args: {strip: false}, weight: -0.5}, {name: mine.shorter, args: {limit: 3}}]") == []
    found = told(
        project,
        "[{name: exakt}, {name: exact, args: {stripp: true}}, {name: mine.shorter}, {name: mine.longer}]",
    )
    assert [path for path, _ in found] == [
        f"{REWARD}.terms.0.name",
        f"{REWARD}.terms.1.args.stripp",
        f"{REWARD}.terms.2.args",
        f"{REWARD}.terms.3.name",
    ]
    for (_, message), fragment in zip(
        found, ("did you mean 'exact'?", "did you mean 'strip'?", "needs limit", "has no 'longer'"), strict=True
    ):
        assert fragment in message


def test_where_a_term_was_written_is_said(project: Project) -> None:
    (problem,) = project.problems_of("domains:\n  copy:\n    reward:\n      terms:\n        - {name: exakt}\n")
    assert problem.source.startswith("changed.yaml") or "changed.yaml" in problem.source


# ---------------------------------------------------------------- what a reward reads of the data

JUDGED = "url: 'http://h/v1', model: m"


READS = "domains: {copy: {reward: {timeout_s: 90, name: %s, args: {%s}}}}"
COLUMNS = {
    "options": ("choice", "options: opts", "options", "'options'"),
    "tests": ("code", "column: tests", "column", "answer, options, prompt"),
    "for a service": ("remote", "url: 'http://h', columns: [answer, promt]", "columns", "'prompt'"),
    "of a judge's template": ("judge", JUDGED + ", template: '{response} {optons}'", "template", "'options'"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_column_that_is_not_there(project: Project, name: str) -> None:
    project.write("train.jsonl", '{"prompt": "1", "answer": "A"}\n{"prompt": "2", "answer": "A", "options": ["x"]}\n')
    kind, args, argument, hint = COLUMNS[name]
    (problem,) = project.problems_of(READS % (kind, args))
    assert problem.path == f"domains.copy.reward.args.{argument}"
    assert "train.jsonl has no such column" in problem.message and hint in problem.message


def test_columns_that_are_there(project: Project) -> None:
    """One row that has it is enough; what a type looks for by itself need not be there."""
    project.write("train.jsonl", '{"prompt": "1", "answer": "A"}\n{"prompt": "2", "answer": "A", "options": ["x"]}\n')
    for kind, args in (("choice", "options: options"), ("choice", ""), ("instruction", ""), ("code", "column: options")):
        assert project.problems_of(READS % (kind, args)) == []


# ---------------------------------------------------------------- as the command line looks them up, in a fresh interpreter


@pytest.mark.parametrize(
    ("reward", "code", "said"),
    [
        ("examples.domains.reverse.score", 0, ""),
        ("examples.domains.reverse.scor", 2, "did you mean 'score'?"),
        ("examples.domains.nope.score", 2, "there is no module 'nope' in examples.domains"),
    ],
)
def test_a_reward_in_folders_without_init_files(reward: str, code: int, said: str) -> None:
    command = [sys.executable, "-m", "roll_lite.cli", "check", "--config-name", "tiny_grpo", f"domains.add.reward.name={reward}"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == code, checked.stderr
    assert said in checked.stderr and "Traceback" not in checked.stderr
