"""Run a job inside a remote sandbox: read `job.json`, write `outcome.json`. Needs only the standard library of Python 3.10 or later."""

from __future__ import annotations

import base64
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

from roll_lite.sandbox.filesystem import PACKAGES
from roll_lite.sandbox.kernel import PR_SET_DUMPABLE, prctl
from roll_lite.sandbox.pool import Limits, Pair, Program, SandboxPool


def main() -> None:
    job = Path("job.json")
    asked = json.loads(job.read_text(encoding="utf-8"))
    job.unlink()  # contains the tests, which a program must not read
    with contextlib.suppress(OSError):
        prctl(PR_SET_DUMPABLE, 0)  # and programs must not read this process's memory
    parts = []
    for part in asked:
        unpacked = {name: base64.b64decode(part[name]) for name in ("stdin", "artifact")}
        parts.append(Program(**{**part, **unpacked, "limits": Limits(**part["limits"])}))
    packages = [path for path in sys.path if path.endswith(PACKAGES)]
    pool = SandboxPool(allow_unprotected=True, walls="none", python_path=packages)
    try:
        outcome = asdict(pool.run(Pair(*parts) if len(parts) > 1 else parts[0]))
    finally:
        pool.close()
    outcome |= {name: base64.b64encode(outcome[name]).decode("ascii") for name in ("stdout", "stderr", "result")}
    Path("outcome.json").write_text(json.dumps(outcome), encoding="utf-8")
