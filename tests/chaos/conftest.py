"""Runs that nobody disturbs, made once and compared with others."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.integration.test_runs import Run


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(*settings: str) -> Run:
        with Run(tmp_path_factory.mktemp("quiet"), *settings) as run:
            code, output = run.finish(400)
        assert code == 0, output
        return run

    return make
