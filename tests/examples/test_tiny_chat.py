"""The shipped model that chats: its data, its script, and the tool and game of its examples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoTokenizer

from roll_lite.environments.base import Task
from roll_lite.environments.rendering import ChatRenderer
from roll_lite.environments.tool_calls import schema_of
from roll_lite.examples.domains.turns import Guess, calculate

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CHAT = EXAMPLES / "models/tiny_chat"


def rows(task: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / f"data/{task}_{split}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", ["calculator", "guess"])
def test_no_held_out_task_is_trained_on(task: str) -> None:
    train, validation = ({(row["prompt"], row["answer"]) for row in rows(task, split)} for split in ("train", "validation"))
    assert len(validation) == 100 and len(train) >= 400 and not train & validation


@pytest.mark.parametrize("split", ["train", "validation"])
def test_the_tool_gives_the_reference_answers(split: str) -> None:
    for row in rows("calculator", split):
        assert calculate(row["prompt"].removesuffix("=?")) == row["answer"]


@pytest.mark.parametrize("expression", ["2**9", "__import__('os')", "a+1", "1.5+1", "1+" * 30 + "1", ""])
def test_the_tool_refuses_what_it_does_not_compute(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


def test_the_game_by_hand() -> None:
    game = Guess(per_guess=0.1)
    game.reset(Task([], answer="20"))
    said = [game.step({"role": "assistant", "content": text}) for text in ("32", "what?", "16", "20")]
    assert [step.messages for step in said[:3]] == ["lower", "A number, please.", "higher"]
    assert (said[3].done, said[3].correct, said[3].reward) == (True, True, pytest.approx(0.7))


def test_the_chat_template_is_continued_as_the_whole_conversation_reads() -> None:
    tokenizer = AutoTokenizer.from_pretrained(CHAT)
    assert ChatRenderer(tokenizer, None, {}, None, "template").difference() is None
    assert ChatRenderer(tokenizer, None, {}, [schema_of(calculate)], "template").difference() is None


def test_the_model_is_small_and_in_float32() -> None:
    assert sum(file.stat().st_size for file in CHAT.iterdir()) < 3_000_000
    assert {str(weight.dtype) for weight in load_file(CHAT / "model.safetensors").values()} == {"torch.float32"}


@pytest.mark.slow
def test_the_script_makes_the_shipped_data_and_tokenizer(tmp_path: Path) -> None:
    command = [
        sys.executable,
        EXAMPLES / "models/make_tiny_chat.py",
        "--steps",
        "1",
        "--data",
        tmp_path / "data",
        "--model",
        tmp_path / "model",
    ]
    subprocess.run(command, check=True, timeout=500, capture_output=True)
    made = [*(tmp_path / "data").iterdir(), *(file for file in (tmp_path / "model").iterdir() if file.name != "model.safetensors")]
    for file in made:
        shipped = (EXAMPLES / "data" if file.suffix == ".jsonl" else CHAT) / file.name
        assert file.read_bytes() == shipped.read_bytes(), file.name
