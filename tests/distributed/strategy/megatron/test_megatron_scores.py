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
from test_megatron_values import FURTHER_LAYOUTS, SEQUENCE, SLOW_OR_NIGHTLY

from roll_lite.config.schema.models import MegatronStrategyConfig, RewardModelConfig
from roll_lite.data.microbatch import MicroBatchPlan, TokenBudget
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.workers.reward_model import RewardModelSpec, RewardModelWorker

LENGTHS = (9, 1, 40, 2, 7, 5)
EXPERTS_LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "TP2 EP2": (2, {**SEQUENCE, "expert_parallel": 2}),
    "TP2 ETP2": (2, {**SEQUENCE, "expert_tensor_parallel": 2}),
    "PP2": (2, {"pipeline_parallel": 2}),
    "CP2 EP2": (2, {"context_parallel": 2, "expert_parallel": 2}),
    "TP2 CP2 EP4": (4, {**SEQUENCE, "context_parallel": 2, "expert_parallel": 4}),
}
"""In which the ranks of one copy share the experts."""


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
        for size in (1, 4, 6, TokenBudget(20)):
            out = forward(strategy, batch(), ["final_value"], size)
            assert (out is not None) == strategy.layout.is_head
            if out is not None:
                torch.testing.assert_close(out.tensor("final_value"), torch.tensor(expected), rtol=0, atol=1e-5)


def scored(folder: Path, **overrides: Any) -> list[tuple[Path, list[float]]]:
    """Mistral's window is shorter than the longer rows."""
    paths = [make_tiny_reward_model(folder / family, family, **overrides) for family in FAMILIES]  # type: ignore[arg-type]
    paths.append(make_tiny_reward_model(folder / "mistral", "mistral", sliding_window=4, tied=False, **overrides))
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
@pytest.mark.parametrize("name", SLOW_OR_NIGHTLY)
def test_scores_in_further_layouts(ranks: RankPool, four_layers: list[tuple[Path, list[float]]], name: str) -> None:
    world_size, layout = FURTHER_LAYOUTS[name]
    ranks(world_size, check_scores, four_layers, layout)


@pytest.mark.parametrize(
    "name",
    ["one rank", "TP2 EP2", *(pytest.param(name, marks=[pytest.mark.slow, pytest.mark.nightly]) for name in list(EXPERTS_LAYOUTS)[2:])],
)
def test_scores_of_a_mixture_of_experts(ranks: RankPool, tmp_path: Path, name: str) -> None:
    world_size, layout = EXPERTS_LAYOUTS[name]
    path = make_tiny_reward_model(tmp_path / "qwen3_moe", "qwen3_moe")
    ranks(world_size, check_scores, [(path, hf_scores(path, rows()))], layout)


def check_worker(path: Path, expected: list[float], layout: dict[str, Any]) -> None:
    """Rows [9, 1, 40, 2, 7, 5]: 24 tokens beside the long one, so that neither 20 tokens nor two rows hold them all."""
    strategy = started(path, value_init="reward_model", path_key="reward_models.toy.path", **layout)
    cuts: list[list[int]] = []
    forward_of = strategy.forward

    def seen(batch: DataProto, outputs: list[str], plan: MicroBatchPlan) -> DataProto | None:
        cuts.extend(batch.lengths[part].tolist() for part in plan.parts)
        return forward_of(batch, outputs, plan)

    strategy.forward = seen  # type: ignore[method-assign, assignment]
    for settings, deterministic, passes in (
        ({}, False, [[40, 9, 7, 5, 2, 1]]),
        ({"micro_batch_tokens": 20}, False, [[40], [9, 2, 1], [7, 5]]),
        ({"micro_batch_size": 2}, False, [[40, 1], [9, 2], [7, 5]]),
        ({"micro_batch_tokens": 20}, True, [[9], [1], [40], [2], [7], [5]]),
    ):
        config = RewardModelConfig(path=path, strategy=MegatronStrategyConfig(**layout), **settings)  # type: ignore[arg-type]
        cuts.clear()
        worker = RewardModelWorker.__new__(RewardModelWorker)
        worker.spec = RewardModelSpec("toy", config, 1, deterministic)
        found = worker._scores(strategy, rows())
        assert cuts == passes
        assert found == (pytest.approx(expected, abs=1e-5) if strategy.layout.is_head else None)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}], ids=["one rank", "TP2"])
def test_a_workers_passes_keep_within_its_tokens(
    ranks: RankPool, checkpoints: list[tuple[Path, list[float]]], layout: dict[str, Any]
) -> None:
    ranks(2 if layout else 1, check_worker, *checkpoints[0], layout)


def refused(path: Path) -> str:
    with pytest.raises(ValueError) as error:
        started(path, value_init="reward_model", path_key="reward_models.toy.path")
    return str(error.value)


def test_another_number_of_labels_is_refused_by_the_models_own_place(ranks: RankPool, tmp_path: Path) -> None:
    path = make_tiny_reward_model(tmp_path / "three", num_labels=3)
    assert f"reward_models.toy.path: {path}: score.weight has the shape [3, 128]" in ranks(1, refused, path)[0]
