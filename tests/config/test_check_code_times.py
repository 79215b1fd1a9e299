"""A program's own slowness must never look like a worker that hangs."""

from __future__ import annotations

from config_project import Project


def test_a_samples_programs_end_before_their_sample(project: Project) -> None:
    code = "domains: {copy: {reward: {type: code, timeout_s: %s, args: {%s}}}}"
    assert project.problems_of(code % ("25", "")) == []
    (problem,) = project.problems_of(code % ("24", ""))
    assert problem.path == "domains.copy.reward.timeout_s" and "24 s by the clock" in problem.message
    assert project.problems_of(code % ("24", "total_s: 5")) == []
