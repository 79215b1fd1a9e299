r"""Answers in words, Evelyn or no solution, which mathematics would read as products of letters: what is one, and when are two the same?"""

from __future__ import annotations

import re

TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|rm|bf)\s*\{([^{}]*)\}")
AROUND = re.compile(r"\\[,;:!()\[\] ]|[$*`\"“”~]")
PROSE = re.compile(r"[A-Za-z][A-Za-z'’.,\s-]*")
WORD = re.compile(r"[A-Za-z]{3,}")
NO_WORD = re.compile(
    r"(?:(?:a|arc)?(?:sin|cos|tan|cot|sec|csc)h?|log|exp|sqrt|max|min|gcd|lcm|mod|det|inf|sup|ln)[a-z]?|and|or|for", re.IGNORECASE
)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"


def in_words(text: str) -> str | None:
    """The text in one way to write it, if it is words and no formula: xyz and sin x are formulas."""
    plain = " ".join(AROUND.sub(" ", TEXT.sub(r" \1 ", text)).split()).rstrip(" .,!").casefold()
    if PROSE.fullmatch(plain) is None:
        return None
    return plain if any(word not in ALPHABET and NO_WORD.fullmatch(word) is None for word in WORD.findall(plain)) else None
