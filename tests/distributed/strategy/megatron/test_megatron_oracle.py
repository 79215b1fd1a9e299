"""Hugging Face is the oracle: log-probs, entropy, losses and gradients, in every layout that this issue promises."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    FAMILIES,
    assert_same,
    batch_of,
    expected_of,
    hf_gradients,
    hf_log_probs,
    own_gradients,
    shard,
    started,
    tiny,
    weighted_loss,
)
from megatron_ranks import RankPool
from support_models import load_hf
from support_passes import Cut, forward, train_step

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.data.microbatch import RowsAtATime, TokenBudget
from roll_lite.data.proto import DataProto

NO_CLIPPING = OptimizerConfig(lr=1e-30, clip_grad=0.0)
STAGES, SHARED = {"pipeline_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}
INTERLEAVED = {**STAGES, "virtual_pipeline_parallel": 2}
WIDE, NARROW = ({"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": size} for size in (64, 16))
"""All heads together are twice as wide as the hidden state, as in Qwen3-30B-A3B, and half as wide."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: tiny(folder / family, family) for family in FAMILIES} | {
        "odd vocabulary": tiny(folder / "odd", "qwen2", vocab_size=101),
        "mistral": tiny(folder / "mistral", "mistral", sliding_window=4, tied=False),
        "four layers": tiny(folder / "four", "qwen3", layers=4),
        "one key": tiny(folder / "one_key", "qwen3", num_key_value_heads=1),
        "one key with a bias": tiny(folder / "one_key_bias", "qwen2", num_key_value_heads=1),
        "three layers": tiny(folder / "three", "qwen2", layers=3),
        "odd vocabulary, untied": tiny(folder / "odd_untied", "qwen3", vocab_size=101, tied=False),
        "wide": tiny(folder / "wide", "qwen3", **WIDE),
        "wide llama": tiny(folder / "wide_llama", "llama", **WIDE),
        "narrow": tiny(folder / "narrow", "qwen3", **NARROW),
        "narrow mistral": tiny(folder / "narrow_mistral", "mistral", sliding_window=4, tied=False, **NARROW),
        "rope linear": tiny(folder / "linear", "llama", rope_parameters={"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}),
        "rope llama3": tiny(
            folder / "llama3",
            "llama",
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
    }


def check_forward(path: Path, vocab: int, layout: dict[str, Any]) -> None:
    strategy = started(path, **layout)
    oracle = load_hf(path)
    batch = batch_of(vocab=vocab)
    unmasked = batch.select(["input_ids", "temperature"])
    mine = shard(unmasked, strategy)
    out = forward(strategy, mine, ["log_probs", "entropy"], 2)
    masked = forward(strategy, shard(batch, strategy), ["log_probs"], 4)
    assert (out is not None) == strategy.layout.is_head
    if out is None or masked is None:
        return
    for row in range(len(mine)):
        ids = mine.ragged("input_ids").row(row)
        log_p, entropy = hf_log_probs(oracle, ids, mine.tensor("temperature")[row])
        torch.testing.assert_close(out.ragged("log_probs").row(row), log_p, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.ragged("entropy").row(row), entropy, rtol=1e-5, atol=1e-5)
        mask = shard(batch, strategy).ragged("response_mask").row(row)[1:]
        torch.testing.assert_close(masked.ragged("log_probs").row(row), log_p * mask, rtol=1e-5, atol=1e-5)


def check_gradients(path: Path, vocab: int, layout: dict[str, Any], sizes: list[int] | None, micro_batch_sizes: list[Cut]) -> None:
    """The same loss and gradient for every micro-batch size, equal to Hugging Face's on the whole batch without padding."""
    strategy = started(path, NO_CLIPPING, distributed_optimizer=False, **layout)
    batch = batch_of(vocab=vocab)
    for outputs in (["log_probs"], ["log_probs", "entropy"]):
        loss, gradients = hf_gradients(path, batch, entropy="entropy" in outputs)
        for size in micro_batch_sizes:
            result = train_step(strategy, shard(batch, strategy, sizes), weighted_loss, outputs, size)
            # Positive and negative terms of about 5 each cancel: the tolerance is 1e-5 of their sum without signs.
            tolerance = 1e-5 * 5 * result.metrics["tokens"]
            assert abs(result.loss - loss) < tolerance, (result.loss, loss)
            assert result.metrics["loss"] == result.loss
            assert result.metrics["tokens"] == sum(int(batch.ragged("response_mask").row(row)[1:].sum()) for row in range(len(batch)))
            assert result.metrics["rows"] == len(batch)
            norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
            assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
            mine = own_gradients(strategy)
            if mine:
                assert_same(mine, expected_of(mine, gradients, layout))


def check_many(cases: list[tuple[Any, ...]]) -> None:
    """Several cases in one process group of one layout."""
    for function, *arguments in cases:
        function(*arguments)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}, {"data": 2}], ids=["one rank", "TP2", "DP2"])
def test_families(ranks: RankPool, models: dict[str, Path], layout: dict[str, int]) -> None:
    world_size = max([1, *layout.values()])
    options = {name: size for name, size in layout.items() if name != "data"}
    micro_batch_sizes: list[Cut] = [1, 2, 6, TokenBudget(20)] if world_size == 1 else [2, TokenBudget(20)]
    cases: list[tuple[Any, ...]] = []
    for family in FAMILIES:
        cases.append((check_forward, models[family], 100, options))
        cases.append((check_gradients, models[family], 100, options, None, micro_batch_sizes))
    if not layout:
        cases += [(check_forward, models[name], 100, {}) for name in ("rope linear", "rope llama3", "mistral")]
        cases.append((check_gradients, models["mistral"], 100, {}, None, [TokenBudget(20)]))
        for name in ("wide llama", "narrow mistral"):
            cases += [(check_forward, models[name], 100, {}), (check_gradients, models[name], 100, {}, None, [TokenBudget(20)])]
    if "data" in layout:
        # One rank has no rows at all; one rank has a single row where the other runs five micro-batches.
        cases += [(check_gradients, models["qwen2"], 100, {}, sizes, [1]) for sizes in ([6, 0], [1, 5])]
        cases.append((check_gradients, models["qwen2"], 100, {"overlap_grad_reduce": True}, [0, 6], [2]))
    if "tensor_parallel" in layout:
        for name in ("one key", "one key with a bias", "wide", "narrow"):
            cases += [(check_forward, models[name], 100, options), (check_gradients, models[name], 100, options, None, [3])]
        for name in ("odd vocabulary", "odd vocabulary, untied"):
            cases += [(check_forward, models[name], 101, options), (check_gradients, models[name], 101, options, None, [3])]
    ranks(world_size, check_many, cases)


@pytest.mark.slow
def test_layouts_that_come_for_free(ranks: RankPool, models: dict[str, Path]) -> None:
    tensor = {"tensor_parallel": 2, "sequence_parallel": True}
    for layout in ({"pipeline_parallel": 2}, tensor, {**tensor, "recompute": "full"}):
        for family in FAMILIES:
            cases = [(check_forward, models[family], 100, layout), (check_gradients, models[family], 100, layout, None, [2, 6])]
            ranks(2, check_many, cases)
    cases: list[tuple[Any, ...]] = []
    for layers in (None, [0, 3], [1, 2], [3, 0]):
        layout = {"pipeline_parallel": 2, "pipeline_layers": layers}
        cases += [(check_forward, models["three layers"], 100, layout), (check_gradients, models["three layers"], 100, layout, None, [2])]
    ranks(2, check_many, cases)
    ranks(2, check_gradients, models["qwen3"], 100, {"recompute": "full"}, None, [2])
    selective = {**tensor, "recompute": "selective"}
    for modules in (None, ["core_attn", "mlp"]):
        ranks(2, check_gradients, models["qwen3"], 100, {**selective, "recompute_modules": modules}, None, [2])
    for layout in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}):
        cases = [(check_forward, models["mistral"], 100, layout)]
        ranks(2, check_many, [*cases, (check_gradients, models["mistral"], 100, layout, None, [2])])


def test_ranks_that_share_the_tokens(ranks: RankPool, models: dict[str, Path]) -> None:
    """Rows are cut wherever the parts end; a rank may have none of a row, or none that counts."""
    layout = {"context_parallel": 2}
    cases: list[tuple[Any, ...]] = [(check_forward, models["qwen3"], 100, layout)]
    cases.append((check_gradients, models["qwen3"], 100, layout, None, [1, TokenBudget(20)]))
    # A window that begins on the other rank.
    cases.append((check_gradients, models["mistral"], 100, layout, None, [TokenBudget(20)]))
    ranks(2, check_many, cases)


def runs_of_modules(path: Path, layout: dict[str, Any]) -> list[int]:
    """How often a layer's norm, attention and feed-forward run in an optimizer step of one micro-batch."""
    strategy = started(path, NO_CLIPPING, **layout)
    layer, runs = strategy._model.decoder.layers[0], [0, 0, 0]

    def count(number: int) -> None:
        runs[number] += 1

    for number, module in enumerate((layer.input_layernorm, layer.self_attention.core_attention, layer.mlp.linear_fc1)):
        module.register_forward_pre_hook(lambda *_, number=number: count(number))
    train_step(strategy, batch_of(), weighted_loss, ["log_probs"], 6)
    return runs


def test_what_is_recomputed(ranks: RankPool, models: dict[str, Path]) -> None:
    for options, expected in (
        ({}, [1, 1, 1]),
        ({"recompute": "selective"}, [1, 1, 2]),
        ({"recompute": "selective", "recompute_modules": ["core_attn"]}, [1, 2, 1]),
        ({"recompute": "full"}, [2, 2, 2]),
    ):
        assert ranks(1, runs_of_modules, models["qwen3"], options) == [expected]


@pytest.mark.slow
def test_interleaved_stages(ranks: RankPool, models: dict[str, Path]) -> None:
    """Tied embeddings and their copy lie on different ranks, and a rank's two parts are not neighbours."""
    path, cases = models["four layers"], []
    for layout in (INTERLEAVED, {**INTERLEAVED, "pipeline_layers": [0, 1, 3, 0]}):
        cases += [(check_forward, path, 100, layout), (check_gradients, path, 100, layout, None, [1, TokenBudget(20)])]
    ranks(2, check_many, cases)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_by_two(ranks: RankPool, models: dict[str, Path]) -> None:
    for layout in ({"tensor_parallel": 2}, {"pipeline_parallel": 2}, {"context_parallel": 2}):
        cases: list[tuple[Any, ...]] = [(check_forward, models["qwen3"], 100, layout)]
        cases += [(check_gradients, models["qwen3"], 100, layout, sizes, [2]) for sizes in ([1, 5], [6, 0])]
        ranks(4, check_many, cases)
    shared: tuple[dict[str, Any], ...] = (
        {"context_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"context_parallel": 2, "pipeline_parallel": 2, "recompute": "full"},
        {"context_parallel": 4},
        {"tensor_parallel": 4, "sequence_parallel": True},  # two ranks for each of the two key/value heads
    )
    for layout in shared:
        ranks(4, check_many, [(check_forward, models["qwen3"], 100, layout), (check_gradients, models["qwen3"], 100, layout, None, [2, 6])])


ODD: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "VPP2, recomputed": (2, "qwen3", {"layers": 4}, {**INTERLEAVED, "recompute": "full"}),
    "VPP2, recomputed in part": (2, "qwen2", {"layers": 4}, {**INTERLEAVED, "recompute": "selective"}),
    "VPP2 of seven layers": (2, "qwen2", {"layers": 7}, INTERLEAVED),
    "VPP3, the last part without layers": (
        2,
        "llama",
        {"layers": 7},
        {**STAGES, "virtual_pipeline_parallel": 3, "pipeline_layers": [1, 1, 2, 1, 2, 0], "recompute": "full"},
    ),
    "TP2 PP2, three and one": (4, "qwen3", {"layers": 4, "vocab_size": 101}, {**SHARED, **STAGES, "pipeline_layers": [3, 1]}),
    "PP3, experts, the first without layers": (
        3,
        "qwen3_moe",
        {"layers": 4, "mlp_only_layers": [1]},
        {"pipeline_parallel": 3, "pipeline_layers": [0, 1, 3]},
    ),
    "VPP2 CP2": (4, "qwen3", {"layers": 4}, {**INTERLEAVED, "context_parallel": 2, "recompute": "full"}),
    "VPP2 EP2": (4, "qwen3_moe", {"layers": 4}, {**INTERLEAVED, "expert_parallel": 2}),
    "VPP2 TP2, odd vocabulary": (4, "qwen3", {"layers": 4, "vocab_size": 101}, {**INTERLEAVED, **SHARED}),
    "PP4 of seven layers": (4, "qwen3", {"layers": 7}, {"pipeline_parallel": 4}),
    "PP4 VPP2": (4, "llama", {"layers": 8}, {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2}),
    "CP4, windows": (4, "mistral", {"sliding_window": 3, "tied": False}, {"context_parallel": 4}),
    "CP2 TP2, one key": (4, "qwen2", {"num_key_value_heads": 1}, {**SHARED, "context_parallel": 2}),
    "TP2 PP2, one key": (4, "qwen2", {"num_key_value_heads": 1}, {**SHARED, **STAGES, "recompute": "full"}),
    "TP2 EP2, one key": (2, "qwen3_moe", {"num_key_value_heads": 1}, {**SHARED, "expert_parallel": 2}),
    "CP2 TP2 EP4": (4, "qwen3_moe", {}, {**SHARED, "context_parallel": 2, "expert_parallel": 4}),
    "PP2 EP2, tied": (4, "qwen3_moe", {}, {**STAGES, "expert_parallel": 2, "recompute": "full"}),
}
"""Ranks, family, its shape, layout."""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ODD)
def test_odd_shapes(ranks: RankPool, tmp_path: Path, name: str) -> None:
    world_size, family, shape, layout = ODD[name]
    path, vocab = tiny(tmp_path / "model", family, **shape), shape.get("vocab_size", 100)
    cases = [(check_forward, path, vocab, layout), (check_gradients, path, vocab, layout, None, [1, TokenBudget(20)])]
    ranks(world_size, check_many, cases)


def rows_among_others(path: Path) -> None:
    """Each row's log-probs, alone and packed between rows of its own and of other lengths, that also stand in another order."""
    strategy = started(path)
    batch = batch_of([9, 4, 12, 2, 7, 4, 4])
    among = [forward(strategy, batch, ["log_probs"], planner) for planner in (len(batch), TokenBudget(1000), RowsAtATime(3))]
    for row in range(len(batch)):
        alone = forward(strategy, batch.slice(row, row + 1), ["log_probs"], 1)
        assert alone is not None
        for out in among:
            assert out is not None
            torch.testing.assert_close(out.ragged("log_probs").row(row), alone.ragged("log_probs").row(0), rtol=1e-5, atol=1e-5)


def test_packed_rows_do_not_see_each_other(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks(1, rows_among_others, models["qwen3"])


def forward_of_nothing(path: Path) -> None:
    strategy = started(path)
    empty: DataProto = batch_of().slice(0, 0)
    out = forward(strategy, empty, ["log_probs"], 4)
    assert out is not None
    assert len(out) == 0
    with pytest.raises(AssertionError, match="the model has .*log_probs"):
        forward(strategy, empty, ["values"], 4)


def test_a_rank_without_rows_returns_an_empty_batch(ranks: RankPool, models: dict[str, Path]) -> None:
    ranks(1, forward_of_nothing, models["qwen2"])


def passes_of(path: Path, sizes: list[int]) -> tuple[int, int, list[int] | None]:
    """How often the model runs in a forward pass and in an optimizer step, and the rows that the forward pass returns."""
    strategy = started(path, OptimizerConfig(lr=1e-3))
    mine = shard(batch_of(), strategy, sizes)
    runs: list[int] = []
    strategy._chunks[0].register_forward_pre_hook(lambda *_: runs.append(1))
    out = forward(strategy, mine, ["log_probs"], 2)
    in_forward = len(runs)
    train_step(strategy, mine, weighted_loss, ["log_probs"], 2)
    return in_forward, len(runs) - in_forward, None if out is None else out.lengths.tolist()


@pytest.mark.parametrize("sizes", [[6, 0], [1, 5]])
def test_data_parallel_ranks_run_equally_many_micro_batches(ranks: RankPool, models: dict[str, Path], sizes: list[int]) -> None:
    """Three of two rows for the fuller rank: what a model does with the other ranks inside a pass, all of them enter."""
    lengths = batch_of().lengths.tolist()
    found = ranks(2, passes_of, models["qwen2"], sizes)
    assert found == [(3, 3, lengths[: sizes[0]]), (3, 3, lengths[sizes[0] :])]


def pass_of_one_copy(path: Path) -> int | None:
    strategy = started(path)
    if strategy.layout.data_rank == 1:
        return None
    plan = strategy.plan(batch_of().lengths, RowsAtATime(4), together=False)
    out = strategy.forward(batch_of(), ["log_probs"], plan)
    assert out is not None
    return len(out)


def test_a_copy_of_the_model_can_make_a_pass_of_its_own(ranks: RankPool, models: dict[str, Path]) -> None:
    assert ranks(2, pass_of_one_copy, models["qwen2"]) == [6, None]
