import pytest
import torch
from reference_losses import token_weights

from roll_lite.algorithms.losses import Aggregation, row_weights

MODES: tuple[Aggregation, ...] = ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant")


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 8, 1 / 8, 0.0, 1 / 8]),
        ("sequence_mean_token_mean", [1 / 3 / 1, 1 / 3 / 5, 0.0, 1 / 3 / 2]),
        ("sequence_mean_token_sum", [1 / 3, 1 / 3, 0.0, 1 / 3]),
        ("constant", [1 / 3 / 10, 1 / 3 / 10, 0.0, 1 / 3 / 10]),
    ],
)
def test_weights_by_hand(mode: Aggregation, expected: list[float]) -> None:
    """FINDINGS 8: the empty third row weighs nothing and is not counted as a row."""
    torch.testing.assert_close(row_weights(torch.tensor([1, 5, 0, 2]), mode, 10), torch.tensor(expected))


@pytest.mark.parametrize("mode", MODES)
def test_no_tokens_at_all_is_no_division_by_zero(mode: Aggregation) -> None:
    assert row_weights(torch.tensor([0, 0]), mode, 10).tolist() == [0.0, 0.0]
    assert row_weights(torch.zeros(0, dtype=torch.int64), mode, 10).shape == (0,)


@pytest.mark.parametrize("mode", MODES)
def test_aggregates_equal_plain_means(mode: Aggregation) -> None:
    losses = [[1.0], [2.0, 4.0, 0.0], [], [-3.0, 5.0]]
    weights = row_weights(torch.tensor([len(row) for row in losses]), mode, 7)
    ours = sum(float(w) * sum(row) for w, row in zip(weights, losses, strict=True))
    filled = [row for row in losses if row]
    flat = [x for row in filled for x in row]
    expected = {
        "token_mean": sum(flat) / len(flat),
        "sequence_mean_token_mean": sum(sum(row) / len(row) for row in filled) / len(filled),
        "sequence_mean_token_sum": sum(sum(row) for row in filled) / len(filled),
        "constant": sum(sum(row) / 7 for row in filled) / len(filled),
    }[mode]
    assert ours == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_random_rows(mode: Aggregation) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 6, (40,), generator=generator)
    train = torch.rand(40, generator=generator) * (torch.rand(40, generator=generator) < 0.7)
    expected = token_weights(tokens.tolist(), mode, 11, train.tolist())
    torch.testing.assert_close(row_weights(tokens, mode, 11, train), torch.tensor(expected))


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", [1 / 3, 0.0, 0.5 / 3]),
        ("sequence_mean_token_mean", [1 / 2 / 1, 0.0, 0.5 / 2 / 2]),
        ("sequence_mean_token_sum", [1 / 2, 0.0, 0.5 / 2]),
        ("constant", [1 / 2 / 4, 0.0, 0.5 / 2 / 4]),
    ],
)
def test_filtered_rows_count_neither_as_rows_nor_as_tokens(mode: Aggregation, expected: list[float]) -> None:
    """FINDINGS 6.2: the second row's 5 tokens are filtered out of the denominator too. A weight of 1/2 halves its row and no count."""
    weights = row_weights(torch.tensor([1, 5, 2]), mode, 4, torch.tensor([1.0, 0.0, 0.5]))
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("mode", MODES)
def test_cutting_a_mini_batch_over_ranks_keeps_its_weights(mode: Aggregation) -> None:
    """FINDINGS 6.3: weights are made once from all rows; averaging the means of two shares would give another loss."""
    tokens, losses = torch.tensor([1, 9, 2, 4]), torch.tensor([3.0, 1.0, -2.0, 5.0])
    whole = (row_weights(tokens, mode, 8) * tokens * losses).sum()
    parts = [(row_weights(tokens, mode, 8)[rows] * (tokens * losses)[rows]).sum() for rows in ([2], [0, 1, 3])]
    torch.testing.assert_close(sum(parts), whole)
    if mode in ("token_mean", "sequence_mean_token_mean"):
        means = [(row_weights(tokens[rows], mode) * (tokens * losses)[rows]).sum() for rows in ([2], [0, 1, 3])]
        assert abs(sum(means) / 2 - whole) > 0.1


def test_constant_is_needed_and_positive() -> None:
    for constant in (None, 0):
        with pytest.raises(ValueError, match=r"algorithm\.aggregation_constant"):
            row_weights(torch.tensor([1]), "constant", constant)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.aggregation.*'mean'.*token_mean"):
        row_weights(torch.tensor([1]), "mean")  # type: ignore[arg-type]


def test_weights_of_very_many_tokens_stay_precise() -> None:
    """2 ** 24 and more tokens do not fit float32's integers."""
    tokens = torch.full((600,), 32769)
    assert row_weights(tokens, "token_mean")[0].item() == pytest.approx(1 / (600 * 32769), rel=1e-6)
