from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from roll_lite.config.problems import LEFT_OUT, did_you_mean, without_secrets
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.config.schema.base import (
    LATEST,
    Mistakes,
    NonEmpty,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
    TimeLimit,
    UserPath,
    below,
    missing_extra,
    rule,
)
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
from roll_lite.config.schema.simulation import SimulationConfig
from roll_lite.config.user_function import check_function
from roll_lite.files import remote_folder


class RayConfig(Section):
    address: str | None = None
    """Running Ray cluster: host:port, or auto for this machine's. null: RAY_ADDRESS, else start a local cluster."""
    object_store_mb: Annotated[PositiveInt, Field(ge=80)] = 512
    """Object store of a local cluster in MB."""
    placement_timeout_s: PositiveFloat = 60.0
    """Seconds to wait for room for all workers. Raise it if other jobs must end first."""
    start_timeout_s: PositiveFloat = 300.0
    """Seconds to start a local cluster or connect to a running one."""


class PlacementConfig(Section):
    """Assignment of devices to roles. A role without `devices` gets as many as roles that share them. Roles on the same devices
    take turns (`offload: true`), except under by_role; judges never share. `placement: colocated` is short for `{name: colocated}`."""

    name: Literal["by_role", "colocated", "split", "pairs", "apart"] = "by_role"
    """by_role: `devices: n` means devices 0 to n-1. colocated: all roles share devices. split: models that train or score share devices,
    engines have others. pairs: actor with reference, critic with reward models, engines alone. apart: each role alone."""
    nodes: Annotated[PositiveInt, below(4097, "more than a cluster has")] | None = None
    """Number of nodes to use: those with enough free devices, the driver's node first, then by address. The run fails if too few are there
    within ray.placement_timeout_s. null: Ray chooses, and roles' `devices` cannot name nodes."""
    devices_per_node: Annotated[PositiveInt, below(1025, "more than a node has")] = 8
    """Devices of each node, numbered over all nodes."""
    fill: Literal["pack", "spread"] = "pack"
    """pack: one node after the other. spread: one device (or tensor-parallel group) of each node in turn. Needs `nodes`."""

    @property
    def devices(self) -> int:
        return (self.nodes or 0) * self.devices_per_node


class ValidationConfig(Section):
    every: NonNegativeInt = 0
    """Steps between validations. Validation also runs before the first and after the last step; 0: only then."""
    samples_per_prompt: PositiveInt = 1
    """Responses per held-out prompt; several give pass@k, best@k and maj@k for k = 2, 4, 8, ... and this number."""
    sampling: ValidationSamplingConfig = ValidationSamplingConfig()
    """Sampling of held-out prompts; domains override it."""
    enabled: bool = True
    """false: no validation, like `validation: null`."""


def _url(text: str) -> str:
    if "://" not in text:
        raise ValueError("is no URL; write one such as s3://bucket/prefix")
    remote_folder(text)
    return text


Url = Annotated[str, AfterValidator(_url)]


class CheckpointConfig(Section):
    every: NonNegativeInt = 0
    """Steps between checkpoints; the last step always gets a checkpoint. 0: no checkpoints."""
    keep: PositiveInt = 2
    """Newest checkpoints to keep; older ones are deleted."""
    keep_every: NonNegativeInt = 0
    """Steps between checkpoints that are never deleted, a multiple of `every`; 0: none."""
    asynchronous: bool = False
    """Write in background processes. Training waits only for a copy to host memory and an unfinished previous checkpoint."""
    unfinished: bool = True
    """Save unfinished samples and unused groups, so that a resumed run continues with them. false: the resumed run generates new samples.
    Takes 13 bytes per token, more with rollout.keep_mask or algorithm.routing_replay."""
    store: Url | None = None
    """URL of an object store or other fsspec file system for checkpoints: s3://bucket/prefix (docs/checkpoints.md). null: the run's
    folder."""
    in_memory_every: NonNegativeInt = 0
    """Steps between copies of the training state in host memory, to which training returns after losing ranks. A copy may take a quarter of
    ray.object_store_mb. 0: none."""
    resume: Literal["auto"] | Url | Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder or URL of a checkpoint, or of a run (its newest one); the resumed run writes to a new folder. auto: continue this experiment's
    newest undamaged checkpoint in its folder, or start afresh. null: start afresh."""
    on_sigterm_s: PositiveFloat = 60.0
    """Seconds to end a run after SIGTERM: it saves the last complete step and exits with code 75, for `resume: auto`. With `every: 0`,
    SIGTERM acts like Ctrl-C."""
    export_model: bool = True
    """Write the final model in Hugging Face format."""

    @property
    def source(self) -> Path | None:
        """Folder to resume from; None for null and for auto."""
        if self.resume == "auto":
            return None
        return remote_folder(self.resume) if isinstance(self.resume, str) else self.resume

    @rule
    def _kept(self) -> Mistakes:
        if self.keep_every and self.every and self.keep_every % self.every:
            yield "keep_every", f"is no multiple of checkpoint.every ({self.every}): some would never be written"


class BatchFilesConfig(Section):
    """Saved tokens, log-probs, advantages and mini-batches of each step, from which `examples/recompute.py` recomputes losses and weights
    (docs/recompute.md)."""

    write: Literal["auto", "always", "never"] = "auto"
    """auto: save the first 500 steps if `examples/recompute.py` supports the run (float32, most losses) and no step can exceed 262,144
    tokens."""
    copy_models_mb: NonNegativeInt = 256
    """Models up to this many MB are copied into the run's folder. Of larger ones, path and checksums are saved."""


class ProfileConfig(Section):
    steps: list[PositiveInt] = []
    """Steps (from 1) that torch's profiler records, in the run's profiles/step_.../ROLE-RANK.json.gz for https://ui.perfetto.dev. Recorded
    steps are slower."""
    peak_tflops: PositiveFloat | None = None
    """Peak TFLOP/s of a training device, for `actor/mfu`. null: the bfloat16 peak if the device is known (A100, H100, H200, B200, MI300X);
    no mfu in float32 or on other devices."""
    memory_history: bool = False
    """Record where training ranks allocate GPU memory, for a snapshot when a rank runs out. Takes some hundred MB of host memory per
    rank."""


class ReplayConfig(Section):
    path: Annotated[UserPath, AfterValidator(Path.resolve)] | None = None
    """Folder of a past run, or of its dumps (`rollout.dump`), for `mode: train_only`; step n trains on dump n."""


LOCAL_TRACKERS = ("jsonl", "tensorboard")
TRACKER_PACKAGES = {name: name for name in ("wandb", "mlflow", "swanlab")}
TRACKER_PACKAGES |= {"prometheus": "prometheus_client", "opentelemetry": "opentelemetry.exporter.otlp.proto.http"}


class TrackerConfig(Section):
    name: str
    """jsonl, tensorboard, wandb, mlflow, swanlab, prometheus, opentelemetry, or dotted path to your Tracker class."""
    args: dict[str, Any] = {}
    """Keyword arguments of `wandb.init`, `swanlab.init`, opentelemetry's `OTLPSpanExporter` or your class; mlflow: tracking_uri,
    experiment_name, run_name; prometheus: port, address."""
    samples: NonNegativeInt = 8
    """Samples per domain shown as text, with every validation and every tenth step (tensorboard, wandb, mlflow, swanlab)."""

    @rule
    def _known(self) -> Mistakes:
        if self.name in TRACKER_PACKAGES:
            yield from missing_extra(TRACKER_PACKAGES[self.name], self.name)
        elif self.name in LOCAL_TRACKERS:
            if self.args:
                yield "args", f"{self.name} takes no arguments"
        elif "." in self.name:
            yield from check_function("name", self.name, self.args, or_class=True)
        else:
            near = did_you_mean(self.name, [*LOCAL_TRACKERS, *TRACKER_PACKAGES])
            yield "name", f"no such tracker; {near} A class of your own is a dotted path, package.module.Class"


class WeightSyncConfig(Section):
    transport: Literal["auto", "shared_memory", "gloo", "cuda_ipc", "nccl"] = "auto"
    """Transport of weights. shared_memory: host memory. gloo: TCP, once to each machine. cuda_ipc: engines read the trainer's GPU memory.
    nccl: between GPUs. auto: cuda_ipc for engines that see the trainer's GPU, else nccl; without GPUs shared_memory on the trainer's
    machine, else gloo."""
    bucket_mb: PositiveInt = 256
    """MB per transfer. Larger: fewer transfers, more memory."""
    verify: Literal["auto", "none", "sampled", "full"] = "auto"
    """Compare checksums of the trainer's and engines' weights after each update; a difference ends the run. sampled: another sixteenth of
    the tensors each time, and all in an engine's first three updates, except what cannot be compared (matrices in fp8, experts on GPUs).
    auto: sampled."""
    timeout_s: PositiveFloat = 300.0
    """Seconds that trainer and engines wait for each other in a transfer."""


class LimitsConfig(Section):
    """Time limits in seconds; 0 or null: unlimited. A phase (metric `time/<phase>`) over its limit counts as hung: training roles and the
    rollout service restart (`restarts`), else the run ends. Raise a limit if the work is only slow."""

    start: TimeLimit = 3600.0
    """Start of models and engines. For a restarting engine, time counts once all its nodes are there. Ray's start has its own limit,
    ray.start_timeout_s."""
    sync_weights: TimeLimit = 3600.0
    """Weight update of all engines. A single wait in it is limited by weight_sync.timeout_s."""
    generate: TimeLimit = 14400.0
    """Generation of a batch. A single response is limited by rollout.request_timeout_s."""
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
    """Other calls, such as loading a role or resuming."""
    hang_factor: NonNegativeFloat = 10.0
    """sync_weights, log_probs, advantages and train also count as hung after this many times their longest duration so far, but never
    before 300 s (sync_weights: weight_sync.timeout_s later). A repeated phase gets this many times the duration of its failed try. 0:
    off."""
    silence: TimeLimit = 300.0
    """Time in which every process must answer, even if busy; else it counts as hung (stopped, or never releases the GIL)."""
    engine_silence: TimeLimit = 7.0
    """Time in which an engine must answer a heartbeat; else it counts as lost and is replaced (actor_infer.restarts). Slow work does not
    delay answers."""
    engine_step: TimeLimit | Literal["auto"] = "auto"
    """Time limit of an engine's forward pass; an engine beyond it is lost. It is 40 times as high until the engine's first response with
    each kind of sampling has ended, and never below 4 times the longest pass so far. auto: 7 with GPUs, 300 without."""


Victim = Literal["actor_train", "critic", "reference", "actor_infer", "rollouts", "rewards", "environments", "reward_models", "judges"]
Fault = Literal["kill", "stop", "slow", "cut"]


class ChaosConfig(Section):
    """Seeded faults during training, to test what a run survives."""

    every_s: PositiveFloat = 60.0
    """Mean seconds between faults, at random times."""
    targets: NonEmpty[Victim] = ["actor_train", "critic", "reference", "actor_infer", "rollouts", "rewards", "environments"]
    """Roles whose processes get faults. rollouts: the rollout service. rewards, environments: their workers."""
    actions: Annotated[dict[Fault, PositiveFloat], Field(min_length=1)] = {"kill": 1.0}
    """Relative frequencies of faults. kill: SIGKILL. stop: SIGSTOP. slow: a tenth of the speed for slow_s. cut: the node, never the
    driver's or Ray head's, sends nothing for cut_s; needs root and iproute2."""
    slow_s: PositiveFloat = 10.0
    """Seconds for which a process is slow."""
    cut_s: PositiveFloat = 10.0
    """Seconds for which a node is cut off. From about a minute on, Ray drops the node and must be restarted there."""
    most: PositiveInt | None = None
    """Maximum faults."""
    seed: int = 0
    """Seed for time, kind and victim (one of the running processes) of every fault."""


LONGEST_NAME = 200
"""Maximum length of an experiment's name; file systems allow 255 bytes."""


def _names_a_folder(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("names a folder: use letters, digits, '.', '_' and '-'")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"names a folder, and has {len(name)} letters; use at most {LONGEST_NAME}")
    if name == LATEST:
        raise ValueError("run_dir/latest is the link to the newest run; choose another name")
    return name


class RunConfig(Section):
    experiment: Annotated[str, AfterValidator(_names_a_folder)]
    """Name of the experiment."""
    run_dir: UserPath = Field(default=Path("runs"), validate_default=True)
    """Folder of all experiments; a run writes to run_dir/experiment/start time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1
    """Seed of prompt order, sampling and training."""
    deterministic: bool = False
    """Generate the same samples in every run, resumed or not. Needs CPUs and `rollout.supply: sync`."""
    steps: PositiveInt = 100
    """Training steps, or batches with `mode: rollout_only`."""
    mode: Literal["full", "rollout_only", "train_only", "evaluate"] = "full"
    """full: generate and train. rollout_only: generate, score and dump with the initial model. train_only: train on a past run's dumps
    (`replay.path`). evaluate: validate the model once; settings of training have no effect (docs/evaluate.md)."""
    model: ModelConfig
    """Model to train."""
    placement: PlacementConfig = PlacementConfig()
    """Assignment of devices to roles."""
    actor_train: ActorRoleConfig = ActorRoleConfig()
    """Trainer of the policy."""
    actor_infer: InferRoleConfig = InferRoleConfig()
    """Engines that generate with the policy."""
    reference: ReferenceRoleConfig | None = None
    """Reference policy of the KL terms. null: the actor without its adapters (actor_train.lora)."""
    critic: CriticRoleConfig | None = None
    """Value model, for `algorithm.advantage: gae`."""
    reward_models: dict[str, RewardModelConfig] = {}
    """Reward models by name."""
    judges: dict[str, JudgeServerConfig] = {}
    """Judge models by name."""
    domains: Annotated[dict[str, DomainConfig], Field(min_length=1)]
    """Domains by name: prompts, sampling and reward."""
    rollout: RolloutConfig = RolloutConfig()
    """Batch sizes and limits of generation."""
    replay: ReplayConfig = ReplayConfig()
    """Source of rollouts for `mode: train_only`."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantages, losses, KL, epochs."""
    validation: ValidationConfig = ValidationConfig()
    """Validation on held-out prompts."""
    batches: BatchFilesConfig = BatchFilesConfig()
    """Files to recompute each step's losses and weights."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and the final model."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """Weight updates of the engines."""
    trackers: list[TrackerConfig] = [TrackerConfig(name="jsonl"), TrackerConfig(name="tensorboard")]
    """Destinations of metrics."""
    report_every: NonNegativeInt = 100
    """Steps between two updates of report.html, which a process of low priority writes; 0: only at the end."""
    profile: ProfileConfig = ProfileConfig()
    """Measurements of speed and memory."""
    ray: RayConfig = RayConfig()
    """Ray cluster."""
    limits: LimitsConfig = LimitsConfig()
    """Time limits of phases and processes."""
    chaos: ChaosConfig | None = None
    """Injected faults."""
    simulation: SimulationConfig = SimulationConfig()
    """Assumptions of `roll-lite simulate`."""

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

    @rule
    def _one_of_each_tracker(self) -> Mistakes:
        names = [tracker.name for tracker in self.trackers]
        for index, name in enumerate(names):
            if name in names[:index]:
                yield f"trackers.{index}.name", f"trackers.{names.index(name)} is {name} too; keep one"

    _as_written: dict[tuple[str, ...], str] = PrivateAttr(default_factory=dict)

    @model_serializer(mode="wrap")
    def _without_secrets(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write values from the environment as `${oc.env:NAME}`, other secrets as `???`."""
        data: dict[str, Any] = handler(self)
        for path, text in self._as_written.items():
            section: Any = data
            for key in path[:-1]:
                section = section[int(key) if isinstance(section, list) else key]
            section[int(path[-1]) if isinstance(section, list) else path[-1]] = text
        written: dict[str, Any] = without_secrets(data, hidden_as=LEFT_OUT)
        return written
