"""Where programs run: in sandboxes on this machine, or behind an HTTP endpoint that runs them in sandboxes of its own."""

from __future__ import annotations

import asyncio
import atexit
import base64
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal, Protocol

from pydantic import PositiveFloat, PositiveInt

from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.code.sandbox_fusion import answer_of, request_of
from roll_lite.rewards.http.client import Addresses, HttpClient, HttpSettings, several
from roll_lite.sandbox.pool import Ended, Limits, Outcome, Pair, Program, SandboxPool, SandboxTrouble


class RemoteBackend(HttpSettings):
    """`backend: {url: http://host:port/run}`."""

    kind: Literal["roll_lite", "sandbox_fusion"] = "roll_lite"
    """Whose protocol: ours (examples/sandbox_server.py), or SandboxFusion's `/run_code`."""
    url: Addresses
    """One or several: the least busy is asked."""
    concurrency: PositiveInt = 16
    """Requests under way at the same time, in each worker."""
    timeout_s: PositiveFloat = 60.0
    """Time after which one request, which holds one job, counts as failed."""


class Backend(Protocol):
    def run_many(self, jobs: Sequence[Program | Pair]) -> list[Ended]: ...


class RemoteSandbox:
    """POST {"job": ...} -> {"outcome": ...} or {"trouble": "..."}, see docs/rewards.md and examples/sandbox_server.py; or as
    SandboxFusion has it."""

    def __init__(self, remote: RemoteBackend) -> None:
        self._client = HttpClient("code", several(remote.url), remote)
        self._is_fusion = remote.kind == "sandbox_fusion"
        self._runner: asyncio.Runner | None = None

    def run_many(self, jobs: Sequence[Program | Pair]) -> list[Ended]:
        self._runner = self._runner or asyncio.Runner()
        return self._runner.run(self._all(jobs))

    async def _all(self, jobs: Sequence[Program | Pair]) -> list[Ended]:
        return list(await asyncio.gather(*map(self._one, jobs)))

    async def _one(self, job: Program | Pair) -> Ended:
        try:
            plain = job_to_json(job)
            answer, url = await self._client.post(request_of(plain) if self._is_fusion else {"job": plain})
        except RewardFailed as failure:
            return SandboxTrouble(failure.cause)
        try:
            answer = answer_of(answer) if self._is_fusion else answer
            return SandboxTrouble(f"{url}: {answer['trouble']}") if "trouble" in answer else outcome_from_json(answer["outcome"])
        except (KeyError, TypeError, ValueError) as error:
            return SandboxTrouble(f"{url} answered with no outcome: {type(error).__name__}: {error}")


def job_to_json(job: Program | Pair) -> dict[str, Any]:
    if isinstance(job, Pair):
        return {"program": job_to_json(job.program), "tests": job_to_json(job.tests)}
    plain = {"order": job.order, "address_space": job.address_space, "limits": asdict(job.limits)}
    return plain | {"stdin": _packed(job.stdin), "artifact": _packed(job.artifact)}


def job_from_json(data: Mapping[str, Any]) -> Program | Pair:
    """KeyError, TypeError or ValueError for what is no job."""
    if "program" in data:
        program, tests = job_from_json(data["program"]), job_from_json(data["tests"])
        if isinstance(program, Pair) or isinstance(tests, Pair):
            raise ValueError("a pair of pairs")
        return Pair(program, tests)
    limits = Limits(**data["limits"])
    stdin, artifact = base64.b64decode(data["stdin"]), base64.b64decode(data["artifact"])
    return Program(dict(data["order"]), stdin, artifact, bool(data["address_space"]), limits)


def outcome_to_json(outcome: Ended) -> dict[str, Any]:
    if isinstance(outcome, SandboxTrouble):
        return {"trouble": str(outcome)}
    return {"outcome": {key: _packed(value) if isinstance(value, bytes) else value for key, value in asdict(outcome).items()}}


def outcome_from_json(data: Mapping[str, Any]) -> Outcome:
    plain = {one.name: data[one.name] for one in fields(Outcome)}
    packed = {name: base64.b64decode(plain[name]) for name in ("stdout", "stderr", "result")}
    return Outcome(int(plain["exit"]), str(plain["stopped"]), **packed, seconds=float(plain["seconds"]), cpu_s=float(plain["cpu_s"]))


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode("ascii")


_OF_PROCESS: dict[tuple[Any, ...], Backend] = {}


def backend_of(
    remote: RemoteBackend | None, parallel: int, allow_unprotected: bool, readable: Sequence[str], python_path: Sequence[str]
) -> Backend:
    """The one of this process for these settings, started at the first use. ValueError where programs cannot be isolated."""
    key = (remote, parallel, allow_unprotected, tuple(readable), tuple(python_path))
    if key not in _OF_PROCESS:
        _OF_PROCESS[key] = RemoteSandbox(remote) if remote else _local(parallel, allow_unprotected, readable, python_path)
    return _OF_PROCESS[key]


def _local(parallel: int, allow_unprotected: bool, readable: Sequence[str], python_path: Sequence[str]) -> SandboxPool:
    pool = SandboxPool(parallel, allow_unprotected, readable=readable, python_path=python_path)
    try:
        pool.start()
    except SandboxTrouble as trouble:
        raise RewardFailed(f"reward code: {trouble}") from trouble
    atexit.register(pool.close)
    return pool
