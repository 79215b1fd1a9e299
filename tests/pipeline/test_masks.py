"""Which samples train: each rule by hand, the rules together, and what a user's function may and may not return."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from shaping_support import make_rows

from roll_lite.algorithms.rewards import Masked
from roll_lite.config.schema.algorithm import MasksConfig
from roll_lite.pipeline.shaping import masked_samples

USER_MODULE = """
import torch

def short_ones(rows):
    return (rows.policy_tokens < 20).float() * 2

def as_list(rows):
    return [0.5] * len(rows)

def one_domain(rows):
    return [float(rows.domains[number] == "b") for number in rows.domain_number.tolist()]

def too_few(rows):
    return torch.ones(1)

def column(rows):
    return torch.ones(len(rows), 1)

def negative(rows):
    return [1.0, -0.5, 1.0]

def not_a_number(rows):
    return torch.tensor([1.0, 1.0, float("nan")])

def infinite(rows):
    return [1.0, float("inf"), 1.0]

def nothing(rows):
    return None

def words(rows):
    return ["train"] * len(rows)

def fails(rows):
    return rows.lengths
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_masks.py").write_text(USER_MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("my_masks", None)
    return "my_masks"


def contents(masked: Masked) -> tuple[list[float], dict[str, list[bool]]]:
    assert masked.weights.dtype == torch.float32
    assert all(cause.dtype == torch.bool for cause in masked.causes.values())
    return masked.weights.tolist(), {name: cause.tolist() for name, cause in masked.causes.items()}


def masked(rows: Any, **config: Any) -> tuple[list[float], dict[str, list[bool]]]:
    return contents(masked_samples(rows, MasksConfig.model_validate(config)))


def test_all_train_by_default() -> None:
    assert masked(make_rows([0.0, 1.0], truncated=[True, False])) == ([1.0, 1.0], {})
    assert masked(make_rows([0.0, 1.0], truncated=[True, False]), truncated="penalize") == ([1.0, 1.0], {})


def test_truncated() -> None:
    assert masked(make_rows([0.0, 1.0], truncated=[True, False]), truncated="mask") == ([0.0, 1.0], {"truncated": [True, False]})


def test_group_means_are_of_raw_scores_by_group_id_ends_included() -> None:
    """FINDINGS 6.5: groups 3 and 1 are mixed and uneven. Means: 3 -> 0.25, 1 -> 0.75, 2 -> 1, 8 -> 0."""
    rows = make_rows([0.0, 0.5, 0.5, 1.0, 1.0, 0.0, 0.0], group=[3, 1, 3, 1, 2, 8, 8])
    outside = [False, False, False, False, True, True, True]
    assert masked(rows, group_mean=(0.25, 0.75)) == ([1, 1, 1, 1, 0, 0, 0], {"group_mean": outside})
    tenths = make_rows([0.2, 0.2, 0.2, 0.1, 0.1, 0.1], group=[1, 1, 1, 2, 2, 2])
    assert masked(tenths, group_mean=(0.1, 0.2))[0] == [1.0] * 6
    assert masked(make_rows([0.1, 0.3]), group_mean=(0.0, 0.2))[0] == [1.0] * 2


def test_response_lengths_ends_included() -> None:
    rows = make_rows([0.0] * 4, policy_tokens=[4, 5, 9, 10])
    assert masked(rows, response_tokens=(5, 9)) == ([0, 1, 1, 0], {"response_tokens": [True, False, False, True]})


def test_the_datas_weights_pass_and_zeros_are_a_cause() -> None:
    rows = make_rows([0.0] * 3, sample_weight=[0.5, 0.0, 2.0])
    assert masked(rows) == ([0.5, 0.0, 2.0], {"sample_weight": [False, True, False]})


def test_a_users_function_multiplies(user: str) -> None:
    rows = make_rows([0.0] * 3, policy_tokens=[10, 50, 12], sample_weight=[1.0, 1.0, 0.25])
    weights, causes = masked(rows, function=f"{user}.short_ones")
    assert weights == [2.0, 0.0, 0.5]
    assert causes == {"sample_weight": [False] * 3, "function": [False, True, False]}
    assert masked(make_rows([0.0] * 3), function=f"{user}.as_list")[0] == [0.5] * 3
    assert masked(make_rows([0.0] * 3, domain_number=[0, 1, 1]), function=f"{user}.one_domain")[0] == [0, 1, 1]


def test_rules_add_up_and_each_tells_its_samples(user: str) -> None:
    rows = make_rows([1.0, 0.0, 1.0, 1.0], group=[1, 1, 2, 2], truncated=[True, False, True, False], policy_tokens=[99, 10, 99, 30])
    weights, causes = masked(rows, truncated="mask", group_mean=(0.1, 0.9), response_tokens=(1, 98), function=f"{user}.short_ones")
    assert weights == [0.0, 2.0, 0.0, 0.0]
    assert causes == {
        "truncated": [True, False, True, False],
        "group_mean": [False, False, True, True],
        "response_tokens": [True, False, True, False],
        "function": [True, False, True, True],
    }


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_few", r"'my_masks\.too_few' returned weights of shape \[1\] for 3 samples"),
        ("column", r"returned weights of shape \[3, 1\] for 3 samples"),
        ("negative", r"returned -0\.5 for sample 1; weights are finite and at least 0"),
        ("not_a_number", r"returned nan for sample 2"),
        ("infinite", r"returned inf for sample 1"),
        ("nothing", r"'my_masks\.nothing' returned (weights of shape \[\] for 3 samples|NoneType, expected one number per sample)"),
        ("words", r"'my_masks\.words' returned list, expected one number per sample"),
        ("fails", r"'my_masks\.fails' failed: AttributeError: .*lengths"),
        ("no_such", r"'my_masks\.no_such': my_masks has no 'no_such'; valid here: "),
    ],
)
def test_mistakes_of_a_users_function_name_it(user: str, function: str, message: str) -> None:
    """FINDINGS 6.9: nothing wrong becomes a weight of zero silently."""
    with pytest.raises(ValueError, match=message) as caught:
        masked(make_rows([0.0] * 3), function=f"{user}.{function}")
    assert str(caught.value).startswith("algorithm.masks.function: 'my_masks.")


def test_row_order_changes_nothing() -> None:
    generator = torch.Generator().manual_seed(1)
    scores, groups = torch.rand(30, generator=generator), torch.randint(0, 6, (30,), generator=generator)
    order = torch.randperm(30, generator=generator)
    straight, _ = masked(make_rows(scores.tolist(), group=groups.tolist()), group_mean=(0.4, 0.6))
    mixed, _ = masked(make_rows(scores[order].tolist(), group=groups[order].tolist()), group_mean=(0.4, 0.6))
    assert mixed == [straight[i] for i in order.tolist()]
    assert 0 < sum(straight) < 30
    assert masked(make_rows([]), group_mean=(0.0, 1.0), truncated="mask")[0] == []
