"""Goldens worked out by hand, and the loops over lists of reference_advantages.py."""

import math
import time

import pytest
import reference_advantages as paper
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.algorithms import kernels
from roll_lite.algorithms.advantages import (
    gae,
    length_adaptive_lambda,
    mean_and_scale,
    merged_moments,
    policy_token_counts,
    reinforce,
    spread_over_tokens,
    token_rewards,
    whiten_samples,
    whiten_tokens,
)

NAN = math.nan


def ragged(rows: int, columns: int, density: float, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rewards, values, mask) in float64, NaN where masked."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, columns, generator=generator) < density
    rewards, values = (torch.randn(rows, columns, generator=generator, dtype=torch.float64).masked_fill(~mask, NAN) for _ in range(2))
    return rewards, values, mask


# ---------------------------------------------------------------- GAE


def test_gae_by_hand() -> None:
    # deltas, gamma 0.5: t2: 1 - 0.4 = 0.6; t1: 0 + 0.2 - 0.2 = 0.0; t0: 0.1 + 0.1 - 0.5 = -0.3. With gamma lam = 0.25:
    # A2 = 0.6, A1 = 0 + 0.15 = 0.15, A0 = -0.3 + 0.0375 = -0.2625.
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = gae(torch.tensor([[0.1, 0.0, 1.0]]), torch.tensor([[0.5, 0.2, 0.4]]), mask, 0.5, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[-0.2625, 0.15, 0.6]]))
    torch.testing.assert_close(returns, torch.tensor([[0.2375, 0.35, 1.0]]))


def test_gae_of_a_truncated_row_goes_on_with_the_value_of_its_end_by_hand() -> None:
    # delta = 0 + 0.5 * 0.8 - 0.3 = 0.1 for the row that was cut, -0.3 for the one that ended; padding after both.
    mask = torch.tensor([[True, False], [True, False]])
    values = torch.tensor([[0.3, NAN], [0.3, NAN]])
    advantages, returns = gae(torch.zeros(2, 2), values, mask, 0.5, 0.9, bootstrap=torch.tensor([0.8, 0.0]))
    torch.testing.assert_close(advantages, torch.tensor([[0.1, 0.0], [-0.3, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.4, 0.0], [0.0, 0.0]]))


def test_gae_does_not_leak_padding_values() -> None:
    """FINDINGS 6.1: with garbage where the mask is 0 the last advantage is 1 - 0.4 = 0.6, not 1.09 or NaN."""
    mask = torch.tensor([[False, False, True, True, False, False]])
    values = torch.tensor([[9.0, NAN, 0.3, 0.4, 0.5, NAN]])
    rewards = torch.tensor([[NAN, 7.0, 0.0, 1.0, math.inf, 3.0]])
    advantages, returns = gae(rewards, values, mask, 1.0, 0.95)
    torch.testing.assert_close(advantages, torch.tensor([[0.0, 0.0, 0.1 + 0.95 * 0.6, 0.6, 0.0, 0.0]]))
    torch.testing.assert_close(returns, torch.tensor([[0.0, 0.0, 0.97, 1.0, 0.0, 0.0]]))


def test_gae_skips_gaps() -> None:
    """FINDINGS 6.1 and 8: over a tool's output, GAE equals GAE on the policy tokens alone; zeroing it there is wrong as well.

    By hand, gamma 1, lam 0.5, policy tokens 0.5 | tool | 0.2, reward 1 at the end: A1 = 0.8, A0 = (0.2 - 0.5) + 0.5 * 0.8 = 0.1.
    """
    mask = torch.tensor([[True, False, False, True]])
    advantages, _ = gae(torch.tensor([[0.0, NAN, NAN, 1.0]]), torch.tensor([[0.5, NAN, NAN, 0.2]]), mask, 1.0, 0.5)
    torch.testing.assert_close(advantages, torch.tensor([[0.1, 0.0, 0.0, 0.8]]))


def test_discount_over_turns_by_hand() -> None:
    """Two turns of two tokens, rewards 1 and 2 at their ends, gamma 0.5 at the turn's boundary only, lam 0.5 at every token. Values
    0.5, 0.2 | 0.4, 0.1: deltas -0.3, 1 + 0.5 * 0.4 - 0.2 = 1 | 0.1 - 0.4 = -0.3, 1.9; A3 = 1.9, A2 = -0.3 + 0.5 * 1.9 = 0.65,
    A1 = 1 + 0.25 * 0.65 = 1.1625, A0 = -0.3 + 0.5 * 1.1625 = 0.28125."""
    mask = torch.tensor([[False, True, True, False, False, True, True, False]])
    rewards = torch.tensor([[NAN, 0.0, 1.0, NAN, NAN, 0.0, 2.0, NAN]])
    values = torch.tensor([[NAN, 0.5, 0.2, NAN, NAN, 0.4, 0.1, NAN]])
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5, per_turn=True)
    torch.testing.assert_close(advantages[mask], torch.tensor([0.28125, 1.1625, 0.65, 1.9]))
    torch.testing.assert_close(returns[mask], torch.tensor([0.78125, 1.3625, 1.05, 2.0]))
    torch.testing.assert_close(reinforce(rewards, mask, 0.5, per_turn=True)[mask], torch.tensor([2.0, 2.0, 2.0, 2.0]))
    torch.testing.assert_close(reinforce(rewards, mask, 0.5)[mask], torch.tensor([0.75, 1.5, 1.0, 2.0]))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 4),
    columns=st.integers(0, 60),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.95, 1.0]),
    lam_critic=st.sampled_from([None, 0.0, 0.5, 1.0]),
    bootstrapped=st.booleans(),
    density=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 99),
)
def test_gae_equals_the_papers_sums(
    rows: int, columns: int, gamma: float, lam: float, lam_critic: float | None, bootstrapped: bool, density: float, seed: int
) -> None:
    rewards, values, mask = ragged(rows, columns, density, seed)
    ends = torch.linspace(-1, 1, rows, dtype=torch.float64) if bootstrapped else None
    advantages, returns = gae(rewards, values, mask, gamma, lam, lam_critic, ends)
    assert (advantages[~mask] == 0).all() and (returns[~mask] == 0).all()
    for row in range(rows):
        kept = mask[row]
        r, v, end = rewards[row][kept].tolist(), values[row][kept].tolist(), 0.0 if ends is None else float(ends[row])
        expected = torch.tensor(paper.gae(r, v, gamma, lam, end), dtype=torch.float64)
        targets = torch.tensor(paper.lambda_returns(r, v, gamma, lam if lam_critic is None else lam_critic, end), dtype=torch.float64)
        torch.testing.assert_close(advantages[row][kept], expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(returns[row][kept], targets, rtol=1e-10, atol=1e-10)


def test_length_adaptive_lambda_of_each_row() -> None:
    # alpha 0.05: 100 tokens: 1 - 1/5 = 0.8; 20 tokens: 0; 10 tokens: below 0, so 0; none: 0; 1000 tokens: 0.98.
    lam = length_adaptive_lambda(torch.tensor([100, 20, 10, 0, 1000]), 0.05)
    torch.testing.assert_close(lam, torch.tensor([0.8, 0.0, 0.0, 0.0, 0.98], dtype=torch.float64))
    rewards, values, mask = ragged(3, 50, 0.7, 0)
    mask[2] = False
    lam = length_adaptive_lambda(mask.sum(1), 0.3)
    advantages, returns = gae(rewards, values, mask, 1.0, lam, lam_critic=1.0)
    for row in range(2):
        r, v = rewards[row][mask[row]].tolist(), values[row][mask[row]].tolist()
        expected = paper.gae(r, v, 1.0, paper.vapo_lambda(len(r), 0.3))
        torch.testing.assert_close(advantages[row][mask[row]], torch.tensor(expected, dtype=torch.float64))
        torch.testing.assert_close(returns[row][mask[row]], torch.tensor(paper.discounted_returns(r, 1.0), dtype=torch.float64))
    assert (advantages[2] == 0).all()


def test_decoupled_lambdas_with_lambda_one_make_the_critic_learn_plain_returns() -> None:
    """VC-PPO: whatever lambda the actor has, the critic's targets are the undiscounted sums of rewards."""
    rewards, values, mask = ragged(3, 40, 1.0, 1)
    _, returns = gae(rewards, values, mask, 1.0, 0.3, lam_critic=1.0)
    torch.testing.assert_close(returns, rewards.flip(1).cumsum(1).flip(1))


def test_token_level_estimators_ignore_padding_and_row_order() -> None:
    rewards, values, mask = (x.float() if x.dtype != torch.bool else x for x in ragged(7, 130, 0.7, 5))
    mask[2] = False
    order = torch.tensor([3, 1, 6, 0, 2, 5, 4])
    wide = [torch.nn.functional.pad(x, (3, 50), value=fill) for x, fill in ((rewards, NAN), (values, NAN), (mask, False))]
    for results, reordered, padded in (
        (gae(rewards, values, mask, 0.99, 0.9), gae(rewards[order], values[order], mask[order], 0.99, 0.9), gae(*wide, 0.99, 0.9)),
        ((reinforce(rewards, mask, 0.9),), (reinforce(rewards[order], mask[order], 0.9),), (reinforce(wide[0], wide[2], 0.9),)),
    ):
        for result, other, padded_result in zip(results, reordered, padded, strict=True):
            assert torch.equal(other, result[order])
            assert torch.equal(padded_result[:, 3:133], result)


def test_gae_of_long_rows_stays_exact_in_float32() -> None:
    """Undiscounted, 32,768 tokens: the return of every token is the sum of the rewards from there on."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(2, 32768, generator=generator)
    values = torch.randn(2, 32768, generator=generator)
    _, returns = gae(rewards, values, torch.ones(2, 32768, dtype=torch.bool), 1.0, 1.0)
    exact = rewards.double().flip(1).cumsum(1).flip(1)
    torch.testing.assert_close(returns, exact.float(), rtol=1e-6, atol=1e-5)
    assert exact.abs().max() > 50


def test_gae_is_fast() -> None:
    """FINDINGS 7: a Python loop over the tokens took 9.1 s at 512 x 32k; an eighth of the rows here, limit a tenth of its share.

    CPU time of one thread, so that a busy machine does not fail it.
    """
    mask = torch.arange(32768)[None, :] < torch.randint(8192, 32768, (64, 1))
    rewards, values = torch.randn(64, 32768), torch.randn(64, 32768)
    threads, best = torch.get_num_threads(), math.inf
    torch.set_num_threads(1)
    try:
        for _ in range(4):
            start = time.thread_time()
            gae(rewards, values, mask, 1.0, 0.95)
            best = min(best, time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    assert best < 9.1 / 8 / 10


# ---------------------------------------------------------------- discounted returns


def test_reinforce_by_hand() -> None:
    mask = torch.tensor([[True, True, True], [False, True, False]])
    rewards = torch.tensor([[1.0, 2.0, 4.0], [NAN, 3.0, NAN]])
    torch.testing.assert_close(reinforce(rewards, mask, 0.5), torch.tensor([[3.0, 4.0, 4.0], [0.0, 3.0, 0.0]]))
    torch.testing.assert_close(reinforce(rewards, mask, 0.0), torch.tensor([[1.0, 2.0, 4.0], [0.0, 3.0, 0.0]]))
    shifted = reinforce(rewards, mask, 0.5, last_token_reward=torch.tensor([-4.0, 1.0]))
    torch.testing.assert_close(shifted, torch.tensor([[2.0, 2.0, 0.0], [0.0, 4.0, 0.0]]))


def test_a_reward_at_the_end_is_that_of_the_last_policy_token() -> None:
    """Beside token rewards, without any, over padding and gaps: the same as writing it into the tensor, for a row without policy tokens
    nothing."""
    rewards, values, mask = ragged(6, 20, 0.6, 8)
    mask[2], mask[:, 17:] = False, False
    end = torch.linspace(-1, 1, 6, dtype=torch.float64)
    written = token_rewards(end, mask, rewards)
    nothing = torch.zeros_like(rewards)
    for some, whole in ((rewards, written), (None, token_rewards(end, mask))):
        for mine, expected in zip(
            gae(some, values, mask, 0.9, 0.8, last_token_reward=end), gae(whole, values, mask, 0.9, 0.8), strict=True
        ):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(reinforce(rewards, mask, 0.9, end), reinforce(written, mask, 0.9), rtol=1e-12, atol=1e-12)
    assert torch.equal(reinforce(None, mask, 0.9, end), reinforce(token_rewards(end, mask), mask, 0.9).float())
    assert torch.equal(gae(None, values, mask, 0.9, 0.8)[0], gae(nothing, values, mask, 0.9, 0.8)[0])


def test_returns_carry_across_a_gap() -> None:
    """FINDINGS 8: a tool's output neither resets nor discounts what comes after it."""
    mask = torch.tensor([[True, False, False, True, False]])
    assert reinforce(torch.tensor([[0.0, 5.0, NAN, 1.0, NAN]]), mask, 0.5).tolist() == [[0.5, 0.0, 0.0, 1.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 4), columns=st.integers(0, 60), gamma=st.sampled_from([0.0, 0.9, 1.0]),
    density=st.sampled_from([0.0, 0.5, 1.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_reinforce_equals_the_definition(rows: int, columns: int, gamma: float, density: float, seed: int) -> None:
    rewards, _, mask = ragged(rows, columns, density, seed)
    returns = reinforce(rewards, mask, gamma)
    assert (returns[~mask] == 0).all()
    for row in range(rows):
        expected = paper.discounted_returns(rewards[row][mask[row]].tolist(), gamma)
        torch.testing.assert_close(returns[row][mask[row]], torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-10)


def test_spread_over_tokens() -> None:
    mask = torch.tensor([[False, True, True], [True, False, False], [False, False, False]])
    spread = spread_over_tokens(torch.tensor([2.0, -1.0, NAN]), mask, torch.float32)
    assert spread.tolist() == [[0.0, 2.0, 2.0], [-1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert spread_over_tokens(torch.zeros(3, dtype=torch.float64), mask, torch.float32).dtype == torch.float32


# ---------------------------------------------------------------- whitening


def alone(moments: torch.Tensor) -> tuple[float, float]:
    """Whitening over these rows, as if they were the whole global batch."""
    return mean_and_scale(merged_moments(moments))


def test_whiten_by_hand_over_two_ranks() -> None:
    # Unmasked 1, 2 | 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 3 = 14/3.
    first, second = torch.tensor([[1.0, 2.0, NAN]]), torch.tensor([[3.0, NAN, 6.0]])
    masks = torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]])
    rows = [merged_moments(kernels.row_moments(x, mask)) for x, mask in ((first, masks[0]), (second, masks[1]))]
    mean, scale = mean_and_scale(merged_moments(torch.stack([*rows, torch.zeros(3, dtype=torch.float64)])))
    root = math.sqrt(14 / 3)
    assert mean == 3.0 and scale == pytest.approx(1 / root)
    for x, mask, expected in ((first, masks[0], [-2 / root, -1 / root, 0.0]), (second, masks[1], [0.0, 0.0, 3 / root])):
        torch.testing.assert_close(whiten_tokens(x, mask, lambda _: (mean, scale)), torch.tensor([expected]))
        assert whiten_tokens(x.double(), mask, lambda _: (mean, scale)).dtype == torch.float32


def test_whiten_samples_counts_every_policy_token() -> None:
    # 1 three times, 5 once, 7 of a row without tokens: mean 2, variance (3 * 1 + 9) / 3 = 4.
    whitened = whiten_samples(torch.tensor([1.0, 5.0, 7.0]), torch.tensor([3, 1, 0]), alone)
    torch.testing.assert_close(whitened[:2], torch.tensor([-0.5, 1.5], dtype=torch.float64))


def test_whitening_constants_or_nothing_gives_zeros() -> None:
    for value in (0.0, 0.6, 1e6):
        x, mask = torch.full((4, 5), value), torch.ones(4, 5, dtype=torch.bool)
        assert whiten_tokens(x, mask, alone).abs().max() < 1e-5
        assert whiten_samples(x[:, 0], mask.sum(1), alone).abs().max() < 1e-5
        assert reinforce(None, mask, 1.0, last_token_reward=x[:, 0], whitening=alone).abs().max() < 1e-5
    for shape in ((2, 3), (0, 1), (2, 0)):
        x, empty = torch.full(shape, NAN), torch.zeros(shape, dtype=torch.bool)
        assert (whiten_tokens(x, empty, alone) == 0).all()
        assert (reinforce(x, empty, 1.0, whitening=alone) == 0).all() and (gae(x, x, empty, 1.0, 1.0, whitening=alone)[0] == 0).all()


def test_moments_survive_a_large_offset() -> None:
    """0 to 9 over and over, variance 8.25 and a little: of squares of 1e9 float64 keeps no more than the hundreds."""
    x = (torch.arange(1000, dtype=torch.float64) % 10 + 1e9).view(10, 100)
    ones = torch.ones_like(x, dtype=torch.bool)
    expected = (1e9 + 4.5, pytest.approx((8.25 * 1000 / 999) ** -0.5, rel=1e-8))
    assert alone(kernels.row_moments(x, ones)) == expected
    halves = [merged_moments(kernels.row_moments(part, torch.ones_like(part, dtype=torch.bool))) for part in (x[:3], x[3:])]
    assert alone(torch.stack(halves)) == expected
    seen = []
    reinforce(x, ones, 0.0, whitening=lambda moments: seen.append(alone(moments)) or seen[0])
    assert seen == [expected]


@pytest.mark.parametrize("offset", [0.0, 1e9])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_whitened_recurrences_are_whitened_tensors_of_them(gamma: float, offset: float) -> None:
    """In float64, whose tensors the recurrences do without; whatever the offset, and with a row of one token and one of none."""
    rewards, values, mask = ragged(9, 60, 0.5, 3)
    mask[2], mask[4] = False, mask[4] & (mask[4].cumsum(0) == 1)
    values = values + offset
    end = torch.linspace(-2, 2, 9, dtype=torch.float64) + offset
    advantages, returns = gae(rewards, values, mask, gamma, 0.9, 1.0, end / 2, end)
    whitened, same_returns = gae(rewards, values, mask, gamma, 0.9, 1.0, end / 2, end, alone)
    torch.testing.assert_close(whitened.float(), whiten_tokens(advantages, mask, alone), rtol=1e-6, atol=1e-6)
    assert torch.equal(returns, same_returns)
    plain = reinforce(rewards, mask, gamma, end)
    torch.testing.assert_close(reinforce(rewards, mask, gamma, end, alone).float(), whiten_tokens(plain, mask, alone), rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- how the loops run


def test_results_do_not_depend_on_the_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "ENTRIES_PER_THREAD", 1)
    rewards, values, mask = (x.float() if x.dtype != torch.bool else x for x in ragged(37, 211, 0.6, 9))
    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        row_sums = kernels.row_moments(rewards, mask)
        outcome = [*gae(rewards, values, mask, 0.9, 0.8), reinforce(rewards, mask, 0.9), row_sums, policy_token_counts(mask)]
        outcome += [whiten_tokens(rewards, mask, alone), spread_over_tokens(values[:, 0].nan_to_num(), mask, torch.float32)]
        outcome += [*gae(rewards, values, mask, 0.9, 0.8, whitening=alone), reinforce(rewards, mask, 0.9, whitening=alone)]
        results.append(outcome)
    for other in results[1:]:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(results[0], other, strict=True))


def test_row_sums_and_counts() -> None:
    x = torch.tensor([[1.0, NAN, 2.0], [NAN, NAN, NAN]])
    mask = torch.tensor([[True, False, True], [False, False, False]])
    assert kernels.row_moments(x, mask).tolist() == [[2.0, 3.0, 0.5], [0.0, 0.0, 0.0]]
    assert policy_token_counts(mask).tolist() == [2, 0]


def test_tensors_that_are_views_or_carry_a_graph_are_read_right() -> None:
    rewards, values, mask = ragged(5, 8, 0.7, 2)
    expected, _ = gae(rewards, values, mask, 0.9, 0.9)
    strided, _ = gae(rewards.t().contiguous().t(), values.clone().requires_grad_(), mask.t().contiguous().t(), 0.9, 0.9)
    assert torch.equal(strided, expected)


def test_shapes_that_do_not_fit_are_refused_before_compiled_code_reads_past_an_end() -> None:
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(AssertionError, match=r"\[2, 4\] beside a mask \[2, 3\]"):
        reinforce(torch.zeros(2, 4), mask, 1.0)
    with pytest.raises(AssertionError, match=r"\[3\] beside a mask \[2, 3\]"):
        spread_over_tokens(torch.zeros(3), mask, torch.float32)
    with pytest.raises(AssertionError, match=r"expected bool"):
        reinforce(torch.zeros(2, 3), torch.ones(2, 3), 1.0)


def test_tensors_outside_host_memory_are_refused() -> None:
    with pytest.raises(ValueError, match=r"host memory.*\.cpu\(\)"):
        reinforce(torch.zeros(1, 2, device="meta"), torch.ones(1, 2, dtype=torch.bool), 1.0)


def test_kernels_compile_where_no_cache_folder_can_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    real = kernels.njit

    def without_cache(*, nogil: bool, cache: bool = False) -> object:
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return real(nogil=nogil)

    monkeypatch.setattr(kernels, "njit", without_cache)
    x, out = torch.tensor([[1.0, 3.0], [9.0, 2.0]]), torch.zeros(2, 3, dtype=torch.float64)
    kernels.compiled(kernels._row_moments.py_func)(0, 2, x.numpy(), torch.tensor([[True, True], [False, True]]).numpy(), out.numpy())
    assert out.tolist() == [[2, 4, 2], [1, 2, 0]]
