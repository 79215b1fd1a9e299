"""Keep masks, whole distributions and final values through the strategy: Hugging Face's logits with the same tokens masked."""

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import FAMILIES, assert_same, batch_of, own_gradients, shard, started, tiny, weighted_loss
from megatron_ranks import RankPool
from support_models import load_hf
from support_passes import forward, train_step
from transformers import PreTrainedModel

from roll_lite.config.schema.models import OptimizerConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.megatron.vocabulary import DROPPED

NO_CLIPPING = OptimizerConfig(lr=1e-30, clip_grad=0.0)
OUTPUTS = ["log_probs", "entropy", "distribution"]


def with_kept(batch: DataProto, vocab: int) -> DataProto:
    """Every transition keeps a few tokens, its target mostly among them; every third keeps all."""
    generator = torch.Generator().manual_seed(11)
    rows = []
    for ids in batch.ragged("input_ids").rows():
        kept = torch.randint(0, vocab, (len(ids) - 1, 5), generator=generator)
        kept[:, 0] = ids[1:].where(torch.rand(len(ids) - 1, generator=generator) < 0.8, kept[:, 0])
        kept[:, 4] = -1
        kept[::3] = -1
        rows.append(kept.int())
    return batch.with_columns(kept_ids=Ragged.from_rows(rows))


def hf_distribution(model: PreTrainedModel, ids: torch.Tensor, temperature: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """[T - 1, V], DROPPED where a token was not kept."""
    logits = model(ids[None]).logits[0, :-1].float() / temperature
    keeps = torch.ones_like(logits, dtype=torch.bool)
    for step, tokens in enumerate(kept.tolist() if kept is not None else []):
        if max(tokens) >= 0:
            keeps[step] = False
            keeps[step, [token for token in tokens if token >= 0] + [int(ids[step + 1])]] = True
    return torch.log_softmax(logits.masked_fill(~keeps, -torch.inf), dim=-1).masked_fill(~keeps, DROPPED)


def rows_of(model: PreTrainedModel, batch: DataProto) -> list[dict[str, torch.Tensor]]:
    """Each row's outputs, 0 where the response mask is 0."""
    rows = []
    for row in range(len(batch)):
        ids, mask = batch.ragged("input_ids").row(row), batch.ragged("response_mask").row(row)[1:]
        kept = batch.ragged("kept_ids").row(row) if "kept_ids" in batch else None
        whole = hf_distribution(model, ids, batch.tensor("temperature")[row], kept)
        log_p, entropy = whole.gather(1, ids[1:, None]).squeeze(1), -(whole.exp() * whole).sum(-1)
        rows.append({"log_probs": log_p * mask, "entropy": entropy * mask, "distribution": whole * mask[:, None]})
    return rows


def check_forward(path: Path, vocab: int, layout: dict[str, Any]) -> None:
    strategy = started(path, **layout)
    oracle = load_hf(path)
    plain = batch_of(vocab=vocab)
    for batch in (plain, with_kept(plain, vocab)):
        mine = shard(batch, strategy)
        out = forward(strategy, mine, OUTPUTS, 4)
        alone = forward(strategy, mine, ["distribution"], 1)
        assert (out is not None) == strategy.layout.is_head
        if out is None or alone is None:
            continue
        assert out.ragged("distribution").values.shape[1] == vocab
        torch.testing.assert_close(out.ragged("distribution").values, alone.ragged("distribution").values, rtol=1e-5, atol=1e-5)
        for row, expected in enumerate(rows_of(oracle, mine)):
            for name in OUTPUTS:
                torch.testing.assert_close(out.ragged(name).row(row), expected[name], rtol=2e-5, atol=2e-5)


def loss_with_distribution(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """weighted_loss, and the negative entropy summed up over the whole vocabulary."""
    assert outputs.distribution is not None
    assert not {"kept_ids", "temperature"} & set(micro_batch.columns), "they are for the head"
    loss, metrics = weighted_loss(outputs, micro_batch)
    whole = outputs.distribution
    loss = loss + 0.2 * ((whole.exp() * whole).sum(-1) * micro_batch.mask).sum()
    return loss, {**metrics, "loss": loss}


def check_gradients(path: Path, vocab: int, layout: dict[str, Any]) -> None:
    batch = with_kept(batch_of(vocab=vocab), vocab)
    model = load_hf(path)
    total, size_of_terms = torch.zeros(()), 0.0
    for row, expected in enumerate(rows_of(model, batch)):
        weighted, entropy = batch.ragged("advantages").row(row) * expected["log_probs"], expected["entropy"].sum()
        total = total - weighted.sum() - 0.3 * entropy - 0.2 * entropy
        size_of_terms += float(weighted.detach().abs().sum() + entropy.detach())
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    strategy = started(path, NO_CLIPPING, distributed_optimizer=False, **layout)
    mine = shard(batch, strategy)
    for size in (1, 4):
        result = train_step(strategy, mine, loss_with_distribution, OUTPUTS, size)
        assert result.loss == pytest.approx(total.item(), abs=1e-6 * size_of_terms), "its terms cancel each other for the most part"
        ours = own_gradients(strategy)
        if ours:
            assert_same(ours, {name: gradients[name] for name in (ours if layout.get("pipeline_parallel") else gradients)}, 2e-5)


def check_many(cases: list[tuple[Any, ...]]) -> None:
    for function, *arguments in cases:
        function(*arguments)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int]]:
    folder = tmp_path_factory.mktemp("models")
    return {family: (tiny(folder / family, family), 100) for family in FAMILIES} | {
        "odd vocabulary": (tiny(folder / "odd", "qwen3", vocab_size=101, tied=False), 101)
    }


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}, {"data": 2}], ids=["one rank", "TP2", "DP2"])
def test_kept_tokens_and_distributions(ranks: RankPool, models: dict[str, tuple[Path, int]], layout: dict[str, int]) -> None:
    options = {name: size for name, size in layout.items() if name != "data"}
    names = ("llama", "odd vocabulary") if options else ("qwen2",)
    cases = [(check, *models[name], options) for name in names for check in (check_forward, check_gradients)]
    ranks(2 if layout else 1, check_many, cases)


@pytest.mark.slow
@pytest.mark.nightly
def test_kept_tokens_and_distributions_in_further_layouts(ranks: RankPool, models: dict[str, tuple[Path, int]]) -> None:
    for layout in ({"pipeline_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}):
        ranks(2, check_many, [(check, *models["qwen3"], layout) for check in (check_forward, check_gradients)])


def idle_ranks(path: Path) -> None:
    """One rank has all rows: the other keeps step, and its loss sees vectors of the right length without rows."""
    batch = batch_of().with_columns(
        ref_distribution=Ragged.from_rows([torch.zeros(len(ids) - 1, 100) for ids in batch_of().ragged("input_ids").rows()])
    )
    strategy = started(path, NO_CLIPPING)

    def loss(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert outputs.distribution is not None
        difference = (outputs.distribution - micro_batch.columns["ref_distribution"]).sum(-1)
        total = (difference * micro_batch.mask).sum()
        return total, {"rows": torch.tensor(len(difference))}

    mine = shard(with_kept(batch, 100), strategy, [6, 0])
    assert train_step(strategy, mine, loss, ["distribution"], 4).metrics["rows"] == 6


def test_a_rank_without_rows_keeps_step(ranks: RankPool, models: dict[str, tuple[Path, int]]) -> None:
    ranks(2, idle_ranks, models["qwen2"][0])


# ---------------------------------------------------------------- the critic


def final_values(path: Path, layout: dict[str, Any]) -> None:
    """The values of a plain forward pass over every position, the last one included."""
    strategy = started(path, OptimizerConfig(lr=1e-2), value_init="actor", **layout)
    batch = batch_of()
    train_step(strategy, batch, weighted_loss, ["values"], 4)  # the head starts at 0
    # Behind each row one more token, which causal attention does not let the positions before it see.
    longer = Ragged.from_rows([torch.cat([ids, torch.tensor([7])]) for ids in batch.ragged("input_ids").rows()])
    everywhere = forward(strategy, DataProto({"input_ids": longer}), ["values"], 3)
    for size in (1, 4):
        out = forward(strategy, batch, ["values", "final_value"], size)
        alone = forward(strategy, batch, ["final_value"], size)
        assert (out is not None) == strategy.layout.is_head
        if out is None or alone is None or everywhere is None:
            continue
        assert alone.keys() == ("final_value",)
        expected = torch.stack([row[-1] for row in everywhere.ragged("values").rows()])
        assert expected.abs().min() > 0
        torch.testing.assert_close(out.tensor("final_value"), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(alone.tensor("final_value"), expected, rtol=1e-5, atol=1e-6)
        for row, values in enumerate(out.ragged("values").rows()):
            mask = batch.ragged("response_mask").row(row)[1:]
            torch.testing.assert_close(values, everywhere.ragged("values").row(row)[:-1] * mask, rtol=1e-5, atol=1e-6)
    empty = forward(strategy, batch.slice(0, 0), ["values", "final_value"], 4)
    assert empty is None or (len(empty) == 0 and empty.tensor("final_value").dtype == torch.float32)
    with pytest.raises(AssertionError, match="final_value"):
        train_step(strategy, batch, weighted_loss, ["values", "final_value"], 4)


@pytest.mark.parametrize("layout", [{}, {"tensor_parallel": 2}], ids=["one rank", "TP2"])
def test_final_value_is_that_of_the_last_position(ranks: RankPool, models: dict[str, tuple[Path, int]], layout: dict[str, Any]) -> None:
    ranks(2 if layout else 1, final_values, models["qwen2"][0], layout)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [{"pipeline_parallel": 2}, {"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2}],
    ids=["PP2", "TP2 SP", "CP2"],
)
def test_final_value_in_further_layouts(ranks: RankPool, models: dict[str, tuple[Path, int]], layout: dict[str, Any]) -> None:
    ranks(2, final_values, models["qwen2"][0], layout)
