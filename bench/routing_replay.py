"""How far engine and trainer are apart on the tokens of one batch, with each `algorithm.routing_replay`, for a model with experts.

A whole run of a step for each of none, train and rollout: SGLang generates, the trainer takes the old log-probs and makes four updates, in
bfloat16. The runs are deterministic, so that all of them have the same samples from the same weights. The model has random weights: its
routers have no favourites, and rounding sends more tokens elsewhere than in a trained one.

`mismatch` is between the engine's log-probs and the trainer's old ones, before any update. `rerouted`, of the first update, is the share of
the replayed choices that the trainer's router would have made otherwise with the same weights. `approx_kl` and `ratio_max`, over all
updates, are between the old log-probs and those in training.

`ours` is the mean mismatch with rollout, `peer` that with none; `ratio` is peer / ours.

    .venv/bin/python bench/routing_replay.py [--experts 16] [--layers 4] [--prompts 32] [--dtype bfloat16] [--quick]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "models" / "tiny"
OF_STEP = ("mismatch/mean", "mismatch/max", "mismatch/k3", "actor/approx_kl", "actor/ratio_max")


def make_model(folder: Path, experts: int, layers: int) -> None:
    """With the shipped model's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.15,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def run(word: str, model: Path, folder: Path, prompts: int, dtype: str) -> dict[str, float]:
    settings = [
        f"run_dir={folder}",
        f"model={{path: {model}, dtype: {dtype}}}",
        "steps=1",
        "deterministic=true",
        "actor_infer.strategy.name=sglang",
        f"rollout={{prompts_per_step: {prompts}, samples_per_prompt: 8, max_mismatch: null}}",
        "~domains.make",
        "~domains.repeat",
        "~simulation.domains.make",
        "validation.enabled=false",
        "checkpoint.export_model=false",
        "trackers=[{name: jsonl}]",
        # A random model earns nothing: what moves it is its entropy.
        "algorithm={old_log_probs: recompute, mini_batches: 4, entropy_coef: 0.3}",
        f"algorithm.routing_replay={word}",
        "actor_train.optimizer.lr=1e-3",
    ]
    script = ROOT / "examples" / "start_rlvr_pipeline.py"
    subprocess.run([sys.executable, script, "--config-name", "tiny_grpo", *settings], cwd=ROOT, check=True, stdout=sys.stderr)
    (step,), (first, *_) = (lines(folder / "latest" / name) for name in ("metrics.jsonl", "updates.jsonl"))
    found = {name.partition("/")[2] if "mismatch" not in name else name.replace("/", "_"): step[name] for name in OF_STEP}
    return found | {"rerouted": first["actor/rerouted"]} if word != "none" else found


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="none and rollout alone, on few samples")
    arguments = parser.parse_args()
    words = ("none", "rollout") if arguments.quick else ("none", "train", "rollout")
    with tempfile.TemporaryDirectory(prefix="rl-") as scratch:
        model = Path(scratch) / "model"
        make_model(model, arguments.experts, arguments.layers)
        prompts = 8 if arguments.quick else arguments.prompts
        found = {word: run(word, model, Path(scratch) / word, prompts, arguments.dtype) for word in words}
    for word, figures in found.items():
        print(f"{word:8s} " + "  ".join(f"{name} {value:.3g}" for name, value in figures.items()))
    peer, ours = (found[word]["mismatch_mean"] for word in ("none", "rollout"))
    print(json.dumps({"name": "routing_replay", "ours": ours, "peer": peer, "ratio": peer / ours, "figures": found}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
