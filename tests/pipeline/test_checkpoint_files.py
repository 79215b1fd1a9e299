"""Which checkpoint is gone on from, and what is said of one that is not what was written."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import record
from roll_lite.pipeline.checkpoint_files import (
    SCHEMA_VERSION,
    check_resumption,
    check_sums,
    finished_checkpoints,
    read_list,
    read_state,
    resumption,
    settled,
    write_list,
)

ROOT = Path(__file__).resolve().parents[2]


def checkpoint(run: Path, step: int, version: int | None = SCHEMA_VERSION) -> Path:
    folder = run / "checkpoints" / f"step_{step:06d}"
    (folder / "actor_train").mkdir(parents=True)
    (folder / "actor_train" / "weights").write_bytes(bytes(range(100)))
    (folder / "state.json").write_text(json.dumps({"schema_version": version, "pipeline": {"steps_done": step}}))
    write_list(folder, {name: record(folder / name) for name in ("actor_train/weights", "state.json")})
    return folder


def resumed(run: Path, from_folder: Path | None) -> Path:
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text(json.dumps({"checkpoint": {"resume": str(from_folder) if from_folder else None}}))
    return run


def config_of(run_dir: Path) -> RunConfig:
    return load_config("tiny_grpo", ROOT / "examples/configs", [f"run_dir={run_dir}", "experiment=demo", "checkpoint.resume=auto"])


def test_auto_is_the_newest_good_checkpoint_of_the_experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, notes = settled(config_of(tmp_path))
    assert (config.checkpoint.resume, config.checkpoint.source) == (None, None)
    assert notes == [f"checkpoint.resume: auto: no checkpoint in {tmp_path / 'demo'}, the run starts afresh"]
    first, tenth = "2026-01-01_00-00-00_9", "2026-01-01_00-00-00_10"
    older, newer, newest = (checkpoint(tmp_path / "demo" / run, step) for run, step in ((first, 9), (tenth, 3), (tenth, 4)))
    checkpoint(tmp_path / "other" / "2026-01-02_00-00-00", 10)
    (tmp_path / "demo" / "2026-01-02_00-00-00").mkdir()
    assert settled(config_of(tmp_path))[0].checkpoint.source == newest
    (newest / "actor_train" / "weights").unlink()
    config, (note,) = settled(config_of(tmp_path))
    assert config.checkpoint.source == newer
    assert "step_000004/actor_train/weights is missing. The checkpoint is damaged; an older one is looked for" in note
    shutil.rmtree(newer)
    assert settled(config_of(tmp_path))[0].checkpoint.source == older, "of the run before"


@pytest.mark.parametrize(("resume", "steps", "refused"), [("named", 3, True), ("named", 4, False), ("auto", 3, False)])
def test_a_named_checkpoint_beyond_the_last_step_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: str, steps: int, refused: bool
) -> None:
    """With auto, the run is over."""
    monkeypatch.chdir(ROOT)
    later = checkpoint(tmp_path / "demo" / "2026-01-01_00-00-00", 4)
    state = json.loads((later / "state.json").read_text())
    (later / "state.json").write_text(json.dumps({**state, "rollouts": {}}))
    write_list(later, {name: record(later / name) for name in ("actor_train/weights", "state.json")})
    config = config_of(tmp_path).model_copy(update={"steps": steps})
    if resume == "named":
        config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": later})})
    said = [problem.message for problem in check_resumption(config)]
    assert any(f"was written after step 4, and steps is {steps}; raise steps, or name an earlier one" in one for one in said) is refused


def test_auto_does_not_start_afresh_beside_a_damaged_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config, damaged = config_of(tmp_path), checkpoint(tmp_path / "demo" / "2026-01-01_00-00-00", 2)
    (damaged / "actor_train" / "weights").unlink()
    for _ in range(2):
        (problem,) = check_resumption(config)
        assert problem.path == "checkpoint.resume" and "step_000002/actor_train/weights is missing" in problem.message
        assert "there is no earlier one beside it" in problem.message


def test_the_newest_of_a_run_or_a_checkpoint_itself(tmp_path: Path) -> None:
    older, newer = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    assert resumption(tmp_path).checkpoint == newer and resumption(tmp_path).notes == []
    assert resumption(older).checkpoint == older


@pytest.mark.parametrize("left_out", ["state.json", "files.json"])
def test_an_unfinished_one_does_not_hide_the_one_before_it(tmp_path: Path, left_out: str) -> None:
    good, unfinished = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    (unfinished / left_out).unlink()
    (tmp_path / "checkpoints" / "step_000006.partial").mkdir()
    choice = resumption(tmp_path)
    assert choice.checkpoint == good and finished_checkpoints(tmp_path) == [good]
    assert choice.notes == [f"step_000004 in {tmp_path / 'checkpoints'} was not finished, or is damaged; going on from step_000002"]
    with pytest.raises(ValueError, match=rf"step_000004 is an unfinished checkpoint; the one before it .*checkpoint\.resume={good}"):
        resumption(unfinished)


def test_a_resumed_run_without_checkpoints_leads_to_what_it_went_on_from(tmp_path: Path) -> None:
    first = checkpoint(tmp_path / "first", 2)
    second = resumed(tmp_path / "second", first.parent.parent)
    third = resumed(tmp_path / "third", second)
    choice = resumption(third)
    assert choice.checkpoint == first
    assert choice.notes[0] == f"{third} has written no checkpoint; going on from where it began, {second}"
    fourth = resumed(tmp_path / "fourth", first)
    assert resumption(fourth).checkpoint == first
    own = checkpoint(third, 4)
    assert resumption(third).checkpoint == own


def test_where_there_is_none(tmp_path: Path) -> None:
    for config in (None, tmp_path / "circle"):
        run = resumed(tmp_path / "circle", config)
        with pytest.raises(ValueError, match="circle is no checkpoint .* and no run with finished checkpoints"):
            resumption(run)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("actor_train/weights", None, "actor_train/weights is missing"),
        ("actor_train/weights", b"short", "actor_train/weights has 5 bytes; 100 were written"),
        ("state.json", b"", r"state.json has 0 bytes; \d+ were written"),
        ("files.json", b"[1]", "files.json is not a list of files"),
        ("files.json", b'{"a', "files.json cannot be read as JSON"),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    good, bad = checkpoint(tmp_path, 2), checkpoint(tmp_path, 4)
    if content is None:
        (bad / name).unlink()
    else:
        (bad / name).write_bytes(content)
    with pytest.raises(ValueError, match=rf"^checkpoint\.resume: .*{said}.*damaged; the one before it .*checkpoint\.resume={good}$"):
        read_state(bad)


def test_a_flipped_bit_changes_the_checksum(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, 2)
    wanted = read_list(folder)
    assert wanted is not None and wanted["actor_train/weights"].sha256 == hashlib.sha256(bytes(range(100))).hexdigest()
    file = folder / "actor_train" / "weights"
    check_sums(folder, wanted, [("actor_train/weights", record(file))])
    file.write_bytes(bytes([1, *range(1, 100)]))
    read_state(folder)
    with pytest.raises(ValueError, match=r"weights has changed since it was written.*there is no earlier one beside it"):
        check_sums(folder, wanted, [("actor_train/weights", record(file))])


@pytest.mark.parametrize("version", [4, None])
def test_another_version_is_refused(tmp_path: Path, version: int | None) -> None:
    folder = checkpoint(tmp_path, 2, version)
    with pytest.raises(
        ValueError, match=f"has schema version {version}, this program reads {SCHEMA_VERSION}: go on with the version of roll_lite"
    ):
        read_state(folder)
