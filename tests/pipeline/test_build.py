"""What the processes of a run are started with."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest

from roll_lite.config.loading import load_config
from roll_lite.config.schema.models import OptimizerConfig, RewardModelConfig
from roll_lite.distributed.placement import Device, Slot
from roll_lite.hub import HubPath
from roll_lite.pipeline import build
from roll_lite.pipeline.build import QUIET, Starter, quiet_environment
from roll_lite.pipeline.sources import LiveRollouts
from roll_lite.workers.judge import JudgeAddress
from roll_lite.workers.model import ModelRole

ROOT = Path(__file__).resolve().parents[2]


LATER_NODES = SimpleNamespace(check=lambda role, places: None)


def environment() -> dict[str, str]:
    config = load_config("tiny_grpo", ROOT / "examples/configs")
    starter: Any = SimpleNamespace(session=SimpleNamespace(log_folder=None), config=config, later_nodes=LATER_NODES)
    return dict(Starter.spec(starter, "actor_infer", []).env)


def test_nothing_reports_home_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in QUIET:
        monkeypatch.delenv(name, raising=False)
    assert environment() == QUIET
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert environment() == QUIET | {"HF_HUB_OFFLINE": "0"}


def test_nodes_download_only_where_the_hub_is_named() -> None:
    config = load_config("tiny_grpo", ROOT / "examples/configs")
    named = config.model_copy(update={"model": config.model.model_copy(update={"path": HubPath("/c/models--a--b/snapshots/" + "c" * 40)})})
    assert quiet_environment(config, {}) == QUIET
    assert quiet_environment(named, {}) == {name: value for name, value in QUIET.items() if name != "HF_HUB_OFFLINE"}
    assert quiet_environment(named, {"HF_HUB_OFFLINE": "1"}) == QUIET, "the user has said so"


SGLANG = {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}
ALLOCATED = {"PYTORCH_ALLOC_CONF": "expandable_segments:True,pinned_max_cached_size_mb:16"}


@pytest.mark.parametrize(
    ("engine", "arguments", "given", "expected"),
    [
        ("sglang", {}, {}, SGLANG),
        ("vllm", {}, {}, {}),
        ("sglang", {}, {"NCCL_NVLS_ENABLE": "1"}, SGLANG | {"NCCL_NVLS_ENABLE": "1"}),
        ("vllm", {}, {"NCCL_CUMEM_ENABLE": "1"}, {"NCCL_CUMEM_ENABLE": "1"}),
        ("vllm", {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}),
        ("sglang", {}, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, SGLANG | {"VLLM_USE_V2_MODEL_RUNNER": "0"}),  # for judges
        ("sglang", {"enable_nccl_nvls": True}, {}, SGLANG | {"NCCL_NVLS_ENABLE": "1"}),
        ("sglang", {"enable_symm_mem": True}, SGLANG, dict.fromkeys(SGLANG, "1")),
        ("sglang", {"moe_a2a_backend": "deepep_v2"}, {}, SGLANG | {"NCCL_CUMEM_ENABLE": "1"}),
    ],
)
def test_trainers_and_engines_have_the_nccl_settings_of_sglang(
    engine: str, arguments: dict[str, Any], given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_grpo", ROOT / "examples/configs", [f"actor_infer.strategy={{name: {engine}, engine_args: {arguments}}}"])
    assert build.gpu_environment(config, "actor_infer", given) == expected
    assert build.gpu_environment(config, "actor_train", given) == expected | ALLOCATED


@pytest.mark.parametrize(
    ("torch", "given", "expected"),
    [
        ("2.13.0+cu130", {}, ALLOCATED),
        ("2.12.1", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("2.14.1", {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ("2.14.1", {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}, {"PYTORCH_CUDA_ALLOC_CONF": "a:1"}),
    ],
)
def test_allocators_are_set_as_far_as_torch_can_and_the_user_has_not_decided(
    torch: str, given: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_grpo", ROOT / "examples/configs", ["actor_infer.strategy={name: vllm}"])
    monkeypatch.setattr(build, "version", lambda name: torch)
    assert build.gpu_environment(config, "actor_train", given) == expected
    assert build.gpu_environment(config, "actor_infer", given) == {}, "an engine that keeps a copy of its weights pins it in every step"


def test_reward_models_have_the_allocator_of_trainers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_config("tiny_grpo", ROOT / "examples/configs", ["actor_infer.strategy={name: vllm}"])
    config = config.model_copy(update={"reward_models": {"scorer": RewardModelConfig(path=Path("examples/models/tiny"))}})
    assert build.gpu_environment(config, "reward_models.scorer", {}) == ALLOCATED


@pytest.mark.parametrize(
    ("tensor_parallel", "accelerators", "given", "expected"),
    [(2, ["CPU", "H100"], None, "1"), (2, ["B200"], None, None), (2, ["B200"], "8", "8"), (2, [], "32", "32"), (1, ["H100"], None, None)],
)
def test_tensor_ranks_have_one_hardware_queue(
    tensor_parallel: int, accelerators: list[str], given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    layout = [f"actor_train.strategy.tensor_parallel={tensor_parallel}", "actor_train.devices=2"]
    config = load_config("tiny_grpo", ROOT / "examples/configs", layout)
    driver = {} if given is None else {build.CONNECTIONS: given}
    assert build.gpu_environment(config, "actor_train", driver, accelerators).get(build.CONNECTIONS) == expected
    assert build.CONNECTIONS not in build.gpu_environment(config, "actor_infer", driver, accelerators)


@pytest.mark.parametrize("gpu", ["0", None])
def test_workers_on_gpus_have_these_settings_and_the_run_tells_them(gpu: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in (*SGLANG, *build.ALLOCATOR):
        monkeypatch.delenv(name, raising=False)
    config = load_config("tiny_grpo", ROOT / "examples/configs", ["actor_infer.strategy={name: sglang}"])
    placement = SimpleNamespace(devices={0: Device(0, "node", gpu)})
    session = SimpleNamespace(log_folder=None)
    starter: Any = SimpleNamespace(session=session, config=config, placement=placement, accelerators=[], later_nodes=LATER_NODES)
    starter.has_gpus = vars(Starter)["has_gpus"].fget(starter)
    slots = [Slot(gpus=() if gpu is None else (gpu,))]
    assert Starter.spec(starter, "critic", slots).check_places is LATER_NODES.check
    found = {role: {**Starter.spec(starter, role, slots).env} for role in ("actor_train", "actor_infer", "rollouts")}
    notes = Starter.notes(starter)
    if gpu is None:
        assert found["actor_train"] == found["actor_infer"] == environment() and notes == []
        return
    assert found["actor_train"].items() >= (SGLANG | ALLOCATED).items() and found["actor_infer"].items() >= SGLANG.items()
    told = "NCCL_CUMEM_ENABLE=0, NCCL_NVLS_ENABLE=0, PYTORCH_ALLOC_CONF=expandable_segments:True,pinned_max_cached_size_mb:16"
    assert len(notes) == 1 and told in notes[0] and "set these for the driver" in notes[0]
    joining = [Slot(own_gpus=1)]
    assert Starter.spec(starter, "actor_infer", joining).env == found["actor_infer"], "Ray chooses the GPU of an engine that joins later"


def test_the_critics_optimizer_and_its_number_of_updates_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the actor's settings is taken over, and in the critic's warm-up the critic alone trains: 4 updates more of 12 in all."""
    monkeypatch.chdir(ROOT)
    small = ["steps=3", "algorithm.ppo_epochs=2", "algorithm.mini_batches=2", "algorithm.critic_warmup_steps=1"]
    own = ["actor_train.optimizer={lr: 3.0e-4, decay: wsd, decay_steps: 2, weight_decay: 0.1, betas: [0.8, 0.9], clip_grad: 0.5}"]
    config = load_config("tiny_ppo", ROOT / "examples/configs", [*small, *own, "~critic.optimizer"])
    started: list[ModelRole] = []
    monkeypatch.setattr(build, "start_cluster", lambda spec, worker, role, *_: started.append(role))
    monkeypatch.setattr(build, "Model", lambda *_: None)
    starter: Any = SimpleNamespace(config=config, folder=Path(), placement=SimpleNamespace(slots=lambda _: []), spec=lambda *_: None)
    starter.model = MethodType(Starter.model, starter)
    Starter.models(starter)
    actor, reference, critic = (role.model_spec for role in started)
    assert reference.optimizer is None
    assert actor.optimizer == config.actor_train.optimizer and actor.total_updates == 8
    assert critic.optimizer == OptimizerConfig() and critic.total_updates == 12


def test_rewards_are_tried_before_engines_judges_and_reward_models_start() -> None:
    begun: list[str] = []

    def ranks(role: str) -> Any:
        def start_one(method: Any, *_: Any) -> None:
            begun.append(f"{role} {method.__name__}")

        return SimpleNamespace(
            start_all=start_one,
            start_one=start_one,
            one=start_one,
            all=lambda _: [JudgeAddress(("http://h/v1",), "m")],
            actors=[],
            start_first_ones=partial(begun.append, f"{role} starts"),
        )

    engines = ranks("engines")
    engines.replicas, engines.offloads = ranks("engines"), False
    models = {"stays": ranks("reward model"), "leaves": ranks("other")}
    live: Any = SimpleNamespace(rollouts=ranks("rollouts"), reward_models=models, judges={"main": ranks("judge")}, engines=engines)
    live.restarts = SimpleNamespace(absent={})
    live.prepare_service = MethodType(LiveRollouts.prepare_service, live)
    build.starting(live, ["leaves"])
    service = ["rollouts prepare", "rollouts initialize"]
    assert begun == ["engines preload", *service, "reward model initialize", "judge initialize", "engines starts"]


@pytest.mark.parametrize(
    ("overrides", "follows"),
    [([], True), (["actor_infer.restarts=0"], False), (["actor_infer.offload=true"], False), (["deterministic=true"], False)],
)
def test_engines_follow_drains_if_they_may_start_again(monkeypatch: pytest.MonkeyPatch, overrides: list[str], follows: bool) -> None:
    config = load_config("tiny_grpo", ROOT / "examples/configs", ["mode=rollout_only", "deterministic=false", *overrides])
    built: list[Any] = []
    monkeypatch.setattr(build, "EngineRestarts", lambda *given: built.append(given))
    monkeypatch.setattr(build, "LiveRollouts", lambda *_: None)
    starter: Any = SimpleNamespace(config=config, engines=lambda: (None, None), reward_models=dict, judges=dict, later_nodes=None)
    Starter.live(starter, None, None, None)  # type: ignore[arg-type]
    assert built[0][6] is follows
