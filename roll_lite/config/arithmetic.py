from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

from roll_lite.config.keep_mask import is_truncated
from roll_lite.config.schema.algorithm import KlInRewardConfig
from roll_lite.config.schema.base import Refused
from roll_lite.config.schema.domains import DomainConfig, RolloutConfig, SamplingConfig
from roll_lite.config.schema.losses import CustomLossConfig
from roll_lite.config.schema.models import (
    Devices,
    Dtype,
    ForwardRoleConfig,
    InferRoleConfig,
    JudgeServerConfig,
    LoraConfig,
    MegatronStrategyConfig,
    RewardModelConfig,
    TrainRoleConfig,
)
from roll_lite.config.schema.run import RunConfig
from roll_lite.config.user_function import load_function, parameters_of

TRAINING_ROLES = ("actor_train", "reference", "critic")

Role = ForwardRoleConfig | InferRoleConfig | RewardModelConfig | JudgeServerConfig
EngineOffload = Literal["never", "with_copy", "without_copy"]
"""Treatment of engines' weights on offload. with_copy: moved to host memory. without_copy: discarded, since the trainer sends weights after
every load."""


@dataclass(frozen=True)
class ClusterArithmetic:
    devices: tuple[int, ...]
    copies: int
    layout: str
    shares_with: tuple[str, ...]


@dataclass(frozen=True)
class PassArithmetic:
    """Micro-batches of one model's forward or training pass."""

    role: str
    what: Literal["forward", "training"]
    rows: int
    """Samples on the fullest rank if all samples are equally long."""
    most_rows: int
    """Maximum samples on a rank, reached if every other rank has a single long sample."""
    longest: int
    budget: int
    row_limit: int | None = None
    tokens_divisor: int = 1
    count_divisor: int = 1

    @property
    def micro_batches(self) -> int:
        fitting = max(self.budget // self.longest, 1)
        rows_at_a_time = min(fitting, self.row_limit or fitting)
        return ceil(ceil(self.rows / rows_at_a_time) / self.count_divisor) * self.count_divisor

    @property
    def tokens(self) -> int:
        rows = min(self.most_rows, self.row_limit or self.most_rows)
        most = max(self.longest, min(self.budget, rows * self.longest))
        return ceil(most / self.tokens_divisor) * self.tokens_divisor


@dataclass(frozen=True)
class DomainArithmetic:
    name: str
    share: Fraction
    prompts_per_step: Fraction
    """Average prompts per step. Without `min_prompts`, a single step differs by less than two."""
    min_prompts: int
    samples_per_prompt: int
    max_tokens: int

    @property
    def samples_per_step(self) -> Fraction:
        return self.prompts_per_step * self.samples_per_prompt


@dataclass(frozen=True)
class BatchArithmetic:
    clusters: dict[str, ClusterArithmetic]
    passes: tuple[PassArithmetic, ...]
    domains: tuple[DomainArithmetic, ...]
    prompts_per_step: int
    samples_per_step: Fraction
    mini_batch_samples: Fraction
    ppo_epochs: int
    mini_batches: int
    max_model_len: int
    engine_replicas: int
    device_count: int


def device_numbers(devices: Devices) -> tuple[int, ...]:
    """Device numbers; Refused for an unresolved name such as `node0:3`."""
    if isinstance(devices, int):
        return tuple(range(devices))
    if any(isinstance(one, str) for one in devices):
        raise Refused("devices")  # no such node; config/placement.py reports it
    return tuple(one for one in devices if isinstance(one, int))


def max_model_len(config: RunConfig) -> int:
    return config.actor_infer.strategy.max_model_len or max(one.tokens for one in requests(config))


def longest_sequence(config: RunConfig) -> int:
    return max(domain.sampling.max_prompt_tokens + domain.sampling.max_tokens for domain in config.domains.values())


def held_out_sampling(config: RunConfig, domain: DomainConfig) -> SamplingConfig:
    of_all, own = config.validation.sampling, domain.validation_sampling
    return domain.sampling.model_copy(update=of_all.model_dump(exclude_none=True) | own.model_dump(exclude_none=True))


def held_out_path(config: RunConfig, name: str, key: str) -> str:
    domain = f"domains.{name}"
    given = {f"{domain}.validation_sampling": config.domains[name].validation_sampling, "validation.sampling": config.validation.sampling}
    return f"{next((path for path, one in given.items() if getattr(one, key) is not None), f'{domain}.sampling')}.{key}"


@dataclass(frozen=True)
class LongestRequest:
    domain: str
    sampling: SamplingConfig
    path: str

    @property
    def tokens(self) -> int:
        return self.sampling.max_prompt_tokens + self.sampling.max_tokens


def requests(config: RunConfig) -> Iterator[LongestRequest]:
    for name, domain in config.domains.items():
        if domain.data.train is not None or domain.data.validation is None:
            yield LongestRequest(name, domain.sampling, f"domains.{name}.sampling.max_tokens")
        if config.validation.enabled and domain.data.validation is not None:
            yield LongestRequest(name, held_out_sampling(config, domain), held_out_path(config, name, "max_tokens"))


def group_size(config: RunConfig, domain: DomainConfig) -> int:
    return domain.samples_per_prompt or config.rollout.samples_per_prompt


def aggregation_constant(config: RunConfig) -> int | None:
    if config.algorithm.aggregation != "constant":
        return None
    return config.algorithm.aggregation_constant or max(domain.sampling.max_tokens for domain in config.domains.values())


def planned_updates(config: RunConfig, role: str, steps: int) -> int:
    trained = steps - (config.algorithm.critic_warmup_steps if role == "actor_train" else 0)
    return trained * config.algorithm.ppo_epochs * config.algorithm.mini_batches


def infer_dtype(config: RunConfig) -> Dtype:
    return config.actor_infer.dtype or config.model.dtype


def adapters_of_engines(config: RunConfig) -> LoraConfig | None:
    lora = config.actor_train.lora
    return lora if lora is not None and lora.engines == "adapter" and config.mode == "full" else None


def training_passes(lora: LoraConfig | None) -> int:
    return 3 if lora is None else 2  # forward, gradients of inputs and, unless frozen, of weights


def engine_offload(config: RunConfig) -> EngineOffload:
    if not config.actor_infer.offload:
        return "never"
    return "without_copy" if trains(config) and adapters_of_engines(config) is None else "with_copy"


def model_parallel_size(role: Role) -> int:
    strategy = role.strategy
    if isinstance(strategy, MegatronStrategyConfig):
        return strategy.tensor_parallel * strategy.pipeline_parallel * strategy.context_parallel
    return getattr(strategy, "tensor_parallel", 1)


def micro_batch_count_divisor(strategy: MegatronStrategyConfig) -> int:
    """Divisor of the micro-batch count: the pipeline size if stages are interleaved, else 1."""
    return strategy.pipeline_parallel if strategy.virtual_pipeline_parallel > 1 else 1


def layers_per_chunk(strategy: MegatronStrategyConfig, layers: int) -> list[int]:
    """Number of layers in each model chunk; chunk i is on pipeline stage i % pipeline_parallel."""
    parts = strategy.pipeline_parallel * strategy.virtual_pipeline_parallel
    return strategy.pipeline_layers or [layers // parts + (number < layers % parts) for number in range(parts)]


def pipeline_problem(strategy: MegatronStrategyConfig, layers: int) -> tuple[str, str] | None:
    """Return (setting, problem) if the pipeline does not fit the model's layers."""
    pipeline, virtual, given = strategy.pipeline_parallel, strategy.virtual_pipeline_parallel, strategy.pipeline_layers
    if given is not None:
        return ("pipeline_layers", f"adds up to {sum(given)}; the model has {layers} layers") if sum(given) != layers else None
    if pipeline * virtual <= layers:
        return None
    by_virtual = virtual > 1 and pipeline <= layers
    setting = "virtual_pipeline_parallel" if by_virtual else "pipeline_parallel"
    most = layers // pipeline if by_virtual else layers
    return setting, f"makes {pipeline * virtual} parts of the model's {layers} layers; use at most {most}"


def tensor_parallel_fits(size: int, heads: int, key_value_heads: int, head_dim: int | None) -> bool:
    """Return True if `size` ranks can split the attention heads evenly. With more ranks than key/value heads, trainers split each of these
    heads along `head_dim`; engines copy heads (`head_dim`: None)."""
    if heads % size or (key_value_heads % size and size % key_value_heads):
        return False
    return head_dim is None or size <= key_value_heads or head_dim % (size // key_value_heads) == 0


def micro_batch_tokens_divisor(strategy: MegatronStrategyConfig) -> int:
    """Divisor of a micro-batch's tokens: context parallelism cuts them into two chunks per rank, sequence parallelism splits each chunk
    over the tensor-parallel ranks."""
    parts = 2 * strategy.context_parallel if strategy.context_parallel > 1 else 1
    return parts * (strategy.tensor_parallel if strategy.sequence_parallel else 1)


def generates(config: RunConfig) -> bool:
    return config.mode != "train_only"


def trains(config: RunConfig) -> bool:
    return config.mode in ("full", "train_only")


def validates(config: RunConfig) -> bool:
    return config.validation.enabled and config.mode in ("full", "evaluate")


def validation_is_due(config: RunConfig, step: int) -> bool:
    every = config.validation.every
    return step == config.steps or (every > 0 and step % every == 0)


def on_sync_of(rollout: RolloutConfig, engines_offload: bool) -> str:
    """`rollout.on_sync`, or its default."""
    return "abort" if engines_offload else rollout.on_sync or ("drain" if rollout.supply == "one_step_off" else "pause")


def generates_ahead(config: RunConfig) -> bool:
    return config.rollout.supply != "sync" and config.rollout.max_staleness != 0


def kl_terms(config: RunConfig) -> dict[str, KlInRewardConfig]:
    terms = {"kl_in_reward": config.algorithm.kl_in_reward, "kl_in_loss": config.algorithm.kl_in_loss}
    return {name: term for name, term in terms.items() if term.coef > 0}


def loss_reads_reference(config: RunConfig) -> bool:
    loss = config.algorithm.policy_loss
    if not isinstance(loss, CustomLossConfig):
        return False
    try:
        return "ref_log_probs" in parameters_of(load_function(loss.function, "")) - loss.args.keys()
    except ValueError:  # the check of the function tells
        return False


def uses_reference(config: RunConfig) -> bool:
    return bool(kl_terms(config)) or loss_reads_reference(config)


def actor_is_reference(config: RunConfig) -> bool:
    """True if the actor with its adapters off is the KL reference."""
    return trains(config) and config.actor_train.lora is not None and config.reference is None and uses_reference(config)


def actor_gives_log_probs(config: RunConfig) -> bool:
    return config.algorithm.old_log_probs == "recompute" or actor_is_reference(config)


def replays_engines(config: RunConfig) -> bool:
    return trains(config) and config.algorithm.routing_replay == "rollout"


def extra_token_columns(config: RunConfig) -> tuple[str, ...]:
    has_kept_ids = config.rollout.keep_mask and any(is_truncated(domain.sampling) for domain in config.domains.values())
    columns = {"kept_ids": has_kept_ids, "rollout_experts": replays_engines(config)}
    return tuple(name for name, is_there in columns.items() if is_there)


def roles(config: RunConfig) -> dict[str, Role]:
    named: dict[str, Role | None] = {
        "actor_train": config.actor_train,
        "actor_infer": config.actor_infer,
        "reference": config.reference,
        "critic": config.critic,
        **{f"reward_models.{name}": model for name, model in config.reward_models.items()},
        **{f"judges.{name}": judge for name, judge in config.judges.items()},
    }
    there = {name: role for name, role in named.items() if role is not None}
    return {name: role for name, role in there.items() if (trains(config) if name in TRAINING_ROLES else generates(config))}


def derive(config: RunConfig) -> BatchArithmetic:
    shares = {name: Fraction(str(domain.share)) for name, domain in config.domains.items()}
    prompts, algorithm, by_role = config.rollout.prompts_per_step, config.algorithm, roles(config)
    averages = _with_minima(
        {name: prompts * share / sum(shares.values()) for name, share in shares.items()},
        {name: domain.min_prompts for name, domain in config.domains.items()},
    )
    domains = tuple(
        DomainArithmetic(
            name=name,
            share=shares[name] / sum(shares.values()),
            prompts_per_step=averages[name],
            min_prompts=domain.min_prompts,
            samples_per_prompt=group_size(config, domain),
            max_tokens=domain.sampling.max_prompt_tokens + domain.sampling.max_tokens,
        )
        for name, domain in config.domains.items()
    )
    samples = sum((domain.samples_per_step for domain in domains), Fraction(0))
    clusters = {name: _cluster(name, by_role) for name in by_role}
    return BatchArithmetic(
        clusters=clusters,
        passes=tuple(_passes(config, by_role, domains)),
        domains=domains,
        prompts_per_step=prompts,
        samples_per_step=samples,
        mini_batch_samples=samples / algorithm.mini_batches,
        ppo_epochs=algorithm.ppo_epochs,
        mini_batches=algorithm.mini_batches,
        max_model_len=max_model_len(config),
        engine_replicas=clusters["actor_infer"].copies if generates(config) else 0,
        device_count=len({device for cluster in clusters.values() for device in cluster.devices}),
    )


def _cluster(name: str, by_role: dict[str, Role]) -> ClusterArithmetic:
    role = by_role[name]
    devices, size, strategy = device_numbers(role.devices), model_parallel_size(role), role.strategy
    others = tuple(other for other in by_role if other != name and set(devices) & set(device_numbers(by_role[other].devices)))
    per_device = role.replicas_per_device if isinstance(role, InferRoleConfig) else 1
    copies = len(devices) // size * per_device
    if isinstance(strategy, MegatronStrategyConfig):
        virtual = strategy.virtual_pipeline_parallel
        sizes = {"TP": strategy.tensor_parallel, "PP": strategy.pipeline_parallel, "VPP": virtual, "CP": strategy.context_parallel}
        parts = sizes | {"DP": copies, "EP": strategy.expert_parallel, "ETP": strategy.expert_tensor_parallel}
        layout = " x ".join(f"{key} {value}" for key, value in parts.items() if value > 1 or key == "DP")
    else:
        shared = f", {per_device} on each device" if per_device > 1 else ""
        experts = f" x EP {size}" if getattr(strategy, "expert_parallel", 1) > 1 else ""
        layout = f"{copies} replica{'s' if copies != 1 else ''}" + (f" of TP {size}{experts}" if size > 1 else shared)
    return ClusterArithmetic(devices, copies, f"{strategy.name}: {layout}", others)


def _passes(config: RunConfig, by_role: Mapping[str, Role], domains: Sequence[DomainArithmetic]) -> Iterator[PassArithmetic]:
    rows = _largest_batch(domains)
    for name, role in by_role.items():
        if isinstance(role, ForwardRoleConfig):
            ranks = len(device_numbers(role.devices)) // model_parallel_size(role)
            longest = longest_sequence(config)
            divisors = micro_batch_tokens_divisor(role.strategy), micro_batch_count_divisor(role.strategy)
            budget = role.micro_batch_tokens, role.micro_batch_size
            if name != "actor_train" or actor_gives_log_probs(config):
                yield PassArithmetic(name, "forward", *_fullest_rank(rows, ranks), longest, *budget, *divisors)
            if isinstance(role, TrainRoleConfig):
                mini_batch = ceil(rows / config.algorithm.mini_batches)
                if name == "actor_train" and (ptx := config.algorithm.ptx) is not None:
                    mini_batch, longest = mini_batch + ptx.samples, max(longest, ptx.max_tokens)
                yield PassArithmetic(name, "training", *_fullest_rank(mini_batch, ranks), longest, *role.in_training, *divisors)


def _with_minima(averages: dict[str, Fraction], least: dict[str, int]) -> dict[str, Fraction]:
    # As BatchPlan: whoever is most above the own minimum gives prompts to those below theirs.
    none = Fraction(0)
    above = {name: average - least[name] for name, average in averages.items()}
    givers = sorted((one for one in above.values() if one > 0), reverse=True)
    missing = -sum((one for one in above.values() if one < 0), none)
    levels = ((sum(givers[:count], none) - missing) / count for count in range(1, len(givers) + 1))
    level = next((level for level, following in zip(levels, [*givers[1:], none], strict=False) if level >= following), none)
    return {name: least[name] + max(min(one, level), none) for name, one in above.items()}


def _largest_batch(domains: Sequence[DomainArithmetic]) -> int:
    """Maximum samples in a batch. Domains with the most samples per prompt get up to two prompts more than their average, unless the
    average is whole. `min_prompts` takes prompts from other domains."""
    prompts = int(sum(one.prompts_per_step for one in domains))
    average = {one.name: prompts * one.share for one in domains}
    spare = {name: 0 if one.denominator == 1 else 2 for name, one in average.items()}
    most = {one.name: max(int(average[one.name]) + spare[one.name], one.min_prompts) for one in domains}
    taken = sum(max(one.min_prompts - max(ceil(average[one.name]) - spare[one.name], 0), 0) for one in domains)
    least = {one.name: max(ceil(average[one.name]) - spare[one.name] - taken, one.min_prompts, 0) for one in domains}
    left = prompts - sum(least.values())
    samples = 0
    for one in sorted(domains, key=lambda one: one.samples_per_prompt, reverse=True):
        further = min(left, most[one.name] - least[one.name])
        samples += (least[one.name] + further) * one.samples_per_prompt
        left -= further
    return samples


def _fullest_rank(rows: int, ranks: int) -> tuple[int, int]:
    """Return `rows` and `most_rows` of PassArithmetic."""
    return ceil(rows / ranks), max(rows - (ranks - 1), 1)
