from __future__ import annotations

from pathlib import Path

import torch


class TraceRecorder:
    """Profiler of the process's GPU kernels, and of CPU operations and backward passes of the thread that starts it."""

    _recording: torch.profiler.profile | None = None

    def trace(self, file: str | Path | None) -> str:
        """Start recording or, with `file`, stop and write a Chrome trace. Return an error text, or "". A start discards an unfinished
        recording."""
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
