"""`roll-lite plan`: numbers worked out by hand, and traces against models that are really built."""

from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from roll_lite.cli import _parser, main
from roll_lite.config.arithmetic import model_parallel_size
from roll_lite.config.loading import load_config
from roll_lite.config.schema.models import MegatronStrategyConfig, ModelConfig, OptimizerConfig
from roll_lite.config.schema.run import RunConfig
from roll_lite.distributed.strategy.base import ModelSpec
from roll_lite.distributed.strategy.megatron.traced import RankMemory, trace
from roll_lite.files import CONFIGS
from roll_lite.hub import located
from roll_lite.models.adapter_files import adapter_shapes
from roll_lite.models.model_files import weight_shapes
from roll_lite.planning.architecture import TABLE, Architecture, find, of_config
from roll_lite.planning.memory import GIB, by_phase, cached_tokens, engine_memory, memory_of_roles, rows, send_buffer_bytes
from roll_lite.planning.report import _changed, _layouts, _placed, _problems, _state_bytes, _with_engines, layout_problem
from roll_lite.planning.time import DEVICES, engine_rates, step_time
from roll_lite.workers.objectives import ActorLoss

PARAMETERS = {
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
}
"""As the models' pages on the hub say; of Qwen3-0.6B and 1.7B, whose files hold the shared embedding twice, as it is counted once."""
SMALL = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


def public(name: str) -> Architecture:
    return of_config(name, json.loads(TABLE.read_text(encoding="utf-8"))[name])


def config(name: str = "qwen2.5_7b_grpo", *overrides: str) -> RunConfig:
    return load_config(name, CONFIGS, overrides, files=False)


def traced(layers: int, devices: int = 1, stage: int = 0, dtype: Any = "float32", train: bool = True, **layout: Any) -> RankMemory:
    loss = ActorLoss()
    optimizer = OptimizerConfig(lr=1e-5) if train else None
    model, strategy = ModelConfig(path=Path("nowhere"), dtype=dtype), MegatronStrategyConfig(**layout)
    spec = ModelSpec(model, strategy, "model.path", optimizer, total_updates=10)
    batch = rows(2, 8, 32, loss.columns)
    return trace(spec, {**SMALL, "num_hidden_layers": layers}, devices, stage, batch, loss, loss.outputs, on_gpu=False)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_of_public_models(name: str, count: int) -> None:
    assert public(name).parameters() == count


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_table_gives_transformers_the_same_model(name: str) -> None:
    raw = public(name).raw
    if raw["model_type"] == "qwen3_moe":
        raw = {**raw, "num_hidden_layers": 2}  # 128 experts in 48 layers take long to build
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**raw))
    assert sum(one.numel() for one in built.parameters()) == of_config(name, raw).parameters()


def test_models_named_as_on_the_hub_are_found_without_a_network() -> None:
    run = load_config("gsm8k_0.5b_grpo", CONFIGS, files=False)
    assert find(run.model.path, "mine", None).name == "Qwen/Qwen2.5-0.5B"
    with pytest.raises(ValueError, match="model.path = hf://acme/unknown: no config.json there"):
        find(located(Path("hf://acme/unknown"), "model") or Path(), "mine", None)


def test_the_command_offers_the_devices_of_the_table() -> None:
    for name in DEVICES:
        assert _parser().parse_args(["plan", "--config-name", "tiny_grpo", "--device", name]).device == name
    with pytest.raises(SystemExit):
        _parser().parse_args(["plan", "--config-name", "tiny_grpo", "--device", "H1000"])


def test_the_cache_of_a_token() -> None:
    # 28 layers, keys and values, 4 heads of 128 numbers, 2 bytes each
    assert public("Qwen/Qwen2.5-7B").cache_bytes() == 2 * 28 * 4 * 128 * 2 == 57_344
    run, model = config("qwen2.5_7b_grpo", "actor_infer.strategy.kv_cache_mb=5734"), public("Qwen/Qwen2.5-7B")
    assert cached_tokens(run, model, 80 * GIB) == 5_734_000_000 // 57_344 == 99_993
    # eight ranks share four key/value heads: each holds one
    eight = config("qwen2.5_7b_grpo", "actor_infer.strategy.kv_cache_mb=5734", "actor_infer.strategy.tensor_parallel=8")
    assert cached_tokens(eight, model, 80 * GIB) == 4 * 5_734_000_000 // 57_344


def test_operations_of_a_token() -> None:
    model = public("Qwen/Qwen2.5-7B")
    # every matrix but the embedding is used once, two operations for each number; biases and norms left out
    matrices = 28 * (3584 * (3584 + 2 * 512) + 3584 * 3584 + 3 * 3584 * 18944) + 152_064 * 3584
    assert model.flops(0) == pytest.approx(2 * matrices, rel=1e-4)
    # scores and values of half the row on average: 2 x 2 x 3584 x 4096 / 2 a layer
    assert model.flops(4096) - model.flops(0) == 28 * 2 * 3584 * 4096
    again = model.flops(0, 3, recompute="full") - model.flops(0, 3)
    assert again == pytest.approx(2 * (matrices - 152_064 * 3584), rel=1e-4)


def test_the_state_of_a_rank() -> None:
    # By hand: embedding and output 2 x 512 x 64; a layer has qkv 64 x 128 + 128, o 64 x 64, mlp 3 x 64 x 128, norms 2 x 64; a last norm.
    count = 2 * 512 * 64 + 2 * (64 * 128 + 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    assert of_config("small", {**SMALL, "num_hidden_layers": 2}).parameters() == count
    one = traced(2)  # buffers are padded
    assert (one.weights, one.gradients) == pytest.approx((4 * count, 4 * count), rel=0.001)
    assert one.optimizer == pytest.approx(8 * count, rel=0.01), "two moments; float32 weights need no copy"
    low = traced(2, dtype="bfloat16")
    assert (low.weights, low.gradients) == pytest.approx((2 * count, 4 * count), rel=0.001)
    assert low.optimizer == pytest.approx(12 * count, rel=0.01), "two moments and a float32 copy"
    assert traced(2, devices=4).optimizer == pytest.approx(2 * count, rel=0.05), "four ranks share it"
    frozen = traced(2, train=False)
    assert (frozen.weights, frozen.gradients, frozen.training) == (4 * count, 0, 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", [{"tensor_parallel": 2, "sequence_parallel": True}, {"context_parallel": 2, "recompute": "full"}])
def test_memory_is_linear_in_the_layers(layout: dict[str, Any]) -> None:
    two, three, six = (traced(layers, devices=2, **layout) for layers in (2, 3, 6))
    for part in ("weights", "gradients", "optimizer"):
        assert getattr(six, part) == pytest.approx(4 * getattr(three, part) - 3 * getattr(two, part), rel=0.005), "but for padding"
    assert (six.kept, six.training) == (4 * three.kept - 3 * two.kept, 4 * three.training - 3 * two.training)
    assert two == traced(2, devices=2, **layout), "the same trace gives the same bytes"


def test_stages_have_their_own_layers() -> None:
    first, last = (traced(4, devices=2, stage=stage, pipeline_parallel=2) for stage in (0, 1))
    whole = traced(4)
    assert first.weights + last.weights == pytest.approx(whole.weights, rel=0.002)
    assert last.weights > first.weights, "the last norm; embedding and output layer are equally large"
    assert last.training > first.training and first.kept < whole.kept, "logits are the last stage's"


GB = 10**9
MADE_UP = {
    "actor_train": RankMemory(2 * GB, 4 * GB, 6 * GB, training=30 * GB, forward=3 * GB),
    "actor_infer": RankMemory(15 * GB, forward=GB, kv_cache=40 * GB),
}


def test_phases_count_what_is_there() -> None:
    """In turns on eight devices; each of the two processes takes 1.5 GiB."""
    both, gib = 2 * int(1.5 * GIB), 1 / GIB
    totals = {one.phase: one.total - both for one in by_phase(config(), MADE_UP)}
    assert totals == {"sync_weights": 17 * GB, "generate": 56 * GB, "log_probs": 5 * GB, "train": 42 * GB}
    split = config("qwen2.5_7b_grpo", "placement=split", "actor_train.devices=4", "actor_infer.devices=4")
    apart = {(one.phase, one.devices): one.total - both // 2 for one in by_phase(split, MADE_UP)}
    assert apart["train", (0, 1, 2, 3)] == 42 * GB and apart["log_probs", (0, 1, 2, 3)] == 15 * GB, "nothing is offloaded"
    assert apart["generate", (4, 5, 6, 7)] == 56 * GB
    small = replace(DEVICES["H100"], memory_gib=40.0)
    told = list(_problems(config(), by_phase(config(), MADE_UP), 800_000, small))
    needed = (56 * GB + both) * gib
    assert told[0] == f"generate, devices 0-7: {needed:.1f} of 40.0 GiB, {needed - 40:.1f} too much, most of it actor_infer (52.2)"
    assert told[1].startswith("train, devices 0-7") and len(told) == 2
    [full] = _problems(config(), [], 4_000, small)
    assert full.startswith("actor_infer.strategy: the KV cache has room for 4,000 tokens, one sample takes 4,096; raise")


def test_send_buffers_stay_on_the_trainers_devices() -> None:
    """As in docs/gpu.md: two buckets, what an engine keeps of a layer, and the embedding."""
    dense, mib = send_buffer_bytes(config(), public("Qwen/Qwen2.5-7B")), 1 << 20
    assert dense == 3 * 512 * mib + 152_064 * 3_584 * 2
    experts = send_buffer_bytes(config("qwen3_30b_a3b_grpo"), public("Qwen/Qwen3-30B-A3B"))
    assert experts == (2 + 8) * 144 * mib + 151_936 * 2_048 * 2, "144 MiB are a rank's 16 experts of a layer"
    assert send_buffer_bytes(config("qwen2.5_7b_grpo", "mode=rollout_only"), public("Qwen/Qwen2.5-7B")) == 0
    memory = {**MADE_UP, "actor_train": replace(MADE_UP["actor_train"], send_buffers=dense)}
    split = config("qwen2.5_7b_grpo", "placement=split", "actor_train.devices=4", "actor_infer.devices=4")
    for run, own in ((config(), tuple(range(8))), (split, (0, 1, 2, 3))):
        more = {one.devices: one.total - other.total for one, other in zip(by_phase(run, memory), by_phase(run, MADE_UP), strict=True)}
        assert more == {devices: dense if devices == own else 0 for devices in more} and own in more


def test_reward_models_and_judges_take_memory_on_their_devices() -> None:
    rewards = {
        "chat": "{name: judge, args: {judge: grader}}",
        "help": "{name: model, args: {model: helpful}}",
        "odd": "{name: model, args: {model: other}}",
    }
    run = config(
        "qwen2.5_7b_grpo",
        "domains={" + ", ".join(f"{name}: {{data: {{train: a.jsonl}}, reward: {reward}}}" for name, reward in rewards.items()) + "}",
        "judges={grader: {path: /models/Qwen2.5-7B-Instruct, devices: [8], strategy: {gpu_memory_utilization: 0.5}}}",
        "reward_models={helpful: {path: /models/Qwen2.5-1.5B-RM, devices: [9]}, other: {path: /models/nobody, devices: [9]}}",
    )
    memory = memory_of_roles(run.model_copy(update={"actor_train": run.actor_infer}), public("Qwen/Qwen2.5-7B"), 80 * GIB)
    judge, scorer = memory["judges.grader"], memory["reward_models.helpful"]
    assert judge.weights == 2 * 7_615_616_512 and judge.weights + judge.forward + judge.kv_cache == 40 * GIB
    assert scorer.weights == 2 * PARAMETERS["Qwen/Qwen2.5-1.5B"] and "reward_models.other" not in memory
    there = {(one.phase, one.devices): one.roles for one in by_phase(run, memory)}
    assert there["generate", (8,)] == {"judges.grader": 40 * GIB} and there["train", (8,)] == {"judges.grader": 40 * GIB - judge.forward}
    assert there["generate", (9,)] == {"reward_models.helpful": scorer.weights + scorer.forward}
    three = _changed(run, "judges.grader.strategy.tensor_parallel", 3)
    assert "judges.grader.strategy.tensor_parallel = 3: does not divide Qwen/Qwen2.5-7B's 28" in str(
        layout_problem(three, public("Qwen/Qwen3-30B-A3B"))
    )


@pytest.mark.slow
def test_the_7b_fits_as_its_configuration_says() -> None:
    run, model = config(), public("Qwen/Qwen2.5-7B")
    h100 = DEVICES["H100"]
    memory = memory_of_roles(run, model, h100.bytes)
    actor = memory["actor_train"]
    # half of the weights in bfloat16 and float32 gradients; of two moments and a copy a quarter of that half
    assert actor.weights == pytest.approx(7_615_616_512, rel=0.001)
    assert actor.gradients == pytest.approx(2 * 7_615_616_512, rel=0.001)
    assert actor.optimizer == pytest.approx(7_615_616_512 / 8 * 12, rel=0.001)
    assert list(_problems(run, by_phase(run, memory), cached_tokens(run, model, h100.bytes), h100)) == []


def test_rates_of_a_7b_on_an_h100() -> None:
    rates = engine_rates(config(), public("Qwen/Qwen2.5-7B"), DEVICES["H100"])
    assert rates.pass_s == pytest.approx(15.23e9 / (0.65 * 3.35e12) + 28 * 12e-6, rel=0.001)
    assert rates.cached_token_s == pytest.approx(57_344 / (0.65 * 3.35e12))


@pytest.mark.parametrize(
    ("name", "kept"),
    [("Qwen/Qwen3-4B", 151_936 * 2560), ("Qwen/Qwen2.5-7B", 2 * 152_064 * 3584)],
    ids=["one matrix for both", "embeddings and output layer"],
)
def test_fp8_halves_the_layers(name: str, kept: int) -> None:
    run, model, h100 = config("qwen2.5_7b_grpo", "actor_infer.strategy.quantization=fp8"), public(name), DEVICES["H100"]
    weights = PARAMETERS[name] + kept  # one byte each of the layers, two of what is kept
    assert engine_memory(run, model, 80 * GIB).weights == weights
    assert engine_rates(run, model, h100).pass_s == pytest.approx(weights / (0.65 * 3.35e12) + model.hf.layers * 12e-6)


def test_phases_of_a_step() -> None:
    time = step_time(config(), public("Qwen/Qwen2.5-7B"), DEVICES["H100"], 800_000)
    assert list(time.phases) == ["log_probs actor_train", "train actor_train", "sync_weights", "load and offload", "generate"]
    train, passes = time.phases["train actor_train"], time.phases["log_probs actor_train"].seconds
    assert train.parts["matrix products"] == pytest.approx(train.flops / (8 * 989e12 * 0.45))
    others = sum(one.seconds for one in time.phases.values())
    assert time.estimate_s == pytest.approx(others + 3072 * time.scenario.rates.pass_s), "the longest response comes last"
    assert train.bottleneck == "matrix products" and 0 < time.engine_share < 1
    assert time.scenario.trainer.log_probs == pytest.approx(passes / (train.seconds + passes))


LORA = "actor_train.lora={rank: 16, engines: adapter}"


def test_a_step_trains_and_sends_adapters_alone() -> None:
    """Adapters of rank 16 on all layers: 40,370,176 parameters, as PEFT counts them."""
    model, (merged, alone) = public("Qwen/Qwen2.5-7B"), (config("qwen2.5_7b_grpo", one) for one in ("actor_train.lora={rank: 16}", LORA))
    count = 40_370_176
    times = [step_time(one, model, DEVICES["H100"], 800_000).phases for one in (config(), merged, alone)]
    assert [one["sync_weights"].moved_bytes for one in times] == [2 * 7_615_616_512, 2 * 7_615_616_512, 2 * count]
    whole, lora = times[0]["train actor_train"], times[2]["train actor_train"]
    sums = [one.parts["exchange of gradients"] for one in (whole, lora)]
    assert sums[1] == pytest.approx(sums[0] * count / 7_615_616_512)
    # without recomputation three and two passes through layers, and the logits once more
    assert model.flops(0, 3) - model.flops(0, 2) == model.flops(0) and lora.flops < 0.7 * whole.flops
    assert model.flops(4000, 3) - model.flops(0, 3) == model.flops(4000, 2) - model.flops(0, 2), "scores and values are not frozen"
    moe = public("Qwen/Qwen3-30B-A3B")
    for found, experts in ((model, 1), (moe, 1), (moe, 8)):
        shapes = adapter_shapes(weight_shapes(found.hf), alone.actor_train.lora.targets, 16)
        sizes = {name: prod(shape) // (experts if ".experts." in name else 1) for name, shape in shapes.items()}
        assert found.adapter_parameters(alone.actor_train.lora, experts) == sum(sizes.values())


@pytest.mark.parametrize("settings", [[LORA], ["actor_train.optimizer.on_host=true"]])
def test_a_search_counts_the_state_that_a_device_has(settings: list[str]) -> None:
    run, model = (
        config("qwen2.5_7b_grpo", "actor_train.strategy={tensor_parallel: 1, sequence_parallel: false}", *settings),
        public("Qwen/Qwen2.5-7B"),
    )
    weights, trained = 2 * 7_615_616_512, 40_370_176 if run.actor_train.lora else 7_615_616_512
    # float32 gradients, and a float32 copy and two moments, which four ranks share; moments may be on the host
    assert _state_bytes(run, model, 4) == weights + trained * (4 + (12 if run.actor_train.lora else 4) / 4)


def test_what_offloaded_roles_move_is_part_of_the_step() -> None:
    """By hand, for 7,615,616,512 bfloat16 weights on TP 2 x DP 4: loaded for the weight update, log-probs and training, copied out once;
    float32 weights and two moments, a quarter on each rank, go both ways."""
    model, h100 = public("Qwen/Qwen2.5-7B"), DEVICES["H100"]
    time, half = step_time(config(), model, h100, 800_000), 7_615_616_512 / 2
    moves = time.phases["load and offload"]
    assert moves.moved_bytes == pytest.approx(half * 2 * (3 + 1) + 2 * half * 12 / 4, rel=1e-6)
    assert moves.seconds == pytest.approx(moves.moved_bytes / (64e9 * 0.7)) and moves.bottleneck == "host memory: actor_train"
    assert (time.scenario.trainer.overhead_s, time.scenario.offload_s) == (moves.seconds, 0.0)
    on_host = step_time(config("qwen2.5_7b_grpo", "actor_train.optimizer.on_host=true"), model, h100, 800_000)
    assert on_host.phases["load and offload"].moved_bytes == pytest.approx(half * 2 * 4 + 2 * half * 4 / 4, rel=1e-6)
    kl = config("qwen2.5_7b_grpo", "algorithm.kl_in_loss.coef=0.1", "reference={strategy: {tensor_parallel: 2, sequence_parallel: true}}")
    more = step_time(kl, model, h100, 800_000).phases["load and offload"].moved_bytes - moves.moved_bytes
    assert more == pytest.approx(half * 2, rel=1e-6), "once in; its copy on the host stays"
    split = config("qwen2.5_7b_grpo", "placement=split", "actor_train.devices=4", "actor_infer.devices=4")
    assert "load and offload" not in step_time(split, model, h100, 800_000).phases


def test_evaluations_have_engines_only(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--config-name", "tiny_grpo", "mode=evaluate", "validation.samples_per_prompt=2", "simulation.responses.prompts=50"]
    given = ["~simulation.domains", "validation.sampling.max_tokens=4"]
    assert main([*asked, *given, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert list(plan["memory_bytes"]) == ["actor_infer"] and {one["phase"] for one in plan["phases"]} == {"generate"}
    assert list(plan["times"]) == ["generate"] and list(plan["supplies"]) == ["sync"] and plan["problems"] == []
    run = load_config("tiny_grpo", CONFIGS, [*asked[3:], *given])
    scenario = step_time(run, find(run.model.path, "tiny_grpo", None), DEVICES["H100"], 10**6).scenario
    assert (scenario.rollout.prompts_per_step, scenario.steps) == (50 * len(run.domains), 1)
    assert {(one.samples_per_prompt, one.max_tokens) for one in scenario.domains} == {(2, 4)}
    assert main([*asked, "--search", "2"]) == 2 and "mode: evaluate has none" in capsys.readouterr().err
    assert main(["plan", "--config-name", "evaluate", "--model", "Qwen2.5-7B", "--device", "A100"]) == 0
    assert "a step is the whole evaluation: 10,000 prompts" in capsys.readouterr().out


def test_models_are_found_by_name(tmp_path: Path) -> None:
    assert find(Path("/models/Qwen2.5-7B-Instruct"), "mine", None).name == "Qwen/Qwen2.5-7B"
    with pytest.raises(ValueError, match="no config.json there"):
        find(Path("/models/Qwen2.5-14B"), "qwen2.5_7b_grpo", None)
    of_config = config("llama3.1_8b_ppo").model.path
    assert find(of_config, "llama3.1_8b_ppo", None).name == "meta-llama/Llama-3.1-8B"
    assert find(Path("???"), "mine", "meta-llama/Meta-Llama-3.1-8B-Instruct").name == "meta-llama/Llama-3.1-8B"
    assert find(Path("???"), "mine", "Qwen3-30B-A3B").name == "Qwen/Qwen3-30B-A3B"
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert find(tmp_path, "qwen2.5_7b_grpo", None).hf.hidden == 64
    with pytest.raises(ValueError, match=r"--model nobody: no config.json there.*Qwen/Qwen2.5-0.5B"):
        find(Path("???"), "mine", "nobody")


def test_layouts_that_do_not_divide_the_model() -> None:
    model = public("Qwen/Qwen2.5-7B")
    assert layout_problem(config(), model) is None
    eight = config("qwen2.5_7b_grpo", "actor_train.strategy.tensor_parallel=8")
    wrong = "actor_train.strategy.tensor_parallel = 8: does not divide Qwen/Qwen2.5-7B's 28 attention heads"
    assert wrong in str(layout_problem(eight, model))
    experts = config("qwen2.5_7b_grpo", "actor_train.strategy.expert_parallel=2")
    assert "actor_train.strategy.expert_parallel = 2" in str(layout_problem(experts, model))


@pytest.fixture(autouse=True)
def keep_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command hides GPUs from its process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_a_plan_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config-name", "tiny_grpo", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["problems"] == [] and plan["supplies"]["sync"]["step_s"] > 0
    weights = load_file(CONFIGS.parent / "models/tiny/model.safetensors")
    count = sum(one.numel() for one in weights.values())
    assert plan["memory_bytes"]["actor_train"]["weights"] == pytest.approx(4 * count, rel=0.001)


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_plan_that_does_not_fit_says_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    layout = ["actor_train.strategy.recompute=none", "actor_train.train_micro_batch_tokens=32768"]
    assert main(["plan", "--config-name", "qwen2.5_7b_grpo", *layout]) == 1
    output = capsys.readouterr().out
    assert "will not fit: train, devices 0-7:" in output and "too much, most of it actor_train" in output
    assert "change: actor_train.train_micro_batch_tokens=" in output and "and everything fits" in output


def test_an_unknown_model_and_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config-name", "qwen2.5_7b_grpo", "--model", "nobody"]) == 2
    assert "--model nobody: no config.json there" in capsys.readouterr().err
    assert main(["plan", "--config-name", "tiny_grpo", "mode=rollout_only"]) == 2
    assert "whole runs are planned" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", sorted(one.stem for one in CONFIGS.glob("*.yaml") if one.stem not in ("evaluate", "gpu_base")))
def test_every_shipped_configuration_has_a_plan_and_fits(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config-name", name]) == 0
    assert capsys.readouterr().out.endswith("\nfits\n")


def test_a_search_offers_layouts_of_experts_and_of_engines() -> None:
    moe, dense = public("Qwen/Qwen3-30B-A3B"), public("Qwen/Qwen2.5-7B")
    assert {one["expert_parallel"] for one in _layouts(moe, 16)} == {1, 2, 4, 8, 16}
    assert {one["expert_parallel"] for one in _layouts(dense, 16)} == {1} and all(one["tensor_parallel"] <= 2 for one in _layouts(dense, 2))
    placed = _placed(config("qwen3_30b_a3b_grpo"), 8, 16)
    assert placed.actor_infer.devices == list(range(8, 16)) and placed.rollout.supply == "async"
    own = ["actor_train.strategy.pipeline_parallel=2", "actor_train.strategy.pipeline_layers=[13,15]"]
    one = _placed(config("qwen2.5_7b_grpo", *own), 1, 2)
    assert model_parallel_size(one.actor_train) == 1 and one.actor_train.strategy.pipeline_layers is None, "its own layout needs 4 devices"
    assert len(list(_with_engines(one, dense, DEVICES["H100"]))) == 1
    # 61 GB of weights: in 24 GiB a half has no room, a quarter has, and an eighth is faster
    parallel = {
        gib: [one.actor_infer.strategy.tensor_parallel for one in _with_engines(placed, moe, replace(DEVICES["H100"], memory_gib=gib))]
        for gib in (80.0, 24.0)
    }
    assert parallel == {80.0: [2, 8], 24.0: [8, 4]}


@pytest.mark.slow
@pytest.mark.timeout(590)
def test_a_search_lists_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config-name", "tiny_grpo", "--search", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    seconds = [float(one["step s"]) for one in found]
    assert len(found) == 5 and seconds == sorted(seconds)
    assert len(found[0]["supplies"]) == (1 if found[0]["supply"] == "sync" else 4), found[0]
    assert ["supplies" in one for one in found] == [True, False, False, False, False]
