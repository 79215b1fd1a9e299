"""Rewards and their terms: names and arguments, each at its place."""

from __future__ import annotations

from config_project import Project

REWARD = "domains.copy.reward"


def told(project: Project, terms: str) -> list[tuple[str, str]]:
    problems = project.problems_of(f"domains: {{copy: {{reward: {{terms: {terms}}}}}}}")
    return [(problem.path, problem.message) for problem in problems]


def test_terms_are_looked_up_like_rewards(project: Project) -> None:
    project.write("mine.py", "def shorter(sample, limit, slope=1.0):\n    return 0.0\n")
    assert told(project, "[{type: exact, args: {strip: false}, weight: -0.5}, {type: mine.shorter, args: {limit: 3}}]") == []
    found = told(
        project,
        "[{type: exakt}, {type: exact, args: {stripp: true}}, {type: mine.shorter}, {type: mine.longer}, {type: exact, weight: 0.0}]",
    )
    assert [path for path, _ in found] == [
        f"{REWARD}.terms.0.type",
        f"{REWARD}.terms.1.args.stripp",
        f"{REWARD}.terms.2.args",
        f"{REWARD}.terms.3.type",
        f"{REWARD}.terms.4.weight",
    ]
    for (_, message), fragment in zip(
        found, ("did you mean 'exact'?", "did you mean 'strip'?", "needs limit", "has no 'longer'", "worth nothing"), strict=True
    ):
        assert fragment in message


def test_where_a_term_was_written_is_said(project: Project) -> None:
    (problem,) = project.problems_of("domains:\n  copy:\n    reward:\n      terms:\n        - {type: exakt}\n")
    assert problem.source.startswith("changed.yaml") or "changed.yaml" in problem.source
