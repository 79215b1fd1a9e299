"""SandboxFusion as the place where programs run: `backend: {kind: sandbox_fusion, url: http://HOST:8080/run_code}`.

Each job is sent as a Python program (`sandbox/guest.py`, with what it imports in a zip file beside it) that runs the job there and leaves
its outcome in a file: so calls, asserts and every language mean the same as in our own sandboxes.
"""

from __future__ import annotations

import base64
import io
import json
import zipfile
from functools import lru_cache
from pathlib import Path
from typing import Any

from roll_lite import sandbox

LATE_S = 15.0
"""For SandboxFusion to start Python, beyond the programs' own limits."""
CODE = """
import sys
sys.path.insert(0, "harness.zip")
from roll_lite.sandbox.guest import main
sys.path.remove("harness.zip")
main()
"""


def request_of(job: dict[str, Any]) -> dict[str, Any]:
    """The body for a job as our own protocol has it."""
    parts = [job["program"], job["tests"]] if "tests" in job else [job]
    seconds = max(part["limits"]["wall_s"] for part in parts)
    files = {"job.json": json.dumps(job).encode(), "harness.zip": _harness()}
    return {
        "language": "python",
        "code": CODE,
        "run_timeout": seconds + LATE_S,
        "files": {name: base64.b64encode(content).decode("ascii") for name, content in files.items()},
        "fetch_files": ["outcome.json"],
    }


def answer_of(answer: dict[str, Any]) -> dict[str, Any]:
    """As our own protocol has it. KeyError, TypeError or ValueError for what SandboxFusion does not send."""
    found = answer["files"].get("outcome.json") if answer.get("files") else None
    if found:
        return {"outcome": json.loads(base64.b64decode(found))}
    run = answer.get("run_result") or {}
    said = (run.get("stderr") or "").strip().rpartition("\n")[2] or answer.get("message") or run.get("status") or answer["status"]
    return {"trouble": f"SandboxFusion left no outcome: {said:.300}"}


@lru_cache(maxsize=1)
def _harness() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("roll_lite/__init__.py", "")
        for path in sorted(Path(sandbox.__path__[0]).glob("*.py")):
            target.writestr(f"roll_lite/sandbox/{path.name}", path.read_bytes())
    return packed.getvalue()
