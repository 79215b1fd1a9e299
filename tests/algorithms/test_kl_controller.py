import math

import pytest

from roll_lite.algorithms.kl import KlController


def adaptive(coef: float = 0.1, target: float = 0.05, horizon: float = 1000.0) -> KlController:
    return KlController(coef, target, horizon)


@pytest.mark.parametrize(
    ("kl", "samples", "expected"),
    [
        (0.055, 100, 0.1 * (1 + 0.1 * 0.1)),  # 10 % above the target, a tenth of the horizon
        (0.5, 100, 0.1 * (1 + 0.2 * 0.1)),  # far above: a fifth counts
        (0.0, 100, 0.1 * (1 - 0.2 * 0.1)),
        (-0.3, 100, 0.1 * (1 - 0.2 * 0.1)),  # k1 may be negative
        (0.05, 100, 0.1),
        (0.5, 0, 0.1),
    ],
)
def test_adaptive_steps_by_hand(kl: float, samples: int, expected: float) -> None:
    controller = adaptive()
    controller.step(kl, samples)
    assert controller.coef == pytest.approx(expected, rel=1e-12)


def test_a_fixed_coefficient_stays() -> None:
    controller = KlController(0.1)
    controller.step(5.0, 10_000)
    assert controller.coef == 0.1


def test_a_huge_batch_does_not_turn_the_sign() -> None:
    """Samples / horizon is at most 1: 1 - 0.2 * 100 would make the penalty a reward."""
    controller = adaptive(horizon=10.0)
    controller.step(0.0, 1000)
    assert controller.coef == pytest.approx(0.08)


def test_coefficient_holds_the_kl_near_its_target() -> None:
    """A policy whose KL is 0.01 / coef settles where that is the target."""
    controller = adaptive(coef=1.0)
    for _ in range(1000):
        controller.step(0.01 / controller.coef, 100)
    assert controller.coef == pytest.approx(0.2, rel=1e-3)


def test_state_goes_on_where_it_was() -> None:
    """FINDINGS 6.11: the controller is part of the checkpoint."""
    first, through = adaptive(), adaptive()
    first.step(0.2, 64)
    resumed = adaptive()
    resumed.load_state_dict(first.state_dict())
    resumed.step(0.01, 64)
    through.step(0.2, 64)
    through.step(0.01, 64)
    assert resumed.coef == through.coef


def test_a_fixed_coefficient_may_be_changed_for_a_resumed_run() -> None:
    controller = KlController(0.3)
    controller.load_state_dict({"coef": 0.1})
    assert controller.coef == 0.3


@pytest.mark.parametrize("kl", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_measures_nothing(kl: float) -> None:
    """The guard of the updates says what made it so."""
    controller = adaptive()
    controller.step(kl, 3)
    assert controller.coef == 0.1
