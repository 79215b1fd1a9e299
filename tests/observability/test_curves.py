import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from roll_lite.observability import curves
from roll_lite.observability.curves import draw_curves


def record(step: int, domains: list[str]) -> dict[str, float]:
    values = {
        "actor/entropy": 1 / step,
        "rollout/response_length": 5.0,
        "mismatch/mean": 1e-6,
        "actor/approx_kl": 0.0,
        "actor/kl_ref": math.nan,
    }
    for prefix in ["", *(f"domain/{domain}/" for domain in domains)]:
        values |= {f"{prefix}reward/mean": step / 100, f"{prefix}reward/accuracy": step / 100}
        if step % 10 == 0:
            values[f"{prefix}validation/accuracy"] = step / 100
    return values | {"time/generate": 1.0, "time/train": 2.0, "time/train/actor": 1.5, "time/other": 0.1, "time/step": 3.1}


def share_of(picture: np.ndarray, color: str) -> float:
    """Share of the pixels that have exactly this colour."""
    wanted = np.array([int(color[place : place + 2], 16) for place in (1, 3, 5)])
    return float((np.rint(picture[..., :3] * 255) == wanted).all(axis=-1).mean())


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("steps", [1, 60])
def test_a_picture_with_every_domain_and_phase(tmp_path: Path, steps: int) -> None:
    records = {step: record(step, ["add", "make"]) for step in range(1, steps + 1)}
    picture = imread(draw_curves(tmp_path / "curves.png", records, ["add", "make"], "demo") or "")
    assert picture.shape == (880, 1540, 4)
    for color in (*curves.DOMAIN_COLORS[:2], *curves.PHASE_COLORS[:2], curves.OTHER_COLOR, curves.OVERALL_COLOR):
        assert share_of(picture, color) > 0, color
    phases = [share_of(picture, color) for color in curves.PHASE_COLORS[:2]]
    assert phases[1] == pytest.approx(2 * phases[0], rel=0.15), "the areas are the times: train took twice as long as generate"


def test_signs_that_a_run_learns_nothing_are_in_the_picture(tmp_path: Path) -> None:
    records = {step: record(step, []) for step in range(1, 5)}
    drawn = [draw_curves(tmp_path / f"{len(signs)}.png", records, [], "demo", signs) for signs in ([], ["no_gradient"])]
    plain, warned = (imread(path or "") for path in drawn)
    written = (plain != warned).any(axis=-1)
    assert written.any() and not written[60:].any(), "a line at the top"
    assert share_of(warned, curves.WARNING_COLOR) > 0 == share_of(plain, curves.WARNING_COLOR)


@pytest.mark.filterwarnings("error")
def test_nothing_and_next_to_nothing(tmp_path: Path) -> None:
    assert draw_curves(tmp_path / "none.png", {}, ["add"], "demo") is None and not (tmp_path / "none.png").exists()
    assert draw_curves(tmp_path / "little.png", {0: {"validation/accuracy": 0.5}}, ["add"], "demo") is not None


def test_no_back_end_is_chosen_for_the_process(tmp_path: Path) -> None:
    """Only pyplot chooses one; it must not be imported behind a user's back."""
    import subprocess
    import sys

    code = (
        "import sys, pathlib; from roll_lite.observability.curves import draw_curves;"
        "assert 'matplotlib' not in sys.modules; draw_curves(pathlib.Path(sys.argv[1]), {1: {'reward/mean': 1.0}}, [], 'x');"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "x.png")], check=True, timeout=60)
