from __future__ import annotations

import json
from pathlib import Path

from roll_lite.data.samples import Completion, FinishReason, Outcome, Prompt, Sample, SampleGroup, SampleId, Score, VersionSpan
from roll_lite.workers.sample_dump import write_samples


def test_every_sample_is_one_line_failed_ones_too(tmp_path: Path) -> None:
    prompt = Prompt("toy", 4, "2 + 2 =", (1, 2, 3), answer={"value": 4})
    completion = Completion("r", (5, 6), (-1.0, -0.5), "vier\n✓", FinishReason.STOP, (VersionSpan(0, 3),))
    good = Sample(SampleId("toy", 4, 0, 9, 0), prompt, completion, Outcome.ACCEPTED, Score(0.5, True, {"format": 1.0}))
    bad = Sample(SampleId("toy", 4, 0, 9, 1, attempt=2), prompt, Completion("q"), Outcome.FAILED, failure="generation: time-out")
    path = tmp_path / "samples" / "step_000012.jsonl"
    greedy = Sample(SampleId("toy", 4, 0, 9, 2), prompt, completion, Outcome.ACCEPTED, Score(1.0, format_ok=True))
    write_samples(path, [SampleGroup(9, "toy", (good, bad), greedy)])
    first, second, third = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert (first["prompt"], first["response"], first["answer"]) == ("2 + 2 =", "vier\n✓", {"value": 4})
    assert (first["score"], first["correct"], first["details"], first["outcome"]) == (0.5, True, {"format": 1.0}, "accepted")
    assert (first["prompt_tokens"], first["response_tokens"], first["versions"]) == (3, 2, [[0, 3]])
    assert (second["score"], second["correct"], second["outcome"], second["failure"]) == (None, None, "failed", "generation: time-out")
    assert (second["index"], second["attempt"]) == (1, 2)
    assert [line["baseline"] for line in (first, second, third)] == [False, False, True]
    assert [line["format_ok"] for line in (first, second, third)] == [None, None, True]
    assert (third["index"], third["score"]) == (2, 1.0)
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000012.jsonl"]


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path: Path) -> None:
    """A program's own error text may hold one: what a model writes must not end the run."""
    prompt = Prompt("toy", 4, "2 + 2 =", (1,))
    score = Score(0.0, False, {"error": "ValueError: \ud800"})
    sample = Sample(SampleId("toy", 4, 0, 9, 0), prompt, Completion("r"), Outcome.ACCEPTED, score)
    write_samples(tmp_path / "step.jsonl", [SampleGroup(9, "toy", (sample,))])
    assert json.loads((tmp_path / "step.jsonl").read_text(encoding="utf-8"))["details"]["error"] == "ValueError: \ud800"
