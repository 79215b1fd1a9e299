"""Which engine arguments are not the user's, told with everything else that is wrong with a configuration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.schema.models import SglangStrategyConfig, VllmStrategyConfig
from roll_lite.distributed.strategy import build
from roll_lite.distributed.strategy.base import EngineNode
from roll_lite.distributed.strategy.build import declared_fields, engine_arguments_fit, share_of_device
from roll_lite.distributed.strategy.sglang.compat import settings as sglang
from roll_lite.distributed.strategy.vllm.compat import settings as vllm

CONFIGS = Path(__file__).parents[3] / "examples/configs"
JUDGE = "judges={main: {path: examples/models/tiny, strategy: {engine_args: {port: 80, block_size: 32}}}}"


def test_arguments_that_roll_lite_sets_itself_are_told_at_once_with_the_other_mistakes() -> None:
    overrides = ["steps=0", "actor_infer.strategy.engine_args={model: elsewhere, block_size: 32}", JUDGE]
    with pytest.raises(ConfigError) as failure:
        load_config("tiny_grpo", CONFIGS, overrides, further=[engine_arguments_fit])
    problems = {problem.path: problem for problem in failure.value.problems}
    for path in ("actor_infer.strategy.engine_args.model", "judges.main.strategy.engine_args.port"):
        assert problems[path].message == "roll_lite sets this one itself; remove it" and problems[path].source
    assert "steps" in problems and not any("block_size" in path for path in problems)


@pytest.mark.parametrize(("engine", "argument"), [("vllm", "logprobs_mode"), ("sglang", "sampling_backend"), ("sglang", "load_format")])
def test_each_engine_has_its_own(engine: str, argument: str) -> None:
    overrides = [f"actor_infer.strategy={engine}", f"actor_infer.strategy.engine_args={{{argument}: x}}"]
    with pytest.raises(ConfigError, match=rf"engine_args\.{argument} = .*roll_lite sets this one itself"):
        load_config("tiny_grpo", CONFIGS, overrides, further=[engine_arguments_fit])


CHECKED = [
    ("vllm", "quantization", "quantization"),
    ("vllm", "quantization_config", "quantization"),
    ("sglang", "modelopt_quant", "quantization"),
    ("vllm", "speculative_config", "speculation"),
    ("vllm", "spec_tokens", "speculation"),
]


@pytest.mark.parametrize(("engine", "argument", "key"), CHECKED)
def test_nothing_goes_round_the_checks_of_quantization_and_speculation(engine: str, argument: str, key: str) -> None:
    overrides = [f"actor_infer.strategy={engine}", f"actor_infer.strategy.engine_args={{{argument}: fp8}}"]
    with pytest.raises(ConfigError, match=rf"engine_args\.{argument} = .*write it as actor_infer\.strategy\.{key}"):
        load_config("tiny_grpo", CONFIGS, overrides, further=[engine_arguments_fit])
    judge = "judges={main: {path: examples/models/tiny, strategy: {engine_args: {quantization: bitsandbytes, speculative_config: {}}}}}"
    with pytest.raises(ConfigError) as failure:  # nobody asks it
        load_config("tiny_grpo", CONFIGS, [judge], further=[engine_arguments_fit])
    assert not any("engine_args" in problem.path for problem in failure.value.problems), "a judge's weights stay"


UNKNOWN = {"vllm": ("block_sise", "did you mean 'block_size'"), "sglang": ("page_sise", "did you mean 'page_size'")}
WITH_A_KEY = {"vllm": ("max_num_seqs", "max_running_requests"), "sglang": ("mem_fraction_static", "gpu_memory_utilization")}


@pytest.mark.parametrize("engine", UNKNOWN)
def test_what_the_installed_engine_does_not_know_is_told(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (unknown, hint), (known, key) = UNKNOWN[engine], WITH_A_KEY[engine]
    overrides = [f"actor_infer.strategy={engine}", f"actor_infer.strategy.engine_args={{{unknown}: 1, {known}: 2}}"]
    with pytest.raises(ConfigError) as failure:
        load_config("tiny_grpo", CONFIGS, overrides, further=[engine_arguments_fit])
    problems = {problem.path.rpartition(".")[2]: problem.message for problem in failure.value.problems}
    assert hint in problems[unknown] and f"write it as actor_infer.strategy.{key}" in problems[known]
    monkeypatch.setattr(build, "find_spec", lambda name: None)
    load_config("tiny_grpo", CONFIGS, [overrides[0], f"actor_infer.strategy.engine_args={{{unknown}: 1}}"], further=[engine_arguments_fit])


def test_a_judges_server_has_more_arguments_than_an_engine() -> None:
    judge = JUDGE.replace("port: 80, block_size: 32", "enable_auto_tool_choice: true, blok_size: 1")
    with pytest.raises(ConfigError) as failure:
        load_config("tiny_grpo", CONFIGS, [judge], further=[engine_arguments_fit])
    told = [one.path for one in failure.value.problems if "engine_args" in one.path]
    assert told == ["judges.main.strategy.engine_args.blok_size"]


@pytest.mark.slow
def test_the_fields_that_are_read_are_those_that_the_engines_have() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    assert declared_fields("vllm", vllm.FIELDS) == set(AsyncEngineArgs.__dataclass_fields__)


def test_what_roll_lite_sets_itself_is_declared() -> None:
    """SGLang cannot be imported without its stand-ins: these names are known to be right."""
    known = declared_fields("sglang", sglang.FIELDS)
    assert known >= {*sglang.OWN_ARGUMENTS, *sglang.SETTINGS, "page_size", "attention_backend"}
    assert declared_fields("vllm", vllm.FIELDS) >= {*vllm.OWN_ARGUMENTS, *vllm.SETTINGS, "block_size"}


@pytest.mark.parametrize("settings", [vllm, sglang])
def test_parts_of_an_engine_differ_in_their_number_alone(settings: Any) -> None:
    first, second = (settings.node_arguments(EngineNode(2, number, "10.0.0.7", ("10.0.0.1", 2345))) for number in range(2))
    assert {name for name in first if first[name] != second[name]} == {"node_rank"} and first["nnodes"] == 2
    assert set(first) <= set(settings.OWN_ARGUMENTS) and settings.node_arguments(None) == {}
    assert {"10.0.0.1:2345"} == {":".join(str(value) for name, value in first.items() if name not in ("nnodes", "node_rank"))}


@pytest.mark.parametrize(("strategy", "told"), [(VllmStrategyConfig, [0.2, 0.2, 0.2]), (SglangStrategyConfig, [0.2, 0.25, 1 / 3])])
def test_engines_that_share_a_gpu_have_equal_parts_of_it(strategy: Any, told: list[float]) -> None:
    """Of 100 GB each gets 20: vLLM is told a part of the GPU; SGLang one of the 100, 80 and 60 that are free when they start."""
    settings = strategy(gpu_memory_utilization=0.6)
    assert [share_of_device(settings, place, 3).gpu_memory_utilization for place in range(3)] == pytest.approx(told)
    assert share_of_device(settings, 0, 1) == settings


def test_a_check_of_the_configuration_does_not_wait_for_torch() -> None:
    script = "import sys, roll_lite.cli; print([name for name in ('torch', 'vllm', 'sglang', 'ray') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
