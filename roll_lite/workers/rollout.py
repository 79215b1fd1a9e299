"""Rollout service: asynchronous Ray actor with prompts, domains, router and reward workers."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from roll_lite.config.arithmetic import extra_token_columns
from roll_lite.config.checks.scoring_models import MODEL_REWARD
from roll_lite.config.keep_mask import is_truncated
from roll_lite.config.schema.domains import ENVIRONMENT_REWARD, DomainConfig, RewardConfig, SamplingConfig, rewards_turns
from roll_lite.config.schema.run import RunConfig
from roll_lite.data.prompts import PromptOrder, Split, load_prompts
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import FinishReason, Prompt, RewardInput, SampleGroup, Sampling
from roll_lite.data.templates import load_tokenizer
from roll_lite.distributed.dataflow import Block
from roll_lite.distributed.failures import MemberLost
from roll_lite.distributed.fleet import Fleet, MemberState, Policy
from roll_lite.distributed.place import ActorMember
from roll_lite.distributed.worker import AsyncWorker, freeze_heap
from roll_lite.observability.device_memory import PeaksByPhase
from roll_lite.observability.timers import POOL_WORK, Span
from roll_lite.rewards.base import CANNED_RESPONSE, RewardFailed
from roll_lite.scheduler.domain import DataExhausted, Domain
from roll_lite.scheduler.filters import filter_of
from roll_lite.scheduler.mix import MixedOrder
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.runner import one_response
from roll_lite.scheduler.service import RolloutService, accepted
from roll_lite.scheduler.stats import Progress, RolloutStats
from roll_lite.scheduler.supply import pacing_of
from roll_lite.workers.environment import EnvironmentPool
from roll_lite.workers.infer import EngineSeat, RemoteEngine
from roll_lite.workers.judge import JudgeAddress, with_addresses
from roll_lite.workers.reward import EpisodeRewards, RewardPool
from roll_lite.workers.reward_model_pool import RewardModelClient, RewardModelPool
from roll_lite.workers.rollout_output import (
    NONE,
    DumpSpec,
    held_out_rows,
    ledger_text,
    reported_columns,
    rows_of,
    stored_blocks,
    tokens_of,
    turn_rewards_of,
    write_samples,
)
from roll_lite.workers.unfinished import from_file, to_file

NOBODY: Mapping[int, str] = {}


@dataclass(frozen=True)
class RolloutSpec:
    config: RunConfig
    samples_folder: Path | None = None
    dumps: DumpSpec | None = None
    nodes: tuple[str, ...] = ()
    """Node ids for reward and environment workers; empty: any."""


@dataclass(frozen=True)
class RolloutBatch:
    """Batch for the driver: rows and references to tokens (`blocks`)."""

    rows: DataProto
    blocks: list[Block]
    stats: RolloutStats
    replaced: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """{"reward" or "environment": {domain: why workers were replaced since the last batch}}."""
    silences: list[float] = field(default_factory=list)
    """Seconds from last answer to loss, for engines lost since the last batch."""
    ledger: bytes = b""
    state: dict[str, Any] = field(default_factory=dict)
    work: list[Span] = field(default_factory=list)
    """Work of reward models, judges and environment workers since the last batch."""
    memory: dict[str, PeaksByPhase] = field(default_factory=dict)
    """{reward model's role: GPU memory by phase}."""


GC_THRESHOLDS = (100_000, 50, 100)
"""Make garbage collection rare: with the defaults it takes three quarters of the time for 8,192 samples."""


@dataclass(frozen=True)
class Trial:
    """Test of a reward, or of one component (base reward or term), with a canned response."""

    domain: str
    place: str
    retries: int
    prompts: Sequence[Prompt]
    pool: RewardPool | RewardModelClient | EpisodeRewards
    is_part: bool = False
    """True if `pool` was made for this test; it is closed afterwards."""

    async def problem(self) -> str | None:
        """Return an error if no prompt gets a score; one failure may be a bad reference answer."""
        causes = await asyncio.gather(*map(self._failure, self.prompts))
        if not all(causes):
            return None
        remedy = "correct it" if self.is_part else f"look closer with: roll-lite reward --domain {self.domain}"
        return f"{self.place}: scoring a first response, {CANNED_RESPONSE!r}, failed: {causes[0]}; {remedy}"

    async def _failure(self, prompt: Prompt) -> str | None:
        cause = None
        for _ in range(self.retries + 1):
            try:
                await self.pool.score(RewardInput.of(prompt, CANNED_RESPONSE, FinishReason.STOP))
                return None
            except RewardFailed as error:
                cause = error.cause
        return cause


class RolloutWorker(AsyncWorker):
    _service: RolloutService
    _engines: Fleet[EngineSeat]
    _router: Router

    def __init__(self, spec: RolloutSpec) -> None:
        super().__init__()
        ActorMember.nodes = spec.nodes
        self._spec, self._config = spec, spec.config
        self._columns = extra_token_columns(spec.config)
        self._temperatures = {name: domain.sampling.temperature for name, domain in spec.config.domains.items()}
        self._per_turn = {name: domain.reward.weight for name, domain in spec.config.domains.items() if rewards_turns(domain)}
        self._pools: dict[str, RewardPool | RewardModelClient | EpisodeRewards] = {}
        self._environments: dict[str, EnvironmentPool] = {}
        self._reward_models: dict[str, RewardModelPool] = {}
        self._data_notes: list[str] = []
        self._silences: list[float] = []
        self._left = set[str]()
        self._writing: asyncio.Task[None] | None = None
        self._one_writes = asyncio.Lock()
        self._has_engines = asyncio.Event()

    async def prepare(self, reward_models: Mapping[str, Sequence[Any]], judges: Mapping[str, JudgeAddress]) -> None:
        """Read the data; start and test reward workers. `reward_models`: RewardModelWorker actors by model."""
        models = self._config.reward_models
        self._reward_models = {name: RewardModelPool(name, reward_models[name], config) for name, config in models.items()}
        self._pools = {name: self._pool(name, domain, judges) for name, domain in self._config.domains.items()}
        path = self._config.model.path
        self._environments = {
            name: EnvironmentPool(name, domain, path, limited=not self._config.deterministic)
            for name, domain in self._config.domains.items()
            if domain.environment is not None
        }
        starting = asyncio.gather(*(pool.start() for pool in (*self._pools.values(), *self._environments.values())))
        self._domains = await asyncio.to_thread(self._load_domains)
        freeze_heap()
        gc.set_threshold(*GC_THRESHOLDS)
        await asyncio.gather(starting, *(model.leave_devices() for model in self._reward_models.values()))
        await self._try_rewards(judges)

    async def initialize(self, engines: Sequence[Any], absent: Mapping[int, str] = NOBODY) -> None:
        """Start serving, after `prepare`. `engines`: InferWorker actors. `absent`: {number: reason} of engines that join later."""
        config = self._config
        clients = [self._client(number, engine) for number, engine in enumerate(engines)]
        rollout, engines_restart = config.rollout, config.actor_infer.restarts > 0
        limits = config.actor_infer.strategy.max_running_requests, rollout.max_tokens_per_engine
        router = self._router = Router(clients, rollout.request_timeout_s, config.deterministic, *limits, engines_restart)
        self._watching = asyncio.create_task(router.clock.watch())

        def lost(seat: EngineSeat, cause: str) -> None:
            seat.engine.fail(cause)
            if seat.name in self._left:
                self._left.remove(seat.name)
            else:
                self._silences.append(seat.engine.silent_s)
            router.engine_lost(seat.name, cause)

        # The fleet only watches: the driver restarts engines, and reports when none is left.
        policy = Policy(start_timeout_s=None, restarts=None if engines_restart else 0, attempts=1)
        seats = [EngineSeat(client, number in absent) for number, client in enumerate(clients)]
        self._engines = Fleet("actor_infer", seats, policy, lost=lost, down=self.tell_end)
        self._engines.tend()
        for number, why in absent.items():
            router.engine_lost(clients[number].name, why)
        self._service = RolloutService(
            self._domains,
            router,
            rollout.retries,
            seed=config.seed if config.deterministic else None,
            pacing=pacing_of(rollout, config.actor_infer.offload),
            batches=config.steps,
            keep_left_out=self._spec.dumps is not None,
        )
        self._has_engines.set()

    async def _try_rewards(self, judges: Mapping[str, JudgeAddress]) -> None:
        """Test each domain with a canned response to up to three prompts: errors in scoring and episodes end the run early."""
        trials = self._trials(judges)
        own = [trial.pool for trial in trials if trial.is_part and isinstance(trial.pool, RewardPool)]
        await asyncio.gather(*(pool.start() for pool in own))
        plays = (self._environments[one.name].problem(first_prompts(one)) for one in self._domains if one.name in self._environments)
        problems = [problem for problem in await asyncio.gather(*(trial.problem() for trial in trials), *plays) if problem]
        for pool in own:
            pool.close()
        if problems:
            raise ValueError("\n".join(problems))

    def _trials(self, judges: Mapping[str, JudgeAddress]) -> list[Trial]:
        """Return the tests that can run before the engines start: of components that need no model or judge of this run."""

        def waits(reward: RewardConfig) -> bool:
            return reward.name in (MODEL_REWARD, ENVIRONMENT_REWARD) or with_addresses(reward, judges) != reward

        trials = list[Trial]()
        for domain in self._domains:
            path, reward = f"domains.{domain.name}.reward", self._config.domains[domain.name].reward
            prompts = first_prompts(domain)
            if not waits(reward):
                trials.append(Trial(domain.name, path, reward.retries, prompts, self._pools[domain.name]))
                continue
            parts: dict[str, Any] = {path: reward} | {f"{path}.terms.{number}": term for number, term in enumerate(reward.terms)}
            for place, one in parts.items():
                part = reward.model_copy(update={"name": one.name, "args": one.args, "terms": [], "workers": 1})
                if one.name != "code" and not waits(part):  # a sandbox does not start twice
                    trials.append(Trial(domain.name, place, reward.retries, prompts, RewardPool(domain.name, part), is_part=True))
        return trials

    def _pool(self, name: str, domain: DomainConfig, judges: Mapping[str, JudgeAddress]) -> RewardPool | RewardModelClient | EpisodeRewards:
        reward = with_addresses(domain.reward, judges)
        if reward.name == ENVIRONMENT_REWARD and not reward.terms:
            return EpisodeRewards()
        if reward.name != MODEL_REWARD:
            return RewardPool(name, reward)
        return RewardModelClient(name, reward, self._reward_models[reward.args["model"]])

    async def judges_moved(self, judges: Mapping[str, JudgeAddress]) -> None:
        for name, pool in self._pools.items():
            if not isinstance(pool, EpisodeRewards):
                pool.configure(with_addresses(self._config.domains[name].reward, judges))

    def _load_domains(self) -> list[Domain]:
        tokenizer, domains = load_tokenizer(self._config.model.path), []
        for name, config in self._config.domains.items():
            given: list[Split] = [split for split in ("train", "validation") if getattr(config.data, split) is not None]
            loaded = {split: load_prompts(name, config, split, tokenizer, self._config.domains) for split in given}
            self._data_notes += [f"domains.{name}.data.{split}: {own.counts()}" for split, own in loaded.items() if own.left_out]
            prompts = loaded[given[0]]  # held-out ones, if nothing trains
            files, seed, epochs = config.data.train, self._config.seed, config.data.epochs
            shares = list(files.values()) if isinstance(files, dict) else []
            domain = Domain(
                name=name,
                prompts=prompts,
                order=MixedOrder(prompts.parts, shares, seed, name, epochs) if shares else PromptOrder(len(prompts), seed, name),
                sampling=sampling_of(config.sampling, self._config.rollout.keep_mask),
                samples_per_prompt=config.samples_per_prompt or self._config.rollout.samples_per_prompt,
                share=config.share,
                rewards=self._pools[name],
                reward_retries=config.reward.retries,
                validation=loaded.get("validation"),
                greedy_baseline=self._config.algorithm.advantage.name == "remax",
                filter=filter_of(self._config.rollout.filter),
                epochs=epochs,
                least=config.min_prompts,
                episode=self._environments[name].play if name in self._environments else one_response,
            )
            domains.append(domain)
        return domains

    async def notes(self) -> list[str]:
        pools = [(name, pool.note) for name, pool in self._pools.items() if isinstance(pool, RewardPool)]
        rendering = [pool.note for pool in self._environments.values() if pool.note]
        return [*self._data_notes, *(f"domains.{name}.reward: {note}" for name, note in pools if note), *rendering]

    async def next_batch(self, prompts: int, step: int) -> RolloutBatch | None:
        """Return a batch of `prompts` prompts: rows of accepted samples, with references to their tokens. None: no prompts are left."""
        try:
            result = await self._service.next_batch(prompts)
        except DataExhausted:
            return None
        state = self._service.state_dict()
        await self._reward_models_rest()
        trainable = accepted(result.groups)
        rows = rows_of(trainable, self._temperatures)
        writing = self._samples_file("step", step, result.groups)
        if self._spec.dumps is not None:
            everyone = sorted([*result.groups, *result.left_out], key=lambda group: group.group)
            facts = (self._columns, _clock_offset(), self._per_turn)
            writing.append(self._spec.dumps.writing(step, everyone, rows, result.stats, *facts))
        await self._write(writing)
        pools: dict[str, Mapping[str, Any]] = {"reward": self._pools, "environment": self._environments}
        replaced = {part: {name: pool.newly_replaced() for name, pool in own.items()} for part, own in pools.items()}
        silences, self._silences = self._silences, []
        memory = {f"reward_models.{name}": model.take_memory() for name, model in self._reward_models.items()}
        blocks = [tokens_of(trainable, self._columns)]
        if self._per_turn and len(rows):
            blocks.append(turn_rewards_of(trainable, self._per_turn))
        ledger = ledger_text(result.ledger, step)
        return RolloutBatch(rows, blocks, result.stats, replaced, silences, ledger, state, POOL_WORK.take(), memory)

    async def finished(self, known: Collection[int], least: int) -> tuple[DataProto, Block]:
        """Return rows and tokens of finished groups certain to be in the current batch and not in `known`; nothing for fewer than `least`
        groups."""
        groups = [group for group in self._service.finished() if group.group not in known]
        trainable = accepted(groups if len(groups) >= least else [])
        return rows_of(trainable, self._temperatures), tokens_of(trainable, self._columns)

    def _client(self, number: int, engine: Any) -> RemoteEngine:
        return RemoteEngine(f"actor_infer[{number}]", engine, self._config.deterministic, self._config.limits.engine_silence or None)

    async def lost_engines(self) -> dict[int, str]:
        return self._engines.lost

    async def engine_restarted(self, number: int, engine: Any) -> None:
        """Let a lost engine's replacement serve. `engine`: its InferWorker actor, with the current weights."""
        seat, client = self._engines.members[number], self._client(number, engine)
        if self._engines.state(seat) is MemberState.SERVING and seat.engine.serves(engine):
            return  # a loss elsewhere interrupted the first call's wait
        await self._engines.until(seat, MemberState.LOST, MemberState.STARTING)  # the driver may have noticed the loss first
        # The fleet reports only engines that have served.
        seat.engine.fail("it was lost before it served")
        self._router.engine_lost(seat.name, "it was lost before it served")
        seat.successors.put_nowait(client)
        await self._engines.until(seat, MemberState.SERVING, MemberState.DOWN)
        self._router.add(client)

    async def engine_leaves(self, number: int) -> None:
        """Move an engine's requests to others, since its node will leave; return once it has none."""
        await self._has_engines.wait()
        name = self._engines.members[number].name
        await self._router.drain(name, interrupt=True)
        self._left.add(name)

    async def engine_given_up(self, number: int, cause: str) -> None:
        self._engines.members[number].successors.put_nowait(MemberLost(cause))
        self._router.give_up(self._engines.members[number].name)

    async def progress(self, held_out: bool) -> dict[str, Progress]:
        return self._service.progress(held_out)

    async def evaluate(self, samples_per_prompt: int, sampling: Mapping[str, SamplingConfig], step: int) -> tuple[DataProto, RolloutStats]:
        """Run a validation beside batches and weight updates. Return rows of accepted samples, and statistics of all."""
        result = await self._service.evaluate(samples_per_prompt, {name: sampling_of(one) for name, one in sampling.items()})
        await self._reward_models_rest()
        columns = reported_columns(result.groups, self._config.domains)
        await self._write(self._samples_file("validation", step, result.groups, columns))
        await self.wait_for_files()  # trackers read the file next
        temperatures = {name: one.temperature for name, one in sampling.items()}
        return held_out_rows(accepted(result.groups), temperatures, columns), result.stats

    async def _reward_models_rest(self) -> None:
        await asyncio.gather(*(model.rest() for model in self._reward_models.values()))

    def _samples_file(
        self, kind: str, step: int, groups: list[SampleGroup], columns: Mapping[str, Sequence[str]] = NONE
    ) -> list[Callable[[], None]]:
        folder = self._spec.samples_folder
        if folder is None:
            return []
        return [partial(write_samples, folder / f"{kind}_{step:06d}.jsonl", groups, step, _clock_offset(), columns)]

    async def _write(self, files: Sequence[Callable[[], None]]) -> None:

        def write() -> None:
            for file in files:
                file()

        async with self._one_writes:  # a batch and a validation may write at the same time
            await self.wait_for_files()
            self._writing = asyncio.create_task(asyncio.to_thread(write))

    async def wait_for_files(self) -> None:
        if self._writing is not None:
            await self._writing

    async def hold(self) -> None:
        await self._service.hold()

    async def set_version(self, version: int) -> None:
        self._service.set_version(version)

    async def state_dict(self) -> dict[str, Any]:
        return self._service.state_dict()

    async def unfinished(self, state: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the state after the last batch of `state`, with groups admitted since, and a checkpoint file of its unfinished samples, or
        b"". Deterministic runs return `state`: later groups must start together again."""
        if not self._config.deterministic:
            state = self._service.state_dict(state["batches"])
        found = self._service.unfinished(state)
        return state, await asyncio.to_thread(to_file, found, self._columns, stored_blocks)

    async def load_state_dict(self, state: dict[str, Any], unfinished: bytes = b"") -> list[str]:
        """Restore a state. `unfinished`: checkpoint file of its samples. Return console messages."""
        saved = from_file(unfinished, self._columns, ray.put) if unfinished else {}
        changed = self._service.load_state_dict(state, saved)
        continued = sum(map(len, saved.values())) - sum(len(saved[number]) for numbers in changed.values() for number in numbers)
        return [
            *([f"{continued} samples that were under way continue with their tokens"] if continued else []),
            *(
                f"domains.{name}.data.train: rows of {len(numbers)} prompts under way changed since the checkpoint; these start again"
                for name, numbers in changed.items()
                if numbers
            ),
        ]

    async def last_ledger(self) -> bytes:
        return ledger_text(self._service.last_ledger())

    async def shutdown(self) -> None:
        self._watching.cancel()
        self._engines.close(kill=False)
        self._service.close()
        for part in (*self._pools.values(), *self._environments.values(), *self._reward_models.values()):
            part.close()
        await self.wait_for_files()


def first_prompts(domain: Domain) -> list[Prompt]:
    last = len(domain.prompts) - 1
    return [domain.prompts[number] for number in sorted({0, last // 2, last})]


def _clock_offset() -> float:
    return time.time() - asyncio.get_running_loop().time()


def sampling_of(config: SamplingConfig, keep_mask: bool = False) -> Sampling:
    return Sampling(
        temperature=config.temperature,
        max_tokens=config.max_tokens,
        top_p=config.top_p,
        top_k=config.top_k,
        min_p=config.min_p,
        min_tokens=config.min_tokens,
        stop=tuple(config.stop),
        stop_token_ids=tuple(config.stop_token_ids),
        keep_mask=keep_mask and is_truncated(config),
    )
