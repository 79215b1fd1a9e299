"""Reward models on Megatron: the value at a row's last token is the score that transformers gives the row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import FAMILIES, started
from megatron_ranks import RankPool
from support_models import VOCAB_SIZE, hf_scores, make_tiny_reward_model
from support_passes import forward
from test_megatron_values import FURTHER_LAYOUTS

from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged

LENGTHS = (9, 1, 12, 2, 7, 5)


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]


def batch() -> DataProto:
    """As reward-model workers make it: nothing but the ends is asked for."""
    tokens = [torch.tensor(row) for row in rows()]
    return DataProto(
        {
            "input_ids": Ragged.from_rows(tokens),
            "response_mask": Ragged.from_rows([torch.zeros(len(row), dtype=torch.bool) for row in tokens]),
        }
    )


def check_scores(cases: list[tuple[Path, list[float]]], layout: dict[str, Any]) -> None:
    for path, expected in cases:
        strategy = started(path, value_init="reward_model", path_key="reward_models.toy.path", **layout)
        for size in (1, 4, 6):
            out = forward(strategy, batch(), ["final_value"], size)
            assert (out is not None) == strategy.layout.is_head
            if out is not None:
                torch.testing.assert_close(out.tensor("final_value"), torch.tensor(expected), rtol=0, atol=1e-5)


def scored(folder: Path, **overrides: Any) -> list[tuple[Path, list[float]]]:
    paths = [make_tiny_reward_model(folder / family, family, **overrides) for family in FAMILIES]  # type: ignore[arg-type]
    return [(path, hf_scores(path, rows())) for path in paths]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[float]]]:
    return scored(tmp_path_factory.mktemp("rewards"))


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, list[float]]]:
    return scored(tmp_path_factory.mktemp("four"), layers=4)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}], ids=["one rank", "TP2"])
def test_scores_are_transformers(ranks: RankPool, checkpoints: list[tuple[Path, list[float]]], layout: dict[str, Any]) -> None:
    ranks(2 if layout else 1, check_scores, checkpoints, layout)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", FURTHER_LAYOUTS)
def test_scores_in_further_layouts(ranks: RankPool, four_layers: list[tuple[Path, list[float]]], name: str) -> None:
    world_size, layout = FURTHER_LAYOUTS[name]
    ranks(world_size, check_scores, four_layers, layout)


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        started(path, value_init="reward_model", path_key="reward_models.toy.path")
    return str(error.value)


def test_another_number_of_labels_is_refused_by_the_models_own_place(ranks: RankPool, tmp_path: Path) -> None:
    path = make_tiny_reward_model(tmp_path / "three", num_labels=3)
    assert f"reward_models.toy.path: {path}: score.weight has the shape [3, 128]" in ranks(1, refused, path)[0]
