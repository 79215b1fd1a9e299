r"""Reward `choice`: the response chooses one of several lettered options."""

from __future__ import annotations

import string
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import finished, last_boxed, last_boxes, last_tagged, narrow, plain_boxes
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.references import written
from roll_lite.rewards.reward_type import RewardType
from roll_lite.rewards.text.choice_statements import same_text, settled_on

ALPHABET = string.ascii_uppercase
Extract = Literal["auto", "boxed", "tagged"]


class ChoiceReward(RewardType):
    """The response chooses one of several lettered options: 1 if it is the reference answer, else 0, also if none or several are chosen.

    The reference answer: a letter (C), an option's text (Berlin), both (C. Berlin), a label of the column `options`, or, if that is a list,
    the option's index from 0 (MMLU).

    ```yaml
    reward:
      name: choice            # "The answer is (C)." against "C", or against that option's text
      args: {options: choices, letters: 4}
    ```
    """

    reads_answer_first = True

    extract: Extract = "auto"
    r"""Place of the choice, after the last `</think>`. boxed: in the last `\boxed{}`. tagged: in the last `<answer></answer>`. auto: there,
    else, in this order: a response that is only a letter or an option's text; the last statement such as "the answer is C", "I choose
    option c", 选C or "(C) is correct"; the last line; the only "(C)"; the option's text that ends the response. A denied option ("not B",
    "if the answer were B", 不选B) is no choice, nor are the words A and I. Only the last 10,000 characters are read.
    """
    options: str = "options"
    """Column with the options' texts: a list in the letters' order, a dict by letter, or `{"text": [...], "label": [...]}` as in ARC and
    CommonsenseQA. Without it only letters count. If labels are not letters (1 to 4 in a few rows of ARC), the options are A, B, C and so on
    in order; the prompt should name them so.
    """
    letters: Annotated[int, Field(ge=1, le=26)] = 26
    """Number of options if no column lists them."""

    def __call__(self, sample: RewardInput) -> Score:
        texts, labels = _options(sample.columns.get(self.options), self.options)
        known = list(texts) or list(ALPHABET[: self.letters])
        right = _reference(sample.answer, known, texts, labels)
        response = narrow(plain_boxes(finished(sample)))
        chosen = sorted(_chosen(response, self.extract, known, texts))
        if len(chosen) != 1:
            verdict = "no choice found" if not chosen else f"ambiguous: {', '.join(chosen)}"
            return Score(0.0, False, {"extracted": "", "verdict": verdict}, answer="")
        correct = chosen[0] == right
        details: dict[str, float | str] = {"extracted": chosen[0], "verdict": "equal" if correct else "different"}
        return Score(float(correct), correct, details, answer=chosen[0])

    def needs_answer(self) -> bool:
        return True

    def named_columns(self) -> dict[str, tuple[str, ...]]:
        return {"options": (self.options,)} if "options" in self.model_fields_set else {}

    def response_for(self, answer: Any) -> str | None:
        return written(answer, self.extract)


def _options(column: Any, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """The options' texts by letter, and the letters by label; no labels if the column is a list."""
    if column is None:
        return {}, {}
    labels, texts = None, column
    if isinstance(column, dict):
        named = set(column) == {"text", "label"}
        labels, texts = (column["label"], column["text"]) if named else (list(column), list(column.values()))
    if not all(isinstance(one, list | tuple) and len(one) <= len(ALPHABET) for one in (texts, labels or [])):
        raise RewardFailed(
            f"reward choice: column {name!r} must hold a list of at most 26 options, a dict by letter, "
            f"or a dict of the lists text and label, got {column!r:.80}"
        )
    if labels is None:
        return {letter: str(text) for letter, text in zip(ALPHABET, texts, strict=False)}, {}
    if len(labels) != len(texts):
        raise RewardFailed(f"reward choice: column {name!r} has {len(texts)} texts and {len(labels)} labels: {column!r:.80}")
    plain = [str(label).strip().upper() for label in labels]
    letters = plain if all(len(label) == 1 and label in ALPHABET for label in plain) else list(ALPHABET[: len(plain)])
    return {letter: str(text) for letter, text in zip(letters, texts, strict=True)}, dict(zip(plain, letters, strict=True))


def _reference(answer: Any, known: list[str], texts: dict[str, str], labels: dict[str, str]) -> str:
    if isinstance(answer, int) and not isinstance(answer, bool):
        if str(answer) in labels:
            return labels[str(answer)]
        if texts and not labels and 0 <= answer < len(known):
            return known[answer]
    if isinstance(answer, str):
        letter = answer.strip().strip("()[].").upper()
        if letter in labels or letter in known:
            return labels.get(letter, letter)
        same = [one for one, text in texts.items() if same_text(text) == same_text(answer)] or list(settled_on(answer, known, texts))
        if len(same) == 1:
            return same[0]
    raise RewardFailed(
        f"reward choice: the reference answer must be one of {', '.join(labels or known)}, an option's text, "
        f"or with a list of options its place as an integer, counted from 0, got {answer!r:.80}"
    )


def _chosen(response: str, extract: Extract, known: list[str], texts: dict[str, str]) -> set[str]:
    """Letters that the response settles on: several if it hedges."""
    if extract == "boxed":
        return settled_on(last_boxed(response) or "", known, texts)
    tagged = last_tagged(response)
    if tagged is not None or extract == "tagged":
        return settled_on(tagged or "", known, texts)
    boxed: set[str] = set().union(*(settled_on(box, known, texts) for box in last_boxes(response)))
    return boxed or settled_on(response, known, texts)
