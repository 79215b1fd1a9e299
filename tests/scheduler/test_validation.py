"""Held-out prompts beside everything else: how many are under way, what training loses to them, which weights answer them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import pytest
from scheduler_support import Prompts, TimedReward, by_tokens, make_domain, make_service
from support_scripted import Response, Script, ScriptedEngine

from roll_lite.config.loading import load_config
from roll_lite.data.samples import EpisodeRecord, FinishReason, GenerationRequest, Prompt, RewardInput, SampleGroup, Sampling, Score
from roll_lite.files import CONFIGS
from roll_lite.pipeline.journal import Journal, held_out_metrics
from roll_lite.rewards.environment import EnvironmentReward
from roll_lite.scheduler.router import NoEngineLeft, Router
from roll_lite.scheduler.runner import Conversation
from roll_lite.scheduler.service import RolloutResult, RolloutService, accepted
from roll_lite.scheduler.supply import Asynchronous, OneStepOff, OnSync
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.rollout_output import held_out_rows

TEN_SECONDS = by_tokens(10, 1.0)


def uneven(request: GenerationRequest) -> Response:
    """Held-out responses do not end with the others."""
    return Response(13 if "/-1/" in request.request_id else 10, 1.0)


SLOTS = 4
"""One more request than those is sent to an engine, so that the next one is there: five."""


@dataclass
class Seen:
    held_out: list[tuple[float, int]] = field(default_factory=list)
    """When, and how many requests of held-out prompts were with the engine or waited for it."""
    ended_at: float = 0.0
    batches: list[float] = field(default_factory=list)
    """When each was complete."""
    result: RolloutResult | None = None

    def most(self, after: float = 0.0) -> int:
        return max((count for at, count in self.held_out if at >= after), default=0)

    @property
    def versions(self) -> list[list[int]]:
        assert self.result is not None
        return [[span.version for span in sample.transcript.versions] for group in self.result.groups for sample in group.samples]


async def watch(router: Router, seen: Seen) -> None:
    for _ in range(10_000):
        seen.held_out.append((asyncio.get_running_loop().time(), router.under_way("a/-1")))
        await asyncio.sleep(0.5)


async def evaluate(service: RolloutService, seen: Seen, samples: int = 1) -> None:
    seen.result = await service.evaluate(samples, {"a": Sampling(1.0, 64)})
    seen.ended_at = asyncio.get_running_loop().time()


async def train(
    service: RolloutService, engine: ScriptedEngine, seen: Seen, seconds: float, steps: int, begin: Coroutine[Any, Any, None]
) -> None:
    """Steps as the pipeline makes them; the validation begins with the second one's weights."""
    validating = None
    for step in range(steps):
        await service.hold()
        await engine.begin_weight_update([])
        await engine.receive_bucket([])
        await engine.finish_weight_update(step)
        service.set_version(step)
        if step == 1:
            validating = asyncio.create_task(begin)
        await service.next_batch(2)
        seen.batches.append(asyncio.get_running_loop().time())
        await asyncio.sleep(seconds)
    assert validating is not None
    await validating


def beside(prompts: int, seconds: float, steps: int = 8, script: Script = TEN_SECONDS, **how: Any) -> Seen:
    """One domain, two groups of four in a batch: two waves of 10 s in the engine's slots. `prompts`: held-out ones."""

    async def main() -> Seen:
        seen = Seen()
        domain = make_domain("a", samples=4, validation=Prompts("a", 0, prompts))
        service, router, (engine,) = make_service([domain], [script], slots=SLOTS, engine_slots=SLOTS, **how)
        watching = asyncio.create_task(watch(router, seen))
        await train(service, engine, seen, seconds, steps, evaluate(service, seen))
        watching.cancel()
        service.close()
        return seen

    return run_virtual(main())


@pytest.mark.parametrize(("samples", "most"), [(1, 5), (2, 4), (4, 4), (7, 7)])
def test_no_more_is_asked_for_than_engines_take_and_they_have_enough_to_do(samples: int, most: int) -> None:
    """40 samples or so of 10 s in four slots. A group that is larger than what engines take is alone."""

    async def main() -> Seen:
        seen = Seen()
        domain = make_domain("a", validation=Prompts("a", 0, 40 // samples))
        service, router, _ = make_service([domain], [TEN_SECONDS], slots=SLOTS, engine_slots=SLOTS)
        watching = asyncio.create_task(watch(router, seen))
        await evaluate(service, seen, samples)
        watching.cancel()
        return seen

    seen = run_virtual(main())
    assert seen.most() == most
    expected = {1: 100, 2: 100, 4: 100, 7: 5 * 20}[samples]
    assert seen.ended_at == pytest.approx(expected)


def test_steps_go_on_beside_a_validation_that_gets_what_one_more_domain_would() -> None:
    """Half of the five places: two at a time of the held-out ones, in four slots that are always in use."""
    alone = beside(1, 1.0, supply=Asynchronous(2))
    seen = beside(12, 1.0, supply=Asynchronous(2))
    assert seen.most() == 2
    assert sum(at < seen.ended_at for at in seen.batches) >= 4
    assert seen.batches[-1] - alone.batches[-1] <= 11 * 10 / SLOTS + 10, "the work of eleven samples, and the end of one"


def test_what_training_leaves_free_is_the_validations() -> None:
    """Training of 100 s: batches are there long before they are asked for."""
    alone = beside(1, 100.0, supply=Asynchronous(1))
    seen = beside(20, 100.0, supply=Asynchronous(1))
    assert seen.most() == 5
    assert seen.batches == pytest.approx(alone.batches), "nothing waits for it"
    assert seen.ended_at < seen.batches[2]


def test_one_step_off_starts_it_beside_a_batch_that_is_under_way() -> None:
    """All of a batch's prompts are with the router at once. It does not wait behind them."""
    seen = beside(4, 1.0, supply=OneStepOff(), on_sync=OnSync.DRAIN)
    assert seen.ended_at <= seen.batches[3]


def test_what_drains_for_new_weights_is_not_filled_up_again() -> None:
    """A step of 20 s takes 40 with what a validation gets, and never the time of held-out prompts that came while it drained."""
    seen = beside(40, 1.0, steps=10, supply=OneStepOff(), on_sync=OnSync.DRAIN)
    assert max(later - at for at, later in pairwise(seen.batches)) == pytest.approx(40)


@pytest.mark.parametrize(
    ("how", "single"),
    [
        ({"supply": OneStepOff(), "on_sync": OnSync.DRAIN}, True),
        ({"supply": Asynchronous(2), "on_sync": OnSync.DRAIN}, True),
        ({"supply": Asynchronous(2), "on_sync": OnSync.PAUSE}, False),
        ({"supply": Asynchronous(2), "on_sync": OnSync.ABORT}, False),
    ],
)
def test_weights_that_come_meanwhile_are_told_and_drain_keeps_responses_whole(how: dict[str, Any], single: bool) -> None:
    seen = beside(20, 1.0, script=uneven, **how)
    versions = seen.versions
    assert len(versions) == 20
    assert min(map(min, versions)) == 1, "the weights that it was begun with"
    assert max(map(max, versions)) > 1
    assert all(len(of_sample) == 1 for of_sample in versions) is single


class Pool(TimedReward):
    """One at a time."""

    def __init__(self, seconds: float, capacity: float) -> None:
        super().__init__(seconds)
        self.capacity = capacity
        self.most = self.now = 0

    async def score(self, item: RewardInput) -> Score:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await super().score(item)
        finally:
            self.now -= 1


@pytest.mark.parametrize(("capacity", "most"), [(inf, 20), (8, 10)])
def test_rewards_hold_it_back_only_where_they_cannot_take_more(capacity: float, most: int) -> None:
    """Five samples of a prompt, which take 20 s in four slots."""

    async def main() -> tuple[int, float]:
        rewards = Pool(1000.0, capacity)
        domain = make_domain("a", validation=Prompts("a", 0, 4), rewards=rewards)
        service, _, _ = make_service([domain], [TEN_SECONDS], slots=SLOTS, engine_slots=SLOTS)
        seen = Seen()
        await evaluate(service, seen, samples=5)
        return rewards.most, seen.ended_at

    found, ended_at = run_virtual(main())
    assert found == most
    assert (ended_at == 4 * 20 + 1000) is (capacity == inf)


def test_an_end_of_all_is_heard_of() -> None:
    async def main(end: Any) -> None:
        domain = make_domain("a", validation=Prompts("a", 0, 20))
        service, router, (engine,) = make_service([domain], [TEN_SECONDS], slots=SLOTS, engine_slots=SLOTS)
        asyncio.get_running_loop().call_later(15, end, service, engine)
        try:
            await evaluate(service, Seen())
        finally:
            await asyncio.sleep(1)
            assert router.under_way("a/-1") == 0, "nothing goes on"

    with pytest.raises(RuntimeError, match="closed"):
        run_virtual(main(lambda service, engine: service.close()))
    with pytest.raises(NoEngineLeft):
        run_virtual(main(lambda service, engine: engine.kill("gone")))


def test_progress_of_either_is_told_beside_the_other() -> None:
    async def main() -> None:
        domain = make_domain("a", samples=4, validation=Prompts("a", 0, 6))
        service, _, _ = make_service([domain], [TEN_SECONDS], slots=SLOTS, engine_slots=SLOTS, supply=Asynchronous(1), batches=1)
        seen = Seen()
        batch = asyncio.create_task(service.next_batch(2))
        await asyncio.sleep(0)
        validating = asyncio.create_task(evaluate(service, seen))
        await asyncio.sleep(0)
        assert service.progress(held_out=True) == {"a": (0, 0, 6)} and service.progress() == {"a": (0, 0, 8)}
        await asyncio.gather(batch, validating)
        assert service.progress(held_out=True) == {} and service.progress() == {"a": (8, 8, 8)}
        service.close()

    run_virtual(main())


def test_another_validation_asks_by_other_names_for_the_same_responses() -> None:
    """An engine that hung answers late, with what it was asked before."""
    asked: list[GenerationRequest] = []

    def script(request: GenerationRequest) -> Response:
        asked.append(request)
        return Response(2, 1.0)

    async def main() -> list[RolloutResult]:
        service, _, _ = make_service([make_domain("a", validation=Prompts("a", 0, 3))], [script], seed=5)
        return [await service.evaluate(2, {"a": Sampling(1.0, 64)}) for _ in range(2)]

    first, second = ([group.samples for group in result.groups] for result in run_virtual(main()))
    assert [[sample.prompt.uid for sample in samples] for samples in first] == [
        [sample.prompt.uid for sample in samples] for samples in second
    ]
    assert len({request.request_id for request in asked}) == len(asked) == 12
    assert [request.sampling.seed for request in asked[:6]] == [request.sampling.seed for request in asked[6:]]


SOLVED = (0, 2, 5)
"""Of six episodes of each prompt."""


async def two_turns(prompt: Prompt, conversation: Conversation) -> None:
    """Every third episode has a branch, which is a row of the same sample."""
    index = int(conversation.request_id.split("/")[4])
    await conversation.respond(prompt.token_ids, 0)
    await conversation.respond((1, 2, 3), 1, after=0)
    if index % 3 == 0:
        await conversation.respond((1, 2), 2, after=0)
    is_solved = index < SOLVED[prompt.uid]
    conversation.end(EpisodeRecord((), (-0.25, 1.5 * is_solved), -0.25 + 1.5 * is_solved, is_solved))


class OfEpisode(TimedReward):
    async def score(self, item: RewardInput) -> Score:
        return EnvironmentReward()(item)


def test_pass_at_k_of_episodes_is_that_worked_out_by_hand() -> None:
    """1 - C(6 - c, k) / C(6, k) for c of 6 right; the best of k has the reward of a right one if there is one."""

    async def main() -> list[SampleGroup]:
        domain = make_domain("a", validation=Prompts("a", 0, 3), rewards=OfEpisode(), episode=two_turns)
        service, *_ = make_service([domain], [by_tokens(5)])
        result = await service.evaluate(6, {"a": Sampling(1.0, 64)})
        service.close()
        return result.groups

    groups = run_virtual(main())
    assert [sum(len(sample.transcript.rows) for sample in group.samples) for group in groups] == [8, 8, 8]
    got = held_out_metrics(held_out_rows(accepted(groups), {"a": 1.0}, {"a": []}), 6).values()
    chances = {2: (0, 9 / 15, 1), 4: (0, 14 / 15, 1), 6: (0, 1, 1)}
    expected = {"samples": 18, "prompts": 3, "accuracy": 7 / 18, "reward": (7 * 1.25 - 11 * 0.25) / 18}
    for k, of_prompts in chances.items():
        expected[f"pass@{k}"] = sum(of_prompts) / 3
        expected[f"best@{k}"] = sum(1.25 * chance - 0.25 * (1 - chance) for chance in of_prompts) / 3
    assert {name: got[f"domain/a/validation/{name}"] for name in expected} == pytest.approx(expected)
    assert not any("maj@" in name for name in got), "an environment reads no answers to vote on"


async def tool_game(prompt: Prompt, conversation: Conversation) -> None:
    """Prompt n takes n + 1 turns and as many calls, of which prompt 2's all fail; it ends at the limit of turns."""
    for turn in range(1 + prompt.uid):
        await conversation.respond((1, 2, 3), turn, after=turn - 1 if turn else None)
    turns, fails = 1.0 + prompt.uid, prompt.uid == 2
    facts = {"turns": turns, "tool_calls": turns, "tool_errors": fails * turns, "policy_tokens": 5 * turns, "accuracy": 0.5}
    reward = 1.0 - fails
    conversation.end(EpisodeRecord((), (reward,), reward, not fails, facts), FinishReason.MAX_TURNS if fails else None)


def test_an_evaluation_tells_the_turns_and_tool_errors_of_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a domain without an environment. The environment counts a metric under the name of another one."""

    async def main() -> RolloutResult:
        game = make_domain("add", validation=Prompts("add", 0, 3), rewards=OfEpisode(), episode=tool_game)
        service, *_ = make_service([game, make_domain("make", validation=Prompts("make", 0, 1))], [by_tokens(5)])
        result = await service.evaluate(2, dict.fromkeys(("add", "make"), Sampling(1.0, 64)))
        service.close()
        return result

    result = run_virtual(main())
    rows = held_out_rows(accepted(result.groups), {"add": 1.0, "make": 1.0}, {"add": [], "make": []})
    monkeypatch.chdir(CONFIGS.parents[1])
    (tmp_path / "config.yaml").touch()
    journal = Journal(load_config("tiny_grpo", CONFIGS, ["mode=evaluate", "trackers=[{name: jsonl}]", "domains.repeat=null"]), tmp_path)
    journal.connect()
    journal.validation(0, rows, result.stats)
    journal.close("completed")
    found = json.loads((tmp_path / "evaluation.json").read_text())["results"]
    told = {"turns": 2, "tool_calls": 2, "tool_errors": 1, "policy_tokens": 10, "max_turns": 1 / 3, "accuracy": 2 / 3, "samples": 6}
    assert {name: found["add"][name] for name in told} == pytest.approx(told)
    assert found["add/accuracy"] == {"metric": 0.5}, "the environment's own"
    assert "turns" not in found["make"] and found["make"]["max_turns"] == 0
    assert (found["overall"]["turns"], found["overall"]["max_turns"]) == (2, 0.25), "means over episodes, and over samples"
    header, _, *table = (line.split() for line in capsys.readouterr().out.splitlines() if line)
    assert header[-9:] == ["turns", "tool", "errors", "truncated", "max", "turns", "tokens", "prompts", "samples"]
    lines = {line[0]: line[-7:] for line in table[:3]}
    assert lines["add"][:4] == ["2.00", "1.00", "0.0%", "33.3%"] and lines["make"][:4] == ["-", "-", "0.0%", "0.0%"]
    assert lines["overall"][:4] == ["2.00", "1.00", "0.0%", "25.0%"] and len(lines) == 3
