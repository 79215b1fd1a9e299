"""Which checkpoints there are, which are kept, and which can be gone on from. The roles are stand-ins."""

from __future__ import annotations

import errno
import json
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.schema.algorithm import AdaptiveKlConfig, KlInRewardConfig
from roll_lite.config.schema.models import EmaConfig, ReferenceRoleConfig, RefreshConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.failures import RankFailed
from roll_lite.files import FileRecord, record
from roll_lite.pipeline import checkpoint as checkpoint_module
from roll_lite.pipeline import checkpoint_files
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.checkpoint import Checkpoints, expect_files
from roll_lite.pipeline.checkpoint_files import (
    DamagedCheckpoint,
    finished_checkpoints,
    known_tracker_ids,
    read_list,
    read_state,
    resumption,
    settled,
    write_list,
)
from roll_lite.pipeline.clusters import Models
from roll_lite.pipeline.rlvr import RLVRPipeline

ROOT = Path(__file__).resolve().parents[2]


class Ranks:
    """A cluster that writes a file where a role would save its state, at once or when it is told to."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        self.is_written = False
        self.fails = False
        self.is_busy = False
        self.lies_elsewhere = False
        """What it reports as written is not on the driver's disk."""

    def start_all(self, method: Any) -> Any:
        def result(within_s: float | None) -> Any:
            if self.is_busy and within_s is not None:
                raise RankFailed("actor_train", 0, method.__name__, "no answer")
            return self.all(method)

        return SimpleNamespace(result=result)

    def all(self, method: Any, folder: Path = Path(), names: Any = None) -> Any:
        if method.__name__ == "start_checkpoint":
            self.folder, self.is_written = folder, False
        elif method.__name__ == "checkpoint_is_written":
            return [True, self.is_written]
        elif method.__name__ == "finish_checkpoint":
            assert self.folder is not None
            if self.fails:
                raise RuntimeError("No space left on device")
            return [{}, self.wrote(self.folder)]
        elif method.__name__ == "save_hf":
            return [{name: one.bytes for name, one in self.wrote(folder).items()}, {}]
        elif names is not None:
            return [{name: record(folder / name)} for name in names]
        else:
            assert (folder / "weights").read_text() == "saved"
        return None

    def wrote(self, folder: Path) -> dict[str, FileRecord]:
        folder.mkdir(exist_ok=True)
        (folder / "weights").write_text("saved")
        found = {"weights": record(folder / "weights")}
        if self.lies_elsewhere:
            (folder / "weights").unlink()
        return found


def parts(*roles: str) -> Any:
    trained = {role: SimpleNamespace(ranks=Ranks(), loaded=lambda groups: nullcontext(), bring_home=lambda *_: None) for role in roles}
    return SimpleNamespace(trained=trained, reference=None)


ROLLOUTS = {"prompts": 3}
SOURCE: Any = SimpleNamespace(state_dict=lambda: ROLLOUTS, load_state_dict=lambda state, unfinished: None)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.chdir(ROOT)
    return load_config("tiny_grpo", ROOT / "examples/configs", ["checkpoint.keep=2"])


def resuming(config: RunConfig, folder: Path) -> RunConfig:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": folder})})


def test_the_newest_are_kept_by_number_not_by_name(config: RunConfig, tmp_path: Path) -> None:
    checkpoints = Checkpoints(config, tmp_path)
    for step in (999_998, 999_999, 1_000_000):
        checkpoints.save(parts("actor_train"), ROLLOUTS, {"steps_done": step})
    assert [folder.name for folder in finished_checkpoints(tmp_path)] == ["step_999999", "step_1000000"]
    assert resumption(tmp_path).checkpoint.name == "step_1000000"


def test_an_old_one_that_another_process_uses_does_not_end_the_run(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def discard(folder: Path) -> None:
        raise OSError(39, "Directory not empty", str(folder))

    monkeypatch.setattr("roll_lite.pipeline.checkpoint.discard", discard)
    checkpoints = Checkpoints(config, tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(parts("actor_train"), ROLLOUTS, {"steps_done": step})
    assert checkpoints.newest_step == 3
    assert "an old checkpoint could not be removed wholly: [Errno 39] Directory not empty" in caplog.text


def test_a_renamed_checkpoint_knows_its_step(config: RunConfig, tmp_path: Path) -> None:
    Checkpoints(config, tmp_path / "first").save(parts("actor_train"), ROLLOUTS, {"steps_done": 7})
    best = (tmp_path / "first/checkpoints/step_000007").rename(tmp_path / "best")
    checkpoints = Checkpoints(resuming(config, best), tmp_path / "second")
    checkpoints.load(parts("actor_train"), SOURCE)
    assert checkpoints.newest_step == 7


@pytest.mark.parametrize(("free", "steps", "told"), [(1, 100, True), (10**9, 100, False), (1, 1, False)])
def test_a_disk_without_room_for_the_next_one_is_told_in_time(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int, steps: int, told: bool
) -> None:
    monkeypatch.setattr("roll_lite.pipeline.checkpoint.free_bytes", lambda _: free)
    Checkpoints(config.model_copy(update={"steps": steps}), tmp_path).save(parts("actor_train"), ROLLOUTS, {"steps_done": 1})
    assert ("the next checkpoint will not fit: " in caplog.text) is told


def test_some_are_kept_for_ever(config: RunConfig, tmp_path: Path) -> None:
    settings = config.checkpoint.model_copy(update={"every": 2, "keep": 1, "keep_every": 6})
    checkpoints = Checkpoints(config.model_copy(update={"checkpoint": settings}), tmp_path)
    for step in range(2, 17, 2):
        checkpoints.save(parts("actor_train"), ROLLOUTS, {"steps_done": step})
        assert finished_checkpoints(tmp_path)[-1].name == f"step_{step:06d}"
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["step_000006", "step_000012", "step_000016"]


@pytest.fixture
def asynchronous(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"asynchronous": True, "keep": 1})})


def names(run_folder: Path) -> list[str]:
    return [folder.name for folder in finished_checkpoints(run_folder)]


def test_a_checkpoint_counts_once_everybody_has_written_it(asynchronous: RunConfig, tmp_path: Path) -> None:
    checkpoints, both = Checkpoints(asynchronous, tmp_path), parts("actor_train", "critic")
    checkpoints.finish_if_written()
    state = {"steps_done": 1}
    folder = checkpoints.save(both, ROLLOUTS, state)
    state["steps_done"] = 2
    for role in ("actor_train", "critic"):
        checkpoints.finish_if_written()
        assert names(tmp_path) == [], "it is still being written"
        both.trained[role].ranks.is_written = True
    checkpoints.finish_if_written()
    assert names(tmp_path) == ["step_000001"]
    written = ["actor_train/weights", "critic/weights", "state.json"]
    assert sorted(json.loads((folder / "files.json").read_text())) == written
    assert Checkpoints(resuming(asynchronous, folder), tmp_path / "next").load(both, SOURCE) == {"steps_done": 1}


def test_a_checkpoint_is_on_the_disk_before_it_counts(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Path]] = []

    def note(what: str, real: Any) -> None:
        def noted(first: Any, *others: Any) -> Any:
            path = Path(f"/proc/self/fd/{first}").resolve() if isinstance(first, int) else Path(first)
            if path.is_relative_to(tmp_path):  # threads of other tests may still draw curves
                done.append((what, path))
            return real(first, *others)

        monkeypatch.setattr(os, what, noted)

    note("fsync", os.fsync)
    note("rename", os.rename)
    note("replace", os.replace)
    whole = Checkpoints(config, tmp_path).save(parts("actor_train"), ROLLOUTS, {"steps_done": 1})
    draft = whole.with_suffix(".partial")
    renamed = done.index(("rename", draft))
    flushed = {path for _, path in done[:renamed]}
    assert {draft, draft / "actor_train", draft / "state.json", draft / "files.json"} <= flushed, "its ranks flush their files"
    assert done[renamed + 1 :] == [("fsync", whole.parent)]
    done.clear()
    write_list(whole, read_list(whole))
    draft = whole / f"files.json.{os.getpid()}.partial"
    assert done[-2:] == [("fsync", draft), ("replace", draft)], "the list of a finished one is replaced by one that is on the disk"


def test_the_next_one_waits_for_the_last_one_and_so_does_the_end(asynchronous: RunConfig, tmp_path: Path) -> None:
    checkpoints, actor = Checkpoints(asynchronous, tmp_path), parts("actor_train")
    checkpoints.save(actor, ROLLOUTS, {"steps_done": 1})
    checkpoints.save(actor, ROLLOUTS, {"steps_done": 2})
    assert names(tmp_path) == ["step_000001"], "the older one is kept until the newer one is written"
    checkpoints.finish()
    checkpoints.finish()
    assert names(tmp_path) == ["step_000002"]


def test_a_write_that_fails_is_told_and_leaves_the_one_before(asynchronous: RunConfig, tmp_path: Path) -> None:
    checkpoints, actor = Checkpoints(asynchronous, tmp_path), parts("actor_train")
    checkpoints.save(actor, ROLLOUTS, {"steps_done": 1})
    checkpoints.save(actor, ROLLOUTS, {"steps_done": 2})
    actor.trained["actor_train"].ranks.is_written = actor.trained["actor_train"].ranks.fails = True
    with pytest.raises(RuntimeError, match="No space left"):
        checkpoints.finish_if_written()
    assert names(tmp_path) == ["step_000001"] and resumption(tmp_path).checkpoint.name == "step_000001"


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_fails_finishes_what_it_was_writing_and_tells_its_own_cause(
    asynchronous: RunConfig, tmp_path: Path, fails: bool
) -> None:
    checkpoints, actor = Checkpoints(asynchronous, tmp_path), parts("actor_train")
    actor.trained["actor_train"].ranks.fails = fails
    with pytest.raises(ValueError, match="skipped"), checkpoints.finished():
        checkpoints.save(actor, ROLLOUTS, {"steps_done": 1})
        raise ValueError("too many updates were skipped")
    assert names(tmp_path) == ([] if fails else ["step_000001"])


@pytest.mark.parametrize(("written", "busy"), [(True, False), (False, False), (True, True)])
def test_an_interrupted_run_keeps_what_everybody_has_written(asynchronous: RunConfig, tmp_path: Path, written: bool, busy: bool) -> None:
    """It waits neither for writers nor for ranks that train."""
    checkpoints, both = Checkpoints(asynchronous, tmp_path), parts("actor_train", "critic")
    with pytest.raises(KeyboardInterrupt), checkpoints.finished():
        checkpoints.save(both, ROLLOUTS, {"steps_done": 1})
        both.trained["actor_train"].ranks.is_written, both.trained["critic"].ranks.is_written = True, written
        both.trained["critic"].ranks.is_busy = busy
        raise KeyboardInterrupt
    assert names(tmp_path) == (["step_000001"] if written and not busy else [])
    assert (tmp_path / "checkpoints" / "step_000001.partial").exists() is not (written and not busy)


def test_where_nothing_trains_there_is_no_average_and_no_reference_to_renew(config: RunConfig, tmp_path: Path) -> None:
    reference = ReferenceRoleConfig(refresh=RefreshConfig(every=1, weights="ema"))
    actor = config.actor_train.model_copy(update={"ema": EmaConfig()})
    generating = config.model_copy(update={"mode": "rollout_only", "actor_train": actor, "reference": reference})
    checkpoints = Checkpoints(generating, tmp_path)
    stub: Any = SimpleNamespace(timers=None, history=SimpleNamespace(records={1: {}}))
    pipeline = RLVRPipeline(generating, Models(None), SOURCE, stub, checkpoints, BatchFiles(generating, tmp_path))
    assert pipeline.refresh is None
    checkpoints.export_model(pipeline.models)
    checkpoints.save(pipeline.models, ROLLOUTS, {"steps_done": 1})
    assert names(tmp_path) == ["step_000001"]


def test_one_that_is_half_removed_is_none(config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(config, tmp_path)
    for step in (1, 2):
        checkpoints.save(parts("actor_train"), ROLLOUTS, {"steps_done": step})

    def killed(folder: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    monkeypatch.setattr("roll_lite.pipeline.checkpoint.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(parts("actor_train"), ROLLOUTS, {"steps_done": 3})
    assert [folder.name for folder in finished_checkpoints(tmp_path)] == ["step_000002", "step_000003"]


def test_a_checkpoint_brings_the_drivers_state_back(config: RunConfig, tmp_path: Path) -> None:
    state = {"steps_done": 4, "version": 3, "kl_in_loss": {"coef": 0.5}}
    Checkpoints(config, tmp_path).save(parts("actor_train", "critic"), ROLLOUTS, state)
    assert Checkpoints(resuming(config, tmp_path), tmp_path / "next").load(parts("actor_train", "critic"), SOURCE) == state


def test_state_of_other_settings_stays_behind_at_the_start_and_at_every_return_to_the_checkpoint(config: RunConfig, tmp_path: Path) -> None:
    state = {"steps_done": 4, "kl_in_reward": {"coef": 0.0}, "kl_in_loss": {"coef": 0.5}}
    Checkpoints(config, tmp_path).save(parts("actor_train"), ROLLOUTS, state)
    adaptive = KlInRewardConfig(coef=0.05, controller=AdaptiveKlConfig(target=0.1))
    changed = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"kl_in_reward": adaptive})})
    checkpoints, kept = Checkpoints(resuming(changed, tmp_path), tmp_path / "next"), {"steps_done": 4, "kl_in_loss": {"coef": 0.5}}
    assert checkpoints.load(parts("actor_train"), SOURCE) == kept
    returned = checkpoints.go_back(parts("actor_train"))
    assert returned is not None and returned["pipeline"] == kept


def test_samples_under_way_come_back_unless_the_settings_of_samples_changed(config: RunConfig, tmp_path: Path) -> None:
    def given(changed: RunConfig) -> bytes:
        found: list[bytes] = []
        source: Any = SimpleNamespace(load_state_dict=lambda state, unfinished: found.append(unfinished))
        Checkpoints(resuming(changed, tmp_path), tmp_path / "next").load(parts("actor_train"), source)
        return found[0]

    folder = Checkpoints(config, tmp_path).save(parts("actor_train"), ROLLOUTS, {"steps_done": 2}, b"samples")
    assert "unfinished.parquet" in json.loads((folder / "files.json").read_text())
    assert given(config) == given(config.model_copy(update={"steps": 99})) == b"samples"
    hotter = next(iter(config.domains.values())).sampling.model_copy(update={"temperature": 0.9})
    domains = {name: domain.model_copy(update={"sampling": hotter}) for name, domain in config.domains.items()}
    assert given(config.model_copy(update={"domains": domains})) == b""
    (folder / "unfinished.parquet").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="unfinished.parquet has changed since it was written"):
        given(config)


def test_a_run_in_which_nothing_trains_has_checkpoints_too(config: RunConfig, tmp_path: Path) -> None:
    Checkpoints(config, tmp_path).save(parts(), ROLLOUTS, {"steps_done": 4})
    assert Checkpoints(resuming(config, tmp_path), tmp_path / "next").load(parts(), SOURCE) == {"steps_done": 4}


def test_a_checkpoint_without_a_role_is_refused(config: RunConfig, tmp_path: Path) -> None:
    Checkpoints(config, tmp_path).save(parts("actor_train"), ROLLOUTS, {"steps_done": 1})
    with pytest.raises(ValueError, match="holds nothing for critic"):
        Checkpoints(resuming(config, tmp_path), tmp_path / "next").load(parts("actor_train", "critic"), SOURCE)


def test_a_reference_that_follows_the_actor_is_renewed_and_kept(config: RunConfig, tmp_path: Path) -> None:
    """By what the actor writes for it, before the folder goes again."""
    calls: list[tuple[str, ...]] = []

    def cluster(role: str) -> Any:
        def all_ranks(method: Any, folder: Path, *args: Any) -> list[Any]:
            calls.append((role, method.__name__, *map(str, args)))
            if method.__name__ == "save_hf":
                folder.mkdir()
                (folder / "weights").write_text("of the actor")
                return [{"weights": len("of the actor")}]
            if method.__name__ == "load_hf":
                assert (folder / "weights").read_text() == "of the actor"
            return []

        return SimpleNamespace(ranks=SimpleNamespace(all=all_ranks), loaded=lambda groups: nullcontext(), bring_home=lambda *_: None)

    clusters: Any = SimpleNamespace(actor=cluster("actor"), reference=cluster("reference"))
    refresh = RefreshConfig(every=2, weights="ema")
    Checkpoints(config, tmp_path).refresh_reference(clusters, refresh)
    assert calls == [("actor", "save_hf", "True"), ("reference", "load_hf")] and not list(tmp_path.iterdir())
    following = config.model_copy(update={"reference": ReferenceRoleConfig(refresh=refresh)})
    both = parts("actor_train")
    both.reference = parts("reference").trained["reference"]
    folder = Checkpoints(following, tmp_path).save(both, ROLLOUTS, {"steps_done": 1})
    assert (folder / "reference" / "weights").is_file()
    Checkpoints(config, tmp_path).save(both, ROLLOUTS, {"steps_done": 2})
    loaded: list[str] = []
    both.reference.ranks.all = lambda method, *_: loaded.append(method.__name__) or []
    Checkpoints(resuming(following, tmp_path), tmp_path / "next").load(both, SOURCE)
    assert loaded == [], "where refresh is new, the reference stays the start model"
    Checkpoints(resuming(following, folder), tmp_path / "next").load(both, SOURCE)
    assert loaded == ["file_records", "load_checkpoint"]


@pytest.mark.parametrize("kind", ["at once", "asynchronous", "exported"])
def test_files_that_lie_on_another_nodes_disk_end_the_run(
    asynchronous: RunConfig, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("roll_lite.pipeline.checkpoint.SEEN_WITHIN_S", 0.0)
    checkpoints, both = Checkpoints(asynchronous if kind == "asynchronous" else config, tmp_path), parts("actor_train", "critic")
    both.trained["critic"].ranks.lies_elsewhere = True
    place = "critic" if kind == "exported" else "step_000001.partial"
    with pytest.raises(RuntimeError, match=rf"{place} lacks 1 of 1 files that ranks of critic report as written, .*: (critic/)?weights"):
        if kind == "exported":
            checkpoints.export_model(both)
        else:
            checkpoints.save(both, ROLLOUTS, {"steps_done": 1})
            checkpoints.finish()
    assert names(tmp_path) == []


def test_files_of_another_node_may_be_seen_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roll_lite.pipeline.checkpoint.time.sleep", lambda _: (tmp_path / "weights").write_text("saved"))
    expect_files(tmp_path, {"weights": 5}, "critic")


@pytest.mark.parametrize("name", ["critic/weights", "state.json"])
def test_a_flipped_byte_is_noticed_before_anything_is_loaded(config: RunConfig, tmp_path: Path, name: str) -> None:
    Checkpoints(config, tmp_path).save(parts("actor_train", "critic"), ROLLOUTS, {"steps_done": 1})
    folder = Checkpoints(config, tmp_path).save(parts("actor_train", "critic"), ROLLOUTS, {"steps_done": 2})
    assert sorted(json.loads((folder / "files.json").read_text())) == ["actor_train/weights", "critic/weights", "state.json"]
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content.replace(b"s", b"t", 1))
    remedy = f"checkpoint.resume={tmp_path}/checkpoints/step_000001"
    with pytest.raises(ValueError, match=rf"step_000002/{name} .*checkpoint is damaged; .*{remedy}"):
        Checkpoints(resuming(config, tmp_path), tmp_path / "next").load(parts("actor_train", "critic"), SOURCE)


@pytest.mark.parametrize("left", [True, False])
def test_a_run_that_goes_on_in_its_folder_passes_a_damaged_one_over(config: RunConfig, tmp_path: Path, left: bool) -> None:
    """Without an earlier one it ends, and so does the next start: it does not start afresh unasked."""
    for step in (1, 2) if left else (2,):
        folder = Checkpoints(config, tmp_path).save(parts("actor_train"), ROLLOUTS, {"steps_done": step})
    (folder / "actor_train" / "weights").write_bytes(b"other weights.."[: (folder / "actor_train" / "weights").stat().st_size])
    for _ in range(1 if left else 2):
        checkpoints = Checkpoints(resuming(config, folder), tmp_path)
        with nullcontext() if left else pytest.raises(ValueError, match="weights has changed since .*there is no earlier one beside it"):
            assert checkpoints.load(parts("actor_train"), SOURCE) == {"steps_done": 1}
    assert (folder / "state.json.damaged").exists() == left and len(finished_checkpoints(tmp_path)) == 1
    if left:
        assert checkpoints.newest is not None and checkpoints.newest.name == "step_000001", "it is named in the journal"


@pytest.mark.parametrize("damaged", [[20], [18, 20]])
def test_damaged_ones_that_auto_passed_over_do_not_take_the_place_of_good_ones(
    config: RunConfig, tmp_path: Path, damaged: list[int]
) -> None:
    """As many are kept as are damaged."""
    settings, roles = config.checkpoint.model_copy(update={"keep": 3, "resume": "auto"}), parts("actor_train")
    auto = config.model_copy(update={"checkpoint": settings, "run_dir": tmp_path, "experiment": "demo"})
    run = tmp_path / "demo/2026-01-01_00-00-00"
    good, *bad = (Checkpoints(auto, run).save(roles, ROLLOUTS, {"steps_done": step}) for step in (10, *damaged))
    for folder in bad:
        (folder / "actor_train/weights").unlink()
    resumed, _ = settled(auto.model_copy(update={"checkpoint": settings.model_copy(update={"keep": len(bad)})}))
    assert resumed.checkpoint.source == good
    checkpoints = Checkpoints(resumed, run)
    checkpoints.load(roles, SOURCE)
    assert all((folder / "state.json.damaged").exists() for folder in bad)
    newer = checkpoints.save(roles, ROLLOUTS, {"steps_done": 15})
    assert finished_checkpoints(run) == [good, newer][-len(bad) :] and resumption(run).checkpoint == newer


def test_a_checkpoint_that_cannot_be_read_at_present_is_not_marked(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roles, run = parts("actor_train"), tmp_path / "demo/2026-01-01_00-00-00"
    settings = config.checkpoint.model_copy(update={"keep": 3, "resume": "auto"})
    auto = config.model_copy(update={"checkpoint": settings, "run_dir": tmp_path, "experiment": "demo"})
    good, later = (Checkpoints(auto, run).save(roles, ROLLOUTS, {"steps_done": step}) for step in (10, 20))

    def stale(checkpoint: Path, **how: Any) -> dict[str, Any]:
        if checkpoint.name == later.name:
            raise OSError(errno.ESTALE, "Stale file handle")
        return read_state(checkpoint, **how)

    for module in (checkpoint_module, checkpoint_files):
        monkeypatch.setattr(module, "read_state", stale)
    resumed, notes = settled(auto)
    assert resumed.checkpoint.source == good and "Stale" in notes[0]
    Checkpoints(resumed, run).load(roles, SOURCE)
    assert (later / "state.json").exists() and not list(later.glob("*.damaged"))


def given_to(source: list[Any]) -> Any:
    return SimpleNamespace(load_state_dict=lambda state, unfinished: source.append((state, unfinished)))


def test_samples_under_way_are_renewed_in_a_checkpoint_of_the_same_step(config: RunConfig, tmp_path: Path) -> None:
    """A run may be preempted time and again within one step."""
    roles, found = parts("actor_train"), list[Any]()
    folder = Checkpoints(config, tmp_path).save(roles, {"prompts": 3}, {"steps_done": 2}, b"few")
    for number in (1, 2, 3):
        checkpoints = Checkpoints(resuming(config, folder), tmp_path)
        checkpoints.load(roles, given_to(found))
        written = (folder / "actor_train/weights").stat().st_mtime_ns
        assert checkpoints.save(roles, {"prompts": 3 + number}, {"steps_done": 2, "validation": number}, b"more" * number) == folder
        assert (folder / "actor_train/weights").stat().st_mtime_ns == written
        newest = {f"state-{2 - number % 2}.json", f"unfinished-{2 - number % 2}.parquet"}
        assert json.loads((folder / "files.json").read_text()).keys() == {"actor_train/weights", "state.json", *newest}
    assert Checkpoints(resuming(config, folder), tmp_path).load(roles, given_to(found)) == {"steps_done": 2, "validation": 3}
    assert found == [({"prompts": 3 + number}, b"more" * number or b"few") for number in range(4)]
    (folder / "unfinished-1.parquet").write_bytes(b"lessmoremore")
    with pytest.raises(ValueError, match="unfinished-.*has changed since it was written"):
        Checkpoints(resuming(config, folder), tmp_path).load(roles, given_to(found))


@pytest.mark.parametrize("calls", range(4))
def test_a_kill_as_samples_are_renewed_leaves_the_checkpoint_as_it_was(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    checkpoints, roles, left = Checkpoints(config, tmp_path), parts("actor_train"), [calls]
    folder = checkpoints.save(roles, ROLLOUTS, {"steps_done": 2}, b"few")

    def killed(real: Any) -> Any:
        def call(*args: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise KeyboardInterrupt
            return real(*args)

        return call

    monkeypatch.setattr("roll_lite.pipeline.checkpoint.record", killed(record))
    for name in ("flush", "write_list"):
        monkeypatch.setattr(f"roll_lite.pipeline.checkpoint.{name}", killed(getattr(checkpoint_module, name)))
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(roles, {"prompts": 4}, {"steps_done": 2}, b"more")
    monkeypatch.undo()
    monkeypatch.chdir(ROOT)
    found = list[Any]()
    Checkpoints(resuming(config, folder), tmp_path).load(roles, given_to(found))
    assert found == [(ROLLOUTS, b"few")]


def test_a_full_disk_as_samples_are_renewed_is_told_and_the_checkpoint_counts(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints, roles, found = Checkpoints(config, tmp_path), parts("actor_train"), list[Any]()
    folder = checkpoints.save(roles, ROLLOUTS, {"steps_done": 2}, b"few")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("roll_lite.pipeline.checkpoint.flush", full)
    assert checkpoints.save(roles, {"prompts": 4}, {"steps_done": 2}, b"more") == folder
    assert "step_000002 keeps the state that it has, prompts under way start again: [Errno 28] No space left" in caplog.text
    Checkpoints(resuming(config, folder), tmp_path).load(roles, given_to(found))
    assert found == [(ROLLOUTS, b"few")]


def test_a_checkpoint_of_another_run_stays_as_it_is(config: RunConfig, tmp_path: Path) -> None:
    roles = parts("actor_train")
    theirs = Checkpoints(config, tmp_path / "other").save(roles, ROLLOUTS, {"steps_done": 2}, b"few")
    before = {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()}
    checkpoints = Checkpoints(resuming(config, theirs), tmp_path / "own")
    checkpoints.load(roles, given_to([]))
    assert checkpoints.save(roles, ROLLOUTS, {"steps_done": 2}, b"more").parent.parent == tmp_path / "own"
    assert {path: path.read_bytes() for path in theirs.rglob("*") if path.is_file()} == before


def test_a_resumed_run_removes_what_a_killed_save_left(config: RunConfig, tmp_path: Path) -> None:
    folder = Checkpoints(config, tmp_path).save(parts("actor_train"), ROLLOUTS, {"steps_done": 2})
    (left := tmp_path / "checkpoints/step_000003.partial/actor_train").mkdir(parents=True)
    Checkpoints(resuming(config, folder), tmp_path).load(parts("actor_train"), SOURCE)
    assert not left.parent.exists()


class Copying(Ranks):
    """Two ranks whose copies are their names."""

    world_size = 2

    def __init__(self, told: list[str], role: str) -> None:
        super().__init__()
        self.told, self.role, self.size = told, role, 5_000_000
        self.dies = False

    def start_all(self, method: Any, room: float = 0.0) -> Any:
        assert room == 0.25 * 80e6 / 4, "two roles of two ranks"
        calls = [SimpleNamespace(kept=[f"{self.role} {rank}"]) for rank in range(2)]
        return SimpleNamespace(calls=calls, result=self._sizes)

    def _sizes(self) -> list[int]:
        self.fail()
        return [0, self.size]

    def fail(self) -> None:
        if self.dies:
            raise RankFailed(self.role, 1, "copy_state", "its process died", retryable=True)

    def all(self, method: Any, folder: Any = Path(), names: Any = None) -> Any:
        if method.__name__ == "load_copy":
            self.fail()
            self.told += folder
            return None
        if method.__name__ == "load_checkpoint":
            self.told.append(f"{self.role} of {folder.parent.name}")
        return super().all(method, folder, names)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("roll_lite.pipeline.checkpoint.ray.cluster_resources", lambda: {"object_store_memory": 80e6})
    told: list[str] = []
    trained = {role: SimpleNamespace(ranks=Copying(told, role), loaded=lambda groups: nullcontext()) for role in ("actor_train", "critic")}
    return SimpleNamespace(trained=trained, reference=None, told=told)


OF_COPY = ["actor_train 0", "actor_train 1", "critic 0", "critic 1"]


def test_lost_ranks_load_the_newer_of_checkpoint_and_copy(config: RunConfig, tmp_path: Path, copying: Any) -> None:
    checkpoints = Checkpoints(config, tmp_path)
    checkpoints.save(copying, ROLLOUTS, {"steps_done": 2})
    checkpoints.copy_state(copying, {"prompts": 9}, {"steps_done": 3})
    found = checkpoints.go_back(copying)
    assert found is not None and (found["pipeline"], found["rollouts"]) == ({"steps_done": 3}, {"prompts": 9})
    assert copying.told == OF_COPY and (checkpoints.newest_step, checkpoints.copied_step) == (2, 3)
    checkpoints.save(copying, ROLLOUTS, {"steps_done": 4})
    copying.told.clear()
    found = checkpoints.go_back(copying)
    assert found is not None and found["pipeline"] == {"steps_done": 4} and checkpoints.copied_step == 0
    assert copying.told == ["actor_train of step_000004", "critic of step_000004"]


def test_a_step_that_is_saved_is_not_saved_again(config: RunConfig, tmp_path: Path) -> None:
    """Replacing a whole checkpoint would leave a moment without it."""
    checkpoints, roles = Checkpoints(config, tmp_path), parts("actor_train")
    folder = checkpoints.save(roles, ROLLOUTS, {"steps_done": 2})
    written = (folder / "state.json").stat().st_ino
    assert checkpoints.save(roles, ROLLOUTS, {"steps_done": 2}) == folder and (folder / "state.json").stat().st_ino == written


def test_lost_ranks_load_the_checkpoint_before_a_damaged_one(config: RunConfig, tmp_path: Path) -> None:
    checkpoints, roles = Checkpoints(config, tmp_path), parts("actor_train")
    older, newer = (checkpoints.save(roles, ROLLOUTS, {"steps_done": step}) for step in (2, 4))
    (newer / "actor_train/weights").write_text("SAVED")
    with pytest.raises(DamagedCheckpoint) as caught:
        checkpoints.go_back(roles)
    checkpoints.set_aside_newest(caught.value)
    found = checkpoints.go_back(roles)
    assert found is not None and found["pipeline"] == {"steps_done": 2} and finished_checkpoints(tmp_path) == [older]
    resumed = Checkpoints(resuming(config, older), tmp_path / "next")
    resumed.load(roles, SOURCE)
    with pytest.raises(DamagedCheckpoint):
        resumed.set_aside_newest(caught.value)
    assert finished_checkpoints(tmp_path) == [older], "it belongs to another run"


def test_ids_at_tracking_services_are_in_checkpoints(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "trackers.json").write_text('{"wandb": "abc"}')
    checkpoints, roles = Checkpoints(config, tmp_path), parts("actor_train")
    folder = checkpoints.save(roles, ROLLOUTS, {"steps_done": 2})
    assert known_tracker_ids(folder) == {"wandb": "abc"}
    (tmp_path / "trackers.json").write_text('{"wandb": "abc", "mlflow": "def"}')
    checkpoints.save(roles, ROLLOUTS, {"steps_done": 2}, b"samples")
    assert known_tracker_ids(folder) == {"wandb": "abc", "mlflow": "def"}, "of the newest state"
    (tmp_path / "trackers.json").write_text('{"wandb": "abc"}')
    (folder / "state-1.json").write_text("{")
    assert known_tracker_ids(folder) == {"wandb": "abc"}, "the run's folder has them, too"
    (tmp_path / "trackers.json").unlink()
    assert known_tracker_ids(folder) == {}


def test_a_copy_counts_once_all_have_made_it_and_is_given_up_if_loading_fails(config: RunConfig, tmp_path: Path, copying: Any) -> None:
    checkpoints, critic = Checkpoints(config, tmp_path), copying.trained["critic"].ranks
    checkpoints.copy_state(copying, ROLLOUTS, {"steps_done": 3})
    critic.dies = True
    with pytest.raises(RankFailed):
        checkpoints.copy_state(copying, ROLLOUTS, {"steps_done": 4})
    assert checkpoints.copied_step == 3
    with pytest.raises(RankFailed):
        checkpoints.go_back(copying)
    assert checkpoints.go_back(copying) is None and checkpoints.copied_step == 0


def test_without_room_no_copies_are_made(config: RunConfig, tmp_path: Path, copying: Any, caplog: pytest.LogCaptureFixture) -> None:
    settings = config.checkpoint.model_copy(update={"in_memory_every": 2})
    checkpoints = Checkpoints(config.model_copy(update={"checkpoint": settings}), tmp_path)
    assert checkpoints.copy_every == 2
    copying.trained["critic"].ranks.size = 5_242_881
    checkpoints.copy_state(copying, ROLLOUTS, {"steps_done": 2})
    assert checkpoints.copied_step == checkpoints.copy_every == 0
    (said,) = caplog.messages
    assert said.startswith("checkpoint.in_memory_every: ") and "a rank of critic needs 5 MB" in said and "ray.object_store_mb" in said


def test_no_resumption_where_none_was_asked_for(config: RunConfig, tmp_path: Path) -> None:
    assert Checkpoints(config, tmp_path).load(parts("actor_train"), SOURCE) is None


@pytest.mark.parametrize(("every", "saved"), [(0, []), (1, [1, 2, 3, 4, 5]), (2, [2, 4, 5]), (5, [5]), (9, [5])])
def test_the_last_step_leaves_a_checkpoint_where_there_are_any(every: int, saved: list[int]) -> None:
    pipeline = MagicMock(refresh=None)
    pipeline.checkpoints.copy_every = 2
    pipeline.config.checkpoint.every, pipeline.last_step = every, 5
    pipeline.save_and_validate = lambda: RLVRPipeline.save_and_validate(pipeline)
    pipeline.due = lambda number: RLVRPipeline.due(pipeline, number)
    steps, copied = [], []
    pipeline.save_checkpoint = lambda: steps.append(pipeline.steps_done)
    pipeline.copy_state = lambda: copied.append(pipeline.steps_done)
    for pipeline.steps_done in range(1, 6):
        RLVRPipeline.between_steps(pipeline)
    assert steps == saved and copied == [2, 4]
