from collections.abc import Iterator

import pytest
from megatron_ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """ranks(world_size, function, *args) runs a function on every rank of a gloo process group."""
    pool = RankPool()
    yield pool
    pool.close()
