r"""Reward `choice`: the response chooses one of several lettered options."""

from __future__ import annotations

from typing import Any, Literal

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.choice_statements import same_text, settled_on
from roll_lite.rewards.places import after_thinking, all_boxed, last_boxed, last_tagged, plain_boxes

Extract = Literal["auto", "boxed", "tagged"]


def choice(sample: RewardInput, *, extract: Extract = "auto", options: str = "options", letters: int = 26) -> Score:
    r"""1 where the chosen option is the reference answer (a letter, or an option's text), else 0; also where none or several are chosen.

    extract: where the choice stands, behind the last </think>. boxed: in the last \boxed{}. tagged: in the last <answer></answer>.
    auto: there, else the response that is nothing but a letter or an option's text, the last statement such as "the answer is C", "I
    choose option c" or "(C) is correct", the last line, the only "(C)", the option's text that ends the response. What is denied ("not
    B", "if the answer were B") is no choice, nor are the words A and I.
    options: the data column with the options' texts, a list in the letters' order or a dict by letter; without it letters count alone.
    letters: how many there are where there is no such column.
    """
    texts = _options(sample.columns.get(options), options)
    known = list(texts) or [chr(ord("A") + place) for place in range(max(1, min(26, letters)))]
    right = _reference(sample.answer, known, texts)
    chosen = sorted(_chosen(plain_boxes(after_thinking(sample.response)), extract, known, texts))
    if len(chosen) != 1:
        verdict = "no choice found" if not chosen else f"ambiguous: {', '.join(chosen)}"
        return Score(0.0, False, {"extracted": "", "verdict": verdict})
    correct = chosen[0] == right
    return Score(float(correct), correct, {"extracted": chosen[0], "verdict": "equal" if correct else "different"})


def _options(column: Any, name: str) -> dict[str, str]:
    if column is None:
        return {}
    if isinstance(column, dict):
        return {str(letter).strip().upper(): str(text) for letter, text in column.items()}
    if isinstance(column, list | tuple) and len(column) <= 26:
        return {chr(ord("A") + place): str(text) for place, text in enumerate(column)}
    raise RewardFailed(f"reward choice: column {name!r} must hold a list of at most 26 options or a dict by letter, got {column!r:.80}")


def _reference(answer: Any, known: list[str], texts: dict[str, str]) -> str:
    if isinstance(answer, str):
        letter = answer.strip().strip("()[].").upper()
        if letter in known:
            return letter
        same = [one for one, text in texts.items() if same_text(text) == same_text(answer)]
        if len(same) == 1:
            return same[0]
    raise RewardFailed(f"reward choice: the reference answer must be one of {', '.join(known)} or an option's text, got {answer!r:.80}")


def _chosen(response: str, extract: Extract, known: list[str], texts: dict[str, str]) -> set[str]:
    """The letters that the response settles on: one, none, or several where it hedges."""
    if extract == "boxed":
        return settled_on(last_boxed(response) or "", known, texts)
    tagged = last_tagged(response)
    if tagged is not None or extract == "tagged":
        return settled_on(tagged or "", known, texts)
    boxed: set[str] = set().union(*(settled_on(box, known, texts) for box in all_boxed(response)))
    return boxed or settled_on(response, known, texts)
