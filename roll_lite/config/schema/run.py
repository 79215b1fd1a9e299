"""The root of the configuration, and the sections of the run itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer, model_validator

from roll_lite.config.problems import LEFT_OUT, without_secrets
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.base import PositiveFloat, PositiveInt, Section, TimeLimit, UserPath
from roll_lite.config.schema.domains import DomainConfig, RolloutConfig, ValidationSamplingConfig
from roll_lite.config.schema.models import (
    ActorRoleConfig,
    CriticRoleConfig,
    InferRoleConfig,
    JudgeServerConfig,
    ModelConfig,
    ReferenceRoleConfig,
    RewardModelConfig,
)
from roll_lite.config.schema.placement import PlacementConfig
from roll_lite.config.schema.simulation import SimulationConfig


class RayConfig(Section):
    address: str | None = None
    """Address of an existing Ray cluster; RAY_ADDRESS is honoured too. A local one is started where absent."""
    object_store_mb: Annotated[PositiveInt, Field(ge=80)] = 512
    """Size of a local cluster's object store."""
    placement_timeout_s: PositiveFloat = 60.0
    """How long to wait until the cluster has room for all workers."""
    start_timeout_s: PositiveFloat = 300.0
    """How long Ray itself may take to start, or to let the run in."""


class ValidationConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0 validates before the first and after the last step only. With rollout.supply one_step_off and async they
    run beside the steps that follow (docs/scheduling.md)."""
    samples_per_prompt: PositiveInt = 1
    """Responses sampled for each held-out prompt. With several, pass@k, best@k and maj@k are told for powers of two and for all of them."""
    sampling: ValidationSamplingConfig = Field(default_factory=ValidationSamplingConfig)
    """How they are sampled; domains.<name>.validation_sampling comes before it."""
    enabled: bool = True
    """Validate at all."""

    @model_validator(mode="before")
    @classmethod
    def _null_disables(cls, section: Any) -> Any:
        return {"enabled": False} if section is None else section


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; the last step writes one too. 0: none."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of every so many steps are kept for ever, besides the newest; 0: none. A multiple of `every`."""
    asynchronous: bool = False
    """Steps go on while processes write: the run waits until the state has been copied in host memory, of which that takes as much again,
    and where the next checkpoint comes before the last one is written."""
    resume: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Checkpoint folder to go on from, or a run's folder to take its newest."""
    export_model: bool = True
    """Write the final model in Hugging Face format."""


class BatchFilesConfig(Section):
    """Token ids, log-probs, advantages and mini-batches of every step in the run's folder, from which `examples/recompute.py` computes
    losses and weights once more."""

    write: Literal["auto", "always", "never"] = "auto"
    """auto: where a step has at most 262,144 tokens, and the script can compute what is trained: in float32 (model.dtype), and not with
    optimizer.muon, algorithm.routing_replay or adapters of experts."""
    copy_models_mb: Annotated[int, Field(ge=0)] = 256
    """Models up to this size are copied into the run's folder before training; of larger ones path and checksums are kept."""


class ReplayConfig(Section):
    """Rollouts of a past run, for `mode: train_only`."""

    path: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """The run's folder, or the folder that its dumps (`rollout.dump`) were copied to. Step n trains on the dump of step n."""


class TrackerConfig(Section):
    name: str
    """jsonl, tensorboard, wandb, mlflow, swanlab, or the dotted path to a class of your own, package.module.Class."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Of `wandb.init` or `swanlab.init`; mlflow's tracking_uri, experiment_name and run_name; those of your class."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """How weights travel to the engines. shared_memory: engines read them in host memory where the trainer has written them, on one
    machine; gloo: over TCP, once to each machine; cuda_ipc: engines read them on the trainer's GPU, which they see; nccl: from the
    trainer's GPU to others; auto: to each engine what connects it with the trainer, several side by side in one update where they differ
    (cuda_ipc to a GPU that sees the trainer's, nccl to other GPUs; without them shared_memory on its machine, gloo to others)."""
    bucket_mb: PositiveInt = 256
    """Size of one transfer."""
    verify: Literal["none", "sampled", "full"] = "none"
    """Compare checksums of what trainer and engines hold after each update: of no tensor, of every sixteenth (other ones each time, all of
    them in sixteen updates), of all."""
    timeout_s: PositiveFloat = 300.0
    """How long trainer and engines wait for each other for one transfer. The whole update has limits.sync_weights."""


class LimitsConfig(Section):
    """Seconds after which something counts as hung, phase by phase (as `time/<phase>` measures them): the run ends and says who did not
    answer, and where it stood. 0 or null: no limit. Work that only takes long needs a larger number, nothing else."""

    start: TimeLimit = 3600.0
    """Until all models and engines are ready, from when Ray runs; that has ray.start_timeout_s."""
    sync_weights: TimeLimit = 3600.0
    """New weights to all engines; weight_sync.timeout_s is the limit for one transfer."""
    generate: TimeLimit = 14400.0
    """All prompts of a step; one request has rollout.request_timeout_s."""
    log_probs: TimeLimit = 7200.0
    """Log-probs and values of a step."""
    advantages: TimeLimit = 3600.0
    """Rewards, KL and advantages of a step."""
    train: TimeLimit = 14400.0
    """All updates of a step."""
    validation: TimeLimit = 14400.0
    """One validation."""
    checkpoint: TimeLimit = 7200.0
    """Writing a checkpoint or the final model, or renewing the reference."""
    other: TimeLimit = 3600.0
    """Every call that belongs to no phase: moving a role to its devices, resuming."""
    silence: TimeLimit = 300.0
    """A process that answers nothing at all, working or idle: stopped, or never giving Python's lock back. Counts once all are ready."""
    engine_silence: TimeLimit = 7.0
    """The same of an engine, where the run goes on without it if there are others: its worker does not answer, or one of its own processes
    is stopped. An engine that only works for long, on a long prompt for instance, is not silent."""
    engine_step: TimeLimit | Literal["auto"] = "auto"
    """How long a step of an engine, one pass of its model, may take before the engine counts as hung, and the run goes on without it as
    above: at least so long, and four times the longest step so far; forty times as long until a response has ended. What a compiler of
    kernels takes does not count. auto: 7 with GPUs, 300 without."""


class RunConfig(Section):
    """The root."""

    experiment: str
    """Name of the run's folder under run_dir."""
    run_dir: UserPath = Field(default=Path("runs"), validate_default=True)
    """Where runs are written: run_dir/experiment/start time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of prompt order, sampling and training."""
    deterministic: bool = False
    """Repeat a run sample for sample (CPU, synchronous); resumed, it goes on like one that was not interrupted."""
    steps: PositiveInt = 100
    """Training steps; batches, where nothing trains."""
    mode: Literal["full", "rollout_only", "train_only"] = "full"
    """rollout_only: generate and score `steps` batches with the model as it is, and dump them; nothing trains. train_only: train on the
    dumps of a past run, `replay.path`; nothing is generated or scored."""
    model: ModelConfig
    """The model that is trained."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Which devices the roles take."""
    actor_train: ActorRoleConfig = Field(default_factory=ActorRoleConfig)
    """The policy in training."""
    actor_infer: InferRoleConfig = Field(default_factory=InferRoleConfig)
    """The policy in the engines."""
    reference: ReferenceRoleConfig | None = None
    """The policy that KL is measured against. Where the actor trains adapters (actor_train.lora) it is the actor without them, if there is
    no such section."""
    critic: CriticRoleConfig | None = None
    """The value model (GAE)."""
    reward_models: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """Reward models by name, for rewards of type `model`; domains may share one."""
    judges: dict[str, JudgeServerConfig] = Field(default_factory=dict)
    """Judges by name, for rewards of type `judge`; domains may share one."""
    domains: Annotated[dict[str, DomainConfig], Field(min_length=1)]
    """Reward domains by name."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Batch sizes and limits of generation."""
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """The rollouts that `mode: train_only` trains on."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL, epochs."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    """Held-out accuracy. null: not measured."""
    batches: BatchFilesConfig = Field(default_factory=BatchFilesConfig)
    """What is kept of each step's batch."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints and the final model."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """How new weights reach the engines."""
    trackers: list[TrackerConfig] = Field(default_factory=lambda: [TrackerConfig(name="jsonl"), TrackerConfig(name="tensorboard")])
    """Where metrics go."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """When something that does not answer counts as hung."""
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)
    """What `roll-lite simulate` assumes; a run reads nothing of it."""

    _as_written: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What came from the environment is written down as it was written, as `${oc.env:NAME}`; other values of settings whose names say
        that they are secrets are not."""
        data: dict[str, Any] = handler(self)
        for path, text in self._as_written.items():
            section: Any = data
            for key in path[:-1]:
                section = section[int(key) if isinstance(section, list) else key]
            section[int(path[-1]) if isinstance(section, list) else path[-1]] = text
        written: dict[str, Any] = without_secrets(data, hidden_as=LEFT_OUT)
        return written
