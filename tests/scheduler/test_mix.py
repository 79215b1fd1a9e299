from __future__ import annotations

import json
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.data.prompts import PromptOrder
from roll_lite.scheduler.mix import DomainMix, MixedOrder


def quota_of(mix: DomainMix, places: int) -> dict[str, int]:
    given = Counter(mix.places(places))
    return {name: given[name] for name in mix.shares}


@settings(max_examples=150, deadline=None)
@given(shares=st.lists(st.integers(1, 1000), min_size=1, max_size=8), batches=st.lists(st.integers(0, 40), min_size=1, max_size=25))
def test_counts_stay_within_one_of_the_shares_after_every_batch(shares: list[int], batches: list[int]) -> None:
    names = [f"d{i}" for i in range(len(shares))]
    mix = DomainMix({name: share / 100 for name, share in zip(names, shares, strict=True)})
    counts = dict.fromkeys(names, 0)
    places = 0
    for batch in batches:
        quota = quota_of(mix, batch)
        assert sum(quota.values()) == batch
        assert min(quota.values()) >= 0
        places += batch
        for name, share in zip(names, shares, strict=True):
            counts[name] += quota[name]
            assert abs(counts[name] - Fraction(share, sum(shares)) * places) < 1
    assert mix.state_dict()["counts"] == counts


def test_a_small_domain_gets_its_share_of_many_small_batches() -> None:
    # int(0.05 * 4) is 0: a domain with this share would never be served without carry-over.
    mix = DomainMix({"large": 0.95, "small": 0.05})
    assert sum(quota_of(mix, 4)["small"] for _ in range(100)) == 20


def test_even_shares_by_hand() -> None:
    mix = DomainMix({"a": 2, "b": 1, "c": 1})
    assert quota_of(mix, 8) == {"a": 4, "b": 2, "c": 2}
    assert [sum(quota_of(mix, 1).values()) for _ in range(4)] == [1, 1, 1, 1]
    assert mix.state_dict()["counts"] == {"a": 6, "b": 3, "c": 3}


def test_state_continues_the_same_account() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    whole = DomainMix(shares)
    expected = [quota_of(whole, 7) for _ in range(20)]
    first, second = DomainMix(shares), DomainMix(shares)
    got = [quota_of(first, 7) for _ in range(9)]
    second.load_state_dict(first.state_dict())
    got += [quota_of(second, 7) for _ in range(11)]
    assert got == expected


def test_other_shares_start_a_new_account() -> None:
    old = DomainMix({"a": 1, "b": 1})
    quota_of(old, 3)
    new = DomainMix({"a": 1, "b": 3})
    new.load_state_dict(old.state_dict())
    assert quota_of(new, 4) == {"a": 1, "b": 3}


def test_shares_are_normalised() -> None:
    assert DomainMix({"a": 3.0, "b": 1.0}).shares == pytest.approx({"a": 0.75, "b": 0.25})


# ---------------------------------------------------------------- files of one domain


def test_files_of_a_domain_get_their_shares_and_each_all_of_its_prompts_once_an_epoch() -> None:
    order = MixedOrder([10, 40], [3.0, 1.0], 7, "sums")
    served = [order.next() for _ in range(160)]
    for end in range(1, 161):
        assert abs(sum(index < 10 for _, index in served[:end]) - 0.75 * end) < 1
    short, long = ([one for one in served if (one[1] < 10) is first] for first in (True, False))
    assert [epoch for epoch, _ in short] == [place // 10 for place in range(120)]
    assert all(sorted(index for epoch, index in short if epoch == number) == list(range(10)) for number in range(12))
    assert sorted(long) == [(0, index) for index in range(10, 50)]


def test_no_file_of_a_domain_is_passed_more_often_than_its_epochs() -> None:
    order = MixedOrder([100, 5, 10], [1.0, 1.0, 2.0], 7, "sums", epochs=2)
    served = []
    while order.next_epoch < 2:
        served.append(order.next())
    assert sorted(served) == [(epoch, index) for epoch in (0, 1) for index in range(115)]
    assert [sum(place(index) for _, index in served[:40]) for place in (lambda i: i < 100, lambda i: 100 <= i < 105)] == [10, 10]
    assert order.epoch == 1


@pytest.mark.parametrize("epochs", [None, 2])
@pytest.mark.parametrize("before", [0, 1, 33, 60, 160])
def test_an_order_of_several_files_goes_on_exactly(before: int, epochs: int | None) -> None:
    order, resumed = (MixedOrder([10, 40, 100], [3.0, 1.0, 1.0], 7, "sums", epochs) for _ in range(2))
    for _ in range(before):
        order.next()
    resumed.next()
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert [resumed.next() for _ in range(100)] == [order.next() for _ in range(100)]


def test_the_state_of_other_files_is_refused() -> None:
    order, single = MixedOrder([10, 40], [3.0, 1.0], 7, "sums"), PromptOrder(50, 7, "sums")
    for mine, other in (
        (order, single),
        (single, order),
        (order, MixedOrder([50], [1.0], 7, "sums")),
        (order, MixedOrder([10, 41], [3.0, 1.0], 7, "sums")),
    ):
        with pytest.raises(ValueError, match="domain sums"):
            mine.load_state_dict(other.state_dict())
