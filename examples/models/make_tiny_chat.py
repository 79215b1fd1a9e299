"""Makes the tiny model that chats, and the data of its two tasks. Seeded, one thread, about twelve minutes:

    python examples/models/make_tiny_chat.py

    calculator   "7381+2946=?"                  a call of the tool `calculate`, its result, the answer "10327"
    guess        "Guess my number, 1 to 64."    "32", "higher", "48", "lower", ... until it is found

1. The tasks are split into training and held-out ones and written to examples/data. The held-out ones are never trained on.
2. A byte-level BPE tokenizer with Qwen2.5's control tokens learns its merges from conversations; it carries a chat template.
3. A Qwen2-style model learns pieces of the calculator's conversations in which something is copied: amid whole conversations it takes
   several times as long to learn that. Then come conversations of both tasks in which few turns go wrong: it calls the tool, and it
   bisects. Only the assistant's tokens have a loss.
4. It continues with conversations of which many turns go wrong: a sum is done in the head or copied badly, a call is no JSON, a guess
   forgets what was replied. Sampled at temperature 1 it now succeeds in about a third of the episodes: what RL can bring out.
5. The model is saved in Hugging Face format to examples/models/tiny_chat, in fp32.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from make_tiny import Phase, learning_rate
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer
from toy_domains import Task, off, split, write_jsonl
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

EXAMPLES = Path(__file__).resolve().parent.parent
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOOL_CALL = ("<tool_call>", "</tool_call>")
CONTROL = (PAD, START, END, *TOOL_CALL)
VOCABULARY = 416
MAX_LENGTH = 512
CALCULATOR_TASKS = 700
Family = tuple[object, ...]
"""Name of tasks that are held out together."""
SEED = 2
ROWS = 64
"""Conversations in one step."""
PART_ROWS = 16
"""Conversations in one pass."""
CORPUS = 2000
"""Conversations that the tokenizer learns from."""
COPIES = Phase(steps=400, lr=3e-3)
GOOD = Phase(steps=1000, lr=3e-3, slips=0.1)
SLOPPY = Phase(steps=350, lr=6e-4, slips=0.45)

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {%- set function = tool.function or tool %}
        {{- '\\n' + function.name + '(' + function.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content or not message.tool_calls %}
            {{- '\\n' + (message.content or '') }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set call = tool_call.function or tool_call %}
            {{- '\\n<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Qwen2.5's format, except that there is no default system message and that a tool is shown by its name and parameters only."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "description": "Value of an arithmetic expression.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
        },
    }
]
SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer with a number.", "Use the tool for sums.")
ERROR_WORDS = (
    *("error", "invalid", "malformed", "unknown", "missing", "JSON", "tool", "call", "calc", "arguments"),
    *("expression", "expected", "value", "object", "line", "column", "not", "is", "at"),
)
"""Words of an error message, at random: every environment words it differently, but none begins with a digit."""


@dataclass(frozen=True)
class Chat:
    messages: list[dict[str, str]]
    tools: list[dict[str, Any]] | None = None


# ---------------------------------------------------------------- calculator


def calculator_task(random: Random) -> Task:
    sign = random.choice("++-*")
    lengths = {"*": ((2, 3), (2,))}.get(sign, ((2, 3, 4), (3, 4)))
    a, b = (random.randrange(10 ** (length - 1), 10**length) for length in (random.choice(choice) for choice in lengths))
    a, b = (max(a, b), min(a, b)) if sign == "-" else random.sample((a, b), 2)
    return Task(f"{a}{sign}{b}=?", str(value(f"{a}{sign}{b}")), (sign, min(a, b), max(a, b)), (a, b))


def calculator_tasks(random: Random) -> list[Task]:
    tasks: dict[object, Task] = {}
    while len(tasks) < CALCULATOR_TASKS:
        task = calculator_task(random)
        tasks[task.family] = task
    return list(tasks.values())


def value(expression: str) -> int:
    for sign, operation in (("+", int.__add__), ("-", int.__sub__), ("*", int.__mul__)):
        left, found, right = expression.partition(sign)
        if found:
            return operation(int(left), int(right))
    raise ValueError(expression)


def calculator_chat(task: Task, slips: float, random: Random) -> Chat:
    """Conversation of at most three calls. Half have no tool in the prompt, as those of an agent's own script."""
    expression = task.prompt.removesuffix("=?")
    tools = TOOLS if random.random() < 0.5 else None
    result_role = "tool" if tools or random.random() < 0.5 else "user"
    messages = [*system_message(random), {"role": "user", "content": task.prompt}]
    for _ in range(3):
        draw = random.random()
        if draw < 0.55 * slips:
            answer = str(off(value(expression), random)) if random.random() < 0.5 else str(random.randrange(10, 20000))
            return Chat([*messages, assistant(answer)], tools)
        if draw < 0.75 * slips:
            messages += [assistant(broken_call(expression, random)), {"role": result_role, "content": error_message(random)}]
            continue
        copied = other_digit(expression, random) if draw < slips else expression
        result = str(value(copied))
        answer = other_digit(result, random) if random.random() < slips / 6 else result
        return Chat([*messages, assistant(tool_call(copied)), {"role": result_role, "content": result}, assistant(answer)], tools)
    return Chat(messages[:-1], tools)


def copying_chat(task: Task, slips: float, random: Random) -> Chat:
    """Piece of a conversation in which the assistant copies: the expression into a call, or a result into the answer."""
    if random.random() < 0.5:
        return Chat([{"role": "user", "content": task.prompt}, assistant(tool_call(task.prompt.removesuffix("=?")))])
    result = str(random.randrange(10 ** random.randint(1, 8)))
    return Chat([{"role": random.choice(("tool", "user")), "content": result}, assistant(result)])


def tool_call(expression: str) -> str:
    return f'<tool_call>\n{{"name": "calculate", "arguments": {{"expression": "{expression}"}}}}\n</tool_call>'


def broken_call(expression: str, random: Random) -> str:
    """Tool call without a brace, without a quote or with another name."""
    old, new = random.choice((("}}", "}"), (f'"{expression}"', expression), ('"calculate"', '"sum"')))
    return tool_call(expression).replace(old, new)


def error_message(random: Random) -> str:
    return random.choice(("", "Error: ")) + " ".join(random.sample(ERROR_WORDS, random.randint(2, 10)))


def other_digit(text: str, random: Random) -> str:
    """Text with one digit exchanged."""
    place = random.choice([index for index, character in enumerate(text) if character.isdigit()])
    digit = random.choice([digit for digit in "123456789" if digit != text[place]])
    return text[:place] + digit + text[place + 1 :]


# ---------------------------------------------------------------- guess

RANGES = (40, 50, 60, 64, 70, 80, 90, 100)
MAX_GUESSES = 7
"""Enough for bisection, which finds any of 127 numbers."""


def guess_tasks() -> list[Task]:
    return [guess_of(most, secret) for most in RANGES for secret in range(1, most + 1)]


def guess_task(random: Random) -> Task:
    most = random.choice(RANGES)
    return guess_of(most, random.randint(1, most))


def guess_of(most: int, secret: int) -> Task:
    return Task(f"Guess my number, 1 to {most}.", str(secret), (most, secret), (most, secret))


def guess_chat(task: Task, slips: float, random: Random) -> Chat:
    most, secret = task.parts
    low, high = 1, most
    messages = [*system_message(random), {"role": "user", "content": task.prompt}]
    for _ in range(MAX_GUESSES):
        guess = sloppy_guess(low, high, most, random) if random.random() < slips else near_the_middle(low, high, random)
        messages += [assistant(str(guess)), {"role": "user", "content": "higher" if guess < secret else "lower"}]
        if guess == secret:
            break
        low, high = (max(low, guess + 1), high) if guess < secret else (low, min(high, guess - 1))
    return Chat(messages[:-1])


def near_the_middle(low: int, high: int, random: Random) -> int:
    spread = (high - low) // 8
    return (low + high) // 2 + random.randint(-spread, spread)


def sloppy_guess(low: int, high: int, most: int, random: Random) -> int:
    """Guess that forgets one bound or both, or any number between them."""
    return random.randint(*random.choice(((1, most), (1, high), (low, most), (low, high))))


# ---------------------------------------------------------------- tokens


def system_message(random: Random) -> list[dict[str, str]]:
    return [{"role": "system", "content": random.choice(SYSTEM_MESSAGES)}] if random.random() < 0.2 else []


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def make_tokenizer(chats: list[Chat]) -> Qwen2Tokenizer:
    """Qwen2's byte-level tokenizer with merges learned from conversations; the control tokens come last, as in Qwen2.5."""
    letters = sorted(ByteLevel.alphabet())
    bare = tokenizer_of({letter: index for index, letter in enumerate(letters)}, [])
    learned = Tokenizer(BPE())
    learned.pre_tokenizer = bare.backend_tokenizer.pre_tokenizer
    trainer = BpeTrainer(vocab_size=VOCABULARY - len(CONTROL), initial_alphabet=letters, show_progress=False)
    control = re.compile("|".join(map(re.escape, CONTROL)))
    learned.train_from_iterator([text for chat in chats for text in control.split(render(bare, chat))], trainer)
    model = json.loads(learned.to_str())["model"]
    return tokenizer_of(model["vocab"], [tuple(merge) for merge in model["merges"]])


def tokenizer_of(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Qwen2Tokenizer:
    names = {"unk_token": None, "eos_token": END, "pad_token": PAD, "extra_special_tokens": [START], "model_max_length": MAX_LENGTH}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=merges, **names)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_CALL])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def render(tokenizer: Qwen2Tokenizer, chat: Chat) -> str:
    text: str = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False)
    return text


def collate(tokenizer: Qwen2Tokenizer, texts: list[str]) -> dict[str, torch.Tensor]:
    """Right-padded conversations; only the assistant's tokens, <|im_end|> included, have labels."""
    rows = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt", return_token_type_ids=False)["input_ids"]
    opening = torch.tensor(tokenizer(f"{START}assistant\n")["input_ids"])
    opens = (rows.unfold(1, len(opening), 1) == opening).all(2)
    labels = torch.full_like(rows, -100)
    for row, start in opens.nonzero().tolist():
        begin = start + len(opening)
        end = begin + (rows[row, begin:] == tokenizer.eos_token_id).nonzero()[0].item() + 1
        labels[row, begin:end] = rows[row, begin:end]
    return {"input_ids": rows, "labels": labels}


# ---------------------------------------------------------------- training


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


Source = tuple[Callable[[Random], Task], Callable[[Task, float, Random], Chat]]
"""Functions that draw a task, and a conversation about it with a share of slips."""
COPYING: list[Source] = [(calculator_task, copying_chat)]
TALKING: list[Source] = [(calculator_task, calculator_chat), (guess_task, guess_chat)]


def draw_chat(source: Source, held_out: set[Family], slips: float, random: Random) -> Chat:
    """Conversation about a task that is not held out."""
    draw, chat = source
    while (task := draw(random)).family in held_out:
        pass
    return chat(task, slips, random)


def step_texts(
    tokenizer: Qwen2Tokenizer, sources: list[Source], held_out: set[Family], phase: Phase, random: Random
) -> Iterator[list[str]]:
    """Yield the conversations of every step, the sources in turn."""
    for _ in range(phase.steps):
        yield [render(tokenizer, draw_chat(sources[row % len(sources)], held_out, phase.slips, random)) for row in range(ROWS)]


def train(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, steps: Iterator[list[str]], phase: Phase) -> None:
    """Train on the texts of every step: passes over parts of similar length, which need little padding, and one update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=phase.lr, betas=(0.9, 0.98), weight_decay=0.01)
    started = time.monotonic()
    model.train()
    for step, texts in enumerate(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, phase)
        texts.sort(key=len)
        parts = [collate(tokenizer, texts[start : start + PART_ROWS]) for start in range(0, len(texts), PART_ROWS)]
        count = sum(int((part["labels"] >= 0).sum()) for part in parts)
        total = 0.0
        for part in parts:
            # Padding stands on the right, where causal attention never looks: no attention mask is needed.
            loss = model(**part, num_items_in_batch=count).loss
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4d}/{phase.steps}  loss {total:.3f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=EXAMPLES / "data", help="folder for the data files")
    parser.add_argument("--model", type=Path, default=EXAMPLES / "models" / "tiny_chat", help="folder for the model")
    parser.add_argument("--steps", type=int, help="of each phase, in place of its own: to see whether everything runs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    random = Random(SEED)

    arguments.data.mkdir(parents=True, exist_ok=True)
    held_out = set()
    for name, tasks in (("calculator", calculator_tasks(random)), ("guess", guess_tasks())):
        train_tasks, validation_tasks = split(tasks, random)
        write_jsonl(arguments.data / f"{name}_train.jsonl", train_tasks)
        write_jsonl(arguments.data / f"{name}_validation.jsonl", validation_tasks)
        held_out |= {task.family for task in validation_tasks}

    tokenizer = make_tokenizer([draw_chat(source, held_out, SLOPPY.slips, random) for source in TALKING for _ in range(CORPUS // 2)])
    model = make_model(tokenizer)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    for title, sources, phase in (("copies", COPYING, COPIES), ("good turns", TALKING, GOOD), ("sloppy turns", TALKING, SLOPPY)):
        print(title)
        phase = replace(phase, steps=arguments.steps or phase.steps)
        # Seeded by its own name, so that a change of one phase leaves the conversations of the others as they are.
        train(model, tokenizer, step_texts(tokenizer, sources, held_out, phase, Random(f"{SEED} {title}")), phase)
    model.save_pretrained(arguments.model)
    tokenizer.save_pretrained(arguments.model)


if __name__ == "__main__":
    main()
