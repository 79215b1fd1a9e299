"""The configurations for real models, on small models of the same families with as many heads: every role in its layout makes a pass and an
optimizer step of several micro-batches, and both are Hugging Face's. Copies of the model beyond eight processes are left out."""

from pathlib import Path

import pytest
import torch
from megatron_cases import batch_of, hf_gradients, hf_log_probs, hf_loss, hf_values, shard, weighted_loss
from megatron_ranks import RankPool
from support_models import load_hf, make_tiny_model

from roll_lite.config.arithmetic import model_parallel_size, roles
from roll_lite.config.loading import load_config
from roll_lite.config.schema.models import CriticRoleConfig, ForwardRoleConfig, ModelConfig, TrainRoleConfig
from roll_lite.data.microbatch import MicroBatchPlan, TokenBudget
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy
from roll_lite.workers.model import ModelRole

CONFIGS = Path(__file__).resolve().parents[4] / "examples/configs"
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LENGTHS = (9, 4, 12, 2, 7, 5, 3, 11, 6, 8, 10)
"""Of eight copies two have no sample, and one has a single one: they keep step with those that have two."""
TOKENS = 12
"""Of a micro-batch, in the place of a configuration's: then every role has several in a pass."""
HEADS = {"0.5b": (14, 2), "1.5b": (12, 2), "7b": (28, 4), "32b": (40, 8), "8b": (32, 8), "30b": (32, 4)}


def small_model(name: str, folder: Path) -> Path:
    """Four layers, heads of four numbers; all heads together are as wide as the hidden state but in Qwen3-30B-A3B, where they are twice as
    wide."""
    size = next(size for size in HEADS if f"_{size}_" in name or name.endswith(f"{size}_ppo"))
    heads, keys = HEADS[size]
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 4, "layers": 4}
    shape["hidden"] = (2 if size == "30b" else 4) * heads
    if name.startswith("llama"):
        return make_tiny_model(folder, "llama", tied=False, rope_parameters=LLAMA3, **shape)  # type: ignore[arg-type]
    if name.startswith("qwen3"):
        return make_tiny_model(folder, "qwen3_moe", tied=False, num_experts=16, num_experts_per_tok=8, **shape)  # type: ignore[arg-type]
    return make_tiny_model(folder, "qwen2", tied=size in ("0.5b", "1.5b"), **shape)  # type: ignore[arg-type]


def every_role(name: str, path: Path) -> list[str]:
    config = load_config(name, CONFIGS, files=False)
    done = []
    for place, role in roles(config).items():
        if isinstance(role, ForwardRoleConfig):
            strategy = MegatronStrategy(
                ModelRole(ModelConfig(path=path, dtype="float32"), role, 800, seed=1, deterministic=False).model_spec
            )
            strategy.initialize()
            head = None
            if isinstance(role, CriticRoleConfig):
                one_pass(strategy, role, path, torch.zeros(1, load_hf(path).config.hidden_size))
                head = given_head(strategy)
            one_pass(strategy, role, path, head)
            if isinstance(role, TrainRoleConfig):
                one_step(strategy, role, path, head)
            done.append(place)
    return done


def given_head(strategy: MegatronStrategy) -> torch.Tensor:
    """A random one: that of zeros, which a new critic has, lets no gradient through to the model below it."""
    weight = strategy._model.output_layer.weight
    weight.data.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(5)) / 8)
    return weight.detach().clone()  # type: ignore[no-any-return]


def several(strategy: MegatronStrategy, batch: DataProto, rows: int | None) -> MicroBatchPlan:
    plan = strategy.plan(batch.lengths, TokenBudget(TOKENS, rows))
    assert plan.count > 1
    return plan


def one_pass(strategy: MegatronStrategy, role: ForwardRoleConfig, path: Path, head: torch.Tensor | None) -> None:
    """`head`: a critic's."""
    own = shard(batch_of(LENGTHS), strategy)
    output = "log_probs" if head is None else "values"
    found = strategy.forward(own, [output], several(strategy, own, role.micro_batch_size))
    oracle = load_hf(path)
    for row in range(len(own)) if found is not None else ():
        ids, mask = own.ragged("input_ids").row(row), own.ragged("response_mask").row(row)[1:]
        expected = hf_log_probs(oracle, ids, own.tensor("temperature")[row])[0] if head is None else hf_values(oracle, head, ids)
        torch.testing.assert_close(found.ragged(output).row(row), expected * mask, rtol=1e-5, atol=1e-5)


def one_step(strategy: MegatronStrategy, role: TrainRoleConfig, path: Path, head: torch.Tensor | None) -> None:
    batch = batch_of(LENGTHS)
    own, outputs = shard(batch, strategy), ["log_probs"] if head is None else ["values"]
    result = strategy.train_step(own, weighted_loss, outputs, several(strategy, own, role.in_training[1]))
    loss, norm = of_policy(path, batch) if head is None else of_values(path, batch, head)
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=5e-4) and result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert not result.skipped and result.lr == pytest.approx(role.optimizer.lr / role.optimizer.warmup_steps)


def of_policy(path: Path, batch: DataProto) -> tuple[float, float]:
    loss, gradients = hf_gradients(path, batch, entropy=False)
    return loss, float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def of_values(path: Path, batch: DataProto, head: torch.Tensor) -> tuple[float, float]:
    """The norm is the head's and the body's."""
    model, weight = load_hf(path), head.clone().requires_grad_()
    loss = hf_loss(model, batch, head=weight)
    loss.backward()
    gradients = [parameter.grad for parameter in (weight, *model.model.parameters())]
    return loss.item(), float(torch.stack([gradient.norm() for gradient in gradients if gradient is not None]).norm())


def check(ranks: RankPool, folder: Path, name: str, processes: int) -> None:
    config = load_config(name, CONFIGS, files=False)
    assert processes % model_parallel_size(config.actor_train) == 0
    for done in ranks(processes, every_role, name, small_model(name, folder)):
        assert done == [role for role in ("actor_train", "reference", "critic") if role in roles(config)]


def test_one_gpu(ranks: RankPool, tmp_path: Path) -> None:
    check(ranks, tmp_path, "qwen2.5_0.5b_grpo", 1)


@pytest.mark.slow
def test_one_copy_or_two(ranks: RankPool, tmp_path: Path) -> None:
    for name in ("qwen2.5_1.5b_grpo", "llama3.1_8b_ppo"):
        check(ranks, tmp_path / name, name, 2)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", ["qwen2.5_1.5b_grpo", "qwen2.5_7b_grpo", "qwen2.5_32b_grpo", "qwen3_30b_a3b_grpo", "llama3.1_8b_ppo"])
def test_eight_processes(ranks: RankPool, tmp_path: Path, name: str) -> None:
    check(ranks, tmp_path, name, 8)
