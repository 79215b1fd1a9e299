"""Sandboxes of both kinds, where the platform lets them be built."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from sandbox.running import PATIENT, SECRET, run

from roll_lite.sandbox.pool import Sandbox


@pytest.fixture(scope="module", params=["namespaces", "landlock"])
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    os.environ["ROLL_TEST_SECRET"] = SECRET
    sandbox = Sandbox(request.param)
    try:
        protections = sandbox.start()
        if protections.kind != request.param or protections.missing:
            pytest.skip(f"not on this platform: {protections.describe()}")
        yield sandbox
    finally:
        sandbox.close()
        del os.environ["ROLL_TEST_SECRET"]


@pytest.fixture
def works_after(sandbox: Sandbox) -> Iterator[None]:
    assert sandbox._process is not None
    interpreter = sandbox._process.pid
    yield
    assert run(sandbox, "print(6 * 7)", PATIENT).stdout == b"42\n"
    assert sandbox._process is not None and sandbox._process.pid == interpreter, "an attack cost the sandbox its interpreter"
