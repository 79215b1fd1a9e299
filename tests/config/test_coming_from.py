"""Configurations of other trainers: numbers worked out by hand, files that load, nothing dropped silently, tables that fit the schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from roll_lite.cli import PROJECTS, main
from roll_lite.config.coming_from import convert
from roll_lite.config.coming_from.convert import Conversion, table_of
from roll_lite.config.loading import load_config
from roll_lite.config.problems import ConfigError
from roll_lite.config.validation import sections

VERL = """\
set -x
# export NOT_READ=1
model_path=$HOME/models/policy        # a comment
max_len=$((1024 * 4))
prompts=${PROMPTS:-1024}
train_files="['$HOME/gsm8k/train.parquet', '$HOME/math/train.parquet']"
python3 prepare.py --local_dir data
python3 -m verl.trainer.main_ppo --config-path=config \\
    --config-name='ppo_megatron_trainer.yaml'\\
    algorithm.adv_estimator=grpo \\
    data.train_files="$train_files" \\
    data.train_batch_size=${prompts} \\
    data.max_prompt_length=512 data.max_response_length=$max_len \\
    # data.old_key=3 \\
    actor_rollout_ref.model.path="$model_path" \\
    actor_rollout_ref.actor.optim.lr=5e-7 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_epochs=2 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.rollout.n=5 actor_rollout_ref.rollout.name=sglang \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    +actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3 \\
    algorithm.use_kl_in_reward=False algorithm.kl_ctrl.kl_coef=0.3 \\
    trainer.logger=['console','wandb'] trainer.project_name=papers \\
    trainer.n_gpus_per_node=8 trainer.nnodes=2 \\
    trainer.total_training_steps=300 trainer.save_freq=20 trainer.test_freq=-1 \\
    trainer.balance_bach=True \\
    trainer.default_local_dir=$(pwd)/ckpts \\
    trainer.experiment_name="two nodes" $@ 2>&1 | tee run.log
"""
OPENRLHF = """\
CKPT_ARGS=(
   --pretrain Qwen/Qwen3-4B   # the policy
   # --reward_pretrain not/read
   --save_steps 10
)
ALGORITHM_ARGS=( --advantage_estimator reinforce_baseline --eps_clip_low_high 0.2 "0.27" )
ALGORITHM_ARGS+=(--init_kl_coef 1e-3 --use_kl_loss --kl_estimator k2)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray \\
   ${CKPT_ARGS[@]} "${ALGORITHM_ARGS[@]}" --rollout_batch_size 128 --n_samples_per_prompt 8 \\
   --train_batch_size=256 --max_samples 12800 --num_episodes 2 --lr_warmup_ratio 0.05 --actor_learning_rate 4e-7 \\
   --actor_num_nodes 1 --actor_num_gpus_per_node 4 --vllm_num_engines 2 --vllm_tensor_parallel_size 2 --colocate_all_models \\
   --remote_rm_url http://host:5000/get_reward --prompt_data data/train.jsonl --eval_steps -1 --save_path /x/exp/mine --zero_stage 3
"""
ROLL = """\
exp_name: two_domains
max_steps: 40
rollout_batch_size: 64
num_return_sequences_in_group: 8
prompt_length: 1024
response_length: 2048
adv_estimator: reinforce
reward_clip: 10
dual_clip_loss: true
pg_clip: 0.1
difficulty_mask: true
difficulty_low_threshold: 0.1
difficulty_high_threshold: 0.9
add_token_level_kl: false
init_kl_coef: 0.2
norm_mean_type: None
pretrain: Qwen/Qwen3-8B
num_gpus_per_node: 8
tracker_kwargs: {api_key: hush-hush}
actor_train:
  model_args: {dtype: bf16}
  training_args: {learning_rate: 2.0e-6, per_device_train_batch_size: 2, gradient_accumulation_steps: 16, warmup_steps: 20}
  data_args:
    file_name: [data/math.jsonl, data/code.jsonl]
    domain_interleave_probs: {math_rule: 0.7, code_sandbox: 0.3}
  strategy_args: {strategy_name: megatron_train, strategy_config: {tensor_model_parallel_size: 2, pipeline_model_parallel_size: 1}}
  device_mapping: list(range(0,8))
actor_infer:
  generating_args: {max_new_tokens: "${response_length}", num_return_sequences: "${num_return_sequences_in_group}", top_k: -1}
  strategy_args: {strategy_name: vllm, strategy_config: {gpu_memory_utilization: 0.6, block_size: 16}}
  device_mapping: list(range(8,12))
rewards:
  math_rule:
    worker_cls: roll.pipeline.rlvr.rewards.math_rule_reward_worker.MathRuleRewardWorker
    tag_included: [gsm8k, aime]
    world_size: 8
  code_sandbox:
    worker_cls: roll.pipeline.rlvr.rewards.code_sandbox_reward_worker.CodeSandboxRewardWorker
    tag_included: [KodCode]
"""


def at(config: Any, path: str) -> Any:
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else getattr(config, key)
    return config


@pytest.fixture(scope="module", autouse=True)
def tables_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convert, "table_of", cache(table_of))
        yield


@pytest.fixture(scope="module")
def verl() -> Conversion:
    return Conversion("verl", VERL, "run.sh")


@pytest.fixture(scope="module")
def openrlhf() -> Conversion:
    return Conversion("openrlhf", OPENRLHF, "run.sh")


@pytest.fixture(scope="module")
def roll() -> Conversion:
    return Conversion("roll", ROLL, "rlvr.yaml")


VERL_NUMBERS = {
    "experiment": "two_nodes",
    "steps": 300,
    "model.path": "${oc.env:HOME}/models/policy",
    "rollout.prompts_per_step": 1024,
    "rollout.samples_per_prompt": 5,
    "algorithm.mini_batches": 4,  # 1024 prompts / 256 prompts, whatever n is
    "algorithm.ppo_epochs": 2,
    "actor_train.optimizer.lr": 5e-7,
    "actor_train.optimizer.warmup_steps": 80,  # 10 steps of 4 x 2 updates
    "actor_train.optimizer.weight_decay": 0.01,  # verl's default, not ours
    "actor_train.optimizer.betas": [0.9, 0.999],
    "actor_train.devices": 16,
    "actor_train.strategy.tensor_parallel": 2,
    "placement": {"name": "colocated", "nodes": 2},
    "actor_infer.strategy": {
        "name": "sglang",
        "gpu_memory_utilization": 0.6,
        "tensor_parallel": 2,
        "engine_args": {"attention_backend": "fa3"},
    },
    "algorithm.policy_loss": {"clip_high": 0.28, "dual_clip": 3.0},
    "algorithm.aggregation": "constant",
    "algorithm.kl_in_loss": {"coef": 0.002},
    "domains.main.sampling": {"max_prompt_tokens": 512, "max_tokens": 4096},
    "domains.main.data.train": ["${oc.env:HOME}/gsm8k/train.parquet", "${oc.env:HOME}/math/train.parquet"],
    "trackers": [{"name": "jsonl"}, {"name": "wandb", "args": {"project": "papers"}}],
    "checkpoint": {"every": 20},
    "validation": {"enabled": False, "sampling": {"temperature": 0}},
}
OPENRLHF_NUMBERS = {
    "experiment": "mine",
    "steps": 200,  # 12800 rows / 128 prompts, twice
    "rollout.prompts_per_step": 128,
    "algorithm.mini_batches": 4,  # 128 x 8 samples / 256 samples
    "algorithm.kl_in_loss": {"coef": 0.001, "estimator": "k2"},
    "algorithm.advantage": {"name": "reinforce_plus_plus", "baseline": "group"},
    "algorithm.policy_loss": {"clip_high": 0.27},
    "algorithm.reward": {"clip": 10},
    "actor_train.optimizer.lr": 4e-7,
    "actor_train.optimizer.min_lr": pytest.approx(4e-8),
    "actor_train.optimizer.decay": "cosine",
    "actor_train.optimizer.warmup_steps": 40,  # 5% of 200 steps with 4 updates
    "actor_infer.devices": 4,
    "actor_infer.strategy.gpu_memory_utilization": 0.95,
    "placement": {"name": "colocated", "devices_per_node": 4},
    "checkpoint": {"keep": 3, "every": 10},
    "domains.main.reward": {"name": "remote", "args": {"url": ["http://host:5000/get_reward"]}},
}
ROLL_NUMBERS = {
    "steps": 40,
    "algorithm.mini_batches": 4,  # 64 x 8 samples / (2 x 16 samples on each of 8 / 2 ranks)
    "algorithm.policy_loss": {"clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2},
    "algorithm.masks": {"group_mean": [0.1, 0.9]},
    "algorithm.reward": {"clip": 10},
    "algorithm.aggregation": "sequence_mean_token_mean",
    "actor_train.devices": [0, 1, 2, 3, 4, 5, 6, 7],
    "actor_train.optimizer": {"lr": 2e-6, "warmup_steps": 20},
    "actor_infer.devices": [8, 9, 10, 11],
    "placement": {"name": "apart", "nodes": 2},
    "domains.math_rule.share": 0.7,
    "domains.math_rule.reward": {"name": "math", "workers": 8},
    "domains.math_rule.data.tags": ["gsm8k", "aime"],
    "domains.code_sandbox.reward": {"name": "code"},
    "domains.code_sandbox.data.train": ["data/math.jsonl", "data/code.jsonl"],
    "domains.code_sandbox.sampling": {"max_tokens": 2048},
}


@pytest.mark.parametrize(
    ("project", "path", "expected"),
    [
        (project, path, expected)
        for project, numbers in (("verl", VERL_NUMBERS), ("openrlhf", OPENRLHF_NUMBERS), ("roll", ROLL_NUMBERS))
        for path, expected in numbers.items()
    ],
)
def test_a_setting_means_the_same(project: str, path: str, expected: object, request: pytest.FixtureRequest) -> None:
    assert at(request.getfixturevalue(project).config, path) == expected


@pytest.mark.parametrize("project", PROJECTS)
def test_an_imported_file_loads(project: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    text = yaml.safe_dump(request.getfixturevalue(project).config)
    (tmp_path / "mine.yaml").write_text(text)
    config = load_config("mine", tmp_path, ["trackers=[{name: jsonl}]"], files=False)
    for path, expected in {"verl": VERL_NUMBERS, "openrlhf": OPENRLHF_NUMBERS, "roll": ROLL_NUMBERS}[project].items():
        if isinstance(expected, int | float) and at(yaml.safe_load(text), path) == expected:
            assert at(config, path) == expected
    assert "&" not in text, "no anchors"


def test_a_file_that_says_everything_passes_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(
        """openrlhf.cli.train_ppo_ray --pretrain examples/models/tiny --prompt_data examples/data/add_train.jsonl \\
        --input_key prompt --label_key answer --max_samples 320 --rollout_batch_size 32 --n_samples_per_prompt 8 --train_batch_size 128 \\
        --prompt_max_len 12 --generate_max_len 12 --advantage_estimator group_norm --init_kl_coef 0 --colocate_all_models \\
        --actor_num_gpus_per_node 1 --vllm_num_engines 1 --remote_rm_url http://127.0.0.1:5000/get_reward"""
    )
    assert main(["import", "openrlhf", "run.sh", "--out", "mine.yaml"]) == 0
    assert main(["check", "--config-name", "mine"]) == 0, capsys.readouterr().err
    assert yaml.safe_load(capsys.readouterr().out)["steps"] == 10


def test_what_is_not_converted_is_listed_with_line_value_and_remedy(verl: Conversion) -> None:
    told = {problem.path: str(problem) for problem in verl.told}
    assert told["trainer.balance_bach"] == (
        "trainer.balance_bach = true: is not known here; did you mean 'trainer.balance_batch'?  [run.sh:34]"
    )
    assert told["algorithm.kl_ctrl.kl_coef"].startswith("algorithm.kl_ctrl.kl_coef = 0.3: not used without use_kl_in_reward")
    assert told["algorithm.kl_ctrl.kl_coef"].endswith("  [run.sh:30]")
    assert "run_dir" in told["trainer.default_local_dir"] and "[run.sh:35]" in told["trainer.default_local_dir"]
    assert not {"data.old_key", "local_dir"} & told.keys(), "comments and other commands are not read"
    assert sum("is not known here" in text for text in told.values()) == 1


def test_our_defaults_are_left_out(verl: Conversion, openrlhf: Conversion) -> None:
    assert "estimator" not in verl.config["algorithm"]["kl_in_loss"], "low_var_kl is k3, our default"
    assert "advantage" not in verl.config["algorithm"], "grpo"
    assert "every" not in verl.config["validation"], "-1 is 0"
    assert "samples_per_prompt" not in openrlhf.config["rollout"], "8"


def test_lines_of_arrays_are_those_of_their_words(openrlhf: Conversion) -> None:
    assert [str(one) for one in openrlhf.told if one.path in ("use_kl_loss", "zero_stage")] == [
        "use_kl_loss = true: chooses between algorithm.kl_in_loss and kl_in_reward  [run.sh:7]",
        "zero_stage = 3: DeepSpeed's or FSDP's; Megatron-Core shards by actor_train.strategy  [run.sh:12]",
    ]


def test_every_reward_is_a_domain(roll: Conversion) -> None:
    assert list(roll.config["domains"]) == ["math_rule", "code_sandbox"], "other keys with a name, such as block_size, are none"
    assert any(one.path.endswith("block_size") for one in roll.told)


def test_secrets_are_not_shown(roll: Conversion) -> None:
    assert any(one.path == "tracker_kwargs.api_key" for one in roll.told)
    assert "hush-hush" not in "\n".join(map(str, roll.told)) + yaml.safe_dump(roll.config)


def test_a_command_line_alone_is_enough() -> None:
    done = Conversion(
        "openrlhf", "--actor.model_name_or_path m --actor.adam.lr 2e-6 --algo.kl.init_coef 0.02 --algo.kl.target 6", "line.txt"
    )
    assert done.config["model"] == {"path": "m"} and done.config["actor_train"]["optimizer"]["lr"] == 2e-6
    assert done.config["algorithm"]["kl_in_reward"] == {"coef": 0.02, "controller": {"name": "adaptive", "target": 6}}
    assert done.config["steps"] == "???" and done.config["critic"] == {"optimizer": {"lr": 9e-6}}


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("actor_rollout_ref.actor.optim.lr=fast", "actor_train.optimizer.lr: expected number > 0  [run.sh:2]"),
        ("data.train_batch_size=many", "rollout.prompts_per_step: expected integer > 0  [run.sh:2]"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=all", "does not fit algorithm.mini_batches; set that  [run.sh:2]"),
        ("algorithm.adv_estimator=optimal_token_baseline", "algorithm.advantage.name may be gae, grpo"),
        ("actor_rollout_ref.model.path=$(find /models)", "holds a part that is known there only; set model.path  [run.sh:2]"),
    ],
)
def test_a_value_without_counterpart_is_told(setting: str, told: str) -> None:
    done = Conversion("verl", f"python3 -m verl.trainer.main_ppo \\\n  {setting} trainer.total_training_steps=3", "run.sh")
    (problem,) = [str(one) for one in done.told if one.path == setting.partition("=")[0]]
    assert told in problem and setting.partition("=")[0] in problem


@pytest.mark.parametrize(
    ("project", "text", "reward", "told"),
    [
        ("roll", "{}: group\n{}: group", {"over": "group"}, []),
        ("roll", "norm_mean_type: batch\nnorm_std_type: null", {"over": "batch", "std": False}, []),
        ("roll", "{}: group\n{}: batch", None, ["norm_mean_type", "norm_std_type"]),
        ("roll", "{1}: batch\n{0}: group", None, ["norm_mean_type", "norm_std_type"]),
        ("openrlhf", "--reward_clip_range -5 5", 5, []),
        ("openrlhf", "--reward_clip_range -1 10", None, ["reward_clip_range"]),
    ],
)
def test_settings_that_meet_in_one_key(project: str, text: str, reward: object, told: list[str]) -> None:
    done = Conversion(project, text.format("norm_mean_type", "norm_std_type"), "run.sh" if project == "openrlhf" else "rlvr.yaml")
    section = done.config.get("algorithm", {}).get("reward", {})
    assert section.get("normalize", section.get("clip")) == reward
    assert sorted(one.path for one in done.told if one.path in (*told, "norm_mean_type", "norm_std_type", "reward_clip_range")) == told


@pytest.mark.parametrize(
    "buffer", ["custom_reward_function.overlong_buffer", "reward_model.reward_models.judge.reward_kwargs.overlong_buffer_cfg"]
)
def test_the_overlong_punishment_of_dapo(buffer: str) -> None:
    settings = f"{buffer}.enable=True {buffer}.len=4096 {buffer}.penalty_factor=0.5 algorithm.filter_groups.enable=True"
    done = Conversion("verl", f"x -m verl.main data.gen_batch_size=3072 {settings}", "run.sh")
    assert done.config["algorithm"]["reward"] == {"overlong": {"buffer_tokens": 4096, "penalty": 0.5}}
    assert done.config["rollout"]["oversample"] == 3 and done.config["rollout"]["filter"] == {"name": "accuracy"}


FULLY_ASYNCHRONOUS = """\
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)}
NODES=${NODES:-}
name=${NAME:-}
extra=()
case "${DEVICE}" in
    gpu)
        per_node=${NODES_DEVICES:-${NGPUS:-8}}
        ;;
    npu)
        per_node=16
        extra+=("trainer.device=npu")
        ;;
esac
name=${name:-two_pools}
python -m recipe.fully_async_policy.fully_async_main \\
    data.train_batch_size=0 data.gen_batch_size=1 trainer.experiment_name="$name" "${extra[@]}" \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.rollout.n=16 model_engine=megatron \\
    actor_rollout_ref.actor.megatron.use_dist_checkpointing=False \\
    +actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL_DECODE_ONLY \\
    trainer.nnodes=4 trainer.n_gpus_per_node=${per_node} rollout.nnodes=${NODES:-12} rollout.n_gpus_per_node=${per_node} \\
    rollout.total_rollout_steps=$(((512*400))) rollout.test_freq=20 \\
    async_training.staleness_threshold=0.5 async_training.trigger_parameter_sync_step=4 async_training.partial_rollout=True \\
    async_training.use_rollout_log_probs=True reward.reward_model.model_path=acme/rm
"""
"""Settings of verl's asynchronous scripts, and what its scripts do to run on GPUs and NPUs."""


def test_a_fully_asynchronous_run_of_verl() -> None:
    done = Conversion("verl", FULLY_ASYNCHRONOUS, "run.sh")
    config, told = done.config, {problem.path: problem.message for problem in done.told}
    assert config["rollout"] == {
        "prompts_per_step": 512,  # 4 x 128
        "samples_per_prompt": 16,
        "supply": "async",
        "max_staleness": 1,
        "on_sync": "pause",
    }
    assert config["algorithm"]["mini_batches"] == 4 and config["algorithm"]["old_log_probs"] == "rollout"
    assert config["steps"] == 400 and config["validation"]["every"] == 20 and config["experiment"] == "two_pools"
    assert config["placement"] == {"name": "split", "nodes": 16}, "devices_per_node: 8, not the NPUs' 16"
    assert (config["actor_train"]["devices"], config["actor_infer"]["devices"]) == (32, 96)
    assert not any("is not known here" in message for message in told.values())
    assert "trainer.device" not in told, "of the NPUs' branch"
    assert told["data.gen_batch_size"] == "asynchronous engines start prompts one by one"
    assert "engine_args" in told["actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode"]
    assert "without reward_model.enable" in told["reward.reward_model.model_path"]


ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"


def of_verl(*settings: str) -> dict[str, Any]:
    return Conversion("verl", f"x -m verl.main {' '.join(settings)}", "run.sh").config


def test_engines_of_a_pool_of_their_own_are_one_step_ahead() -> None:
    config = of_verl(
        "data.train_batch_size=512 trainer.nnodes=2 trainer.n_gpus_per_node=6",
        f"{ROLLOUT}.nnodes=2 {ROLLOUT}.n_gpus_per_node=2 {ROLLOUT}.n=4 {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.optim.lr_warmup_steps=10",
    )
    assert config["placement"] == {"name": "split", "nodes": 2}, "6 and 2 devices share a node of 8"
    assert (config["actor_train"]["devices"], config["actor_infer"]["devices"]) == (12, 4)
    assert config["rollout"] == {"prompts_per_step": 512, "samples_per_prompt": 4, "supply": "one_step_off"}
    assert config["actor_train"]["optimizer"]["warmup_steps"] == 160


def test_older_scripts_give_the_engines_nodes_at_the_top() -> None:
    config = of_verl(f"data.train_batch_size=512 trainer.nnodes=1 rollout.nnodes=1 {ACTOR}.ppo_mini_batch_size=32")
    assert config["rollout"]["prompts_per_step"] == 512 and config["rollout"]["supply"] == "one_step_off"
    assert config["algorithm"]["mini_batches"] == 16 and config["algorithm"]["old_log_probs"] == "rollout"
    recomputes = of_verl(f"data.train_batch_size=512 trainer.nnodes=1 rollout.nnodes=1 {CORRECTION}.bypass_mode=False")
    assert "old_log_probs" not in recomputes["algorithm"] and recomputes["rollout"]["supply"] == "one_step_off"


def test_the_warmup_of_an_asynchronous_run_counts_local_steps() -> None:
    config = of_verl(
        f"rollout.nnodes=1 {ACTOR}.ppo_mini_batch_size=32 {ACTOR}.optim.lr_warmup_steps=10",
        "async_training.require_batches=4 async_training.trigger_parameter_sync_step=4 async_training.staleness_threshold=0.1",
    )
    assert config["algorithm"]["mini_batches"] == 16 and config["actor_train"]["optimizer"]["warmup_steps"] == 40


@pytest.mark.parametrize(
    ("settings", "actor", "reference"),
    [
        (f"{ACTOR}.use_dynamic_bsz=True", {"train_micro_batch_tokens": 9000, "micro_batch_tokens": 8000}, {"micro_batch_tokens": 7000}),
        ("", {"train_micro_batch_size": 3, "micro_batch_size": 4}, {"micro_batch_size": 5}),
        (
            f"{ACTOR}.use_dynamic_bsz=True {ROLLOUT}.log_prob_use_dynamic_bsz=False",
            {"train_micro_batch_tokens": 9000, "micro_batch_size": 4},
            {"micro_batch_tokens": 7000},
        ),
    ],
)
def test_micro_batches_are_limited_as_verl_does_it(settings: str, actor: dict[str, Any], reference: dict[str, Any]) -> None:
    config = of_verl(
        f"{settings} {ACTOR}.use_kl_loss=True {ACTOR}.ppo_max_token_len_per_gpu=9000 {ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu=8000 {ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=7000 actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=5",
    )
    limits = [{key: value for key, value in config[role].items() if "micro" in key} for role in ("actor_train", "reference")]
    assert limits == [actor, reference]


@pytest.mark.parametrize(
    ("settings", "algorithm"),
    [
        ("rollout_is=sequence", {"mismatch_correction": {"weight": {"level": "sequence"}}}),
        ("rollout_is=token {}.bypass_mode=True", {"old_log_probs": "rollout"}),
        (
            "rollout_is=token {}.rollout_is_threshold=5.0 {}.bypass_mode=True {}.loss_type=reinforce",
            {"old_log_probs": "rollout", "policy_loss": {"name": "cispo"}},  # the ratio is at most 5, as by default
        ),
        (
            "rollout_is=sequence {}.bypass_mode=True {}.loss_type=reinforce",
            {"old_log_probs": "rollout", "policy_loss": {"name": "topr", "positive": [0, 2.0], "negative": [0, 2.0]}},
        ),
        (
            'rollout_rs=seq_mean_k1 {}.rollout_rs_threshold="0.5_1.25"',
            {"mismatch_correction": {"filters": [{"level": "sequence_mean", "estimator": "ratio", "low": 0.8, "high": 2.0}]}},
        ),
        (
            "rollout_is=token {}.rollout_is_threshold=0.5_5",
            {"mismatch_correction": {"weight": {"low": 0.5, "high": 5.0, "mode": "mask"}}},
        ),
        (
            'rollout_rs=seq_mean_k1 {}.rollout_rs_threshold="0.5_5"',
            {"mismatch_correction": {"filters": [{"level": "sequence_mean", "estimator": "ratio", "low": 0.2, "high": 2.0}]}},
        ),
        (
            "rollout_rs=token_k3 {}.rollout_rs_threshold=0.01",
            {"mismatch_correction": {"filters": [{"level": "token", "estimator": "k3", "low": None, "high": 0.01}]}},
        ),
    ],
)
def test_the_correction_of_engine_and_trainer(settings: str, algorithm: dict[str, Any]) -> None:
    config = of_verl(f"{CORRECTION}.{settings.replace('{}', CORRECTION)}")["algorithm"]
    parts = {"policy_loss": {"dual_clip": 3.0}} | algorithm
    assert {key: config.get(key) for key in parts} == parts
    assert ("mismatch_correction" in config) == ("mismatch_correction" in algorithm)


def test_validation_samples_unless_it_is_told_not_to() -> None:
    temperature = f"{ROLLOUT}.val_kwargs.temperature=0.7"
    assert of_verl(temperature)["validation"]["sampling"]["temperature"] == 0.7
    assert of_verl(temperature, f"{ROLLOUT}.val_kwargs.do_sample=False")["validation"]["sampling"]["temperature"] == 0


def test_without_filter_the_generated_batch_is_trained() -> None:
    config = of_verl(f"data.gen_batch_size=1536 data.train_batch_size=512 {ACTOR}.ppo_mini_batch_size=32")
    assert config["rollout"] == {"prompts_per_step": 1536, "samples_per_prompt": 1} and config["algorithm"]["mini_batches"] == 48


def test_a_kl_without_weight_needs_no_reference() -> None:
    assert "reference" not in of_verl("algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.0 actor_rollout_ref.ref.strategy=fsdp2")
    assert "reference" not in of_verl(f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.0 actor_rollout_ref.ref.strategy=fsdp2")


def test_the_schedule_of_veomni() -> None:
    assert of_verl("model_engine=veomni")["actor_train"]["optimizer"]["decay"] == "cosine"
    assert "decay" not in of_verl(f"model_engine=veomni {ACTOR}.optim.lr_scheduler_type=constant")["actor_train"]["optimizer"]


def test_a_reward_model_of_verl() -> None:
    model = "reward_model.enable=True reward_model.model.path=acme/rm reward_model.reward_manager=naive"
    config = of_verl(model)
    assert config["domains"]["main"]["reward"] == {"name": "model", "args": {"model": "main"}}
    assert config["reward_models"] == {"main": {"path": "acme/rm", "devices": 8}}
    config = of_verl(f"{model} custom_reward_function.path=$(pwd)/my/score.py")
    assert config["domains"]["main"]["reward"]["name"] == "score.compute_score" and "reward_models" not in config


@pytest.mark.parametrize(
    ("flags", "correction"),
    [
        ("--algo.advantage.is_correction_enable", {"weight": {"low": 0.5, "high": 5.0}}),
        ("--enable_vllm_is_correction --vllm_is_truncated_threshold 3", {"weight": {"high": 3}}),
        (
            "--enable_vllm_is_correction --algo.advantage.is_correction_threshold 0.2 4 --algo.advantage.is_correction_type icepop",
            {"weight": {"low": 0.2, "high": 4, "mode": "mask"}},
        ),
        (
            "--algo.advantage.is_correction_mode mask --algo.advantage.is_correction_enable --algo.advantage.is_correction_threshold 3",
            {"weight": {"high": 3, "mode": "mask"}},
        ),
        (
            "--algo.advantage.is_correction_enable --algo.advantage.is_correction_type seq-mask-tis",
            {"filters": [{"level": "sequence_mean", "low": 0.5, "high": 5.0}]},
        ),
    ],
)
def test_the_correction_of_openrlhf(flags: str, correction: dict[str, Any]) -> None:
    config = Conversion("openrlhf", f"x -m openrlhf.cli.train_ppo_ray --pretrain m {flags}", "run.sh").config
    assert config["algorithm"]["mismatch_correction"] == correction


def test_rows_and_engines_without_number() -> None:
    flags = "--remote_rm_url $(cd x && pwd)/my/score.py --vllm_num_engines 0 --max_samples 100000000 --num_episodes 100000000"
    config = Conversion("openrlhf", f"x -m openrlhf.cli.train_ppo_ray --pretrain m {flags}", "run.sh").config
    assert config["domains"]["main"]["reward"]["name"] == "score.reward_func" and config["steps"] == "???"
    assert config["actor_infer"]["devices"] == 8


@pytest.mark.parametrize(
    ("data", "train"),
    [
        ("OpenRLHF/prompt-collection-v0.1", "hf://OpenRLHF/prompt-collection-v0.1"),
        ("data/train.jsonl", "data/train.jsonl"),
        ("./data/math", "./data/math"),
        ("/data/math", "/data/math"),
    ],
)
def test_a_data_set_of_the_hub(data: str, train: str) -> None:
    done = Conversion("openrlhf", f"x -m openrlhf.cli.train_ppo_ray --prompt_data {data} --eval_dataset {data}", "run.sh")
    assert done.config["domains"]["main"]["data"] == {"train": train, "validation": train, "prompt": "input"}


@pytest.mark.parametrize(
    ("project", "text", "keys"),
    [
        (
            "verl",
            "x -m verl.main actor_rollout_ref.actor.megatron.use_remove_padding=True",
            ["actor_rollout_ref.actor.megatron.use_remove_padding"],
        ),
        ("roll", "lora_rank: 32\nactor_train: {model_args: {lora_rank: '${lora_rank}'}}", ["lora_rank"]),
        ("openrlhf", "x -m openrlhf.cli.train_ppo_ray --rollout_batch_size 8 --disco_beta 1.0", ["disco_beta"]),
    ],
)
def test_settings_that_examples_name_are_known(project: str, text: str, keys: list[str]) -> None:
    done = Conversion(project, text, "file.yaml" if project == "roll" else "run.sh")
    assert not [one for one in done.told if one.path in keys and "is not known here" in one.message]


CONDITIONS = """\
gpus=${1:-4}
loss=${LOSS:-cispo}
case $loss in
    cispo|other) clip=0.15;;
    vanilla) clip=0.2 ;;
esac
[ "$gpus" -gt 2 ] && tp=2 || tp=1
settings=()
if [ -n "${QUANTIZATION:-}" ] && [ "$loss" != other ]; then
    settings+=(actor_rollout_ref.rollout.quantization=fp8)
    if [ "$gpus" = 4 ]; then sequences=1; fi
elif [[ $gpus == 4 ]]; then sequences=128; else sequences=64; fi
if [ "$(probe)" = npu ]; then sequences=32; fi
if [ "$UNKNOWN" = 1 ]; then samples=3; fi
bash -c "pip install verl \\
    && python3 -m verl.main actor_rollout_ref.actor.policy_loss.loss_mode=$loss actor_rollout_ref.actor.clip_ratio_high=$clip \\
    actor_rollout_ref.actor.clip_ratio_low=10 trainer.n_gpus_per_node=$gpus actor_rollout_ref.rollout.max_num_seqs=$sequences \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$tp actor_rollout_ref.rollout.n=$samples" &>> log &
"""


def test_branches_of_a_script_are_those_that_it_runs() -> None:
    config = Conversion("verl", CONDITIONS, "run.sh").config
    assert config["algorithm"]["policy_loss"] == {"name": "cispo", "clip_high": 0.15}
    assert config["actor_train"]["devices"] == 4 and config["actor_train"]["strategy"]["tensor_parallel"] == 2
    assert config["actor_infer"]["strategy"]["max_running_requests"] == 128 and "quantization" not in config["actor_infer"]["strategy"]
    assert config["rollout"]["samples_per_prompt"] == 3, "a condition that only the shell knows: its branch is read"


@pytest.mark.parametrize(
    ("before", "samples"),
    [
        ("case a in b | a) n=6 ;; *) n=2 ;; esac", 6),
        ("case a in b) n=8 ;;\n    b |  c) n=4;; *) n=2 ;; esac", 2),
        ('N=${N:-}\nn=8; if [ "$N" -gt 4 ]; then n=9; fi', 9),
        ("n=6\n[ 1 -gt 8 ] &&\n    n=2", 6),
        ("if [ 1 = 2 ]; then n=2; if [ $# -gt 0 ]; then n=3; fi; else n=6; fi", 6),
        ("if [ 1 = 2 ]\n\nthen\n    n=2; else n=6\nfi", 6),
    ],
)
def test_conditions_of_a_script(before: str, samples: int) -> None:
    script = f'{before}\npython3 -m verl.main data.prompt_key="a; b;" trainer.nnodes=1 actor_rollout_ref.rollout.n=$n'
    config = Conversion("verl", script, "run.sh").config
    assert config["rollout"]["samples_per_prompt"] == samples and config["domains"]["main"]["data"]["prompt"] == "a; b;"


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        (
            "policy_loss.loss_mode=sapo actor_rollout_ref.actor.policy_loss.tau_pos=2.0",
            {"name": "sapo", "tau_positive": 2.0},
        ),
        ("policy_loss.loss_mode=geo_mean", {"name": "gmpo", "log_clip_low": 0.2, "log_clip_high": 0.2}),
        (
            "policy_loss.loss_mode=geo_mean actor_rollout_ref.actor.clip_ratio_low=0.3",
            {"name": "gmpo", "log_clip_low": 0.3, "log_clip_high": 0.2},
        ),
        ("policy_loss.loss_mode=cispo", {"name": "cispo", "clip_low": 0.2, "clip_high": 0.2}),
        ("policy_loss.loss_mode=dppo_tv actor_rollout_ref.actor.clip_ratio_low=0.15", None),
    ],
)
def test_the_clipping_of_a_loss(settings: str, loss: dict[str, Any] | None) -> None:
    done = Conversion("verl", f"x -m verl.main actor_rollout_ref.actor.{settings}", "run.sh")
    assert done.config.get("algorithm", {}).get("policy_loss") == loss
    assert any(one.path.endswith("clip_ratio_low") for one in done.told) == (loss is None), "what is not converted is told"


def test_a_reward_server_takes_the_place_of_a_model() -> None:
    flags = "--reward_pretrain acme/rm --remote_rm_url http://host:5000/score --init_kl_coef 0.1 --use_kl_estimator_k3"
    config = Conversion("openrlhf", f"x -m openrlhf.cli.train_ppo_ray --pretrain m {flags}", "run.sh").config
    assert "reward_models" not in config and config["domains"]["main"]["reward"]["name"] == "remote"
    assert config["algorithm"]["kl_in_reward"] == {"coef": 0.1, "estimator": "k3"}


def test_engines_apart_without_staleness_are_synchronous() -> None:
    text = "x -m verl.main data.train_batch_size=64 rollout.nnodes=1 trainer.nnodes=1 async_training.staleness_threshold=0"
    config = Conversion(
        "verl", f"{text} actor_rollout_ref.actor.ppo_mini_batch_size=64 async_training.partial_rollout=True", "run.sh"
    ).config
    assert config["rollout"] == {"prompts_per_step": 64, "samples_per_prompt": 1} and config["placement"] == {"name": "split", "nodes": 2}


def test_epochs_are_noted() -> None:
    done = Conversion("verl", "x -m verl.trainer.main_ppo data.train_batch_size=64 trainer.total_epochs=15", "run.sh")
    assert done.config["steps"] == "???"
    assert "total_epochs = 15: set steps to total_epochs x rows of the data / train_batch_size  [run.sh:1]" in "\n".join(
        map(str, done.told)
    )


def test_a_quotation_over_lines() -> None:
    script = """X=1
MORE='--seed 3'
MORE+=' --max_norm 2'
python3 -m openrlhf.cli.train_ppo_ray $MORE --pretrain 'a b' --input_template 'User: {}
Assistant: ' --eval_steps $((X+2))"""
    done = Conversion("openrlhf", script, "run.sh")
    assert done.config["domains"]["main"]["template"] == {"text": "User: {prompt}\nAssistant: "}
    assert done.config["validation"]["every"] == 3
    assert done.config["model"] == {"path": "a b"}
    assert done.config["seed"] == 3 and done.config["actor_train"]["optimizer"]["clip_grad"] == 2


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rlvr.yaml").write_text(ROLL)
    assert main(["import", "roll", "rlvr.yaml"]) == 0
    printed = capsys.readouterr()
    assert yaml.safe_load(printed.out)["experiment"] == "two_domains"
    assert "max_steps" not in printed.err
    assert "init_kl_coef = 0.2: not used without add_token_level_kl  [rlvr.yaml:15]\n" in printed.err
    assert main(["import", "roll", "rlvr.yaml", "--out", "mine.yaml"]) == 0
    assert Path("mine.yaml").read_text() == printed.out
    assert main(["import", "roll", "rlvr.yaml", "--out", "mine.yaml"]) == 2
    assert "File exists: 'mine.yaml'" in capsys.readouterr().err
    assert main(["import", "roll", "none.yaml"]) == 2
    assert "none.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("project", "file", "text", "expected"),
    [
        ("verl", "run.sh", "echo hello", "has no settings of verl"),
        ("roll", "rlvr.yaml", "- 1", "has no settings of roll"),
        ("roll", "rlvr.yaml", "a: [1", "not valid YAML: line 1"),
    ],
)
def test_a_file_without_settings_is_refused(project: str, file: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected) as refused:
        Conversion(project, text, file)
    assert file in str(refused.value)


PLACES = {".".join(path): [cls for other, cls in sections() if other == path] for path, _ in sections()}


@pytest.mark.parametrize("project", [*PROJECTS, "trl"])
def test_every_counterpart_exists(project: str) -> None:
    """Paths lead to fields, entries have known parts, and keys of expressions are in the table."""
    table = table_of(project)
    targets = [entry["to"] for entry in table["keys"].values() if "to" in entry]
    wrong = [path for one in targets for path in ([one] if isinstance(one, str) else one) if not is_field(path)]
    assert wrong == []
    parts = {"to", "value", "words", "when", "else", "note", "always", "none", "was", "how", "partly", "key", "pattern"}
    assert [key for key, entry in table["keys"].items() if set(entry) - parts or not {"to", "always", "none"} & set(entry)] == []
    read = set(re.findall(r"at\('([^']+)'\)", repr(table).replace("\\'", "'")))
    assert [key for key in read if not any(entry["pattern"].fullmatch(key) for entry in table["keys"].values())] == []


def is_field(path: str) -> bool:
    path = re.sub(r"(domains|judges|reward_models)\.(?:main|NAME|\{\w+\})", r"\1.<name>", path)
    section, _, name = path.rpartition(".")
    free = re.search(r"\.(args|engine_args|arguments)\.", path) is not None
    return free or any(name in cls.model_fields for cls in PLACES.get(section, ()))
