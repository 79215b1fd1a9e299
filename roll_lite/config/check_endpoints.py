"""Rewards that ask somebody over HTTP, and the judges that the run starts itself. What may be a secret is never repeated."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from roll_lite.config.files import is_folder
from roll_lite.config.hf_config import read_config
from roll_lite.config.model_files import has_chat_template, stored_tensors
from roll_lite.config.problems import Problem, did_you_mean
from roll_lite.config.schema import DomainConfig, JudgeServerConfig, RewardConfig, RewardTermConfig, RunConfig

JUDGE, REMOTE = "judge", "remote"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def asking(path: str, reward: RewardConfig) -> Iterator[tuple[str, RewardConfig | RewardTermConfig]]:
    """The reward and its terms, each with its place, that are of one of these types."""
    parts: list[tuple[str, RewardConfig | RewardTermConfig]] = [(path, reward)]
    parts += [(f"{path}.terms.{index}", term) for index, term in enumerate(reward.terms)]
    for place, part in parts:
        if part.type in (JUDGE, REMOTE):
            yield place, part


# ---------------------------------------------------------------- judges that the run starts


def _used(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    name = path.removeprefix("judges.")
    if not NAME.fullmatch(name):
        yield Problem(path, "a judge's name is part of file names: a letter, then letters, digits, '_' and '-'")
    asked = [part for domain in config.domains.values() for _, part in asking("", domain.reward) if part.type == JUDGE]
    if not any(part.args.get("server") == name for part in asked):
        message = f"no domain uses it; remove the section, or set a domain's reward to {{type: {JUDGE}, args: {{server: {name}}}}}"
        yield Problem(path, message)


def _model_folder(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    try:
        read_config(judge.path)
        stored_tensors(judge.path)
    except ValueError as error:
        yield Problem(f"{path}.path", str(error), str(judge.path))


JUDGE_CHECKS = (_used, _model_folder)


# ---------------------------------------------------------------- domains that ask


def _who_is_asked(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    for place, part in asking(f"{path}.reward", domain.reward):
        if part.type == JUDGE:
            yield from _judge_is_known(config, f"{place}.args", part.args)


def _judge_is_known(config: RunConfig, place: str, args: Mapping[str, Any]) -> Iterator[Problem]:
    server, known = args.get("server"), config.judges
    if server is None:
        for needed in ("url", "model"):
            if args.get(needed) is None:
                what = "the endpoint's address, such as https://host/v1" if needed == "url" else "the model's name at the endpoint"
                yield Problem(place, f"needs {needed}, {what}, or server, one of the run's own judges")
        return
    for unneeded in ("url", "model"):
        if unneeded in args:
            yield Problem(f"{place}.{unneeded}", "is the run's to say where there is a server; remove it, or server")
    if server not in known:
        hint = did_you_mean(str(server), known) if known else "there is no section `judges` yet"
        yield Problem(f"{place}.server", f"no such judge; {hint}", server)
        return
    folder = known[server].path
    if args.get("api", "chat") == "chat" and is_folder(folder) and not has_chat_template(folder):
        yield Problem(f"{place}.api", f"the tokenizer in {folder} has no chat template; use completions", args.get("api", "chat"))


def _keys_and_addresses(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    for place, part in asking(f"{path}.reward", domain.reward):
        variable = part.args.get("api_key_env")
        if variable is not None and not (isinstance(variable, str) and VARIABLE.fullmatch(variable)):
            yield Problem(f"{place}.args.api_key_env", "is no name of an environment variable; the key itself must not stand here")
        elif variable is not None and not os.environ.get(variable, "").strip():
            yield Problem(f"{place}.args.api_key_env", "there is no environment variable of this name; set it to the key, then start")
        given = part.args.get("url")
        urls = given if isinstance(given, list) else [given] if given is not None else []
        if given == []:
            yield Problem(f"{place}.args.url", "needs at least one address", given)
        for url in urls:
            yield from _address(f"{place}.args.url", url)


def _address(place: str, url: Any) -> Iterator[Problem]:
    try:
        parts = urlsplit(url)
    except (ValueError, TypeError, AttributeError):
        yield Problem(place, "is no URL")
        return
    if "@" in parts.netloc:
        yield Problem(
            place, "holds a user or a password, which would be written into logs; remove it, and name a key's variable in api_key_env"
        )
    elif parts.scheme not in ("http", "https") or not parts.hostname:
        yield Problem(place, "is no URL of the form http://host:port/path or https://...")


def _time_limits(config: RunConfig, path: str, domain: DomainConfig) -> Iterator[Problem]:
    limit = domain.reward.timeout_s
    for place, part in asking(f"{path}.reward", domain.reward):
        own = part.args.get("timeout_s")
        if isinstance(own, int | float) and own >= limit:
            message = f"one request may not take as long as the whole sample ({path}.reward.timeout_s: {limit:g}); use less, or raise that"
            yield Problem(f"{place}.args.timeout_s", message, own)


DOMAIN_ENDPOINT_CHECKS = (_who_is_asked, _keys_and_addresses, _time_limits)
