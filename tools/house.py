#!/usr/bin/env python3
"""Checks size and wording of roll_lite/ against tools/house.json: `python tools/house.py [--worst N] [--write]`.

Size is counted in Python tokens without comments and docstrings, room by room: it does not change with the width of lines. Two symptoms of
docstrings that must be read twice are counted: a start with a preposition, pronoun or conjunction, and paraphrases of the field's words.
A change may raise a limit in tools/house.json, with its reason in the commit message.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import json
import re
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = ROOT / "tools" / "house.json"
NO_CODE = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.COMMENT}
ODD_START = re.compile(
    r"^(Of|What|That|Those|Where|So|Who|Whose|As|With|Without|By|From|In|On|For|To|Until|Also|Not|At|How|Which|Whether|Is|Are|Does|Nobody"
    r"|Nothing|Whatever|Whoever|Between|Behind|Beside|Above|Before|After|Once|Only|Both|Each|All|More|Some|One|Others|It|They|These|This)\b"
)
PARAPHRASE = re.compile(
    r"\b(whoever|whatever|nobody|somebody|so many|so much|goes on|go on|there is none|there are none|what is|what was|what it|those that"
    r"|as far as|stands? still|of its own|is told|are told|tells|comes? to|what becomes|alike|in the place of|time and again|for ever"
    r"|a moment)\b",
    re.IGNORECASE,
)


def docstrings(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, text) of all docstrings, attributes' included."""
    bodies = [body for node in ast.walk(tree) if isinstance(body := getattr(node, "body", None), list)]
    found = [
        (one.lineno, one.value.value)
        for body in bodies
        for one in body
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)
    ]
    return [(line, text.strip()) for line, text in found if isinstance(text, str)]


def tokens(source: str, tree: ast.AST) -> int:
    """Number of tokens without comments and docstrings."""
    skipped = {(one.lineno, one.col_offset) for one in ast.walk(tree) if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)}
    read = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(one.type not in NO_CODE and not (one.type == tokenize.STRING and one.start in skipped) for one in read)


def room_of(file: Path) -> str:
    """Directory, or file, under whose name the size is counted."""
    parts = file.relative_to(ROOT).parts
    return "/".join(parts[:4] if parts[1:3] == ("distributed", "strategy") and len(parts) > 4 else parts[: 2 if len(parts) > 2 else None])


def measure() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Tokens by room, and (place, text) of all docstrings."""
    rooms: dict[str, int] = collections.defaultdict(int)
    texts = []
    for file in sorted((ROOT / "roll_lite").rglob("*.py")):
        if (ROOT / "roll_lite" / "examples") in file.parents:
            continue
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        rooms[room_of(file)] += tokens(source, tree)
        texts += [(f"{file.relative_to(ROOT)}:{line}", " ".join(text.split())) for line, text in docstrings(tree)]
    return dict(rooms), texts


def wording(texts: list[tuple[str, str]]) -> dict[str, float]:
    words = sum(len(text.split()) for _, text in texts)
    paraphrases = sum(len(PARAPHRASE.findall(text)) for _, text in texts)
    return {
        "docstring words": words,
        "odd starts, percent": round(100 * sum(bool(ODD_START.match(text)) for _, text in texts) / len(texts), 1),
        "paraphrases per 1,000 words": round(1000 * paraphrases / words, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, help="print the docstrings with the most symptoms")
    parser.add_argument("--write", action="store_true", help="write today's figures as limits")
    asked = parser.parse_args()
    rooms, texts = measure()
    found: dict[str, float] = {**dict(sorted(rooms.items())), "all": sum(rooms.values()), **wording(texts)}
    if asked.write:
        LIMITS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    ranked = sorted(texts, key=lambda one: (-len(PARAPHRASE.findall(one[1])) - bool(ODD_START.match(one[1])), one[0]))
    sys.stdout.writelines(f"{place}: {text[:160]}\n" for place, text in ranked[: asked.worst])
    over = [f"{name}: {value:,g}, at most {limits.get(name, 0):,g}\n" for name, value in found.items() if value > limits.get(name, 0)]
    if over:
        sys.stdout.writelines(["roll_lite/ exceeds the limits of tools/house.json:\n", *over])
        sys.stdout.write("Look what can go, or raise the limit and give the reason in the commit message.\n")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
