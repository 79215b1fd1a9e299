from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray
from packaging.version import Version

from roll_lite.config.arithmetic import (
    TRAINING_ROLES,
    actor_is_reference,
    adapters_of_engines,
    engine_offload,
    extra_token_columns,
    generates,
    infer_dtype,
    max_model_len,
    model_parallel_size,
    planned_updates,
    roles,
    trains,
)
from roll_lite.config.checks.layout import unreadable_weights
from roll_lite.config.device_phases import WHOLE
from roll_lite.config.schema.models import (
    CriticRoleConfig,
    ForwardRoleConfig,
    InferRoleConfig,
    MegatronStrategyConfig,
    RewardModelConfig,
    SglangStrategyConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.dump_files import FOLDER, found_dumps
from roll_lite.data.stable_hash import derived_seed
from roll_lite.data.supervised import SupervisedRows
from roll_lite.data.templates import load_tokenizer
from roll_lite.distributed.cluster import Cluster, ClusterSpec, Pending, actor_options, start_cluster
from roll_lite.distributed.placement import Placement, Slot, beside_driver
from roll_lite.distributed.ray_session import RaySession
from roll_lite.distributed.strategy.base import EngineSpec, StateGroup
from roll_lite.distributed.strategy.inference.life import EngineMemory
from roll_lite.models.model_files import tokenizer_checksum
from roll_lite.pipeline.batch_files import BatchFiles
from roll_lite.pipeline.chaos import check_cuts
from roll_lite.pipeline.checkpoint import Checkpoints
from roll_lite.pipeline.clusters import Engines, Model, Models, initialize
from roll_lite.pipeline.engine_restarts import EngineRestarts, JoiningEngines
from roll_lite.pipeline.journal import Journal
from roll_lite.pipeline.nodes import LaterNodes, check_nodes
from roll_lite.pipeline.rlvr import RLVRPipeline
from roll_lite.pipeline.sources import LiveRollouts, ReplayedRollouts
from roll_lite.pipeline.traces import Traces
from roll_lite.pipeline.weights import WeightSync
from roll_lite.workers.actor import ActorWorker, AdaptedActorWorker
from roll_lite.workers.infer import InferWorker
from roll_lite.workers.judge import JudgeWorker
from roll_lite.workers.model import CriticWorker, ModelRole, ModelWorker, ReferenceWorker
from roll_lite.workers.replay import ReplayWorker
from roll_lite.workers.reward_model import RewardModelSpec, RewardModelWorker
from roll_lite.workers.rollout import RolloutSpec, RolloutWorker
from roll_lite.workers.rollout_output import DumpSpec

P = ParamSpec("P")
W = TypeVar("W", bound=ModelWorker)

LOCAL_PATIENCE_S = 5.0
QUIET = {"VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
"""Workers' environment variables against usage reports, downloads and tokenizer threads."""
FROM_DRIVER = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "VLLM_USE_V2_MODEL_RUNNER")
"""Environment variables that GPU workers on all nodes take from the driver."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator: current and older variable."""
CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable: number of a GPU's hardware queues. With one, kernels run in launch order, which Megatron's tensor parallel overlap
needs."""
BLACKWELL = ("B100", "B200", "B300", "GB200", "GB300")
"""Ray's names of GPUs that work without CUDA_DEVICE_MAX_CONNECTIONS=1."""
KNOWS_PINNED_SIZE = (2, 13)
"""First torch version with `pinned_max_cached_size_mb`; earlier versions reject unknown settings."""


def build(config: RunConfig, folder: Path, session: RaySession, journal: Journal) -> RLVRPipeline:
    start = Starter(config, folder, session)
    if nodes_without_run_folder := check_nodes(config, folder, start.placement, journal.console.message):
        journal.console.message(
            f"run_dir: {', '.join(nodes_without_run_folder)} do not share {folder}: logs of their workers and the model come at the end, "
            "the driver writes the batches"
        )
    check_cuts(config.chaos, sorted(set().union(*start.later_nodes.known.values()) - {ray.get_runtime_context().get_node_id()}))
    rollouts = start.rollouts() if generates(config) else None  # first, because all wait for the test of its rewards
    models = start.models()
    live = None if rollouts is None else start.live(models, rollouts, journal)
    if live is not None and start.has_gpus:
        models = replace(models, engines=live.engines)
    source = live or ReplayedRollouts(start.replay())
    initialize_all(models.all, live, [name for name, model in config.reward_models.items() if model.offload])
    ptx = supervised_rows(config)
    for line in [*start.notes(), *(live.notes() if live is not None else []), *(ptx.notes() if ptx is not None else [])]:
        journal.console.message(line)
    batch_files = BatchFiles(config, folder, nodes_without_run_folder)
    batch_files.keep_start(models)
    traces = Traces(models, live.engines if live is not None else None, journal, config.profile.steps, nodes_without_run_folder)
    return RLVRPipeline(config, models, source, journal, Checkpoints(config, folder, nodes_without_run_folder), batch_files, ptx, traces)


def quiet_environment(config: RunConfig, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return QUIET, overridden by the user's values (`given`). HF_HUB_OFFLINE is left out if models must be downloaded (hf://), unless the
    user set it."""
    names_hub = "hf://" in config.model_dump_json()
    return {name: given.get(name, value) for name, value in QUIET.items() if name in given or not (names_hub and name == "HF_HUB_OFFLINE")}


def gpu_environment(
    config: RunConfig, role: str, given: Mapping[str, str] = os.environ, accelerators: Collection[str] = ()
) -> dict[str, str]:
    """Environment variables of a role's GPU workers. `accelerators`: Ray's names of GPUs.

    Trainers get SGLang's NCCL settings: members of an NCCL group need equal ones. Trainers and reward models get the driver's allocator
    settings. Default: expandable segments against fragmentation, and a limit for cached pinned memory, which torch never frees.
    """
    strategy = config.actor_infer.strategy
    chosen = {name: given[name] for name in FROM_DRIVER if name in given}
    if isinstance(strategy, SglangStrategyConfig):
        arguments = strategy.engine_args
        symmetric = bool(arguments.get("enable_symm_mem"))
        needed = {
            "NCCL_CUMEM_ENABLE": symmetric or arguments.get("moe_a2a_backend") == "deepep_v2",
            "NCCL_NVLS_ENABLE": symmetric or bool(arguments.get("enable_nccl_nvls")),
        }
        chosen |= {name: "1" if is_needed else chosen.get(name, "0") for name, is_needed in needed.items()}
    section = roles(config).get(role)
    if not isinstance(section, ForwardRoleConfig | RewardModelConfig):
        return chosen
    of_tensor_ranks = isinstance(section.strategy, MegatronStrategyConfig) and section.strategy.tensor_parallel > 1
    if of_tensor_ranks and (CONNECTIONS in given or not set(accelerators) & set(BLACKWELL)):
        chosen[CONNECTIONS] = given.get(CONNECTIONS, "1")
    chosen |= {name: given[name] for name in ALLOCATOR if name in given}
    if given.keys().isdisjoint(ALLOCATOR):
        pinned = ",pinned_max_cached_size_mb:16" if Version(version("torch")).release >= KNOWS_PINNED_SIZE else ""
        chosen[ALLOCATOR[0]] = f"expandable_segments:True{pinned}"
    return chosen


def supervised_rows(config: RunConfig) -> SupervisedRows | None:
    if config.algorithm.ptx is None or not trains(config):
        return None
    return SupervisedRows(config.algorithm.ptx, load_tokenizer(config.model.path), derived_seed(config.seed, "ptx"))


def initialize_all(models: Sequence[Model[Any]], live: LiveRollouts | None, offloaded: Sequence[str]) -> None:
    """Initialize workers, in parallel if they stay loaded, else one by one. `offloaded`: reward models that do not stay loaded."""
    initialize(models, lambda: [] if live is None else starting(live, offloaded))
    if live is None:
        return
    if not live.engines.offloads:
        live.engines.initialize_later_ones()
    for ranks in (live.reward_models[name] for name in offloaded):
        ranks.all(RewardModelWorker.initialize)
        ranks.all(RewardModelWorker.offload, tuple(map(StateGroup, WHOLE["reward_models"])))
    if live.engines.offloads:
        live.engines.start_first_ones().result()
        live.engines.initialize_later_ones()
        live.engines.replicas.all(InferWorker.offload, tuple(EngineMemory))
    live.restarts.begin()


def starting(live: LiveRollouts, offloaded: Sequence[str]) -> list[Pending[Any]]:
    """Start to initialize what stays loaded: rollout service, judges, engines, reward models except `offloaded`."""
    together: list[Pending[Any]] = [live.engines.replicas.start_all(InferWorker.preload)]
    together.append(live.prepare_service())
    together += [ranks.start_all(RewardModelWorker.initialize) for name, ranks in live.reward_models.items() if name not in offloaded]
    together += [servers.start_all(JudgeWorker.initialize) for servers in live.judges.values()]
    if not live.engines.offloads:
        together.append(live.engines.start_first_ones())
    return together


class Starter:
    def __init__(self, config: RunConfig, folder: Path, session: RaySession) -> None:
        self.config = config
        self.folder = folder
        self.session = session
        # In a cluster that only this run uses, no devices become free later.
        patience = min(LOCAL_PATIENCE_S, config.ray.placement_timeout_s) if session.started else config.ray.placement_timeout_s
        self.placement = Placement({name: role.devices for name, role in roles(config).items()}, patience, config.placement)
        self.later_nodes = LaterNodes(config, self.placement)
        self.accelerators = [name.removeprefix("accelerator_type:") for name in ray.cluster_resources()]

    def spec(self, name: str, slots: list[Slot], threads: int = 1) -> ClusterSpec:
        environment = quiet_environment(self.config)
        if any(slot.gpus or slot.own_gpus for slot in slots):
            environment |= gpu_environment(self.config, name, accelerators=self.accelerators)
        limit, check = self.config.limits.other or None, self.later_nodes.check
        return ClusterSpec(name, slots, threads, environment, self.session.log_folder, limit, check_places=check)

    @property
    def has_gpus(self) -> bool:
        return any(device.gpu is not None for device in self.placement.devices.values())

    def notes(self) -> list[str]:
        environment = gpu_environment(self.config, "actor_train", accelerators=self.accelerators)
        if not environment or not self.has_gpus:
            return []
        told = ", ".join(f"{name}={value}" for name, value in environment.items())
        return [f"environment of trainers and engines on GPUs: {told}; to change it, set these for the driver (roll-lite docs gpu)"]

    def live(self, models: Models, rollouts: Cluster[RolloutWorker], journal: Journal) -> LiveRollouts:
        config, role = self.config, self.config.actor_infer
        engines, joining = self.engines()
        weights = None
        follows_drains = role.restarts > 0 and not (role.offload or config.deterministic)
        later, start_s = self.later_nodes, config.limits.start or None
        restarts = EngineRestarts(engines, rollouts, role.restarts, journal, later, joining, follows_drains, start_s)
        if trains(config):
            sizes = (
                model_parallel_size(role),
                infer_dtype(config),
                role.strategy.expert_parallel,
                engine_offload(config) == "without_copy",
            )
            unreadable, _ = unreadable_weights(config) or (None, None)
            weights = WeightSync(models.actor, restarts, rollouts, config.weight_sync, *sizes, unreadable)
        prompts, judge_restarts = config.rollout.prompts_per_step, {name: judge.restarts for name, judge in config.judges.items()}
        return LiveRollouts(engines, restarts, rollouts, self.reward_models(), self.judges(), judge_restarts, prompts, journal, weights)

    def models(self) -> Models:
        config = self.config
        if not trains(config):
            return Models(None)
        policy = AdaptedActorWorker if actor_is_reference(config) else ActorWorker
        actor = self.model("actor_train", config.actor_train, policy, config.algorithm, len(config.domains))
        reference = self.model("reference", config.reference, ReferenceWorker) if config.reference else None
        critic = self.model("critic", config.critic, CriticWorker, config.algorithm, len(config.domains)) if config.critic else None
        return Models(actor, reference, critic)

    def replay(self) -> Cluster[ReplayWorker]:
        assert self.config.replay.path is not None, "the configuration was not checked"
        return start_cluster(self.spec("replay", [beside_driver()]), ReplayWorker, found_dumps(self.config.replay.path), self.config.steps)

    def engines(self) -> tuple[Engines, JoiningEngines | None]:
        role = self.config.actor_infer
        slots, parts = self.replica_slots(role)
        limits = self.config.limits
        model = self.config.model.model_copy(update={"dtype": infer_dtype(self.config)})
        engine = EngineSpec(
            model,
            role.strategy,
            max_model_len(self.config),
            self.config.seed,
            role.threads,
            limits.engine_silence or None,
            limits.engine_step,
            columns=extra_token_columns(self.config),
            sharers=role.replicas_per_device,
            lora=adapters_of_engines(self.config),
            sleep=engine_offload(self.config),
        )
        turns = role.replicas_per_device if any(slot.gpus for slot in slots) else 1
        new_slot = partial(self.placement.later_slot, model_parallel_size(role))
        further = max(0, (role.most_replicas or 0) - len(slots))
        spec = replace(self.spec("actor_infer", [*slots, *(new_slot() for _ in range(further))], role.threads), initial_ranks=len(slots))
        joining = JoiningEngines(spec.slots, new_slot) if further else None
        return Engines(start_cluster(spec, InferWorker, engine, parts), role, turns), joining

    def replica_slots(self, role: InferRoleConfig) -> tuple[list[Slot], list[list[dict[str, Any]]]]:
        """Return (devices of each engine replica on its first node, Ray options of each replica's actors on further nodes)."""
        size = model_parallel_size(role)
        if self.config.placement.nodes is None:
            return self.placement.slots("actor_infer", size, role.replicas_per_device), []
        by_node = self.placement.slots_by_node("actor_infer", size, role.replicas_per_device)
        specs = [self.spec(f"actor_infer-{replica}.node", slots, role.threads) for replica, slots in enumerate(by_node)]
        parts = [[actor_options(spec, number) for number in range(1, len(spec.slots))] for spec in specs]
        return [slots[0] for slots in by_node], parts

    def rollouts(self) -> Cluster[RolloutWorker]:
        config = self.config
        folder, dumps = self.folder.resolve(), None
        if config.rollout.dump or config.mode == "rollout_only":
            dumps = DumpSpec(folder / FOLDER, config.model_dump(mode="json"), tokenizer_checksum(config.model.path))
        # Rewards run on the driver's and the trainers' nodes: on an engine's node, they would be lost with the node.
        trainers = (self.placement.nodes_by_role().get(role, set()) for role in TRAINING_ROLES)
        nodes = {ray.get_runtime_context().get_node_id()}.union(*trainers)
        service = RolloutSpec(config, folder / "samples", dumps, tuple(sorted(nodes)))
        return start_cluster(self.spec("rollouts", [beside_driver()]), RolloutWorker, service)

    def reward_models(self) -> dict[str, Cluster[RewardModelWorker]]:
        clusters = {}
        for name, model in self.config.reward_models.items():
            role = f"reward_models.{name}"
            spec = RewardModelSpec(name, model, derived_seed(self.config.seed, role), self.config.deterministic)
            clusters[name] = start_cluster(self.spec(role, self.placement.slots(role), model.threads), RewardModelWorker, spec)
        return clusters

    def judges(self) -> dict[str, Cluster[JudgeWorker]]:
        clusters = {}
        for name, judge in self.config.judges.items():
            role = f"judges.{name}"
            slots = self.placement.slots(role, model_parallel_size(judge))
            clusters[name] = start_cluster(self.spec(role, slots, judge.threads), JudgeWorker, judge)
        return clusters

    def model(
        self, name: str, role: ForwardRoleConfig, worker: Callable[Concatenate[ModelRole, P], W], *args: P.args, **kwargs: P.kwargs
    ) -> Model[W]:
        config = self.config
        path = role.path if isinstance(role, CriticRoleConfig) else None
        model_role = ModelRole(
            model=config.model.model_copy(update={"path": path}) if path else config.model,
            config=role,
            total_updates=planned_updates(config, name, config.steps),
            seed=derived_seed(config.seed, name),
            deterministic=config.deterministic,
            snapshots=self.folder.resolve() / "out_of_memory",
            memory_history=config.profile.memory_history,
        )
        slots = self.placement.slots(name)
        ranks = start_cluster(self.spec(name, slots, role.threads), worker, model_role, *args, **kwargs)
        return Model(ranks, role, worker)  # type: ignore[arg-type]
