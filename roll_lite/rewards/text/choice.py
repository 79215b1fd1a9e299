r"""Reward `choice`: the response chooses one of several lettered options."""

from __future__ import annotations

import re
import string
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
    """Score 1 if the response chooses the right one of several lettered options, else 0; choosing several scores 0.

    The reference answer is a letter (C), an option's text (Berlin), both (C. Berlin), a label in the column `options` or, if that column is
    a list, the option's index from 0 (MMLU).

    ```yaml
    reward:
      name: choice            # "The answer is (C)." against "C", or against that option's text
      args: {options: choices, letters: 4}
    ```
    """

    reads_answer_first = True

    extract: Extract = "auto"
    r"""Where to find the choice, after the last `</think>`. boxed: the last `\boxed{}`. tagged: the last `<answer></answer>`. auto: the
    tag, else the box, else, in this order: a response that is only a letter or an option's text; the last statement such as "the answer is
    C", "I choose option c", 选C or "(C) is correct"; the last line; the only "(C)"; the option's text that ends the response. Denied
    options ("not B", "if the answer were B", 不选B) do not count, nor do the words A and I. Only the last 10,000 characters are read.
    """
    options: str = "options"
    """Column with the options' texts: a list in the letters' order, a dict by letter, or `{"text": [...], "label": [...]}` as in ARC and
    CommonsenseQA. Without it, only letters count. If labels are not letters (1 to 4 in some rows of ARC), the options are A, B, C and so
    on; the prompt should use these letters.
    """
    letters: Annotated[int, Field(ge=1, le=26)] = 26
    """Number of options if no column lists them."""

    def __call__(self, sample: RewardInput) -> Score:
        column = sample.columns.get(self.options)
        options, labels = (dict.fromkeys(ALPHABET[: self.letters], ""), {}) if column is None else _options(column, self.options)
        right = _reference(sample.answer, options, labels)
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


def _options(column: Any, name: str) -> tuple[dict[str, str], dict[str, str]]:
    """Options' texts by letter, and letters by label; no labels if the column is a list."""
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
        return dict(zip(ALPHABET, map(str, texts), strict=False)), {}
    if len(labels) != len(texts):
        raise RewardFailed(f"reward choice: column {name!r} has {len(texts)} texts and {len(labels)} labels: {column!r:.80}")
    plain = [str(label).strip().upper() for label in labels]
    letters = plain if set(plain) <= set(ALPHABET) else ALPHABET[: len(plain)]
    return dict(zip(letters, map(str, texts), strict=True)), dict(zip(plain, letters, strict=True))


def _reference(answer: Any, options: dict[str, str], labels: dict[str, str]) -> str:
    """Letter of the reference answer. `options`: texts by letter, all empty if no column lists them."""
    if isinstance(answer, int) and not isinstance(answer, bool):
        if str(answer) in labels:
            return labels[str(answer)]
        if not labels and any(options.values()) and 0 <= answer < len(options):
            return list(options)[answer]
    if isinstance(answer, str):
        letter = answer.strip().strip("()[].").upper()
        if letter in labels or letter in options:
            return labels.get(letter, letter)
        same = [one for one, text in options.items() if same_text(text) == same_text(answer)] or list(settled_on(answer, options))
        if len(same) == 1:
            return same[0]
    raise RewardFailed(
        f"reward choice: the reference answer must be one of {', '.join(labels or options)}, an option's text, "
        f"or with a list of options its place as an integer, counted from 0, got {answer!r:.80}"
    )


def _chosen(response: str, extract: Extract, options: dict[str, str]) -> set[str]:
    """Letters that the response chooses; several if it hedges."""
    if extract == "boxed":
        return settled_on(last_boxed(response) or "", options)
    tagged = last_tagged(response)
    if tagged is not None or extract == "tagged":
        return settled_on(tagged or "", options)
    return set().union(*(settled_on(box, options) for box in last_boxes(response))) or settled_on(response, options)


LONGEST_TEXT, WINDOW = 10_000, 100
"""Maximum characters read: at the response's end, and before an option."""
WRAPPED = re.compile(r"\\(?:text\w*|math\w*|rm|bf|boxed)\s*\{([^{}]*)\}")
MARKS = re.compile(r"^[ \t]*#+|[*`$\"“”]|\\[()\[\]]|(?<!\w)['‘](?=[A-Za-z]['’])|(?<=(?<!\w)[A-Za-z])['’](?!\w)", re.MULTILINE)
BLANK = r"\s+"
BLANKS = re.compile(r"\\[ ,;:!]|\\quad|~")

IS = r"(?:\bis|['’]s|\b(?:would|must|will)\s+be|[:=→⇒]|[-=]>|[-–—](?=\s))"
DENIAL = r"(?:\b(?:not|never|cannot|neither|nor|wrong|incorrect)\b|n['’]t\b)"
STATED = re.compile(
    rf"(?i:\b(?:answer|ans|response|option|choice)\b(?:(?!{DENIAL})[^.:=;!?\n]){{0,60}}?\s*{IS}|\bit\s*{IS}|\bnot\s+\(?[A-Z]\)?,?\s+but\b"
    r"|\b(?:choose|select|pick|go(?:ing)?\s+with)\b|答案\s*[是为:]|选择?)(?i:\s*(?:\b(?:definitely|both|either|the|option|answer)\b|:))*+\s*\Z"
)
"""Words before a choice, such as "the answer is"."""
REVISED = re.compile(r"(?i)\b(?:actually|wait|hence|thus|therefore|so)\b[\s,:—-]*(?:no\b[\s,:—-]*)?\Z")
DENIED = re.compile(
    rf"(?i)(?:(?:{DENIAL}|\b(?:if|whether|unless|than|instead\s+of)\b)(?![^.,;:!?\n]*\bbut\b)[^.,;:!?\n]*|[不别非]\s*选?\s*"
    r"|\b(?:people|many|most|others|some|one|you)\s+(?:\w+\s+){0,2}(?:think|say|believe|choose|pick)\b[^.,;:!?\n]*)\Z"
)
RIGHT = re.compile(r"(?i)\s*(?:is|(?:must|would)\s+be|(?:fits|seems)(?:\s+to\s+be)?)\s+(?:the\s+)?(?:correct|right|best|true|answer)\b")
ENDED = re.compile(r"\s*(?:[.,;:!?)\]/]|$|\n)")
CONTINUED = re.compile(
    r"(?i)\s+(?:[^a-z\s]|(?:and|or|because|since|as|for|but|so|which|that|is|was|in|on|by|due|not|rather|instead|if|then|fits|seems)\b)"
)
POSSIBLE = re.compile(r"(?i)\s+(?:is|(?:may|might|could)\s+be)\s+(?:also|equally)\s+(?:possible|correct|right|true)\b")
DISCUSSED = re.compile(r"(?i)\s*(?:is|was|are|can|cannot|does|would|being)\b")
HEDGE = re.compile(
    r"(?i)(?:\s*[,/&或和]|[\s.;,]*\b(?:or|and|but|alternatively|maybe|perhaps|possibly)\b[\s,]*)+(?:(?:option|choice)\b)?\s*"
)
"""Text between two options, such as "or", that makes a choice ambiguous."""
BESIDE = re.compile(r"(?i)(?:\s|[.,;:()\[\]{}/&或和]|\b(?:or|and|the|correct|options?|choice|answer|both|either)\b)*")
"""Text allowed around options in a line that is only a choice."""


def settled_on(text: str, options: dict[str, str]) -> set[str]:
    """Letters of the options that a text chooses; several if it hedges."""
    plain, has_texts = _plain(text[-LONGEST_TEXT:]), any(options.values())
    pattern = _mentions(tuple(_without_marks(options).items()))

    def alone(part: str) -> set[str]:
        """Options that a text names if it names nothing else, or the letter of a labelled option ("C. Berlin")."""
        found = {_letter(one) for one in pattern.finditer(part)}
        is_caption = len(found) == 1 and not has_texts and re.match(r"[(\[]?[A-Z](?:[.:](?=\s)|[)\]])", part)
        return found if is_caption or BESIDE.fullmatch(pattern.sub(" ", part)) else set()

    mentions = list(pattern.finditer(plain))
    stated: set[str] = set()
    for one, following in zip_longest(mentions, mentions[1:]):
        if _is_stated(one):
            stated = {_letter(one)}
            is_hedged = following and HEDGE.fullmatch(plain, one.end(), following.start()) and not DISCUSSED.match(plain, following.end())
            if is_hedged or (following and POSSIBLE.match(plain, following.end())):
                stated.add(_letter(following))
    if stated or (stated := alone(plain) if "\n" not in plain else stated):
        return stated
    lines = [alone(line) for line in plain.splitlines() if line.strip()]
    captions = [min(line) for line in lines if len(line) == 1]
    if captions and (len(set(captions)) == 1 or (lines[-1] and captions.count(captions[-1]) > 1)):
        return {captions[-1]}
    if captions and has_texts:
        return set()
    if marked := {_letter(one) for one in mentions if one["marked"] and not _is_denied(one)}:
        return marked
    end = len(plain.rstrip(" ."))
    for one in reversed(mentions):  # an option's text that ends the response, with the options listed before it
        is_last = not plain[one.end() : end].strip() or (stated and HEDGE.fullmatch(plain, one.end(), end))
        if not is_last or not _is_text(one) or _is_denied(one):
            break
        stated, end = stated | {_letter(one)}, one.start()
    return stated


def _is_stated(one: re.Match[str]) -> bool:
    text, end = one.string, one.end()
    ends, is_right = ENDED.match(text, end), RIGHT.match(text, end)
    if one["bare"] and one["bare"].islower() and not ends:
        return False
    if one["bare"] in ("A", "I") and not (ends or is_right or CONTINUED.match(text, end)):
        return False
    return bool(is_right or (ends and REVISED.search(_front(one))) or STATED.search(_front(one))) and not _is_denied(one)


def _is_denied(one: re.Match[str]) -> bool:
    return DENIED.search(_front(one)) is not None


def _front(one: re.Match[str]) -> str:
    return one.string[max(0, one.start() - WINDOW) : one.start()]


def _is_text(one: re.Match[str]) -> bool:
    return one.lastgroup not in ("marked", "bare")


def _letter(one: re.Match[str]) -> str:
    group = str(one.lastgroup)
    return group.removeprefix("text") if _is_text(one) else one[group].upper()


@lru_cache(maxsize=1024)
def _mentions(options: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    """Pattern that matches the options' letters and texts, longest first."""
    letters = "".join(letter for letter, _ in options)
    split = sorted(((letter, text.strip(" .").split()) for letter, text in options), key=lambda one: -len("".join(one[1])))
    written = "|".join(rf"(?P<text{letter}>{BLANK.join(map(re.escape, words))})" for letter, words in split if words) or "(?!)"
    return re.compile(
        rf"[(\[{{]\s*(?P<marked>[{letters}])\s*[)\]}}]|(?<![\w./^−-])(?:{written})(?![\w+#-]|['’]\w|\s*[./^*]\s*[\d{{])"
        rf"|(?<![\w'’.])(?P<bare>[{letters}])(?![\w+#]|['’]\w|-\w|\.\w)",
        re.IGNORECASE,
    )


def same_text(text: str) -> str:
    """Normalize an option's text for comparison."""
    return " ".join(text.split()).strip(" .").casefold()


def _without_marks(texts: dict[str, str]) -> dict[str, str]:
    """Remove Markdown marks and extra blanks from the options' texts, as is done with responses. If that makes two texts equal, return all
    unchanged."""
    plain = {letter: _plain(narrow(text)) for letter, text in texts.items()}
    return plain if len(set(plain.values())) == len(set(texts.values())) else texts


def _plain(text: str) -> str:
    for _ in range(3):
        text = WRAPPED.sub(r"\1", text)
    return MARKS.sub("", BLANKS.sub(" ", text)).strip()
