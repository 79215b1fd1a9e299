import math

import torch

from roll_lite.algorithms.losses import PolicyTerms, clipped_value_loss, entropy_loss, row_mean, row_sum

NAN = math.nan


def everything(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x, dtype=torch.bool)


def test_filled_terms_have_no_garbage_and_one_gradient() -> None:
    """FINDINGS 6.2: masked entries are filled before anything is computed; only the new log-probs carry a gradient."""
    mask = torch.tensor([[True, False]])
    new, old, advantages = (torch.tensor([[x, NAN]], requires_grad=True) for x in (-1.0, -1.5, 2.0))
    terms = PolicyTerms(new, old, advantages, mask).filled()
    assert terms.log_probs.tolist() == [[-1.0, 0.0]] and terms.log_ratio.tolist() == [[0.5, 0.0]] and terms.ratio[0, 1] == 1
    terms.ratio.mul(terms.advantages).sum().backward()
    assert new.grad is not None and new.grad[0, 1] == 0 and old.grad is None and advantages.grad is None


def test_row_sums_and_means_by_hand() -> None:
    x, mask = torch.tensor([[1.0, 0.0, 2.0], [0.0, 0.0, 0.0]]), torch.tensor([[True, False, True], [False] * 3])
    assert row_sum(x).tolist() == [[3.0], [0.0]] and row_mean(x, mask).tolist() == [[1.5], [0.0]]


def test_row_sums_do_not_lose_small_terms() -> None:
    """2 ** 24 + 1 is no float32: sums of long rows are taken in float64."""
    x = torch.cat([torch.full((1, 1), 2.0**24), torch.ones(1, 1000), torch.full((1, 1), -(2.0**24))], 1)
    assert row_sum(x).item() == 1000


def test_value_loss_by_hand() -> None:
    """FINDINGS 8: the factor 0.5, and the larger of both errors.

    old 1, clip 0.2, return 2: v = 1.1: 0.5 * 0.81; v = 1.5: max(0.25, (1.2 - 2)^2 = 0.64) / 2, without gradient;
    v = 0: max(4, (0.8 - 2)^2) / 2; v = 3.2: max(1.44, 0.64) / 2. The last three have left 1 +- 0.2.
    """
    values = torch.tensor([[1.1, 1.5, 0.0, 3.2]], requires_grad=True)
    result = clipped_value_loss(values, torch.ones(1, 4), torch.full((1, 4), 2.0), everything(values), 0.2)
    torch.testing.assert_close(result.loss.detach(), torch.tensor([[0.405, 0.32, 2.0, 0.72]]))
    assert result.clipped.tolist() == [[False, True, True, True]]
    result.loss.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([[-0.9, 0.0, -2.0, 1.2]]))


def test_value_loss_without_clipping() -> None:
    values = torch.tensor([[1.5]])
    result = clipped_value_loss(values, torch.tensor([[1.0]]), torch.tensor([[2.0]]), everything(values), None)
    assert result.loss.item() == 0.125 and not result.clipped.any()


def test_masked_entries_of_the_value_loss_count_nothing() -> None:
    values, garbage = torch.tensor([[NAN, 1.0]], requires_grad=True), torch.tensor([[math.inf, 0.0]])
    result = clipped_value_loss(values, garbage, garbage, torch.tensor([[False, True]]), 0.2)
    result.loss.sum().backward()
    assert result.loss.tolist() == [[0.0, 0.5]] and values.grad is not None and values.grad.tolist() == [[0.0, 1.0]]
    assert result.clipped.tolist() == [[False, True]]  # 1 is further than 0.2 from 0


def test_entropy_loss_is_minus_the_entropy() -> None:
    assert entropy_loss(torch.tensor([[0.5, NAN]]), torch.tensor([[True, False]])).tolist() == [[-0.5, 0.0]]
