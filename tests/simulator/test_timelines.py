from __future__ import annotations

from pathlib import Path

from roll_lite.simulator.timelines import TIMELINES, draw

ROOT = Path(__file__).resolve().parents[2]


def test_every_picture_is_drawn_and_shown(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "scheduling.md").read_text(encoding="utf-8")
    outcomes = draw(tmp_path)
    for timeline in TIMELINES:
        assert (tmp_path / timeline.file).read_bytes().startswith(b"\x89PNG")
        assert f"(images/{timeline.file})" in page
        assert (ROOT / "docs" / "images" / timeline.file).is_file()
    steps = {timeline.name: outcome.step_s for timeline, outcome in zip(TIMELINES, outcomes, strict=True)}
    assert steps["async_pause"] <= steps["async_abort"] < steps["one_step_off"] < steps["sync"], "what the page says of them"
    assert steps["async_abort"] < steps["async_drain"] < steps["sync"]
    assert steps["sync_oversample"] < steps["sync_filter"]
