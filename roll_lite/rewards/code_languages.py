"""Languages of programs: how they are run, and how a response shows its program."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Extract = Literal["auto", "fenced", "whole"]


@dataclass(frozen=True)
class Language:
    """Run as `run` with the program in `file`. `compile` leaves what is to be run in its file number 3; it appears as `artifact`."""

    file: str
    run: list[str]
    compile: list[str] | None = None
    artifact: str = "main"
    address_space: bool = True
    """False for interpreters that reserve far more memory than they use."""


LANGUAGES: dict[str, Language] = {
    "bash": Language("main.sh", ["bash", "main.sh"]),
    "javascript": Language("main.js", ["node", "main.js"], address_space=False),
    "c": Language("main.c", ["./main"], ["sh", "-c", "gcc -O1 -o main main.c -lm && cat main >&3"]),
    "c++": Language("main.cpp", ["./main"], ["sh", "-c", "g++ -O1 -std=c++17 -o main main.cpp && cat main >&3"]),
    "perl": Language("main.pl", ["perl", "main.pl"]),
    "ruby": Language("main.rb", ["ruby", "main.rb"]),
}
NEEDS = {"bash": "bash", "javascript": "node", "c": "gcc", "c++": "g++", "perl": "perl", "ruby": "ruby"}
ALIASES = {"py": "python", "python3": "python", "sh": "bash", "shell": "bash", "js": "javascript", "node": "javascript", "cpp": "c++"}
FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^\n]*\n(.*?)^[ \t]*\1[ \t]*$", re.DOTALL | re.MULTILINE)


def known_languages(names: Sequence[str], commands: Mapping[str, Mapping[str, Any]], local: bool) -> dict[str, Language | None]:
    """By name, None for python; ValueError for one that is unknown or, for programs that run here, has no interpreter."""
    found: dict[str, Language | None] = {}
    for name in names:
        plain = ALIASES.get(name.lower(), name.lower())
        if plain in commands:
            language = _own_language(plain, commands[plain])
            needed = (language.compile or language.run)[0]
        elif plain == "python":
            found[plain] = None
            continue
        elif plain in LANGUAGES:
            language, needed = LANGUAGES[plain], NEEDS[plain]
        else:
            raise ValueError(f"languages: {name!r} is unknown; there are python, {', '.join(LANGUAGES)}, and those given in commands")
        if local and shutil.which(needed) is None:
            raise ValueError(f"languages: {name!r} needs {needed}, which is not installed here")
        found[plain] = language
    return found


def _own_language(name: str, given: Mapping[str, Any]) -> Language:
    try:
        return Language(**given)
    except TypeError as error:
        raise ValueError(f"commands.{name}: {str(error).removeprefix('Language.__init__() ')}") from error


def extract_code(response: str, extract: Extract) -> tuple[str, str] | None:
    """(code, language tag) of the last fenced block. auto: where nothing is fenced, the whole response."""
    if extract != "whole":
        blocks = FENCE.findall(response)
        if blocks:
            _, tag, code = blocks[-1]
            return code, ALIASES.get(tag.lower(), tag.lower())
        if extract == "fenced" or "```" in response:
            return None
    return (response, "") if response.strip() else None
