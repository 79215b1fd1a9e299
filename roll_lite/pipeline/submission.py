"""Submit a run as a Ray job (`roll-lite submit`). Its driver runs on the head node, in a copy of the current folder."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from roll_lite.config.problems import hidden
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.ray_session import CONNECT_SECONDS, check_version, use_token
from roll_lite.files import first_line

NOT_SUBMITTED, FAILED, INTERRUPTED = 2, 1, 130
CLOSING_S = 60
"""Seconds beyond `checkpoint.on_sigterm_s` that Ray gives a stopped run before killing it."""


def submit(config: RunConfig, command: Sequence[str], address: str, variables: Sequence[str], name: str | None, follow: bool) -> int:
    """Submit a run. Return an exit code; with `follow`, the run's own at its end. `variables`: names of environment variables to pass
    on."""
    use_token()
    os.environ["RAY_API_SERVER_ADDRESS"] = address  # Ray prefers it, and RAY_ADDRESS, to an argument
    try:
        requests.get(f"{address}/api/version", timeout=CONNECT_SECONDS)  # Ray's requests have no time limit
        client = JobSubmissionClient()
    except AuthenticationError:
        remedy = "put what `ray get-auth-token` prints on the head node into ~/.ray/auth_token here"
        return _not_submitted(f"the cluster at {address} asks for a token: {remedy}")
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        why = first_line(error).rpartition(": ")[2].strip("')\"")
        server = "it belongs to the dashboard of the head node, port 8265, which needs pip install 'ray[default]' there"
        return _not_submitted(f"no Ray job server answers at {address} (--address, http://HOST:PORT): {why}; {server}")
    environment = {one: os.environ[one] for one in variables}
    words = [shlex.quote(word) for word in command]
    for number, word in enumerate(command):
        if hidden(word) != word and "${" not in word:  # the dashboard shows the command, and no values of variables
            environment[secret := f"ROLL_LITE_SECRET_{number}"] = word
            words[number] = f'"${secret}"'
    environment["RAY_JOB_STOP_WAIT_TIME_S"] = str(int(config.checkpoint.on_sigterm_s) + CLOSING_S)
    sys.stderr.write(f"uploading {Path.cwd()}, without what .gitignore and .rayignore name: at most 100 MiB\n")
    try:
        check_version(client._server_ray_version)
        copied = {"working_dir": str(Path.cwd()), "excludes": ["/runs"], "env_vars": environment}
        job = client.submit_job(entrypoint=f"exec {' '.join(words)}", runtime_env=copied, submission_id=name)
    except (OSError, RuntimeError, ValueError) as error:
        why = str(error).rstrip(". \n").rpartition("\n")[2]  # the rest is the server's traceback
        return _not_submitted(f"the cluster at {address} did not take the run: {why}")
    ways = "".join(f"  ray job {way} --address {address} {job}\n" for way in ("logs -f", "status", "stop"))
    sys.stdout.write(f"submitted as {job}\n{ways}")
    return _followed(client, job) if follow else 0


def _not_submitted(message: str) -> int:
    sys.stderr.write(f"{message}\n")
    return NOT_SUBMITTED


def _followed(client: JobSubmissionClient, job: str) -> int:
    async def tail() -> None:
        async for lines in client.tail_job_logs(job):
            sys.stdout.write(lines)
            sys.stdout.flush()

    try:
        asyncio.run(tail())
        end = client.get_job_info(job)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nno longer following {job}, which goes on\n")
        return INTERRUPTED
    except (OSError, RuntimeError, aiohttp.ClientError) as error:
        sys.stderr.write(f"{job} cannot be followed any more, and may go on: {first_line(error)}\n")
        return FAILED
    if end.driver_exit_code is not None:
        return end.driver_exit_code
    sys.stderr.write(f"{job}: {end.message}\n")
    return INTERRUPTED if end.status == JobStatus.STOPPED else FAILED
