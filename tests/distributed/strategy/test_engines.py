"""Which engine arguments are not the user's, told with everything else that is wrong with a configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.distributed.strategy.engines import own_arguments_set

CONFIGS = Path(__file__).parents[3] / "examples/configs"
JUDGE = "judges={main: {path: examples/models/tiny, strategy: {engine_args: {port: 80, block_size: 32}}}}"


def test_arguments_that_roll_lite_sets_itself_are_told_at_once_with_the_other_mistakes() -> None:
    overrides = ["steps=0", "actor_infer.strategy.engine_args={model: elsewhere, block_size: 32}", JUDGE]
    with pytest.raises(ConfigError) as failure:
        load_config("tiny_grpo", CONFIGS, overrides, further=[own_arguments_set])
    problems = {problem.path: problem for problem in failure.value.problems}
    for path in ("actor_infer.strategy.engine_args.model", "judges.main.strategy.engine_args.port"):
        assert problems[path].message == "roll_lite sets this one itself; remove it" and problems[path].source
    assert "steps" in problems and not any("block_size" in path for path in problems)


@pytest.mark.parametrize(("engine", "argument"), [("vllm", "logprobs_mode"), ("sglang", "sampling_backend")])
def test_each_engine_has_its_own(engine: str, argument: str) -> None:
    overrides = [f"actor_infer.strategy={engine}", f"actor_infer.strategy.engine_args={{{argument}: x}}"]
    with pytest.raises(ConfigError, match=rf"engine_args\.{argument} = .*roll_lite sets this one itself"):
        load_config("tiny_grpo", CONFIGS, overrides, further=[own_arguments_set])


def test_a_check_of_the_configuration_does_not_wait_for_torch() -> None:
    script = "import sys, roll_lite.cli; print([name for name in ('torch', 'vllm', 'sglang', 'ray') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
