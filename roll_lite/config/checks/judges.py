"""The judges that the run starts itself: is each one used, and is its folder a model?"""

from __future__ import annotations

from collections.abc import Iterator

from roll_lite.config.checks.named import used_by_a_reward
from roll_lite.config.hf_config import read_config
from roll_lite.config.model_files import stored_tensors
from roll_lite.config.problems import Problem
from roll_lite.config.schema.domains import RewardConfig, RewardTermConfig
from roll_lite.config.schema.models import JudgeServerConfig
from roll_lite.config.schema.run import RunConfig

JUDGE = "judge"


def _used(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    asking = [part.args for domain in config.domains.values() for part in _parts(domain.reward) if part.type == JUDGE]
    servers = [args.get("server") for args in asking if "server" in args or "url" not in args]
    yield from used_by_a_reward(path, "judge", config.judges, servers, JUDGE, "server")


def _model_folder(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    try:
        read_config(judge.path)
        stored_tensors(judge.path)
    except ValueError as error:
        yield Problem(f"{path}.path", str(error), str(judge.path))


def _parts(reward: RewardConfig) -> list[RewardConfig | RewardTermConfig]:
    return [reward, *reward.terms]


JUDGE_CHECKS = (_used, _model_folder)
