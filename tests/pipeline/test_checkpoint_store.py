"""Checkpoints in a store: what counts, what lies where, and what an outage or damage costs. Ranks are stand-ins, on nodes with disks of
their own. Whole runs: tests/chaos/test_checkpoint_store.py and tests/integration/test_several_hosts.py."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import record, remote_folder, try_store
from roll_lite.observability.run_folder import check_store, continues_in_folder
from roll_lite.pipeline.checkpoint import LAST_TRIES, Checkpoints
from roll_lite.pipeline.checkpoint_files import check_resumption, finished_checkpoints, resumption, settled
from roll_lite.workers.model import ModelWorker

pytestmark = pytest.mark.filterwarnings("ignore:UPath 'flaky'")

ROOT = Path(__file__).resolve().parents[2]
ROLLOUTS = {"prompts": 3}
SOURCE: Any = SimpleNamespace(state_dict=lambda: ROLLOUTS, load_state_dict=lambda state, unfinished: None)
RUN = "2026-01-01_00-00-00"


class Flaky(LocalFileSystem):
    protocol = "flaky"
    is_down = False
    written: list[str]

    def info(self, path: Any, **options: Any) -> Any:
        self.answer()
        return super().info(path, **options)

    def ls(self, path: Any, detail: bool = False, **options: Any) -> Any:
        self.answer()
        return super().ls(path, detail, **options)

    def put_file(self, lpath: Any, rpath: Any, **options: Any) -> None:
        self.answer()
        type(self).written.append(Path(rpath).name)
        super().put_file(lpath, rpath, **options)

    def answer(self) -> None:
        if type(self).is_down:
            raise TimeoutError("no answer")


fsspec.register_implementation("flaky", Flaky, clobber=True)


class Ranks:
    """One rank on a node whose disk is another folder: paths below `top` lead there."""

    def __init__(self, top: Path, disk: Path) -> None:
        self.top, self.disk = top, disk
        self.content = "saved"
        self.loaded: str | None = None
        self.me: Any = SimpleNamespace(_share_of_node=lambda items: items)

    def there(self, path: Path) -> Path:
        return self.disk / path.relative_to(self.top)

    def all(self, method: Any, *args: Any) -> list[Any]:
        if method is ModelWorker.start_checkpoint:
            self.folder = self.there(args[0])
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / "weights").write_text(self.content)
        elif method is ModelWorker.finish_checkpoint:
            return [{"weights": record(self.folder / "weights")}]
        elif method is ModelWorker.load_checkpoint:
            self.loaded = (self.there(args[0]) / "weights").read_text()
        elif method is ModelWorker.download_checkpoint:
            return [method(self.me, args[0], self.there(args[1]), args[2])]
        else:
            return [method(self.me, self.there(args[0]), *args[1:])]
        return []


@pytest.fixture
def models(tmp_path: Path) -> Any:
    """An actor on the driver's node, and a critic on another one."""
    disks = {"actor_train": tmp_path, "critic": tmp_path / "other_node"}
    parts = {role: SimpleNamespace(ranks=Ranks(tmp_path, disk), loaded=lambda _: nullcontext()) for role, disk in disks.items()}
    return SimpleNamespace(trained=parts, reference=None)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunConfig:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("roll_lite.pipeline.checkpoint.BETWEEN_TRIES_S", 0.0)
    Flaky.is_down, Flaky.written = False, []
    return of(tmp_path, "checkpoint.keep=2")


def of(tmp_path: Path, *settings: str) -> RunConfig:
    store = f"checkpoint.store=flaky://{tmp_path / 'store'}"
    return load_config("tiny_grpo", ROOT / "examples/configs", [store, f"run_dir={tmp_path / 'runs'}", "experiment=demo", *settings])


def run_folder(tmp_path: Path, name: str = RUN) -> Path:
    folder = tmp_path / "runs" / "demo" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def stored(tmp_path: Path) -> list[str]:
    return [folder.name for folder in finished_checkpoints(tmp_path / "store" / "demo" / RUN)]


def save(checkpoints: Checkpoints, models: Any, *steps: int) -> None:
    for step in steps:
        for role, model in models.trained.items():
            model.ranks.content = f"{role} {step}"
        checkpoints.save(models, ROLLOUTS, {"steps_done": step})


def on_nodes(tmp_path: Path) -> list[list[str]]:
    """Checkpoints on the driver's node and on the other one."""
    return [
        sorted(path.name for path in (top / "runs/demo" / RUN / "checkpoints").iterdir()) for top in (tmp_path, tmp_path / "other_node")
    ]


def test_it_is_in_the_store_whole_though_no_node_has_all_of_it(config: RunConfig, models: Any, tmp_path: Path) -> None:
    save(Checkpoints(config, run_folder(tmp_path)), models, 3)
    folder = tmp_path / "store" / "demo" / RUN / "checkpoints" / "step_000003"
    listed = json.loads((folder / "files.json").read_text())
    assert listed.keys() == {"actor_train/weights", "critic/weights", "state.json"}
    assert {name: record(folder / name).sha256 for name in listed} == {name: one["sha256"] for name, one in listed.items()}
    assert Flaky.written[-2:] == ["state.json", "files.json"], "what makes it a checkpoint comes last"
    assert not (run_folder(tmp_path) / "checkpoints/step_000003/critic/weights").exists()
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "other_node")
    resumed = of(tmp_path, f"checkpoint.resume={remote_folder(f'flaky://{folder}')}")
    checkpoints = Checkpoints(resumed, run_folder(tmp_path, "next"))
    assert checkpoints.load(models, SOURCE) == {"steps_done": 3} and not checkpoints.continues_in_folder
    assert [model.ranks.loaded for model in models.trained.values()] == ["actor_train 3", "critic 3"]


def test_a_file_that_did_not_arrive_makes_it_none(
    config: RunConfig, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(config, run_folder(tmp_path))
    monkeypatch.setattr(Flaky, "put_file", lambda self, source, target: None if "critic" in source else shutil.copy(source, target))
    save(checkpoints, models, 3)
    assert stored(tmp_path) == [] and checkpoints.newest_step == 0
    assert "lacks files that were uploaded, or has other sizes: critic/weights" in caplog.text


def test_old_ones_go_in_the_store_and_nodes_keep_the_newest(config: RunConfig, models: Any, tmp_path: Path) -> None:
    config = of(tmp_path, "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4")
    save(Checkpoints(config, run_folder(tmp_path)), models, 2, 4, 6, 8, 10)
    assert stored(tmp_path) == ["step_000004", "step_000008", "step_000010"]
    assert sorted(path.name for path in (tmp_path / "store/demo" / RUN / "checkpoints").iterdir()) == stored(tmp_path)
    assert on_nodes(tmp_path) == [["step_000008", "step_000010"]] * 2, "the one before goes once the next is begun"


def test_one_that_is_half_removed_is_none(config: RunConfig, models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(config, run_folder(tmp_path))
    save(checkpoints, models, 1, 2)

    def killed(_: Any, path: Any, recursive: bool = False, **__: Any) -> None:
        if recursive and "step_000001" in str(path):
            raise KeyboardInterrupt
        Path(path).unlink()

    monkeypatch.setattr(Flaky, "rm", killed)
    with pytest.raises(KeyboardInterrupt):
        save(checkpoints, models, 3)
    assert stored(tmp_path) == ["step_000002", "step_000003"]


def test_an_outage_costs_nothing_but_the_end_needs_the_store(
    config: RunConfig, models: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints = Checkpoints(config, run_folder(tmp_path))
    save(checkpoints, models, 1)
    Flaky.is_down = True
    save(checkpoints, models, 2, 3)
    assert checkpoints.newest_step == 1 and stored(tmp_path) == ["step_000001"]
    warning = caplog.messages[-1]
    assert f"checkpoint.store: flaky://{tmp_path}/store/demo/{RUN}" in warning and "(TimeoutError: no answer)" in warning
    assert f"{run_folder(tmp_path)}/checkpoints on the nodes of the ranks: step_000002, step_000003" in warning
    Flaky.is_down = False
    save(checkpoints, models, 4)
    assert stored(tmp_path) == ["step_000003", "step_000004"] and checkpoints.newest_step == 4
    checkpoints.upload_last(models)
    Flaky.is_down = True
    save(checkpoints, models, 5)
    caplog.clear()
    with pytest.raises(RuntimeError, match=rf"^checkpoint.store: .*/demo/{RUN} lacks the last checkpoint. .*: step_000005$"):
        checkpoints.upload_last(models)
    assert len(caplog.messages) == LAST_TRIES
    Flaky.is_down = False
    checkpoints.upload_last(models)
    assert stored(tmp_path) == ["step_000004", "step_000005"]


def test_in_a_long_outage_as_many_wait_as_are_kept(config: RunConfig, models: Any, tmp_path: Path) -> None:
    checkpoints = Checkpoints(config, run_folder(tmp_path))
    Flaky.is_down = True
    save(checkpoints, models, 1, 2, 3, 4, 5)
    assert on_nodes(tmp_path) == [["step_000003", "step_000004", "step_000005"]] * 2


def test_new_ranks_load_what_is_on_their_node_and_download_the_rest(config: RunConfig, models: Any, tmp_path: Path) -> None:
    checkpoints = Checkpoints(config, run_folder(tmp_path))
    save(checkpoints, models, 1)
    weights = tmp_path / "other_node/runs/demo" / RUN / "checkpoints/step_000001/critic/weights"
    for lost in (lambda: weights.write_text("critic x"), weights.unlink):
        lost()
        state = checkpoints.go_back(models)
        assert state is not None and state["pipeline"] == {"steps_done": 1}
        assert models.trained["critic"].ranks.loaded == "critic 1"
    Flaky.is_down = True
    save(checkpoints, models, 2)
    assert checkpoints.go_back(models) is not None, "the store is not needed for it"
    assert models.trained["actor_train"].ranks.loaded == "actor_train 1"
    Flaky.is_down = False
    save(checkpoints, models, 3)
    assert stored(tmp_path) == ["step_000001", "step_000003"], "what waited then is another run of step 2"


@pytest.mark.parametrize("name", ["critic/weights", "state.json"])
def test_damage_is_told_by_file_and_the_one_before_is_taken(config: RunConfig, models: Any, tmp_path: Path, name: str) -> None:
    save(Checkpoints(config, run_folder(tmp_path)), models, 1, 2)
    shutil.rmtree(tmp_path / "runs")
    shutil.rmtree(tmp_path / "other_node")
    home = f"flaky://{tmp_path}/store/demo/{RUN}"
    damaged = tmp_path / "store/demo" / RUN / "checkpoints/step_000002" / name
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"x")
    told = rf"{home}/checkpoints/step_000002/{name} has changed .*damaged; .*checkpoint.resume={home}/checkpoints/step_000001$"
    with pytest.raises(ValueError, match=told):
        Checkpoints(of(tmp_path, f"checkpoint.resume={home}"), run_folder(tmp_path, "next")).load(models, SOURCE)
    auto, notes = settled(of(tmp_path, "checkpoint.resume=auto"))
    if name == "state.json":
        assert auto.checkpoint.resume == f"{home}/checkpoints/step_000001" and "state.json has changed" in notes[0]
        return
    assert auto.checkpoint.resume == f"{home}/checkpoints/step_000002" and continues_in_folder(auto, run_folder(tmp_path))
    assert Checkpoints(auto, run_folder(tmp_path)).load(models, SOURCE) == {"steps_done": 1}
    assert stored(tmp_path) == ["step_000001"], "it is not chosen again"
    assert "step_000002 in" in resumption(remote_folder(home)).notes[0]


def test_samples_under_way_are_renewed_in_the_store(config: RunConfig, models: Any, tmp_path: Path) -> None:
    found = list[Any]()
    source: Any = SimpleNamespace(load_state_dict=lambda state, unfinished: found.append((state, unfinished)))
    save(Checkpoints(config, run_folder(tmp_path)), models, 2)
    for content in (b"", b"few", b"more"):
        auto = settled(of(tmp_path, "checkpoint.resume=auto"))[0]
        checkpoints = Checkpoints(auto, run_folder(tmp_path))
        checkpoints.load(models, source)
        Flaky.written.clear()
        checkpoints.save(models, {"prompts": len(content)}, {"steps_done": 2}, content)
        assert Flaky.written == [] or [name.partition("-")[0] for name in Flaky.written] == ["state", "unfinished", "files.json"]
        shutil.rmtree(tmp_path / "runs")
        shutil.rmtree(tmp_path / "other_node")
    assert found == [(ROLLOUTS, b""), (ROLLOUTS, b""), ({"prompts": 3}, b"few")]
    listed = json.loads((tmp_path / "store/demo" / RUN / "checkpoints/step_000002/files.json").read_text())
    assert {"state-2.json", "unfinished-2.parquet"} <= listed.keys() and "state-1.json" not in listed


def test_auto_never_takes_an_outage_for_an_empty_store(config: RunConfig, models: Any, tmp_path: Path) -> None:
    auto = of(tmp_path, "checkpoint.resume=auto")
    assert settled(auto)[0].checkpoint.source is None, "there is none yet"
    save(Checkpoints(config, run_folder(tmp_path)), models, 1)
    Flaky.is_down = True
    with pytest.raises(RuntimeError, match=r"flaky://.*/store/demo cannot be used \(TimeoutError: no answer\): check URL, credentials and"):
        settled(auto)
    (problem,) = [*check_store(auto), *check_resumption(auto)]
    assert problem.path == "checkpoint.store" and problem.value == f"flaky://{tmp_path}/store" and "cannot be used" in problem.message
    named = of(tmp_path, "checkpoint.store=null", f"checkpoint.resume=flaky://{tmp_path}/store/demo/{RUN}")
    (problem,) = check_resumption(named)
    assert problem.path == "checkpoint.resume" and "no answer" in problem.message


def test_a_runs_folder_leads_to_its_place_in_the_store(config: RunConfig, models: Any, tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    (folder / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    save(Checkpoints(config, folder), models, 1)
    (folder.parent.parent / "latest").symlink_to(folder)
    resumed = settled(of(tmp_path, "checkpoint.store=null", f"checkpoint.resume={tmp_path}/runs/latest"))[0]
    assert str(resumed.checkpoint.source) == f"flaky://{tmp_path}/store/demo/{RUN}"
    assert Checkpoints(resumed, run_folder(tmp_path, "next")).load(models, SOURCE) == {"steps_done": 1}
    checkpoint = folder / "checkpoints/step_000001"
    assert settled(of(tmp_path, f"checkpoint.resume={checkpoint}"))[0].checkpoint.source == checkpoint, "of this node, if it is named"


def test_a_store_is_tried_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert try_store(f"file://{tmp_path}/new/store") is None and not list((tmp_path / "new/store").iterdir())
    (tmp_path / "file").touch()
    assert "cannot be used" in str(try_store(f"file://{tmp_path}/file/store"))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    assert "install that package on every node; for s3: pip install 'roll_lite[s3]'" in str(try_store("s3://bucket/prefix"))


@pytest.mark.parametrize(("url", "said"), [("runs/store", "is no URL"), ("s4://bucket", "s4")])
def test_a_store_is_a_url_of_a_known_kind(monkeypatch: pytest.MonkeyPatch, url: str, said: str) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=rf"checkpoint.store = \"{url}\": .*{said}"):
        load_config("tiny_grpo", ROOT / "examples/configs", [f"checkpoint.store={url}"])
