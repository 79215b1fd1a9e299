from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.scheduler.mix import DomainMix


@settings(max_examples=150, deadline=None)
@given(
    shares=st.lists(st.integers(1, 1000), min_size=1, max_size=8),
    batches=st.lists(st.integers(0, 40), min_size=1, max_size=25),
)
def test_counts_stay_within_one_of_the_shares_after_every_batch(shares: list[int], batches: list[int]) -> None:
    names = [f"d{i}" for i in range(len(shares))]
    mix = DomainMix({name: share / 100 for name, share in zip(names, shares, strict=True)})
    counts = dict.fromkeys(names, 0)
    places = 0
    for batch in batches:
        quota = mix.quota(batch)
        assert sum(quota.values()) == batch
        assert min(quota.values()) >= 0
        places += batch
        for name, share in zip(names, shares, strict=True):
            counts[name] += quota[name]
            assert abs(counts[name] - Fraction(share, sum(shares)) * places) < 1
    assert mix.counts == counts


def test_a_small_domain_gets_its_share_of_many_small_batches() -> None:
    # int(0.05 * 4) is 0: a domain with this share would never be served without carry-over.
    mix = DomainMix({"large": 0.95, "small": 0.05})
    assert sum(mix.quota(4)["small"] for _ in range(100)) == 20


def test_even_shares_by_hand() -> None:
    mix = DomainMix({"a": 2, "b": 1, "c": 1})
    assert mix.quota(8) == {"a": 4, "b": 2, "c": 2}
    assert [sum(mix.quota(1).values()) for _ in range(4)] == [1, 1, 1, 1]
    assert mix.counts == {"a": 6, "b": 3, "c": 3}


def test_state_continues_the_same_account() -> None:
    shares = {"a": 0.5, "b": 0.3, "c": 0.2}
    whole = DomainMix(shares)
    expected = [whole.quota(7) for _ in range(20)]
    first, second = DomainMix(shares), DomainMix(shares)
    got = [first.quota(7) for _ in range(9)]
    second.load_state_dict(first.state_dict())
    got += [second.quota(7) for _ in range(11)]
    assert got == expected


def test_other_shares_start_a_new_account() -> None:
    old = DomainMix({"a": 1, "b": 1})
    old.quota(3)
    new = DomainMix({"a": 1, "b": 3})
    new.load_state_dict(old.state_dict())
    assert new.quota(4) == {"a": 1, "b": 3}


def test_shares_are_normalised() -> None:
    assert DomainMix({"a": 3.0, "b": 1.0}).shares == pytest.approx({"a": 0.75, "b": 0.25})
