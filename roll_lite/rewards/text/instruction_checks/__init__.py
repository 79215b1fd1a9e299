"""Checks of instructions; ids and arguments are named as in the data sets."""

from __future__ import annotations

import re
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

from roll_lite.rewards.text.instruction_checks.if_train import IF_TRAIN
from roll_lite.rewards.text.instruction_checks.ifbench import IFBENCH
from roll_lite.rewards.text.instruction_checks.ifeval import IFEVAL, RLVR_IFEVAL

CHECKS: dict[str, Callable[..., bool]] = {**IFEVAL, **RLVR_IFEVAL, **IF_TRAIN, **IFBENCH}


def read_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: READERS[name](name, value) if name in READERS else value for name, value in arguments.items()}


def _whole(name: str, value: Any) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def _text(name: str, value: Any) -> str:
    """Check a text argument. ValueError if it is blank, as every response contains blank text."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name} must be a text with something in it, got {value!r}")
    return value


def _phrase(name: str, value: Any) -> str:
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return _text(name, values[0] if len(values) == 1 else values).strip()


def _phrases(name: str, value: Any) -> list[str]:
    if isinstance(value, str) or not hasattr(value, "__iter__") or not (values := list(value)):  # list(string) would give letters
        raise ValueError(f"{name} must be a list of words, got {value!r}")
    return [_text(f"each of {name}", one).strip() for one in values]


def _options(name: str, value: Any) -> list[str]:
    if isinstance(value, str):
        separator = next((one for one in ("/", r"\bor\b") if re.search(one, value)), ",")
        value = [one for one in re.split(separator, value) if one.strip()]
    return _phrases(name, value)


def _letter(name: str, value: Any) -> str:
    if len(letter := _phrase(name, value)) != 1:
        raise ValueError(f"{name} must be one character, got {value!r}")
    return letter


def _percentage(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) <= 100:
        raise ValueError(f"{name} must be a number from 0 to 100, got {value!r}")
    return float(value)


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def read(name: str, value: Any) -> str:
        if value not in known:
            raise ValueError(f"{name} must be {', '.join(map(repr, known))}, got {value!r}")
        return str(value)

    return read


WHOLE = """
N n m i frequency let_frequency num_sentences num_paragraphs num_words nth_paragraph num_placeholders num_bullets num_highlights
num_sections capital_frequency small_n n_start n_end n_sent n_words min_words max_words
"""
PHRASES = """
keyword keyword1 keyword2 keyword3 keyword4 keyword5 word first_word last_word phrase language postscript_marker section_spliter
section_splitter end_phrase original_prompt reference_text sep
"""
READERS: dict[str, Callable[[str, Any], Any]] = {
    **dict.fromkeys(WHOLE.split(), _whole),
    **dict.fromkeys(PHRASES.split(), _phrase),
    **dict.fromkeys(("keywords", "keyword_list", "forbidden_words"), _phrases),
    **dict.fromkeys(("relation", "let_relation", "capital_relation"), _one_of("at least", "less than")),
    "quantifier": _one_of("at least", "at most", "around"),
    "prompt_to_repeat": _text,
    "options": _options,
    "letter": _letter,
    "percentage": _percentage,
}
