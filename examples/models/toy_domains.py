"""The three toy domains of the demo: their prompts, how an answer is written, how an answer goes wrong.

    add      "12+34="     the sum                                  scored `math`
    make     "make 57:"   any expression with that value           scored `math`
    repeat   "3 of k:"    "kkk"                                    scored `exact`

Simple as they are, every domain has what matters: a right answer that a program can check, several hundred prompts, a held-out part,
and wrong answers that a model can learn to avoid. (For `make`, math-verify also accepts the bare "57". The model was never shown such
an answer and does not find it; a domain that must rule it out brings its own reward.)
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

HELD_OUT = 100
"""Validation prompts per domain."""

SHRUG = "?"
"""The answer of a model that gives up."""


@dataclass(frozen=True)
class Task:
    """One prompt with its reference answer (what the data file holds) and the numbers that it was made from."""

    prompt: str
    answer: str
    family: tuple[object, ...]
    """Tasks of one family (12+34 and 34+12) are held out together."""
    parts: tuple[int, ...]


@dataclass(frozen=True)
class Domain:
    tasks: Callable[[], list[Task]]
    right: Callable[[Task, Random], str]
    """A right answer; where there are many, any of them."""
    slip: Callable[[Task, Random], str]
    """A wrong answer of the kind that a careless person writes."""
    is_right: Callable[[Task, str], bool]


# ---------------------------------------------------------------- add


def add_tasks() -> list[Task]:
    numbers = range(1, 50)
    return [Task(f"{a}+{b}=", str(a + b), (min(a, b), max(a, b)), (a, b)) for a in numbers for b in numbers]


def add_right(task: Task, random: Random) -> str:
    return task.answer


def add_slip(task: Task, random: Random) -> str:
    return str(off(int(task.answer), random))


# ---------------------------------------------------------------- make


def make_tasks() -> list[Task]:
    return [Task(f"make {n}:", str(n), (n,), (n,)) for n in range(20, 420)]


def make_right(task: Task, random: Random) -> str:
    return expression(task.parts[0], random)


def make_slip(task: Task, random: Random) -> str:
    return expression(off(task.parts[0], random), random)


def make_is_right(task: Task, answer: str) -> bool:
    written = re.fullmatch(r"(\d+)([+-])(\d+)", answer)
    if written is None:
        return False
    left, sign, right = int(written[1]), written[2], int(written[3])
    return (left + right if sign == "+" else left - right) == task.parts[0]


def expression(value: int, random: Random) -> str:
    """value as a sum whose first operand is small: one of five."""
    small = random.randint(1, 5)
    return f"{small}+{value - small}"


# ---------------------------------------------------------------- repeat


def repeat_tasks() -> list[Task]:
    return [Task(f"{k} of {c}:", c * k, (k, c), (k,)) for k in range(2, 10) for c in string.ascii_letters]


def repeat_right(task: Task, random: Random) -> str:
    return task.answer


def repeat_slip(task: Task, random: Random) -> str:
    """Miscounted, or another letter."""
    count, letter = len(task.answer), task.answer[0]
    if random.random() < 0.7:
        return letter * max(1, count + random.choice((-2, -1, 1, 2)))
    return random.choice(string.ascii_letters) * count


# ---------------------------------------------------------------- all


def same(task: Task, answer: str) -> bool:
    return answer == task.answer


def off(value: int, random: Random) -> int:
    """A number near the value, never the value itself and never negative."""
    wrong = value + random.choice((-20, -10, -2, -1, 1, 2, 10, 20))
    return wrong if wrong > 0 else value + 1


DOMAINS = {
    "add": Domain(add_tasks, add_right, add_slip, same),
    "make": Domain(make_tasks, make_right, make_slip, make_is_right),
    "repeat": Domain(repeat_tasks, repeat_right, repeat_slip, same),
}


def split(tasks: list[Task], random: Random) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks. Whole families are held out; one task of each is kept for validation."""
    families = sorted({task.family for task in tasks}, key=repr)
    held_out = set(random.sample(families, HELD_OUT))
    train = [task for task in tasks if task.family not in held_out]
    validation = []
    for family in sorted(held_out, key=repr):
        validation.append(random.choice([task for task in tasks if task.family == family]))
    random.shuffle(train)
    random.shuffle(validation)
    return train, validation


def write_jsonl(path: Path, tasks: list[Task]) -> None:
    lines = [json.dumps({"prompt": task.prompt, "answer": task.answer}) for task in tasks]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
