"""Tokens per second of MegatronStrategy.train_step against a bare Megatron loop, written out here, on the same model, rows and layout.

The bare loop is what one would write by hand: batches made beforehand, logits of every position, Megatron's own cross-entropy, DDP,
optimizer, nothing reported. Rows are equally long, a few at a time, or (`packed`) of a long tail of lengths, one behind the other, with as
many tokens at a time. Both sides start from the same weights and must come to the same gradient norm. They take turns step by step, so that
a busy machine slows both.

`--layouts` are those of the ranks: `one`, or two processes that share the rows (`dp2`), every matrix (`tp2`, with activations split between
them `sp2`), the layers (`pp2`, interleaved `vpp2`), or the experts of another model (`ep2`).
The last line is a JSON object; `ratio` above 1 means that train_step is faster. It is taken on one rank and rows of one length of which
every token counts, so that both sides work on the same positions; `ratio_with_prompts` on rows that begin with a prompt, whose logits
train_step leaves out; `ratios` has all cases.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll_lite.config.schema.models import LoraConfig, MegatronStrategyConfig, ModelConfig, OptimizerConfig
from roll_lite.data.microbatch import MicroBatch, MicroBatchOutputs, MicroBatchPlanner, RowsAtATime, TokenBudget, padded
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.distributed.strategy.base import ModelSpec
from roll_lite.distributed.strategy.megatron.strategy import MegatronStrategy

from megatron.core import parallel_state, tensor_parallel  # isort: skip  (roll_lite prepares megatron.core)
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # isort: skip
from megatron.core.models.gpt.gpt_model import GPTModel  # isort: skip
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig, get_megatron_optimizer  # isort: skip
from megatron.core.packed_seq_params import PackedSeqParams  # isort: skip
from megatron.core.pipeline_parallel import get_forward_backward_func  # isort: skip
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules  # isort: skip
from megatron.core.transformer.spec_utils import ModuleSpec  # isort: skip
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # isort: skip
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # isort: skip
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset  # isort: skip
from roll_lite.models.hf_config import HfConfig, read_hf_config  # isort: skip
from roll_lite.distributed.strategy.megatron.experts import Balance  # isort: skip
from roll_lite.distributed.strategy.megatron.forward_backward import sum_gradients  # isort: skip
from roll_lite.distributed.strategy.megatron.hf_load import load_weights  # isort: skip
from roll_lite.distributed.strategy.megatron.hf_mapping import bind  # isort: skip
from roll_lite.distributed.strategy.megatron.layers import SdpaAttention, TorchRMSNorm  # isort: skip
from roll_lite.distributed.strategy.megatron.layers import TORCH, layer_spec  # isort: skip
from roll_lite.distributed.strategy.megatron.model import transformer_config  # isort: skip

ROWS, MICRO_BATCH, VOCAB, PROMPT, LENGTH = 64, 8, 4096, 20, 100
TAIL = 4.0
"""The longest of the packed rows, by their mean."""
OPTIMIZER = OptimizerConfig(lr=1e-5)
LAYOUTS: dict[str, tuple[int, MegatronStrategyConfig]] = {
    "one": (1, MegatronStrategyConfig()),
    "dp2": (2, MegatronStrategyConfig()),
    "tp2": (2, MegatronStrategyConfig(tensor_parallel=2)),
    "sp2": (2, MegatronStrategyConfig(tensor_parallel=2, sequence_parallel=True)),
    "pp2": (2, MegatronStrategyConfig(pipeline_parallel=2)),
    "vpp2": (2, MegatronStrategyConfig(pipeline_parallel=2, virtual_pipeline_parallel=2)),
    "ep2": (2, MegatronStrategyConfig(expert_parallel=2)),
}
"""Processes, and how they share the model."""
CASES = ("all", "prompts", "packed")
"""Rows of one length, of which every token counts, or what follows the prompt; rows of many lengths, of which every token counts."""


# ---------------------------------------------------------------- what the benchmarks of training share


def make_model(folder: Path, hidden: int = 256, layers: int = 4, **changed: Any) -> None:
    """A random Qwen2, as Hugging Face saves it; `changed`: further fields of its config.json."""
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**{**_fields(hidden, layers), "use_sliding_window": False, **changed})).save_pretrained(folder)


def make_model_with_experts(folder: Path, hidden: int = 256, layers: int = 4) -> None:
    """A random Qwen3-MoE whose tokens go to 2 of 8 experts."""
    torch.manual_seed(0)
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 2 * hidden, "head_dim": hidden // 8}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**_fields(hidden, layers), **experts)).save_pretrained(folder)


def _fields(hidden: int, layers: int) -> dict[str, Any]:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True}
    return {"vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, **heads}


@contextmanager
def one_rank(
    optimizer: OptimizerConfig | None,
    hidden: int = 256,
    layers: int = 4,
    dtype: str = "float32",
    lora: LoraConfig | None = None,
    **changed: Any,
) -> Iterator[tuple[MegatronStrategy, Path]]:
    """A strategy in this process, on a GPU if there is one, with a model of make_model, and a folder that is gone afterwards."""
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", hidden, layers, **changed)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1)
        try:
            yield make_strategy(folder / "model", MegatronStrategyConfig(), optimizer, dtype, lora), folder
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()


def make_strategy(
    path: Path, layout: MegatronStrategyConfig, optimizer: OptimizerConfig | None, dtype: Any = "float32", lora: LoraConfig | None = None
) -> MegatronStrategy:
    strategy = MegatronStrategy(ModelSpec(ModelConfig(path=path, dtype=dtype), layout, "model.path", optimizer, lora=lora))
    strategy.initialize()
    return strategy


def tail(rows: int, longest: int, spread: float, shortest: int = 2) -> list[int]:
    """Lengths of which the longest is `spread` times the mean: quantiles of a log-normal distribution, in a shuffled order."""
    quantiles = torch.special.ndtri((torch.arange(rows, dtype=torch.float64) + 0.5) / rows)
    low, high = 0.0, 5.0
    for _ in range(50):
        sigma = (low + high) / 2
        drawn = (sigma * quantiles).exp()
        low, high = (sigma, high) if float(drawn.max() / drawn.mean()) < spread else (low, sigma)
    lengths = (drawn / drawn.max() * longest).round().clamp(min=shortest).long()
    return lengths[torch.randperm(rows, generator=torch.Generator().manual_seed(0))].tolist()


def make_rows(lengths: Sequence[int] = (LENGTH,) * ROWS, prompt: int = PROMPT) -> DataProto:
    generator = torch.Generator().manual_seed(0)
    return DataProto(
        {
            "temperature": torch.ones(len(lengths)),
            "input_ids": Ragged.from_rows([torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]),
            "response_mask": Ragged.from_rows([torch.arange(length) >= prompt for length in lengths]),
            "advantages": Ragged.from_rows([torch.randn(length - 1, generator=generator) / 1000 for length in lengths]),
        }
    )


def policy_gradient(outputs: MicroBatchOutputs, micro_batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    assert outputs.log_probs is not None
    loss = -(outputs.log_probs * micro_batch.columns["advantages"] * micro_batch.mask).sum()
    return loss, {"tokens": micro_batch.mask.sum()}


def turns(ours: Callable[[], Any], bare: Callable[[], Any], pairs: int) -> list[tuple[float, float]]:
    """Seconds of either side, pair by pair."""
    timed(ours), timed(bare)
    return [(timed(ours), timed(bare)) if turn % 2 else (timed(bare), timed(ours))[::-1] for turn in range(pairs)]


def timed(step: Callable[[], Any]) -> float:
    if dist.is_initialized():
        dist.barrier()
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# ---------------------------------------------------------------- the bare loop


class AttentionByHand(SdpaAttention):
    """What one would write for rows of one length, and for rows one behind the other."""

    def forward(self, query: Any, key: Any, value: Any, attention_mask: Any, *, packed_seq_params: Any = None, **_: Any) -> torch.Tensor:
        if packed_seq_params is None:
            return self._attend(*(part.permute(1, 2, 0, 3) for part in (query, key, value))).permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        rows = zip(*(part.transpose(0, 1).split(lengths, dim=1) for part in (query, key, value)), strict=True)
        return torch.cat([self._attend(*row).transpose(0, 1) for row in rows]).flatten(1)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=True)


class BareLoop:
    """The same model without the strategy."""

    def __init__(self, path: Path, layout: MegatronStrategyConfig) -> None:
        hf = read_hf_config(path)
        self.config = transformer_config(hf, layout, torch.float32, deterministic=False)
        parts = list(range(layout.virtual_pipeline_parallel)) if layout.virtual_pipeline_parallel > 1 else [None]
        models = [self._part(hf, part) for part in parts]
        bindings = bind(models, hf)
        for binding in bindings:
            if binding.entry.cut is not None and not hasattr(binding.parameter, "tensor_model_parallel"):
                tensor_parallel.set_tensor_model_parallel_attributes(binding.parameter, True, binding.entry.cut, 1)
        load_weights(bindings, hf, path, None, "model.path")
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        self.chunks = [DistributedDataParallel(self.config, ddp, model) for model in models]
        self.config.finalize_model_grads_func = sum_gradients
        options = MegatronOptimizerConfig(
            optimizer="adam", lr=OPTIMIZER.lr, weight_decay=0.0, clip_grad=1.0, use_distributed_optimizer=True,
            adam_beta1=OPTIMIZER.betas[0], adam_beta2=OPTIMIZER.betas[1],
        )  # fmt: skip
        self.optimizer = get_megatron_optimizer(options, self.chunks)

    def _part(self, hf: HfConfig, part: int | None) -> GPTModel:
        first = get_transformer_layer_offset(self.config, part)
        layers = [layer_spec(hf, first + number, Balance(0.0)) for number in range(get_num_layers_to_build(self.config, part))]
        for number, spec in enumerate(layers):
            spec.submodules.self_attention.submodules.core_attention = AttentionByHand
            if hf.has_experts(first + number):  # those of Megatron, which nobody counts
                spec.module = TransformerLayer
                spec.submodules.mlp = ModuleSpec(MoELayer, submodules=MoESubmodules(experts=TORCH.experts))
        model = GPTModel(
            self.config, TransformerBlockSubmodules(layer_specs=layers, layer_norm=TorchRMSNorm), hf.vocab_size, hf.max_positions,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=part),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=part),
            share_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_base=hf.rope.theta, vp_stage=part,
        )  # fmt: skip
        model.has_value_head = False
        return model

    def step(self, batches: Sequence[Any]) -> float:
        """The gradient norm."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=_forward_step, data_iterator=[iter(batches) for _ in self.chunks], model=self.chunks,
            num_microbatches=len(batches), seq_length=batches[0][0].shape[1], micro_batch_size=len(batches[0][0]),
        )  # fmt: skip
        return float(self.optimizer.step()[1])


def _forward_step(iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    ids, positions, weights, packing = next(iterator)
    return model(ids, positions, None, packed_seq_params=packing), partial(_loss, ids, weights)


def _loss(ids: torch.Tensor, weights: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    by_time = logits.transpose(0, 1)[:-1].clone(memory_format=torch.contiguous_format)
    nll = tensor_parallel.vocab_parallel_cross_entropy(by_time, ids.t()[1:].contiguous()).t()
    return (nll * weights).sum(), torch.zeros([], dtype=torch.int), {}


def same_length(micro: MicroBatch) -> Any:
    ids = micro.columns["input_ids"]
    return ids, torch.arange(ids.shape[1]).expand_as(ids), micro.columns["advantages"] * micro.mask, None


def one_behind_the_other(rows: DataProto, multiple: int) -> Any:
    """Filled up to a multiple of the ranks that share activations by one more row."""
    rest = -int(rows.lengths.sum()) % multiple
    lengths = torch.cat([rows.lengths, rows.lengths.new_full((min(rest, 1),), rest)])
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    weights = [
        torch.cat([advantages * mask[1:], advantages.new_zeros(1)])  # no token follows a row's last one
        for advantages, mask in zip(rows.ragged("advantages").rows(), rows.ragged("response_mask").rows(), strict=True)
    ]
    weights.append(torch.zeros(rest))
    longest = int(lengths.max())
    packing = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    ids = torch.cat([rows.ragged("input_ids").values, torch.zeros(rest, dtype=torch.long)])
    return ids[None], positions[None], torch.cat(weights)[None, :-1], packing


# ---------------------------------------------------------------- side by side


def rows_of(case: str, rows: int) -> DataProto:
    lengths = tail(2 * rows, 2 * LENGTH, TAIL) if case == "packed" else [LENGTH] * rows
    return make_rows(lengths, PROMPT if case == "prompts" else 0)


def planner_of(case: str, strategy: MegatronStrategy) -> MicroBatchPlanner:
    budget = TokenBudget(MICRO_BATCH * LENGTH, attention_parity_tokens=strategy.layout.attention_parity_tokens)
    return budget if case == "packed" else RowsAtATime(MICRO_BATCH)


def compare(path: Path, layout: MegatronStrategyConfig, case: str, rows: int, pairs: int) -> list[tuple[float, float]]:
    """Seconds of either side. Collective."""
    strategy = make_strategy(path, layout, OPTIMIZER)
    bare = BareLoop(path, layout)
    every = rows_of(case, rows)
    mine = every.take(range(strategy.layout.data_rank, len(every), strategy.layout.data_size))
    planner = planner_of(case, strategy)
    parts = list(strategy.plan(mine.lengths, planner).cut(mine))
    multiple = layout.tensor_parallel if layout.sequence_parallel else 1
    batches = [one_behind_the_other(part, multiple) if case == "packed" else same_length(padded(part)) for part in parts]
    norms: dict[str, float] = {}

    def ours() -> None:
        plan = strategy.plan(mine.lengths, planner)
        norms.setdefault("ours", strategy.train_step(mine, policy_gradient, ["log_probs"], plan).grad_norm)

    def by_hand() -> None:
        norms.setdefault("bare", bare.step(batches))

    found = turns(ours, by_hand, pairs)
    if not math.isclose(norms["ours"], norms["bare"], rel_tol=1e-4):
        raise SystemExit(f"{case}: different gradient norms, {norms['ours']} and {norms['bare']}")
    return found


def rank_main(rank: int, folder: Path, name: str, cases: Sequence[str], rows: int, pairs: int) -> None:
    torch.set_num_threads(1)
    ranks, layout = LAYOUTS[name]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / f"store-{name}"), ranks), rank=rank, world_size=ranks)
    model = folder / ("experts" if layout.expert_parallel > 1 else "model")
    found = {case: compare(model, layout, case, rows, pairs) for case in cases}
    if rank == 0:
        (folder / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=11, help="how often the two take turns (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=ROWS, help="samples of a step, of many lengths twice as many (default: %(default)s)")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="(default: all)")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="rows (default: all)")
    chosen = parser.parse_args()
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_model(folder / "model")
        make_model_with_experts(folder / "experts")
        for name in chosen.layouts:
            processes.spawn(rank_main, (folder, name, chosen.cases, chosen.rows, chosen.pairs), nprocs=LAYOUTS[name][0])
            found[name] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    ratios = {name: {case: _ratio(pairs) for case, pairs in of.items()} for name, of in found.items()}
    layout, case = chosen.layouts[0], chosen.cases[0]
    tokens, first = int(rows_of(case, chosen.rows).lengths.sum()), found[layout][case]
    result = {
        "name": "train_step",
        "ours": round(tokens / statistics.median(mine for mine, _ in first), 1),
        "peer": round(tokens / statistics.median(theirs for _, theirs in first), 1),
        "unit": "tokens/s",
        "ratio": ratios[layout][case],
        **({"ratio_with_prompts": ratios[layout]["prompts"]} if "prompts" in chosen.cases else {}),
        "ratios": ratios,
        "peer_is": "bare Megatron-Core loop in the same layout, 1 thread a process, float32, 5M parameters",
    }
    print(json.dumps(result))


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return round(statistics.median(theirs / mine for mine, theirs in pairs), 3)


if __name__ == "__main__":
    main()
