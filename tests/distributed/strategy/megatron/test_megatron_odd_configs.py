"""Models with odd config.json: what the checks pass gives Hugging Face's log-probs on Megatron, and what they refuse is named."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import batch_of, hf_log_probs, started, tiny
from megatron_ranks import RankPool
from safetensors.torch import load_file, save_file
from support_models import load_hf
from support_passes import forward

from roll_lite.data.microbatch import RowsAtATime
from roll_lite.models.hf_config import read_hf_config
from roll_lite.models.hf_fields import POLICY_HEADS
from roll_lite.models.model_files import HEAD, stored_tensors, wrong_settings, wrong_weights

FAMILIES = ("qwen2", "qwen3", "llama", "mistral")
LAYERS = 2


def rope(**changes: Any) -> dict[str, Any]:
    llama3 = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    return {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, **llama3, **changes}}


ODD: dict[str, dict[str, Any]] = {
    "nothing": {},
    "llama3": rope(),
    "llama3 of a short model": rope(factor=2.5, low_freq_factor=1.5, high_freq_factor=2.0, original_max_position_embeddings=8),
    "llama3 of whole numbers": rope(factor=8, low_freq_factor=1, high_freq_factor=3, original_max_position_embeddings=100),
    "llama3 upside down": rope(low_freq_factor=4.0, high_freq_factor=1.0),
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}},
    "another base": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "epsilon": {"rms_norm_eps": 0.05},
    "whole attention": {"layer_types": ["full_attention"] * LAYERS},
    "sliding attention": {"layer_types": ["sliding_attention"] * LAYERS},
    "both": {"layer_types": ["full_attention", "sliding_attention"]},
    "a layer too many": {"layer_types": ["full_attention"] * (LAYERS + 1)},
    "a window": {"sliding_window": 4},
    "no window": {"sliding_window": None},
    "a switch": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0},
    "activation": {"hidden_act": "swish"},
    "another activation": {"hidden_act": "gelu"},
    "biases": {"attention_bias": True},
    "heads": {"head_dim": 16},
    "no heads": {"num_key_value_heads": 3},
    "an end": {"eos_token_id": 10_000},
    "ends": {"eos_token_id": [2, 5], "pad_token_id": None},
    "padding": {"pad_token_id": 5},
    "no padding": {"pad_token_id": 10_000},
    "unknown": {"logit_scale": 2.0},
}
NAMED = {
    "rope_parameters": "RoPE|rope",
    "head_dim": "head_dim|shape",
    "num_key_value_heads": "shape|key/value",
    "sliding_window": "sliding_window|use_sliding_window",
}


def refusal(folder: Path) -> str | None:
    try:
        hf = read_hf_config(folder, "model.path", POLICY_HEADS)
        return wrong_weights(stored_tensors(folder), hf, HEAD) or wrong_settings(folder, hf.vocab_size)
    except ValueError as error:
        return str(error)


def agree(folders: list[Path]) -> list[float]:
    """The largest difference from Hugging Face's log-probs of each model."""
    batch, worst = batch_of(), []
    for folder in folders:
        found, oracle = forward(started(folder), batch, ["log_probs"], RowsAtATime(3)), load_hf(folder)
        assert found is not None, "one stage holds the whole model"
        differences = []
        for row in range(len(batch)):
            ids, mask = batch.ragged("input_ids").row(row), batch.ragged("response_mask").row(row)[1:]
            expected = hf_log_probs(oracle, ids, batch.tensor("temperature")[row])[0] * mask
            differences.append(float((found.ragged("log_probs").row(row) - expected).abs().max()))
        worst.append(max(differences))
    return worst


def drawn(folder: Path, count: int, seed: int) -> tuple[list[Path], dict[Path, tuple[dict[str, Any], str]]]:
    """Those that pass, and those that are refused with what was changed and what is said."""
    chance, passed, refused = random.Random(seed), [], {}
    for number in range(count):
        family, names = chance.choice(FAMILIES), chance.sample(list(ODD), chance.choice((1, 1, 2)))
        path = tiny(folder / str(number), family, layers=LAYERS, **({"sliding_window": 6} if family == "mistral" else {}))
        changed = {key: value for name in names for key, value in ODD[name].items()}
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changed))
        message = refusal(path)
        if message is None:
            passed.append(path)
        else:
            refused[path] = ({"family": family, **changed}, message)
    return passed, refused


@pytest.mark.slow
def test_models_drawn_at_random(ranks: RankPool, tmp_path: Path) -> None:
    passed, refused = drawn(tmp_path, 60, seed=10)
    for changed, message in refused.values():
        assert any(part in message for key in changed for part in NAMED.get(key, key).split("|")), (changed, message)
    assert len(passed) > 15 and len(refused) > 15
    (worst,) = ranks(1, agree, passed)
    for path, difference in zip(passed, worst, strict=True):
        assert difference < 2e-5, (difference, (path / "config.json").read_text())


def test_llama3_scaling_by_other_numbers_and_windows_by_name(ranks: RankPool, tmp_path: Path) -> None:
    """In rows of 12 tokens of a model that was made for 8, all three kinds of frequencies turn far enough to show."""
    changed = [ODD[name] for name in ("llama3 of a short model", "llama3 of whole numbers")]
    paths = [tiny(tmp_path / str(number), "llama", layers=LAYERS, **one) for number, one in enumerate(changed)]
    window = tiny(tmp_path / "window", "mistral", layers=LAYERS, sliding_window=6)
    config = json.loads((window / "config.json").read_text()) | ODD["sliding attention"]
    (window / "config.json").write_text(json.dumps(config))
    assert [refusal(path) for path in (*paths, window)] == [None] * 3
    (worst,) = ranks(1, agree, [*paths, window])
    assert max(worst) < 2e-5
    short, long = (load_hf(path) for path in paths)
    ids = torch.arange(3, 15)[None]
    assert (short(ids).logits - long(ids).logits).abs().max() > 1e-3


def test_a_tensor_without_a_place_is_refused_by_the_start_as_well(ranks: RankPool, tmp_path: Path) -> None:
    path = tiny(tmp_path / "m")
    save_file(load_file(path / "model.safetensors") | {"visual.patch.weight": torch.zeros(2)}, path / "model.safetensors")
    message = "has tensors that a qwen2 model has no place for: visual.patch.weight"
    assert refusal(path) == message
    with pytest.raises(Exception, match=message):
        ranks(1, agree, [path])
