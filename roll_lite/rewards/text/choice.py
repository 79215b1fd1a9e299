from __future__ import annotations

import re
import string
from functools import lru_cache
from typing import Annotated, Any, Literal

from pydantic import Field

from roll_lite.data.boxes import last_boxed, plain_boxes
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import finished, last_boxes, last_tagged, narrow
from roll_lite.rewards.base import RewardFailed, RewardType, written

ALPHABET = string.ascii_uppercase
Extract = Literal["auto", "boxed", "tagged"]


class ChoiceReward(RewardType):
    """Score 1 if the response chooses the right one of several lettered options, else 0; choosing several scores 0.

    The reference answer may be a letter (C), an option's text (Berlin), both (C. Berlin) or, if the data has a column with the options, an
    option's label there. If that column is a plain list, the option's index from 0 (MMLU) works too.

    ```yaml
    reward:
      name: choice            # "The answer is (C)." against "C", or against that option's text
      args: {options: choices, letters: 4}
    ```
    """

    reads_answer_first = True

    extract: Extract = "auto"
    r"""Part of the response that is the choice; only text after the last `</think>` counts. boxed: the last `\boxed{}`. tagged:
    the last `<answer></answer>`. auto: the tag, else the box, else the last [statement](#choices-without-a-mark) of a choice. Denied
    options do not count. Only the last 10,000 characters are read."""
    options: str = "options"
    """Column with the options' texts: a list in the order of the letters, a dict by letter, or `{"text": [...], "label": [...]}` as in ARC
    and CommonsenseQA. Without it, and for options whose texts differ only in case, only letters count as a choice. If the labels are not
    letters (1 to 4 in some rows of ARC), the options are lettered A, B, C; the prompt should show these letters."""
    letters: Annotated[int, Field(ge=1, le=26)] = 26
    """Number of options if no column lists them."""

    def __call__(self, sample: RewardInput) -> Score:
        options, names = _options(sample.columns.get(self.options), self.options, self.letters)
        right = _reference(sample.answer, options, names)
        chosen = sorted(_chosen(narrow(plain_boxes(finished(sample))), self.extract, options))
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


def _options(column: Any, name: str, letters: int) -> tuple[dict[str, str], dict[str | int, str]]:
    """Return {letter: option's text} (empty without a column), and {letter, label or list index: letter}."""
    column = dict.fromkeys(ALPHABET[:letters], "") if column is None else column
    labels, texts = None, column
    if isinstance(column, dict):
        labels, texts = (column["label"], column["text"]) if set(column) == {"text", "label"} else (list(column), list(column.values()))
    lists = (texts, texts if labels is None else labels)
    if not all(isinstance(one, list | tuple) and len(one) == len(texts) <= len(ALPHABET) for one in lists):
        raise RewardFailed(
            f"reward choice: column {name!r} must hold a list of at most 26 options, a dict by letter, "
            f"or a dict of the lists text and label, which are equally long, got {column!r:.80}"
        )
    names = list(range(len(texts))) if labels is None else [str(label).strip().upper() for label in labels]
    known = [str(one) for one in names] if set(names) <= set(ALPHABET) else ALPHABET[: len(texts)]
    return dict(zip(known, map(str, texts), strict=True)), {**dict(zip(known, known, strict=True)), **dict(zip(names, known, strict=True))}


def _reference(answer: Any, options: dict[str, str], names: dict[str | int, str]) -> str:
    if isinstance(answer, str | int) and not isinstance(answer, bool):
        letter = names.get(answer) or names.get(str(answer).strip().strip("()[].").upper())
        if letter is not None:
            return letter
    if isinstance(answer, str):
        same = [one for one, text in options.items() if _same(text) == _same(answer)] or list(chosen_letters(answer, options))
        if len(same) == 1:
            return same[0]
    raise RewardFailed(
        f"reward choice: the reference answer must be one of {', '.join(options)}, an option's label or text, "
        f"or with a list of options its place as an integer, counted from 0, got {answer!r:.80}"
    )


def _chosen(response: str, extract: Extract, options: dict[str, str]) -> set[str]:
    if extract == "boxed":
        return chosen_letters(last_boxed(response) or "", options)
    tagged = last_tagged(response)
    if tagged is not None or extract == "tagged":
        return chosen_letters(tagged or "", options)
    return set().union(*(chosen_letters(box, options) for box in last_boxes(response))) or chosen_letters(response, options)


LONGEST_TEXT = 10_000
WRAPPED = re.compile(r"\\(?:text\w*|math\w*|rm|bf|boxed)\s*\{([^{}]*)\}|(?<!\w)['‘]([A-Za-z])['’](?!\w)")
MARKS = re.compile(r"^[ \t]*#+|[*`$\"“”⟦⟧]|\\[()\[\]]", re.MULTILINE)
BLANKS = re.compile(r"\\[ ,;:!]|\\quad|~")

# Options are first replaced by marks such as ⟦Cb⟧: the letter, then b (bare letter), m (marked, as in "(C)") or t (the option's text).
X = "⟦[A-Z][bmt]⟧"
ENDED = r"\s*(?:[.,;:!?)\]/]|\Z|\n)"
RIGHT = r"\s*(?:is|(?:must|would)\s+be|(?:fits|seems)(?:\s+to\s+be)?)\s+(?:the\s+)?(?:correct|right|best|true|answer)\b"
CONTINUED = r"\s+(?:[^a-z\s]|(?:and|or|because|since|as|for|but|so|which|that|is|was|in|on|by|due|not|rather|instead|if|then)\b)"
"""Text after A or I that shows it is an option, not a word."""
DENIAL = r"(?:\b(?:not|never|cannot|neither|nor|wrong|incorrect)\b|n['’]t\b)"
DENIED = re.compile(
    rf"(?i)(?:{DENIAL}|\b(?:if|whether|unless|than|instead\s+of)\b"
    r"|\b(?:people|many|most|others|some|one|you)\s+(?:\w+\s+){0,2}(?:think|say|believe|choose|pick)\b)(?:(?!\bbut\b)[^.,;:!?\n])*"
    rf"|[不别非]\s*选?\s*{X}"
)
IS = r"(?:\bis|['’]s|\b(?:would|must|will)\s+be|(?<!⟧)(?:[:=→⇒]|[-=]>|[-–—](?=\s)))"
HEDGE = r"(?:[\s.;]*(?:[,/&或和]|\b(?:or|and|but|alternatively|maybe|perhaps|possibly)\b))++\s*(?:(?:option|choice|letter|statement)\b\s*)?"
DISCUSSED = r"\s*(?:is|was|are|can|cannot|does|would|being)\b"
POSSIBLE = r"\s+(?:is|(?:may|might|could)\s+be)\s+(?:also|equally)\s+(?:possible|correct|right|true)\b"
STATED = re.compile(
    rf"(?i)(?=(?:(?:\b(?:answer|ans|response|option|choice)\b(?:(?!{DENIAL})[^.:=;!?\n]){{0,60}}\s*{IS}|\bit\s*{IS}|答案\s*[是为:]|选择?"
    r"|\b(?:choose|select|pick|go(?:ing)?\s+with)\b)"
    r"(?:\s*(?:\b(?:definitely|not\s+⟦⟧,?\s+but|both|either|the|option|choice|letter|statement|answer)\b|:))*+\s*"
    rf"|\b(?:actually|wait|hence|thus|therefore|so)\b[\s,:—-]*(?:no\b[\s,:—-]*)?(?={X}{ENDED})|(?={X}{RIGHT}))"
    rf"(?P<chosen>{X}(?:{HEDGE}{X}(?!{DISCUSSED})|[^⟦]*{X}{POSSIBLE})*))"
)
"""Statements such as "the answer is C". The pattern is a lookahead, so that overlapping statements are found too."""
BESIDE = re.compile(rf"(?i)(?:\s|[.,;:()\[\]{{}}/&或和]|{X}|\b(?:or|and|the|correct|options?|choice|answer|both|either)\b)*")
CAPTION = re.compile(r"⟦.m⟧|⟦.b⟧(?:[.:]\s|[)\]])")
ENDING = re.compile(rf"(?i)⟦.t⟧(?:(?:{HEDGE}|\s*)⟦.t⟧)*+[\s.]*\Z")


def chosen_letters(text: str, options: dict[str, str]) -> set[str]:
    """Return the chosen letter; several letters or none if the text is undecided."""
    named, bare = _patterns(tuple(options.items()))
    plain = bare.sub(_token, named.sub(_token, _plain(text[-LONGEST_TEXT:])))
    plain = DENIED.sub(lambda clause: re.sub(X, "⟦⟧", clause[0]), plain)
    if stated := list(STATED.finditer(plain)):
        return _letters(max(stated, key=lambda one: one.start("chosen"))["chosen"])
    has_texts = any(options.values())
    lines: list[set[str]] = []
    for line in filter(str.strip, plain.splitlines()):
        letters = _letters(line)
        is_choice = BESIDE.fullmatch(line) or (not has_texts and CAPTION.match(line) and len(letters) == 1)
        lines.append(letters if is_choice else set())
    choices = [line for line in lines if len(line) == 1 or len(lines) == 1]
    if choices and choices[-1] and (choices.count(choices[-1]) == len(choices) or (lines[-1] and choices.count(choices[-1]) > 1)):
        return choices[-1]
    if has_texts and any(choices):
        return set()
    ending = ENDING.search(plain)
    return set(re.findall("⟦(.)m⟧", plain)) or _letters(ending[0] if ending else "")


def _letters(text: str) -> set[str]:
    return set(re.findall("⟦(.).⟧", text))


@lru_cache(maxsize=1024)
def _patterns(options: tuple[tuple[str, str], ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    texts = [_same(_plain(narrow(text))) for _, text in options]
    longest_first = sorted(zip(texts, options, strict=True), key=lambda one: -len(one[0]))
    groups = [rf"(?P<t{letter}>{re.escape(text)})" for text, (letter, _) in longest_first if text and texts.count(text) == 1]
    written = "|".join(groups).replace(r"\ ", r"\s+") or "(?!)"
    letters = "".join(letter for letter, _ in options)
    a_or_i, small = rf"[AI]\b(?!(?i:{ENDED}|{RIGHT}|{CONTINUED}))", rf"[a-z]\b(?!{ENDED})"
    return (
        re.compile(rf"(?i)[(\[{{]\s*(?P<m>[{letters}])\s*[)\]}}]|(?<![\w./^−-])(?:{written})(?![\w+#-]|['’]\w|\s*[./^*]\s*[\d{{])"),
        re.compile(rf"(?<![\w'’.⟦])(?!{a_or_i}|{small})(?P<b>[{letters}{letters.lower()}])(?![\w+#]|['’]\w|-\w|\.\w)"),
    )


def _token(one: re.Match[str]) -> str:
    kind = str(one.lastgroup)
    return f"⟦{kind[1:] or one[kind].upper()}{kind[0]}⟧"


def _same(text: str) -> str:
    return " ".join(text.split()).strip(" .").lower()


def _plain(text: str) -> str:
    for _ in range(3):
        text = WRAPPED.sub(r"\1\2", text)
    return MARKS.sub("", BLANKS.sub(" ", text)).strip()
