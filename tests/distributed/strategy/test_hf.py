"""Reward models on transformers: padded batches score as every row does alone, by transformers' own pooling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support_models import VOCAB_SIZE, Family, hf_scores, make_tiny_model, make_tiny_reward_model
from support_passes import Cut, forward
from transformers import BertConfig, BertForSequenceClassification

from roll_lite.config.schema.models import HfStrategyConfig, ModelConfig
from roll_lite.data.microbatch import PaddedBudget, TokenBudget
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import ModelSpec, StateGroup
from roll_lite.distributed.strategy.hf import HfRewardStrategy

LENGTHS = (9, 1, 40, 2, 7, 5)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def batch(of: list[list[int]]) -> DataProto:
    return DataProto({"input_ids": Ragged.from_rows([torch.tensor(row) for row in of], torch.int64)})


def started(path: Path, dtype: str = "float32") -> HfRewardStrategy:
    strategy = HfRewardStrategy(ModelSpec(ModelConfig(path=path, dtype=dtype), HfStrategyConfig(), "reward_models.toy.path"))  # type: ignore[arg-type]
    strategy.initialize()
    return strategy


def scores(strategy: HfRewardStrategy, of: list[list[int]], size: Cut) -> list[float]:
    out = forward(strategy, batch(of), ["final_value"], size)
    assert out is not None
    return out.tensor("final_value").tolist()


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_batches_score_as_rows_alone(tmp_path: Path, family: Family) -> None:
    path = make_tiny_reward_model(tmp_path / "model", family)
    strategy = started(path)
    expected = hf_scores(path, rows())
    assert len({round(score, 3) for score in expected}) == len(LENGTHS), "scores that do not differ prove nothing"
    for size in (1, 4, 6, PaddedBudget(20), TokenBudget(20)):
        assert scores(strategy, rows(), size) == pytest.approx(expected, abs=1e-5)
    assert scores(strategy, [], 4) == []
    layout = strategy.layout
    assert (layout.data_rank, layout.data_size, layout.is_head) == (1, 3, True)


def test_heads_compute_in_float32_whatever_the_model_does(tmp_path: Path) -> None:
    path = make_tiny_reward_model(tmp_path / "model")
    found = scores(started(path, "bfloat16"), rows(), 6)
    assert found == pytest.approx(hf_scores(path, rows()), abs=0.1)
    rounded = torch.tensor(found).bfloat16().float().tolist()
    assert any(score != coarse for score, coarse in zip(found, rounded, strict=True))


def test_a_model_without_a_padding_token_takes_batches_too(tmp_path: Path) -> None:
    path = make_tiny_reward_model(tmp_path / "model", pad_token_id=None)
    assert json.loads((path / "config.json").read_text()).get("pad_token_id") is None
    assert scores(started(path), rows(), 6) == pytest.approx(hf_scores(path, rows()), abs=1e-5)


def test_an_encoder_pools_in_its_own_way(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    BertForSequenceClassification(BertConfig(vocab_size=VOCAB_SIZE, num_labels=1, **shape)).save_pretrained(tmp_path)
    assert scores(started(tmp_path), rows(), 6) == pytest.approx(hf_scores(tmp_path, rows()), abs=1e-5)


def test_offloading_keeps_the_scores(tmp_path: Path) -> None:
    strategy = started(make_tiny_reward_model(tmp_path / "model"))
    before = scores(strategy, rows(), 6)
    strategy.offload([StateGroup.WEIGHTS])
    strategy.load([StateGroup.WEIGHTS])
    assert scores(strategy, rows(), 6) == before


def test_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"reward_models\.toy\.path: .*is no reward model: it lacks score\.weight"):
        started(make_tiny_model(tmp_path / "language", num_labels=1))
    with pytest.raises(ValueError, match=r"reward_models\.toy\.path: .*has 3 labels"):
        started(make_tiny_reward_model(tmp_path / "three", num_labels=3))
    with pytest.raises(ValueError, match=r"reward_models\.toy\.path: "):
        started(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="a reward model has final_value"):
        forward(started(make_tiny_reward_model(tmp_path / "model")), batch(rows()), ["log_probs"], 2)
