"""Makes the demo's toy data and its tiny base model. Seeded, one thread, a few minutes:

    python examples/models/make_tiny.py

1. The prompts of every domain are split into training and held-out ones and written to examples/data. The held-out ones are
   never trained on, neither here nor by RL.
2. A Qwen2-style model (one token per character, head_dim 32, tied embeddings) learns the training prompts with right answers.
3. It goes on with answers of which a good part is wrong: a shrug ("?") or a slip. Sampled at temperature 1 it is now right about
   half of the time, although its likeliest answer is nearly always right: just what RL can bring out.
4. The model is saved in Hugging Face format to examples/models/tiny, in fp32, and its accuracy on the held-out prompts is printed.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from tokenizers.pre_tokenizers import ByteLevel
from toy_domains import DOMAINS, SHRUG, Domain, Task, split, write_jsonl
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent
PAD, EOS = "<pad>", "<eos>"


@dataclass(frozen=True)
class Phase:
    """Some training steps: how many, how fast, and which share of the answers is a shrug or a slip."""

    steps: int
    lr: float
    shrugs: float = 0.0
    slips: float = 0.0


SEED = 1
ROWS = 192
"""Answers in one step, the domains in turn."""
RIGHT = Phase(steps=900, lr=3e-3)
NOISY = Phase(steps=250, lr=6e-4, shrugs=0.1, slips=0.3)


def make_tokenizer() -> Qwen2Tokenizer:
    """One token per byte: Qwen2's own byte-level tokenizer without a single merge.

    It has to be Qwen2's class: for a model of that type AutoTokenizer takes it whatever tokenizer_config.json says, and any other
    pre-tokenizer would silently be replaced by Qwen2's.
    """
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *sorted(ByteLevel.alphabet())])}
    return Qwen2Tokenizer(vocab=vocabulary, merges=[], unk_token=None, eos_token=EOS, pad_token=PAD, model_max_length=256)


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def answer(domain: Domain, task: Task, phase: Phase, random: Random) -> str:
    draw = random.random()
    if draw < phase.shrugs:
        return SHRUG
    if draw < phase.shrugs + phase.slips:
        return domain.slip(task, random)
    return domain.right(task, random)


def collate(tokenizer: Qwen2Tokenizer, pairs: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    """Right-padded prompts with answers; only the answers, EOS included, have labels."""
    prompts = [tokenizer(prompt)["input_ids"] for prompt, _ in pairs]
    answers = [[*tokenizer(answer)["input_ids"], tokenizer.eos_token_id] for _, answer in pairs]
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    input_ids = torch.full((len(pairs), width), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        input_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return {"input_ids": input_ids, "labels": labels}


def learning_rate(step: int, phase: Phase) -> float:
    """Linear warm-up over 50 steps, then linear decay to a tenth."""
    return phase.lr * min((step + 1) / 50, 1.0) * (1 - 0.9 * step / phase.steps)


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, tasks: dict[str, list[Task]], phase: Phase, random: Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01)
    names = list(tasks)
    started = time.monotonic()
    model.train()
    for step in range(phase.steps):
        pairs = []
        for row in range(ROWS):
            name = names[row % len(names)]
            task = random.choice(tasks[name])
            pairs.append((task.prompt, answer(DOMAINS[name], task, phase, random)))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, phase)
        # Padding stands on the right, where causal attention never looks: no attention mask is needed.
        loss = model(**collate(tokenizer, pairs)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:4d}/{phase.steps}  loss {loss.item():.3f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


@torch.inference_mode()
def sample(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, prompts: list[str], greedy: bool, max_tokens: int = 16) -> list[str]:
    batch = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
    options = {"do_sample": False} if greedy else {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    output = model.generate(**batch, max_new_tokens=max_tokens, **options)
    answers: list[str] = tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=EXAMPLES / "data", help="folder for the data files")
    parser.add_argument("--model", type=Path, default=EXAMPLES / "models" / "tiny", help="folder for the model")
    parser.add_argument("--steps", type=int, help="of each phase, in place of its own: to see whether everything runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random = Random(SEED)

    arguments.data.mkdir(parents=True, exist_ok=True)
    train_tasks, validation_tasks = {}, {}
    for name, domain in DOMAINS.items():
        train_tasks[name], validation_tasks[name] = split(domain.tasks(), random)
        write_jsonl(arguments.data / f"{name}_train.jsonl", train_tasks[name])
        write_jsonl(arguments.data / f"{name}_validation.jsonl", validation_tasks[name])

    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    for title, phase in (("right answers", RIGHT), ("noisy answers", NOISY)):
        print(title)
        train(model, tokenizer, train_tasks, replace(phase, steps=arguments.steps or phase.steps), random)
    model.save_pretrained(arguments.model)
    tokenizer.save_pretrained(arguments.model)
    for name, tasks in validation_tasks.items():
        prompts = [task.prompt for task in tasks]
        for greedy in (True, False):
            answers = sample(model, tokenizer, prompts, greedy)
            right = sum(DOMAINS[name].is_right(task, answer) for task, answer in zip(tasks, answers, strict=True))
            print(f"{name:8s} {'greedy' if greedy else 'sampled'}  {right / len(tasks):.2f}")


if __name__ == "__main__":
    main()
