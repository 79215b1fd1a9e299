from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from roll_lite.scheduler.engines import EngineClient

PREFIXES_REMEMBERED = 131_072


@dataclass(eq=False)
class EngineLoad:
    client: EngineClient
    tokens: float = 0.0
    """Tokens of the requests in flight: uncached prompt tokens plus expected response tokens."""
    done: float = 0.0
    """Part of `tokens` that is prefilled or generated already."""
    requests: int = 0
    generating: int = 0
    last_sign: float = 0.0
    dead: str | None = None
    serves: bool = True
    number: int = 0

    @property
    def left(self) -> float:
        return self.tokens - self.done


class EngineChoice:
    """Chooses the least loaded engine, unless another has the request's prefix cached. Limits are per engine; None: unlimited."""

    def __init__(self, engines: Iterable[EngineLoad], most_requests: int | None, most_tokens: int | None) -> None:
        self._most_requests = most_requests
        self._most_tokens = most_tokens
        self.on_room: Callable[[], None] = lambda: None
        """Called when a progress report frees room on a full engine."""
        # Lazy heap: an entry with an outdated load is dropped when it reaches the top. Progress reports change many loads at once, so they
        # are applied at the next choice.
        self._heap: list[tuple[float, int, EngineLoad]] = []
        self._reported: set[EngineLoad] = set()
        self._numbers = itertools.count()
        self.serving = 0
        self._tokens = 0.0
        self._prefixes: OrderedDict[str, dict[EngineLoad, None]] = OrderedDict()
        for engine in engines:
            self.add(engine)

    def add(self, engine: EngineLoad) -> None:
        self.serving += 1
        engine.number = next(self._numbers)
        self._offer(engine)

    def withdraw(self, engine: EngineLoad) -> EngineLoad:
        if engine.serves:
            self.serving -= 1
            self._tokens -= engine.tokens
        engine.serves = False
        return engine

    def takes(self, tokens: float) -> float:
        by_requests = inf if self._most_requests is None else self._most_requests * self.serving
        return by_requests if self._most_tokens is None else min(by_requests, self._most_tokens * self.serving / max(1.0, tokens))

    @property
    def free_tokens(self) -> float:
        return inf if self._most_tokens is None else max(0.0, self._most_tokens * self.serving - self._tokens)

    def _offer(self, engine: EngineLoad) -> None:
        heapq.heappush(self._heap, (engine.left, engine.number, engine))
        if len(self._heap) > 1024 + 16 * self.serving:  # most entries are outdated
            self._heap = [(engine.left, engine.number, engine) for engine in {engine for _, _, engine in self._heap}]
            heapq.heapify(self._heap)

    def choose(self, prefix: str, shared_tokens: int, own_tokens: float) -> tuple[EngineLoad, float] | None:
        """Return (engine, the request's load in tokens); None if all engines are full. `prefix`: key of the first `shared_tokens` prompt
        tokens. `own_tokens`: further prompt tokens plus expected response tokens."""
        best, cost = self._least(), shared_tokens + own_tokens
        for holder in self._prefixes.get(prefix, ()):
            # An engine that has the prefix cached wins, unless its extra load exceeds the cost of a prefill elsewhere.
            if self._has_room(holder) and (best is None or holder.left + own_tokens <= best.left + cost):
                best, cost = holder, own_tokens
        return None if best is None else (best, cost)

    def give(self, engine: EngineLoad, prefix: str, cost: float) -> None:
        engine.requests += 1
        self._set_tokens(engine, engine.tokens + cost)
        self._offer(engine)
        self.remember(prefix, engine)

    def remember(self, prefix: str, engine: EngineLoad) -> None:
        self._prefixes.setdefault(prefix, {})[engine] = None
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES_REMEMBERED:
            self._prefixes.popitem(last=False)

    def forget(self) -> None:
        self._prefixes.clear()

    def take_back(self, engine: EngineLoad, cost: float) -> None:
        engine.requests -= 1
        self._set_tokens(engine, engine.tokens - cost if engine.requests else 0.0)
        engine.done = engine.done if engine.requests else 0.0
        self._offer(engine)

    def _set_tokens(self, engine: EngineLoad, tokens: float) -> None:
        self._tokens += (tokens - engine.tokens) * engine.serves
        engine.tokens = tokens

    def report(self, engine: EngineLoad, done: float, grown: float) -> None:
        """Record progress since the request's last report. `done`: tokens finished. `grown`: change of expected length."""
        was_full = not self._has_room(engine)
        engine.done += done
        self._set_tokens(engine, engine.tokens + grown)
        self._reported.add(engine)
        if was_full and self._has_room(engine):
            self.on_room()

    def _least(self) -> EngineLoad | None:
        while self._reported:
            self._offer(self._reported.pop())
        while self._heap:
            left, _, engine = self._heap[0]
            if left == engine.left and self._has_room(engine):
                return engine
            heapq.heappop(self._heap)  # pushed again when its load changes
        return None

    def _has_room(self, engine: EngineLoad) -> bool:
        return (
            engine.serves
            and (self._most_requests is None or engine.requests < self._most_requests)
            and (self._most_tokens is None or not engine.requests or engine.tokens < self._most_tokens)
        )
