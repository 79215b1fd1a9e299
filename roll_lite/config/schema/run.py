"""Root section of the configuration, and sections of the whole run."""

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
    """Running Ray cluster: host:port, or auto for this machine's. null: RAY_ADDRESS if set, else a local cluster is started."""
    object_store_mb: Annotated[PositiveInt, Field(ge=80)] = 512
    """Object store of a local cluster in MB."""
    placement_timeout_s: PositiveFloat = 60.0
    """Seconds to wait for room for all workers before the run fails. Raise it if other jobs must end first."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds to start a local cluster or connect to a running one."""


class ValidationConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between validations. Runs also validate before the first and after the last step; 0: only then. With one_step_off or async,
    training continues meanwhile (docs/scheduling.md)."""
    samples_per_prompt: PositiveInt = 1
    """Responses per held-out prompt. With several, pass@k, best@k and maj@k are reported for k = 2, 4, 8, ... and this number."""
    sampling: ValidationSamplingConfig = Field(default_factory=ValidationSamplingConfig)
    """Sampling of held-out prompts; domains.<name>.validation_sampling overrides it."""
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
    """Steps between checkpoints; the last step writes one too. 0: none."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; older ones are deleted."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints that are never deleted; a multiple of `every`. 0: only the newest `keep` stay."""
    asynchronous: bool = False
    """Write in background processes. Training waits only for a copy to host memory, which must have room, and for an unfinished previous
    checkpoint."""
    unfinished: bool = True
    """Save unfinished samples and unused finished groups; a resumed run continues them. false: it generates new responses. A token takes 13
    bytes before compression, more with rollout.keep_mask or algorithm.routing_replay."""
    store: Url | None = None
    """URL of an object store or other fsspec file system for checkpoints, such as s3://bucket/prefix. They go to store/experiment/start
    time/checkpoints, where `resume: auto` looks (docs/checkpoints.md). null: the run's folder."""
    in_memory_every: Annotated[int, Field(ge=0)] = 0
    """Steps between copies of the training state to host memory. After losing ranks, training returns to the newest copy (or a newer
    checkpoint) and repeats only later updates. A copy may take a quarter of ray.object_store_mb. 0: none."""
    resume: Literal["auto"] | Url | Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder or URL of a checkpoint, or of a run (its newest checkpoint); the resumed run writes to a new folder. auto: this experiment's
    newest undamaged checkpoint, in the folder of its run, or a fresh start if there is none, so one command starts and resumes. null: start
    afresh."""
    on_sigterm_s: PositiveFloat = 60.0
    """Seconds to end a run after SIGTERM: it finishes started updates, saves the last complete step and exits with code 75; `resume: auto`
    continues it. With `every: 0`, SIGTERM acts like Ctrl-C."""
    export_model: bool = True
    """Write the final model to the run's folder, in Hugging Face format."""

    @property
    def source(self) -> Path | None:
        """Folder to resume from. None for null, and for auto: pipeline/checkpoint_files.py then chooses a checkpoint."""
        if self.resume == "auto":
            return None
        return remote_folder(self.resume) if isinstance(self.resume, str) else self.resume

    @rule
    def _kept(self) -> Mistakes:
        if self.keep_every and self.every and self.keep_every % self.every:
            yield "keep_every", f"is no multiple of checkpoint.every ({self.every}): some would never be written"


class BatchFilesConfig(Section):
    """Token ids, log-probs, advantages and mini-batches of each step, saved in the run's folder. `examples/recompute.py` recomputes losses
    and weights from them (docs/recompute.md)."""

    write: Literal["auto", "always", "never"] = "auto"
    """auto: the first 500 steps, of at most 262,144 tokens each, if `examples/recompute.py` supports the run: float32, without
    algorithm.routing_replay, adapters of experts and some losses."""
    copy_models_mb: Annotated[int, Field(ge=0)] = 256
    """Largest model, in MB, that is copied into the run's folder before training. Only path and checksums of larger ones are saved."""


class ProfileConfig(Section):
    """Measurements of speed and memory."""

    steps: list[PositiveInt] = Field(default_factory=list)
    """Steps, counted from 1, in which torch's profiler records each training rank and engine. Traces for https://ui.perfetto.dev:
    profiles/step_.../ROLE-RANK.json.gz in the run's folder. Recorded steps are slower; long ones make large files."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a training device, for `actor/mfu`. null: known for A100, H100, H200, B200 and MI300X in bfloat16, else no
    `actor/mfu`."""
    memory_history: bool = False
    """Record where training ranks allocate GPU memory, for the snapshot that a rank writes when it runs out. Slows training; takes some
    hundred MB of host memory per rank."""


class ReplayConfig(Section):
    path: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder of a past run, or of its dumps (`rollout.dump`); step n trains on dump n. Required by `mode: train_only`."""


class TrackerConfig(Section):
    name: str
    """jsonl, tensorboard, wandb, mlflow, swanlab, or dotted path to your Tracker class."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `wandb.init`, `swanlab.init` or your class; for mlflow tracking_uri, experiment_name and run_name."""


class WeightSyncConfig(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """Transport of weights to engines. shared_memory: host memory of one machine. gloo: TCP, once to each machine. cuda_ipc: engines read
    the memory of the trainer's GPU, which they must see. nccl: between GPUs. auto, per engine: cuda_ipc if it sees the trainer's GPU, else
    nccl; without GPUs shared_memory on the trainer's machine, else gloo."""
    bucket_mb: PositiveInt = 256
    """Size of a transfer in MB. Larger buckets: fewer transfers, more memory."""
    verify: Literal["auto", "none", "sampled", "full"] = "auto"
    """Checksum comparison of trainer's and engines' weights after each update; a difference ends the run. full: all tensors. sampled: a
    sixteenth, so sixteen updates cover all. auto: sampled, or none if engines' weights cannot be read back (fp8, experts on GPUs)."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait of trainer and engines for each other in a transfer, in seconds. limits.sync_weights limits the whole update."""


class LimitsConfig(Section):
    """Time limits in seconds; 0 or null: unlimited. A phase of a step (metric `time/<phase>`) over its limit counts as hung: the run
    reports the process that did not answer, with its Python stack. Hung training roles and a hung rollout service restart (`restarts`);
    otherwise the run ends. Raise a limit if the work is only slow."""

    start: TimeLimit = 3600.0
    """Start of models and engines. ray.start_timeout_s limits the start of Ray."""
    sync_weights: TimeLimit = 3600.0
    """Weight update of all engines. weight_sync.timeout_s limits each wait in it."""
    generate: TimeLimit = 14400.0
    """Generation of a step's batch. rollout.request_timeout_s limits each response."""
    log_probs: TimeLimit = 7200.0
    """A step's log-probs and values."""
    advantages: TimeLimit = 3600.0
    """A step's rewards, KL and advantages."""
    train: TimeLimit = 14400.0
    """All optimizer steps on one batch."""
    validation: TimeLimit = 14400.0
    """A validation."""
    checkpoint: TimeLimit = 7200.0
    """Writing a checkpoint or the final model, or updating the reference."""
    other: TimeLimit = 3600.0
    """Other calls, such as loading a role onto its devices or resuming."""
    hang_factor: NonNegativeFloat = 10.0
    """Multiple of a phase's longest time so far after which it also counts as hung, never before 300 s. Applies to sync_weights, log_probs,
    advantages and train. 0: off."""
    silence: TimeLimit = 300.0
    """Time in which every process, busy or idle, must answer; otherwise it counts as hung (stopped, or never releases the GIL). Checks
    begin when all processes are ready."""
    engine_silence: TimeLimit = 7.0
    """Time in which an engine must answer a heartbeat; otherwise it counts as lost and is replaced (actor_infer.restarts): its worker hangs
    or one of its processes is stopped. Slow work, such as a long prompt, does not delay answers."""
    engine_step: TimeLimit | Literal["auto"] = "auto"
    """Time limit of an engine's forward pass; an engine that exceeds it counts as hung and lost. Until the first response has ended, forty
    times this; later at least four times the longest pass so far. Kernel compilation does not count. auto: 7 with GPUs, 300 without."""


Victim = Literal["actor_train", "critic", "reference", "actor_infer", "rollouts", "rewards", "environments", "reward_models", "judges"]
Fault = Literal["kill", "stop", "slow", "cut"]
ONLY_KILLS: dict[Fault, float] = {"kill": 1.0}
USUAL_VICTIMS: tuple[Victim, ...] = ("actor_train", "critic", "reference", "actor_infer", "rollouts", "rewards", "environments")


class ChaosConfig(Section):
    """Seeded faults during training, to test what a run survives: processes are killed, stopped or slowed, nodes cut off."""

    every_s: PositiveFloat = 60.0
    """Mean time between faults in seconds; the times are random."""
    targets: Annotated[list[Victim], Field(min_length=1)] = Field(default_factory=lambda: list[Victim](USUAL_VICTIMS))
    """Roles whose processes, child processes included, get faults. rollouts: the rollout service. rewards, environments: their workers."""
    actions: Annotated[dict[Fault, PositiveFloat], Field(min_length=1)] = Field(default_factory=lambda: {**ONLY_KILLS})
    """Relative frequencies of faults. kill: SIGKILL. stop: SIGSTOP. slow: a tenth of the usual speed for slow_s. cut: the node sends
    nothing for cut_s; needs root and iproute2, never the node of the driver or of Ray's head."""
    slow_s: PositiveFloat = 10.0
    """Seconds for which a process is slow."""
    cut_s: PositiveFloat = 10.0
    """Seconds for which a node is cut off. After half a minute or more, Ray drops the node and must be restarted on it."""
    most: PositiveInt | None = None
    """Maximum faults; null: unlimited. Roles restart only as often as their `restarts` allow."""
    seed: int = 0
    """Seed of role, rank and kind of every fault."""


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
    """Name of the experiment; its runs are in run_dir/experiment."""
    run_dir: UserPath = Field(default=Path("runs"), validate_default=True)
    """Folder of all experiments. Each run writes to run_dir/experiment/start time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of prompt order, sampling and training."""
    deterministic: bool = False
    """Generate the same samples in every run of this configuration, resumed or not. Needs CPUs and `rollout.supply: sync`."""
    steps: PositiveInt = 100
    """Training steps, or batches with `mode: rollout_only`."""
    mode: Literal["full", "rollout_only", "train_only"] = "full"
    """full: generate and train. rollout_only: generate, score and dump batches with the initial model. train_only: train on a past run's
    dumps (`replay.path`)."""
    model: ModelConfig
    """Model to train."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Assignment of devices to roles."""
    actor_train: ActorRoleConfig = Field(default_factory=ActorRoleConfig)
    """Trainer of the policy."""
    actor_infer: InferRoleConfig = Field(default_factory=InferRoleConfig)
    """Engines that generate with the policy."""
    reference: ReferenceRoleConfig | None = None
    """Reference policy of the KL terms. null: the actor with its adapters off, if it has any (actor_train.lora)."""
    critic: CriticRoleConfig | None = None
    """Value model for `algorithm.advantage: gae`; null: none."""
    reward_models: dict[str, RewardModelConfig] = Field(default_factory=dict)
    """Reward models by name, for rewards of type `model`."""
    judges: dict[str, JudgeServerConfig] = Field(default_factory=dict)
    """Judge models by name, for rewards of type `judge`."""
    domains: Annotated[dict[str, DomainConfig], Field(min_length=1)]
    """Domains by name, each with prompts, sampling and reward."""
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
    """Ray cluster."""
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    """Time limits of phases and processes."""
    chaos: ChaosConfig | None = None
    """Injected faults; null: none."""
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)
    """Assumptions of `roll-lite simulate`; runs do not read them."""

    @rule
    def _profiled(self) -> Mistakes:
        if max(self.profile.steps, default=0) > self.steps:
            yield "profile.steps", f"the run ends after step {self.steps}; name steps from 1 to {self.steps}"

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
        """Serialize values from the environment as `${oc.env:NAME}`, other values of secret settings as `???`."""
        data: dict[str, Any] = handler(self)
        for path, text in self._as_written.items():
            section: Any = data
            for key in path[:-1]:
                section = section[int(key) if isinstance(section, list) else key]
            section[int(path[-1]) if isinstance(section, list) else path[-1]] = text
        written: dict[str, Any] = without_secrets(data, hidden_as=LEFT_OUT)
        return written
