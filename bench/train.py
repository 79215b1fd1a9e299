"""Tokens per second of MegatronStrategy.train_step against a bare Megatron loop, written out here, on the same model and rows.

The bare loop is what one would write by hand: batches made beforehand, logits of every position, Megatron's own cross-entropy, DDP,
optimizer, nothing reported. Rows are equally long, so that nothing is padded there (bench/packing.py has rows that are not). The two sides
take turns step by step, so that a busy machine slows both.
The last line is a JSON object; `ratio` above 1 means that train_step is faster. It is taken on rows of which every token counts, so that
both sides work on the same positions; `ratio_with_prompts` on rows that begin with a prompt, whose logits train_step leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs, MicroBatchPlan, RowsAtATime, padded
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import ModelSpec
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

from megatron.core import parallel_state, tensor_parallel  # isort: skip  (roll_lite prepares megatron.core)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from roll_lite.config.hf_config import read_hf_config  # isort: skip
from roll_lite.distributed.strategy.megatron.experts import Balance  # isort: skip
from roll_lite.distributed.strategy.megatron.layers import SdpaAttention  # isort: skip
from roll_lite.distributed.strategy.megatron.model import layer_spec, transformer_config  # isort: skip

ROWS, MICRO_BATCH, VOCAB, PROMPT, LENGTH = 64, 8, 4096, 20, 100
PLANNER = RowsAtATime(MICRO_BATCH)
OPTIMIZER = OptimizerConfig(lr=1e-5)


def make_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        tie_word_embeddings=True, use_sliding_window=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_rows() -> DataProto:
    generator = torch.Generator().manual_seed(0)
    return DataProto(
        {
            "temperature": torch.ones(ROWS),
            "input_ids": Ragged.from_rows([torch.randint(0, VOCAB, (LENGTH,), generator=generator) for _ in range(ROWS)]),
            "response_mask": Ragged.from_rows([torch.arange(LENGTH) >= PROMPT] * ROWS),
            "advantages": Ragged.from_rows([torch.randn(LENGTH - 1, generator=generator) / 1000 for _ in range(ROWS)]),
        }
    )


def without_prompts(rows: DataProto) -> DataProto:
    """The same tokens, all of them the policy's."""
    mask = rows.ragged("response_mask")
    return rows.with_columns(response_mask=Ragged(torch.ones_like(mask.values), mask.offsets))


def policy_gradient(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert outputs.log_probs is not None
    loss = -(outputs.log_probs * micro_batch.columns["advantages"] * micro_batch.mask).sum()
    return loss, {"tokens": micro_batch.mask.sum()}


class PaddedAttention(SdpaAttention):
    """What one would write for rows of one length."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any) -> torch.Tensor:
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        output = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)
        return output.permute(2, 0, 1, 3).flatten(2)


def bare_megatron(path: Path, rows: DataProto) -> Callable[[], None]:
    """The same model without the strategy; one optimizer step per call."""
    hf = read_hf_config(path)
    config = transformer_config(hf, MegatronStrategyConfig(), torch.float32, deterministic=False)
    spec = layer_spec(hf, 0, Balance(0.0))
    spec.submodules.self_attention.submodules.core_attention = PaddedAttention
    model = GPTModel(
        config, spec, hf.vocab_size, hf.max_positions, share_embeddings_and_output_weights=True, position_embedding_type="rope",
        rotary_base=hf.rope.theta,
    )  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
    chunk = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True), model)
    config.finalize_model_grads_func = lambda chunks, num_tokens=None, **options: finalize_model_grads(chunks, None, **options)
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(optimizer="adam", lr=OPTIMIZER.lr, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True), [chunk]
    )
    batches = [padded(part) for part in MicroBatchPlan.of(rows.lengths, PLANNER).cut(rows)]

    def forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
        micro = next(iterator)
        ids = micro.columns["input_ids"]
        return model(ids, torch.arange(ids.shape[1]).expand_as(ids), None), partial(loss, micro)

    def loss(micro: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        by_time = logits.transpose(0, 1)[:-1].clone(memory_format=torch.contiguous_format)
        nll = tensor_parallel.vocab_parallel_cross_entropy(by_time, micro.columns["input_ids"].t()[1:].contiguous()).t()
        return (nll * micro.columns["advantages"] * micro.mask).sum(), torch.zeros([], dtype=torch.int), {}

    def step() -> None:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=[chunk], num_microbatches=len(batches),
            seq_length=LENGTH, micro_batch_size=MICRO_BATCH,
        )  # fmt: skip
        optimizer.step()

    return step


def timed(step: Callable[[], Any]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def turns(ours: Callable[[], Any], bare: Callable[[], Any], pairs: int) -> list[tuple[float, float]]:
    """Seconds of either side, pair by pair."""
    timed(ours), timed(bare)
    return [(timed(ours), timed(bare)) if turn % 2 else (timed(bare), timed(ours))[::-1] for turn in range(pairs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11, help="how often the two take turns (default: %(default)s)")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
        make_model(folder / "model")
        rows = make_rows()
        model = ModelConfig(path=folder / "model", dtype="float32")
        strategy = MegatronStrategy(ModelSpec(model, MegatronStrategyConfig(), "model.path", OPTIMIZER))
        strategy.initialize()

        def planned_step(data: DataProto) -> None:
            strategy.train_step(data, policy_gradient, ["log_probs"], strategy.plan(data.lengths, PLANNER))

        pairs, with_prompts = (
            turns(partial(planned_step, data), bare_megatron(folder / "model", data), chosen.pairs)
            for data in (without_prompts(rows), rows)
        )
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
    tokens = int(rows.lengths.sum())
    result = {
        "name": "train_step",
        "ours": round(tokens / statistics.median(mine for mine, _ in pairs), 1),
        "peer": round(tokens / statistics.median(theirs for _, theirs in pairs), 1),
        "unit": "tokens/s",
        "ratio": round(statistics.median(theirs / mine for mine, theirs in pairs), 3),
        "ratio_with_prompts": round(statistics.median(theirs / mine for mine, theirs in with_prompts), 3),
        "peer_is": "bare Megatron-Core loop, 1 process, 1 thread, float32, 5M parameters",
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
