"""Checks of the rewards in a configuration: types, arguments, and both within the run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from socket import create_connection
from threading import Thread
from time import monotonic
from urllib.parse import urlsplit

from roll_lite.config.checks.functions import check_function
from roll_lite.config.checks.secrets import texts_in
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema.base import readable
from roll_lite.config.schema.domains import DomainConfig, RewardConfig, RewardTermConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.check import columns_missing
from roll_lite.files import first_line
from roll_lite.rewards.arguments import read_arguments
from roll_lite.rewards.registry import REWARDS, reward_type
from roll_lite.rewards.reward_type import RewardType

ADDRESS = re.compile(r"https?://[^/?#\s]", re.IGNORECASE)
LOOK_S = 2.0
"""Time limit of a connection to a reward's address."""


def check_rewards(config: RunConfig) -> Iterator[Problem]:
    for name, domain in config.domains.items():
        yield from readable(_reward(config, f"domains.{name}.reward", domain) if "reward" in vars(domain) else ())


def address_notes(config: RunConfig) -> list[str]:
    """Notes about reward addresses that do not answer now. A service may start later, or be visible from other machines only."""
    sections = {f"domains.{name}.reward": domain.reward for name, domain in config.domains.items()}
    addresses = {text: path for place, reward in sections.items() for path, text in texts_in(reward, place) if ADDRESS.match(text)}
    silent: dict[str, str] = {}
    looks = [Thread(target=_look, args=(address, silent), daemon=True) for address in addresses]
    for look in looks:
        look.start()
    until = monotonic() + 2 * LOOK_S
    for look in looks:
        look.join(max(0.0, until - monotonic()))
    reasons = {address: silent.get(address, "no answer yet") for address in addresses}
    return [f"{addresses[address]}: {address} cannot be reached from here ({why})" for address, why in reasons.items() if why]


def _look(address: str, silent: dict[str, str]) -> None:
    parts = urlsplit(address)
    try:
        with create_connection((parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)), timeout=LOOK_S):
            silent[address] = ""
    except (OSError, ValueError) as error:
        silent[address] = first_line(error)


def _reward(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    reward = domain.reward
    yield from readable(_part(config, path, domain, reward))
    for index, term in enumerate(reward.terms):
        yield from readable(_part(config, f"{path}.terms.{index}", domain, term))


def _data_of(place: str, domain: DomainConfig, part: RewardConfig | RewardTermConfig, read: RewardType) -> Iterator[Problem]:
    """Problems with columns that the reward reads and the data lacks."""
    if read.needs_answer() and domain.data.answer is None:
        message = f"{part.name} ({place}) reads the reference answer: name its column"
        yield Problem(f"{place.partition('.reward')[0]}.data.answer", message, None)
    for argument, columns in read.named_columns().items():
        for column, message in columns_missing(domain.data, columns):
            yield Problem(f"{place}.args.{argument}", message, column)


def _part(config: RunConfig, place: str, domain: DomainConfig, part: RewardConfig | RewardTermConfig) -> Iterator[Problem]:
    """Problems with a type and its arguments at `place`, as the reward itself or as a term."""
    reward = domain.reward
    if "." in part.name:
        yield from check_function(place, "name", part.name, part.args)
        return
    if part.name not in REWARDS:
        message = f"no such reward; {did_you_mean(part.name, REWARDS)} A function of your own is a dotted path, package.module.function"
        yield Problem(f"{place}.name", message, part.name)
        return
    read = read_arguments(part.name, reward_type(part.name), part.args, f"{place}.args")
    if isinstance(read, list):
        yield from read
        return
    if part is not reward and read.within_a_run:
        message = f"{part.name} gives a domain's reward itself, not a further term of it; make it the reward's type"
        yield Problem(f"{place}.name", message, part.name)
    yield from readable(read.in_run(config, place, reward.timeout_s))
    yield from readable(_data_of(place, domain, part, read))
