"""Rows for the driver and lines for people."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data.keys import KEYS
from roll_lite.data.samples import (
    Author,
    FinishReason,
    Prompt,
    Sample,
    SampleGroup,
    SampleId,
    SampleOutcome,
    Score,
    Segment,
    TokenRow,
    Transcript,
    VersionSpan,
)
from roll_lite.observability.view.index import SampleIndex
from roll_lite.observability.view.runs import Run
from roll_lite.workers.rollout_output import held_out_rows, reported_columns, rows_of, tokens_of, write_samples


def sample(group: int, index: int, prompt: tuple[int, ...], response: int, score: Score, where: tuple[str, int], **ids: int) -> Sample:
    versions = (VersionSpan(0, 5), VersionSpan(1, 6)) if response > 1 else ()
    segments = (Segment(Author.PROMPT, len(prompt)), Segment(Author.POLICY, response, versions))
    sample_id = SampleId("maths", ids.get("uid", 11), ids.get("epoch", 2), group, index, ids.get("attempt", 0))
    transcript = Transcript(segments, TokenRow(*where, len(prompt) + response), "text", FinishReason.STOP)
    return Sample(sample_id, Prompt("maths", sample_id.prompt_uid, "a b", prompt), transcript, SampleOutcome.ACCEPTED, score)


AT = {"maths": 0.5}
GROUPS = [
    SampleGroup(
        3,
        "maths",
        (
            sample(3, 0, (1, 10, 11), 3, Score(1.0), ("one", 4)),
            sample(3, 2, (1, 10, 11), 1, Score(0.5, correct=True), ("other", 0), attempt=1),
        ),
    ),
    SampleGroup(4, "maths", (sample(4, 0, (7,), 2, Score(-1.0), ("one", 2), uid=12),)),
]


def test_rows_by_hand() -> None:
    rows = rows_of(GROUPS, AT)
    expected = {
        "sample": [0, 1, 2],
        "group": [3, 3, 4],
        "index": [0, 2, 0],
        "prompt_uid": [11, 11, 12],
        "epoch": [2, 2, 2],
        "attempt": [0, 1, 0],
        "domain": ["maths"] * 3,
        "finish_reason": ["stop"] * 3,
        "prompt_length": [3, 3, 1],
        "response_length": [3, 1, 2],
        "policy_tokens": [3, 1, 2],
        "score": [1.0, 0.5, -1.0],
        "correct": [1.0, 1.0, 0.0],
        "min_version": [5, 0, 5],
        "format_ok": [0.0, 0.0, 0.0],
        "sample_weight": [1.0, 1.0, 1.0],
        "temperature": [0.5, 0.5, 0.5],
    }
    assert {name: rows[name].tolist() for name in expected} == expected
    written = {name for name, key in KEYS.items() if key.writer == "rollout service"}
    assert set(rows.keys()) == written - {"baseline_score", "branch", "turn_rewards"}


def test_references_by_hand() -> None:
    """Blocks have rows of samples that failed, too: those are nobody's here."""
    block = tokens_of(GROUPS)
    assert block.refs == ("one", "other")
    assert (block.objects.tolist(), block.rows.tolist(), block.samples.tolist()) == ([0, 1, 0], [4, 0, 2], [0, 1, 2])
    assert block.keys == ("input_ids", "response_mask", "rollout_log_probs")
    assert tokens_of(GROUPS, ["kept_ids"]).keys == (*block.keys, "kept_ids")


def test_only_the_policys_tokens_count_as_its_own() -> None:
    one = GROUPS[0].samples[0]
    turns = (
        Segment(Author.PROMPT, 3),
        Segment(Author.POLICY, 4, (VersionSpan(0, 6), VersionSpan(2, 7))),
        Segment(Author.ENVIRONMENT, 10),
        Segment(Author.POLICY, 5, (VersionSpan(0, 7),)),
    )
    two_turns = replace(one, transcript=replace(one.transcript, segments=turns))
    rows = rows_of([replace(GROUPS[0], samples=(two_turns,))], AT)
    assert [int(rows.tensor(name)) for name in ("prompt_length", "response_length", "policy_tokens", "min_version")] == [3, 19, 9, 6]
    assert two_turns.transcript.versions == (VersionSpan(0, 6), VersionSpan(2, 7), VersionSpan(14, 7))


def test_what_the_driver_gets_does_not_grow_with_the_responses() -> None:
    def size(tokens: int) -> int:
        groups = [SampleGroup(0, "maths", tuple(sample(0, i, (1, 2), tokens, Score(1.0), ("one", i)) for i in range(8)))]
        return len(pickle.dumps((rows_of(groups, AT), tokens_of(groups))))

    assert size(4000) == size(40)


def test_a_sample_without_a_score_is_refused() -> None:
    whole = GROUPS[0].samples[0]
    failed = Sample(whole.id, whole.prompt, whole.transcript, SampleOutcome.FAILED, failure="time-out")
    with pytest.raises(AssertionError, match="score"):
        rows_of([SampleGroup(0, "maths", (failed,))], AT)


def test_an_empty_batch_has_all_columns() -> None:
    assert len(rows_of([], AT)) == 0
    assert set(rows_of([], AT).keys()) == set(rows_of(GROUPS, AT).keys())


def test_form_and_weight_by_hand() -> None:
    first, second = GROUPS[0].samples
    assert first.score and second.score
    first = replace(first, score=replace(first.score, format_ok=True), prompt=replace(first.prompt, weight=0.5))
    second = replace(second, score=replace(second.score, format_ok=False), prompt=replace(second.prompt, weight=0.0))
    rows = rows_of([replace(GROUPS[0], samples=(first, second)), GROUPS[1]], AT)
    assert rows["format_ok"].tolist() == [1.0, 0.0, 0.0]
    assert rows["sample_weight"].tolist() == [0.5, 0.0, 1.0]


def test_every_row_has_its_groups_baseline_and_the_baseline_has_no_row() -> None:
    greedy = sample(3, 3, (1, 10, 11), 2, Score(0.25), ("one", 5))
    groups = [replace(GROUPS[0], baseline=greedy), replace(GROUPS[1], baseline=replace(greedy, score=Score(-2.0)))]
    rows = rows_of(groups, AT)
    assert rows["baseline_score"].tolist() == [0.25, 0.25, -2.0]
    assert rows["index"].tolist() == [0, 2, 0]
    assert len(tokens_of(groups).samples) == 3
    with pytest.raises(AssertionError, match="group 4 has no scored greedy baseline"):
        rows_of([groups[0], GROUPS[1]], AT)
    with pytest.raises(AssertionError, match="group 3 has no scored"):
        rows_of([replace(GROUPS[0], baseline=replace(greedy, score=None, outcome=SampleOutcome.FAILED, failure="time-out"))], AT)


def test_every_sample_is_one_line_failed_ones_too(tmp_path: Path) -> None:
    row = {"question": "2 + 2", "answer": {"value": 4}, "level": 1, "tests": "x" * 1200, "more": ["y" * 1000]}
    prompt = Prompt("toy", 4, "2 + 2 =", (1, 2, 3), answer={"value": 4}, columns=row, question="2 + 2")
    transcript = Transcript(
        (Segment(Author.PROMPT, 3), Segment(Author.POLICY, 2, (VersionSpan(0, 3),))), None, "vier\n✓", FinishReason.STOP
    )
    good = Sample(SampleId("toy", 4, 0, 9, 0), prompt, transcript, SampleOutcome.ACCEPTED, Score(0.5, True, {"format": 1.0}))
    good = replace(good, score=replace(good.score, terms={"base": 1.0, "length": -0.5}), asked=1.0, generated=2.5, scored=2.75)  # type: ignore[type-var]
    bad = Sample(SampleId("toy", 4, 0, 9, 1, attempt=2), prompt, Transcript(), SampleOutcome.FAILED, failure="generation: time-out")
    path = tmp_path / "samples" / "step_000012.jsonl"
    greedy = Sample(SampleId("toy", 4, 0, 9, 2), prompt, transcript, SampleOutcome.ACCEPTED, Score(1.0, format_ok=True))
    write_samples(path, [SampleGroup(9, "toy", (good, bad), greedy)], 12, clock_offset=1e9)
    first, second, third = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert (first["prompt"], first["response"], first["answer"]) == ("2 + 2 =", "vier\n✓", {"value": 4})
    assert (first["score"], first["correct"], first["details"], first["outcome"]) == (0.5, True, {"format": 1.0}, "accepted")
    assert (first["prompt_tokens"], first["response_tokens"], first["versions"]) == (3, 2, [[0, 3]])
    assert (first["step"], first["terms"]) == (12, {"base": 1.0, "length": -0.5})
    assert [first[name] for name in ("asked_at", "generated_at", "scored_at")] == [1000000001.0, 1000000002.5, 1000000002.75]
    more = json.dumps(["y" * 1000])
    assert first["columns"] == {
        "answer": {"value": 4},
        "level": 1,
        "tests": f"{'x' * 1000}... (1200 characters)",
        "more": f"{more[:1000]}... (1004 characters)",
    }
    assert (second["step"], second["terms"], second["asked_at"]) == (12, {}, None)
    assert (second["score"], second["correct"], second["outcome"], second["failure"]) == (None, None, "failed", "generation: time-out")
    assert (second["index"], second["attempt"]) == (1, 2)
    assert [line["baseline"] for line in (first, second, third)] == [False, False, True]
    assert [line["format_ok"] for line in (first, second, third)] == [None, None, True]
    assert (third["index"], third["score"]) == (2, 1.0)
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000012.jsonl"]


def test_half_a_surrogate_pair_is_written_as_text(tmp_path: Path) -> None:
    """A program's own error text may hold one: what a model writes must not end the run, nor hide the sample from the viewer."""
    prompt = Prompt("toy", 4, "2 + 2 =", (1,))
    score = Score(0.0, False, {"error": "ValueError: \ud800"})
    sample = Sample(SampleId("toy", 4, 0, 9, 0), prompt, Transcript(), SampleOutcome.ACCEPTED, score)
    write_samples(tmp_path / "samples/step_000001.jsonl", [SampleGroup(9, "toy", (sample,))], 1)
    [shown] = Run("run", tmp_path).group("step", 1, 9)
    assert shown["details"]["error"] == "ValueError: \\ud800" and shown["response"] == ""
    index = SampleIndex(tmp_path)
    index.refresh()
    assert index.counts({}, "domain") == [{"value": "toy", "count": 1, "score": 0.0, "correct": 0.0}]
    index.close()


def test_held_out_rows_say_which_answers_are_equal_and_what_they_are_reported_by() -> None:
    said: list[str | None] = ["7", "8", "7", "", "8", None]
    scored = [sample(0, index, (1,), 1, Score(0.0, answer=answer), ("one", index)) for index, answer in enumerate(said)]
    scored = [replace(one, prompt=replace(one.prompt, columns={"level": 3})) for one in scored]
    groups = [SampleGroup(0, "maths", tuple(scored[:4])), SampleGroup(1, "maths", tuple(scored[4:]))]
    rows = held_out_rows(groups, AT, {"maths": ["level"]})
    assert rows["answer"].tolist() == [0, 1, 0, -1, 0, -2]
    assert rows["parts"].tolist() == [("level:3",)] * 6
    newer = sample(2, 0, (1,), 3, Score(0.0), ("one", 6))
    newer = replace(newer, prompt=replace(newer.prompt, columns={"level": 3}))
    spans = held_out_rows([*groups, SampleGroup(2, "maths", (newer,))], AT, {"maths": ["level"]})
    assert (spans["min_version"].tolist()[-1], spans["max_version"].tolist()[-1]) == (5, 6)
    assert held_out_rows(groups, AT, {"maths": []})["parts"].tolist() == [()] * 6


def test_a_validation_is_reported_by_level_and_subject_where_all_prompts_have_them(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"level": 3, "subject": "sums", "kind": "a"}, {"level": 4, "subject": ["sums"], "kind": "b"}]
    one = sample(0, 0, (1,), 1, Score(0.0), ("one", 0))
    groups = [SampleGroup(number, "maths", (replace(one, prompt=replace(one.prompt, columns=row)),)) for number, row in enumerate(rows)]
    assert reported(groups, {}) == ["level"], "a list is neither text nor number"
    assert reported(groups, {"report_by": []}) == []
    assert reported(groups, {"report_by": "kind"}) == ["kind"]
    assert reported(groups, {"report_by": ["kind", "level", "kind"]}) == ["kind", "level"]
    many = [replace(groups[0], samples=(replace(one, prompt=replace(one.prompt, columns={"level": level})),)) for level in range(51)]
    assert reported(many, {}) == [] and reported(many[1:], {}) == ["level"]
    write_samples(tmp_path / "validation.jsonl", groups, 0, columns={"maths": ["kind", "level"]})
    written = [json.loads(line)["parts"] for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert written == [["kind:a", "level:3"], ["kind:b", "level:4"]]


def reported(groups: list[SampleGroup], data: dict[str, Any]) -> list[str]:
    domain = DomainConfig.model_validate({"data": {"train": "x", **data}, "reward": {"name": "exact"}})
    return reported_columns(groups, {"maths": domain})["maths"]
