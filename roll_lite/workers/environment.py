"""Environment workers, which play episodes, and their pool in the rollout service."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import ray

from roll_lite.config.schema.domains import DomainConfig
from roll_lite.config.schema.environments import EndpointEnvironmentConfig
from roll_lite.data.samples import FinishReason, GenerationRequest, Prompt, Sampling, Turn
from roll_lite.data.stable_hash import stable_hash
from roll_lite.data.templates import load_tokenizer
from roll_lite.distributed.failures import FleetDown, MemberLost
from roll_lite.distributed.fleet import Fleet, Policy, SlowStart
from roll_lite.distributed.place import ActorMember, Place
from roll_lite.environments.build import note_on_tools, player_of, task_of
from roll_lite.environments.episode import STUCK_THREADS, Answer, Ask, Begin, Cancel, Ended, Event, Player
from roll_lite.observability.timers import POOL_WORK
from roll_lite.rewards.base import CANNED_RESPONSE
from roll_lite.scheduler.runner import Conversation, EpisodeFailed

POLL_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""Seconds beyond `turn_timeout_s` after which a worker reporting no timeout counts as lost. Closing an MCP server may take 6.5 s."""


class EnvironmentWorker:
    _player: Player

    def __init__(self, model: Path, domain: DomainConfig, name: str) -> None:
        self._model = model
        self._domain = domain
        self._name = name

    async def prepare(self) -> tuple[list[int], str | None]:
        """Import the environment and load the tokenizer. Return the token ids of CANNED_RESPONSE, and a note for the user."""
        tokenizer = load_tokenizer(self._model)
        host = ray.util.get_node_ip_address()
        path = f"domains.{self._name}"
        self._player = await asyncio.to_thread(player_of, self._domain, tokenizer, path, host)
        ids: list[int] = tokenizer.encode(CANNED_RESPONSE, add_special_tokens=False)
        is_agent = isinstance(self._domain.environment, EndpointEnvironmentConfig)
        return ids, note_on_tools(self._domain, tokenizer, path) if is_agent else self._player.note()

    async def tell(self, orders: list[Begin | Answer | Cancel]) -> None:
        self._player.tell(orders)

    async def events(self) -> tuple[list[Event], int]:
        """Return events since the last call, and the number of calls hanging in threads."""
        return await self._player.events(POLL_SECONDS), self._player.stuck

    async def place(self) -> Place:
        return Place.here()


class _Lost(NamedTuple):
    cause: str
    alone: bool
    """True if only this episode's environment was working in the lost process, and may have killed it."""


@dataclass(eq=False)
class _Running:
    events: asyncio.Queue[Event | _Lost | BaseException]
    since: float | None
    """Time at which the environment began to work; None while the policy responds."""
    asks: set[asyncio.Task[None]] = field(default_factory=set)

    def seconds(self, now: float) -> float:
        """Time for which the environment has been working; 0 while the policy responds, or if an event is not handled yet."""
        return 0.0 if self.since is None or not self.events.empty() else now - self.since


class PooledEnvironment(ActorMember):
    note: str | None = None
    canned_ids: Sequence[int] = ()

    def __init__(self, model: Path, domain: DomainConfig, name: str) -> None:
        super().__init__(f"environment {name}", EnvironmentWorker, model, domain, name)
        self.running: dict[int, _Running] = {}
        self._orders: list[Begin | Answer | Cancel] = []

    @property
    def is_busy(self) -> bool:
        return bool(self.running)

    async def start(self) -> None:
        self.canned_ids, self.note = await self.prepare()

    def tell(self, order: Begin | Answer | Cancel) -> None:
        """Queue an order. Orders of one event loop turn are sent in a single call."""
        if not self._orders:
            asyncio.get_running_loop().call_soon(self._send)
        self._orders.append(order)

    def _send(self) -> None:
        orders, self._orders = self._orders, []
        with suppress(Exception):  # a dead worker: `events` notices it
            self.actor.tell.remote(orders)


class EnvironmentPool:
    """Plays one domain's episodes, each in the worker with the fewest. Episodes of a lost worker start again."""

    def __init__(self, name: str, domain: DomainConfig, model: Path, limited: bool = True) -> None:
        """`limited`: at most `parallel` episodes per worker; not in deterministic runs, where all samples must wait before any request is
        sent."""
        assert domain.environment is not None
        self._domain = domain
        self._settings = domain.environment
        self._path = path = f"domains.{name}.environment"
        members = [PooledEnvironment(model, domain, name) for _ in range(self._settings.workers)]
        policy = Policy(self._settings.start_timeout_s, path=path)
        self._fleet = Fleet(f"{path}.workers", members, policy, self._serve, self._lost, self._down)
        self._numbers = itertools.count()
        self._places = asyncio.Semaphore(self._settings.workers * self._settings.parallel) if limited else nullcontext()

    async def start(self) -> None:
        try:
            await self._fleet.start()
        except SlowStart as slow:
            raise ValueError(str(slow)) from None

    def newly_replaced(self) -> list[str]:
        return self._fleet.newly_replaced()

    @property
    def note(self) -> str | None:
        return self._fleet.members[0].note

    def close(self) -> None:
        self._fleet.close()

    # ------------------------------------------------------------ episodes

    async def play(self, prompt: Prompt, conversation: Conversation) -> None:
        async with self._places:
            try:
                await self._fleet.in_service()
            except FleetDown as down:
                raise EpisodeFailed(str(down)) from down
            member = min(self._fleet.serving, key=lambda one: len(one.running))
            number = next(self._numbers)
            running = member.running[number] = _Running(asyncio.Queue(), asyncio.get_running_loop().time())
            seed = conversation.sampling.seed
            name = re.sub(r"/\d+(/\d+/\d+)$", r"\1", conversation.request_id)  # without the group: a resumed run numbers groups anew
            task = task_of(self._domain, prompt, stable_hash(name if seed is None else seed, "environment"))
            member.tell(Begin(number, task, conversation.sampling.max_tokens))
            try:
                await self._converse(member, number, running, conversation)
            finally:
                for ask in running.asks:
                    ask.cancel()
                if member.running.pop(number, None) is not None:
                    member.tell(Cancel(number))

    async def _converse(self, member: PooledEnvironment, number: int, running: _Running, conversation: Conversation) -> None:
        while True:
            event = await running.events.get()
            if running.since is not None:
                seconds = asyncio.get_running_loop().time() - running.since
                POOL_WORK.add(self._path, self._fleet.members.index(member), "play", seconds)
            if isinstance(event, BaseException):
                raise event
            if isinstance(event, Ask):
                running.since = None
                ask = asyncio.create_task(self._respond(member, running, conversation, event))
                running.asks.add(ask)
                ask.add_done_callback(partial(self._responded, running))
                continue
            member.running.pop(number, None)
            if isinstance(event, Ended):
                conversation.end(event.record, event.finish_reason)
                return
            raise EpisodeFailed(event.cause, not isinstance(event, _Lost) or event.alone)

    async def _respond(self, member: PooledEnvironment, running: _Running, conversation: Conversation, ask: Ask) -> None:
        ids = np.frombuffer(ask.ids, np.int32).tolist()
        turn = await conversation.respond(ids, ask.number, ask.after, ask.most, ask.stop)
        member.tell(Answer(ask.episode, ask.number, turn.ids, turn.finish_reason))

    def _responded(self, running: _Running, ask: asyncio.Task[None]) -> None:
        running.asks.discard(ask)
        if not running.asks:
            running.since = asyncio.get_running_loop().time()
        if not ask.cancelled() and (error := ask.exception()) is not None:
            running.events.put_nowait(error)

    async def problem(self, prompts: Sequence[Prompt]) -> str | None:
        """Play episodes with canned responses. Return an error if all fail; one failure may be a bad row."""
        causes = await asyncio.gather(*map(self._trial_failure, prompts))
        if not all(causes):
            return None
        return f"{self._path}: playing a first episode, with the response {CANNED_RESPONSE!r}, failed: {causes[0]}"

    async def _trial_failure(self, prompt: Prompt) -> str | None:

        async def ask(request: GenerationRequest, _: Turn | None) -> Turn:
            ids = self._fleet.members[0].canned_ids[: request.sampling.max_tokens]
            return Turn(request.request_id, len(ids), finish_reason=FinishReason.STOP, ids=np.array(ids, np.int32).tobytes())

        trial = Conversation(ask, "trial", Sampling(1.0, self._domain.sampling.max_tokens), wants_ids=True)
        try:
            await self.play(prompt, trial)
        except EpisodeFailed as failed:
            return failed.cause
        return None

    # ------------------------------------------------------------ workers

    async def _serve(self, member: PooledEnvironment) -> None:
        limit_s = self._settings.turn_timeout_s + GRACE_SECONDS
        clock = asyncio.get_running_loop().time
        while True:
            try:
                async with asyncio.timeout(limit_s + POLL_SECONDS):
                    events, stuck = await member.actor.events.remote()
            except TimeoutError:
                raise MemberLost(f"{member.name}: it did not answer within {limit_s + POLL_SECONDS:g} s") from None
            for event in events:
                if (running := member.running.get(event.episode)) is not None:
                    running.events.put_nowait(event)
            if any(running.seconds(clock()) > limit_s for running in member.running.values()):
                raise MemberLost(f"{member.name}: an episode did not end {GRACE_SECONDS:g} s after its time limit")
            if stuck >= STUCK_THREADS:
                raise MemberLost(f"{member.name}: {stuck} calls hang in it")

    def _lost(self, member: PooledEnvironment, cause: str) -> None:
        lost, member.running = member.running, {}
        computing = [running for running in lost.values() if running.since is not None and running.events.empty()]
        for running in lost.values():
            running.events.put_nowait(_Lost(cause, len(computing) == 1 and running is computing[0]))

    def _down(self, end: FleetDown) -> None:
        for member in self._fleet.members:
            self._lost(member, str(end))
