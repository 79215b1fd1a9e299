"""Engines and trainer that hold different weights end the run: at the start, and at the update that brought them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from roll_lite.config.loading import load_config
from roll_lite.data.proto import DataProto, object_column
from roll_lite.pipeline.agreement import Agreement, DifferentModels, EnginesDiffer, compare_replicas
from roll_lite.pipeline.rlvr import RLVRPipeline

ROOT = Path(__file__).resolve().parents[2]
TOP_K = "domains.{}.sampling.top_k=20"
TOKENS = 1000


@pytest.fixture(autouse=True)
def _root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def agreement(*overrides: str) -> Agreement:
    return Agreement(load_config("tiny_grpo", ROOT / "examples/configs", list(overrides)))


Row = tuple[float, int, int, int]
"""Mean difference, engine, oldest and newest version."""


def step(one: Agreement, version: int, *rows: Row, domains: Sequence[str] = (), tokens: int = TOKENS) -> None:
    means, engines, oldest, newest = zip(*rows, strict=True) if rows else ((), (), (), ())
    table = DataProto(
        {
            "sample": torch.arange(len(rows)),
            "domain": object_column(domains or ["add"] * len(rows)),
            "engine": torch.tensor(engines, dtype=torch.int64),
            "min_version": torch.tensor(oldest, dtype=torch.int64),
            "max_version": torch.tensor(newest, dtype=torch.int64),
        }
    )
    sums = {number: (mean * tokens, tokens) for number, mean in enumerate(means)}
    one.check(version, table, [{k: v for k, v in sums.items() if k % 2 == part} for part in (0, 1)])


def current(one: Agreement, version: int, *means: float, **named: int) -> None:
    """A step whose samples come from engines 0, 1, ..., with the trainer's weights."""
    step(one, version, *((mean, engine, version, version) for engine, mean in enumerate(means)), **named)


RAISE, NULL = "raise rollout.max_mismatch; null allows any", "set rollout.max_mismatch: null, which"


@pytest.mark.parametrize("engines", [1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_update_is_noticed_at_once_though_all_engines_have_it(engines: int, dtype: str) -> None:
    """A quarter of one tensor negated from update 2 on: 2e-7 became 0.148 (float32), 0.012 became 0.16 (bfloat16)."""
    one, (usual, wrong) = agreement(f"model.dtype={dtype}"), {"float32": (2e-7, 0.148), "bfloat16": (0.012, 0.16)}[dtype]
    for version in range(2):
        current(one, version, *[usual] * engines)
    with pytest.raises(EnginesDiffer, match=r"actor_infer\[0\], weights of version 2"):
        current(one, 2, *[wrong] * engines)


def test_a_wrong_update_is_noticed_in_samples_of_older_weights() -> None:
    """In three steps in a row, or at once if the difference is gross: updates move the policy, too."""
    for mean, steps in ((0.148, 3), (0.36, 3), (2.0, 1)):
        one = agreement()
        for version in range(1, 4):
            step(one, version, (0.004, 0, version - 1, version - 1))
        for version in range(4, 3 + steps):
            step(one, version, (mean, 0, version - 1, version - 1))
        last = 3 + steps
        lasting = ", in 3 steps in a row" if steps > 1 else ""
        with pytest.raises(EnginesDiffer, match=rf"version {last - 1}: .*10 times the median of the last 3 step\(s\)\){lasting}\n"):
            step(one, last, (mean, 0, last - 1, last - 1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("engines", "wrong"), [(1, 0.148), (1, 0.5), (1, 2.0), (2, 0.148), (2, 0.5), (2, 2.0)])
def test_wrong_weights_from_the_first_update_on_are_noticed_though_nothing_is_usual_yet(dtype: str, engines: int, wrong: float) -> None:
    """As in supply: one_step_off, with all engines wrong alike. Below 0.3 nats, bfloat16 cannot tell them from updates."""
    one = agreement(f"model.dtype={dtype}")
    current(one, 0, *[2e-7] * engines)

    def train(version: int) -> None:
        step(one, version, *((wrong, engine, version - 1, version - 1) for engine in range(engines)))

    limit, steps = {"float32": 0.11, "bfloat16": 0.3}[dtype], 1 if wrong == 2.0 else 3
    if wrong < limit:
        for version in range(1, 40):
            train(version)
        return
    for version in range(1, steps):
        train(version)
    bound = rf"(?s)at most {limit:g} is allowed \(rollout.max_mismatch, and 0.1 for each of 1 update.*"
    with pytest.raises(EnginesDiffer, match=bound + RAISE):
        train(steps)
    assert one.state_dict()["past"].get("1 1", []) == [], "wrong weights do not become usual"


FIRST_STEPS = (0.069, 0.033, 0.023, 0.021, 0.02, 0.017, 0.012, 0.01, 0.0099, 0.0083, 0.008, 0.01, 0.0061, 0.0088)
"""Mean differences of the tiny model in float32, on samples one update old: Adam's first steps are its largest."""


def test_the_first_updates_are_no_alarm_though_they_are_three_times_as_large() -> None:
    one = agreement()
    current(one, 0, 3e-7)
    for version, mean in enumerate(FIRST_STEPS, start=1):
        step(one, version, (3 * mean, 0, version - 1, version - 1))


DRIFT = (0.013, 0.024, 0.0014, 0.083, 0.0084, 0.015, 0.049, 0.0031, 0.011, 0.031, 0.071, 0.0054, 0.021, 0.013, 0.016, 0.0097)
"""Mean differences on samples two updates old, of the tiny model near its best: they vary by a factor of 60."""


def test_updates_that_move_the_policy_far_are_no_alarm() -> None:
    """0.161 was the largest difference in 600 steps, at a median of 0.015, and 0.355 in 2,790 of a policy that had collapsed. A second
    large one follows from the same update, and more for older weights."""
    one = agreement()
    current(one, 1, 3e-7)
    for version, mean in enumerate([*DRIFT, 0.161, 0.155, *DRIFT, 0.355, 0.2, 0.01, 0.2, 0.2], start=2):
        step(one, version, (mean, 0, version - 2, version - 2))
    for version, mean in enumerate([*DRIFT, *[0.355] * 4, *DRIFT], start=60):
        step(one, version, (mean, 0, version - 4, version - 4))


def test_a_lasting_difference_is_told_again_after_a_pause() -> None:
    one = agreement()
    for version in range(1, 4):
        step(one, version, (0.004, 0, version - 1, version - 1))
    for version in range(4, 6):
        step(one, version, (0.148, 0, version - 1, version - 1))
    for steps in (3, 4):
        with pytest.raises(EnginesDiffer, match=rf", in {steps} steps in a row\n"):
            step(one, steps + 3, (0.148, 0, steps + 2, steps + 2))


def test_few_samples_of_older_weights_say_nothing() -> None:
    one = agreement()
    for version in range(2, 12):
        step(one, version, (0.004, 0, version - 2, version - 2))
        step(one, version, (3.0, 1, version - 2, version - 2), tokens=199)


@pytest.mark.parametrize("mean", [0.011, 3.7, math.inf])
def test_a_difference_beyond_the_bound_ends_the_run_at_the_first_batch(mean: float) -> None:
    with pytest.raises(DifferentModels, match=r"(?s)differ by .* nats on average.*rollout\.max_mismatch allows 0\.01.*RoPE"):
        current(agreement(), 0, mean)


def test_steps_without_a_comparison_leave_the_first_batch_to_come() -> None:
    one = agreement("rollout.max_mismatch=0.05")
    step(one, 0)  # the actor did not train
    current(one, 0, math.nan)  # a sample without log-probs, whose update is skipped
    with pytest.raises(DifferentModels, match="of the first batch"):
        current(one, 0, 0.06)


def test_null_allows_everything() -> None:
    one = agreement("rollout.max_mismatch=null")
    for version in range(9):
        current(one, version, 9.0**version, 1e-7)


def test_one_engine_of_several_is_named_at_its_first_bad_batch() -> None:
    one = agreement()
    current(one, 0, 3e-7, 3e-7)
    with pytest.raises(
        DifferentModels, match=r"^actor_infer\[1\], weights of version 1: log-probs of 1000 tokens differ .* by 0\.0021 nats"
    ):
        current(one, 1, 3e-7, 2.1e-3)


@pytest.mark.parametrize("steps", [1, 5, 200])
def test_the_only_engine_is_named_by_its_own_past(steps: int) -> None:
    one = agreement()
    for version in range(steps):
        current(one, version, 3e-7 * (1 + version % 3))
    with pytest.raises(
        DifferentModels, match=rf"(?s)actor_infer\[0\], weights of version {steps}: .* the median of the last {min(steps, 50)} step.*{NULL}"
    ):
        current(one, steps, 1.1e-3)


def test_too_few_tokens_say_nothing_and_the_bound_holds_without_a_past() -> None:
    one = agreement()
    current(one, 0, 1e-7)
    current(one, 1, 0.3, tokens=19)
    with pytest.raises(DifferentModels, match=r"version 2: .* at most 0\.01 is allowed \(rollout\.max_mismatch\)"):
        current(one, 2, 0.011)


def test_the_first_batch_is_judged_by_samples_of_present_weights() -> None:
    """A run that resumes with another engine, and with samples under way."""
    one = agreement()
    step(one, 5, (0.1, 0, 4, 4))
    with pytest.raises(DifferentModels, match=r"(?s)of the first batch: their log-probs differ by 0\.02 nats"):
        step(one, 6, (0.1, 0, 5, 5), (0.02, 0, 6, 6))


def test_bfloat16_rounds_and_old_weights_drift() -> None:
    one = agreement("model.dtype=bfloat16")
    for version in range(10):
        step(one, version, (0.012, 0, version, version), (0.03, 1, version, version), (0.4, 0, version - 2, version - 1))
    step(one, 10, (0.029, 0, 10, 10), (1.9, 0, 8, 9), (0.06, -1, 7, 10))
    with pytest.raises(DifferentModels, match=r"actor_infer\[1\], weights of version 11"):
        step(one, 11, (0.012, 0, 11, 11), (0.148, 1, 11, 11))
    with pytest.raises(DifferentModels, match=r"several engines, weights of version 10: .*10 times the median of the last 10 step"):
        step(one, 11, (21.0, -1, 9, 10))


def test_a_resumed_run_remembers_what_is_usual() -> None:
    one, resumed = agreement(), agreement()
    for version in range(6):
        current(one, version, 3e-7)
    resumed.load_state_dict(one.state_dict())
    with pytest.raises(DifferentModels, match="the median of the last 6 step"):
        current(resumed, 6, 0.005)


def test_a_step_that_is_repeated_counts_once_and_steps_before_it_still_count() -> None:
    """Its state is loaded as after the loss of a rank, each time the same one."""
    one, resumed = agreement(), agreement()
    for version in range(1, 4):
        step(one, version, (0.004, 0, version - 1, version - 1))
    saved = json.loads(json.dumps(one.state_dict()))
    for repeated in (4, 5):
        for _ in range(3):
            resumed.load_state_dict(saved)
            step(resumed, repeated, (0.148, 0, repeated - 1, repeated - 1))
        saved = json.loads(json.dumps(resumed.state_dict()))
    with pytest.raises(EnginesDiffer, match=", in 3 steps in a row"):
        step(resumed, 6, (0.148, 0, 5, 5))


def test_a_state_may_be_loaded_again_after_further_steps() -> None:
    one = agreement()
    current(one, 0, 3e-7)
    saved = json.loads(json.dumps(one.state_dict()))
    one.load_state_dict(saved)
    current(one, 1, 6e-7)
    assert saved["past"] == {"0 0": [3e-7]}, "it is the driver's and of the copy in memory"
    one.load_state_dict({"past": saved["past"], "is_first": False})  # of an older checkpoint


def test_domains_whose_log_probs_belong_to_another_distribution_are_left_out() -> None:
    rows, domains = ((2.0, 0, 0, 0), (0.01, 0, 0, 0), (0.01, 0, 0, 0)), ("add", "make", "repeat")
    step(agreement(TOP_K.format("add")), 0, *rows, domains=domains)
    with pytest.raises(DifferentModels):
        step(agreement(TOP_K.format("add")), 0, rows[0], (0.5, 0, 0, 0), rows[2], domains=domains)
    with pytest.raises(DifferentModels):
        step(agreement(TOP_K.format("add"), "rollout.keep_mask=true"), 0, *rows, domains=domains)
    step(agreement(*map(TOP_K.format, domains)), 0, *rows, domains=domains)


def test_what_cannot_be_compared_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    def said(one: Agreement, *steps: Sequence[Row]) -> list[str]:
        caplog.clear()
        for rows in steps:
            step(one, 0, *rows, domains=["make"] * len(rows))
        return [record.getMessage() for record in caplog.records]

    agreeing = [(0.01, 0, 0, 0)]
    assert said(agreement(), agreeing, agreeing) == []
    (late,) = said(agreement(), [], [], agreeing)
    assert "not compared yet: the actor gave no log-probs" in late
    (partly,) = said(agreement(TOP_K.format("add")), agreeing, agreeing)
    assert "not compared on samples of add: sampling is truncated" in partly and "rollout.keep_mask: true" in partly
    (never,) = said(agreement(*map(TOP_K.format, ("add", "make", "repeat"))), agreeing, agreeing)
    assert "not compared on samples of add, make, repeat" in never
    assert said(agreement("rollout.max_mismatch=null", TOP_K.format("add")), agreeing) == []


class Ranks:
    name = "actor_train"

    def __init__(self, *held: dict[str, str]) -> None:
        self.held, self.data_size = held, len(held)

    def all(self, method: Any) -> list[dict[str, str]]:
        return list(self.held)


def replicas(*held: dict[str, str]) -> Any:
    return SimpleNamespace(ranks=Ranks(*held), loaded=lambda groups: nullcontext())


def test_replicas_are_compared_where_they_hold_the_same_shard() -> None:
    compare_replicas(replicas({"a (shard 0)": "1", "b": "2"}, {"a (shard 1)": "3", "b": "2"}), 4)
    compare_replicas(SimpleNamespace(ranks=SimpleNamespace(data_size=1)), 4)  # type: ignore[arg-type]
    with pytest.raises(DifferentModels) as failure:
        compare_replicas(replicas({"a": "1", "b": "2"}, {"a": "1", "b": "7"}, {"a": "1", "b": "2"}), 4)
    assert str(failure.value).startswith(
        "actor_train: data-parallel replicas hold different weights after step 4: ranks 0, 2 and rank 1 differ in b, 1 of 2 tensors differ"
    )


def test_a_step_in_which_engines_differ_is_repeated_when_the_user_accepts_it() -> None:
    told: list[Any] = []
    tries = iter([EnginesDiffer("by 0.5 nats", 3), None])

    def step() -> None:
        if (failure := next(tries)) is not None:
            raise failure
        told.append("step")

    pipeline = SimpleNamespace(
        config=SimpleNamespace(rollout=SimpleNamespace(on_mismatch="pause")),
        recovery=SimpleNamespace(survive=lambda _, work: work(), reached={"steps_done": 3}),
        journal=SimpleNamespace(paused=lambda reason: nullcontext(told.append(f"paused: {reason}"))),
        wait_while_there_is=lambda file: None,
        restore=told.append,
        agreement=SimpleNamespace(accept=lambda version: told.append(f"accept {version}")),
        version=4,
    )
    RLVRPipeline.survive(pipeline, step)  # type: ignore[arg-type]
    assert told == ["paused: by 0.5 nats", {"steps_done": 3}, "accept 3", "step"]
    pipeline.config.rollout.on_mismatch, tries = "end", iter([EnginesDiffer("by 0.5 nats", 3)])
    with pytest.raises(EnginesDiffer):
        RLVRPipeline.survive(pipeline, step)  # type: ignore[arg-type]


def test_a_repeated_update_is_not_compared_again() -> None:
    def differs(*_: Any) -> None:
        raise EnginesDiffer("by 0.5 nats", 3)

    pipeline = SimpleNamespace(agreement=SimpleNamespace(check=differs), repeats=True)
    RLVRPipeline.compare(pipeline, 3, DataProto({}), [])  # type: ignore[arg-type]
    pipeline.repeats = False
    with pytest.raises(EnginesDiffer):
        RLVRPipeline.compare(pipeline, 3, DataProto({}), [])  # type: ignore[arg-type]


def test_an_accepted_difference_is_not_told_again_at_its_version() -> None:
    one = agreement()
    with pytest.raises(EnginesDiffer):
        current(one, 0, 0.5)
    state = one.state_dict()
    one.accept(0)
    current(one, 0, 0.5)
    one.load_state_dict(state)
    one.accept(0)
    assert not one.state_dict()["is_first"], "a replay compares only its first batch"
    with pytest.raises(EnginesDiffer):
        current(one, 1, 0.5)
