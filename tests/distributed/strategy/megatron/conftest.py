import re
from collections.abc import Iterator

import pytest
from megatron_ranks import DEVICE, RankPool

ORACLE = "experts|lora|lora_experts|odd_configs|oracle|outputs|state|supervised|training|values|weights|average"
ON_GPUS = re.compile(f"test_(routing_replay|megatron_({ORACLE})).py")
"""What needs nothing of a CPU."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With TEST_DEVICE=cuda, what runs on ranks is a test for GPUs, but for what is slow."""
    for item in items if DEVICE == "cuda" else ():
        slow = any(item.get_closest_marker(name) for name in ("slow", "nightly"))
        if ON_GPUS.fullmatch(item.path.name) and "ranks" in getattr(item, "fixturenames", ()) and not slow:
            item.add_marker("gpu")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """ranks(world_size, function, *args) runs a function on every rank of a process group."""
    pool = RankPool()
    yield pool
    pool.close()
