"""Which option a text settles on: what it says last, and neither what it denies nor what only looks like a letter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from roll_lite.rewards.answer_extraction import narrow

WRAPPED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|rm|bf|boxed)\s*\{([^{}]*)\}")
MARKS = re.compile(r"^[ \t]*#+|[*`$\"“”]|\\[()\[\]]", re.MULTILINE)
BLANKS = re.compile(r"\\[ ,;:!]|\\quad|~")
QUOTED = re.compile(r"(?<!\w)['‘]([A-Za-z])['’](?!\w)")

LETTER = r"(?:[(\[{]\s*(?P<marked>[A-Za-z])\s*[)\]}]|(?P<bare>[A-Za-z])(?![\w+#]|['’]\w|-\w|\.\w))"
BRACKETED = re.compile(r"[(\[]\s*([A-Z])\s*[)\]]")
ALONE = re.compile(
    rf"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)\s*)?:?\s*{LETTER}\s*(?:[.:)](?=\s|$).*)?", re.DOTALL | re.IGNORECASE
)
BETWEEN_LETTERS = {"or", "and", "option", "options", "choice", "both", "either"}
BETWEEN = re.compile(r"\s*(?:,\s*(?:or|and)\b|[,;&或和]|\b(?:or|and)\b)\s*", re.IGNORECASE)
BLANK = r"[ \t]+"
LONGEST_TEXT = 10_000
"""Characters, counted from the end: what stands before them is not looked at."""
LONGEST_CAPTION = 200
"""Characters of text that still look like an option's, or like nothing but the choice, and not like a discussion of it."""

IS = r"(?:\bis|'s|’s|\bwas|\bwould\s+be|\bshould\s+be|\bmust\s+be|\bhas\s+to\s+be|\bwill\s+be|:|=)"
FILL = (
    r"(?:\s*(?:\b(?:definitely|clearly|therefore|thus|then|indeed|actually|simply|probably|most\s+likely|both|either|the|correct|right|best"
    r"|option|choice|answer|letter)\b|:))*+"
)
NOUN = (
    r"\b(?:answer|ans|response|option|choice|selection|solution)\b"
    r"(?:(?!\b(?:not|never|cannot|neither|wrong|incorrect)\b|n['’]t\b)[^.:=;!?\n]){0,60}?"
)
VERB = r"\b(?:choos(?:e|ing)|select|pick|go(?:ing)?\s+with|settle\s+on|mean|make\s+that|correction)\b"
REVISION = r"\b(?:actually|wait|hence|thus|therefore|so)\b[\s,:—-]*(?:no\b[\s,:—-]*)?"
ARROW = r"\b(?:answer|ans|choice)\s*(?:→|⇒|->|=>|[-–—](?=\s))"
CHINESE = r"(?:(?:答案|选项|结果)\s*(?:应该?)?\s*(?:是|为|:)|(?:应该?)?\s*(?:选择?|选取))\s*(?:选项)?\s*:?"
HEAD = rf"(?:{NOUN}{IS}|{CHINESE}|{ARROW}|{VERB}|\bit\s*{IS}|\bnot\s+\(?[A-Z]\)?,?\s+but\b(?:\s+rather\b)?|(?P<revision>{REVISION}))"
DENIED_BEFORE = re.compile(
    r"(?:\b(?:if|whether|unless|not|never|cannot|doubt|wrong|incorrect|false|neither|nor|than|instead\s+of|eliminate|exclude|reject)\b|n['’]t\b)"
    r"[^.,;:!?\n]*$|(?:不|别|勿|非|排除|并非|如果|假如|假设)\s*(?:能|应该?|要|可)?\s*$",
    re.IGNORECASE,
)
OTHERS = r"\b(?:people|students|some(?:one|body)?|many|most|others|they)\s+"
OFTEN = r"(?:(?:might|may|could|would|will|often|also|wrongly|mistakenly|people|students)\s+)*"
THINK = r"(?:think|thinks|thought|say|says|said|believe|assume|claim|guess|argue|answer)\b"
SAID_BY_OTHERS = re.compile(
    rf"(?:{OTHERS}{OFTEN}(?:{THINK}[^.,;:!?\n]*)?|\b(?:one|you)\s+(?:might|may|could|would)\s+{THINK}[^.,;:!?\n]*)$", re.IGNORECASE
)
DENIED_AFTER = re.compile(
    r"[\s,]*(?:(?:is|are|was|can|could|would|does|do|must|looks|seems)\s*(?:be\s+)?(?:also\s+|all\s+|both\s+)?"
    r"(?:not|n['’]t|wrong|incorrect|false|out|impossible|eliminated|unlikely)\b|(?:isn|can|doesn|won|couldn)['’]t\b|cannot\b"
    r"|(?:选项)?\s*(?:是)?\s*(?:错|不对|不正确|不符))",
    re.IGNORECASE,
)
POSTFIX = re.compile(
    rf"(?<![\w'’]){LETTER}\s*(?:is|must\s+be|would\s+be|(?:fits|matches|suits|seems|sounds|looks)(?:\s+(?:to\s+be|like))?)\s+"
    r"(?:clearly\s+|the\s+|indeed\s+|therefore\s+)*(?:correct|right|best|true|answer)\b",
    re.IGNORECASE,
)
HEDGE = re.compile(
    r"\s*(?:,\s*(?:or|and)|[;.]\s*(?:or|alternatively)\b,?|[;.]\s*(?=(?:maybe|perhaps|possibly)\b)|,|/|\bor\b|\band\b|&)"
    rf"\s*(?:maybe|perhaps|possibly|even)?\s*(?:option|choice)?\s*{LETTER}"
    r"(?!\s*(?:is|was|are|can|cannot|can['’]t|does|would|being)\b)",
    re.IGNORECASE,
)
ALSO = re.compile(
    rf"\s*[,;(.]?\s*(?:(?:but|and|though|although)\s+)?(?:(?:option|choice)\s+)?{LETTER}\s*(?:is|may\s+be|might\s+be|could\s+be)\s+(?:also|equally)\s+"
    r"(?:possible|correct|right|true|valid|plausible)\b",
    re.IGNORECASE,
)
HEDGED = re.compile(r"\s*(?:,|/|\bor\b|\band\b|&|或|和)\s*(?:maybe|perhaps|possibly)?\s*\Z")
AFTER_A_LETTER = re.compile(
    r"\s+(?:and|or|because|since|as|for|but|so|which|that|is|was|in|on|by|due|with|given|based|here|not|rather|instead|if|then|from|after|fits|matches|suits"
    r"|seems|sounds|looks)\b"
)
"""Words that do not follow the article A or the word I."""
NAMED = re.compile(r"\b(?:option|choice|letter)\s*:?\s*$", re.IGNORECASE)


def settled_on(text: str, known: Sequence[str], texts: dict[str, str]) -> set[str]:
    """The letters of the options: one, none, or several where the text hedges."""
    plain, texts = _plain(text[-LONGEST_TEXT:]), _without_marks(texts)
    if alone := _meant(plain, known, texts):
        return alone
    if stated := _stated(plain, known, texts):
        return stated
    captions = _captions(plain, texts)
    if len(set(captions)) == 1:
        return set(captions)
    last_line = plain.rpartition("\n")[2]
    is_listed = len(set(captions)) > 1 and any(captions.count(letter) == 1 for letter in _captions(last_line, texts))
    if last_line != plain and not is_listed and (alone := _meant(last_line, known, texts)):
        return alone
    if captions:
        return set()
    bracketed = {one[1] for one in BRACKETED.finditer(plain) if one[1] in known and not _denied(plain, one)}
    return bracketed or _ending(plain, texts)


def same_text(text: str) -> str:
    """Options with the same are the same."""
    return " ".join(text.split()).strip(" .").casefold()


def _without_marks(texts: dict[str, str]) -> dict[str, str]:
    """As a response is read, unless two options would be the same then."""
    plain = {letter: _plain(narrow(text)) for letter, text in texts.items()}
    return plain if len(set(plain.values())) == len(set(texts.values())) else texts


def _plain(text: str) -> str:
    for _ in range(3):
        text = WRAPPED.sub(r"\1", text)
    return QUOTED.sub(r"\1", MARKS.sub("", BLANKS.sub(" ", text))).strip()


def _meant(plain: str, known: Sequence[str], texts: dict[str, str]) -> set[str]:
    """Of a text that is nothing but the choice: a letter, perhaps with the option's text behind it, letters, or the option's text."""
    plain = plain.strip()
    same = {letter for letter, option in texts.items() if same_text(option) == same_text(plain)}
    if same:
        return same
    parts = [_named(part, known, texts) for part in BETWEEN.split(plain[: LONGEST_CAPTION + 1])] if len(plain) <= LONGEST_CAPTION else []
    if len(parts) > 1 and all(parts):
        return set().union(*parts)
    words = re.findall(r"\w+", plain[: LONGEST_CAPTION + 1])
    single = {word.upper() for word in words if len(word) == 1}
    if len(plain) <= LONGEST_CAPTION and len(single) > 1 and all(len(word) == 1 or word.lower() in BETWEEN_LETTERS for word in words):
        return {letter for letter in single if letter in known}
    alone = ALONE.fullmatch(plain)
    if alone is None or _letter(alone) not in known:
        return set()
    letter, place = _letter(alone), alone.end("marked" if alone["marked"] else "bare")
    rest = plain[place:].lstrip(" )]}.:")
    if not rest or same_text(rest) == same_text(texts.get(letter, "")):
        return {letter}
    others = {one for one, option in texts.items() if same_text(option) == same_text(rest)}
    if others:
        return {letter} | others
    is_caption = not texts and plain[place - 1].isupper() and len(rest) <= LONGEST_CAPTION
    is_caption = is_caption and not BRACKETED.search(rest) and not _stated(rest, known, texts)
    return {letter} if is_caption else set()


def _named(part: str, known: Sequence[str], texts: dict[str, str]) -> set[str]:
    """The options that a part of an enumeration names: by text or by letter."""
    part = part.strip(" .()[]")
    return {letter for letter, option in texts.items() if same_text(option) == same_text(part)} or ({part} & set(known))


def _captions(plain: str, texts: dict[str, str]) -> list[str]:
    """The letters of the lines that begin with an option as it is written in a question: C. Berlin."""
    letters = list(texts)
    return [letters[int(str(found.lastgroup)[1:])] for found in _as_in_a_question(tuple(texts.items())).finditer(plain)] if texts else []


@lru_cache(maxsize=1024)
def _as_in_a_question(options: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
    written = [
        rf"(?P<o{place}>(?:[(\[]{letter}[)\]]|{letter}[.:)])[.:]?{BLANK}{BLANK.join(map(re.escape, text.strip(' .').split()))})"
        for place, (letter, text) in enumerate(options)
        if text.strip(" .")
    ]
    return re.compile(
        rf"^[ \t]*(?:[-•]{BLANK})?(?:{'|'.join(written) or '(?!)'})(?=[ \t]*(?:[.;,](?:\s|\Z)|\n|\Z))", re.MULTILINE | re.IGNORECASE
    )


def _stated(plain: str, known: Sequence[str], texts: dict[str, str]) -> set[str]:
    """By the last sentence that names the choice."""
    last: tuple[int, set[str]] = (-1, set())
    for one in (*_statements(tuple(texts.values())).finditer(plain), *POSTFIX.finditer(plain)):
        option = one.groupdict().get("option")
        if _denied(plain, one) or one.start() < last[0]:
            continue
        if option is not None:
            found = {letter for letter, text in texts.items() if same_text(text) == same_text(option)} | _hedged(plain, one.end(), texts)
        elif _letter(one) in known and _is_letter(plain, one):
            hedge = HEDGE.match(plain, one.end()) or ALSO.match(plain, one.end())
            hedged = hedge is not None and _letter(hedge) in known and _is_letter(plain, hedge)
            found = {_letter(one)} | ({_letter(hedge)} if hedge is not None and hedged else set())
        else:
            continue
        last = (one.start(), found)
    return last[1]


def _hedged(plain: str, end: int, texts: dict[str, str]) -> set[str]:
    """The option that follows behind `or`."""
    between = BETWEEN.match(plain, end)
    if between is None or between.end() == end:
        return set()
    rest = same_text(plain[between.end() : between.end() + LONGEST_CAPTION])
    return {letter for letter, text in texts.items() if same_text(text) and re.match(rf"{re.escape(same_text(text))}(?!\w)", rest)}


@lru_cache(maxsize=1024)
def _statements(texts: tuple[str, ...]) -> re.Pattern[str]:
    longest_first = sorted({text.strip(" .") for text in texts if text.strip(" .")}, key=len, reverse=True)
    options = "|".join(r"\s+".join(map(re.escape, text.split())) for text in longest_first)
    written = rf"|(?:(?:the|an?)\s+)?(?P<option>(?<![\w./^−-])(?:{options})(?![\w+#]|\s*[./^*]\s*[\d{{]))" if options else ""
    return re.compile(rf"{HEAD}{FILL}\s*(?:{LETTER}{written})", re.IGNORECASE)


def _is_letter(plain: str, found: re.Match[str]) -> bool:
    """And not the article A, the word I or a small letter of the text."""
    if found["marked"]:
        return True
    after = plain[found.end("bare") :]
    ends = re.match(r"\s*(?:[.,;:!?)\]/]|$)", after) is not None or "\n" in after[:1]
    if found.groupdict().get("revision"):
        return ends
    if found["bare"].islower():
        return ends or NAMED.search(plain[: found.start("bare")]) is not None
    return found["bare"] not in "AI" or ends or AFTER_A_LETTER.match(after) is not None or re.match(r"\s+[^a-z\s]", after) is not None


def _denied(plain: str, found: re.Match[str]) -> bool:
    before = plain[max(0, found.start() - 60) : found.start()]
    return (
        DENIED_BEFORE.search(before) is not None
        or SAID_BY_OTHERS.search(before) is not None
        or DENIED_AFTER.match(plain, found.end()) is not None
    )


def _letter(found: re.Match[str]) -> str:
    return str(found["marked"] or found["bare"]).upper()


def _ending(plain: str, texts: dict[str, str]) -> set[str]:
    """The option whose text ends the response."""
    end = f" {same_text(plain)}"
    fitting = {letter: same_text(option) for letter, option in texts.items() if same_text(option) and end.endswith(f" {same_text(option)}")}
    longest = max(map(len, fitting.values()), default=0)
    before = end[: len(end) - longest]
    if DENIED_BEFORE.search(before):
        return set()
    found = {letter for letter, option in fitting.items() if len(option) == longest}
    hedge = HEDGED.search(before)
    other = before[: hedge.start()] if hedge is not None else before.rstrip()
    return found | (_ending(other, texts) if hedge is not None or (found and other[-1:].isalnum()) else set())
