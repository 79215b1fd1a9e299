"""Dumps: bit for bit what trained, and every other sample with its cause, for whatever reads Parquet."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from support_dumps import PROMPT, TEMPERATURES, Blocks, assert_same, batch, record, sample, write

from roll_lite.data import dumps
from roll_lite.data.branches import per_sample
from roll_lite.data.dump_files import METADATA, read_header
from roll_lite.data.dumps import load_dump, write_dump
from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Author, Branch, SampleGroup, SampleOutcome, Score, Segment, TokenRow, VersionSpan
from roll_lite.workers.rollout_output import rows_of


def mixed(kept: bool = False) -> tuple[list[SampleGroup], Blocks]:
    """Group 7: one that trains, one that failed without a token, a cut off one; a baseline. Group 9: two that train."""
    kept_ids = np.array([[20, -1], [21, 22]], np.int32) if kept else None
    blocks = Blocks(
        {"one": [record([30]), record([20, 21], kept_ids), record([1, 2, 3, 4])], "other": [record([40, 41, 42]), record([9])]}, kept
    )
    first = SampleGroup(
        7,
        "add",
        (
            sample(7, 0, TokenRow("one", 1, 5), Score(0.1, True, {"extracted": "2"})),
            sample(7, 1, None, None, SampleOutcome.FAILED, failure="generation: engine \ud800 died"),
            sample(7, 2, TokenRow("one", 2, 7), None, SampleOutcome.FAILED, failure="time-out", timed_out=True),
        ),
        baseline=sample(7, 3, TokenRow("other", 1, 4), Score(0.25)),
    )
    second = SampleGroup(
        9,
        "add",
        (sample(9, 0, TokenRow("other", 0, 6), Score(-1.0, format_ok=True)), sample(9, 1, TokenRow("one", 0, 4), Score(math.nan))),
        baseline=sample(9, 2, TokenRow("other", 1, 4), Score(0.5)),
    )
    return [first, second], blocks


def trained(rows: DataProto) -> DataProto:
    """By hand: the rows, and the tokens that `mixed` gives to the three samples that train."""
    said = [[20, 21], [40, 41, 42], [30]]
    columns = {
        "input_ids": Ragged.from_rows([torch.tensor([*PROMPT, *own]) for own in said]),
        "response_mask": Ragged.from_rows([torch.tensor([False] * 3 + [True] * len(own)) for own in said]),
        "rollout_log_probs": Ragged.from_rows(
            [torch.cat([torch.zeros(2), -torch.arange(1, len(own) + 1, dtype=torch.float32) / 3]) for own in said]
        ),
    }
    return rows.with_columns(**columns)


@pytest.mark.parametrize("row_group_tokens", [1, 8, 2**21])
def test_what_trained_comes_back_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row_group_tokens: int) -> None:
    monkeypatch.setattr(dumps, "ROW_GROUP_TOKENS", row_group_tokens)
    groups, blocks = mixed()
    path = tmp_path / "dumps" / "step_000001.parquet"
    rows = write(path, groups, blocks)
    assert_same(load_dump(path), trained(rows))
    assert rows.tensor("baseline_score").tolist() == [0.25, 0.5, 0.5] and rows.objects("finish_reason").tolist() == ["stop"] * 3
    assert [entry.name for entry in path.parent.iterdir()] == ["step_000001.parquet"], "no half-written file is left"
    if row_group_tokens == 1:
        assert pq.ParquetFile(path).num_row_groups > 1


def test_pandas_reads_all_samples_with_what_became_of_them(tmp_path: Path) -> None:
    groups, blocks = mixed()
    write(tmp_path / "step.parquet", groups, blocks)
    frame = pandas.read_parquet(tmp_path / "step.parquet")
    assert len(frame) == 7
    assert frame["outcome"].tolist() == ["accepted", "failed", "failed", "accepted", "accepted", "accepted", "accepted"]
    assert frame["baseline"].tolist() == [False, False, False, True, False, False, True]
    assert [None if pandas.isna(one) else int(one) for one in frame["sample"]] == [0, None, None, None, 1, 2, None]
    first, lost, cut = (frame.iloc[row] for row in range(3))
    assert (first["domain"], first["prompt_uid"], first["epoch"], first["group"], first["index"], first["attempt"]) == (
        "add",
        17,
        1,
        7,
        0,
        2,
    )
    assert (first["prompt"], first["response"], json.loads(first["reference_answer"]), first["score"]) == (
        "1+1=",
        "said",
        {"value": 2},
        0.1,
    )
    assert (first["correct"], json.loads(first["details"]), first["sample_weight"]) == (True, {"extracted": "2"}, 0.5)
    assert first["input_ids"].tolist() == [*PROMPT, 20, 21] and first["response_mask"].tolist() == [False] * 3 + [True] * 2
    assert first["rollout_log_probs"].dtype == np.float32 and len(first["rollout_log_probs"]) == 4
    assert [(span["start"], span["version"]) for span in first["versions"]] == [(0, 3), (1, 4)]
    assert (first["prompt_length"], first["response_length"], first["policy_tokens"]) == (3, 2, 2)
    assert lost["failure"] == "generation: engine \\ud800 died" and lost["input_ids"] is None and pandas.isna(lost["score"])
    assert (cut["failure"], cut["timed_out"], cut["input_ids"].tolist()) == ("time-out", True, [*PROMPT, 1, 2, 3, 4])
    assert frame["score"].iloc[3] == 0.25, "a greedy baseline's"
    again = tmp_path / "again.parquet"
    frame.to_parquet(again)
    pandas.testing.assert_frame_equal(pandas.read_parquet(again), frame)


def test_kept_ids_come_along_where_there_are_some(tmp_path: Path) -> None:
    groups, blocks = mixed(kept=True)
    write(tmp_path / "step.parquet", groups, blocks, kept_ids=True)
    kept = load_dump(tmp_path / "step.parquet").ragged("kept_ids")
    assert kept.dtype == torch.int32
    assert kept.row(0).tolist() == [[-1, -1], [-1, -1], [20, -1], [21, 22]]
    assert set(kept.row(1).flatten().tolist()) == {-1}, "all tokens survived"
    assert pandas.read_parquet(tmp_path / "step.parquet")["kept_ids"][0][3].tolist() == [21, 22]


def test_the_header_says_what_made_it(tmp_path: Path) -> None:
    groups, blocks = mixed()
    write(tmp_path / "step.parquet", groups, blocks)
    header = read_header(tmp_path / "step.parquet")
    assert (header.step, header.baselines, header.largest_token) == (1, True, 42)
    assert header.domains == {"add": {"samples": 3, "longest_prompt": 3, "longest_response": 3, "longest_row": 6}}
    raw = json.loads(pq.read_metadata(tmp_path / "step.parquet").metadata[METADATA.encode()])
    assert raw["schema_version"] == 1 and raw["made_by"].startswith("roll_lite ")


def test_a_step_without_samples_is_a_dump_too(tmp_path: Path) -> None:
    write(tmp_path / "step.parquet", [], Blocks({}))
    assert len(load_dump(tmp_path / "step.parquet")) == 0
    assert read_header(tmp_path / "step.parquet").domains == {}


def test_tokens_of_a_dead_engine_are_missing_only_where_nothing_trains_on_them(tmp_path: Path) -> None:
    groups, blocks = mixed()
    blocks.blocks["other"] = None
    with pytest.raises(RuntimeError, match="the tokens of add/19/1/9/0/2, which trains, are gone"):
        write(tmp_path / "step.parquet", groups, blocks)
    assert not (tmp_path / "step.parquet").exists()
    groups[1] = SampleGroup(9, "add", groups[1].samples[1:], groups[1].baseline)
    write(tmp_path / "step.parquet", groups, blocks)
    frame = pandas.read_parquet(tmp_path / "step.parquet")
    assert frame["input_ids"][3] is None and frame["baseline"][3]


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    write(tmp_path / "step_000001.parquet", *batch())
    return tmp_path / "step_000001.parquet"


def test_a_truncated_file_is_told(dump: Path) -> None:
    dump.write_bytes(dump.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"step_000001.parquet is damaged: it cannot be read as a dump"):
        load_dump(dump)


def test_a_flipped_byte_among_the_tokens_is_told(dump: Path) -> None:
    place = pq.read_metadata(dump).row_group(0).column(0)
    content = bytearray(dump.read_bytes())
    content[place.data_page_offset + place.total_compressed_size // 2] ^= 0xFF
    dump.write_bytes(content)
    with pytest.raises(ValueError, match=r"step_000001.parquet is damaged"):
        load_dump(dump)


def rewritten(path: Path, metadata: dict[str, object] | None, without: str = "") -> None:
    table = pq.read_table(path)
    header = {METADATA: json.dumps(metadata)} if metadata is not None else None
    pq.write_table(table.drop_columns(without) if without else table.replace_schema_metadata(header), path)


def test_another_schema_version_is_told_with_its_writer(dump: Path) -> None:
    rewritten(dump, {"format": "roll_lite.dump", "schema_version": 7, "made_by": "roll_lite 9.0"})
    with pytest.raises(ValueError, match=r"has schema version 7, this program reads 1; it was written by roll_lite 9.0"):
        load_dump(dump)


def test_a_table_of_somebody_else_is_no_dump(dump: Path) -> None:
    rewritten(dump, None)
    with pytest.raises(ValueError, match="is no dump of rollouts: it has no 'roll_lite' among its metadata"):
        load_dump(dump)
    rewritten(dump, {"format": "other", "schema_version": 1})
    with pytest.raises(ValueError, match="is no dump of rollouts: its format is 'other'"):
        load_dump(dump)
    rewritten(dump, {"format": "roll_lite.dump", "schema_version": 1})
    with pytest.raises(ValueError, match="is damaged.*KeyError"):
        load_dump(dump)


def test_a_dump_without_a_column_of_tokens_is_none(dump: Path) -> None:
    rewritten(dump, json.loads(pq.read_metadata(dump).metadata[METADATA.encode()]))
    rewritten(dump, {}, without="rollout_log_probs")
    with pytest.raises(ValueError, match="has no column rollout_log_probs"):
        load_dump(dump)


def test_further_columns_of_a_batch_travel_by_themselves(tmp_path: Path) -> None:
    """`max_tokens` stands for what others may add to the rows."""
    groups, blocks = batch()
    rows = rows_of(groups, TEMPERATURES).with_columns(
        max_tokens=torch.tensor([3, 1, 4, 1]), truncated=torch.tensor([True, False, False, True])
    )
    write_dump(tmp_path / "step.parquet", groups, rows, blocks, {"step": 1, "config": {}, "tokenizer": "", "stats": {}})
    found = load_dump(tmp_path / "step.parquet")
    assert found.tensor("max_tokens").tolist() == [3, 1, 4, 1] and found.tensor("truncated").tolist() == [True, False, False, True]
    assert pq.read_schema(tmp_path / "step.parquet").field("max_tokens").type == pa.int64()


def test_no_column_of_a_batch_means_another_thing_in_a_dump() -> None:
    for name, kind in dumps.DESCRIPTION.items():
        if name in KEYS:
            assert (KEYS[name].kind is Kind.OBJECT) == (kind == "string"), name


def test_every_row_of_a_sample_is_a_line(tmp_path: Path) -> None:
    groups, blocks = batch(domains=("add",))
    first, second = groups[0].samples
    branch = Branch((Segment(Author.PROMPT, 4), Segment(Author.POLICY, 1, (VersionSpan(0, 6),))), TokenRow("one", 0, 5))
    branched = replace(first, transcript=replace(first.transcript, branches=(branch,)))
    path = tmp_path / "step_000001.parquet"
    rows = write(path, [replace(groups[0], samples=(branched, second))], blocks)
    found = load_dump(path)
    assert [found.tensor(name).tolist() for name in ("sample", "index", "branch")] == [[0, 1, 2], [0, 0, 1], [0, 1, 0]]
    assert found.tensor("prompt_length").tolist() == [3, 4, 3] and found.tensor("min_version").tolist()[1] == 6
    assert found.ragged("input_ids").row(1).tolist() == [*PROMPT, 10, 11]
    assert_same(found.select(rows.keys()), rows)
    assert len(per_sample(found)) == 2
