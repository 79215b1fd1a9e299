"""The engines under the contract: one engine of each make serves all tests that do not have to break it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from engine_harness import DEVICE, Harness, Make, require
from megatron_ranks import RankPool

MAX_MODEL_LEN = 1024
collect_ignore = ["test_contract_conversations.py"] if DEVICE == "cuda" else []  # it imports what environments' tests want installed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With TEST_DEVICE=cuda, what one engine of a module is asked is a test for GPUs, and engines with experts are."""
    for item in items if DEVICE == "cuda" else ():
        if "engine" in getattr(item, "fixturenames", ()) or item.path.name == "test_contract_experts.py":
            item.add_marker("gpu")


@pytest.fixture(scope="session", params=["vllm", "sglang"])
def make(request: pytest.FixtureRequest) -> Make:
    chosen: Make = request.param
    require(chosen)
    return chosen


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def lasting_engine(make: Make, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Harness]:
    """Few batched tokens: several long prompts do not fit into one forward pass."""
    folder = tmp_path_factory.mktemp("model") / "m"
    harness = await Harness.start(folder, max_model_len=MAX_MODEL_LEN, make=make, max_batched_tokens=1024)
    yield harness
    await harness.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def engine(lasting_engine: Harness) -> AsyncIterator[Harness]:
    """A test that fails while it has paused the engine leaves no other one waiting."""
    yield lasting_engine
    await lasting_engine.strategy.resume()


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
