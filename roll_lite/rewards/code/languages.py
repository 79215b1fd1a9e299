from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from roll_lite.config.schema.base import Section

Extract = Literal["auto", "fenced", "whole"]


class Language(Section):
    """Commands of a language. `run` runs the source, in file `file`, or `compile`'s output to file descriptor 3, in file `artifact`."""

    file: str
    run: Annotated[list[str], Field(min_length=1)]
    compile: Annotated[list[str], Field(min_length=1)] | None = None
    artifact: str = "main"
    address_space: bool = True
    """Limit the address space; false for interpreters that reserve far more memory than they use."""


LANGUAGES: dict[str, Language] = {
    "bash": Language(file="main.sh", run=["bash", "main.sh"]),
    "javascript": Language(file="main.js", run=["node", "main.js"], address_space=False),
    "c": Language(file="main.c", run=["./main"], compile=["sh", "-c", "gcc -O1 -o main main.c -lm && cat main >&3"]),
    "c++": Language(file="main.cpp", run=["./main"], compile=["sh", "-c", "g++ -O1 -std=c++17 -o main main.cpp && cat main >&3"]),
}
NEEDS = {"c": "gcc", "c++": "g++"}
ALIASES = {"py": "python", "python3": "python", "sh": "bash", "shell": "bash", "js": "javascript", "node": "javascript", "cpp": "c++"}
BLOCK = re.compile(
    r"^(?P<indent>[ \t]*+)(?P<fence>(?P<mark>[`~])(?P=mark){2,}+)[ \t]*+(?P<tag>[\w+#.-]*+)[^`\n]*+\n"
    r"(?P<code>(?s:.*?))(?:^[^\S\n]*(?P<end>(?P=fence)(?P=mark)*+)[^\S\n]*$|\Z)",
    re.MULTILINE,
)


def known_languages(names: Sequence[str], commands: Mapping[str, Language], local: bool) -> dict[str, Language | None]:
    """Return {name: language}; python has None. ValueError for an unknown name or, with `local`, a missing interpreter."""
    found: dict[str, Language | None] = {}
    for name in names:
        plain = ALIASES.get(name.lower(), name.lower())
        language = found[plain] = commands.get(plain) or LANGUAGES.get(plain)
        if language is None and plain != "python":
            raise ValueError(f"{name!r} is unknown; there are python, {', '.join(LANGUAGES)}, and those given in commands")
        if language is not None and local:
            needed = NEEDS[plain] if plain in NEEDS and plain not in commands else (language.compile or language.run)[0]
            if shutil.which(needed) is None:
                raise ValueError(f"reward code: languages: {name!r} needs {needed}, which is not installed here")
    return found


def extract_code(
    text: str, extract: Extract, languages: Collection[str] = (), needed: Collection[str] = (), ends_early: bool = False
) -> tuple[str, str] | None:
    """Return (code, language tag) of a response's program; None without one.

    Of several blocks, the one that defines the most names in `needed` counts; on ties, tags in `languages` come before no tag, and later
    blocks before earlier ones. Blocks with other tags define nothing. `ends_early`: the response was cut off; ignore an unclosed block.
    """
    if extract != "whole":
        blocks = _blocks(text, ends_early)
        if blocks:
            best = max(range(len(blocks)), key=lambda at: (_fits(blocks[at], languages, needed), at))
            return blocks[best]
        if extract == "fenced" or "```" in text:
            return None
    return (text, "") if text.strip() and not ends_early else None


def _fits(block: tuple[str, str], languages: Collection[str], needed: Collection[str]) -> tuple[int, int]:
    code, tag = block
    rank = 2 if tag in languages else 0 if tag else 1
    return (sum(defines(code, name) for name in needed) if rank else 0, rank)


def defines(code: str, name: str) -> bool:
    plain = re.escape(name)
    as_function = rf"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+{plain}\b"
    as_variable = rf"^{plain}[ \t]*(?::[^=\n]*)?=(?!=)"
    return re.search(f"{as_function}|{as_variable}", code, re.MULTILINE) is not None


def _blocks(text: str, ends_early: bool) -> list[tuple[str, str]]:
    """Return (code, language tag) of each fenced block. Skip an unclosed one if the response was cut off (`ends_early`) or has no tag:
    its fence may end an earlier block."""
    found: list[tuple[str, str]] = []
    for block in BLOCK.finditer(text):
        code, indent, tag = block["code"], block["indent"], block["tag"].lower()
        if indent and code.lstrip("\r\n").startswith(indent):
            code = re.sub(rf"^[ \t]{{1,{len(indent)}}}", "", code, flags=re.MULTILINE)
        if block["end"] or (code and tag and not ends_early):
            found.append((code, ALIASES.get(tag, tag)))
    return found
