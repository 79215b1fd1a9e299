"""What the driver decides from row columns: rewards, masks, which rows go on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roll_lite.config.loading import load_config
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.branches import per_sample
from roll_lite.data.proto import DataProto, object_column
from roll_lite.distributed.dataflow import Batch
from roll_lite.pipeline.shaping import RewardShaping

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def configured(*overrides: str) -> RunConfig:
    return load_config("tiny_grpo", ROOT / "examples/configs", list(overrides))


def batch() -> Batch:
    """Three groups of two: one of `add` with spread, one of `repeat` that is all right, one of `add` that was cut off."""
    return Batch(
        DataProto(
            {
                "sample": torch.arange(6),
                "group": torch.tensor([7, 7, 3, 3, 5, 5]),
                "domain": object_column(["add", "add", "repeat", "repeat", "add", "add"]),
                "finish_reason": object_column(["stop", "stop", "stop", "stop", "length", "length"]),
                "score": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
                "correct": torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0]),
                "format_ok": torch.zeros(6),
                "sample_weight": torch.ones(6),
                "policy_tokens": torch.tensor([3, 4, 5, 6, 12, 12]),
                "response_length": torch.tensor([3, 4, 5, 6, 12, 12]),
            }
        )
    )


def branched() -> DataProto:
    """The rows of `batch`; the first sample has a second row, in which an environment wrote 5 of 11 tokens."""
    rows = batch().rows
    further = {
        "sample": torch.arange(7),
        "index": torch.tensor([0, 0, 1, 0, 1, 0, 1]),
        "branch": torch.tensor([0, 1, 0, 0, 0, 0, 0]),
        "policy_tokens": torch.tensor([3, 6, 4, 5, 6, 12, 12]),
        "response_length": torch.tensor([3, 11, 4, 5, 6, 12, 12]),
        "min_version": torch.tensor([4, 2, 4, 4, 4, 4, 4]),
        "max_version": torch.tensor([4, 5, 4, 4, 4, 4, 4]),
    }
    return DataProto({name: rows[name][[0, 0, 1, 2, 3, 4, 5]] for name in rows.keys()} | further)  # noqa: SIM118


def test_without_settings_the_reward_is_the_score_and_everything_trains() -> None:
    shaped = RewardShaping(configured())(batch())
    assert torch.equal(shaped.batch.rows.tensor("reward"), batch().rows.tensor("score"))
    assert shaped.batch.rows.tensor("train_weight").tolist() == [1.0] * 6
    assert shaped.batch.rows.tensor("domain_number").tolist() == [0, 0, 2, 2, 0, 0]
    assert shaped.batch.rows.tensor("max_tokens").tolist() == [12] * 6
    assert shaped.batch.rows.tensor("truncated").tolist() == [False] * 4 + [True] * 2
    assert shaped.batch.rows.tensor("cut").tolist() == [False] * 4 + [True] * 2


def test_an_episode_that_used_up_its_turns_counts_as_cut() -> None:
    """It is masked, or penalized, as a response at its token limit is."""
    rows = batch().rows.with_columns(finish_reason=object_column(["max_turns", "stop", "stop", "stop", "length", "length"]))
    shaped = RewardShaping(configured("algorithm.masks.truncated=mask"))(Batch(rows))
    assert shaped.rows.tensor("truncated").tolist() == [True, False, False, False, True, True]
    assert shaped.rows.tensor("train_weight").tolist() == [0.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    assert shaped.rows.tensor("cut").tolist() == [False, False, False, False, True, True], "for GAE it has ended"
    penalized = RewardShaping(configured("algorithm.masks={truncated: penalize, truncated_penalty: 0.25}"))(Batch(rows))
    assert penalized.rows.tensor("reward").tolist() == [0.75, 0.0, 1.0, 1.0, -0.25, 0.75]


def test_all_rows_of_a_sample_have_its_reward_and_count_once() -> None:
    """The first sample has two rows, of 3 and 6 tokens, the others one. Penalties: 0.5 * tokens of the longest row / 12. The mean of 7's
    group is 0.5 still."""
    penalty = "algorithm.reward.length_penalty={name: linear, coef: 0.5}"
    shaped = RewardShaping(configured(penalty, "algorithm.masks.group_mean=[0.4,0.6]"))(Batch(branched()))
    found = shaped.batch.rows
    assert found.tensor("sample").tolist() == [0, 1, 2, 5, 6], "groups 7 and 5, with all their rows"
    assert found.tensor("reward")[:3].tolist() == pytest.approx([1 - 0.25, 1 - 0.25, -0.5 * 4 / 12])
    samples = per_sample(shaped.rows)
    assert len(samples) == 6 and samples.tensor("policy_tokens")[0] == 6 and samples.tensor("response_length")[0] == 14
    assert (samples.tensor("min_version")[0], samples.tensor("max_version")[0]) == (2, 5)


def test_an_environments_tokens_count_for_the_overlong_penalty_only() -> None:
    """max_tokens is 12, the buffer 4: the penalty begins at 8. The first sample has 11 tokens, 6 of them the policy's; the last two have
    12. The linear penalty takes 0.5 * 6 / 12 for the first."""
    overlong = RewardShaping(configured("algorithm.reward.overlong={buffer_tokens: 4}"))(Batch(branched()))
    taken = overlong.rows.tensor("score") - overlong.rows.tensor("reward")
    assert taken.tolist() == [0.75, 0.75, 0.0, 0.0, 0.0, 1.0, 1.0]
    linear = RewardShaping(configured("algorithm.reward.length_penalty={coef: 0.5}"))(Batch(branched()))
    assert linear.rows.tensor("reward")[:2].tolist() == [0.75, 0.75]


def test_a_row_keeps_what_the_rollout_says_of_its_end() -> None:
    cut = torch.tensor([True, False, False, False, False, False, True])
    shaped = RewardShaping(configured())(Batch(branched().with_columns(cut=cut)))
    assert shaped.rows.tensor("cut").tolist() == cut.tolist()
    assert shaped.rows.tensor("truncated").tolist() == [False] * 5 + [True] * 2


def test_groups_of_which_no_sample_trains_are_left_out_and_still_reported() -> None:
    shaped = RewardShaping(configured("algorithm.masks.truncated=mask", "algorithm.masks.group_mean=[0.1,0.9]"))(batch())
    assert shaped.batch.rows.tensor("sample").tolist() == [0, 1]
    assert len(shaped.rows) == 6
    assert shaped.masked.causes["truncated"].tolist() == [False] * 4 + [True] * 2
    assert shaped.masked.causes["group_mean"].tolist() == [False, False, True, True, False, False]


def test_a_domains_weight_and_settings_meet_the_domains_rows() -> None:
    shaped = RewardShaping(configured("domains.repeat.reward.weight=0.5", "algorithm.reward.scale=2"))(batch())
    assert shaped.batch.rows.tensor("reward").tolist() == [2.0, 0.0, 1.0, 1.0, 0.0, 2.0]


def test_running_moments_go_on_where_a_checkpoint_left_them() -> None:
    config = configured("algorithm.reward.normalize={over: running}")
    whole, first = RewardShaping(config), RewardShaping(config)
    whole(batch())
    first(batch())
    resumed = RewardShaping(config)
    resumed.load_state_dict(first.state_dict())
    expected, found = whole(batch()).batch.rows.tensor("reward"), resumed(batch()).batch.rows.tensor("reward")
    assert torch.equal(found, expected)
    assert not torch.equal(found, RewardShaping(config)(batch()).batch.rows.tensor("reward")), "without the state they would start anew"


def test_limits_of_agents_are_of_whole_conversations() -> None:
    """Prompt and response of an agent share max_prompt_tokens + max_tokens = 50; the longest row of a sample counts. Penalties over 10
    tokens: the first sample has 40 after a prompt of 5, limit 45; the second 8 after 2."""
    agents = "domains.add.environment={name: endpoint, function: tests.workers.environment_cases.knocks}"
    sizes = ("domains.add.sampling.max_prompt_tokens=38", "domains.add.sampling.max_tokens=12")
    config = configured(agents, *sizes, "algorithm.reward.overlong={buffer_tokens: 10, penalty: 1.0}")
    rows = branched().with_columns(
        prompt_length=torch.tensor([9, 5, 2, 3, 3, 2, 2]), response_length=torch.tensor([3, 40, 8, 5, 6, 12, 12])
    )
    shaped = RewardShaping(config)(Batch(rows)).rows
    assert shaped.tensor("max_tokens").tolist() == [45, 45, 48, 12, 12, 48, 48]
    assert shaped.tensor("reward").tolist()[:3] == [0.5, 0.5, 0.0]
    one_row_each = RewardShaping(config)(Batch(batch().rows.with_columns(prompt_length=torch.tensor([9, 2, 3, 3, 2, 2])))).rows
    assert one_row_each.tensor("max_tokens").tolist() == [41, 48, 12, 12, 48, 48]
