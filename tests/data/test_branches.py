"""Rows of samples, and rewards of their responses."""

from __future__ import annotations

import torch

from roll_lite.data.branches import sample_rows, turn_rewards
from roll_lite.data.samples import Author, Branch, Segment


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
