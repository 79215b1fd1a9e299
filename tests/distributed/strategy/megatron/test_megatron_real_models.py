"""The configurations for real models, on small models of the same families with as many heads: every role in its layout makes a pass and an
optimizer step of several micro-batches, and both are Hugging Face's. Copies of the model beyond eight processes are left out."""

from pathlib import Path

import pytest
import torch
from megatron_cases import batch_of, hf_gradients, hf_log_probs, hf_loss, shard, weighted_loss
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
    """Four layers, heads of four numbers."""
    size = next(size for size in HEADS if f"_{size}_" in name or name.endswith(f"{size}_ppo"))
    heads, keys = HEADS[size]
    shape = {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": 4, "hidden": 4 * heads, "layers": 4}
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
            one_pass(strategy, role, path)
            if isinstance(role, TrainRoleConfig):
                one_step(strategy, role, path)
            done.append(place)
    return done


def several(strategy: MegatronStrategy, batch: DataProto, rows: int | None) -> MicroBatchPlan:
    plan = strategy.plan(batch.lengths, TokenBudget(TOKENS, rows))
    assert plan.count > 1
    return plan


def one_pass(strategy: MegatronStrategy, role: ForwardRoleConfig, path: Path) -> None:
    own = shard(batch_of(LENGTHS), strategy)
    output = "values" if isinstance(role, CriticRoleConfig) else "log_probs"
    found = strategy.forward(own, [output], several(strategy, own, role.micro_batch_size))
    oracle = load_hf(path)
    for row in range(len(own)) if found is not None else ():
        log_probs, _ = hf_log_probs(oracle, own.ragged("input_ids").row(row), own.tensor("temperature")[row])
        expected = torch.zeros_like(log_probs) if output == "values" else log_probs * own.ragged("response_mask").row(row)[1:]
        torch.testing.assert_close(found.ragged(output).row(row), expected, rtol=1e-5, atol=1e-5)


def one_step(strategy: MegatronStrategy, role: TrainRoleConfig, path: Path) -> None:
    batch = batch_of(LENGTHS)
    own, value_model = shard(batch, strategy), isinstance(role, CriticRoleConfig)
    outputs = ["values"] if value_model else ["log_probs"]
    result = strategy.train_step(own, weighted_loss, outputs, several(strategy, own, role.in_training[1]))
    loss, norm = of_values(path, batch) if value_model else of_policy(path, batch)
    assert result.loss == pytest.approx(loss, rel=1e-5, abs=5e-4) and result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert not result.skipped and result.lr == pytest.approx(role.optimizer.lr / role.optimizer.warmup_steps)


def of_policy(path: Path, batch: DataProto) -> tuple[float, float]:
    loss, gradients = hf_gradients(path, batch, entropy=False)
    return loss, float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())


def of_values(path: Path, batch: DataProto) -> tuple[float, float]:
    """A head of zeros lets no gradient through to the model below it."""
    model = load_hf(path)
    head = torch.zeros(1, model.config.hidden_size, requires_grad=True)
    loss = hf_loss(model, batch, head=head)
    loss.backward()
    assert head.grad is not None
    return loss.item(), float(head.grad.norm())


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
