"""Save and load checkpoints, export the final model."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from roll_lite.config.device_phases import Phase
from roll_lite.config.schema.models import RefreshConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.files import (
    FileRecord,
    StoreUnreachable,
    download,
    first_line,
    flush,
    free_bytes,
    is_local,
    keep_only,
    reaching,
    record,
    upload,
)
from roll_lite.observability.run_folder import continues_in_folder, folder_of_checkpoints
from roll_lite.observability.trackers import tracker_ids
from roll_lite.pipeline.checkpoint_files import (
    FOLDER,
    LIST_FILE,
    SCHEMA_VERSION,
    STATE_FILE,
    UNFINISHED_FILE,
    DamagedCheckpoint,
    check_sums,
    discard,
    earlier_ones,
    finished_checkpoints,
    read_list,
    read_state,
    resumption,
    saved_roles,
    set_aside,
    steps_of,
    write_list,
)
from roll_lite.pipeline.clusters import Model, Models, states
from roll_lite.pipeline.resumed_settings import samples_continue, started_anew
from roll_lite.pipeline.sources import BatchSource
from roll_lite.workers.model import ModelWorker

logger = logging.getLogger(__name__)

COPY_SHARE = 0.25
"""Maximum fraction of Ray's object store for an in-memory copy: the previous one and recovery.py's batches must fit too."""
NO_ROOM = (
    "checkpoint.in_memory_every: no copies are made: a rank of %s needs %.0f MB of Ray's object store, %.0f MB are free for each; raise "
    "ray.object_store_mb (ray start --object-store-memory)"
)
EXPORTED = {"actor_train": "model", "critic": "critic"}
DRIVERS_FILES = (STATE_FILE, UNFINISHED_FILE)
SEEN_WITHIN_S = 60.0
"""Seconds to wait for other nodes' files: network file systems may cache their absence."""
FULL = 16 << 20
LAST_TRIES, BETWEEN_TRIES_S = 4, 15.0
"""Attempts to upload the last checkpoint, and seconds between them."""
INTERRUPTED_S = 3.0
"""Seconds after an interruption for ranks to answer whether they have written the checkpoint."""


@dataclass(frozen=True)
class Unfinished:
    folder: Path
    models: Mapping[str, Model[Any]]


class Checkpoints:
    def __init__(self, config: RunConfig, run_folder: Path, nodes_without_run_folder: Collection[str] = ()) -> None:
        self._config = config
        self._nodes_without_run_folder = nodes_without_run_folder
        self._run_folder = run_folder.resolve()
        self._home = folder_of_checkpoints(config, self._run_folder).resolve()
        self._in_store = not is_local(self._home)
        self._waiting: list[Path] = []
        self._running: Unfinished | None = None
        self._renamed: dict[Path, int] = {}
        """{checkpoint that was resumed and has a name of the user's: its step}."""
        self.newest: Path | None = None
        """Newest finished checkpoint, or the one the run resumed from."""
        self.copy_every, self.copied_step = config.checkpoint.in_memory_every, 0
        """`copy_every`: steps between in-memory copies; 0: none. `copied_step`: newest copy's step; 0: none."""
        self._copy: dict[str, Any] = {}
        self.continues_in_folder = continues_in_folder(config, run_folder)

    def save(self, models: Models, rollouts: dict[str, Any], pipeline: dict[str, Any], unfinished: bytes = b"") -> Path:
        """Save a checkpoint; return its folder. An asynchronous checkpoint is complete after `finish_if_written` or `finish`. `rollouts`,
        `pipeline`: states of rollout service and driver. `unfinished`: file of the samples in flight."""
        self.finish()
        state = {
            "schema_version": SCHEMA_VERSION,
            "pipeline": pipeline,
            "rollouts": rollouts,
            "config": self._config.model_dump(mode="json"),
            "trackers": tracker_ids(self._run_folder),
        }
        name = f"step_{pipeline['steps_done']:06d}"
        files = {STATE_FILE: json.dumps(state, indent=2).encode() + b"\n", UNFINISHED_FILE: unfinished}
        if self.newest is not None and self.newest == self._home / FOLDER / name:
            if unfinished:
                try:
                    self._renew(self.newest, files)
                except (OSError, StoreUnreachable) as error:
                    logger.warning("%s keeps the state that it has, prompts under way start again: %s", self.newest, error)
            return self.newest
        whole = self._run_folder / FOLDER / name
        folder = whole if self._in_store else whole.with_suffix(".partial")
        if self._in_store:
            self._waiting = [other for other in self._waiting if other != whole]
            kept = [folder.name for folder in (*self._waiting, self.newest) if folder is not None]
            for model in self.stateful(models).values():
                model.ranks.all(ModelWorker.keep_checkpoints, self._run_folder / FOLDER, kept)
            keep_only(self._run_folder / FOLDER, kept)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        with _removed_on_failure(folder):
            saved = self.stateful(models)
            for role, model in saved.items():
                (folder / role).mkdir()
                with model.loaded(states(Phase.CHECKPOINT)):
                    model.ranks.all(ModelWorker.start_checkpoint, folder / role, self._config.checkpoint.asynchronous)
            for file, content in files.items():
                if content:
                    (folder / file).write_bytes(content)
            self._running = Unfinished(folder, saved)
        if not self._config.checkpoint.asynchronous:
            self.finish()
        return whole

    def _renew(self, checkpoint: Path, files: Mapping[str, bytes]) -> None:
        """Replace state and samples in flight of a finished checkpoint by newer ones of the same step. New files have other names;
        files.json lists them and changes atomically."""
        folder = self._on_nodes(checkpoint)
        wanted = read_list(folder)
        number = 2 if "state-1.json" in wanted else 1
        new = {name.replace(".", f"-{number}."): content for name, content in files.items()}
        wanted = {name: one for name, one in wanted.items() if "/" in name or name == STATE_FILE}
        for name, content in new.items():
            (folder / name).write_bytes(content)
            wanted[name] = record(folder / name)
        flush(folder / name for name in new)
        write_list(folder, wanted)
        flush([folder])
        with reaching(checkpoint):
            for name in (*new, LIST_FILE) if self._in_store else ():
                upload(folder / name, checkpoint / name)

    def finish_if_written(self, within_s: float | None = None) -> None:
        """Complete the checkpoint in progress if all ranks have written it. `within_s`: seconds for answers; None: the cluster's limit."""
        running = self._running.models.values() if self._running is not None else ()
        asked = [model.ranks.start_all(ModelWorker.checkpoint_is_written) for model in running]
        said = [answers.result(within_s) for answers in asked]
        if all(all(of_ranks) for of_ranks in said):
            self.finish()

    @contextmanager
    def finished(self) -> Iterator[None]:
        """Run the block. If it fails, try to complete the checkpoint in progress; if interrupted (Ctrl-C, SIGTERM), only if all ranks have
        written it."""
        try:
            yield
        except Exception:
            with suppress(Exception):
                self.finish()
            raise
        except BaseException:
            with suppress(Exception):
                self.finish_if_written(INTERRUPTED_S)
            raise

    def finish(self) -> None:
        if (running := self._running) is None:
            return
        self._running = None
        folder, whole = running.folder, running.folder.with_suffix("")
        with _removed_on_failure(folder):
            records: dict[str, FileRecord] = {}
            for role, model in running.models.items():
                of_ranks = model.ranks.all(ModelWorker.finish_checkpoint)
                records |= {f"{role}/{name}": one for found in of_ranks for name, one in found.items()}
            for role in () if self._in_store else running.models:
                expect_files(folder, {name: one.bytes for name, one in records.items() if name.startswith(f"{role}/")}, role)
            own = {name: record(folder / name) for name in DRIVERS_FILES if (folder / name).exists()}
            write_list(folder, {**records, **own})
            flush([folder / LIST_FILE, *(folder / name for name in own), *(path for path in folder.rglob("*") if path.is_dir()), folder])
            if folder != whole:
                shutil.rmtree(whole, ignore_errors=True)
                folder.rename(whole)
            flush([whole.parent])
        if self._in_store:
            self._waiting.append(folder)
            self._upload(running.models)
        else:
            self.newest = whole
            try:
                self._remove_old()
            except OSError as error:  # another process may use it
                logger.warning("an old checkpoint could not be removed wholly: %s", error)
            size, free = sum(one.bytes for one in read_list(self.newest).values()), free_bytes(self.newest)
            if free < size and self.newest_step < self._config.steps:
                logger.warning(
                    "the next checkpoint will not fit: %s takes %d MB, %d MB are free", self.newest, size // 10**6, free // 10**6
                )

    def _remove_old(self) -> None:
        for old in self._surplus(finished_checkpoints(self._home)):
            discard(old)

    def _surplus(self, checkpoints: Sequence[Path]) -> list[Path]:
        settings = self._config.checkpoint
        return [old for old in checkpoints[: -settings.keep] if not settings.keep_every or steps_of(old) % settings.keep_every]

    def _upload(self, models: Mapping[str, Model[Any]]) -> None:
        for folder in self._surplus(self._waiting):
            self._waiting.remove(folder)
        try:
            while self._waiting:
                self._upload_one(self._waiting[0], models)
                del self._waiting[0]
            with reaching(self._home):
                self._remove_old()
        except StoreUnreachable as error:
            logger.warning("checkpoint.store: %s. %s", error, self._what_waits())

    def _upload_one(self, folder: Path, models: Mapping[str, Model[Any]]) -> None:
        target, wanted = self._home / FOLDER / folder.name, read_list(folder)
        with reaching(target):
            discard(target)
        for role, model in models.items():
            own = [name for name in wanted if name.startswith(f"{role}/")]
            for failure in filter(None, model.ranks.all(ModelWorker.upload_checkpoint, folder, target, own)):
                raise StoreUnreachable(failure)
        with reaching(target):
            for name in wanted.keys() & set(DRIVERS_FILES):
                upload(folder / name, target / name)
            if wrong := [name for name, one in wanted.items() if _size(target / name) != one.bytes]:
                raise StoreUnreachable(f"{target} lacks files that were uploaded, or has other sizes: {', '.join(wrong[:3])}")
            upload(folder / LIST_FILE, target / LIST_FILE)
        self.newest = target

    def upload_last(self, models: Models) -> None:
        """Upload waiting checkpoints at the run's end; RuntimeError after LAST_TRIES failures."""
        for number in range(LAST_TRIES):
            if not self._waiting:
                return
            time.sleep(BETWEEN_TRIES_S * (number > 0))
            self._upload(self.stateful(models))
        if self._waiting:
            raise RuntimeError(f"checkpoint.store: {self._home} lacks the last checkpoint. {self._what_waits()}")

    def _what_waits(self) -> str:
        waiting = ", ".join(folder.name for folder in self._waiting)
        return f"To be uploaded, in {self._run_folder / FOLDER} on the nodes of the ranks: {waiting or 'nothing'}"

    def load(self, models: Models, source: BatchSource) -> dict[str, Any] | None:
        """Verify and load the checkpoint of `checkpoint.resume`. Return the driver's state; None if the run starts anew. Damaged
        checkpoints of the run's own folder are marked and the previous one loaded; DamagedCheckpoint without one."""
        if self._config.checkpoint.source is None:
            return None
        for left in (self._run_folder / FOLDER).glob("*.partial"):  # by a process that was killed as it saved
            shutil.rmtree(left, ignore_errors=True)
        self.newest = resumption(self._config.checkpoint.source).checkpoint.resolve()
        while True:
            try:
                state = self._verified(self.newest, models)
                break
            except DamagedCheckpoint as error:
                self.set_aside_newest(error)
        if not steps_of(self.newest):
            self._renamed[self.newest] = state["pipeline"]["steps_done"]
        self._load_models(models, self.newest)
        with reaching(self._home):
            for later in finished_checkpoints(self._home) if self.continues_in_folder else ():
                if steps_of(later) > self.newest_step:  # `settled` passed it over
                    try:
                        with suppress(OSError):  # perhaps only unreadable at present
                            read_state(later)
                    except ValueError:
                        set_aside(later)  # otherwise `_remove_old` would keep it instead of a good one
        # Samples in flight are dropped if settings of generation or scoring have changed.
        copy = self._on_nodes(self.newest)
        listed = [name for name in read_list(copy) if name.startswith("unfinished")]
        usable = samples_continue(state["config"], self._config.model_dump(mode="json"))
        source.load_state_dict(state["rollouts"], (copy / listed[0]).read_bytes() if usable and listed else b"")
        return state["pipeline"]

    @property
    def newest_step(self) -> int:
        return 0 if self.newest is None else self._renamed.get(self.newest) or steps_of(self.newest)

    def copy_state(self, models: Models, rollouts: dict[str, Any], pipeline: dict[str, Any]) -> None:
        """Copy the ranks' states into their nodes' object stores. If they do not fit, no more copies are made."""
        saved, copies = self.stateful(models), {}
        room = COPY_SHARE * ray.cluster_resources()["object_store_memory"] / sum(model.ranks.world_size for model in saved.values())
        for role, model in saved.items():
            with model.loaded(states(Phase.CHECKPOINT)):
                copying = model.ranks.start_all(ModelWorker.copy_state, room)
                size = max(copying.result())
            if size > room:
                self.copy_every = 0
                logger.warning(NO_ROOM, role, size / 2**20, room / 2**20)
                return
            copies[role] = [call.kept[0] for call in copying.calls]
        self._copy, self.copied_step = {"pipeline": pipeline, "rollouts": rollouts, "copies": copies}, pipeline["steps_done"]

    def go_back(self, models: Models) -> dict[str, Any] | None:
        """Load the in-memory copy, or a newer checkpoint, into new ranks. Return the loaded state, if any."""
        if self._running is not None:
            shutil.rmtree(self._running.folder, ignore_errors=True)
            self._running = None
        copied, self.copied_step = self.copied_step, 0
        if copied and copied >= self.newest_step:
            for role, model in self.stateful(models).items():
                with model.loaded(states(Phase.CHECKPOINT)):
                    model.ranks.all(ModelWorker.load_copy, self._copy["copies"][role])
            self.copied_step = copied
            return self._copy
        self._waiting.clear()
        if self.newest is None:
            return None
        copy = self._on_nodes(self.newest)
        try:
            state = self._verified(self.newest, models, copy if (copy / LIST_FILE).exists() else None)
        except DamagedCheckpoint:
            if is_local(self.newest):
                raise
            state = self._verified(self.newest, models)  # the store's copy may be intact
        self._load_models(models, self.newest)
        return state

    def set_aside_newest(self, error: DamagedCheckpoint) -> None:
        """Mark this run's newest checkpoint as damaged; use the previous one. Without one, a new run uses the start weights, a resumed run
        raises `error`."""
        assert self.newest is not None
        with reaching(self._home):
            earlier = earlier_ones(self.newest)
            if self.newest.parent.parent != self._home or not (earlier or self._config.checkpoint.source is None):
                raise error
            logger.warning("%s", error)
            set_aside(self.newest)
        self.newest = earlier[-1] if earlier else None

    def _load_models(self, models: Models, folder: Path) -> None:
        copy = self._on_nodes(folder)
        for role, model in self.stateful(models, read_list(copy)).items():
            with model.loaded(states(Phase.CHECKPOINT)):
                model.ranks.all(ModelWorker.load_checkpoint, copy / role)

    def _on_nodes(self, checkpoint: Path) -> Path:
        """Return the folder from which ranks load a checkpoint: a local copy if it is in a remote store."""
        return checkpoint if is_local(checkpoint) else self._run_folder / FOLDER / checkpoint.name

    def _verified(self, folder: Path, models: Models, copy: Path | None = None) -> dict[str, Any]:
        """Verify a checkpoint's checksums, download missing files, return its state. `copy`: local folder with state.json and files.json;
        None: `folder` has them."""
        described = copy or folder
        with reaching(described):
            state, wanted = read_state(described, sizes=described == folder), read_list(described)
        saved = self.stateful(models, wanted)
        if missing := [role for role in saved if described == folder and not (folder / role).is_dir()]:
            raise ValueError(f"checkpoint.resume: {folder} holds nothing for {', '.join(missing)}; was it written without?")
        for role, model in saved.items():
            own = {name: wanted[name] for name in sorted(wanted) if name.startswith(f"{role}/")}
            if not own:
                continue
            if is_local(folder):
                found = model.ranks.all(ModelWorker.file_records, folder, list(own))
            else:
                found = model.ranks.all(ModelWorker.download_checkpoint, folder, self._on_nodes(folder), own)
            for records in found:
                check_sums(folder, wanted, records.items())
        drivers = [name for name in wanted if "/" not in name]
        with reaching(folder):
            for name in () if is_local(described) else (*drivers, LIST_FILE):
                download(folder / name, self._on_nodes(folder) / name)
        check_sums(folder, wanted, [(name, record(self._on_nodes(folder) / name)) for name in drivers])
        for part in started_anew(state["config"], self._config.model_dump(mode="json")):
            state["pipeline"].pop(part, None)
        return state

    def export_model(self, models: Models) -> Path:
        """Export actor, its moving average (EMA, if configured) and critic in Hugging Face format."""
        for role, model in models.trained.items():
            with model.loaded(states(Phase.FINAL_MODEL)):
                self._save_hf(model, role, EXPORTED[role], average=False)
        if self._config.actor_train.ema is not None and "actor_train" in models.trained:
            with models.actor.loaded(states(Phase.NEW_REFERENCE)):
                self._save_hf(models.actor, "actor_train", "model_ema", average=True)
        return self._run_folder / EXPORTED["actor_train"]

    def refresh_reference(self, models: Models, refresh: RefreshConfig) -> None:
        """Copy the actor's weights, or their moving average, to the reference through files: the roles may be sharded differently."""
        with models.actor.loaded(states(Phase.NEW_REFERENCE)):
            folder = self._save_hf(models.actor, "actor_train", "reference", refresh.weights == "ema")
        assert models.reference is not None
        with models.reference.loaded(states(Phase.NEW_REFERENCE)):
            models.reference.ranks.all(ModelWorker.load_hf, folder)
        shutil.rmtree(folder)

    def _save_hf(self, model: Model[Any], role: str, name: str, average: bool) -> Path:
        folder = self._run_folder / name
        written = model.ranks.all(ModelWorker.save_hf, folder, average)
        model.bring_home(folder, written, self._nodes_without_run_folder)
        expect_files(folder, {file: size for own in written for file, size in own.items()}, role)
        return folder

    def stateful(self, models: Models, files: Iterable[str] | None = None) -> dict[str, Model[Any]]:
        made: dict[str, Model[Any] | None] = {**models.trained, "reference": models.reference}
        return {role: model for role in saved_roles(self._config, files) if (model := made.get(role)) is not None}


@contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    """Remove the checkpoint's folder if the block fails: on a full disk, the run's end could not be recorded."""
    try:
        yield
    except Exception as error:
        free = free_bytes(folder)
        shutil.rmtree(folder, ignore_errors=True)
        if free >= FULL:
            raise
        raise RuntimeError(f"{folder} was not written: the disk is full ({free / 2**20:.1f} MiB were left): {first_line(error)}") from error


def expect_files(folder: Path, sizes: Mapping[str, int], role: str) -> None:
    """Wait until this node sees the files of `role` with these sizes in bytes; RuntimeError after SEEN_WITHIN_S."""
    deadline = time.monotonic() + SEEN_WITHIN_S
    while wrong := [name for name, size in sizes.items() if _size(folder / name) != size]:
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"{folder} lacks {len(wrong)} of {len(sizes)} files that ranks of {role} report as written, or has other sizes: "
                f"{', '.join(wrong[:3])}. Does every node of {role} share run_dir with the driver, and is the disk full?"
            )
        time.sleep(SEEN_WITHIN_S / 60)
    if not sizes:
        raise RuntimeError(f"no rank of {role} reports that it has written anything to {folder}")


def _size(file: Path) -> int | None:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        return None
