"""Root section of the configuration, and sections that concern the whole run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from roll_lite.config.problems import LEFT_OUT, without_secrets
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.base import Mistakes, NonNegativeFloat, PositiveFloat, PositiveInt, Section, TimeLimit, UserPath, rule
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
from roll_lite.files import remote_folder


class RayConfig(Section):
    address: str | None = None
    """Running Ray cluster: host:port, or auto for the one on this machine. null: the environment variable RAY_ADDRESS if set, else the run
    starts a local cluster."""
    object_store_mb: Annotated[PositiveInt, Field(ge=80)] = 512
    """Size of a local cluster's object store in MB."""
    placement_timeout_s: PositiveFloat = 60.0
    """Seconds to wait until the cluster has room for all workers; then the run fails. Raise it if other jobs must end first."""
    start_timeout_s: PositiveFloat = 300.0
    """Time limit in seconds for starting a local cluster or connecting to a running one."""


class ValidationConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations. A run also validates before its first and after its last step; 0: only then. With rollout.supply
    one_step_off or async, training continues during a validation (docs/scheduling.md)."""
    samples_per_prompt: PositiveInt = 1
    """Responses per held-out prompt. With several, pass@k, best@k and maj@k are reported for k = 2, 4, 8, ... and for k = this number."""
    sampling: ValidationSamplingConfig = Field(default_factory=ValidationSamplingConfig)
    """Sampling of held-out prompts in all domains; domains.<name>.validation_sampling overrides it."""
    enabled: bool = True
    """false: no validation; `validation: null` means the same."""


def _url(text: str) -> str:
    if "://" not in text:
        raise ValueError("is no URL; write one such as s3://bucket/prefix")
    remote_folder(text)
    return text


Url = Annotated[str, AfterValidator(_url)]


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; the last step writes one too. 0: write none."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; older ones are deleted."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints that are never deleted; a multiple of `every`. 0: only the newest `keep` stay."""
    asynchronous: bool = False
    """Write in background processes. Training waits only for a copy to host memory, and for the previous checkpoint if it is still being
    written. Host memory must have room for the copy."""
    unfinished: bool = True
    """Save the tokens and scores of unfinished samples, and of finished groups that no batch has used. A resumed run continues them. false:
    it generates new responses to their prompts. A token takes 13 bytes before compression, more with rollout.keep_mask or
    algorithm.routing_replay."""
    store: Url | None = None
    """Object store, or another file system of fsspec, for all checkpoints: a URL such as s3://bucket/prefix. A run's checkpoints are then
    in store/experiment/start time/checkpoints, where `resume: auto` looks for them (docs/checkpoints.md). null: the run's folder."""
    in_memory_every: Annotated[int, Field(ge=0)] = 0
    """Steps between copies of the trained ranks' state to host memory. After ranks are lost, training returns to the newest copy, if no
    checkpoint is newer, and repeats only the updates since then. A copy may take a quarter of Ray's object store (ray.object_store_mb). 0:
    make no copies."""
    resume: Literal["auto"] | Url | Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder or URL of a checkpoint, or of a run, whose newest checkpoint is used; the resumed run writes to a new folder. auto: use this
    experiment's newest undamaged checkpoint and write to the folder of its run, or start afresh if there is none. So the same command
    starts and resumes a run. null: start afresh."""
    on_sigterm_s: PositiveFloat = 60.0
    """Seconds for ending a run after SIGTERM. The run finishes updates that have begun, saves the state after its last complete step, and
    ends with exit code 75; the same command with `resume: auto` continues it. Without checkpoints (`every: 0`) SIGTERM ends a run like
    Ctrl-C."""
    export_model: bool = True
    """Write the final model to the run's folder, in Hugging Face format."""

    @property
    def source(self) -> Path | None:
        """Folder to resume from. None if `resume` is null, or auto: then pipeline/checkpoint_files.py chooses a checkpoint."""
        if self.resume == "auto":
            return None
        return remote_folder(self.resume) if isinstance(self.resume, str) else self.resume

    @rule
    def _kept(self) -> Mistakes:
        if self.keep_every and self.every and self.keep_every % self.every:
            yield "keep_every", f"is no multiple of checkpoint.every ({self.every}): some would never be written"


class BatchFilesConfig(Section):
    """Saves each step's token ids, log-probs, advantages and mini-batches in the run's folder. `examples/recompute.py` recomputes losses
    and weights from them (docs/recompute.md)."""

    write: Literal["auto", "always", "never"] = "auto"
    """auto: save the first 500 steps, of at most 262,144 tokens each, in runs that `examples/recompute.py` can recompute (in float32,
    without algorithm.routing_replay, adapters of experts and some losses)."""
    copy_models_mb: Annotated[int, Field(ge=0)] = 256
    """Models up to this size in MB are copied into the run's folder before training; of larger ones only path and checksums are saved."""


class ProfileConfig(Section):
    """Measurements of speed and memory."""

    steps: list[PositiveInt] = Field(default_factory=list)
    """Steps, counted from 1, of which torch's profiler records each training rank and engine. The traces are in the run's folder, in
    profiles/step_.../ROLE-RANK.json.gz, for https://ui.perfetto.dev. Recorded steps are slower, and long ones make large files."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a training device, for `actor/mfu`. null: known for A100, H100, H200, B200 and MI300X in bfloat16; on other devices
    there is no `actor/mfu`."""
    memory_history: bool = False
    """Record where in the code training ranks allocate GPU memory, for the snapshot that a rank writes when it runs out of memory. Slows
    training, and takes some hundred MB of host memory per rank."""


class ReplayConfig(Section):
    path: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder of a past run, or of its dumps (`rollout.dump`); step n trains on dump n. Required by `mode: train_only`."""


class TrackerConfig(Section):
    name: str
    """jsonl, tensorboard, wandb, mlflow, swanlab, or dotted path to your Tracker class."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments: of `wandb.init` or `swanlab.init`; tracking_uri, experiment_name and run_name for mlflow; those of your class."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """Transport of weights to the engines. shared_memory: through host memory, on one machine. gloo: over TCP, once to each machine.
    cuda_ipc: engines read the memory of the trainer's GPU, which they must see. nccl: from the trainer's GPU to other GPUs. auto: chosen
    for each engine: cuda_ipc if it sees the trainer's GPU, else nccl; without GPUs shared_memory on the trainer's machine, gloo to
    others."""
    bucket_mb: PositiveInt = 256
    """Weights are sent in buckets of this size in MB. Larger buckets: fewer transfers, more memory."""
    verify: Literal["auto", "none", "sampled", "full"] = "auto"
    """Compare checksums of weights in trainer and engines after each update; a difference ends the run. full: all tensors. sampled: one
    tensor in sixteen, so sixteen updates cover all. auto: sampled, or none if weights cannot be read back from the engines (fp8, experts on
    GPUs)."""
    timeout_s: PositiveFloat = 300.0
    """Longest time in seconds that trainer and engines wait for each other in a transfer. limits.sync_weights limits the whole update."""


class LimitsConfig(Section):
    """Time limits in seconds. A phase of a step (metric `time/<phase>`) that exceeds its limit counts as hung: the run reports which
    process did not answer, with its Python stack. Hung training roles and a hung rollout service start again (`restarts`); otherwise the
    run ends. 0 or null: unlimited. Raise a limit if the work is only slow."""

    start: TimeLimit = 3600.0
    """Start of models and engines. ray.start_timeout_s limits the start of Ray."""
    sync_weights: TimeLimit = 3600.0
    """Weight update of all engines. weight_sync.timeout_s limits each wait in it."""
    generate: TimeLimit = 14400.0
    """Generation of a step's batch. rollout.request_timeout_s limits each response."""
    log_probs: TimeLimit = 7200.0
    """Computation of a step's log-probs and values."""
    advantages: TimeLimit = 3600.0
    """Computation of a step's rewards, KL and advantages."""
    train: TimeLimit = 14400.0
    """Training on one batch: all its optimizer steps."""
    validation: TimeLimit = 14400.0
    """A validation."""
    checkpoint: TimeLimit = 7200.0
    """Writing a checkpoint or the final model, or updating the reference."""
    other: TimeLimit = 3600.0
    """Calls outside these phases, such as loading a role onto its devices or resuming."""
    hang_factor: NonNegativeFloat = 10.0
    """A phase also counts as hung after this multiple of its longest time so far, but not before 300 s. Applies to sync_weights, log_probs,
    advantages and train. 0: only the limits above count."""
    silence: TimeLimit = 300.0
    """Time within which every process must answer, busy or idle; otherwise it counts as hung. A process fails to answer if it is stopped or
    never releases Python's lock (GIL). Checks begin when all processes are ready."""
    engine_silence: TimeLimit = 7.0
    """Time within which an engine must answer a heartbeat. It counts as lost, and is replaced (actor_infer.restarts), if its worker does
    not answer or one of its processes is stopped. Slow work, such as a long prompt, does not delay answers."""
    engine_step: TimeLimit | Literal["auto"] = "auto"
    """Time limit of one forward pass of an engine's model. An engine that exceeds it counts as hung and lost. Until the first response has
    ended, the limit is forty times as long; later it is at least four times the longest pass so far. Kernel compilation does not count.
    auto: 7 with GPUs, 300 without."""


Victim = Literal["actor_train", "critic", "reference", "actor_infer", "rollouts", "rewards", "environments", "reward_models", "judges"]
Fault = Literal["kill", "stop", "slow", "cut"]
ONLY_KILLS: dict[Fault, float] = {"kill": 1.0}
USUAL_VICTIMS: tuple[Victim, ...] = ("actor_train", "critic", "reference", "actor_infer", "rollouts", "rewards", "environments")


class ChaosConfig(Section):
    """Injects faults to test what a run survives: kills, stops and slows the run's processes, and cuts off their nodes, by a seeded plan
    during training."""

    every_s: PositiveFloat = 60.0
    """Mean time between faults in seconds; the times are random."""
    targets: Annotated[list[Victim], Field(min_length=1)] = Field(default_factory=lambda: list[Victim](USUAL_VICTIMS))
    """Roles whose processes get faults, including child processes, such as an engine's. rollouts: the rollout service; rewards and
    environments: their workers."""
    actions: Annotated[dict[Fault, PositiveFloat], Field(min_length=1)] = Field(default_factory=lambda: {**ONLY_KILLS})
    """Relative frequencies of the faults. kill: SIGKILL. stop: SIGSTOP. slow: a tenth of the usual speed for slow_s. cut: the process's
    node sends nothing over the network for cut_s. The nodes of the driver and of Ray's head are never cut off. cut needs root and
    iproute2."""
    slow_s: PositiveFloat = 10.0
    """Time in seconds for which a process is slow."""
    cut_s: PositiveFloat = 10.0
    """Time in seconds for which a node is cut off. After half a minute or more Ray drops the node; Ray must then be restarted on it."""
    most: PositiveInt | None = None
    """Maximum faults; null: unlimited. Roles restart only as often as their `restarts` allow."""
    seed: int = 0
    """Seed of the plan, which sets role, rank and kind of every fault."""


LONGEST_NAME = 200
"""Maximum length of an experiment's name; file systems allow 255 bytes."""


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
    """Name of the experiment; its runs are in the folder run_dir/experiment."""
    run_dir: UserPath = Field(default=Path("runs"), validate_default=True)
    """Folder of all experiments. Each run writes to run_dir/experiment/start time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of prompt order, sampling and training."""
    deterministic: bool = False
    """Generate the same samples in every run of this configuration, resumed or not. Needs CPUs and `rollout.supply: sync`."""
    steps: PositiveInt = 100
    """Training steps, or batches with `mode: rollout_only`."""
    mode: Literal["full", "rollout_only", "train_only", "evaluate"] = "full"
    """full: generate and train. rollout_only: generate, score and dump `steps` batches with the initial model. train_only: train on the
    dumps of a past run, `replay.path`. evaluate: only validate the model; settings of training have no effect (docs/evaluate.md)."""
    model: ModelConfig
    """Model to train."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Assignment of devices to roles."""
    actor_train: ActorRoleConfig = Field(default_factory=ActorRoleConfig)
    """Trainer of the policy."""
    actor_infer: InferRoleConfig = Field(default_factory=InferRoleConfig)
    """Engines that generate with the policy."""
    reference: ReferenceRoleConfig | None = None
    """Reference policy of the KL terms. null: the actor itself with its adapters off, if it has adapters (actor_train.lora)."""
    critic: CriticRoleConfig | None = None
    """Value model, for `algorithm.advantage: gae`; null: none."""
    reward_models: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """Reward models by name, for rewards of type `model`; domains may share one."""
    judges: dict[str, JudgeServerConfig] = Field(default_factory=dict)
    """Judge models by name, for rewards of type `judge`; domains may share one."""
    domains: Annotated[dict[str, DomainConfig], Field(min_length=1)]
    """Domains by name, each with its prompts, sampling and reward."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Batch sizes and limits of generation."""
    replay: ReplayConfig = Field(default_factory=ReplayConfig)
    """Source of rollouts for `mode: train_only`."""
    algorithm: AlgorithmConfig = Field(default_factory=AlgorithmConfig)
    """Advantages, losses, KL, epochs."""
    validation: ValidationConfig = Field(default_factory=ValidationConfig)
    """Validation on held-out prompts; null: none."""
    batches: BatchFilesConfig = Field(default_factory=BatchFilesConfig)
    """Training data of each batch, saved for recomputation."""
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    """Checkpoints and the final model."""
    weight_sync: WeightSyncConfig = Field(default_factory=WeightSyncConfig)
    """Weight updates of the engines."""
    trackers: list[TrackerConfig] = Field(default_factory=lambda: [TrackerConfig(name="jsonl"), TrackerConfig(name="tensorboard")])
    """Destinations of metrics."""
    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Measurements of speed and memory."""
    ray: RayConfig = Field(default_factory=RayConfig)
    """The Ray cluster."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Time limits of phases and processes."""
    chaos: ChaosConfig | None = None
    """Injected faults, to test what a run survives; null: none."""
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)
    """Assumptions of `roll-lite simulate`; runs do not read them."""

    @rule
    def _profiled(self) -> Mistakes:
        if max(self.profile.steps, default=0) > self.steps:
            yield "profile.steps", f"the run ends after step {self.steps}; name steps from 1 to {self.steps}"

    @rule
    def _training_prompts(self) -> Mistakes:
        for name, domain in self.domains.items():
            if domain.data.train is None and self.mode != "evaluate":
                yield f"domains.{name}.data.train", "there is nothing to train on; name a file, or a data set of the hub"

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
        """Serialize without secrets: values from the environment as `${oc.env:NAME}`, other values of secret settings as `???`."""
        data: dict[str, Any] = handler(self)
        for path, text in self._as_written.items():
            section: Any = data
            for key in path[:-1]:
                section = section[int(key) if isinstance(section, list) else key]
            section[int(path[-1]) if isinstance(section, list) else path[-1]] = text
        written: dict[str, Any] = without_secrets(data, hidden_as=LEFT_OUT)
        return written
