import math

import numpy as np
import pytest
import torch

from roll_lite.algorithms.token_metrics import BINS, RatioHistogram, nearest_rank, ratio_percentiles

NAN = math.nan


def recorded(log_ratio: torch.Tensor, mask: torch.Tensor | None = None) -> RatioHistogram:
    histogram = RatioHistogram()
    mask = torch.ones_like(log_ratio, dtype=torch.bool) if mask is None else mask
    histogram.record(log_ratio, mask, torch.zeros(len(log_ratio), dtype=torch.int64))
    return histogram


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.05, 1.0])
@pytest.mark.parametrize("percent", [1, 25, 50, 99])
def test_quantiles_are_those_of_the_tokens_to_the_bin(scale: float, percent: int) -> None:
    log_ratio = torch.randn(8, 500, generator=torch.Generator().manual_seed(0)) * scale + scale / 3
    (ours,) = ratio_percentiles(recorded(log_ratio).collect()[0], (percent,))
    exact = float(np.quantile(log_ratio.numpy(), percent / 100, method="inverted_cdf"))
    assert math.log(ours) == pytest.approx(exact, rel=0.015, abs=2e-5)


def test_a_first_update_has_ratio_one_exactly() -> None:
    histogram = recorded(torch.zeros(2, 3))
    assert ratio_percentiles(histogram.collect()[0], (1, 50, 99)) == [1.0, 1.0, 1.0]


def test_quantiles_by_hand() -> None:
    """Three tokens of four at ratio 1/2: median 1/2, and the largest only above a share of 3/4."""
    counts = recorded(torch.tensor([[0.5, 0.5, 0.5, 2.0]]).log()).collect()[0]
    assert ratio_percentiles(counts, (50, 75, 76)) == pytest.approx([0.5, 0.5, 2.0], rel=0.01)


@pytest.mark.parametrize(
    ("percent", "count", "place"), [(50, 1, 1), (50, 4, 2), (50, 5, 3), (95, 20, 19), (95, 21, 20), (1, 3, 1), (7, 100, 7)]
)
def test_nearest_rank_by_hand(percent: int, count: int, place: int) -> None:
    """0.07 * 100 is more than 7 in floating point."""
    assert nearest_rank(percent, count) == place


def test_counts_add_up_over_micro_batches_and_ranks() -> None:
    log_ratio = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    mask = torch.rand(6, 40, generator=torch.Generator().manual_seed(2)) < 0.5
    domains = torch.tensor([0, 2, 1, 0, 2, 2])

    def counts(cuts: list[list[int]]) -> np.ndarray:
        histogram = RatioHistogram(domains=3)
        for rows in cuts:
            histogram.record(log_ratio[rows], mask[rows], domains[rows])
        return histogram.collect()

    whole = counts([[0, 1, 2, 3, 4, 5]])
    assert whole.shape == (3, BINS) and whole.dtype == np.int64
    assert whole.sum(1).tolist() == [int(mask[domains == d].sum()) for d in range(3)]
    assert (counts([[4, 0], [1, 2], [3, 5]]) == whole).all()
    assert (counts([[4, 0], [1]]) + counts([[2], [3, 5]]) == whole).all()


def test_masked_tokens_are_not_seen_and_reading_starts_anew() -> None:
    histogram = recorded(torch.tensor([[NAN, 0.1, -9.0]]), torch.tensor([[False, True, False]]))
    assert histogram.collect().sum() == 1 and histogram.collect().sum() == 0


def test_nothing_seen_has_no_quantiles() -> None:
    histogram = recorded(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool))
    assert all(math.isnan(q) for q in ratio_percentiles(histogram.collect()[0], (10, 90)))


def test_worlds_apart_and_no_numbers_stay_in_the_last_bins() -> None:
    counts = recorded(torch.tensor([[-1e9, 1e9, math.inf, NAN]])).collect()[0]
    assert counts[0] == 1 and counts[-1] == 3
