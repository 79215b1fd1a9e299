"""Checks of sections that the user names and rewards refer to: the name is fit for files, and a reward uses the section."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from roll_lite.config.problems import Problem, close_names
from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.config.schema.run import RunConfig

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def used_by_a_reward(config: RunConfig, path: str, what: str, sections: Collection[str], reward: str, argument: str) -> Iterator[Problem]:
    """Check one of `sections`: rewards of type `reward` name a section in their `argument`, or give a url instead."""
    name = path.partition(".")[2]
    parts: list[RewardConfig | RewardTermConfig] = []
    for domain in config.domains.values():
        parts += [domain.reward, *domain.reward.terms]
    asked = [part.args.get(argument) for part in parts if part.name == reward and (argument in part.args or "url" not in part.args)]
    others = [part.name for part in parts if part.name != reward and argument in part.args and "." not in part.name]
    misspelt = any(close_names(other, [reward]) for other in others)
    if not NAME.fullmatch(name):
        yield Problem(path, f"a {what}'s name is part of file names: a letter, then letters, digits, '_' and '-'")
    known = all(isinstance(one, str) and one in sections for one in asked)  # an unknown name may be this one misspelt
    if name not in asked and not misspelt and known:
        message = f"no domain uses it; remove the section, or set a domain's reward to {{name: {reward}, args: {{{argument}: {name}}}}}"
        yield Problem(path, message)
