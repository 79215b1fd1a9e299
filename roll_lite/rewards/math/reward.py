from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from math import isfinite
from typing import Annotated, Any

from pydantic import Field

from roll_lite.data.boxes import plain_boxes
from roll_lite.data.samples import RewardInput, Score
from roll_lite.rewards.answer_extraction import finished, last_boxes
from roll_lite.rewards.base import RewardFailed, RewardType, written
from roll_lite.rewards.math import equality
from roll_lite.rewards.math.answers import Extract, find_answer, is_formula, without_form, words
from roll_lite.rewards.math.equality import APPROXIMATELY, NAME, SET, Parsed, list_of, parse, sides, written_form
from roll_lite.rewards.math.quantities import NO_UNIT, TEXT, Quantity, Unit, known, quantity, ratio, split_unit, tidy, unwrapped
from roll_lite.rewards.running.time_limit import TimeLimitExceeded, limited

BEFORE = re.compile(
    r"\A(?:.*####|(?:so,?\s+)?(?:the\s+)?(?:final\s+|correct\s+)?answer\s*(?:\bis\b\s*:?|[:=])|答案\s*(?:是|为)?\s*:?)\s*",
    re.DOTALL | re.IGNORECASE,
)
PARTS = re.compile(
    r"(?:\A|\s)\(?[a1i]\)\s*\S.*[\s,;]\(?(?:b|2|ii)\)\s*\S|\A\s*\(?[a-z]\)[\s\\]+\$?\d|(?:\A|[,;])\s*[a-z]:\s+[$\\-]*\d[^<>=:,;]*(?:\Z|[,;])",
    re.DOTALL | re.IGNORECASE,
)
"""Pattern of reference answers to refuse: several parts, as in (a) 1 (b) 2, or a label, as in (B) 12, which would be read as a product."""
SHORT_WORDS = re.compile(r"(?:\A|\s)(?:it|is|to|of|at|by|we|[ap]m|ft)(?=\s|\Z)", re.IGNORECASE)
AROUND, PROSE, MOST_WORDS = re.compile(r"\\[,;:!()\[\] ]|[$*`\"“”~]"), re.compile(r"[A-Za-z][A-Za-z'’.,\s-]*"), 8
VARIABLE = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])")
RELATION = re.compile(r"[<>≠≤≥]|\\(?:not|neq?|[lg](?:eq?|eqslant|t))(?![A-Za-z])")

EQUAL, DIFFERENT, OTHER_UNIT = "equal", "different", "another unit"
NOT_A_NUMBER = "an expression, where a number was asked for"
LONGEST_SHOWN = 200


@dataclass(frozen=True)
class Reference:
    text: str
    parsed: Parsed = field(default_factory=list)
    unit: Unit = NO_UNIT
    number: Quantity | None = None
    name: str = ""
    """Variable to solve for, such as x in x = 5."""
    items: tuple[Reference, ...] = ()
    words: str = ""


class MathReward(RewardType):
    r"""Score 1 if the response's answer equals the reference answer mathematically, else 0.

    - **Numbers.** If the reference is a number, the answer must be an integer, decimal, fraction, mixed number, percentage or power of ten;
      for a decimal, irrational constants such as `\sqrt{2}/2` count too. 50% equals 0.5 and 50. Numerals such as `1001_2` and 0x2F equal
      only themselves. The ratio 2:3 equals 4:6, not 2/3.
    - **Units** and currencies may be missing on either side; if both have one, they must agree: 12 m is 1200 cm, not 12 cm.
    - **Lists.** The answer must have the same items, in any order.
    - **Equations.** The last side counts, and sides that are numbers must be equal: 45+25=70. If the reference is `x=5`, the first side
      must be x, or all sides numbers: `x^2-20=5` is wrong. `≈` is accepted only if the reference is a decimal.
    - **Unfinished answers** are wrong: unsolved inequalities, operations that the reference lacks (integrals, functions), and more
      additions, products or powers than it has (`(x-1)(x+1)` for `x^2-1`, `x^2+2x+1` for `(x+1)^2`, `(x^2)^5` for `x^{10}`).
    - **No answer**, or one that takes longer than `cpu_limit_s`, is wrong.
    - **References.** If there is a "####" (GSM8K), only the text after it counts. A sample fails if its reference is
      [unreadable](#references-that-math-cannot-read).

    `extracted` in the details is the compared answer.

    ```yaml
    reward:
      name: math
      args: {extract: boxed}
    ```
    """

    reads_answer_first = True

    extract: Extract = "auto"
    r"""Part of the response that is the answer; only text after the last `</think>` counts. boxed: the last `\boxed{}`. tagged:
    the last `<answer></answer>`. number: the last number. auto: the response if it is one bare formula, else the last tag, else the last
    box or boxes, else the formula or number after the last "####", "the answer is" or 答案是, else the last formula or number."""
    cpu_limit_s: Annotated[float, Field(gt=0)] = 5.0
    """CPU time limit for reading and comparing one answer; must be less than `timeout_s`."""

    def __call__(self, sample: RewardInput) -> Score:
        answer = sample.answer
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or (isinstance(answer, float) and not isfinite(answer)):
            raise RewardFailed(f"reward math: the reference answer must be a number or a string, got {answer!r:.200}")
        gold = _reference(str(answer), self.cpu_limit_s)
        found = vote = ""

        def decide() -> str:
            nonlocal found, vote
            found = vote = find_answer(tidy(finished(sample)), self.extract, in_words=bool(gold.words))
            with suppress(Exception):  # an answer that cannot be normalized votes with its text
                vote = without_form(found)
            return _verdict(gold, found)

        try:
            verdict = limited(self.cpu_limit_s, decide)
        except TimeLimitExceeded:
            verdict = "comparison takes too long"
        except (RecursionError, MemoryError):
            verdict = "answer too large"
        except Exception:  # no failure: the policy could provoke it to keep wrong answers out of training
            verdict = "cannot be computed"
            try:
                limited(self.cpu_limit_s, lambda: equality.same_expression(gold.parsed, gold.parsed))
            except Exception as error:  # the reference alone raises too
                raise RewardFailed(f"reward math: the reference answer {gold.text!r:.200} cannot be compared: {error!r:.200}") from error
        details: dict[str, float | str] = {"extracted": found[:LONGEST_SHOWN], "verdict": verdict}
        return Score(float(verdict == EQUAL), verdict == EQUAL, details, answer=gold.text if verdict == EQUAL else vote)

    def warm(self) -> None:
        for answer in (r"\frac{x + 1}{2}", r"\sqrt{12}", "5"):
            _verdict(_read_reference(r"2\sqrt{3}"), answer)

    def needs_answer(self) -> bool:
        return True

    def longest_s(self) -> dict[str, float]:
        return {"cpu_limit_s": self.cpu_limit_s}

    def response_for(self, answer: Any) -> str | None:
        return written(answer, self.extract)


def _verdict(gold: Reference, answer: str) -> str:
    if not answer:
        return "no answer found"
    if gold.words:
        return EQUAL if _in_words(answer) == gold.words else DIFFERENT
    if not gold.items and len(set(answer.split(", "))) == 1:  # the same in several boxes
        answer = answer.split(", ")[0]
    left = list_of(answer) if gold.items else []
    if gold.items and (len(left) > 1 or not gold.parsed):
        for item in gold.items:
            equal = next((one for one in left if _verdict(item, one) == EQUAL), None)
            if equal is None:
                return DIFFERENT
            left.remove(equal)
        return DIFFERENT if left else EQUAL
    *before, last = sides(answer)
    if gold.name and not _is_about(gold.name, before):
        return DIFFERENT
    wanted, given = written_form(gold.text), written_form(last)
    if wanted or given:
        return EQUAL if wanted == given else DIFFERENT
    number = gold.number
    if APPROXIMATELY.search(answer) and (number is None or number.exact) and not all(map(NAME.fullmatch, before)):
        return "an approximation of an exact answer"
    if not equality.sides_agree([*before, last]):
        return "an equation that does not hold"
    if number and (found := quantity(last)):
        same = equality.same_number(number, found)
        return OTHER_UNIT if same is None else EQUAL if same else DIFFERENT
    if number and number.exact:
        return NOT_A_NUMBER
    body, unit = _without_unit(answer if number is None and len(sides(gold.text)) > 1 else last)
    parsed = parse(body)
    if number and not equality.is_irrational(parsed):
        return NOT_A_NUMBER
    if ratio(unit, gold.unit) != 1:
        return OTHER_UNIT
    if SET.fullmatch(body) and len(list_of(body)) > 1:
        return DIFFERENT  # math-verify would take the set for a tuple
    if not parsed:
        return "not readable as mathematics"
    if equality.is_unfinished(gold.text, body, gold.parsed, parsed):
        return "not computed to the end"
    return EQUAL if equality.same_expression(gold.parsed, parsed) else DIFFERENT


def _is_about(name: str, before: list[str]) -> bool:
    """Return False if the answer is an equation about another term than `name`, such as x^2 if x is asked for. `before`: all
    sides but the last."""
    before = [TEXT.sub(lambda one: " " if re.search("[a-z]{2}", one[1]) else one[1], side) for side in before]
    first = re.sub(r"[\s{}]", "", before[0]) if before else ""
    if first in ("", name):
        return True
    return not NAME.fullmatch(first) and not any(RELATION.search(side) or _has_variable(side) for side in before)


def _has_variable(text: str) -> bool:
    parsed = parse(text)
    return any(one.free_symbols for one in parsed) if parsed else VARIABLE.search(text) is not None


def _without_unit(text: str) -> tuple[str, Unit]:
    """Split a formula into (formula, unit). With variables, a bare last letter is a variable: x+3m has no unit."""
    text = unwrapped(text)
    body, unit, scale = split_unit(text)
    is_term = VARIABLE.search(re.sub(r"\\[A-Za-z]+(?:\s*\{[A-Za-z ]*\})?", " ", body)) and re.search(r"[A-Za-z]\Z", text)
    return (text, NO_UNIT) if is_term or scale != 1 else (body, unit)


def _in_words(text: str) -> str:
    plain = " ".join(AROUND.sub(" ", _shown(text)).split()).rstrip(" .,!").casefold()
    return plain if PROSE.fullmatch(plain) and (words(plain) or plain == "no") and len(plain.split()) <= MOST_WORDS else ""


def _shown(text: str) -> str:
    return TEXT.sub(r" \1 ", text)


@lru_cache(maxsize=8192)
def _reference(text: str, cpu_limit_s: float) -> Reference:
    def read() -> Reference:
        gold = _read_reference(text)
        if not (gold.parsed or gold.words or gold.items or written_form(gold.text)):
            raise ValueError("math-verify cannot read it as mathematics")
        return gold

    try:
        return limited(cpu_limit_s, read)
    except (TimeLimitExceeded, RecursionError, MemoryError, ValueError) as error:
        raise RewardFailed(f"reward math: the reference answer {text!r:.200} cannot be read: {error}") from error


def _read_reference(text: str) -> Reference:
    text = plain_boxes(BEFORE.sub("", tidy(text.strip())))
    text = unwrapped(", ".join(box.strip() for box in last_boxes(text)) or text)
    if said := _in_words(text):
        return Reference(text, words=said)
    if PARTS.search(_shown(re.sub(r"\\(?:left|right)(?![A-Za-z])", "", text))):
        raise ValueError("it has a label, such as (a) or (B), or the answers of several parts")
    *before, value = sides(text)
    if number := quantity(value if len(before) == 1 and NAME.fullmatch(before[0]) else text):
        return Reference(value, equality.as_parsed(number), number.unit, number, re.sub(r"[\s{}]", "", "".join(before)))
    items = list_of(text)
    if (len(items) > 1 or SET.fullmatch(text)) and all(map(is_formula, items)):
        counted = [item for item in items if (number := quantity(item)) and not number.percent]
        if len({tuple(word.rstrip("s") for word in words(_shown(item), 2) if not known(word)) for item in counted}) > 1:
            raise ValueError("it is of several things, no list of numbers")
        union = parse(text) if re.search(r"\bor\b", text) else []
        return Reference(text, [one for one in union if getattr(one, "is_Union", False)], items=tuple(map(_read_reference, items)))
    if written_form(text):
        return Reference(text)
    body, unit = _without_unit(text)
    if words(_shown(body)) or SHORT_WORDS.search(_shown(body)):
        raise ValueError("it is a text, not one formula")
    return Reference(text, parse(body), unit)
