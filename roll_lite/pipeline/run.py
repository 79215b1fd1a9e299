from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

import yaml

from roll_lite.config.arithmetic import generates, roles
from roll_lite.config.checks.notes import notes_on
from roll_lite.config.schema.run import LimitsConfig, RunConfig
from roll_lite.distributed.rank_group import WATCH
from roll_lite.distributed.ray_session import ray_session
from roll_lite.distributed.watchdog import WATCHDOG, Preempted, PreemptedUnsaved
from roll_lite.distributed.worker import freeze_heap
from roll_lite.files import StoreUnreachable, first_line, is_local, reaching
from roll_lite.observability.report import SUMMARY_FILE
from roll_lite.observability.run_folder import create_run_folder, keep_config, locked, point_latest
from roll_lite.pipeline.build import build
from roll_lite.pipeline.checkpoint_files import resumption, resumption_notes, settled
from roll_lite.pipeline.journal import FAILURE_FILE, Journal
from roll_lite.pipeline.nodes import logs_come_home
from roll_lite.pipeline.shortages import Shortages

COMPLETED, FAILED, INTERRUPTED = 0, 1, 130
PREEMPTED = 75
"""Exit code after a SIGTERM with a checkpoint: EX_TEMPFAIL, because the same command continues the run."""
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REGULAR = {"sync_weights", "log_probs", "advantages", "train"}
"""Phases that take similar time in every step."""
LEAST_HANG_S = 300.0
"""Minimum seconds of limits from `limits.hang_factor`: short phases vary more."""
REMOTE_TRACEBACK = re.compile(r"\n\s*\n(?=\S*ray::)")


def run(config: RunConfig) -> int:
    """Start, train, clean up; return the exit code. A failure's cause goes to standard error and summary.json."""
    given = config
    try:
        config, notes = settled(config)
    except StoreUnreachable as error:
        sys.stderr.write(f"checkpoint.store: {error}\n")
        return FAILED
    checkpoint = config.checkpoint.source if given.checkpoint.resume == "auto" else None
    with ExitStack() as lock:
        try:
            folder = create_run_folder(config.run_dir, config.experiment) if checkpoint is None else checkpoint.parent.parent
            if not is_local(folder):
                folder = config.run_dir / config.experiment / folder.name
                folder.mkdir(parents=True, exist_ok=True)
            lock.enter_context(locked(folder))
            if checkpoint is not None and is_over(folder, config.steps):
                sys.stderr.write(f"{folder}: all {config.steps} steps are done; to go on, raise steps\n")
                return COMPLETED
            # Written before `latest` points here: a later run reads from it which checkpoint this run resumed.
            keep_config(folder, yaml.safe_dump(given.model_dump(mode="json"), sort_keys=False))
            point_latest(config.run_dir, config.run_dir / config.experiment / folder.name)
        except (OSError, ValueError) as error:
            place = config.run_dir / config.experiment
            sys.stderr.write(f"run_dir: {place} cannot be written to: {getattr(error, 'strerror', None) or error}; name another folder\n")
            return FAILED
        return _run(config, folder, notes)


def is_over(folder: Path, steps: int) -> bool:
    try:
        summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
        return summary["exit"] == "completed" and summary["steps"] >= steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _run(config: RunConfig, folder: Path, notes: Sequence[str]) -> int:
    journal = Journal(config, folder)
    journal.timers.around = PhaseLimits(
        config.limits,
        config.rollout.stream_log_probs,
        config.weight_sync.timeout_s,
        actor_trains=lambda: journal.current > config.algorithm.critic_warmup_steps,
    ).limited
    WATCHDOG.silence_s = config.limits.silence or None
    interruption = Interruption(config.checkpoint.every > 0)
    end = RunEnd(journal, interruption)
    # `handled` and `recorded` are entered twice: the end is recorded before Ray shuts down, which may end this process, and Ray installs
    # its own signal handlers.
    with interruption.handled(), WATCHDOG.patrol(end.give_up), end.recorded():
        for note in [*notes, *notes_on(config, resumption_notes)]:
            journal.console.message(note)
        journal.console.message(f"{config.experiment}: everything is written to {journal.folder}; starting Ray")
        journal.connect()
        with ray_session(config.ray, folder) as session, logs_come_home(folder, session), interruption.handled(), end.recorded():
            with journal.timers.phase("start"):
                engine = f"; {config.actor_infer.strategy.name} takes up to a minute to start" if generates(config) else ""
                journal.console.message(f"loading the model into {', '.join(roles(config))}{engine}")
                pipeline = build(config, folder, session, journal)
                journal.processes()
                end.shortages.watch(WATCH.places().values())
                freeze_heap()
            with WATCH.expecting_answers(config.limits.silence), interruption.saving():
                pipeline.run()
                pipeline.close()
    return end.code


class PhaseLimits:
    """Time limits of phases: as configured or, for REGULAR, `limits.hang_factor` times their longest duration if less. Recovery itself has
    none."""

    def __init__(
        self, limits: LimitsConfig, streams: bool = False, transfer_s: float = 0.0, actor_trains: Callable[[], bool] = lambda: True
    ) -> None:
        """`streams`: log-probs may be computed during generation, so `log_probs` varies; its limit follows `train`, which takes longer.
        `transfer_s`: a weight transfer's own timeout. `actor_trains`: False while the critic trains alone."""
        self._limits = limits
        self._transfer_s = transfer_s
        self._actor_trains = actor_trains
        self._measured = {"log_probs": "train"} if streams else {}
        self._longest: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        """{phase: duration of its latest try, if failed}: a phase that is slow, not hung, gets more time when repeated."""

    @contextmanager
    def limited(self, phase: str) -> Iterator[None]:
        if phase == "recovery":
            failed = dict(self._failed)
            yield
            self._failed |= failed  # updates that were repeated meanwhile may have been quicker
            return
        limits, longest = self._limits, self._longest.get(self._measured.get(phase, phase))
        seconds, setting = getattr(limits, phase, limits.other), None
        if phase in REGULAR and limits.hang_factor and longest is not None:
            longest = max(longest, self._failed.get(phase, 0.0))
            usual = max(LEAST_HANG_S, limits.hang_factor * longest) + (self._transfer_s if phase == "sync_weights" else 0.0)
            if not seconds or usual < seconds:
                seconds, setting = usual, f"limits.hang_factor {limits.hang_factor:g}, longest time so far {longest:.0f} s"
        with WATCHDOG.limit(phase, seconds, setting) as limit:
            try:
                yield
            except BaseException:
                self._failed[phase] = WATCHDOG.time() - limit.started
                raise
        self._failed.pop(phase, None)
        if phase == "train" and not self._actor_trains():  # with the actor, it takes longer
            return
        self._longest[phase] = max(self._longest.get(phase, 0.0), WATCHDOG.time() - limit.started)


class Interruption:
    """Signal handler: SIGTERM and SIGHUP end a run like Ctrl-C. With checkpoints (`saves`), the first SIGTERM saves the state. Signals
    ignored at the start (nohup) stay ignored."""

    def __init__(self, saves: bool = False) -> None:
        self._saves = saves
        self._may_save = False
        self._is_deaf = False

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if self._may_save and number == signal.SIGTERM:
            self._may_save, WATCHDOG.preempted_at = False, time.monotonic()
        elif not self._is_deaf:
            raise KeyboardInterrupt

    @contextmanager
    def saving(self) -> Iterator[None]:
        self._may_save = self._saves
        try:
            yield
        finally:
            self._may_save, WATCHDOG.preempted_at = False, None

    @contextmanager
    def handled(self) -> Iterator[None]:
        numbers = [number for number in ENDING_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, self) for number in numbers}
        try:
            yield
        finally:
            for number, own in before.items():
                signal.signal(number, signal.SIG_DFL if own is None else own)

    @contextmanager
    def ignored(self) -> Iterator[None]:
        """Ignore signals in the block, which records the run's end. Later signals raise KeyboardInterrupt and interrupt the clean-up."""
        self._is_deaf = True
        try:
            yield
        finally:
            self._is_deaf = False


class RunEnd:
    """Records how a run ended. The first cause counts: later ones come from cleaning up."""

    def __init__(self, journal: Journal, interruption: Interruption) -> None:
        self.code = COMPLETED
        self._journal = journal
        self._interruption = interruption
        self._closed = False
        self.shortages = Shortages(journal.folder)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        try:
            yield
        except (KeyboardInterrupt, Preempted, PreemptedUnsaved) as signal_:
            with self._interruption.ignored():
                self._close("interrupted", INTERRUPTED if isinstance(signal_, KeyboardInterrupt) else PREEMPTED)
        except Exception as error:
            with self._interruption.ignored():
                self._fail(error)
        else:
            with self._interruption.ignored():
                self._close("completed", COMPLETED)

    def give_up(self, cause: str) -> None:
        """End the process from another thread, since the main thread hangs. The Ray session's guard cleans up."""
        try:
            self._fail(RuntimeError(cause))
        finally:
            os._exit(self.code if self._closed else FAILED)

    def _fail(self, error: Exception) -> None:
        self.shortages.release()
        shortage = self.shortages.behind(error)
        more = self._journal.folder / FAILURE_FILE
        note = f"more in {more}"
        try:
            with more.open("a", encoding="utf-8") as file:
                file.write("".join(traceback.format_exception(error)))
        except OSError as other:
            note = f"{more} cannot be written: {other.strerror}"
        what = "cleaning up failed" if self._closed else "the run failed"
        with suppress(OSError):  # stderr may be closed
            sys.stderr.write(f"\n{what}: {REMOTE_TRACEBACK.split(str(error))[0].rstrip()}{shortage}\n({note})\n")
            sys.stderr.flush()
        self._close(f"failed: {first_line(error).removesuffix(' ends with:')}{shortage}", FAILED)

    def _close(self, exit_state: str, code: int) -> None:
        if self._closed:
            return
        self.shortages.release()
        self._closed, self.code = True, code
        console = self._journal.console
        if code in (INTERRUPTED, PREEMPTED):
            console.message(exit_state)
        try:
            self._journal.close(exit_state)
        except OSError as error:
            self.code = code or FAILED
            sys.stderr.write(f"the end of the run could not be recorded in {self._journal.folder}: {error}\n")
        if code != COMPLETED:
            with suppress(ValueError, StoreUnreachable), reaching(self._journal.checkpoints):  # no checkpoint
                console.message(f"go on from its last checkpoint with checkpoint.resume={resumption(self._journal.checkpoints).checkpoint}")
