"""Backends that run programs: sandboxes on this machine, or a SandboxFusion server, which gets `sandbox/guest.py` as a zip file and runs
it."""

from __future__ import annotations

import asyncio
import atexit
import base64
import io
import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from pydantic import PositiveFloat, PositiveInt

from roll_lite import sandbox
from roll_lite.rewards.base import ResponseSuspected, RewardFailed
from roll_lite.rewards.http.client import Addresses, HttpClient, HttpSettings, several
from roll_lite.sandbox.pool import HARMLESS, Ended, Outcome, Pair, Program, SandboxPool, SandboxTrouble, ended_its_sandbox

LATE_S = 15.0
"""Seconds added to a job's wall-clock limit for starting Python on the server."""
CODE = """
import sys
sys.path.insert(0, "harness.zip")
from roll_lite.sandbox.guest import main
main()
"""


class RemoteBackend(HttpSettings):
    """SandboxFusion server: `backend: {name: sandbox_fusion, url: http://host:port/run_code}`."""

    name: Literal["sandbox_fusion"] = "sandbox_fusion"
    """The service's protocol."""
    url: Addresses
    """URL, or list of URLs; requests go to the one with fewest in progress."""
    concurrency: PositiveInt = 16
    """Concurrent requests per worker."""
    timeout_s: PositiveFloat = 60.0
    """Time limit of one request, which runs one job."""


class Backend(Protocol):
    def run_many(self, jobs: Sequence[Program | Pair]) -> list[Ended]: ...


class RemoteSandbox:
    def __init__(self, remote: RemoteBackend) -> None:
        self._client = HttpClient("code", several(remote.url), remote)
        self._runner: asyncio.Runner | None = None

    def run_many(self, jobs: Sequence[Program | Pair]) -> list[Ended]:
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(self._all(jobs))

    async def _all(self, jobs: Sequence[Program | Pair]) -> list[Ended]:
        return list(await asyncio.gather(*map(self._one, jobs)))

    async def _one(self, job: Program | Pair) -> Ended:
        """Run a job. If the service fails on it twice but runs a harmless program in between, blame the job."""
        ended = await self._asked(job)
        if isinstance(ended, SandboxTrouble) and ended.suspected and not isinstance(await self._asked(HARMLESS), SandboxTrouble):
            again = await self._asked(job)
            return ended_its_sandbox(job) if isinstance(again, SandboxTrouble) and again.suspected else again
        return ended

    async def _asked(self, job: Program | Pair) -> Ended:
        parts = [job.program, job.tests] if isinstance(job, Pair) else [job]
        plain = [asdict(part) | {"stdin": _packed(part.stdin), "artifact": _packed(part.artifact)} for part in parts]
        request = {
            "language": "python",
            "code": CODE,
            "run_timeout": max(part.limits.wall_s for part in parts) + LATE_S,
            "files": {"job.json": _packed(json.dumps(plain).encode()), "harness.zip": _packed(_harness())},
            "fetch_files": ["outcome.json"],
        }
        try:
            answer, url = await self._client.post(request)
        except RewardFailed as failure:
            return SandboxTrouble(failure.cause, isinstance(failure, ResponseSuspected))
        try:
            found = (answer.get("files") or {}).get("outcome.json")
            if found:
                data = json.loads(base64.b64decode(found))
                packed: dict[str, Any] = {name: base64.b64decode(data[name]) for name in ("stdout", "stderr", "result")}
                return Outcome(
                    int(data["exit"]), str(data["stopped"]), seconds=float(data["seconds"]), cpu_s=float(data["cpu_s"]), **packed
                )
            run = answer.get("run_result") or {}
            said = (run.get("stderr") or "").strip().rpartition("\n")[2] or answer.get("message") or run.get("status") or answer["status"]
            return SandboxTrouble(f"{url}: SandboxFusion left no outcome: {said:.300}", bool(run))  # the program may be the cause
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            return SandboxTrouble(f"{url} answered with no outcome: {type(error).__name__}: {error}")


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


@lru_cache(maxsize=1)
def _harness() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        target.writestr("roll_lite/__init__.py", "")
        for path in sorted(Path(sandbox.__path__[0]).glob("*.py")):
            target.writestr(f"roll_lite/sandbox/{path.name}", path.read_bytes())
    return packed.getvalue()


@cache
def backend_of(
    remote: RemoteBackend | None, parallel: int, allow_unprotected: bool, readable: tuple[str, ...], python_path: tuple[str, ...]
) -> Backend:
    if remote is not None:
        return RemoteSandbox(remote)
    pool = SandboxPool(parallel, allow_unprotected, readable=readable, python_path=python_path)
    try:
        pool.start()
    except SandboxTrouble as trouble:
        raise RewardFailed(f"reward code: {trouble}") from trouble
    atexit.register(pool.close)
    return pool
