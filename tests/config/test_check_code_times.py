"""A program's own slowness must never look like a worker that hangs."""

from __future__ import annotations

from config_project import Project


def test_a_samples_programs_end_before_their_sample(project: Project) -> None:
    code = "domains: {copy: {reward: {type: code, timeout_s: %s, args: {%s}}}}"
    assert project.problems_of(code % ("25", "")) == []
    (problem,) = project.problems_of(code % ("24", ""))
    assert problem.path == "domains.copy.reward.timeout_s" and "24 s by the clock" in problem.message
    assert project.problems_of(code % ("24", "total_s: 5")) == []


def test_a_samples_comparison_ends_before_the_sample(project: Project) -> None:
    math = "domains: {copy: {reward: {type: %s, timeout_s: %s, args: {%s}, terms: [%s]}}}"
    assert project.problems_of(math % ("math", "6", "", "")) == []
    (problem,) = project.problems_of(math % ("math", "8", "cpu_limit_s: 8", ""))
    assert problem.path == "domains.copy.reward.args.cpu_limit_s" and "domains.copy.reward.timeout_s: 8" in problem.message
    (default,) = project.problems_of(math % ("math", "5", "", ""))
    assert default.path == "domains.copy.reward.args.cpu_limit_s"
    (term,) = project.problems_of(math % ("exact", "4", "", "{type: math, weight: 1.0}"))
    assert term.path == "domains.copy.reward.terms.0.args.cpu_limit_s"
