from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from roll_lite.config.schema.domains import RewardConfig
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.running.batch_scorer import KILL_FACTOR, BatchScorer, slow_start, time_out

GRACE_SECONDS = 1.0
"""Extra seconds: the reward's own timeout message arrives first."""

Answer = tuple[Score | str, float]


class RewardProcess:
    """Subprocess that scores one sample at a time. A sample that hangs or kills it fails, and a new process starts."""

    def __init__(self, config: RewardConfig, path: str) -> None:
        self._config = config
        self._path = path
        self._start()

    def score(self, item: RewardInput) -> Answer:
        started = time.monotonic()
        try:
            self._connection.send(item)
            if self._connection.poll(KILL_FACTOR * self._config.timeout_s + GRACE_SECONDS):
                result, seconds, usable = self._connection.recv()
                if not usable:
                    self._restart()
                return result, seconds
            cause = time_out(self._config.name, self._config.timeout_s)
        except (EOFError, ConnectionError):
            self._process.join(GRACE_SECONDS)
            cause = f"reward {self._config.name}: its process died (exit code {self._process.exitcode})"
        seconds = time.monotonic() - started
        self._restart()
        return cause, seconds

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._group, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._connection.close()

    def _restart(self) -> None:
        self.close()
        self._start()

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self._process = spawn.Process(target=_serve, args=(theirs, self._config, self._path))
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits this mask
        try:
            self._process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        assert self._process.pid is not None
        self._group = self._process.pid
        try:
            in_time = self._connection.poll(self._config.start_timeout_s)
            mistake = self._connection.recv() if in_time else slow_start(self._config, self._path)
        except EOFError:
            self._process.join()
            died = f"its process died at the start (exit code {self._process.exitcode})"
            raise ValueError(f"{self._path}.name: {self._config.name!r}: {died}") from None
        except BaseException:
            self.close()
            raise
        if mistake is not None:
            self.close()
            raise ValueError(mistake)


def _serve(connection: Connection, config: RewardConfig, path: str) -> None:
    os.setpgid(0, 0)  # own process group, so that its children can be killed too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops a pending SIGINT; the parent handles Ctrl-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.dup2(2, 1)  # printed text must not end up in the table
    sys.stdout = sys.stderr  # unbuffered: this process ends by SIGKILL
    try:
        scorer, _ = BatchScorer.of(config, path)
    except ValueError as error:
        connection.send(str(error))
        return
    connection.send(None)
    with suppress(EOFError):
        while True:
            started = time.monotonic()
            result, scored = scorer.one(connection.recv())
            connection.send((result, time.monotonic() - started, not scored.interrupted))


def _end_with_parent() -> None:
    """Kill this process and its children when the parent ends, even if a reward hangs."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)
