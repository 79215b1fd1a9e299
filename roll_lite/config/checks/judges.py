"""The judges that the run starts itself: is each one used, and is its folder a model?"""

from __future__ import annotations

import re
from collections.abc import Iterator

from roll_lite.config.hf_config import read_config
from roll_lite.config.model_files import stored_tensors
from roll_lite.config.problems import Problem
from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.config.schema.models import JudgeServerConfig
from roll_lite.config.schema.run import RunConfig

JUDGE = "judge"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


def _used(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    name = path.removeprefix("judges.")
    if not NAME.fullmatch(name):
        yield Problem(path, "a judge's name is part of file names: a letter, then letters, digits, '_' and '-'")
    asking = [part.args for domain in config.domains.values() for part in _parts(domain.reward) if part.type == JUDGE]
    servers = [args.get("server") for args in asking if "server" in args or "url" not in args]
    if name not in servers and all(server in config.judges for server in servers):  # another one is a mistake, and may mean this
        message = f"no domain uses it; remove the section, or set a domain's reward to {{type: {JUDGE}, args: {{server: {name}}}}}"
        yield Problem(path, message)


def _model_folder(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    try:
        read_config(judge.path)
        stored_tensors(judge.path)
    except ValueError as error:
        yield Problem(f"{path}.path", str(error), str(judge.path))


def _parts(reward: RewardConfig) -> list[RewardConfig | RewardTermConfig]:
    return [reward, *reward.terms]


JUDGE_CHECKS = (_used, _model_folder)
