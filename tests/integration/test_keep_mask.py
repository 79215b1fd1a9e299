"""The whole circle on real engines: vLLM samples truncated and says what it kept, the trainer's log-probs over the same tokens are the
engine's; over the whole vocabulary they are not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import started
from megatron_ranks import RankPool
from safetensors.torch import load_file, save_file
from support_models import make_tiny_model
from support_passes import forward

from roll_lite.config.schema.models import ModelConfig, VllmStrategyConfig
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.samples import Completion, GenerationRequest, Sampling

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

VOCABULARY = 258
TEMPERATURES = (0.7, 1.0, 0.4)
TRUNCATIONS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "min_tokens": 5},
    "none": {},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every three tokens, from 3 on, are equally likely everywhere: of five likeliest ones the fifth ties with a sixth."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model") / "m", hidden=128, sharpness=2.0, vocab_size=VOCABULARY)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][3:] = weights["model.embed_tokens.weight"][3::3].repeat_interleave(3, dim=0)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()


async def sampled(model: Path) -> dict[str, list[tuple[GenerationRequest, Completion]]]:
    from roll_lite.distributed.strategy.base import EngineSpec
    from roll_lite.distributed.strategy.build import build_engine

    engine = build_engine(EngineSpec(ModelConfig(path=model, dtype="float32"), VllmStrategyConfig(kv_cache_mb=64), max_model_len=128))
    await engine.initialize()
    try:
        requests = {
            f"{name}/{number}": GenerationRequest(
                f"{name}/{number}", (5 + number, 9, 101), Sampling(TEMPERATURES[number % 3], 40, seed=number, keep_mask=True, **truncation)
            )
            for name, truncation in TRUNCATIONS.items()
            for number in range(8)
        }
        found: dict[str, list[tuple[GenerationRequest, Completion]]] = {name: [] for name in TRUNCATIONS}
        for completion in await asyncio.gather(*map(engine.generate, requests.values())):
            assert completion.error is None
            found[completion.request_id.split("/")[0]].append((requests[completion.request_id], completion))
        return found
    finally:
        await engine.shutdown()


def batch_of(samples: list[tuple[GenerationRequest, Completion]]) -> tuple[DataProto, torch.Tensor]:
    """The batch with its column of kept tokens, and the engine's log-probs [response tokens]."""
    width = max(len(kept) for _, completion in samples for kept in completion.kept_ids or ())
    ids, masks, kept_rows = [], [], []
    for request, completion in samples:
        prompt, response = request.prompt_ids, completion.token_ids
        ids.append(torch.tensor([*prompt, *response]))
        masks.append(torch.arange(len(prompt) + len(response)) >= len(prompt))
        kept = torch.full((len(prompt) - 1 + len(response), width), -1, dtype=torch.int32)
        for step, tokens in enumerate(completion.kept_ids or ()):
            kept[len(prompt) - 1 + step, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        kept_rows.append(kept)
    columns = {"input_ids": Ragged.from_rows(ids), "response_mask": Ragged.from_rows(masks), "kept_ids": Ragged.from_rows(kept_rows)}
    columns["temperature"] = torch.tensor([request.sampling.temperature for request, _ in samples])
    engine = torch.tensor([log_prob for _, completion in samples for log_prob in completion.log_probs])
    return DataProto(columns), engine


def trainers_log_probs(
    model: Path, layout: dict[str, int], batches: dict[str, DataProto]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]] | None:
    """Of the response tokens, with and without the mask; None on other than head ranks."""
    strategy = started(model, **layout)
    found = {}
    for name, batch in batches.items():
        chosen = torch.cat([mask[1:] for mask in batch.ragged("response_mask").rows()])
        without = batch.select([name for name in batch.columns if name != "kept_ids"])
        outs = [forward(strategy, each, ["log_probs"], 3) for each in (batch, without)]
        found[name] = tuple(out.ragged("log_probs").values[chosen] for out in outs if out is not None)
    return found if strategy.layout.is_head else None  # type: ignore[return-value]


def test_trainer_and_engine_agree_over_the_kept_tokens(model: Path, ranks: RankPool) -> None:
    made = {name: batch_of(samples) for name, samples in asyncio.run(sampled(model)).items()}
    kept = made["top_k"][0].ragged("kept_ids").values
    assert int((kept >= 0).sum(1).max()) > 5, "tokens that tie with the k-th survive"
    for layout in ({}, {"tensor_parallel": 2}):
        found = ranks(2 if layout else 1, trainers_log_probs, model, layout, {name: batch for name, (batch, _) in made.items()})[0]
        for name, (_, engine) in made.items():
            with_mask, without = found[name]
            torch.testing.assert_close(with_mask, engine, rtol=0, atol=1e-4)
            difference = float((without - engine).abs().max())
            assert difference < 1e-4 if name == "none" else difference > 0.05, f"{name}: {difference}"
