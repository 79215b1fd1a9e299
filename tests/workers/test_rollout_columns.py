from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from roll_lite.data.keys import KEYS
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import Completion, FinishReason, Outcome, Prompt, Sample, SampleGroup, SampleId, Score, VersionSpan
from roll_lite.workers.rollout_columns import Extras, columns_of, row_columns_of, rows_and_tokens


def sample(
    group: int, index: int, prompt: tuple[int, ...], response: tuple[int, ...], log_probs: tuple[float, ...], score: Score, **ids: int
) -> Sample:
    completion = Completion(
        "r", response, log_probs, "text", FinishReason.STOP, versions=(VersionSpan(0, 5), VersionSpan(1, 6)) if len(response) > 1 else ()
    )
    sample_id = SampleId("maths", ids.get("uid", 11), ids.get("epoch", 2), group, index, ids.get("attempt", 0))
    return Sample(sample_id, Prompt("maths", sample_id.prompt_uid, "a b", prompt), completion, Outcome.ACCEPTED, score)


GROUPS = [
    # <bos> a b | c d <eos>, the golden row of the design
    SampleGroup(
        3,
        "maths",
        (
            sample(3, 0, (1, 10, 11), (12, 13, 2), (-0.1, -0.2, -0.3), Score(1.0)),
            sample(3, 2, (1, 10, 11), (2,), (-0.4,), Score(0.5, correct=True), attempt=1),
        ),
    ),
    SampleGroup(4, "maths", (sample(4, 0, (7,), (8, 9), (-0.5, -0.6), Score(-1.0), uid=12),)),
]


def test_tokens_masks_and_log_probs_by_hand() -> None:
    columns = columns_of(GROUPS, first_sample=100)
    ids, mask, log_probs = columns["input_ids"], columns["response_mask"], columns["rollout_log_probs"]
    assert [ids.row(i).tolist() for i in range(3)] == [[1, 10, 11, 12, 13, 2], [1, 10, 11, 2], [7, 8, 9]]
    assert [mask.row(i).int().tolist() for i in range(3)] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1]]
    # shifted mask 0 0 1 1 1, log-prob t belongs to token t + 1
    expected = [[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.4], [-0.5, -0.6]]
    for i, row in enumerate(expected):
        torch.testing.assert_close(log_probs.row(i), torch.tensor(row))
    assert mask.row(0)[1:].int().tolist() == [0, 0, 1, 1, 1]


def test_rows_by_hand() -> None:
    columns = columns_of(GROUPS, first_sample=100)
    expected = {
        "sample": [100, 101, 102],
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
    }
    assert {name: columns[name].tolist() for name in expected} == expected
    assert set(columns.keys()) == {name for name, key in KEYS.items() if key.writer == "rollout service"} - {"baseline_score", "kept_ids"}


def test_rows_leave_tokens_behind() -> None:
    rows, tokens = rows_and_tokens(columns_of(GROUPS))
    assert set(tokens.keys()) == {"sample", "input_ids", "response_mask", "rollout_log_probs"}
    assert "input_ids" not in rows
    assert "rollout_log_probs" not in rows
    assert rows["sample"].tolist() == tokens["sample"].tolist() == [0, 1, 2]


def test_what_the_driver_gets_does_not_grow_with_the_responses() -> None:
    def size(tokens: int) -> int:
        groups = [SampleGroup(0, "maths", tuple(sample(0, i, (1, 2), (5,) * tokens, (-1.0,) * tokens, Score(1.0)) for i in range(8)))]
        return len(pickle.dumps(rows_and_tokens(columns_of(groups))[0]))

    assert size(4000) == size(40)


def test_a_sample_without_a_score_is_refused() -> None:
    whole = GROUPS[0].samples[0]
    failed = Sample(whole.id, whole.prompt, whole.completion, Outcome.FAILED, failure="time-out")
    with pytest.raises(AssertionError, match="score"):
        columns_of([SampleGroup(0, "maths", (failed,))])


def test_missing_log_probs_are_refused() -> None:
    whole = GROUPS[0].samples[0]
    short = Sample(whole.id, whole.prompt, Completion("r", (1, 2), (-1.0,)), Outcome.ACCEPTED, Score(1.0))
    with pytest.raises(AssertionError, match="differ in number"):
        columns_of([SampleGroup(0, "maths", (short,))])


def test_an_empty_batch_has_all_columns() -> None:
    assert len(columns_of([])) == 0
    assert set(columns_of([]).keys()) == set(columns_of(GROUPS).keys())


def with_kept(one: Sample, kept: tuple[tuple[int, ...], ...] | None) -> Sample:
    return replace(one, completion=replace(one.completion, kept_ids=kept))


def test_form_and_weight_by_hand() -> None:
    first, second = GROUPS[0].samples
    assert first.score and second.score
    first = replace(first, score=replace(first.score, format_ok=True), prompt=replace(first.prompt, weight=0.5))
    second = replace(second, score=replace(second.score, format_ok=False), prompt=replace(second.prompt, weight=0.0))
    columns = columns_of([replace(GROUPS[0], samples=(first, second)), GROUPS[1]])
    assert columns["format_ok"].tolist() == [1.0, 0.0, 0.0]
    assert columns["sample_weight"].tolist() == [0.5, 0.0, 1.0]


def test_every_row_has_its_groups_baseline_and_the_baseline_has_no_row() -> None:
    greedy = sample(3, 3, (1, 10, 11), (5, 5), (0.0, 0.0), Score(0.25))
    groups = [replace(GROUPS[0], baseline=greedy), replace(GROUPS[1], baseline=replace(greedy, score=Score(-2.0)))]
    columns = columns_of(groups)
    assert columns["baseline_score"].tolist() == [0.25, 0.25, -2.0]
    assert columns["index"].tolist() == [0, 2, 0]
    assert "baseline_score" in rows_and_tokens(columns)[0]
    assert "baseline_score" not in row_columns_of(groups)
    with pytest.raises(AssertionError, match="group 4 has no scored greedy baseline"):
        columns_of([groups[0], GROUPS[1]])
    with pytest.raises(AssertionError, match="group 3 has no scored"):
        columns_of([replace(GROUPS[0], baseline=replace(greedy, score=None, outcome=Outcome.FAILED, failure="time-out"))])


def test_kept_ids_by_hand() -> None:
    """Entry t belongs to token t + 1; prompts and samples without a mask keep everything, which is -1 throughout."""
    first, second = GROUPS[0].samples
    groups = [replace(GROUPS[0], samples=(with_kept(first, ((12,), (9, 13, 4), (2, 8))), second)), GROUPS[1]]
    kept = columns_of(groups).ragged("kept_ids")
    none = [-1, -1, -1]
    assert kept.dtype == torch.int32
    assert [kept.row(i).tolist() for i in range(3)] == [
        [none, none, [12, -1, -1], [9, 13, 4], [2, 8, -1]],
        [none, none, none],
        [none, none],
    ]
    rows, tokens = rows_and_tokens(columns_of(groups))
    assert "kept_ids" in tokens and "kept_ids" not in rows
    short = replace(GROUPS[0], samples=(with_kept(first, ((12,),)),))
    with pytest.raises(AssertionError, match="tokens and kept ids differ in number"):
        columns_of([short])


def test_blocks_of_a_batch_have_the_same_columns() -> None:
    whole = [replace(GROUPS[0], samples=(with_kept(GROUPS[0].samples[0], ((1, 2), (3,), (4,))),)), GROUPS[1]]
    extras = Extras.of(whole)
    assert extras == Extras(kept_ids=True)
    blocks = [columns_of([group], number, extras) for number, group in enumerate(whole)]
    joined = DataProto.concat(blocks).ragged("kept_ids")
    assert joined.equals(columns_of(whole).ragged("kept_ids"))
    assert set(columns_of([], 0, extras).keys()) == set(blocks[0].keys())


@pytest.mark.parametrize("samples", [0, 1])
def test_all_tokens_kept_everywhere(samples: int) -> None:
    one = with_kept(GROUPS[0].samples[0], ((), (), ()))
    kept = columns_of([replace(GROUPS[0], samples=(one,) * samples)], extras=Extras(kept_ids=True)).ragged("kept_ids")
    assert kept.values.shape == (5 * samples, 1) and bool((kept.values == -1).all())
