"""What every test may use: one local Ray session for the whole suite, and a folder with a short path."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # however busy it is
settings.load_profile("any machine")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark a long table's cases as nightly, except every n-th (`one_in(n)`)."""
    numbers: dict[str, Iterator[int]] = defaultdict(itertools.count)
    for item in items:
        share = item.get_closest_marker("one_in")
        if share is not None and next(numbers[item.nodeid.partition("[")[0]]) % share.args[0]:
            item.add_marker("nightly")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests and the modules that they import stay until the end: the garbage collector need not look through them again and
    again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def ray_local() -> Iterator[object]:
    """The suite's Ray session; it starts with the first test that asks for it."""
    from roll_lite.config.schema.run import RayConfig
    from roll_lite.distributed.ray_session import ray_session

    with ray_session(RayConfig(object_store_mb=200), run_folder=None) as session:
        yield session


@pytest.fixture
def signals_arrive() -> Iterator[None]:
    """Default handlers of SIGINT and SIGHUP, for the test and what it starts. Under nohup and in the background a shell ignores them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def tmp() -> Iterator[Path]:
    """A folder for one test, short enough for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
