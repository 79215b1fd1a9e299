"""Rows of samples, and rewards of their responses."""

from __future__ import annotations

import torch

from roll_lite.data.branches import sample_rows, turn_rewards
from roll_lite.data.samples import Author, Branch, Segment, Turn, VersionSpan, joined


def test_samples_are_told_apart_by_group_and_index_in_the_order_of_their_first_rows() -> None:
    of = sample_rows(torch.tensor([5, 5, 3, 5, 3]), torch.tensor([1, 0, 1, 1, 1]), torch.tensor([0, 0, 0, 1, 1]))
    assert (of.first.tolist(), of.sample.tolist()) == ([0, 1, 2], [0, 1, 2, 0, 2])
    assert of.total(torch.tensor([1, 2, 3, 4, 5])).tolist() == [5, 2, 8]


def test_a_reward_stands_on_the_last_token_of_its_response() -> None:
    """Prompt of 2 tokens, responses of 2 and 1 with an environment's 1 between; then a row that continues the first response."""
    linear = Branch(
        (
            Segment(Author.PROMPT, 2),
            Segment(Author.POLICY, 2, turn=0),
            Segment(Author.ENVIRONMENT, 1),
            Segment(Author.POLICY, 1, turn=1),
        )
    )
    other = Branch((Segment(Author.PROMPT, 4), Segment(Author.POLICY, 1, turn=2)))
    column = turn_rewards([(linear, (0.5, -1.0, 3.0)), (other, (0.5, -1.0, 3.0))])
    assert [column.row(row).tolist() for row in range(2)] == [[0.0, 0.0, 0.5, 0.0, -1.0], [0.0, 0.0, 0.0, 3.0]]


def test_a_response_that_moves_names_its_engines_in_their_order() -> None:
    parts = [Turn("r", 2, versions=(VersionSpan(0, version),), engines=(engine,)) for engine, version in ((1, 3), (0, 3), (0, 4), (1, 4))]
    whole = None
    for part in parts:
        whole = joined(whole, part)
    assert whole is not None and whole.engines == (1, 0, 1)
    assert (whole.length, whole.versions) == (8, (VersionSpan(0, 3), VersionSpan(4, 4)))
    prompt = Segment(Author.PROMPT, 2)
    assert Branch((prompt, Segment(Author.POLICY, 8, whole.versions, whole.engines))).engine is None
    assert Branch((prompt, Segment(Author.POLICY, 2, parts[0].versions, parts[0].engines))).engine == 1
