from __future__ import annotations

import re
import unicodedata
from typing import Any

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import CUT, complete, finished, is_cut
from roll_lite.rewards.base import RewardFailed, RewardType

MARK = re.compile(r"((?<=\d)[.,:/](?=\d)|(?<!\w)-(?=\.?\d))|[^\w\s]|_")
LONGEST_SHOWN = 200


class ExactReward(RewardType):
    """Score 1 if the response equals the answer, character by character, else 0.

    The answer may be a list: any entry counts. Only the text after the last `</think>` is compared.

    ```yaml
    reward:
      name: exact
      args: {ignore_case: true, collapse_spaces: true}
    ```
    """

    reads_answer_first = True

    strip: bool = True
    """Ignore white space at both ends."""
    ignore_case: bool = False
    """Ignore case."""
    collapse_spaces: bool = False
    """Treat every run of white space as one blank."""
    ignore_punctuation: bool = False
    """Ignore punctuation and symbols, except those in numbers (-5, 3.14) and mathematical ones (`<`, +)."""
    contains: bool = False
    """Accept the answer anywhere in the response. Numbers must be whole: 5 is not in 15."""

    def __call__(self, sample: RewardInput) -> Score:
        answers = sample.answer if isinstance(sample.answer, list | tuple) else [sample.answer]
        given = list(map(_text, answers))
        accepted = list(map(self._normal, given))
        if not given or any(not one.strip() and (self.contains or text.strip()) for one, text in zip(accepted, given, strict=True)):
            raise RewardFailed(f"reward exact: the answer must have something in it that is compared, got {sample.answer!r:.80}")
        response = self._normal((finished if self.contains else complete)(sample))
        correct = any(_stands_in(answer, response) for answer in accepted) if self.contains else response in accepted
        cut = {"verdict": CUT} if is_cut(sample) and not correct else {}
        answer = None if self.contains else response
        return Score(float(correct), correct, {"extracted": response[:LONGEST_SHOWN], **cut}, answer=answer)

    def needs_answer(self) -> bool:
        return True

    def _normal(self, text: str) -> str:
        text = MARK.sub(_kept, text) if self.ignore_punctuation else text
        text = " ".join(text.split()) if self.collapse_spaces else text
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


def _kept(found: re.Match[str]) -> str:
    is_sign = unicodedata.category(found[0]) == "Sm"  # mathematical symbols stay: < is not >
    return found[0] if found[1] or is_sign else ""


def _stands_in(answer: str, response: str) -> bool:
    before = r"(?<![\d.])(?<!(?<!\w)-)" if answer[0].isdigit() else ""
    after = r"(?!\d|[.,]\d)" if answer[-1].isdigit() else ""
    return re.search(before + re.escape(answer) + after, response) is not None


def _text(answer: Any) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, int | float) and not isinstance(answer, bool):
        return str(answer)
    raise RewardFailed(f"reward exact: the answer must be a string, a number or a list of them, got {answer!r:.80}")
