from __future__ import annotations

import math

import pytest
import torch
from reference_shaping import placed

from roll_lite.algorithms.advantages import last_policy_token, token_rewards

NAN = math.nan


def test_the_reward_lands_on_the_last_policy_token_and_not_on_index_minus_one() -> None:
    """FINDINGS 6.6. <bos> a b | c d <eos> has the shifted mask 0 0 1 1 1; the second row ends in padding, the third in a tool's
    output with a gap before, the fourth has no policy token, the fifth one only."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 0]], dtype=torch.bool)
    assert last_policy_token(mask).tolist() == [4, 2, 2, -1, 0]
    rewards = token_rewards(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), mask)
    assert rewards.tolist() == [[0, 0, 0, 0, 1], [0, 0, 2, 0, 0], [0, 0, 3, 0, 0], [0, 0, 0, 0, 0], [5, 0, 0, 0, 0]]


def test_kl_is_paid_by_every_policy_token_and_by_no_other() -> None:
    mask = torch.tensor([[False, True, True, False]])
    kl = torch.tensor([[NAN, 0.5, -0.25, math.inf]])
    torch.testing.assert_close(
        token_rewards(torch.tensor([1.0]), mask, -0.1 * kl),
        torch.tensor([[0.0, -0.05, 1.025, 0.0]], dtype=torch.float64),
        rtol=1e-6,
        atol=0,
    )
    assert token_rewards(torch.tensor([1.0]), mask).tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_rewards_go_in_as_they_are() -> None:
    """Clipping belongs to shaping."""
    assert token_rewards(torch.tensor([9.0, -9.0]), torch.ones(2, 1, dtype=torch.bool), -torch.ones(2, 1)).tolist() == [[8.0], [-10.0]]


@pytest.mark.parametrize("seed", range(5))
def test_against_loops_with_gaps_and_empty_rows(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(9, 13, generator=generator) < 0.4
    mask[0], mask[1, 1:] = False, False
    kl = torch.randn(9, 13, generator=generator, dtype=torch.float64)
    rewards = torch.randn(9, generator=generator, dtype=torch.float64)
    expected = placed(rewards.tolist(), mask.tolist(), kl.tolist(), 0.3)
    poisoned = torch.where(mask, kl, NAN)
    result = token_rewards(rewards, mask, -0.3 * poisoned)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-15)


def test_padding_row_order_and_views_change_nothing() -> None:
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(6, 8, generator=generator) < 0.5
    rewards, kl = torch.randn(6, generator=generator), torch.randn(6, 8, generator=generator)
    whole = token_rewards(rewards, mask, kl)
    wide = token_rewards(rewards, torch.nn.functional.pad(mask, (4, 9)), torch.nn.functional.pad(kl, (4, 9), value=NAN))
    assert torch.equal(wide[:, 4:12], whole)
    assert int(wide[:, :4].count_nonzero() + wide[:, 12:].count_nonzero()) == 0
    order = [3, 1, 5, 0, 2, 4]
    assert torch.equal(token_rewards(rewards[order], mask[order], kl[order]), whole[order])
    assert torch.equal(token_rewards(rewards, mask.T.contiguous().T, kl), whole)


def test_no_rows_and_no_columns() -> None:
    assert token_rewards(torch.zeros(0), torch.zeros(0, 4, dtype=torch.bool)).shape == (0, 4)
    assert token_rewards(torch.ones(2), torch.zeros(2, 0, dtype=torch.bool)).shape == (2, 0)
