"""Environments of the examples: a tool (tiny_calculator) and a game of several turns (tiny_guess)."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable

from roll_lite.environments.base import Message, Step, Task

OPERATORS: dict[type, Callable[[int, int], int]] = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
LONGEST = 40


def calculate(expression: str) -> str:
    """Compute the value of an expression.

    Args:
        expression: Whole numbers with + - and *.
    """
    if len(expression) > LONGEST:
        raise ValueError("the expression is too long")
    return str(_value(ast.parse(expression, mode="eval").body))


def _value(node: ast.expr) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](_value(left), _value(right))
    raise ValueError("only whole numbers with + - and *")


class Guess:
    """Game: guess a number. The fewer guesses, the higher the reward."""

    def __init__(self, per_guess: float = 0.08) -> None:
        """`per_guess`: what each guess after the first costs."""
        self.per_guess = per_guess
        self.guesses = 0

    def reset(self, task: Task) -> None:
        self.number = int(task.answer)

    def step(self, message: Message) -> Step:
        self.guesses += 1
        text = message["content"].strip()
        if not text.isdecimal() or len(text) > LONGEST:
            return Step("A number, please.")
        if int(text) == self.number:
            return Step(reward=1.0 - self.per_guess * (self.guesses - 1), done=True, correct=True)
        return Step("higher" if int(text) < self.number else "lower")
