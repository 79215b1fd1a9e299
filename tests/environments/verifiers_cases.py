"""Environments of the library verifiers, as its users write them."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Higher(vf.MultiTurnEnv):
    """Guess a number."""

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess = int(messages[-1]["content"])
        if guess == int(state["answer"]):
            state["found"] = True
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": "higher" if guess < int(state["answer"]) else "lower"}]


class Forgetful(Higher):
    """Keeps the first prompt only."""

    async def get_prompt_messages(self, state: Any) -> Any:
        return [{"role": "user", "content": f"Guess number {len(state['trajectory'])}."}]


def found(state: Any) -> float:
    return float(state.get("found", False))


def level(info: Any) -> float:
    return float(info["level"])


def compared(states: Any) -> list[float]:
    return [0.0 for _ in states]


def double(number: int) -> str:
    """Double a number.

    Args:
        number: Any whole number.
    """
    return str(2 * number)


def called(completion: Any) -> float:
    return float(sum(message["role"] == "tool" for message in completion))


def load_environment(kind: str = "higher") -> vf.Environment:
    data = Dataset.from_list([{"question": "Guess.", "answer": "3"}])
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=data, rubric=vf.Rubric(funcs=[called]), max_turns=5)
    if kind == "compared":
        return Higher(dataset=data, rubric=vf.Rubric(funcs=[compared]))
    cls = Forgetful if kind == "forgetful" else Higher
    return cls(dataset=data, rubric=vf.Rubric(funcs=[found, level], weights=[1.0, 0.1]), max_turns=5)
