"""Batches as Parquet files, read by pyarrow as any reader would."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import torch

from roll_lite.data.columns_file import as_table, write_rows, write_table
from roll_lite.data.proto import DataProto, object_column
from roll_lite.data.ragged import Ragged


def test_a_batch_is_read_back_row_by_row(tmp_path: Path) -> None:
    columns = DataProto(
        {
            "sample": torch.tensor([3, 1]),
            "reward": torch.tensor([0.1, float("nan")]),
            "truncated": torch.tensor([True, False]),
            "domain": object_column(["add", "make"]),
            "input_ids": Ragged.from_rows([torch.tensor([5, 6, 7]), torch.tensor([8])]),
            "response_mask": Ragged.from_rows([torch.tensor([False, True, True]), torch.tensor([False])]),
            "old_log_probs": Ragged.from_rows([torch.tensor([-0.1, -1e-8]), torch.tensor([])], torch.float32),
            "kept_ids": Ragged.from_rows([torch.tensor([[5, -1], [6, 7]]), torch.zeros(0, 2)], torch.int32),
        }
    )
    write_rows(tmp_path / "deep", 0, columns)
    table = pq.read_table(tmp_path / "deep" / "rows_0000.parquet")
    first, second = table.to_pylist()
    assert (first["sample"], first["domain"], first["truncated"]) == (3, "add", True)
    assert first["input_ids"] == [5, 6, 7] and first["response_mask"] == [False, True, True]
    assert torch.equal(torch.tensor(first["old_log_probs"]), torch.tensor([-0.1, -1e-8])), "bit for bit"
    assert first["kept_ids"] == [[5, -1], [6, 7]]
    assert second["old_log_probs"] == [] and second["kept_ids"] == [] and second["reward"] != second["reward"]
    assert pq.ParquetFile(tmp_path / "deep" / "rows_0000.parquet").metadata.row_group(0).column(0).compression == "ZSTD"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["rows_0000.parquet"], "no half-written file is left"


def test_rows_that_are_a_part_of_others_and_no_rows_at_all_are_written_too(tmp_path: Path) -> None:
    whole = DataProto({"sample": torch.arange(4), "input_ids": Ragged.from_rows([torch.tensor([n] * (n + 1)) for n in range(4)])})
    write_table(tmp_path / "part.parquet", as_table(whole.slice(2, 4)))
    assert pq.read_table(tmp_path / "part.parquet")["input_ids"].to_pylist() == [[2, 2, 2], [3, 3, 3, 3]]
    write_table(tmp_path / "none.parquet", as_table(whole.slice(2, 2)))
    assert pq.read_table(tmp_path / "none.parquet").num_rows == 0
