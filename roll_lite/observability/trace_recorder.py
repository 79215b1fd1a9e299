"""Recording of a process's operations and kernels, by torch's profiler."""

from __future__ import annotations

from pathlib import Path

import torch

NOT_STARTED = "the process started within the step"


class TraceRecorder:
    """Records the thread that starts it, with its backward passes, and all of the process's GPU kernels. Failures are returned, not raised:
    they must not end a run.

    vLLM's and SGLang's own profilers do the same in their workers; this one needs no setting at an engine's start, and names the file."""

    def __init__(self) -> None:
        self._recording: torch.profiler.profile | str = NOT_STARTED
        """Recording in progress; if there is none, why."""

    def start(self) -> None:
        """Start a recording. An unfinished one, of a step that is repeated, is dropped."""
        try:
            if isinstance(self._recording, torch.profiler.profile):
                self._recording.stop()
            self._recording = torch.profiler.profile(record_shapes=True)
            self._recording.start()
        except RuntimeError as error:
            self._recording = str(error)

    def write(self, file: Path) -> str | None:
        """End the recording and write it as a Chrome trace, compressed if the name ends in .gz. Returns what failed; None if nothing."""
        recording, self._recording = self._recording, NOT_STARTED
        if isinstance(recording, str):
            return recording
        try:
            recording.stop()
            file.parent.mkdir(parents=True, exist_ok=True)
            recording.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            return str(error)
        return None
