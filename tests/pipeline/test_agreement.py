"""Engines and trainer that hold different models end the run, in whichever phase they are compared."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll_lite.config.loading import load_config
from roll_lite.pipeline.agreement import Agreement, DifferentModels

ROOT = Path(__file__).resolve().parents[2]
MEANS = {"add": 2.0, "make": 0.01, "repeat": 0.01}
TOP_K = "domains.{}.sampling.top_k=20"


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def agreement(*overrides: str) -> Agreement:
    return Agreement(load_config("tiny_grpo", ROOT / "examples/configs", list(overrides)))


@pytest.mark.parametrize("mean", [0.21, 3.7, float("inf")])
def test_a_difference_beyond_the_bound_ends_the_run(mean: float) -> None:
    with pytest.raises(DifferentModels, match=r"(?s)differ by .* nats on average.*rollout\.max_mismatch allows 0\.2.*RoPE"):
        agreement().check({"mismatch/mean": mean})


def test_only_the_first_comparison_counts() -> None:
    one = agreement("rollout.max_mismatch=0.05")
    one.check({"critic/loss": 1.0})  # a step in which the actor did not train
    one.check({"mismatch/mean": 0.05})
    one.check({"mismatch/mean": 9.0})  # the correction's business, not this one's


def test_a_sample_without_log_probs_is_no_disagreement_and_the_next_step_is_compared() -> None:
    one = agreement()
    one.check({"mismatch/mean": float("nan")})
    with pytest.raises(DifferentModels):
        one.check({"mismatch/mean": 0.3})


def test_null_allows_everything() -> None:
    agreement("rollout.max_mismatch=null").check({"mismatch/mean": 9.0})


def test_domains_whose_log_probs_belong_to_another_distribution_are_left_out() -> None:
    metrics = {
        "mismatch/mean": 0.7,
        "domain/add/mismatch/mean": 2.0,
        "domain/make/mismatch/mean": 0.01,
        "domain/repeat/mismatch/mean": 0.01,
    }
    agreement(TOP_K.format("add")).check(metrics)
    with pytest.raises(DifferentModels, match="domain/make/mismatch/mean"):
        agreement(TOP_K.format("add")).check(metrics | {"domain/make/mismatch/mean": 0.5})
    with pytest.raises(DifferentModels):
        agreement(TOP_K.format("add"), "rollout.keep_mask=true").check(metrics)
    agreement(*(TOP_K.format(name) for name in ("add", "make", "repeat"))).check(metrics)


def test_what_cannot_be_compared_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def said(one: Agreement, *steps: dict[str, float]) -> list[str]:
        caplog.clear()
        for metrics in steps:
            one.check(metrics)
        return [record.getMessage() for record in caplog.records]

    agreeing = {"mismatch/mean": 0.01, "domain/make/mismatch/mean": 0.01}
    assert said(agreement(), agreeing, agreeing) == []
    (late,) = said(agreement(), {"critic/loss": 1.0}, {"critic/loss": 1.0}, agreeing)
    assert "not compared yet: the actor gave no log-probs" in late
    (partly,) = said(agreement(TOP_K.format("add")), agreeing, agreeing)
    assert "not compared on samples of add: sampling is truncated" in partly and "rollout.keep_mask: true" in partly
    (never,) = said(agreement(*(TOP_K.format(name) for name in ("add", "make", "repeat"))), agreeing, agreeing)
    assert "not compared on samples of add, make, repeat" in never
    assert said(agreement("rollout.max_mismatch=null", TOP_K.format("add")), agreeing) == []
