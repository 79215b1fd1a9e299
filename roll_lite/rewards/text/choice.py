r"""Reward `choice`: the response chooses one of several lettered options."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import finished, last_boxed, last_boxes, last_tagged, narrow, plain_boxes
from roll_lite.rewards.base import RewardFailed
from roll_lite.rewards.reward_type import RewardType, written

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


LONGEST_TEXT, LONGEST_CAPTION, WINDOW = 10_000, 200, 100
"""Maximum characters: read, from the end; of a caption behind a letter; read in front of a mention."""
WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|rm|bf|boxed)\s*\{([^{}]*)\}")
MARKS = re.compile(r"^[ \t]*#+|[*`$\"“”]|\\[()\[\]]|(?<!\w)['‘](?=[A-Za-z]['’])|(?<=(?<!\w)[A-Za-z])['’](?!\w)", re.MULTILINE)
BLANK = r"\s+"
BLANKS = re.compile(r"\\[ ,;:!]|\\quad|~")

IS = r"(?:\bis|['’]s|\bwas|\b(?:would|should|must|will|has\s+to)\s+be|[:=→⇒]|->|=>|[-–—](?=\s))"
DENIAL = r"(?:\b(?:not|never|cannot|neither|nor|wrong|incorrect)\b|n['’]t\b)"
FILL = r"definitely|clearly|indeed|probably|most\s+likely|both|either|the|an?|correct|right|best|option|choice|answer|letter"
FRONT = {
    "stated": rf"(?:\b(?:answer|ans|response|option|choice|selection|solution)\b(?:(?!{DENIAL})[^.:=;!?\n]){{0,60}}?\s*{IS}|\bit\s*{IS}"
    r"|\b(?:choos(?:e|ing)|select|pick|go(?:ing)?\s+with|settle\s+on|mean|make\s+that|correction)\b|\bnot\s+\(?[A-Z]\)?,?\s+but\b"
    rf"|(?:答案|选项|结果)\s*应?该?\s*[是为:]|选择?|选取)(?:\s*(?:\b(?:{FILL})\b|:|选项))*+\s*",
    "revised": r"\b(?:actually|wait|hence|thus|therefore|so)\b[\s,:—-]*(?:no\b[\s,:—-]*)?",
    "denied": rf"(?:{DENIAL}|\b(?:if|whether|unless|doubt|false|than|instead\s+of|eliminate|exclude|reject)\b)"
    r"(?![^.,;:!?\n]*\bbut\b)[^.,;:!?\n]*|(?:[不别勿非]|排除|如果|假如|假设)[是能应该要可选择\s]*"
    r"|\b(?:people|students|some(?:one|body)?|many|most|others|they|one|you)\s+(?:\w+\s+){0,2}"
    r"(?:think|say|said|believe|assume|claim|guess|argue|answer|choose|pick)\b[^.,;:!?\n]*",
    "named": r"\b(?:option|choice|letter)\s*:?\s*",
}
BEHIND = {
    "stated": r"\s*(?:is|must\s+be|would\s+be|(?:fits|matches|suits|seems|sounds|looks)(?:\s+(?:to\s+be|like))?)\s+"
    r"(?:(?:clearly|the|indeed|therefore)\s+)*(?:correct|right|best|true|answer)\b",
    "denied": r"[\s,]*(?:(?:is|are|was|can|could|would|does|do|must|looks|seems)\s*(?:be\s+)?(?:(?:also|all|both)\s+)?"
    r"(?:not|n['’]t|wrong|incorrect|false|out|impossible|eliminated|unlikely)\b|\w+n['’]t\b|cannot\b|(?:选项)?\s*是?\s*(?:错|不))",
    "ended": r"\s*(?:[.,;:!?)\]/]|$|\n)",
    "continued": r"\s+(?:[^a-z\s]|(?:and|or|because|since|as|for|but|so|which|that|is|was|in|on|by|due|not|rather|instead|if|then|fits"
    r"|matches|seems|looks)\b)",
    "possible": r"\s+(?:is|may\s+be|might\s+be|could\s+be)\s+(?:also|equally)\s+(?:possible|correct|right|true|valid|plausible)\b",
    "discussed": r"\s*(?:is|was|are|can|cannot|can['’]t|does|would|being)\b",
}
"""Words in front of or behind a mention that state or deny it. A bare letter needs them, as it may be a word."""
FRONTS = {name: re.compile(rf"(?:{pattern})\Z", re.IGNORECASE) for name, pattern in FRONT.items()}
BEHINDS = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in BEHIND.items()}
HEDGE = re.compile(
    r"(?:\s*[,/&或和]|[\s.;,]*\b(?:or|and|but|alternatively|maybe|perhaps|possibly|even)\b[\s,]*)+(?:(?:option|choice)\b)?\s*",
    re.IGNORECASE,
)
"""Text between a choice and a second one that makes it ambiguous."""
BESIDE = re.compile(r"(?:\s|[.,;:()\[\]{}/&或和]|\b(?:or|and|the|correct|options?|choice|answer|both|either)\b)*", re.IGNORECASE)
"""Text that may surround the mentions in a text that is only a choice."""


def settled_on(text: str, known: Sequence[str], texts: dict[str, str]) -> set[str]:
    """Letters of the options that a text settles on: one, none, or several if it hedges."""
    plain, texts = _plain(text[-LONGEST_TEXT:]), _without_marks(texts)
    options = _mentions("".join(known), tuple(texts.items()))

    def letter(one: re.Match[str]) -> str:
        group = str(one.lastgroup)
        return group.removeprefix("text") if is_text(one) else one[group].upper()

    def is_text(one: re.Match[str]) -> bool:
        return str(one.lastgroup).startswith("text")

    def front(name: str, one: re.Match[str]) -> bool:
        return FRONTS[name].search(one.string[max(0, one.start() - WINDOW) : one.start()]) is not None

    def behind(name: str, one: re.Match[str]) -> bool:
        return BEHINDS[name].match(one.string, one.end()) is not None

    def is_denied(one: re.Match[str]) -> bool:
        return front("denied", one) or behind("denied", one)

    def is_stated(one: re.Match[str]) -> bool:
        if one["bare"] and one["bare"].islower() and not behind("ended", one) and not front("named", one):
            return False
        if one["bare"] in ("A", "I") and not any(behind(name, one) for name in ("ended", "continued", "stated")):
            return False
        by_letter = not is_text(one) and (behind("stated", one) or (front("revised", one) and behind("ended", one)))
        return (front("stated", one) or by_letter) and not is_denied(one)

    def alone(part: str) -> set[str]:
        """Options of a text that names nothing else, or the letter of a captioned option."""
        found = list(options.finditer(part))
        is_caption = found and not texts and len(part) < LONGEST_CAPTION and re.match(r"[(\[]?[A-Z](?:[.:](?=\s)|[)\]])", part)
        if (is_caption and len({letter(one) for one in found}) == 1) or BESIDE.fullmatch(options.sub(" ", part)):
            return {letter(one) for one in found}
        return set()

    mentions = list(options.finditer(plain))
    stated: set[str] = set()
    for one, following in zip_longest(mentions, mentions[1:]):
        if is_stated(one):
            stated = {letter(one)}
            is_hedged = following and HEDGE.fullmatch(plain, one.end(), following.start()) and not behind("discussed", following)
            stated |= {letter(following)} if following and (is_hedged or behind("possible", following)) else set()
    if stated or (stated := alone(plain) if "\n" not in plain else stated):
        return stated
    lines = [alone(line) for line in plain.splitlines() if line.strip()]
    captions = [min(line) for line in lines if len(line) == 1]
    if captions and (len(set(captions)) == 1 or (lines[-1] and captions.count(captions[-1]) > 1)):
        return {captions[-1]}
    marked = {letter(one) for one in mentions if one["marked"] and not is_denied(one)}
    if marked or (captions and texts):
        return set() if captions and texts else marked
    end = len(plain.rstrip(" ."))
    for one in reversed(mentions):  # an option's text that ends the response, with the options listed before it
        is_last = not plain[one.end() : end].strip() or (stated and HEDGE.fullmatch(plain, one.end(), end))
        if not is_last or not is_text(one) or is_denied(one):
            break
        stated, end = stated | {letter(one)}, one.start()
    return stated


@lru_cache(maxsize=1024)
def _mentions(letters: str, texts: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    longest_first = sorted(
        ((letter, text.strip(" .").split()) for letter, text in texts), key=lambda one: len("".join(one[1])), reverse=True
    )
    written = "|".join(rf"(?P<text{letter}>{BLANK.join(map(re.escape, words))})" for letter, words in longest_first if words) or "(?!)"
    return re.compile(
        rf"[(\[{{]\s*(?P<marked>[{letters}])\s*[)\]}}]|(?<![\w./^−-])(?:{written})(?![\w+#-]|['’]\w|\s*[./^*]\s*[\d{{])"
        rf"|(?<![\w'’.])(?P<bare>[{letters}])(?![\w+#]|['’]\w|-\w|\.\w)",
        re.IGNORECASE,
    )


def same_text(text: str) -> str:
    """Normal form for comparing options."""
    return " ".join(text.split()).strip(" .").casefold()


def _without_marks(texts: dict[str, str]) -> dict[str, str]:
    """Options normalized like a response, unless that would make two of them equal."""
    plain = {letter: _plain(narrow(text)) for letter, text in texts.items()}
    return plain if len(set(plain.values())) == len(set(texts.values())) else texts


def _plain(text: str) -> str:
    for _ in range(3):
        text = WRAPPED.sub(r"\1", text)
    return MARKS.sub("", BLANKS.sub(" ", text)).strip()
