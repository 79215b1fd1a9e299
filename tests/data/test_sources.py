"""The same rows from every kind of file, and mistakes that name file and row."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data import sources
from roll_lite.data.prompts import load_prompts
from roll_lite.data.sources import read_rows

ROWS = [
    {"prompt": "one", "answer": "1", "level": 0.1},
    {"prompt": "two", "answer": "2", "level": 0.5},
    {"prompt": "three", "answer": "3", "level": 0.9},
    {"prompt": "one two", "answer": "12", "level": 0.3},
    {"prompt": "one three", "answer": "13", "level": 0.7},
]
SAVED = Path(__file__).parent / "saved_by_datasets"
"""ROWS, written by datasets 5.2: Dataset.from_list(ROWS).save_to_disk(..., num_shards=2)."""


def as_jsonl(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_parquet(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path


def as_arrow(path: Path, writer: Callable[..., Any] = pa.ipc.new_stream) -> Path:
    table = pa.Table.from_pylist(ROWS)
    with writer(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=2)
    return path


def contents(path: Path) -> list[Any]:
    return [row.content for row in read_rows(path)]


def test_files_that_are_read_if_they_are_named(tmp_path: Path) -> None:
    """A list in a .json file, or JSON lines, as many data sets on the hub name them; CSV with line breaks in quotes."""
    (tmp_path / "list.json").write_text(" \n" + json.dumps(ROWS))
    as_jsonl(tmp_path / "lines.json")
    (tmp_path / "rows.csv").write_text('prompt,answer,level\none,1,0.1\n"a\nb","say ""c""",0.5\n')
    assert contents(tmp_path / "list.json") == contents(tmp_path / "lines.json") == ROWS
    assert contents(tmp_path / "rows.csv")[1] == {"prompt": "a\nb", "answer": 'say "c"', "level": "0.5"}
    (tmp_path / "mixed.json").write_text('[{"prompt": "a"}, 3]')
    assert contents(tmp_path / "mixed.json")[1] == "must be a JSON object with one entry per column, got 3"
    (tmp_path / "broken.json").write_text("[{]")
    assert "is not valid JSON" in refusal(tmp_path / "broken.json")
    (tmp_path / "broken.csv").write_text("a,b\n1,2,3\n")
    assert "cannot be read as csv: CSV parse error" in refusal(tmp_path / "broken.csv")
    shutil.copy(tmp_path / "list.json", tmp_path / "empty.json")
    assert "holds no .jsonl, .parquet, .arrow file" in refusal(tmp_path), "in a folder they may be anything"


@pytest.mark.parametrize(("name", "text"), [("rows.json", "[%s, %s]"), ("rows.jsonl", "%s\n%s\n")])
def test_half_a_character_makes_its_row_unreadable(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text % ('{"prompt": "\\ud83d\\ude00"}', '{"prompt": "\\ud83d"}'))
    half = "not valid text: \\ud83d is half of a character (a surrogate without its pair)"
    assert contents(tmp_path / name) == [{"prompt": "\U0001f600"}, half]


@pytest.mark.parametrize("cell", ["007", "1e3", "12345678901234567890123", "true", "2020-01-01", "12:30", "NA", " 2 "])
def test_cells_of_csv_are_as_written(tmp_path: Path, cell: str) -> None:
    """Types that a reader guesses from other rows would change an answer."""
    (tmp_path / "rows.csv").write_text(f'prompt,answer\none,{cell}\ntwo,2.5\n"",\n')
    assert contents(tmp_path / "rows.csv") == [
        {"prompt": "one", "answer": cell},
        {"prompt": "two", "answer": "2.5"},
        {"prompt": "", "answer": ""},
    ]
    (tmp_path / "rows.csv").write_text(f"answer\n{cell}\n")
    assert contents(tmp_path / "rows.csv") == [{"answer": cell}], "no row beside it"


@pytest.mark.parametrize("at_once", [1, 2, 1024])
def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROWS_AT_ONCE", at_once)
    files = [
        as_jsonl(tmp_path / "rows.jsonl"),
        as_parquet(tmp_path / "rows.parquet"),
        as_arrow(tmp_path / "stream.arrow"),
        as_arrow(tmp_path / "file.arrow", pa.ipc.new_file),
        SAVED,
    ]
    assert [contents(file) for file in files] == [ROWS] * len(files)


@pytest.mark.parametrize(("write", "suffix"), [(as_jsonl, ".jsonl"), (as_parquet, ".parquet")])
def test_a_folder_is_read_in_the_order_of_its_files(tmp_path: Path, write: Callable[..., Path], suffix: str) -> None:
    (tmp_path / "README.md").write_text("not data")
    write(tmp_path / f"train-00001-of-00002{suffix}", ROWS[3:])
    write(tmp_path / f"train-00000-of-00002{suffix}", ROWS[:3])
    assert contents(tmp_path) == ROWS
    assert [row.place.removeprefix(f"{tmp_path}/") for row in read_rows(tmp_path)][2:4] == [
        f"train-00000-of-00002{suffix}, {'line' if suffix == '.jsonl' else 'row'} 3",
        f"train-00001-of-00002{suffix}, {'line' if suffix == '.jsonl' else 'row'} 1",
    ]


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        list(read_rows(path))
    return str(caught.value)


def test_what_is_no_data_is_refused_with_what_would_be(tmp_path: Path) -> None:
    assert "unknown suffix '.tsv'; known are .jsonl, .parquet, .arrow, .csv, .json and folders;" in refusal(as_jsonl(tmp_path / "rows.tsv"))
    assert "no such file" in refusal(tmp_path / "gone.parquet")
    (tmp_path / "empty" / "data").mkdir(parents=True)
    assert "holds no .jsonl, .parquet, .arrow file" in refusal(tmp_path / "empty")
    as_parquet(tmp_path / "empty" / "data" / "train.parquet")
    assert refusal(tmp_path / "empty").endswith("; its folder data may be meant")


def test_splits_are_never_mixed(tmp_path: Path) -> None:
    folder = tmp_path / "hub"
    folder.mkdir()
    as_parquet(folder / "test-00000-of-00001.parquet")
    as_parquet(folder / "train-00000-of-00001.parquet")
    assert "several splits: test-00000-of-00001 (test), train-00000-of-00001 (train); name one file" in refusal(folder)
    as_jsonl(folder / "train.jsonl")
    assert "several kinds (.jsonl, .parquet)" in refusal(folder)
    saved = tmp_path / "saved"
    for split in ("train", "test"):
        shutil.copytree(SAVED, saved / split)
    (saved / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert "holds several splits; name the folder of one of them: test, train" in refusal(saved)
    assert contents(saved / "train") == ROWS


@pytest.mark.parametrize(
    ("names", "are_one_split"),
    [
        ("train-00000-of-00002 train-00001-of-00002", True),
        ("gsm8k_train math.train", True),
        ("0 1 2", True),
        ("part-00000 part-00001", True),
        ("contest_1 contest_2", True),
        ("questions", True),
        ("my_val dev-2", True),
        ("gsm8k_train gsm8k_test", False),
        ("00-train 01-heldout", False),
        ("math-validation.00 math-training.00", False),
        ("train_1 held-out_1", False),
        ("train more", False),
        ("gsm8ktrain gsm8ktest", False),
        ("questions answers", False),
        ("data data_eval", False),
    ],
)
def test_a_folders_files_are_of_one_split_or_refused(tmp_path: Path, names: str, are_one_split: bool) -> None:
    for name in names.split():
        as_jsonl(tmp_path / f"{name}.jsonl")
    if are_one_split:
        assert len(contents(tmp_path)) == len(ROWS) * len(names.split())
    else:
        assert str(tmp_path) in (told := refusal(tmp_path)) and "list" in told


def test_damaged_files_name_themselves(tmp_path: Path) -> None:
    whole = as_parquet(tmp_path / "rows.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:-20])
    (tmp_path / "no.arrow").write_text("hello, this is no arrow file")
    (tmp_path / "nothing.arrow").write_bytes(b"")
    for name in ("cut.parquet", "no.arrow", "nothing.arrow"):
        assert f"{name} cannot be read" in refusal(tmp_path / name)
    saved = tmp_path / "saved"
    shutil.copytree(SAVED, saved)
    (saved / "data-00001-of-00002.arrow").unlink()
    assert "names files that are not there: data-00001-of-00002.arrow" in refusal(saved)
    (saved / "state.json").write_text(
        '{"_data_files": [{"filename": "data-00000-of-00002.arrow"}], "_indices_data_files": [{"filename": "i"}]}'
    )
    assert "flatten_indices" in refusal(saved)


def test_mistakes_in_tables_name_file_row_and_column(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    as_parquet(tmp_path / "0.parquet", ROWS[:2])
    second = as_parquet(
        tmp_path / "1.parquet", [{"prompt": "one", "answer": "1"}, {"prompt": "two", "answer": None}, {"prompt": None, "answer": "1"}]
    )
    config = DomainConfig.model_validate({"data": {"train": tmp_path}, "reward": {"name": "exact"}})
    with pytest.raises(ValueError) as caught:
        load_prompts("sums", config, "train", make_tokenizer())
    assert str(caught.value).split("\n") == [
        "domains.sums.data.train: the data has mistakes",
        f"  {second}, row 2: column 'answer': empty (null); without answers, set domains.sums.data.answer: null",
        f"  {second}, row 3: column 'prompt': only a string or a number can be filled into a text, got null",
    ]


def test_chat_messages_and_lists_of_a_table(tmp_path: Path, make_tokenizer: Callable[..., Any]) -> None:
    path = as_parquet(tmp_path / "chat.parquet", [{"prompt": [{"role": "user", "content": "one"}], "answer": ["1", "2"]}])
    config = DomainConfig.model_validate({"data": {"train": path}, "template": {"name": "chat"}, "reward": {"name": "exact"}})
    (prompt,) = load_prompts("sums", config, "train", make_tokenizer(chat=True))
    assert (prompt.text, prompt.answer) == ("user : one assistant :", ["1", "2"])


def test_depth_that_the_parser_only_just_takes_is_told_too(tmp_path: Path) -> None:
    """Looking for halves of characters takes more of the stack than reading does."""
    lines = [f'{{"prompt": "\\ud800", "deep": {"[" * depth}{"]" * depth}}}' for depth in range(700, 1000)]
    path = tmp_path / "deep.jsonl"
    path.write_text("\n".join(lines))
    contents = [row.content for row in read_rows(path)]
    assert all("half of a character" in content or "not valid JSON" in content for content in contents)
    assert "half of a character" in contents[0] and "not valid JSON" in contents[-1]
