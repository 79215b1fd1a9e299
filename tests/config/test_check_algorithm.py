"""What the checks of the algorithm's settings allow. Their mistakes: cases/mistakes.jsonl."""

from __future__ import annotations

from config_project import Project

from roll_lite.config.schema.run import RunConfig


def test_a_functions_arguments_are_looked_at(project: Project) -> None:
    project.write("mine/__init__.py", "")
    project.write("mine/parts.py", "def loss(terms, *, strength): return 1\ndef weights(rows): return 1\n")
    loss = "algorithm: {policy_loss: {name: custom, function: mine.parts.loss, args: {%s}}, masks: {function: mine.parts.weights}}"
    assert project.problems_of(loss % "strength: 2") == []
    assert [problem.path for problem in project.problems_of(loss % "")] == ["algorithm.policy_loss.args"]
    assert [problem.path for problem in project.problems_of(loss % "strength: 1, other: 2")] == ["algorithm.policy_loss.args.other"]


def test_a_loss_may_ask_the_run_for_columns(project: Project) -> None:
    """By the names of its parameters. The reference's log-probs need a reference, which then is in use without any KL."""
    project.write("mine/__init__.py", "")
    functions = ("loss(terms, *, entropy, rollout_log_probs, scale=1.0)", "to_ref(terms, ref_log_probs)", "other(terms, *, entropie)")
    project.write("mine/parts.py", "".join(f"def {head}: return 1\n" for head in functions))

    def problems(function: str, more: str = "") -> list[tuple[str, str]]:
        found = project.problems_of(f"algorithm: {{policy_loss: {{name: custom, function: mine.parts.{function}}}}}\n{more}")
        return [(problem.path, problem.message) for problem in found]

    assert problems("loss") == problems("to_ref", "reference: {}") == []
    [(path, message)] = problems("to_ref")
    assert path == "algorithm.policy_loss.function" and "a parameter ref_log_probs; add a `reference` section" in message
    [(path, message)] = problems("other")
    assert path == "algorithm.policy_loss.args"
    assert message == "'mine.parts.other' needs entropie; of itself the run gives rollout_log_probs, ref_log_probs, entropy"
    [(path, message)] = problems("loss", "reference: {}")
    assert path == "reference" and "nothing uses the reference" in message


def test_the_keep_mask_makes_truncated_rollout_log_probs_complete(project: Project) -> None:
    rollout = "domains: {copy: {sampling: {%s}}}\nrollout: {keep_mask: %s}\nalgorithm: {old_log_probs: rollout}"
    assert [problem.path for problem in project.problems_of(rollout % ("top_k: 5", "false"))] == ["domains.copy.sampling.top_k"]
    assert project.problems_of(rollout % ("top_k: 5", "true")) == []
    project.write_model("large", vocab_size=150_000)
    (problem,) = project.problems_of("model: {path: large}\n" + rollout % ("top_p: 0.9", "true"))
    assert problem.path == "domains.copy.sampling.top_p" and "set top_k" in problem.message


def test_the_constant_follows_from_the_domains(project: Project) -> None:
    from roll_lite.config.arithmetic import aggregation_constant

    def constant(config: RunConfig) -> int | None:
        return aggregation_constant(config)

    assert constant(project.load()) is None
    assert constant(project.load("algorithm.aggregation=constant")) == 24
    assert constant(project.load("algorithm.aggregation=constant", "algorithm.aggregation_constant=7")) == 7
