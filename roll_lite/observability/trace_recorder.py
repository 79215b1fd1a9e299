"""Recording of this process's operations and kernels, by torch's profiler."""

from __future__ import annotations

from pathlib import Path

import torch


class TraceRecorder:
    """Records the thread that starts it, with its backward passes, and all of the process's GPU kernels. Failures are returned, not raised:
    they must not end a run.

    vLLM's and SGLang's own profilers do the same in their workers; this one needs no setting at an engine's start, and names the file."""

    _recording: torch.profiler.profile | None = None

    def trace(self, file: str | Path | None) -> str:
        """Start a recording or, with a file, end it and write it as a Chrome trace, compressed if the name ends in .gz. Returns what
        failed; empty if nothing. A start drops an unfinished recording, of a step that is repeated."""
        recording, self._recording = self._recording, None
        try:
            if recording is not None:
                recording.stop()
            if file is None:
                started = torch.profiler.profile(record_shapes=True)
                started.start()
                self._recording = started
            elif recording is None:
                return "nothing was recorded, or the process has started within the step"
            else:
                Path(file).parent.mkdir(parents=True, exist_ok=True)
                recording.export_chrome_trace(str(file))
        except (OSError, RuntimeError) as error:
            return str(error)
        return ""


RECORDER = TraceRecorder()
"""Recorder of this process."""
