r"""Reward `choice`: the response chooses one of several lettered options."""

from __future__ import annotations

import re
from typing import Any, Literal

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed

Extract = Literal["auto", "boxed", "tagged"]

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
BOXED = re.compile(r"\\boxed\s*\{((?:[^{}]|\{[^{}]*\})*)\}")
WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|rm)\s*\{([^{}]*)\}")
LETTER = r"[\(\[]?\s*([A-Z])\s*(?:[\)\]]|(?![\w']))"
ALONE = re.compile(rf"(?:option|choice|answer)?\s*:?\s*{LETTER}\s*(?:[.:)](?=\s|$).*)?", re.DOTALL | re.IGNORECASE)
STATED = re.compile(
    r"\b(?:answer|option|choice|choose|select|pick)\b"
    r"(?:\s+(?:is|would be|should be|must be|option|choice|answer|the|correct))*\s*[:=]?\s*(?:option|choice)?\s*"
    rf"{LETTER}",
    re.IGNORECASE,
)
BRACKETED = re.compile(r"\(([A-Z])\)")
LONGEST_CAPTION = 200
"""Characters of text after "C." that still look like an option's and not like a discussion of it."""
HEDGED = re.compile(rf"\s*(?:,|/|or|and|&)\s*(?:option|choice)?\s*{LETTER}")


def choice(sample: RewardInput, *, extract: Extract = "auto", options: str = "options", letters: int = 26) -> Score:
    r"""1 where the chosen option is the reference answer (a letter, or an option's text), else 0; also where none or several are chosen.

    extract: where the choice stands. boxed: in the last \boxed{}. tagged: in the last <answer></answer>. auto: there, else in
    "Answer: C", "(C)", "C." or the response that is nothing but a letter or an option's text.
    options: the data column with the options' texts, a list in the letters' order or a dict by letter; without it letters count alone.
    letters: how many there are where there is no such column.
    """
    texts = _options(sample.columns.get(options), options)
    known = list(texts) or [chr(ord("A") + place) for place in range(max(1, min(26, letters)))]
    right = _reference(sample.answer, known, texts)
    chosen = sorted(_chosen(sample.response, extract, known, texts))
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
        same = [one for one, text in texts.items() if _normal(text) == _normal(answer)]
        if len(same) == 1:
            return same[0]
    raise RewardFailed(f"reward choice: the reference answer must be one of {', '.join(known)} or an option's text, got {answer!r:.80}")


def _chosen(response: str, extract: Extract, known: list[str], texts: dict[str, str]) -> set[str]:
    """The letters that the response settles on: one, none, or several where it hedges."""
    tags, boxes = TAGGED.findall(response), BOXED.findall(response)
    if extract != "boxed" and tags:
        return _meant(tags[-1], known, texts)
    if extract != "tagged" and boxes:
        return set().union(*(_meant(box, known, texts) for box in (boxes if extract == "auto" else boxes[-1:])))
    if extract != "auto":
        return set()
    if alone := _meant(response, known, texts):
        return alone
    text = _plain(response)
    matches = [one for one in STATED.finditer(text) if one[1].isupper() and one[1] in known]
    if not matches:
        bracketed = {letter for letter in BRACKETED.findall(text) if letter in known}
        return bracketed or _by_text(text, texts)
    last = matches[-1]
    hedge = HEDGED.match(text, last.end())
    return {last[1]} | ({hedge[1]} if hedge and hedge[1] in known else set())


def _meant(text: str, known: list[str], texts: dict[str, str]) -> set[str]:
    """Of a text that is nothing but the choice: a letter, perhaps with the option's text behind it, letters, or the option's text."""
    plain = _plain(text)
    same = {letter for letter, option in texts.items() if _normal(option) == _normal(plain)}
    if same:
        return same
    several = re.fullmatch(rf"\s*{LETTER}(?:\s*(?:,|/|;|or|and|&)?\s*{LETTER})+\s*\.?", plain)
    if several:
        return {letter for letter in re.findall(r"\b[A-Z]\b", plain) if letter in known}
    alone = ALONE.fullmatch(plain.strip())
    if alone is None or alone[1].upper() not in known:
        return set()
    letter = alone[1].upper()
    rest = plain.strip()[alone.end(1) :].lstrip(" )].:")
    if not rest or _normal(rest) == _normal(texts.get(letter, "")):
        return {letter}
    others = {one for one, option in texts.items() if _normal(option) == _normal(rest)}
    if others:
        return {letter} | others
    is_caption = not texts and alone[1].isupper() and len(rest) <= LONGEST_CAPTION and not BRACKETED.search(rest)
    return {letter} if is_caption else set()


def _by_text(text: str, texts: dict[str, str]) -> set[str]:
    """The option whose text ends the response."""
    end = _normal(text)
    fitting = {letter: _normal(option) for letter, option in texts.items() if _normal(option) and end.endswith(f" {_normal(option)}")}
    longest = max(map(len, fitting.values()), default=0)
    return {letter for letter, option in fitting.items() if len(option) == longest}


def _plain(text: str) -> str:
    return WRAPPED.sub(r"\1", text).replace("*", "").replace("$", "").strip()


def _normal(text: str) -> str:
    return " ".join(text.split()).strip(" .").casefold()
