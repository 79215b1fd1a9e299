"""From columns to advantages: every estimator of the configuration, on one rank, on several, and on ranks without rows."""

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import reference_advantages as paper
import torch

from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.data.microbatch import MicroBatch
from roll_lite.workers.credit import Credit, Gather, assign_credit, credit_metrics

NAN = math.nan


def alone(rows: torch.Tensor) -> list[torch.Tensor]:
    """The exchange of a rank that has the whole batch."""
    return [rows]


ESTIMATORS: list[dict[str, Any]] = [
    {"name": "gae"},
    {"name": "gae", "lam_critic": 1.0, "length_adaptive": 0.5, "bootstrap_truncated": True},
    {"name": "grpo"},
    {"name": "grpo", "normalize_std": False},
    {"name": "rloo"},
    {"name": "gae", "gamma": 0.9, "discount": "turn"},
    {"name": "reinforce", "gamma": 0.9},
    {"name": "reinforce", "gamma": 0.9, "discount": "turn"},
    {"name": "reinforce_plus_plus", "gamma": 0.9},
    {"name": "reinforce_plus_plus", "gamma": 0.9, "baseline": "group"},
    {"name": "remax"},
    {"name": "opo"},
    {"name": "gpg"},
    {"name": "gigpo"},
    {"name": "gigpo", "gamma": 0.5, "step_weight": 2.0, "normalize_std": False},
    {"name": "custom", "function": "credit_functions.above_best_of_batch", "args": {"scale": 0.5}},
]


def algorithm(advantage: dict[str, Any], whiten: bool = False, kl: str = "k1") -> AlgorithmConfig:
    return AlgorithmConfig.model_validate({"advantage": advantage, "whiten_advantages": whiten, "kl_in_reward": {"estimator": kl}})


def make_rows(rewards: list[float], masks: list[list[int]], groups: list[int] | None = None, **columns: torch.Tensor) -> MicroBatch:
    count = len(rewards)
    defaults = {
        "reward": torch.tensor(rewards),
        "group": torch.tensor(groups if groups is not None else [0] * count, dtype=torch.int64),
        "train_weight": torch.ones(count),
        "truncated": torch.zeros(count, dtype=torch.bool),
    }
    return MicroBatch(defaults | columns, torch.tensor(masks, dtype=torch.bool))


def many_rows(count: int = 24, width: int = 17) -> MicroBatch:
    """Uneven groups spread over the batch, gaps, a row without policy tokens, NaN in every masked place."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(count, width, generator=generator) < torch.rand(count, 1, generator=generator)
    mask[5] = False
    tokens = {
        name: torch.randn(count, width, generator=generator).masked_fill(~mask, NAN)
        for name in ("values", "old_log_probs", "ref_log_probs")
    }
    distributions = {
        name: torch.randn(count, width, 6, generator=generator).log_softmax(-1).masked_fill(~mask[:, :, None], NAN)
        for name in ("old_distribution", "ref_distribution")
    }
    rows = {
        "reward": torch.randn(count, generator=generator),
        "group": torch.randint(0, 6, (count,), generator=generator) * 1000,
        "train_weight": (torch.rand(count, generator=generator) < 0.8).float(),
        "truncated": torch.rand(count, generator=generator) < 0.3,
        "final_value": torch.randn(count, generator=generator),
        "baseline_score": torch.randn(count, generator=generator),
        "input_ids": torch.randint(0, 2, (count, width + 1), generator=generator),
        "cut": torch.rand(count, generator=generator) < 0.3,
    }
    return MicroBatch(rows | tokens | distributions, mask)


def part(rows: MicroBatch, start: int, stop: int) -> MicroBatch:
    return MicroBatch({name: column[start:stop] for name, column in rows.columns.items()}, rows.mask[start:stop])


def empty_rows() -> MicroBatch:
    """What a rank without rows has: row columns [0] and token columns [0, 1], all of them float; no distributions."""
    row_columns = ("reward", "group", "train_weight", "truncated", "cut", "final_value", "baseline_score")
    token_columns = ("values", "old_log_probs", "ref_log_probs")
    columns = {name: torch.zeros(0) for name in row_columns} | {name: torch.zeros(0, 1) for name in token_columns}
    columns["input_ids"] = torch.zeros(0, 2, dtype=torch.int64)
    return MicroBatch(columns, torch.zeros(0, 1, dtype=torch.bool))


def on_ranks(parts: list[MicroBatch], work: Callable[[MicroBatch, int, Gather], Credit]) -> list[Credit]:
    """Every part on a thread of its own; an exchange that some rank leaves out is a broken barrier."""
    barrier = threading.Barrier(len(parts), timeout=30)
    board: list[Any] = [None] * len(parts)

    def exchange(rank: int) -> Gather:
        def gather(x: torch.Tensor) -> list[torch.Tensor]:
            board[rank] = x
            barrier.wait()
            everyone = list(board)
            barrier.wait()
            return everyone

        return gather

    with ThreadPoolExecutor(len(parts)) as pool:
        return [one.result() for one in [pool.submit(work, mine, rank, exchange(rank)) for rank, mine in enumerate(parts)]]


def test_gpg_counts_spread_before_kl_and_samples_that_train() -> None:
    """Ranks of two rows: groups 0 and 1 right and wrong, 2 all right. One sample of group 1 and one of group 2 are masked, so that 3 of 4
    that train have spread; KL takes 0.1 from every other sample. 0.5 * 4 / 3 without it, (0.5 - 0.05) * 4 / 3 with it."""
    rows = make_rows(
        [1.0, 0.0, 1.0, 0.0, 1.0, 1.0], [[1]] * 6, [0, 0, 1, 1, 2, 2], train_weight=torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0])
    )
    kl = torch.tensor([[1.0], [0.0]] * 3)
    rows.columns.update(old_log_probs=torch.zeros(6, 1), ref_log_probs=-kl)
    config = algorithm({"name": "gpg"})
    for coef, expected in ((0.0, [0.5, -0.5] * 2 + [0.0, 0.0]), (0.1, [0.45, -0.45] * 2 + [-0.05, 0.05])):
        parts = [part(rows, 0, 2), part(rows, 2, 4), part(rows, 4, 6)]
        credits = on_ranks(parts, partial(lambda coef, mine, rank, gather: assign_credit(mine, rank, config, coef, gather), coef))
        found = torch.cat([credit.advantages for credit in credits]).flatten()
        torch.testing.assert_close(found, torch.tensor(expected) * 4 / 3)


@pytest.mark.parametrize("kl", [None, "k3", "full"])
@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("advantage", ESTIMATORS, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_how_rows_are_split_over_ranks_changes_nothing(advantage: dict[str, Any], whiten: bool, kl: str | None) -> None:
    """Ranks without rows take part in every exchange. Masked NaNs show nowhere."""
    rows, config, coef = many_rows(), algorithm(advantage, whiten, kl or "k1"), 0.1 if kl else 0.0
    together = assign_credit(rows, 0, config, coef, alone)
    parts = [part(rows, 0, 5), empty_rows(), part(rows, 5, 6), part(rows, 6, 24), empty_rows()]
    credits = on_ranks(parts, lambda mine, rank, exchange: assign_credit(mine, rank, config, coef, exchange))
    for name in ("advantages", "returns", "kl", "rewards_per_row"):
        expected = getattr(together, name)
        found = [getattr(credit, name) for credit in credits]
        if expected is None:
            assert all(one is None for one in found)
            continue
        assert found[1].shape[0] == found[4].shape[0] == 0 and found[1].dtype == expected.dtype
        joined = torch.cat([one for index, one in enumerate(found) if index not in (1, 4)])
        torch.testing.assert_close(joined, expected, rtol=1e-5, atol=1e-6)
        if expected.dim() == 2:
            assert expected.dtype == torch.float32 and (expected[~rows.mask] == 0).all() and torch.isfinite(expected).all()
    assert (together.advantages[rows.mask] != 0).any()


def test_rewards_of_turns_are_paid_on_their_last_tokens() -> None:
    """Two turns with 0.5 and 0.25, a penalty of 0.25: 0.5 at the first's end, 0.25 - 0.25 = 0 at the second's. Gamma 0.5 per token."""
    paid = torch.tensor([[0.0, 0.5, NAN, 0.0, 0.25]])
    rows = make_rows([0.5], [[1, 1, 0, 1, 1]], turn_rewards=paid)
    found = assign_credit(rows, 0, algorithm({"name": "reinforce", "gamma": 0.5}), 0.0, alone)
    torch.testing.assert_close(found.advantages, torch.tensor([[0.25, 0.5, 0.0, 0.0, 0.0]]))
    rows.columns.update(values=torch.zeros(1, 5))
    found = assign_credit(rows, 0, algorithm({"name": "gae", "gamma": 0.5, "lam": 1.0}), 0.0, alone)
    torch.testing.assert_close(found.advantages, torch.tensor([[0.25, 0.5, 0.0, 0.0, 0.0]]))
    assert found.rewards_per_row.tolist() == [0.5]


@pytest.mark.parametrize("name", ["reinforce", "gae", "reinforce_plus_plus"])
def test_rewards_of_turns_are_discounted_over_turns(name: str) -> None:
    """Turns with 1 and 2, gamma 0.5: 1 + 0.5 * 2 = 2 for each token of the first, 2 for those of the second, 3 for a third row's only turn.
    Whitening, which reinforce_plus_plus always does: mean 2.2 of five tokens, variance (4 * 0.04 + 0.64) / 4 = 0.2."""
    paid = torch.tensor([[0.0, 1.0, NAN, 0.0, 2.0], [3.0, NAN, NAN, NAN, NAN]])
    rows = make_rows([3.0, 3.0], [[1, 1, 0, 1, 1], [1, 0, 0, 0, 0]], turn_rewards=paid, values=torch.zeros(2, 5))
    settings = {"name": name, "gamma": 0.5, "discount": "turn", **({"lam": 1.0} if name == "gae" else {})}
    expected = torch.tensor([2.0, 2.0, 2.0, 2.0, 3.0])
    if name == "reinforce_plus_plus":
        expected = (expected - 2.2) / 0.2**0.5
    found = assign_credit(rows, 0, algorithm(settings), 0.0, alone).advantages
    torch.testing.assert_close(found[rows.mask], expected)


def test_turns_that_answer_the_same_text_are_compared() -> None:
    """Three samples of one group, prompt 7: turns of one token, the environment answers 8 or 9. Rewards of turns (0, 1), (1, 0), (0, 0);
    gamma 0.5: returns (0.5, 1), (1, 0), (0, 0). First turns: mean 0.5. Second turns: the first two answer 8, mean 0.5; one answers 9.
    Episodes: 1, 1, 0, mean 2/3. Step weight 3."""
    ids = torch.tensor([[7, 1, 8, 2], [7, 3, 8, 4], [7, 5, 9, 6]])
    paid = torch.tensor([[0.0, 0.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rows = make_rows([1.0, 1.0, 0.0], [[1, 0, 1]] * 3, [4] * 3, input_ids=ids, turn_rewards=paid)
    config = algorithm({"name": "gigpo", "gamma": 0.5, "step_weight": 3.0, "normalize_std": False})
    found = assign_credit(rows, 0, config, 0.0, alone).advantages
    third = 1 / 3
    expected = [[third + 0.0, 0.0, third + 1.5], [third + 1.5, 0.0, third - 1.5], [-2 * third - 1.5, 0.0, -2 * third]]
    torch.testing.assert_close(found, torch.tensor(expected))


BY_SAMPLE = [config for config in ESTIMATORS if config["name"] in ("grpo", "rloo", "remax", "opo", "gpg")]


@pytest.mark.parametrize("kl", [None, "k3"])
@pytest.mark.parametrize("advantage", BY_SAMPLE, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_a_sample_in_several_rows_gets_the_advantage_of_the_sample_in_one(advantage: dict[str, Any], kl: str | None) -> None:
    """An agent's sample: each row trains some of its tokens. The rows of a sample are on different ranks."""
    whole, config, coef = many_rows(), algorithm(advantage, kl=kl or "k1"), 0.1 if kl else 0.0
    count, width = whole.mask.shape
    whole.columns.update(index=torch.arange(count), sample=torch.arange(count), domain_number=torch.zeros(count))
    whole.columns.update(rollout_log_probs=whole.columns["old_log_probs"])
    pieces = torch.randint(0, 3, (count, width), generator=torch.Generator().manual_seed(1))
    owners, masks, branches = [], [], []
    for owner in range(count):
        own = [whole.mask[owner] & (pieces[owner] == piece) for piece in range(3)]
        own = [mask for mask in own if mask.any()] or [whole.mask[owner]]
        owners += [owner] * len(own)
        masks += own
        branches += range(len(own))
    order = torch.tensor(sorted(range(len(owners)), key=lambda row: (branches[row], owners[row])))  # first rows first
    columns = {name: column[torch.tensor(owners)][order] for name, column in whole.columns.items()}
    columns["branch"] = torch.tensor(branches)[order]
    rows = MicroBatch(columns, torch.stack(masks)[order])

    expected = assign_credit(whole, 0, config, coef, alone)
    half = len(owners) // 2
    parts = [part(rows, 0, half), part(rows, half, len(owners))]
    found = torch.cat([one.advantages for one in on_ranks(parts, lambda mine, rank, ex: assign_credit(mine, rank, config, coef, ex))])
    assert len(owners) > count and int((columns["branch"] > 0).sum()) == len(owners) - count
    torch.testing.assert_close(found, expected.advantages[torch.tensor(owners)[order]].masked_fill(~rows.mask, 0.0), rtol=1e-5, atol=1e-6)
    together = assign_credit(rows, 0, config, coef, alone)
    assert float(together.rewards_per_row.sum()) == pytest.approx(float(expected.rewards_per_row.sum()))
    metrics = [credit_metrics(one, own, "current", 1)[0] for one, own in ((whole, expected), (rows, together))]
    assert metrics[0]["credit/tokens#0"] == metrics[1]["credit/tokens#0"] and metrics[0]["credit/rows#0"] == metrics[1]["credit/rows#0"]
    assert metrics[0]["credit/reward#0"] == pytest.approx(metrics[1]["credit/reward#0"])


def in_branches(rewards: list[float], masks: list[list[int]], index: list[int], branch: list[int], **columns: torch.Tensor) -> MicroBatch:
    return make_rows(rewards, masks, index=torch.tensor(index), branch=torch.tensor(branch), **columns)


def test_each_row_of_a_sample_ends_with_its_reward_by_hand() -> None:
    """Sample 0, reward 1, has rows of 2 and 1 tokens, sample 1, reward 0.5, has one of 2. Gamma 0.5."""
    rows = in_branches([1.0, 1.0, 0.5], [[1, 1], [1, 0], [1, 1]], [0, 0, 1], [0, 1, 0])
    credit = assign_credit(rows, 0, algorithm({"name": "reinforce", "gamma": 0.5}), 0.0, alone)
    assert credit.advantages.tolist() == [[0.5, 1.0], [1.0, 0.0], [0.25, 0.5]]
    assert credit.rewards_per_row.tolist() == [1.0, 0.0, 0.5]


WHITENED = ["reinforce", "reinforce_plus_plus", "reinforce_plus_plus-group", "grpo", "rloo", "opo", "gpg"]


@pytest.mark.parametrize("name", WHITENED)
def test_branches_weigh_no_more_in_baselines_and_whitening_by_hand(name: str) -> None:
    """Samples 0 and 1 with rewards 1 and 0; sample 0 has rows of 2 and 1 tokens, sample 1 one token. Baselines take samples: the group's
    mean is 0.5, and of three rows it would be 2/3. Every estimator gives the tokens a, a, a, b with a > b. Whitening takes tokens: with
    a = 0.5, b = -0.5 the mean is 0.25, the variance (3 * 0.0625 + 0.5625) / 3 = 0.25: 0.5, 0.5, 0.5, -1.5."""
    name, _, baseline = name.partition("-")
    config = algorithm({"name": name} | ({"baseline": baseline} if baseline else {}), whiten=True)
    rows = in_branches([1.0, 1.0, 0.0], [[1, 1], [1, 0], [1, 0]], [0, 0, 1], [0, 1, 0])
    for parts in ([rows], [part(rows, 0, 1), part(rows, 1, 3)]):
        found = on_ranks(parts, lambda mine, rank, gather: assign_credit(mine, rank, config, 0.0, gather))
        advantages = torch.cat([credit.advantages for credit in found])
        torch.testing.assert_close(advantages, torch.tensor([[0.5, 0.5], [0.5, 0.0], [-1.5, 0.0]]), rtol=1e-5, atol=1e-5)


def test_reinforce_plus_plus_takes_the_mean_of_samples_by_hand() -> None:
    """Two groups, so that the baseline shows after whitening. Group 0: sample 0 has reward 1 and two rows, sample 1 has 0: mean 0.5.
    Group 1: rewards 3, 1: mean 2. Returns 0.5, 0.5, -0.5, 1, -1: mean 0.1, variance (2 * 0.16 + 0.36 + 0.81 + 1.21) / 4 = 0.675."""
    rows = in_branches([1.0, 1.0, 0.0, 3.0, 1.0], [[1]] * 5, [0, 0, 1, 0, 1], [0, 1, 0, 0, 0], group=torch.tensor([0, 0, 0, 1, 1]))
    found = assign_credit(rows, 0, algorithm({"name": "reinforce_plus_plus", "baseline": "group"}), 0.0, alone).advantages
    expected = (torch.tensor([0.5, 0.5, -0.5, 1.0, -1.0]) - 0.1) / 0.675**0.5
    torch.testing.assert_close(found.flatten(), expected, rtol=1e-5, atol=1e-5)


def test_gigpo_compares_samples_once_and_each_response_once_by_hand() -> None:
    """Prompt 7, responses of one token, the environment answers 8. Sample 0, reward 1: a row of two responses; a retry of the second, whose
    row has 7, 1, 8 as context; a retry of the first. Sample 1, reward 0: two responses. Episodes: mean 0.5 of two samples, so 0.5 and
    -0.5. Gamma 0.5: returns (0.5, 1), (1), (1), (0, 0). Text 7 is answered three times, with 0.5, 1 and 0: mean 0.5. Text 8 twice, with 1
    and 0: mean 0.5. The context is a text of its own. Step weight 2."""
    ids = torch.tensor([[7, 1, 8, 3], [7, 1, 8, 2], [7, 6, 0, 0], [7, 5, 8, 4]])
    masks = [[1, 0, 1], [0, 0, 1], [1, 0, 0], [1, 0, 1]]
    rows = in_branches([1.0, 1.0, 1.0, 0.0], masks, [0, 0, 0, 1], [0, 1, 2, 0], input_ids=ids)
    config = algorithm({"name": "gigpo", "gamma": 0.5, "step_weight": 2.0, "normalize_std": False})
    expected = torch.tensor([[0.5, 0.0, 1.5], [0.0, 0.0, 0.5], [1.5, 0.0, 0.0], [-1.5, 0.0, -1.5]])
    torch.testing.assert_close(assign_credit(rows, 0, config, 0.0, alone).advantages, expected)


@pytest.mark.parametrize("advantage", ESTIMATORS, ids=lambda config: "-".join(str(value) for value in config.values()))
def test_rows_that_do_not_train_stay_out_of_whitening(advantage: dict[str, Any]) -> None:
    rows = many_rows()
    whitened = assign_credit(rows, 0, algorithm(advantage, whiten=True), 0.0, alone).advantages
    counted = whitened[rows.mask & (rows.columns["train_weight"] > 0)[:, None]].double()
    assert float(counted.mean()) == pytest.approx(0, abs=1e-5) and float(counted.std()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    "advantage",
    [config for config in ESTIMATORS if config["name"] != "custom"],  # which is told off for what is not finite
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
def test_a_row_that_is_not_finite_spoils_no_others_when_advantages_are_whitened(advantage: dict[str, Any]) -> None:
    """It has a group of its own, so that no baseline hands it on."""
    rows, config = many_rows(), algorithm(advantage, whiten=True)
    place = int((rows.mask.sum(1) > 1).nonzero()[0])
    rows.columns["group"] = rows.columns["group"].clone()
    rows.columns["group"][place] = 10_000
    rows.columns["train_weight"] = rows.columns["train_weight"].clone()
    rows.columns["train_weight"][place] = 0.0
    expected = assign_credit(rows, 0, config, 0.0, alone).advantages
    rows.columns["train_weight"][place] = 1.0
    for name in ("reward", "values"):
        if name in rows.columns:
            rows.columns[name] = rows.columns[name].clone()
            rows.columns[name][place] = NAN
    found = assign_credit(rows, 0, config, 0.0, alone).advantages
    assert found[place][rows.mask[place]].isnan().all()
    others = torch.arange(len(found)) != place
    torch.testing.assert_close(found[others], expected[others])


def test_rows_that_do_not_train_count_in_group_baselines() -> None:
    rows = make_rows([1.0, 0.0, 0.0], [[1], [1], [1]], train_weight=torch.tensor([1.0, 1.0, 0.0]))
    credit = assign_credit(rows, 0, algorithm({"name": "grpo", "normalize_std": False}), 0.0, alone)
    torch.testing.assert_close(credit.advantages, torch.tensor([[2 / 3], [-1 / 3], [-1 / 3]]))


def test_reward_lands_on_the_last_policy_token() -> None:
    """FINDINGS 6.6: not on index -1. The second row ends in padding, the third in a tool's output, the fourth has no policy token."""
    rows = make_rows([1.0, 2.0, 3.0, 4.0], [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 1, 0, 0], [0, 0, 0, 0, 0]])
    credit = assign_credit(rows, 0, algorithm({"name": "reinforce", "gamma": 0.5}), 0.0, alone)
    assert credit.advantages.tolist() == [[0, 0, 0.25, 0.5, 1], [0, 1, 2, 0, 0], [1.5, 0, 3, 0, 0], [0, 0, 0, 0, 0]]
    assert credit.rewards_per_row.tolist() == [1, 2, 3, 4]


def test_kl_in_the_reward_by_hand() -> None:
    # Log-ratios 0.5 and -1 on the two policy tokens: with k1 and coef 0.1 the row's reward is 1 - 0.05 + 0.1.
    masks = [[1, 0, 1], [1, 1, 1]]
    old, ref = torch.tensor([[-1.0, NAN, -2.0], [0.0, 0.0, 0.0]]), torch.tensor([[-1.5, 3.0, -1.0], [0.0, 0.0, 0.0]])
    rows = make_rows([1.0, 0.0], masks, old_log_probs=old, ref_log_probs=ref)
    credit = assign_credit(rows, 0, algorithm({"name": "grpo", "normalize_std": False}), 0.1, alone)
    assert credit.kl is not None
    torch.testing.assert_close(credit.kl, torch.tensor([[0.5, 0.0, -1.0], [0.0, 0.0, 0.0]]))
    torch.testing.assert_close(credit.rewards_per_row, torch.tensor([1.05, 0.0], dtype=torch.float64))
    torch.testing.assert_close(credit.advantages, torch.tensor([[0.525, 0.0, 0.525], [-0.525] * 3]))


def test_kl_of_a_token_is_not_lost_beside_a_large_reward() -> None:
    """1e6 - 0.001: float32 has steps of 0.06 there. GAE by hand, with gamma, lambda 1 and the critic's values on the mark: the advantage
    of a token is what it and those after it pay for KL. REINFORCE++ with its group as baseline: the same, whitened."""
    old, ref = torch.tensor([[0.001, 0.002], [0.0, 0.003]]), torch.zeros(2, 2)
    rows = make_rows([1e6, 1e6], [[1, 1], [1, 1]], old_log_probs=old, ref_log_probs=ref)
    valued = MicroBatch({**rows.columns, "values": torch.full((2, 2), 1e6)}, rows.mask)
    credit = assign_credit(valued, 0, algorithm({"name": "gae", "gamma": 1.0, "lam": 1.0}), 1.0, alone)
    costs = torch.tensor([[-0.003, -0.002], [-0.003, -0.003]])
    torch.testing.assert_close(credit.advantages, costs, rtol=1e-4, atol=1e-9)
    told = assign_credit(rows, 0, custom("token_rewards_without", offset=1e6), 1.0, alone).advantages
    torch.testing.assert_close(told, torch.tensor([[-0.001, -0.002], [0.0, -0.003]]), rtol=1e-4, atol=1e-9)
    for baseline in ("none", "group"):
        config = algorithm({"name": "reinforce_plus_plus", "baseline": baseline})
        whitened = assign_credit(rows, 0, config, 1.0, alone).advantages
        # The variance offset of 1e-8 is no trifle beside a deviation of 0.0005.
        expected = (costs - costs.mean()) / (costs.double().var() + 1e-8).sqrt().float()
        torch.testing.assert_close(whitened, expected, rtol=2e-3, atol=2e-3)


def test_full_kl_in_the_reward_by_hand() -> None:
    # KL of (1/2, 1/2) from (1/4, 3/4): ln(2)/2 + ln(2/3)/2.
    old, ref = torch.tensor([[[0.5, 0.5], [NAN, NAN]]]).log(), torch.tensor([[[0.25, 0.75], [NAN, NAN]]]).log()
    rows = make_rows([0.0], [[1, 0]], old_distribution=old, ref_distribution=ref)
    credit = assign_credit(rows, 0, algorithm({"name": "reinforce"}, kl="full"), 2.0, alone)
    torch.testing.assert_close(credit.advantages, torch.tensor([[-(math.log(2) + math.log(2 / 3)), 0.0]]))


def test_gae_options_reach_the_recurrence_by_hand() -> None:
    # gamma 1, values 0.2, 0.4, reward 1. Row 0 ended: deltas 0.2 and 0.6. Row 1 was cut: its end is worth 0.5: deltas 0.2 and 1.1.
    # Both are rows of one sample, which is truncated.
    # alpha 1, two tokens: lambda 1/2: first advantages 0.5 and 0.75. Targets with lambda 1: 0.2 + 0.8 and 0.2 + 1.3.
    values = torch.tensor([[0.2, 0.4], [0.2, 0.4]])
    ends = {"truncated": torch.tensor([True, True]), "cut": torch.tensor([False, True]), "final_value": torch.tensor([9.0, 0.5])}
    branches = {"index": torch.tensor([0, 0]), "branch": torch.tensor([0, 1])}
    rows = make_rows([1.0, 1.0], [[1, 1], [1, 1]], values=values, **ends, **branches)
    config = {"name": "gae", "gamma": 1.0, "length_adaptive": 1.0, "lam_critic": 1.0, "bootstrap_truncated": True}
    credit = assign_credit(rows, 0, algorithm(config), 0.0, alone)
    torch.testing.assert_close(credit.advantages, torch.tensor([[0.5, 0.6], [0.75, 1.1]]))
    torch.testing.assert_close(credit.returns, torch.tensor([[1.0, 1.0], [1.5, 1.5]]))
    plain = assign_credit(rows, 0, algorithm({"name": "gae", "lam": 0.5}), 0.0, alone)
    torch.testing.assert_close(plain.advantages, torch.tensor([[0.5, 0.6], [0.5, 0.6]]))
    torch.testing.assert_close(plain.returns, torch.tensor([[0.7, 1.0], [0.7, 1.0]]))


def test_reinforce_plus_plus_whitens_always_by_hand() -> None:
    # Returns 1, 1 | 0: mean 2/3, variance 1/3.
    rows = make_rows([1.0, 0.0], [[1, 1], [1, 0]])
    credit = assign_credit(rows, 0, algorithm({"name": "reinforce_plus_plus"}), 0.0, alone)
    root = math.sqrt(1 / 3)
    torch.testing.assert_close(credit.advantages, torch.tensor([[1 / 3 / root, 1 / 3 / root], [-2 / 3 / root, 0.0]]))


def test_reinforce_plus_plus_takes_the_groups_mean_off_the_reward_and_not_off_the_kl_by_hand() -> None:
    # Group 0: 1, 0 become +-0.5. Group 1 is flat: 0. KL costs 0.1 on the very first token only: returns 0.4, 0.5 | -0.5 | 0.
    old = torch.tensor([[0.1, 0.0], [0.0, NAN], [0.0, NAN]])
    rows = make_rows([1.0, 0.0, 0.6], [[1, 1], [1, 0], [1, 0]], [3, 3, 1], old_log_probs=old, ref_log_probs=torch.zeros(3, 2))
    credit = assign_credit(rows, 0, algorithm({"name": "reinforce_plus_plus", "baseline": "group"}), 1.0, alone)
    returns = torch.tensor([0.4, 0.5, -0.5, 0.0])
    expected = (returns - returns.mean()) / returns.std()
    torch.testing.assert_close(credit.advantages[rows.mask], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_reinforce_plus_plus_equals_the_paper(baseline: str) -> None:
    rows = many_rows()
    rows.columns["train_weight"].fill_(1.0)
    rewards, groups = rows.columns["reward"].tolist(), rows.columns["group"].tolist()
    if baseline == "group":
        members = [[r for r, g in zip(rewards, groups, strict=True) if g == group] for group in groups]
        rewards = [r - math.fsum(group) / len(group) for r, group in zip(rewards, members, strict=True)]
    responses = [[0.0] * (int(count) - 1) + [r] * (count > 0) for r, count in zip(rewards, rows.mask.sum(1), strict=True)]
    expected = [a for row in paper.reinforce_plus_plus(responses, 0.9) for a in row]
    config = algorithm({"name": "reinforce_plus_plus", "gamma": 0.9, "baseline": baseline})
    advantages = assign_credit(rows, 0, config, 0.0, alone).advantages
    torch.testing.assert_close(advantages[rows.mask], torch.tensor(expected), rtol=1e-4, atol=1e-5)


def test_whitening_a_batch_without_policy_tokens() -> None:
    for rows in (make_rows([1.0, 0.0], [[0, 0], [0, 0]]), empty_rows()):
        assert (assign_credit(rows, 0, algorithm({"name": "grpo"}, whiten=True), 0.0, alone).advantages == 0).all()


# ---------------------------------------------------------------- a user's own


def custom(name: str, **args: Any) -> AlgorithmConfig:
    return algorithm({"name": "custom", "function": f"credit_functions.{name}", "args": args})


def test_a_users_own_estimator() -> None:
    rows = make_rows([1.0, 0.5], [[1, 1, 0], [0, 1, 0]])
    per_row = assign_credit(rows, 0, custom("above_best_of_batch", scale=2.0), 0.0, alone)
    assert per_row.advantages.tolist() == [[0.0, 0.0, 0.0], [0.0, -1.0, 0.0]]
    per_token = assign_credit(rows, 0, custom("reward_per_token"), 0.0, alone)
    assert per_token.advantages.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.5, 0.0]]
    assert assign_credit(rows, 0, custom("what_it_was_told"), 0.0, alone).advantages.sum() == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_short", r"credit_functions.too_short returned advantages \[3\], expected \[2\].*or \[2, 3\]"),
        ("not_a_number", r"credit_functions.not_a_number returned NaN or infinite advantages for rows \[0, 1\]"),
        ("a_list", r"credit_functions.a_list returned list, expected a tensor \[2\] or \[2, 3\]"),
        ("absent", r"algorithm.advantage.function: 'credit_functions.absent'"),
    ],
)
def test_a_users_mistake_is_named(name: str, message: str) -> None:
    rows = make_rows([1.0, 0.5], [[1, 1, 0], [0, 1, 0]])
    with pytest.raises(ValueError, match=message):
        assign_credit(rows, 0, custom(name), 0.0, alone)


def test_with_a_critic_a_users_estimator_gives_its_targets_as_well() -> None:
    rows = make_rows([1.0, 0.5], [[1, 1, 0], [0, 1, 0]], values=torch.zeros(2, 3))
    credit = assign_credit(rows, 0, custom("above_best_of_batch"), 0.0, alone)
    assert credit.advantages.tolist() == [[0.0, 0.0, 0.0], [0.0, -0.5, 0.0]]
    assert credit.returns is not None and credit.returns.tolist() == [[1.0, 1.0, 0.0], [0.0, 0.5, 0.0]]
    with pytest.raises(ValueError, match="with a critic credit_functions.alone returns"):
        assign_credit(rows, 0, custom("alone"), 0.0, alone)


def test_mistake_4_kl_is_not_scaled_up_to_a_signal_where_all_scores_are_equal() -> None:
    """Group 0 scores the same throughout and pays a little KL here and there; group 1 has a signal."""
    noise = torch.tensor([[1e-4, 0.0], [-2e-4, 0.0], [1e-4, 0.0], [0.0, 2e-4]])
    columns = {"old_log_probs": noise, "ref_log_probs": torch.zeros(4, 2)}
    rows = make_rows([1.0, 1.0, 1.0, 0.0], [[1, 1]] * 4, [0, 0, 1, 1], **columns)
    advantages = assign_credit(rows, 0, algorithm({"name": "grpo"}), 0.01, alone).advantages
    assert advantages[:2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert advantages[2, 0] == pytest.approx(math.sqrt(0.5), rel=1e-4) and advantages[3, 0] == pytest.approx(-math.sqrt(0.5), rel=1e-4)


def test_advantages_of_what_trains_by_domain() -> None:
    """The smallest advantage of rows of ones is 1: neither padding nor a row that does not train is a candidate."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    advantages = torch.tensor([[1.0, 1.0, 0.0], [2.0, 0.0, 0.0], [-9.0, -9.0, -9.0], [0.0, 0.0, 0.0]])
    columns = {
        "train_weight": torch.tensor([1.0, 0.5, 0.0, 1.0]),
        "domain_number": torch.tensor([0, 1, 1, 1]),
        "rollout_log_probs": torch.zeros(4, 3),
    }
    credit = Credit(advantages, None, None, torch.tensor([1.0, 2.0, 3.0, 4.0]).double())
    found, peaks, mismatch = credit_metrics(MicroBatch(columns, mask), credit, "current", 2)
    assert found["credit/tokens#0"] == 2 and found["credit/tokens#1"] == 1
    assert found["credit/advantage_mean#0"] == 2 and found["credit/advantage_square#1"] == 4
    # Of domain 1 one sample trains: of the others one weighs nothing, one has no policy token.
    assert found["credit/rows#1"] == 1 and found["credit/reward#1"] == 2
    assert found["credit/rows#0"] == 1 and found["credit/reward#0"] == 1
    assert peaks == {
        "credit/advantage_max#0": 1.0,
        "credit/advantage_max#1": 2.0,
        "credit/advantage_min#0": 1.0,
        "credit/advantage_min#1": 2.0,
    }
    assert mismatch == {}, "under `current` the first update compares engine and trainer"


def test_the_difference_of_engine_and_trainer_is_told_by_sample() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    columns = {
        "sample": torch.tensor([7, 3, 5, 4]),
        "train_weight": torch.tensor([1.0, 0.5, 0.0, 1.0]),
        "domain_number": torch.tensor([0, 1, 1, 1]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, 9.0], [-0.5, 9.0, 9.0], [0.0, 0.0, 0.0], [9.0, 9.0, 9.0]]),
        "old_log_probs": torch.tensor([[-1.25, -1.5, 0.0], [-0.5, 0.0, 0.0], [-9.0, -9.0, -9.0], [0.0, 0.0, 0.0]]),
    }
    credit = Credit(torch.zeros(4, 3), None, None, torch.zeros(4).double())
    sums, _, mismatch = credit_metrics(MicroBatch(columns, mask), credit, "recompute", 2)
    assert mismatch == {7: (0.75, 2), 3: (0.0, 1)}, "neither padding nor a sample that does not train"
    assert sums["mismatch/mean#0"] == 0.75 and sums["mismatch/mean#1"] == 0.0
