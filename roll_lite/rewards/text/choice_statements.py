"""Finds the option that a text settles on: the words around each mention decide, and the last stated option counts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import zip_longest

from roll_lite.rewards.answer_extraction import narrow

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
    options = _options("".join(known), tuple(texts.items()))

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
def _options(letters: str, texts: tuple[tuple[str, str], ...]) -> re.Pattern[str]:
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
