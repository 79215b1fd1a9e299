"""Root section, and sections of the run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from roll_lite.config.problems import LEFT_OUT, without_secrets
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.base import Mistakes, PositiveFloat, PositiveInt, Section, TimeLimit, UserPath, rule
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
    """Address of a Ray cluster, also as RAY_ADDRESS; absent: a local one is started."""
    object_store_mb: Annotated[PositiveInt, Field(ge=80)] = 512
    """Size of a local cluster's object store."""
    placement_timeout_s: PositiveFloat = 60.0
    """Time limit for the cluster to have room for all workers."""
    start_timeout_s: PositiveFloat = 300.0
    """Time limit for starting Ray here, or for connecting to a running cluster."""


class ValidationConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations; 0: only before the first and after the last step. With rollout.supply one_step_off and async they run
    beside the following steps (docs/scheduling.md)."""
    samples_per_prompt: PositiveInt = 1
    """Responses per held-out prompt; with several, pass@k, best@k and maj@k are reported for powers of two and for all."""
    sampling: ValidationSamplingConfig = Field(default_factory=ValidationSamplingConfig)
    """Sampling of held-out prompts; domains.<name>.validation_sampling overrides it."""
    enabled: bool = True
    """Enables validation."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; the last step writes one too. 0: none."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints that are kept for ever; a multiple of `every`. The newest ones are kept by `keep`. 0: none is kept for
    ever."""
    asynchronous: bool = False
    """Write in background processes. The run waits only for the copy in host memory (which needs that much more), and for the last
    checkpoint when the next is due."""
    resume: Literal["auto"] | Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder of a checkpoint, or of a run to take the newest checkpoint of. The resumed run gets a folder of its own. auto: the newest
    undamaged checkpoint of this experiment; the run continues in the folder of that checkpoint's run, or starts afresh if there is none. So
    the same command starts a run and continues it."""
    export_model: bool = True
    """Write the final model in Hugging Face format."""

    @property
    def source(self) -> Path | None:
        """Folder to resume from; None also for `auto`, before a checkpoint is chosen (pipeline/checkpoint_files.py)."""
        return None if self.resume == "auto" else self.resume

    @rule
    def _kept(self) -> Mistakes:
        if self.keep_every and self.every and self.keep_every % self.every:
            yield "keep_every", f"is no multiple of checkpoint.every ({self.every}): some would never be written"


class BatchFilesConfig(Section):
    """Saves each step's token ids, log-probs, advantages and mini-batches in the run's folder, from which `examples/recompute.py`
    recomputes losses and weights."""

    write: Literal["auto", "always", "never"] = "auto"
    """auto: if a step has at most 262,144 tokens and the script supports the training: float32, without algorithm.routing_replay or
    adapters of experts."""
    copy_models_mb: Annotated[int, Field(ge=0)] = 256
    """Largest models copied into the run's folder before training; of others path and checksums are saved."""


class ReplayConfig(Section):
    path: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder of the run, or of its dumps (`rollout.dump`). Step n trains on dump n."""


class TrackerConfig(Section):
    name: str
    """jsonl, tensorboard, wandb, mlflow, swanlab, or dotted path to a user's class."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of `wandb.init` or `swanlab.init`; mlflow's tracking_uri, experiment_name, run_name; those of the user's class."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """Way of the weights to the engines. shared_memory: through host memory, on one machine. gloo: over TCP, once to each machine.
    cuda_ipc: engines read on the trainer's GPU, which they must see. nccl: from the trainer's GPU to others. auto chooses for each engine,
    possibly several in one update: cuda_ipc if it sees the trainer's GPU, nccl to other GPUs; without GPUs shared_memory on the trainer's
    machine, gloo to others."""
    bucket_mb: PositiveInt = 256
    """Size of a transfer in MB."""
    verify: Literal["auto", "none", "sampled", "full"] = "auto"
    """Comparison of the tensors' checksums in trainer and engines after each update; a difference ends the run. full: all tensors are
    compared. sampled: one in sixteen, so that sixteen updates cover all. auto: sampled if the engines' weights can be read back, else none
    (in fp8, and for experts on GPUs)."""
    timeout_s: PositiveFloat = 300.0
    """Time limit for trainer and engines to wait for each other in a transfer; the whole update has limits.sync_weights."""


class LimitsConfig(Section):
    """Time limits in seconds, by phase (`time/<phase>`). A phase beyond its limit counts as hung: the run ends and reports who did not
    answer, and where it was. 0 or null: unlimited. Raise the limit if work is only slow."""

    start: TimeLimit = 3600.0
    """Start of models and engines; Ray's limit is ray.start_timeout_s."""
    sync_weights: TimeLimit = 3600.0
    """Weight update of all engines; a transfer's limit is weight_sync.timeout_s."""
    generate: TimeLimit = 14400.0
    """Generation of a step; a request's limit is rollout.request_timeout_s."""
    log_probs: TimeLimit = 7200.0
    """Log-probs and values of a step."""
    advantages: TimeLimit = 3600.0
    """Rewards, KL and advantages of a step."""
    train: TimeLimit = 14400.0
    """Optimizer steps of a step."""
    validation: TimeLimit = 14400.0
    """A validation."""
    checkpoint: TimeLimit = 7200.0
    """Writing a checkpoint or the final model, or updating the reference."""
    other: TimeLimit = 3600.0
    """Calls outside these phases: loading a role onto its devices, resuming."""
    silence: TimeLimit = 300.0
    """Time in which a process must answer, busy or idle. One that is stopped, or never releases Python's lock, does not. Counts once all
    processes are ready."""
    engine_silence: TimeLimit = 7.0
    """Time in which an engine must answer. One whose worker does not, or of which a process is stopped, is lost and replaced
    (actor_infer.restarts). Slow work, such as a long prompt, is not silence."""
    engine_step: TimeLimit | Literal["auto"] = "auto"
    """Time limit of one forward pass of an engine's model; an engine beyond it hangs, and is lost. The limit is this value, or four times
    the longest pass so far if that is longer; until a first response has ended it is forty times this value. Kernel compilation does not
    count. auto: 7 with GPUs, 300 without."""


LONGEST_NAME = 200
"""File systems allow 255 bytes."""


def _names_a_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("names a folder: use letters, digits, '.', '_' and '-'")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"names a folder, and has {len(name)} letters; use at most {LONGEST_NAME}")
    if name == "latest":
        raise ValueError("run_dir/latest is the link to the newest run; choose another name")
    return name


class RunConfig(Section):
    experiment: Annotated[str, AfterValidator(_names_a_folder)]
    """Name of the run, a folder under run_dir."""
    run_dir: UserPath = Field(default=Path("runs"), validate_default=True)
    """Folder of runs; each is written to run_dir/experiment/start time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of prompt order, sampling and training."""
    deterministic: bool = False
    """Make runs repeat sample for sample (CPU, synchronous), resumed ones too."""
    steps: PositiveInt = 100
    """Training steps, or batches if nothing trains."""
    mode: Literal["full", "rollout_only", "train_only"] = "full"
    """rollout_only: generate, score and dump `steps` batches with the initial model. train_only: train on the dumps of a past run,
    `replay.path`."""
    model: ModelConfig
    """Model to train."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Devices of the roles."""
    actor_train: ActorRoleConfig = Field(default_factory=ActorRoleConfig)
    """The policy in training."""
    actor_infer: InferRoleConfig = Field(default_factory=InferRoleConfig)
    """The policy in the engines."""
    reference: ReferenceRoleConfig | None = None
    """The policy that KL is measured against. Absent: an actor with adapters (actor_train.lora) is the reference, with its adapters off."""
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
    """Rollouts for `mode: train_only`."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL, epochs."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    """Validation on held-out prompts; null: none."""
    batches: BatchFilesConfig = Field(default_factory=BatchFilesConfig)
    """Saved data of each batch."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints and the final model."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Weight updates of the engines."""
    trackers: list[TrackerConfig] = Field(default_factory=lambda: [TrackerConfig(name="jsonl"), TrackerConfig(name="tensorboard")])
    """Destinations of metrics."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Time limits of phases and processes."""
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)
    """Assumptions of `roll-lite simulate`; runs do not read them."""

    @rule
    def _dumps(self) -> Mistakes:
        if self.mode == "train_only" and self.replay.path is None:
            yield "replay.path", "mode: train_only trains on the dumps of a past run; name its folder"
        if self.mode != "train_only" and self.replay.path is not None:
            yield "replay.path", f"is only used by mode: train_only, the mode is {self.mode}; remove it, or change the mode"
        if self.mode == "train_only" and self.rollout.dump:
            yield "rollout.dump", "mode: train_only generates nothing that could be dumped; use false"

    _as_written: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Serialize without secrets: values from the environment as `${oc.env:NAME}`; others of secret settings are left out."""
        data: dict[str, Any] = handler(self)
        for path, text in self._as_written.items():
            section: Any = data
            for key in path[:-1]:
                section = section[int(key) if isinstance(section, list) else key]
            section[int(path[-1]) if isinstance(section, list) else path[-1]] = text
        written: dict[str, Any] = without_secrets(data, hidden_as=LEFT_OUT)
        return written
