"""DataProto against plain Python rows: every operation is checked row by row."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll_lite.data.keys import KEYS, Kind
from roll_lite.data.proto import Column, DataProto, object_column, save_tensors
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import FinishReason

properties = settings(deadline=None, max_examples=60)

Row = dict[str, Any]


@st.composite
def plain_rows(draw: st.DrawFn, min_size: int = 0) -> list[Row]:
    lengths = draw(st.lists(st.integers(1, 6), min_size=min_size, max_size=8))
    return [
        {
            "sample": i,
            "score": draw(st.sampled_from([0.0, 0.5, 1.0])),
            "domain": draw(st.sampled_from(["math", "code"])),
            "input_ids": draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)),
            "values": draw(st.lists(st.floats(-2, 2, width=32), min_size=n - 1, max_size=n - 1)),
        }
        for i, n in enumerate(lengths)
    ]


def batch_of(rows: list[Row]) -> DataProto:
    columns: dict[str, Column] = {}
    for name in ("sample", "score", "domain", "input_ids", "values"):
        entries, key = [row[name] for row in rows], KEYS[name]
        if key.kind is Kind.OBJECT:
            columns[name] = object_column(entries)
        elif key.kind is Kind.ROW:
            columns[name] = torch.tensor(entries, dtype=key.dtype)
        else:
            columns[name] = Ragged.from_rows([torch.tensor(entry, dtype=key.dtype) for entry in entries], key.dtype)
    return DataProto(columns)


def rows_of(batch: DataProto) -> list[Row]:
    def entry(column: Column, i: int) -> Any:
        if isinstance(column, Ragged):
            return column.row(i).tolist()
        return column[i].item() if isinstance(column, torch.Tensor) else column[i]

    return [{name: entry(column, i) for name, column in batch.columns.items()} for i in range(len(batch))]


@properties
@given(plain_rows())
def test_rows_come_back_with_their_lengths(rows: list[Row]) -> None:
    batch = batch_of(rows)
    assert rows_of(batch) == rows
    assert len(batch) == len(rows)
    assert batch.lengths.tolist() == [len(row["input_ids"]) for row in rows]
    assert batch.select(["values"]).lengths.tolist() == batch.lengths.tolist()


@properties
@given(plain_rows(min_size=1), st.data())
def test_take(rows: list[Row], data: st.DataObject) -> None:
    index = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10))
    expected = [rows[i] for i in index]
    for form in (index, np.array(index, dtype=np.int64), torch.tensor(index, dtype=torch.int64)):
        assert rows_of(batch_of(rows).take(form)) == expected


@properties
@given(plain_rows(), st.data())
def test_uneven_slices_and_concat(rows: list[Row], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    batch = batch_of(rows)
    parts = [batch.slice(start, stop) for start, stop in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    joined = DataProto.concat(parts)
    assert rows_of(joined) == rows
    assert joined.keys() == batch.keys()


@properties
@given(plain_rows(), st.sampled_from(["domain", "score"]))
def test_group_by(rows: list[Row], key: str) -> None:
    groups = batch_of(rows).group_by(key)
    assert list(groups) == list(dict.fromkeys(row[key] for row in rows))
    for value, group in groups.items():
        assert rows_of(group) == [row for row in rows if row[key] == value]


@properties
@given(plain_rows())
def test_pickle_round_trip(rows: list[Row]) -> None:
    assert rows_of(pickle.loads(pickle.dumps(batch_of(rows)))) == rows


def example() -> DataProto:
    rows = [{"sample": i, "score": 1.0, "domain": "math", "input_ids": list(range(i + 2)), "values": [0.5] * (i + 1)} for i in range(4)]
    return batch_of(rows)


def test_pickling_into_another_process(tmp_path: Path) -> None:
    data = example().with_columns(finish_reason=object_column([FinishReason.STOP] * 4))
    (tmp_path / "batch").write_bytes(pickle.dumps(data))
    program = f"""
import pickle, warnings
warnings.simplefilter("error")
from pathlib import Path
batch = pickle.loads(Path({str(tmp_path / "batch")!r}).read_bytes())
print(batch.ragged("input_ids").row(3).tolist(), batch.tensor("score").sum().item(), batch.objects("finish_reason")[0])
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True)
    assert done.stdout.split("\n")[0] == "[0, 1, 2, 3, 4] 4.0 stop"


def test_slices_pickle_compactly_and_out_of_band_memory_is_shared() -> None:
    tokens = Ragged(torch.arange(1_000_000), torch.arange(0, 1_000_001, 1000))
    batch = DataProto({"input_ids": tokens, "score": torch.zeros(1000)})
    assert len(pickle.dumps(batch.slice(0, 10))) < 10 * 1000 * 8 + 2000
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 2000
    frozen = [bytes(buffer.raw()) for buffer in buffers]
    one, two = (pickle.loads(data, buffers=frozen) for _ in range(2))
    assert one.ragged("input_ids").values.data_ptr() == two.ragged("input_ids").values.data_ptr()
    assert one.tensor("score").data_ptr() == two.tensor("score").data_ptr()


def test_a_batch_cannot_be_changed() -> None:
    batch = example()
    with pytest.raises(TypeError):
        batch.columns["score"] = torch.zeros(4)  # type: ignore[index]
    with pytest.raises(AttributeError):
        batch.columns = {}  # type: ignore[misc]


def test_undeclared_and_mistyped_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'imput_ids' is not declared.*did you mean 'input_ids'"):
        DataProto({"imput_ids": torch.zeros(1)})
    with pytest.raises(ValueError, match=r"'score' must have dtype torch.float32, got torch.float64"):
        DataProto({"score": torch.zeros(1, dtype=torch.float64)})
    with pytest.raises(ValueError, match=r"'input_ids' is declared as TOKENS .* a Ragged, got Tensor"):
        DataProto({"input_ids": torch.zeros(1, dtype=torch.int64)})
    with pytest.raises(ValueError, match=r"'domain' is declared as OBJECT .* a ndarray, got list"):
        DataProto({"domain": ["math"]})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="one-dimensional object array"):
        DataProto({"domain": np.array(["math"])})
    with pytest.raises(ValueError, match=r"must be \[rows\]"):
        DataProto({"score": torch.zeros(2, 2)})


def test_lengths_that_do_not_fit_are_refused() -> None:
    tokens = Ragged.from_rows([torch.arange(3), torch.arange(4)])
    with pytest.raises(ValueError, match=r"different numbers of rows: \{'input_ids': 2, 'score': 3\}"):
        DataProto({"input_ids": tokens, "score": torch.zeros(3)})
    with pytest.raises(ValueError, match="'input_ids' and 'values' disagree: row 1 has 4 and 5 tokens"):
        DataProto({"input_ids": tokens, "values": Ragged.from_rows([torch.zeros(2), torch.zeros(4)])})
    with pytest.raises(ValueError, match="'input_ids' and 'response_mask' disagree: row 0 has 3 and 2 tokens"):
        DataProto({"input_ids": tokens, "response_mask": Ragged.from_rows([torch.zeros(2), torch.zeros(4)], torch.bool)})
    with pytest.raises(ValueError, match="'input_ids': row 1 has no token"):
        DataProto({"input_ids": Ragged.from_rows([torch.arange(3), torch.arange(0)])})


def test_mistakes_in_calls_are_refused() -> None:
    batch = example()
    with pytest.raises(KeyError, match="no column 'returns' in this batch; it has sample, score"):
        batch["returns"]
    with pytest.raises(ValueError, match="one lacks score"):
        DataProto.concat([batch, batch.select(["sample", "domain", "input_ids", "values"])])
    with pytest.raises(ValueError, match="several entries per row"):
        batch.group_by("input_ids")
    with pytest.raises(IndexError):
        batch.slice(2, 5)
    with pytest.raises(ValueError, match="no column of tokens"):
        batch.select(["score"]).lengths  # noqa: B018
    assert "score" in batch and "returns" not in batch


def test_columns_of_vectors() -> None:
    """What batches kept may differ in number; the shorter lists are filled up with -1, which is no token."""

    def one(kept: list[list[int]]) -> DataProto:
        return DataProto({"kept_ids": Ragged.from_rows([torch.tensor(kept, dtype=torch.int32)])})

    joined = DataProto.concat([one([[4, 5, 6], [7, -1, -1]]), one([[8]])])
    assert [row.tolist() for row in joined.ragged("kept_ids").rows()] == [[[4, 5, 6], [7, -1, -1]], [[8, -1, -1]]]
    assert joined.take([1]).ragged("kept_ids").values.tolist() == [[8, -1, -1]]
    with pytest.raises(ValueError, match="'kept_ids' must have a vector per entry"):
        DataProto({"kept_ids": Ragged.from_rows([torch.tensor([1, 2], dtype=torch.int32)])})
    with pytest.raises(ValueError, match="'values' must have one number per entry"):
        DataProto({"values": Ragged.from_rows([torch.zeros(2, 3)])})


def test_files_of_tensors_have_the_mode_that_the_umask_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors({"weight": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
        assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o640
    finally:
        os.umask(before)


def test_a_tensor_file_that_is_cut_off_does_not_look_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    path = tmp_path / "model.safetensors"
    save_tensors({"weight": torch.ones(2)}, path, {"format": "pt"})

    def cut_off(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"half")
        raise OSError("no space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", cut_off)
    for target in (path, tmp_path / "other.safetensors"):
        with pytest.raises(OSError, match="no space"):
            save_tensors({"weight": torch.zeros(2)}, target, {"format": "pt"})
    assert safetensors.torch.load_file(path)["weight"].tolist() == [1.0, 1.0] and not (tmp_path / "other.safetensors").exists()
