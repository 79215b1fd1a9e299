"""Checks of the judges that the run starts: a reward uses each one, and its folder holds a model."""

from __future__ import annotations

from collections.abc import Iterator

from roll_lite.config.checks.named import used_by_a_reward
from roll_lite.config.problems import Problem
from roll_lite.config.schema.models import JudgeServerConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.models.hf_config import read_config
from roll_lite.models.model_files import TOKENIZER_FILES, has_tokenizer, stored_tensors, wrong_settings

JUDGE = "judge"


def _used(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    yield from used_by_a_reward(config, path, "judge", config.judges, JUDGE, "server")


def _model_folder(config: RunConfig, path: str, judge: JudgeServerConfig) -> Iterator[Problem]:
    try:
        read_config(judge.path)
        stored_tensors(judge.path)
        wrong_settings(judge.path)
        if not has_tokenizer(judge.path):
            raise ValueError(f"no tokenizer in this folder (none of {', '.join(TOKENIZER_FILES)})")
    except ValueError as error:
        yield Problem(f"{path}.path", str(error), str(judge.path))


JUDGE_CHECKS = (_used, _model_folder)
