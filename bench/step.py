"""Tokens per second of a whole GRPO step (weights to the engine, generation, rewards, training) against TRL's GRPOTrainer.

Both sides train the same model in one run, in turns, step by step: the same prompts, samples per prompt, micro-batch size, learning rate
and loss (one update per batch, no KL), float32, one thread of computing in each process. TRL generates with transformers, as it does
where there is no GPU. It lives in an environment of its own, which is made on demand (a few minutes, once) below ~/.cache/roll_lite,
with the versions of torch and transformers that this project is locked to.

The model has the shape of the shipped tiny one and random weights, but for its end of sequence, which is equally likely everywhere: without
that, lengths would be the model's mood. Three cases:

- short: exactly 12 tokens, by min_tokens = max_tokens = 12 (TRL: min_new_tokens and max_completion_length).
- medium: exactly 64, alike.
- tail: up to 512, geometric: every token ends the response with probability of about 1/100. Both sides draw their own lengths from that.

`ratio` is that of the tail: ours / TRL's, median over the rounds. `asynchronous` is ours with `rollout.supply: async`, where the engine
generates beside the training: for itself, because it would go on generating while TRL has its turn.

    .venv/bin/python bench/step.py [--rounds 3] [--prompts 32] [--samples 8] [--cases short medium tail]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
TINY = ROOT / "examples" / "models" / "tiny"
PROMPTS = ROOT / "examples" / "data" / "add_train.jsonl"
TRL = ["trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0", "torch", "transformers"]
MEAN_LENGTH = 100
MICRO_BATCH = 64
STALENESS = 2
ASYNCHRONOUS = ("rollout.supply=async", f"rollout.max_staleness={STALENESS}", "rollout.on_sync=abort")
REWARDED = 1000
"""The reward of a response is its length in characters, over this."""
LEARNING_RATE = 1e-6
"""Small, so that the model's end of sequence stays as likely as it is."""


@dataclass(frozen=True)
class Case:
    name: str
    max_tokens: int
    is_exact: bool
    """All responses have this length."""
    aim: float


CASES = [Case("short", 12, True, 1.0), Case("medium", 64, True, 1.5), Case("tail", 512, False, 6.0)]


def make_model(folder: Path) -> None:
    """The first channel of the hidden state is the same number everywhere, large beside the others, and the end of sequence is read from it
    alone: after the last norm its logit is a constant, and the other logits are about 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    config = AutoConfig.from_pretrained(TINY)
    config.update({"tie_word_embeddings": False, "max_position_embeddings": 1024})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        head = model.lm_head.weight
        head[:, 0] = 0.0
        head[config.eos_token_id] = 0.0
        others = config.vocab_size - 1
        head[config.eos_token_id, 0] = math.log(others / (MEAN_LENGTH - 1)) / math.sqrt(config.hidden_size)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# ---------------------------------------------------------------- ours


class Ours:
    """The pipeline of a run, driven step by step."""

    def __init__(self, config: Any, pipeline: Any) -> None:
        self.config, self.pipeline = config, pipeline
        self.steps = 0
        self.phases: list[dict[str, float]] = []

    def step(self) -> tuple[float, int]:
        """Seconds, and generated tokens."""
        self.steps += 1
        started = time.perf_counter()
        with redirect_stdout(sys.stderr), self.pipeline.journal.step(self.steps):
            self.pipeline.step()
        seconds = time.perf_counter() - started
        self.phases.append(self.pipeline.timers.last.labelled())
        return seconds, int(self.pipeline.journal.history.records[self.steps]["rollout/response_tokens"])


@contextmanager
def ours(case: Case, model: Path, folder: Path, prompts: int, samples: int, *supply: str) -> Iterator[Ours]:
    """`supply`: settings of it; each batch is generated when it is asked for where there are none."""
    from roll_lite.config.loading import load_config
    from roll_lite.distributed.ray_session import ray_session
    from roll_lite.pipeline.build import build
    from roll_lite.pipeline.journal import Journal

    config = load_config(
        "tiny_grpo",
        ROOT / "examples" / "configs",
        [
            f"model.path={model}",
            f"run_dir={folder}",
            f"rollout={{prompts_per_step: {prompts}, samples_per_prompt: {samples}}}",
            f"actor_infer.strategy.max_running_requests={prompts * samples}",
            f"actor_train={{micro_batch_size: {MICRO_BATCH}}}",
            f"actor_train.optimizer={{lr: {LEARNING_RATE}, betas: [0.9, 0.999]}}",
            f"domains.add.sampling={{max_tokens: {case.max_tokens}, min_tokens: {case.max_tokens if case.is_exact else 0}}}",
            f"domains.add.reward={{name: length, args: {{width: {REWARDED}}}}}",
            "~domains.make",
            "~domains.repeat",
            "~simulation.domains.make",
            *(supply or ["rollout.supply=sync"]),
            "validation.enabled=false",
            "batches.write=never",
            "trackers=[{name: jsonl}]",
        ],
    )
    journal = Journal(config, folder)
    journal.connect()
    with ray_session(config.ray, folder) as session:
        pipeline = build(config, folder, session, journal)
        yield Ours(config, pipeline)
        pipeline.close()


# ---------------------------------------------------------------- TRL


def trl_python() -> Path:
    """The interpreter of an environment with TRL, which is made where there is none yet."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "roll_lite"
    folder = cache / TRL[0].replace("==", "-")
    done = folder / "installed"
    python = folder / "bin" / "python"
    if not done.exists():
        print(f"installing {TRL[0]} into {folder} (a few minutes, once)", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        lock = ["-c", str(ROOT / "requirements" / "cpu.lock"), *shlex.split(os.environ.get("TORCH_ARGS", ""))]
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", "-qq", "install", *lock, *TRL], check=True)
        done.touch()
    return python


class Trl:
    """In a process of its own, which makes a step whenever it is told to."""

    def __init__(self, case: Case, model: Path, folder: Path, prompts: int, samples: int, rounds: int) -> None:
        settings = {
            "model": str(model),
            "folder": str(folder),
            "prompts": prompts,
            "samples": samples,
            "steps": rounds,
            "max_tokens": case.max_tokens,
            "min_tokens": case.max_tokens if case.is_exact else 0,
        }
        self._process = subprocess.Popen(
            [trl_python(), __file__, "--trl", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )
        assert self._read() == {"ready": True}

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "TRL's process has ended: what it said stands above"
        return json.loads(line)

    def step(self) -> tuple[float, int]:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        done = self._read()
        return done["seconds"], done["tokens"]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def be_trl(settings: dict[str, Any]) -> None:
    """Inside TRL's environment: a line comes in, a step is made, a line goes out. Whatever else is said goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    tokens = 0

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    def reward(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        nonlocal tokens
        tokens += sum(map(len, completion_ids))
        return [min(1.0, len(text) / REWARDED) for text in completions]

    class Turns(TrainerCallback):
        started = 0.0

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            tell(ready=True)

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            nonlocal tokens
            sys.stdin.readline()
            tokens, self.started = 0, time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            tell(seconds=time.perf_counter() - self.started, tokens=tokens)

    batch = settings["prompts"] * settings["samples"]
    config = GRPOConfig(
        output_dir=settings["folder"],
        max_steps=settings["steps"],
        per_device_train_batch_size=min(MICRO_BATCH, batch),
        gradient_accumulation_steps=max(1, batch // MICRO_BATCH),
        num_generations=settings["samples"],
        max_completion_length=settings["max_tokens"],
        generation_kwargs={"min_new_tokens": settings["min_tokens"]} if settings["min_tokens"] else None,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=0.2,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
    )
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(settings["model"], padding_side="left"),
        callbacks=[Turns()],
    )
    trainer.train()


# ---------------------------------------------------------------- both


def measure(case: Case, rounds: int, prompts: int, samples: int, model: Path, scratch: Path) -> dict[str, Any]:
    folders = [scratch / case.name / side for side in ("ours", "trl")]
    for folder in folders:
        folder.mkdir(parents=True)
    pairs: list[tuple[float, float]] = []
    peer = Trl(case, model, folders[1], prompts, samples, rounds + 2)
    try:
        with ours(case, model, folders[0], prompts, samples) as mine:
            for number in range(rounds + 1):
                speeds = []
                for side in (mine, peer) if number % 2 else (peer, mine):
                    seconds, tokens = side.step()
                    assert not case.is_exact or tokens == prompts * samples * case.max_tokens
                    speeds.append(tokens / seconds)
                if number:  # the first round warms both sides up
                    pairs.append((speeds[0], speeds[1]) if number % 2 else (speeds[1], speeds[0]))
            phases = {
                name: round(statistics.median(step.get(name, 0.0) for step in mine.phases[1:]), 3)
                for name in mine.phases[-1]
                if "/" not in name
            }
    finally:
        peer.close()
    return {
        "ours": round(statistics.median(own for own, _ in pairs), 1),
        "asynchronous": asynchronous(case, rounds, prompts, samples, model, scratch / case.name / "async"),
        "peer": round(statistics.median(theirs for _, theirs in pairs), 1),
        "ratio": round(statistics.median(own / theirs for own, theirs in pairs), 3),
        "phases": phases,
    }


def asynchronous(case: Case, rounds: int, prompts: int, samples: int, model: Path, folder: Path) -> float:
    """Tokens per second over the rounds as a whole: a batch may have been generated in the step before."""
    folder.mkdir()
    with ours(case, model, folder, prompts, samples, *ASYNCHRONOUS) as mine:
        for _ in range(1 + STALENESS):
            mine.step()
        seconds, tokens = zip(*(mine.step() for _ in range(2 * rounds)), strict=True)
    return round(sum(tokens) / sum(seconds), 1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=[case.name for case in CASES], choices=[case.name for case in CASES])
    parser.add_argument("--trl", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if (batch := chosen.prompts * chosen.samples) > MICRO_BATCH and batch % MICRO_BATCH:
        parser.error(
            f"{chosen.prompts} prompts x {chosen.samples} samples: more than {MICRO_BATCH} samples are cut into parts of {MICRO_BATCH}"
        )
    if chosen.trl is not None:
        be_trl(chosen.trl)
        return 0
    os.chdir(ROOT)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_model(model)
        for case in CASES:
            if case.name in chosen.cases:
                results[case.name] = measure(case, chosen.rounds, chosen.prompts, chosen.samples, model, Path(scratch))
                print(case.name, results[case.name], f"aim {case.aim}", flush=True)
    last = results[chosen.cases[-1]] if "tail" not in results else results["tail"]
    report = {
        "name": "step",
        "ours": last["ours"],
        "asynchronous": last["asynchronous"],
        "peer": last["peer"],
        "unit": "generated tokens/s of a whole step",
        "ratio": last["ratio"],
        **{f"{name}_{key}": result[key] for name, result in results.items() for key in ("ours", "asynchronous", "peer", "ratio")},
        "peer_is": f"{TRL[0]}, transformers' generate, 1 thread, float32",
    }
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
