"""The shipped model and toy data: they fit together, nothing held out was trained on, and there is something for RL to bring out."""

from __future__ import annotations

import importlib
import json
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from math_verify import parse, verify
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM, Qwen2Tokenizer

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.math.reward import MathReward
from roll_lite.rewards.text.exact import ExactReward

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
TINY = EXAMPLES / "models" / "tiny"


def is_sum(sample: RewardInput) -> Score:
    """No time limits: math-verify's are of wall-clock time, and count as wrong on a busy machine."""
    gold, found = (parse(text, parsing_timeout=None) for text in (str(sample.answer), f"${sample.response}$"))
    return Score(float(verify(gold, found, timeout_seconds=None)))


REWARDS = {"add": MathReward(), "make": is_sum, "repeat": ExactReward()}
LONGEST = {"add": 3, "make": 6, "repeat": 10}
"""Tokens of the longest right answer, the end included."""


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY).eval()


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    sys.path.insert(0, str(EXAMPLES / "models"))
    yield {name: importlib.import_module(name) for name in ("toy_domains", "make_tiny")}
    sys.path.remove(str(EXAMPLES / "models"))


def rows(domain: str, split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (EXAMPLES / "data" / f"{domain}_{split}.jsonl").read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------- data


@pytest.mark.parametrize("domain", REWARDS)
def test_no_held_out_prompt_is_trained_on(domain: str) -> None:
    train, validation = ([row["prompt"] for row in rows(domain, split)] for split in ("train", "validation"))
    assert len(validation) == len(set(validation)) == 100
    assert len(train) == len(set(train)) >= 300
    assert not set(train) & set(validation)


def test_held_out_sums_are_not_trained_on_the_other_way_round() -> None:
    def operands(split: str) -> set[frozenset[str]]:
        return {frozenset(row["prompt"].rstrip("=").split("+")) for row in rows("add", split)}

    assert not operands("train") & operands("validation")


@pytest.mark.parametrize("split", ["train", "validation"])
def test_reference_answers_are_right(split: str) -> None:
    for row in rows("add", split):
        left, right = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(left) + int(right)
    for row in rows("make", split):
        assert row["prompt"] == f"make {row['answer']}:"
    for row in rows("repeat", split):
        count, letter = row["prompt"].removesuffix(":").split(" of ")
        assert row["answer"] == "".join(letter for _ in range(int(count)))


def score(domain: str, row: dict[str, str], response: str) -> bool:
    return REWARDS[domain](RewardInput(domain, row["prompt"], response, row["answer"], {}, "stop")).is_correct


@pytest.mark.parametrize("domain", REWARDS)
def test_what_the_base_model_is_taught_agrees_with_the_rewards(domain: str, scripts: dict[str, ModuleType]) -> None:
    toys, random = scripts["toy_domains"], Random(5)
    rules = toys.DOMAINS[domain]
    for task in random.sample(rules.tasks(), 40):
        row = {"prompt": task.prompt, "answer": task.answer}
        right, slip = rules.right(task, random), rules.slip(task, random)
        assert score(domain, row, right) and rules.is_right(task, right), (task, right)
        assert not score(domain, row, slip) and not rules.is_right(task, slip), (task, slip)
        assert not score(domain, row, toys.SHRUG)


# ---------------------------------------------------------------- model


def test_the_model_is_small_and_of_the_promised_kind(model: Any, tokenizer: Any) -> None:
    assert sum(file.stat().st_size for file in TINY.rglob("*")) < 4_000_000
    config = model.config
    assert isinstance(model, Qwen2ForCausalLM)
    assert config.hidden_size // config.num_attention_heads == 32  # the smallest head that vLLM's CPU back end takes
    assert config.num_key_value_heads == 2 and config.vocab_size % 2 == 0  # for tensor parallelism over 2
    assert config.vocab_size == len(tokenizer)
    assert config.tie_word_embeddings and config.max_position_embeddings >= 128
    weights = load_file(TINY / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert "lm_head.weight" not in weights


@pytest.mark.parametrize("domain", REWARDS)
def test_every_character_of_the_data_is_one_token(domain: str, tokenizer: Any) -> None:
    for row in rows(domain, "train") + rows(domain, "validation"):
        for text in row.values():
            token_ids = tokenizer(text)["input_ids"]
            assert len(token_ids) == len(text)
            assert tokenizer.decode(token_ids) == text
    assert max(len(tokenizer(row["answer"])["input_ids"]) for row in rows(domain, "train")) < LONGEST[domain]


def test_tokenizer_round_trip(tokenizer: Any, tmp_path: Path) -> None:
    texts = [string.printable, "3 of k: ", "  two  blanks", "größer als 7 €\n"]
    tokenizer.save_pretrained(tmp_path)
    for reader in (tokenizer, AutoTokenizer.from_pretrained(tmp_path), Qwen2Tokenizer.from_pretrained(TINY)):
        assert [reader.decode(reader(text)["input_ids"]) for text in texts] == texts
    assert tokenizer("7<eos>")["input_ids"][-1] == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.decode([*tokenizer("7")["input_ids"], tokenizer.eos_token_id], skip_special_tokens=True) == "7"


@pytest.mark.parametrize("domain", REWARDS)
def test_right_when_greedy_and_half_right_when_sampled(domain: str, model: Any, tokenizer: Any, scripts: dict[str, ModuleType]) -> None:
    """Room to rise, and the means to."""
    held_out = rows(domain, "validation")
    sample = scripts["make_tiny"].sample
    torch.manual_seed(3)
    greedy = sample(model, tokenizer, [row["prompt"] for row in held_out], greedy=True)
    sampled = sample(model, tokenizer, [row["prompt"] for row in held_out * 3], greedy=False)
    assert sum(score(domain, *pair) for pair in zip(held_out, greedy, strict=True)) / len(held_out) >= 0.9
    assert 0.4 <= sum(score(domain, *pair) for pair in zip(held_out * 3, sampled, strict=True)) / len(sampled) <= 0.68
    if domain == "make":
        # A bare number would count as an expression with its own value; the model must not know that.
        assert not any(response == row["answer"] for row, response in zip(held_out * 3, sampled, strict=True))


# ---------------------------------------------------------------- script


def run_script(script: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    folder.mkdir()
    monkeypatch.setattr(sys, "argv", ["make_tiny.py", "--data", str(folder), "--model", str(folder / "model")])
    threads = torch.get_num_threads()
    try:
        script.main()
    finally:
        torch.set_num_threads(threads)
    return load_file(folder / "model" / "model.safetensors")


def test_the_script_writes_the_shipped_data_and_repeats_itself(
    scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = scripts["make_tiny"]
    monkeypatch.setattr(script, "RIGHT", script.Phase(steps=3, lr=3e-3))
    monkeypatch.setattr(script, "NOISY", script.Phase(steps=2, lr=3e-4, shrugs=0.1, slips=0.3))
    monkeypatch.setattr(script, "ROWS", 24)
    first = run_script(script, tmp_path / "first", monkeypatch)
    second = run_script(script, tmp_path / "second", monkeypatch)
    assert first.keys() == second.keys() == load_file(TINY / "model.safetensors").keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    for name in REWARDS:
        for split in ("train", "validation"):
            file = f"{name}_{split}.jsonl"
            assert (tmp_path / "first" / file).read_bytes() == (EXAMPLES / "data" / file).read_bytes()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "first" / "model" / file).read_bytes() == (TINY / file).read_bytes()
