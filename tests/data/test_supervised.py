"""Supervised rows: what of them is learned, with what weight, in which order, and beside which columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from roll_lite.config.schema.algorithm import PtxConfig
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.supervised import SupervisedRows, append_supervised

MakeTokenizer = Callable[..., Any]
ADD, ONE, TWO, THREE, PLEASE, END = 3, 4, 5, 6, 7, 2


def config(folder: Path, *rows: dict[str, Any], **settings: Any) -> PtxConfig:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": path, **settings.pop("data", {})}
    return PtxConfig.model_validate({"data": data, "coef": 0.5, "samples": 2, **settings})


def by_length(rows: DataProto) -> dict[int, tuple[list[int], list[bool]]]:
    return {
        int(n): (rows.ragged("input_ids").row(i).tolist(), rows.ragged("response_mask").row(i).tolist()) for i, n in enumerate(rows.lengths)
    }


def test_the_answer_and_the_end_are_learned(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """Two and three tokens count: coef / 5 each."""
    pairs = {"prompt": "add one", "answer": "two"}, {"prompt": "add", "answer": "one two"}
    rows = SupervisedRows(config(tmp_path, *pairs), make_tokenizer(), seed=1).draw()
    found = sorted((rows.ragged("input_ids").row(i).tolist(), rows.ragged("response_mask").row(i).tolist()) for i in range(2))
    assert found == [([ADD, ONE, TWO, END], [False, False, True, True]), ([ADD, ONE, TWO, END], [False, True, True, True])]
    assert rows.tensor("ptx_weight").tolist() == pytest.approx([0.1, 0.1]) and rows.tensor("temperature").tolist() == [1.0, 1.0]
    assert bool((rows.tensor("sample") < 0).all()), "no number of the batch's own"


def test_a_text_is_learned_whole_and_cut(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """The first token of a text follows nothing: one and two transitions."""
    texts = {"text": "one"}, {"text": "one two three please"}
    settings = {"data": {"prompt": "text", "answer": None}, "max_tokens": 3}
    rows = SupervisedRows(config(tmp_path, *texts, **settings), make_tokenizer(), seed=1).draw()
    assert by_length(rows) == {2: ([ONE, END], [True, True]), 3: ([ONE, TWO, THREE], [True, True, True])}
    assert rows.tensor("ptx_weight").tolist() == pytest.approx([0.5 / 3, 0.5 / 3])


def test_rows_without_room_for_their_answer_are_left_out(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    pairs = [{"prompt": prompt, "answer": "two"} for prompt in ("add one three", "add one", "add", "add one two please")]
    rows = SupervisedRows(config(tmp_path, *pairs, max_tokens=3), make_tokenizer(), seed=1)
    assert rows.notes() == ["algorithm.ptx.max_tokens: 2 of 4 rows are left out: their prompt leaves no room for the answer"]
    for _ in range(3):
        drawn = rows.draw().ragged("input_ids")
        assert sorted(drawn.row(i).tolist() for i in range(2)) == [[ADD, ONE, TWO], [ADD, TWO, END]]
    with pytest.raises(ValueError, match=r"^algorithm\.ptx\.max_tokens: all prompts have 2 tokens or more"):
        SupervisedRows(config(tmp_path, *pairs[:2], max_tokens=2), make_tokenizer(), 1)
    texts = config(tmp_path, *pairs, max_tokens=2, data={"answer": None})
    assert SupervisedRows(texts, make_tokenizer(), 1).notes() == [], "a text is learned as far as it goes"


def test_every_row_once_per_pass_in_an_order_that_goes_on(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    texts = [{"text": " ".join(["one"] * number)} for number in range(1, 7)]
    settings = config(tmp_path, *texts, data={"prompt": "text", "answer": None})
    straight, resumed, another = (SupervisedRows(settings, make_tokenizer(), seed) for seed in (1, 1, 2))
    first = [straight.draw().lengths.tolist() for _ in range(3)]
    assert sorted(length for lengths in first for length in lengths) == [2, 3, 4, 5, 6, 7]
    assert [another.draw().lengths.tolist() for _ in range(3)] != first
    state = json.loads(json.dumps(straight.state_dict()))
    resumed.load_state_dict(state)
    assert [resumed.draw().lengths.tolist() for _ in range(4)] == [straight.draw().lengths.tolist() for _ in range(4)]
    with pytest.raises(ValueError, match="has seed 1, this run has 2"):
        another.load_state_dict(state)
    with pytest.raises(ValueError, match=r"^algorithm\.ptx\.data has 5 rows, and had 6 when the checkpoint was written"):
        SupervisedRows(config(tmp_path, *texts[:5], data={"prompt": "text", "answer": None}), make_tokenizer(), 1).load_state_dict(state)


def test_ranks_share_the_rows_of_each_step(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    texts = [{"text": " ".join(["one"] * number)} for number in range(1, 7)]
    settings = config(tmp_path, *texts, samples=3, data={"prompt": "text", "answer": None})
    whole, shared = SupervisedRows(settings, make_tokenizer(), 1), SupervisedRows(settings, make_tokenizer(), 1)
    shares = shared.shares(updates=2, ranks=2, attention_parity_tokens=100.0)
    for update in range(2):
        drawn, parts = whole.draw(), [rank[update] for rank in shares]
        assert sorted(drawn.lengths.tolist()) == sorted(length for part in parts for length in part.lengths.tolist())
        assert {len(part) for part in parts} == {1, 2}
        weights = {weight for part in parts for weight in part.tensor("ptx_weight").tolist()}
        assert weights == set(drawn.tensor("ptx_weight").tolist()), "counted over all ranks"


def test_rows_of_updates_that_were_not_made_come_again(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    """Of three updates one was made; the third had begun the next pass."""
    texts = [{"text": " ".join(["one"] * number)} for number in range(1, 6)]
    settings = config(tmp_path, *texts, samples=2, data={"prompt": "text", "answer": None})
    straight, stopped = (SupervisedRows(settings, make_tokenizer(), 1) for _ in range(2))
    expected = [straight.draw().lengths.tolist() for _ in range(4)]
    stopped.shares(updates=3, ranks=1, attention_parity_tokens=100.0)
    stopped.take_back(made=1)
    assert [stopped.draw().lengths.tolist() for _ in range(3)] == expected[1:]
    whole = SupervisedRows(settings, make_tokenizer(), 1)
    whole.shares(updates=3, ranks=1, attention_parity_tokens=100.0)
    whole.take_back(made=3)
    assert whole.draw().lengths.tolist() == expected[3]


@pytest.mark.parametrize("own_rows", [2, 0])
def test_beside_the_policys_rows(tmp_path: Path, make_tokenizer: MakeTokenizer, own_rows: int) -> None:
    own = DataProto(
        {
            "sample": torch.arange(2),
            "input_ids": Ragged.from_rows([torch.tensor([7, 7, 7]), torch.tensor([7, 7])]),
            "response_mask": Ragged.from_rows([torch.tensor([False, True, True]), torch.tensor([False, True])]),
            "temperature": torch.tensor([0.5, 0.5]),
            "advantages": Ragged.from_rows([torch.tensor([1.0, 2.0]), torch.tensor([3.0])]),
            "kept_ids": Ragged.from_rows([torch.tensor([[1, 2], [3, -1]]), torch.tensor([[4, 5]])], torch.int32),
            "loss_weight": torch.tensor([1.0, 1.0]),
        }
    ).slice(0, own_rows)
    rows = SupervisedRows(config(tmp_path, {"prompt": "add", "answer": "one"}, samples=1), make_tokenizer(), 1).draw()
    both = append_supervised(own, rows)
    assert both.tensor("ptx_weight").tolist() == [0.0] * own_rows + [0.25]
    assert both.ragged("input_ids").row(own_rows).tolist() == [ADD, ONE, END]
    assert both.ragged("advantages").row(own_rows).tolist() == [0.0, 0.0] and both.tensor("loss_weight")[own_rows] == 0
    assert both.ragged("kept_ids").row(own_rows).tolist() == [[-1, -1]] * 2, "its softmax goes over the whole vocabulary"


def test_mistakes_in_the_data_are_told_by_their_place(tmp_path: Path, make_tokenizer: MakeTokenizer) -> None:
    with pytest.raises(ValueError, match=r"^algorithm\.ptx\.data\.train: the data has mistakes\n.*'answer': missing"):
        SupervisedRows(config(tmp_path, {"prompt": "add"}), make_tokenizer(), 1)
