"""Signs that a run learns nothing: each is told once, at the step that its rule names."""

from __future__ import annotations

import math

import pytest

from roll_lite.observability.health import IN_A_ROW, RunHealth

GOOD = {
    "reward/flat_groups": 0.5,
    "reward/mean": 0.4,
    "rollout/truncated": 0.1,
    "rollout/samples": 64.0,
    "actor/entropy": 0.5,
    "actor/grad_norm": 0.8,
}


def told(*steps: dict[str, float], compares_groups: bool = True) -> dict[int, list[str]]:
    """Step to the messages that it brought, steps without any left out."""
    health = RunHealth(compares_groups)
    messages = {number: health.new_signs(number, GOOD | step) for number, step in enumerate(steps, start=1)}
    return {number: said for number, said in messages.items() if said}


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        ({"reward/flat_groups": 1.0}, "nothing can be learned"),
        ({"rollout/truncated": 0.51}, "51% of the responses were cut at max_tokens"),
        ({"actor/entropy": 0.009}, "entropy has collapsed to 0.009 nats"),
        ({"actor/grad_norm": 0.0}, "its weights do not change"),
        ({"rollout/samples": 0.0}, "no sample is left to train on"),
        ({"masks/samples": 1.0}, "no sample is left to train on"),
    ],
)
def test_each_sign_is_told_once_after_three_steps_in_a_row(sign: dict[str, float], says: str) -> None:
    assert told(*[{}] * 20) == {}
    said = told({}, sign, sign, {}, *[sign] * 10)
    assert list(said) == [4 + IN_A_ROW] and len(said[7]) == 1 and said[7][0].startswith("warning, step 7: ") and says in said[7][0]


def test_a_gradient_that_explodes_is_told_at_that_step() -> None:
    assert list(told(*[{}] * 5, {"actor/grad_norm": 79.0}, {"actor/grad_norm": 81.0}, {"actor/grad_norm": 90.0})) == [7]
    assert told({}, {}, {"actor/grad_norm": 1e6}) == {}, "two steps are no past to compare with"
    assert told(*[{}] * 9, {"actor/grad_norm": math.nan}) == {}, "an update that is skipped has a message of its own"


@pytest.mark.parametrize("steps", [1, 5, 100])
def test_the_first_entropy_counts_also_after_a_warm_up_of_the_critic(steps: int) -> None:
    """Which trains no actor, and measures none."""
    health, trained = RunHealth(compares_groups=False), GOOD | {"actor/entropy": 1.0}
    warm_up = {name: value for name, value in GOOD.items() if not name.startswith("actor/")}
    messages = [
        health.new_signs(step, one)
        for step, one in enumerate([*[warm_up] * 7, *[trained] * steps, *[trained | {"actor/entropy": 0.01}] * 3])
    ]
    assert [bool(said) for said in messages] == [*[False] * (9 + steps), True]


def test_equal_scores_are_no_sign_where_samples_of_a_prompt_are_not_compared() -> None:
    assert told(*[{"reward/flat_groups": 1.0}] * 5, compares_groups=False) == {}


def test_a_step_that_measures_nothing_shows_no_sign() -> None:
    health = RunHealth(compares_groups=True)
    assert [health.new_signs(step, {}) for step in range(1, 6)] == [[]] * 5


def test_findings_count_the_steps_that_show_them() -> None:
    health = RunHealth(compares_groups=True)
    for step in range(1, 11):
        health.new_signs(step, GOOD | ({"rollout/truncated": 0.9} if step > 4 else {}))
    (finding,) = health.findings.values()
    assert (finding.sign, finding.first_step, finding.steps) == ("truncated", 5, 6)


@pytest.mark.parametrize(
    ("sign", "says"),
    [
        ({"reward/flat_groups": 1.0, "reward/mean": 0.0}, "domain code: in every group all samples have the same reward"),
        ({"rollout/truncated": 0.93}, "domain code: 93% of the responses were cut"),
    ],
)
def test_a_sign_in_one_domain_is_told_where_the_others_hide_it(sign: dict[str, float], says: str) -> None:
    def told_of(groups: float, domains: tuple[str, ...], whole: dict[str, float] | None = None, steps: int = 6) -> list[str]:
        health = RunHealth(True, domains)
        in_code = {f"domain/code/{name}": value for name, value in (GOOD | sign | {"rollout/groups": groups}).items()}
        metrics = (
            GOOD | (whole or {}) | in_code | {f"domain/math/{name}": value for name, value in (GOOD | {"rollout/groups": 30.0}).items()}
        )
        return [line for step in range(1, steps + 1) for line in health.new_signs(step, metrics if step % 2 else GOOD | (whole or {}))]

    assert [line.startswith(f"warning, step 5: {says}") for line in told_of(4.0, ("math", "code"))] == [True], (
        "steps without it do not count"
    )
    assert told_of(3.0, ("math", "code")) == [], "9 groups may be alike by chance"
    assert len(told_of(3.0, ("math", "code"), steps=8)) == 1
    assert told_of(4.0, ("code",)) == [], "the only domain is the batch"
    assert ["domain code" in line for line in told_of(4.0, ("math", "code"), sign)] == [False], "told of the whole batch"
