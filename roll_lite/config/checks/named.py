"""Sections that the user names and rewards refer to: is the name fit for files, and does a reward use it?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from roll_lite.config.problems import Problem

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def used_by_a_reward(
    path: str, what: str, sections: Collection[str], asked: Sequence[Any], reward: str, argument: str
) -> Iterator[Problem]:
    """`sections`: all of them; `asked`: those that rewards of this type name in their argument."""
    name = path.partition(".")[2]
    if not NAME.fullmatch(name):
        yield Problem(path, f"a {what}'s name is part of file names: a letter, then letters, digits, '_' and '-'")
    if name not in asked and all(one in sections for one in asked):  # another one is a mistake, and may mean this
        message = f"no domain uses it; remove the section, or set a domain's reward to {{type: {reward}, args: {{{argument}: {name}}}}}"
        yield Problem(path, message)
