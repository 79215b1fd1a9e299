"""Data that a configuration names: kinds of files, their columns, tags and filters, before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from config_project import Project
from pyarrow import parquet
from transformers import AutoTokenizer

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.data.prompts import load_prompts

COPY = "domains.copy.data"
SHIPPED_MODEL = Path(__file__).resolve().parents[2] / "examples/models/tiny"


def table(path: Path, **columns: list[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)
    return path


def told(project: Project, yaml: str) -> list[tuple[str, str]]:
    return [(problem.path, problem.message) for problem in project.problems_of(yaml)]


def copy(data: str) -> str:
    return f"domains: {{copy: {{data: {{{data}}}}}}}"


def test_tables_and_folders_are_right(project: Project) -> None:
    table(project.folder / "rows.parquet", prompt=["1+1="], answer=["2"])
    for name in ("0", "1"):
        table(project.folder / f"shards/{name}.parquet", prompt=["1+1="], answer=["2"])
    assert told(project, copy("train: rows.parquet, validation: shards")) == []


def test_several_files_with_and_without_shares(project: Project) -> None:
    for name in ("rows.parquet", "more/rows.parquet"):
        table(project.folder / name, prompt=["1+1="], answer=["2"])
    table(project.folder / "other.parquet", prompt=["1+1="], solution=["2"])
    assert told(project, copy("train: [rows.parquet, more]")) == []
    assert told(project, copy("train: {rows.parquet: 0.7, more: 0.3}, validation: [rows.parquet]")) == []
    assert dict(project.load("domains.copy.data.train={rows.parquet: 0.7, more: 3}").domains["copy"].data.train) == {
        project.folder / "rows.parquet": 0.7,
        project.folder / "more": 3.0,
    }
    for files, place, message in (
        ("[rows.parquet, gone.parquet]", f"{COPY}.train", "no such file"),
        ("[rows.parquet, rows.parquet]", f"{COPY}.train", "stands there twice"),
        ("[rows.parquet, other.parquet]", f"{COPY}.answer", "no such column"),
        ("[]", f"{COPY}.train", "expected path or list of (path), at least one or mapping of name to (number > 0), at least one"),
        ("{rows.parquet: 0}", f"{COPY}.train", "expected path or list"),
        ("{rows.parquet: much}", f"{COPY}.train", "expected path or list"),
    ):
        ((path, said),) = told(project, copy(f"train: {files}"))
        assert path == place and message in said, (path, said)


def test_a_folder_with_held_out_files_in_it_does_not_train(project: Project) -> None:
    for name in ("0", "1"):
        table(project.folder / f"shards/{name}.parquet", prompt=["1+1="], answer=["2"])
    ((path, message),) = told(project, copy("train: shards, validation: shards/1.parquet"))
    assert path == f"{COPY}.train" and f"{project.folder}/shards/1.parquet, which data.validation names" in message
    assert told(project, copy("train: shards/0.parquet, validation: shards/1.parquet")) == []
    assert told(project, copy("train: shards, validation: shards")) == [], "meant"


def test_columns_of_a_table_are_read_from_its_schema(project: Project) -> None:
    """No row is: the data of this file is gone."""
    path = table(project.folder / "rows.parquet", prompt=["1+1="] * 1000, answr=["2"] * 1000, rate=[0.5] * 1000)
    whole = path.read_bytes()
    path.write_bytes(whole[:4] + b"\0" * 50 + whole[54:])
    assert told(project, copy("train: rows.parquet, weight: wait, filter: {difficulty: rat, difficulty_range: [0, 1]}")) == [
        (f"{COPY}.answer", f"{path} has no such column; did you mean 'answr'?"),
        (f"{COPY}.weight", f"{path} has no such column; valid here: answr, prompt, rate."),
        (f"{COPY}.filter.difficulty", f"{path} has no such column; did you mean 'rate'?"),
    ]


RIGHT = b'{"prompt": "1+1=", "answer": "2", "w": 1}'
AS_READ = {
    "plain": (RIGHT, True),
    "a mark at the start": (b"\xef\xbb\xbf" + RIGHT, True),
    "a mark in line 2": (RIGHT + b"\n\xef\xbb\xbf" + RIGHT, False),
    "UTF-16": (RIGHT.decode().encode("utf-16"), False),
    "UTF-32 without a mark": (RIGHT.decode().encode("utf-32-le"), False),
    "Latin-1": (b'{"prompt": "\xe9", "answer": "2"}', False),
    "half a character": (b'{"prompt": "\\ud83d", "answer": "2"}', False),
    "half a character in another column": (b'{"prompt": "x", "answer": "2", "x": ["\\uDE00"]}', False),
    "a whole one of two halves": (b'{"prompt": "\\ud83d\\ude00", "answer": "2", "w": 1}', True),
    "an encoded half": (b'{"prompt": "\xed\xa0\xbd", "answer": "2"}', False),
    "deep": (b'{"prompt": "x", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", False),
    "a long number": (b'{"prompt": "x", "answer": ' + b"1" * 5000 + b"}", False),
    "two objects": (RIGHT + b" " + RIGHT, False),
    "carriage returns": (RIGHT + b"\r\n" + RIGHT + b"\r\n", True),
    "a negative weight": (b'{"prompt": "x", "answer": "2", "w": -1}', False),
    "no weight": (b'{"prompt": "x", "answer": "2", "w": NaN}', False),
    "a large weight": (b'{"prompt": "x", "answer": "2", "w": 1e39}', False),
}


@pytest.mark.parametrize("name", AS_READ)
def test_the_check_reads_as_the_run_does(name: str, project: Project) -> None:
    content, right = AS_READ[name]
    (project.folder / "odd.jsonl").write_bytes(content)
    config = DomainConfig.model_validate({"data": {"train": project.folder / "odd.jsonl", "weight": "w"}, "reward": {"name": "exact"}})
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL)
    if right:
        assert told(project, copy("train: odd.jsonl, weight: w")) == []
        load_prompts("copy", config, "train", tokenizer)
    else:
        ((path, message),) = told(project, copy("train: odd.jsonl, weight: w"))
        assert path in (f"{COPY}.train", f"{COPY}.weight") and "line " in message
        with pytest.raises(ValueError, match=r"odd.jsonl, line [12]: ") as caught:
            load_prompts("copy", config, "train", tokenizer)
        assert message.partition(": ")[2].split(";")[0] in str(caught.value), "in the same words"


def test_a_text_of_a_table_that_is_none(project: Project) -> None:
    text = pa.array([b"\xff\xfe"], pa.binary()).view(pa.binary()).cast(pa.string(), safe=False)
    parquet.write_table(pa.table({"prompt": text, "answer": ["2"]}), project.folder / "rows.parquet")
    ((path, message),) = told(project, copy("train: rows.parquet"))
    assert path == f"{COPY}.train" and "rows.parquet cannot be read as parquet" in message


CHAT = "{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}"


def test_a_chat_template_of_ones_own(project: Project) -> None:
    project.write("chat.jinja", CHAT)
    template = "domains: {copy: {template: {name: chat, file: chat.jinja, arguments: "
    assert told(project, f"{template}{{enable_thinking: false}}}}}}}}") == []
    assert told(project, f"{template}{{thinking: false}}}}}}}}") == [
        ("domains.copy.template.arguments.thinking", f"{project.folder / 'chat.jinja'} reads no such argument")
    ]
    assert told(project, f"{template}{{messages: []}}}}}}}}") == [
        ("domains.copy.template.arguments.messages", "is set by the run itself; remove it")
    ]
    ((path, message),) = told(project, "domains: {copy: {template: {name: chat, file: gone.jinja}}}")
    assert path == "domains.copy.template.file" and "gone.jinja is not there" in message
    assert [path for path, _ in told(project, "domains: {copy: {template: {file: chat.jinja, arguments: {a: 1}}}}")] == [
        "domains.copy.template.file",
        "domains.copy.template.arguments",
    ]


def test_held_out_prompts_need_neither_weight_nor_difficulty(project: Project) -> None:
    project.write("rich.jsonl", '{"prompt": "1+1=", "answer": "2", "w": 1, "rate": 0.5}\n')
    chosen = "weight: w, filter: {difficulty: rate, difficulty_range: [0, 1]}"
    assert told(project, copy(f"train: rich.jsonl, validation: held_out.jsonl, {chosen}")) == []


@pytest.mark.parametrize(
    ("file", "fragment"),
    [
        ("rows.tsv", "unknown suffix '.tsv'; known are .jsonl, .parquet, .arrow, .csv, .json and folders"),
        ("damaged.parquet", "cannot be read as parquet"),
        ("folder", "folder holds no .jsonl, .parquet, .arrow file"),
        ("gone.parquet", "no such file"),
    ],
)
def test_files_that_cannot_be_read(project: Project, file: str, fragment: str) -> None:
    for name in ("rows.tsv", "damaged.parquet", "folder/readme.txt"):
        project.write(name, "prompt,answer\n1,2\n")
    ((path, message),) = told(project, copy(f"train: {file}"))
    assert path == f"{COPY}.train" and fragment in message


# ---------------------------------------------------------------- tags


def test_shared_files(project: Project) -> None:
    project.write("both.jsonl", '{"prompt": "1", "answer": "1", "task": "a"}\n{"question": "1", "task": "b"}\n')
    shared = "train: both.jsonl, validation: null, tag: task, tags: "
    boxed = "reward: {{name: format, args: {{preset: boxed}}}}"  # reads no answer
    both = (
        f"domains: {{{{add: {{{{data: {{{{{{}}}}}}}}}}, copy: {{{{data: {{{{{{}}}}}}, {boxed}}}}}}}}}\nvalidation: {{{{enabled: false}}}}"
    )
    assert told(project, both.format(f"{shared}[a]", f"{shared}[b], prompt: question, answer: null")) == []
    assert told(project, both.format(f"{shared}[a]", f"{shared}[b]"))[0][0] == f"{COPY}.prompt", "only its own rows count"
    claimed = told(project, both.format(f"{shared}[a, b]", f"{shared}[c, b], prompt: question, answer: null"))
    assert (f"{COPY}.tags", "domain 'add' of the same file claims 'b' too; a row belongs to one domain") in claimed
    assert told(project, both.format(f"{shared}[a]", f"{shared}[bb], prompt: question, answer: null")) == [
        ("domains.add.data.tags", f"{project.folder}/both.jsonl, line 2: the tag 'b' belongs to no domain; there are a (add), bb (copy)"),
        (f"{COPY}.train", "no row has a tag of this domain"),
    ]


def test_a_row_whose_domain_reads_another_file_is_named(project: Project) -> None:
    """Each would leave it to the other."""
    project.write("one.jsonl", '{"prompt": "1", "answer": "1", "task": "a"}\n{"prompt": "1", "answer": "1", "task": "b"}\n')
    project.write("two.jsonl", '{"prompt": "1", "answer": "1", "task": "b"}\n')
    shared = "validation: null, tag: task, tags: "
    yaml = f"domains: {{add: {{data: {{train: one.jsonl, {shared}[a]}}}}, copy: {{data: {{train: %s, {shared}[b]}}}}}}"
    yaml += "\nvalidation: {enabled: false}"
    ((path, message),) = told(project, yaml % "two.jsonl")
    assert path == "domains.add.data.tags"
    assert f"{project.folder}/one.jsonl, line 2: the tag 'b' is one of domain copy, which does not read this file" in message
    assert told(project, yaml % "one.jsonl") == []


def test_tags_of_tables_are_looked_at_before_anything_starts(project: Project) -> None:
    table(project.folder / "rows.parquet", prompt=["1", "2", "3"], answer=["1", "2", "3"], task=["a", "b", "a"])
    with pa.OSFile(str(project.folder / "rows.arrow"), "wb") as file, pa.ipc.new_stream(file, pa.schema({"task": pa.string()})) as stream:
        stream.write_table(pa.table({"task": ["c"]}))
    yaml = """
domains:
  add: {data: {train: rows.%s, validation: null, tag: task, tags: [%s]}}
validation: {enabled: false}
"""
    assert told(project, yaml % ("parquet", "a, b")) == []
    ((path, message),) = told(project, yaml % ("parquet", "a"))
    assert path == "domains.add.data.tags"
    assert message == f"{project.folder}/rows.parquet, row 2: the tag 'b' belongs to no domain; there are a (add)"
    found = told(project, yaml % ("arrow", "a, b"))
    assert (
        "domains.add.data.tags",
        f"{project.folder}/rows.arrow, row 1: the tag 'c' belongs to no domain; there are a (add), b (add)",
    ) in found


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_a_misspelt_tag_of_a_folder_of_tables_is_named(project: Project, suffix: str) -> None:
    rows = pa.table({"prompt": ["1+1="], "answer": ["2"], "task": ["a"]})
    (project.folder / "shards").mkdir()
    for name in ("0", "1"):
        path = project.folder / f"shards/{name}.{suffix}"
        if suffix == "parquet":
            parquet.write_table(rows, path)
        else:
            with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as stream:
                stream.write_table(rows)
    found = told(project, copy("train: shards, tag: tsk, tags: [a]"))
    assert found == [(f"{COPY}.tag", f"{project.folder}/shards has no such column; did you mean 'task'?")]


def test_a_folder_and_a_file_in_it_are_the_same_data(project: Project) -> None:
    project.write("parts/0.jsonl", '{"prompt": "1", "answer": "1", "task": "a"}\n{"prompt": "1", "answer": "1", "task": "b"}\n')
    yaml = """
domains:
  add: {data: {train: parts, validation: null, tag: task, tags: [a]}}
  copy: {data: {train: parts/0.jsonl, validation: null, tag: task, tags: [%s]}}
validation: {enabled: false}
"""
    assert told(project, yaml % "b") == []
    assert (f"{COPY}.tags", "domain 'add' of the same file claims 'a' too; a row belongs to one domain") in told(project, yaml % "b, a")


def test_tags_and_their_column_belong_together(project: Project) -> None:
    project.write("tagged.jsonl", '{"prompt": "1", "answer": "1", "task": "a"}\n')
    assert told(project, copy("tags: [a]")) == [(f"{COPY}.tags", "there is no column to look for them; name it with `tag`, or remove them")]
    message = dict(told(project, copy("train: tagged.jsonl, tag: task")))[f"{COPY}.tag"]
    assert "List their tags in `tags`" in message
    assert (f"{COPY}.tag", f"{project.folder}/tagged.jsonl has no such column; did you mean 'task'?") in told(
        project, copy("train: tagged.jsonl, tag: tsk, tags: [a]")
    )


def test_the_same_tag_of_two_files_or_columns_is_no_conflict(project: Project) -> None:
    for name, column in (("one", "task"), ("two", "kind")):
        project.write(f"{name}.jsonl", f'{{"prompt": "1", "answer": "1", "{column}": "a"}}\n')
    yaml = """
domains:
  add: {data: {train: one.jsonl, validation: null, tag: task, tags: [a]}}
  copy: {data: {train: two.jsonl, tag: kind, tags: [a]}}
validation: {enabled: false}
"""
    assert told(project, yaml) == []


# ---------------------------------------------------------------- filters


def test_filters_that_mean_nothing(project: Project) -> None:
    project.write("rich.jsonl", '{"prompt": "1+1=", "answer": "2", "rate": 0.5}\n')
    upside_down = "filter: {prompt_tokens: [8, 4], difficulty: rate, difficulty_range: [0.8, 0.2]}"
    assert told(project, copy(f"train: rich.jsonl, {upside_down}")) == [
        (f"{COPY}.filter.prompt_tokens", "is upside down, nothing lies in it; use [4, 8]"),
        (f"{COPY}.filter.difficulty_range", "is upside down, nothing lies in it; use [0.2, 0.8]"),
    ]
    ((path, message),) = told(project, copy("filter: {difficulty_range: [0, 1]}"))
    assert path == f"{COPY}.filter.difficulty_range" and "`difficulty`" in message
    ((path, message),) = told(project, copy("filter: {prompt_tokens: [20, 40]}"))
    assert path == f"{COPY}.filter.prompt_tokens" and "sampling.max_prompt_tokens (16)" in message


def test_only_tables_cost_the_import_of_pyarrow() -> None:
    code = "import sys, roll_lite.config.loading; sys.exit(bool({'pyarrow', 'numpy', 'torch'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_held_out_prompts_are_reported_by_a_column_that_they_have(project: Project) -> None:
    table(project.folder / "rows.parquet", prompt=["1+1="], answer=["2"])
    table(project.folder / "held_out.parquet", prompt=["1+1="], answer=["2"], level=[3], steps=[["a"]])
    data = "train: rows.parquet, validation: held_out.parquet, report_by: "
    assert told(project, copy(f"{data}level")) == []
    ((path, message),) = told(project, copy(f"{data}levels"))
    assert path == f"{COPY}.report_by" and "did you mean 'level'" in message
    ((path, message),) = told(project, copy(f"{data}steps"))
    assert path == f"{COPY}.report_by" and "prompts are reported by a text or a number" in message
