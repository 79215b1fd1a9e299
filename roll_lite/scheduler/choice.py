"""Which engine takes a request: the one that has least to do afterwards, what it holds of the prompt already taken into account."""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from roll_lite.scheduler.engines import EngineClient

PREFIXES_REMEMBERED = 131_072


@dataclass(eq=False)
class EngineLoad:
    client: EngineClient
    tokens: float = 0.0
    """Of the requests in flight: tokens of the responses, as expected by now, and those of the prompts that it does not share among
    them."""
    done: float = 0.0
    """Of those, what it need not do any more by its own reports; less than nothing where responses turn out longer than expected."""
    requests: int = 0
    """Number of requests in flight, or given to it and about to be."""
    generating: int = 0
    """Requests that it is known to have begun and not to have ended."""
    last_sign: float = 0.0
    """When it was last heard to have begun or ended one."""
    served: int = 0
    dead: str | None = None
    """Why it cannot serve any more."""
    serves: bool = True
    """It gets requests."""
    number: int = 0
    """Among all that there ever were."""

    @property
    def left(self) -> float:
        """Its load: tokens to be prefilled, and tokens that its responses are expected to grow by. See Asked.left."""
        return self.tokens - self.done


class EngineChoice:
    """`most_requests` and `most_tokens`: of what is in flight to one engine; None: without limit.

    The least loaded engine lies on top of a heap. An entry whose engine's load has changed since is dropped when it comes to the top; what
    engines report changes many at a time, and is looked at with the next choice.
    """

    def __init__(self, engines: Iterable[EngineLoad], most_requests: int | None, most_tokens: int | None) -> None:
        self._most_requests = most_requests
        self._most_tokens = most_tokens
        self._heap: list[tuple[float, int, EngineLoad]] = []
        self._reported: set[EngineLoad] = set()
        """Engines whose entries are out of date."""
        self._numbers = itertools.count()
        self.serving = 0
        """Engines."""
        self._tokens = 0.0
        """In flight to them."""
        self._prefixes: OrderedDict[str, dict[EngineLoad, None]] = OrderedDict()
        for engine in engines:
            self.add(engine)

    def add(self, engine: EngineLoad) -> None:
        self.serving += 1
        engine.number = next(self._numbers)
        self._offer(engine)

    def withdraw(self, engine: EngineLoad) -> EngineLoad:
        """It gets nothing new."""
        if engine.serves:
            self.serving -= 1
            self._tokens -= engine.tokens
        engine.serves = False
        return engine

    def takes(self, tokens: float) -> float:
        """Requests of so many tokens that all engines together take."""
        by_requests = inf if self._most_requests is None else self._most_requests * self.serving
        return by_requests if self._most_tokens is None else min(by_requests, self._most_tokens * self.serving / max(1.0, tokens))

    @property
    def free_tokens(self) -> float:
        """For what is to come."""
        return inf if self._most_tokens is None else max(0.0, self._most_tokens * self.serving - self._tokens)

    def _offer(self, engine: EngineLoad) -> None:
        """It may be chosen, with the load that it has now."""
        heapq.heappush(self._heap, (engine.left, engine.number, engine))
        if len(self._heap) > 1024 + 16 * self.serving:  # most of it is out of date
            self._heap = [(engine.left, engine.number, engine) for engine in {engine for _, _, engine in self._heap}]
            heapq.heapify(self._heap)

    def choose(self, prefix: str, shared_tokens: int, own_tokens: float) -> tuple[EngineLoad, float] | None:
        """The engine, and what the request adds to its load. `prefix`: what requests have in common whose prompts begin alike, with so many
        shared tokens. None: all of them have enough to do."""
        best, cost = self._least(), shared_tokens + own_tokens
        for holder in self._prefixes.get(prefix, ()):
            # Also where another has less to do, as long as computing the prompt once more there would take longer than that.
            if self._has_room(holder) and (best is None or holder.left + own_tokens <= best.left + cost):
                best, cost = holder, own_tokens
        return None if best is None else (best, cost)

    def give(self, engine: EngineLoad, prefix: str, cost: float) -> None:
        engine.requests += 1
        self._set_tokens(engine, engine.tokens + cost)
        self._offer(engine)
        self.remember(prefix, engine)

    def remember(self, prefix: str, engine: EngineLoad) -> None:
        """It holds what begins so."""
        self._prefixes.setdefault(prefix, {})[engine] = None
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES_REMEMBERED:
            self._prefixes.popitem(last=False)

    def forget(self) -> None:
        """Nobody holds anything."""
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
        """So much more of what is in flight to it is done, and so much longer than expected it will become."""
        engine.done += done
        self._set_tokens(engine, engine.tokens + grown)
        self._reported.add(engine)

    def _least(self) -> EngineLoad | None:
        while self._reported:
            self._offer(self._reported.pop())
        while self._heap:
            left, _, engine = self._heap[0]
            if left == engine.left and self._has_room(engine):
                return engine
            heapq.heappop(self._heap)  # it comes back with its next change
        return None

    def _has_room(self, engine: EngineLoad) -> bool:
        return (
            engine.serves
            and (self._most_requests is None or engine.requests < self._most_requests)
            and (self._most_tokens is None or not engine.requests or engine.tokens < self._most_tokens)
        )
