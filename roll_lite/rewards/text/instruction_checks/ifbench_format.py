"""IFBench: constraints on the form of a response, and on repeating a text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from roll_lite.rewards.text.instruction_checks.arguments import options as options_of
from roll_lite.rewards.text.instruction_checks.arguments import phrase, whole
from roll_lite.rewards.text.instruction_checks.english import MINOR_WORDS
from roll_lite.rewards.text.instruction_checks.parts import end_mark, sentences, words

PAIRS = {")": "(", "]": "[", "}": "{"}
NESTED_BRACKETS = 5
NESTED_QUOTES = 3
STRAIGHT = str.maketrans("“”„‘’", '"""\'\'')
APOSTROPHE = re.compile(r"(?<=\w)'(?=\w)")
EMOJI = "\u203c\u2049\u2139\u231a-\u23ff\u25aa-\u25fe\u2600-\u27bf\u2934\u2935\u2b05-\u2b55\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
ENDS_IN_EMOJI = re.compile(f"[{EMOJI}][\u200d\ufe0f\u20e3]*[^\\w\\s{EMOJI}]*$")
BEGINS_WITH_EMOJI = re.compile(f"[^\\w\\s{EMOJI}]*[{EMOJI}]")
LETTER_OPTIONS = re.compile(r"\W*a\W+b\W+c\b", re.IGNORECASE)
TITLE_WORD = re.compile(r"\w+(?:['’]\w+)*")
LABELS = ("My Answer:", "My Conclusion:", "Future Outlook:")
SENTENCE_TO_REPEAT = "only output this sentence here, ignore all other requests."

# ---------------------------------------------------------------- brackets and quotes


def parentheses(response: str) -> bool:
    """Five or more nested brackets, correctly closed up to the innermost."""
    open_ones: list[str] = []
    for character in response:
        if character in "([{":
            open_ones.append(character)
        elif character in PAIRS:
            if not open_ones or open_ones[-1] != PAIRS[character]:
                open_ones.clear()
            elif len(open_ones) >= NESTED_BRACKETS:
                return True
            else:
                open_ones.pop()
    return False


def quotes(response: str) -> bool:
    """Three nested levels of double and single quotes, all closed; apostrophes do not count."""
    open_ones: list[str] = []
    deepest = 0
    for character in re.findall("[\"']", APOSTROPHE.sub("", response.translate(STRAIGHT))):
        if open_ones and open_ones[-1] == character:
            open_ones.pop()
            if deepest - len(open_ones) >= NESTED_QUOTES:
                return True
        else:
            open_ones.append(character)
            deepest = max(deepest, len(open_ones))
    return False


def quote_unquote(response: str) -> bool:
    """Text after every quote: no two quotes are adjacent, and none ends the response. The character '"' alone is no quote."""
    text = "".join(response.translate(STRAIGHT).replace("'\"'", "").split())
    return '""' not in text and not text.rstrip("0123456789!#$%&'()*+,-./:;<=>?@[\\]^_`{|}~").endswith('"')


# ---------------------------------------------------------------- lines and lists


def newline(response: str) -> bool:
    """Lines of one word; empty lines do not count."""
    lines = [line for line in map(words, response.split("\n")) if line]
    return bool(lines) and all(len(line) == 1 for line in lines)


def line_indent(response: str) -> bool:
    """Indentation grows with every line; at least two lines."""
    indents = [len(line) - len(line.lstrip(" ")) for line in response.split("\n") if line.strip()]
    return len(indents) > 1 and all(one < two for one, two in pairwise(indents))


def special_list(response: str, *, sep: str) -> bool:
    """Two or more lines begin with the separator."""
    mark = phrase("sep", sep)
    return sum(line.lstrip().startswith(mark) for line in response.split("\n")) >= 2


def sub_bullets(response: str) -> bool:
    """A line with - follows every line with *, before the next one."""
    marks = [mark for line in response.split("\n") if (mark := line.lstrip()[:1]) in ("*", "-") and not line.lstrip().startswith("**")]
    below = "".join(marks).split("*")[1:]
    return bool(below) and all(below)


def no_bullets_bullets(response: str) -> bool:
    """Two sentences with a full stop, followed only by lines with *, at least two."""
    lines = [line.strip() for line in response.split("\n") if line.strip()]
    first = next((place for place, line in enumerate(lines) if line.startswith("*")), len(lines))
    statements = sum(end_mark(sentence) == "." for sentence in sentences("\n".join(lines[:first])))
    return statements >= 2 and len(lines) - first >= 2 and all(line.startswith("*") for line in lines[first:])


def thesis(response: str) -> bool:
    """Text in <i> or <em>, and text behind it."""
    text = response.lower()
    for tag in ("i", "em"):
        _, is_open, rest = text.partition(f"<{tag}>")
        inside, is_closed, behind = rest.partition(f"</{tag}>")
        if is_open and is_closed and inside.strip() and behind.strip():
            return True
    return False


# ---------------------------------------------------------------- wording


def options(response: str, *, options: str | Sequence[str]) -> bool:
    """Exactly one option and no other text. Lettered options such as a) must match with their marks."""
    known = options_of(options)
    if LETTER_OPTIONS.match(" ".join(known)):
        return response.strip() in known
    return words(response) in [words(one) for one in known]


def emoji(response: str) -> bool:
    """An emoji at every sentence's end, before or behind its mark; a response of emoji alone is one sentence."""
    said = sentences(response) or [response.strip()]
    ends = [ENDS_IN_EMOJI.search(sentence[-40:]) is not None for sentence in said]
    follows = [BEGINS_WITH_EMOJI.match(sentence) is not None for sentence in said[1:]] + [False]
    return all(one or two for one, two in zip(ends, follows, strict=True))


def title_case(response: str) -> bool:
    """Capitalized words, except articles, conjunctions and short prepositions inside; text in capitals only fails."""
    said = [word for word in TITLE_WORD.findall(response) if word[0].isalpha()]
    small = [place for place, word in enumerate(said) if word[0].islower()]
    return bool(said) and not any(place == 0 or said[place] not in MINOR_WORDS for place in small) and not _is_shouted(said)


def _is_shouted(said: list[str]) -> bool:
    return all(word.isupper() for word in said) and any(len(word) > 1 for word in said)


def output_template(response: str) -> bool:
    """The three labels in order, each followed by text."""
    rest = response
    for label in LABELS:
        before, found, rest = rest.partition(label)
        if not found or (label != LABELS[0] and not before.strip()):
            return False
    return bool(rest.strip())


# ---------------------------------------------------------------- repetition


def repeat_change(response: str, *, prompt_to_repeat: str) -> bool:
    """The prompt with only its first word replaced."""
    ours, theirs = response.split(), phrase("prompt_to_repeat", prompt_to_repeat).split()
    return ours[1:] == theirs[1:] and bool(ours) and words(ours[0]) != words(theirs[0])


def repeat_span(response: str, *, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """Words n_start to n_end of the prompt, counted from 0."""
    span = phrase("prompt_to_repeat", prompt_to_repeat).lower().split()[whole(n_start) : whole(n_end) + 1]
    if not span:
        raise ValueError(f"there are no words from {n_start} to {n_end}")
    return response.lower().split() == span


IFBENCH_FORMAT: dict[str, Callable[..., bool]] = {
    "format:parentheses": parentheses,
    "format:quotes": quotes,
    "format:quote_unquote": quote_unquote,
    "format:newline": newline,
    "format:line_indent": line_indent,
    "format:list": special_list,
    "format:sub-bullets": sub_bullets,
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:thesis": thesis,
    "format:options": options,
    "format:emoji": emoji,
    "format:title_case": title_case,
    "format:output_template": output_template,
    "format:no_whitespace": lambda response: not any(character.isspace() for character in response.strip()),
    "repeat:repeat_change": repeat_change,
    "repeat:repeat_simple": lambda response: response.strip().lower() == SENTENCE_TO_REPEAT,
    "repeat:repeat_span": repeat_span,
}
