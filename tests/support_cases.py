"""Tables of test cases: tests/FOLDER/cases/NAME.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parent


def records(table: str) -> list[dict[str, Any]]:
    """Lines of a table, which is named FOLDER/NAME."""
    folder, name = table.split("/")
    with (TESTS / folder / "cases" / f"{name}.jsonl").open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def cases(table: str) -> list[Any]:
    """Parameter sets for pytest: a line's values in their order, with its first value as id. The value of `case` is nothing but the id."""
    return [
        pytest.param(*(value for key, value in record.items() if key != "case"), id=str(next(iter(record.values()))))
        for record in records(table)
    ]
