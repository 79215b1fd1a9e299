from __future__ import annotations

from pathlib import Path

from docs_scheduling import IMAGES, TIMELINES, draw


def test_every_picture_is_drawn_and_shown(tmp_path: Path) -> None:
    page = IMAGES.with_name("scheduling.md").read_text(encoding="utf-8")
    outcomes = draw(tmp_path)
    for timeline in TIMELINES:
        assert (tmp_path / timeline.file).read_bytes().startswith(b"\x89PNG")
        assert f"(images/{timeline.file})" in page
        assert (IMAGES / timeline.file).is_file()
    steps = {timeline.name: outcome.step_s for timeline, outcome in zip(TIMELINES, outcomes, strict=True)}
    assert steps["async_pause"] <= steps["async_abort"] < steps["one_step_off"] < steps["sync"], "what the page says of them"
    assert steps["async_abort"] < steps["async_drain"] < steps["sync"]
    assert steps["sync_oversample"] < steps["sync_filter"]
