from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from support_local_engine import ask

from roll_lite.data.samples import GenerationRequest, Sampling, TokenRow, Turn
from roll_lite.scheduler.engines import BatchedEngine, Collected, EngineLost, leaving


def request(name: str) -> GenerationRequest:
    return GenerationRequest(name, (1, 2), Sampling(temperature=1.0, max_tokens=100))


class Watched(BatchedEngine):
    """Answers each submission with one batch of turns."""

    def __init__(self) -> None:
        super().__init__("watched")
        self.submitted: list[list[str]] = []
        self.collected = 0
        self._ready: asyncio.Queue[Collected] = asyncio.Queue()

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        self.submitted.append([request.request_id for request in requests])
        self._ready.put_nowait(Collected([Turn(request.request_id, 1) for request in requests]))

    async def _collect(self) -> Collected:
        self.collected += 1
        return await self._ready.get()

    async def _joined(self, request: GenerationRequest, parts: Sequence[TokenRow]) -> TokenRow:
        raise AssertionError("no parts were handed out")

    async def _abort(self, request_ids: list[str]) -> None: ...


async def test_what_is_asked_in_one_turn_travels_in_one_call() -> None:
    engine = Watched()
    names = [f"r{i}" for i in range(256)]
    turns = await asyncio.gather(*(ask(engine, request(name)) for name in names))
    assert [turn.request_id for turn in turns] == names
    assert engine.submitted == [names]
    assert engine.collected == 1
    await asyncio.gather(*(ask(engine, request(name)) for name in names))
    assert len(engine.submitted) == 2


class Unreachable(Watched):
    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        raise ConnectionError("its process died")


async def test_a_call_that_fails_is_the_engines_death() -> None:
    engine = Unreachable()
    answers = await asyncio.gather(*(ask(engine, request(f"r{i}")) for i in range(3)), return_exceptions=True)
    assert all(isinstance(answer, EngineLost) and "its process died" in answer.cause for answer in answers)
    with pytest.raises(EngineLost):
        await ask(engine, request("later"))


class LosesParts(Watched):
    """Dies when it has handed out a part."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    async def _submit(self, requests: list[GenerationRequest], frozen: bool) -> None:
        parts = [Turn(request.request_id, 1, tokens=TokenRow("a reference", 0, 2)) for request in requests]
        self._ready.put_nowait(Collected([], parts=parts, dead="lightning"))

    async def _joined(self, request: GenerationRequest, parts: Sequence[TokenRow]) -> TokenRow:
        raise self._error


async def test_where_what_was_handed_out_is_gone_too_the_loss_says_so() -> None:
    with pytest.raises(EngineLost, match="lightning; the tokens handed out so far are lost too: struck twice") as lost:
        await ask(LosesParts(ConnectionError("struck twice")), request("r"))
    assert lost.value.partial is None


async def test_a_mistake_in_what_was_handed_out_is_not_taken_for_a_loss() -> None:
    with pytest.raises(ValueError, match="no such column"):
        await ask(LosesParts(ValueError("no such column")), request("r"))


@pytest.mark.parametrize(
    ("nodes", "draining", "leave"),
    [
        ({0: {"a"}, 1: {"b"}}, {"b"}, [1]),
        ({0: {"a"}, 1: {"b"}, 2: {"b"}}, {"b", "c"}, [1, 2]),
        ({0: {"a"}, 1: {"b", "c"}}, {"c"}, [1]),  # it spans nodes
        ({0: {"a"}, 1: {"a"}}, {"a"}, [1]),  # one stays until another serves
        ({1: {"a"}}, {"a"}, []),
        ({0: {"a"}}, set(), []),
    ],
)
def test_engines_leave_draining_nodes_unless_nobody_else_serves(nodes: dict[int, set[str]], draining: set[str], leave: list[int]) -> None:
    assert leaving(nodes, draining) == leave
