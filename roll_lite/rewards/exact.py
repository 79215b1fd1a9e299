"""Reward `exact`: the response is the answer, character by character."""

from __future__ import annotations

import unicodedata
from typing import Any

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.base import RewardFailed

LONGEST_SHOWN = 200


def exact(
    sample: RewardInput,
    *,
    strip: bool = True,
    ignore_case: bool = False,
    collapse_spaces: bool = False,
    ignore_punctuation: bool = False,
    contains: bool = False,
) -> Score:
    """1 where response and answer are the same text, else 0. The answer may be a list: any of its entries counts.

    strip: white space at the ends does not matter. collapse_spaces: every run of white space is one blank. ignore_punctuation: without
    punctuation marks and symbols. contains: the answer may stand anywhere in the response.
    """

    def normal(text: str) -> str:
        text = "".join(one for one in text if unicodedata.category(one)[0] not in "PS") if ignore_punctuation else text
        text = " ".join(text.split()) if collapse_spaces else text
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    answers = sample.answer if isinstance(sample.answer, list | tuple) else [sample.answer]
    if not answers:
        raise RewardFailed("reward exact: the answer is an empty list")
    accepted = [normal(_text(answer)) for answer in answers]
    response = normal(sample.response)
    correct = any(answer in response for answer in accepted) if contains else response in accepted
    return Score(float(correct), correct, {"extracted": response[:LONGEST_SHOWN]})


def _text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    raise RewardFailed(f"reward exact: the answer must be a string, a number or a list of them, got {answer!r:.80}")
