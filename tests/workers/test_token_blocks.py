"""Columns of tokens, by hand: what every row of a block is, whoever wrote its parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roll_lite.data.keys import KEYS
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import Completion, FinishReason
from roll_lite.workers.token_blocks import EXPERTS, TOKEN_COLUMNS, TokenRecord, token_block

NONE = [-1, -1, -1]


def completion(tokens: tuple[int, ...], log_probs: tuple[float, ...], kept: tuple[tuple[int, ...], ...] | None = None) -> Completion:
    return Completion("r", tokens, log_probs, "text", FinishReason.STOP, kept_ids=kept)


def record(
    prompt: tuple[int, ...], tokens: tuple[int, ...], log_probs: tuple[float, ...], kept: tuple[tuple[int, ...], ...] | None = None
) -> TokenRecord:
    return TokenRecord.joined([TokenRecord.given(prompt), TokenRecord.chosen(completion(tokens, log_probs, kept))])


RECORDS = [
    # <bos> a b | c d <eos>, the golden row of the design
    record((1, 10, 11), (12, 13, 2), (-0.1, -0.2, -0.3)),
    record((1, 10, 11), (2,), (-0.4,)),
    record((7,), (8, 9), (-0.5, -0.6)),
]


def test_tokens_masks_and_log_probs() -> None:
    columns = token_block(RECORDS)
    ids, mask, log_probs = columns["input_ids"], columns["response_mask"], columns["rollout_log_probs"]
    assert [ids.row(i).tolist() for i in range(3)] == [[1, 10, 11, 12, 13, 2], [1, 10, 11, 2], [7, 8, 9]]
    assert [mask.row(i).int().tolist() for i in range(3)] == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1], [0, 1, 1]]
    # shifted mask 0 0 1 1 1, log-prob t belongs to token t + 1
    expected = [[0, 0, -0.1, -0.2, -0.3], [0, 0, -0.4], [-0.5, -0.6]]
    for i, row in enumerate(expected):
        torch.testing.assert_close(log_probs.row(i), torch.tensor(row))
    assert mask.row(0)[1:].int().tolist() == [0, 0, 1, 1, 1]


def test_two_turns_and_what_the_environment_said_in_between() -> None:
    """<bos> a | b <eos> | x y | c <eos>: the policy chose b, <eos>, c, <eos>, and nothing else."""
    first = token_block([RECORDS[2], record((1, 10), (11, 2), (-0.1, -0.2))])
    second = [TokenRecord.read(first, 1), TokenRecord.given((50, 51)), TokenRecord.chosen(completion((12, 2), (-0.3, -0.4)))]
    columns = token_block([TokenRecord.joined(second)])
    assert columns["input_ids"].row(0).tolist() == [1, 10, 11, 2, 50, 51, 12, 2]
    assert columns["response_mask"].row(0).int().tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    torch.testing.assert_close(columns["rollout_log_probs"].row(0), torch.tensor([0, -0.1, -0.2, 0, 0, -0.3, -0.4]))


def test_a_row_reads_back_as_it_was_written() -> None:
    kept = record((1, 10), (11, 2), (-0.1, -0.2), ((11, 12), (2,)))
    block = token_block([RECORDS[0], kept], ["kept_ids"])
    again = token_block([TokenRecord.read(block, row) for row in range(2)], ["kept_ids"])
    assert all(again.ragged(name).equals(block.ragged(name)) for name in (*TOKEN_COLUMNS, "kept_ids"))


def test_kept_ids() -> None:
    """Entry t belongs to token t + 1; prompts and samples without a mask keep everything, which is -1 throughout."""
    masked = record((1, 10, 11), (12, 13, 2), (-0.1, -0.2, -0.3), ((12,), (9, 13, 4), (2, 8)))
    kept = token_block([masked, *RECORDS[1:]], ["kept_ids"]).ragged("kept_ids")
    assert kept.dtype == torch.int32
    assert [kept.row(i).tolist() for i in range(3)] == [[NONE, NONE, [12, -1, -1], [9, 13, 4], [2, 8, -1]], [NONE] * 3, [NONE] * 2]
    with pytest.raises(AssertionError, match="tokens and kept ids differ in number"):
        TokenRecord.chosen(completion((1, 2), (-0.1, -0.2), ((1,),)))


def test_blocks_of_one_run_have_the_same_columns() -> None:
    masked = record((1,), (12, 13), (-0.1, -0.2), ((1, 2), (3,)))
    blocks = [token_block([one], ["kept_ids"]) for one in (masked, RECORDS[1])]
    assert DataProto.concat(blocks).ragged("kept_ids").equals(token_block([masked, RECORDS[1]], ["kept_ids"]).ragged("kept_ids"))
    assert "kept_ids" not in token_block([masked])


def test_experts_of_a_response_that_was_continued() -> None:
    """What the first engine knew stays; it had not run its last token, which the second one did; nobody has run the last of all. A part
    that was handed out on the way knows nothing."""
    first = RECORDS[2].fill_experts(np.array([[4, 5], [6, 7]], np.int16))  # of 7 8, before 9
    block = token_block([first, RECORDS[1]], [EXPERTS])
    assert block.ragged("rollout_experts").row(0).tolist() == [[4, 5], [6, 7], [-1, -1]]
    assert block.ragged("rollout_experts").row(1).tolist() == [[-1, -1]] * 4
    part = token_block([TokenRecord.joined([TokenRecord.given((0,)), TokenRecord.chosen(completion((3,), (-0.1,)))])], [EXPERTS])
    before = [TokenRecord.read(block, 0), TokenRecord.read(part, 0).drop_prefix(1)]
    told = np.array([[0, 1], [0, 2], [0, 3], [1, 2]], np.int16)  # of 7 8 9 3, before 2
    whole = TokenRecord.joined([*before, TokenRecord.chosen(completion((2,), (-0.2,)))]).fill_experts(told)
    column = token_block([whole], [EXPERTS]).ragged("rollout_experts")
    assert column.dtype == KEYS["rollout_experts"].dtype
    assert column.row(0).tolist() == [[4, 5], [6, 7], [0, 3], [1, 2], [-1, -1]]
    assert len(whole.fill_experts(None)) == 5 and whole.fill_experts(None).extra[EXPERTS] is whole.extra[EXPERTS]
    unknown = token_block(RECORDS, [EXPERTS]).ragged("rollout_experts")
    assert unknown.values.tolist() == [[-1]] * 13
    assert DataProto.concat([block, token_block(RECORDS, [EXPERTS])]).ragged("rollout_experts").values.shape == (20, 2)
    assert "rollout_experts" not in token_block([whole])


@pytest.mark.parametrize("samples", [0, 1])
def test_all_tokens_kept_everywhere(samples: int) -> None:
    one = record((1, 2, 3), (4, 5, 6), (-0.1, -0.2, -0.3), ((), (), ()))
    kept = token_block([one] * samples, ["kept_ids"]).ragged("kept_ids")
    assert kept.values.shape == (5 * samples, 1) and bool((kept.values == -1).all())


def test_an_empty_block_has_all_columns() -> None:
    empty = token_block([], ["kept_ids"])
    assert len(empty) == 0 and set(empty.keys()) == {*TOKEN_COLUMNS, "kept_ids"}
    assert [empty.ragged(name).dtype for name in TOKEN_COLUMNS] == [KEYS[name].dtype for name in TOKEN_COLUMNS]


def test_missing_log_probs_are_refused() -> None:
    with pytest.raises(AssertionError, match="differ in number"):
        TokenRecord.chosen(completion((1, 2), (-1.0,)))
