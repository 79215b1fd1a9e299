"""Engine with scripted lengths, delays and failures, for scheduler tests and benches. Tokens mean nothing, log-probs are a constant."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roll_lite.config.schema.models import ModelConfig, VllmStrategyConfig
from roll_lite.data.samples import Completion, FinishReason, GenerationRequest, VersionSpan, since_token
from roll_lite.data.stable_hash import stable_hash
from roll_lite.distributed.strategy.base import EngineHealth, EngineSpec, InferenceStrategy, PauseMode, Report, RequestProgress
from roll_lite.distributed.strategy.inference.life import EngineEvent, EngineLife, EngineMemory, EngineState
from roll_lite.distributed.strategy.inference.requests import InFlight, ProgressReports
from roll_lite.distributed.weight_sync.plan import ExportedTensor, Membership, Route, tensors_of
from roll_lite.distributed.weight_sync.update import WeightUpdate, check_tensors
from roll_lite.workers.infer import InferWorker

LOG_PROB = -1.0


@dataclass(frozen=True)
class Response:
    """Answer to one request."""

    tokens: int
    seconds_per_token: float = 0.0
    delay_s: float = 0.0
    text: str | None = None
    error: str | None = None
    """Failure at the end."""
    fatal: bool = False
    """The engine dies with this request."""


Script = Callable[[GenerationRequest], Response]


def equal_responses(response_tokens: int = 8, seconds_per_token: float = 0.0, failure_rate: float = 0.0) -> Script:
    """Equal responses, with failures drawn by a hash of the request's id, so that another attempt may succeed."""

    def script(request: GenerationRequest) -> Response:
        failed = stable_hash("failure", request.request_id) % 1_000_000 < failure_rate * 1_000_000
        return Response(response_tokens, seconds_per_token, error="scripted failure" if failed else None)

    return script


@dataclass
class _Running:
    """Request in progress. `elapsed` counts while `since` is not set."""

    request: GenerationRequest
    response: Response
    answer: asyncio.Future[Completion]
    elapsed: float = 0.0
    since: float | None = None
    timer: asyncio.TimerHandle | None = None
    versions: list[VersionSpan] = field(default_factory=list)

    @property
    def length(self) -> int:
        return min(max(0, self.response.tokens - self.request.resumed_tokens), self.request.sampling.max_tokens)

    @property
    def duration(self) -> float:
        return self.response.delay_s + self.length * self.response.seconds_per_token

    def elapsed_at(self, now: float) -> float:
        return self.elapsed + (now - self.since if self.since is not None else 0.0)

    def produced(self, now: float) -> int:
        elapsed = self.elapsed_at(now)
        if elapsed >= self.duration:
            return self.length
        # A hair more, so that a token whose time is up to rounding is counted.
        generating = max(0.0, elapsed - self.response.delay_s) * (1 + 1e-9)
        return int(generating / self.response.seconds_per_token) if self.response.seconds_per_token else 0


class ScriptedEngine(InferenceStrategy):
    """Runs up to `slots` requests at a time, in order of arrival."""

    def __init__(
        self, script: Script | None = None, slots: int | None = None, weights: Mapping[str, tuple[int, ...]] | None = None
    ) -> None:
        """`weights`: names and shapes of the pretended model; None: any update fits."""
        self._script = script or equal_responses()
        self._slots = slots
        self._weights = weights
        self._running: dict[str, _Running] = {}
        self._waiting: deque[_Running] = deque()
        self.life = EngineLife("scripted")
        self.life.start()
        self._reports = ProgressReports(self._progress)

    async def initialize(self) -> None:
        """Do nothing: there is nothing to load."""

    def generate(self, request: GenerationRequest, report: Report = lambda progress: None) -> asyncio.Future[Completion]:
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        if self.life.failure is not None:
            answer.set_result(Completion(request.request_id, error=self.life.failure))
        else:
            self._waiting.append(_Running(request, self._script(request), answer))
            self._reports.add(InFlight(request, report, entered=True), answer)
            self._admit()
        return answer

    # ------------------------------------------------------------ time

    def _admit(self) -> None:
        while self.life.state is EngineState.SERVING and self._waiting and (self._slots is None or len(self._running) < self._slots):
            run = self._waiting.popleft()
            self._running[run.request.request_id] = run
            run.versions.append(VersionSpan(0, self.life.version))
            self._continue(run)

    def _continue(self, run: _Running) -> None:
        loop = asyncio.get_running_loop()
        run.since = loop.time()
        run.timer = loop.call_later(max(0.0, run.duration - run.elapsed), self._finish, run)

    def _freeze(self, run: _Running) -> None:
        if run.timer is not None and run.since is not None:
            run.timer.cancel()
            run.elapsed += asyncio.get_running_loop().time() - run.since
            run.timer = run.since = None

    def _finish(self, run: _Running) -> None:
        if run.response.fatal:
            self.kill(run.response.error or "scripted death")
            return
        hit_limit = run.response.tokens - run.request.resumed_tokens >= run.request.sampling.max_tokens
        self._end(run, run.length, FinishReason.LENGTH if hit_limit else FinishReason.STOP, run.response.error)
        self._admit()

    def _end(self, run: _Running, tokens: int, reason: FinishReason, error: str | None = None) -> None:
        self._running.pop(run.request.request_id, None)
        if run.answer.done():  # cancelled
            return
        if error is not None:
            run.answer.set_result(Completion(run.request.request_id, error=error))
            return
        run.answer.set_result(
            Completion(
                request_id=run.request.request_id,
                token_ids=_token_ids(run.request, tokens),
                log_probs=(LOG_PROB,) * tokens,
                text=run.response.text if run.response.text is not None else f"{run.request.resumed_tokens + tokens} tokens",
                finish_reason=reason,
                versions=tuple(span for span in run.versions if span.start < max(1, tokens)),
            )
        )

    def kill(self, cause: str) -> None:
        self.life.die(cause)
        for run in [*self._running.values(), *self._waiting]:
            self._freeze(run)
            self._end(run, 0, FinishReason.ABORT, error=cause)
        self._waiting.clear()

    # ------------------------------------------------------------ control

    async def _progress(self, flights: Sequence[InFlight], parts: bool) -> list[RequestProgress | None]:
        return [self._progress_of(flight, parts, asyncio.get_running_loop().time()) for flight in flights]

    def _progress_of(self, flight: InFlight, parts: bool, now: float) -> RequestProgress | None:
        run = self._running.get(flight.request.request_id)
        if run is None or run.elapsed_at(now) < run.response.delay_s:
            return None
        produced, before = run.produced(now), flight.reported
        if not parts or produced - 1 <= before:
            return RequestProgress(produced)
        ids = _token_ids(run.request, produced - 1)[before:]
        versions = since_token(run.versions, before, produced - 1)
        return RequestProgress(produced, Completion(run.request.request_id, ids, (LOG_PROB,) * len(ids), versions=versions))

    async def abort(self, request_ids: Sequence[str] | None = None) -> None:
        wanted = None if request_ids is None else set(request_ids)
        for run in [*self._running.values(), *self._waiting]:
            if wanted is None or run.request.request_id in wanted:
                self._freeze(run)
                self._end(run, run.produced(asyncio.get_running_loop().time()), FinishReason.ABORT)
        self._waiting = deque(run for run in self._waiting if wanted is not None and run.request.request_id not in wanted)
        self._admit()

    async def pause(self, mode: PauseMode) -> None:
        self.life.pause()
        if mode is PauseMode.ABORT:
            await self.abort()
        else:
            self._freeze_all()

    async def resume(self) -> None:
        self.life.resume()
        self._go_on()

    def _freeze_all(self) -> None:
        for run in self._running.values():
            self._freeze(run)

    def _go_on(self) -> None:
        """Continue frozen and waiting requests, unless something holds them up."""
        if self.life.state is EngineState.SERVING:
            for run in self._running.values():
                if run.timer is None:
                    self._continue(run)
        self._admit()

    # ------------------------------------------------------------ weights, memory

    async def connect_weights(self, first_member: int, membership: Membership) -> None:
        self.life.require(EngineEvent.CONNECT)

    async def begin_weight_update(self, tensors: Sequence[ExportedTensor]) -> None:
        self.life.require(EngineEvent.BEGIN_UPDATE)
        if self._weights is not None:
            check_tensors(tensors, self._weights)
        self.life.begin_update(WeightUpdate(tensors))

    async def receive_bucket(self, routes: Sequence[Route], following: Sequence[Route] = ()) -> None:
        tensors = tensors_of(routes)
        self.life.require_update().check(tensors)
        self.life.receive().arrived.update(tensor.name for tensor in tensors)
        self._freeze_all()

    async def finish_weight_update(self, version: int) -> dict[str, float]:
        self.life.require_update().require_complete()
        self.life.finish_update(version)
        now = asyncio.get_running_loop().time()
        for run in self._running.values():
            run.versions = [span for span in run.versions if span.start < run.produced(now)] + [VersionSpan(run.produced(now), version)]
        self._go_on()
        return {}

    async def weight_checksums(self, names: Collection[str] | None = None) -> dict[str, str]:
        self.life.require(EngineEvent.READ_WEIGHTS)
        return {}

    async def load(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        self.life.load(parts)
        self._go_on()

    async def offload(self, parts: Iterable[EngineMemory] = tuple(EngineMemory)) -> None:
        """End and hold requests as a real engine would; there is nothing to free."""
        self.life.require(EngineEvent.OFFLOAD)
        leaving = set(parts)
        if leaving:
            self.life.offload(leaving)
            await self.abort(list(self._running))

    async def health(self) -> EngineHealth:
        return EngineHealth(self.life.failure is None, len(self._running), len(self._waiting))

    async def shutdown(self) -> None:
        self.kill("shut down")


def scripted_spec(model: ModelConfig, max_model_len: int, sharers: int = 1, **script: Any) -> EngineSpec:
    """Settings of a ScriptedWorker; the arguments of `equal_responses` travel as arguments of an engine."""
    return EngineSpec(model, VllmStrategyConfig(engine_args=script), max_model_len, sharers=sharers)


class ScriptedWorker(InferWorker):
    """Worker of a scripted engine."""

    @staticmethod
    def build(spec: EngineSpec) -> InferenceStrategy:
        return ScriptedEngine(equal_responses(**spec.strategy.engine_args))


def _token_ids(request: GenerationRequest, tokens: int) -> tuple[int, ...]:
    first = stable_hash(request.prompt_ids, request.sampling.seed, None if request.sampling.seed is not None else request.request_id)
    return tuple((first + place) % 97 + 3 for place in range(tokens))
