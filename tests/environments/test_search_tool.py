"""Search in small corpora."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environments.tool_play import loaded, played, player_of

from roll_lite.config.schema.environments import SearchToolConfig

pytest.importorskip("bm25s")

ROWS = [
    {"id": "rhine", "title": "Rhine", "text": "A river that passes Basel and Cologne."},
    {"id": 7, "title": "Cologne", "text": "A city on the Rhine, known for its cathedral. The Rhine divides it."},
    {"text": "The cathedral of Florence has a dome; the city lies on the Arno."},
    {"id": "arno", "text": "Arno, a river."},
]


def written(folder: Path, rows: list[Any], name: str = "corpus.jsonl") -> Path:
    path = folder / name
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


async def found(path: Path, *queries: str, **given: Any) -> list[str]:
    tools = loaded(SearchToolConfig(name="search", corpus=path, **given))
    [shown], _ = await played(player_of(tools), [[["search", {"query": query}] for query in queries], "Done."])
    return shown


async def test_documents_are_found_by_their_words(tmp_path: Path) -> None:
    path = written(tmp_path, ROWS)
    rhine, cathedral, nothing, empty = await found(path, "Rhine", "What cathedral is in Florence?", "the moon", "", results=2)
    cologne = "[7 Cologne]\nA city on the Rhine, known for its cathedral. The Rhine divides it."
    assert sorted(rhine.split("\n\n")) == sorted([cologne, "[rhine Rhine]\nA river that passes Basel and Cologne."])
    assert cathedral.split("\n\n") == ["[3]\nThe cathedral of Florence has a dome; the city lies on the Arno.", cologne]
    assert nothing == empty == "No document has any of these words."
    assert (await found(path, "ARNO"))[0].startswith("[arno]\nArno, a river.\n\n[3]\n"), "of the same words in a shorter text more"


@pytest.mark.parametrize(
    ("query", "found_in"),
    [
        ("C", "Vitamin C"),
        ("R", "R 4"),
        ("it", "It"),
        ("what is it", "What is love"),
        ("苹果", "苹果公司发布了新手机"),
        ("食べる", "寿司を食べる"),
    ],
)
async def test_short_and_common_words_and_words_without_spaces_are_found(tmp_path: Path, query: str, found_in: str) -> None:
    rows = [{"text": text} for text in ("Vitamin C", "R 4", "It", "What is love", "苹果公司发布了新手机", "寿司を食べる", "nothing")]
    [shown] = await found(written(tmp_path, rows), query)
    assert shown.partition("]\n")[2] == found_in


async def test_a_text_file_has_a_document_per_line(tmp_path: Path) -> None:
    assert await found(written(tmp_path, ["first apple", "", "second pear"], "corpus.txt"), "pear", "apple") == [
        "[3]\nsecond pear",
        "[1]\nfirst apple",
    ]


def test_description(tmp_path: Path) -> None:
    [tool] = loaded(SearchToolConfig(name="search", corpus=written(tmp_path, ROWS)))
    [schema] = tool.schemas
    assert schema["function"]["name"] == "search"
    assert schema["function"]["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "tools.0: corpus: .*corpus.jsonl has no documents"),
        ([{"text": "a"}, {"content": "b"}], "tools.0: text: .*corpus.jsonl, line 2: no text in column 'text'; columns: content"),
        (["{"], "tools.0: text: .*line 1: .*not valid JSON"),
    ],
)
def test_corpora_that_cannot_be_read(tmp_path: Path, rows: list[Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        loaded(SearchToolConfig(name="search", corpus=written(tmp_path, rows)))
