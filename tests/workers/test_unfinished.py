"""Samples under way at a checkpoint: a resumed run continues them with their tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from scheduler_support import Prompts, TimedReward, by_tokens, make_domain, make_service, tokens_of
from support_scripted import Response, ScriptedEngine

from roll_lite.data.proto import DataProto
from roll_lite.data.samples import (
    Author,
    Branch,
    EpisodeRecord,
    FinishReason,
    GenerationRequest,
    Prompt,
    SampleOutcome,
    Sampling,
    Score,
    Segment,
    TokenRow,
    Transcript,
    Turn,
    VersionSpan,
)
from roll_lite.scheduler.runner import Conversation, Episode
from roll_lite.scheduler.service import RolloutResult, RolloutService
from roll_lite.scheduler.supply import Asynchronous, OneStepOff, Supply, Synchronous
from roll_lite.scheduler.unfinished import SavedGroups, SavedSample, SavedTurn, Unfinished
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.rollout import RolloutWorker
from roll_lite.workers.token_blocks import KEPT_IDS, TokenRecord, token_block
from roll_lite.workers.unfinished import from_file, to_file

PROMPT, SHORT, LONG = 4, 5, 60
FIRST_BATCH_S = 40
ASYNCHRONOUS = Asynchronous(1)
Resumed = tuple[RolloutResult, list[GenerationRequest], int]


def script(request: GenerationRequest) -> Response:
    """One second per token; the first sample of a group is short, the other long, those of the first batch less so."""
    group, index = request.request_id.split("/")[3:5]
    return Response(SHORT if index == "0" else FIRST_BATCH_S if group in "01" else LONG, 1.0)


def make(
    reward_s: float = 0.0, supply: Supply = ASYNCHRONOUS, script: Callable[[GenerationRequest], Response] = script, **how: Any
) -> tuple[RolloutService, ScriptedEngine, TimedReward]:
    rewards = TimedReward(reward_s)
    service, _, engines = make_service([make_domain("a", samples=2, rewards=rewards)], [script], supply=supply, batches=9, **how)
    return service, engines[0], rewards


def fetch(blocks: Sequence[Any]) -> list[DataProto | None]:
    return list(blocks)


def read(content: bytes, columns: Sequence[str] = ()) -> SavedGroups:
    return from_file(content, columns, lambda block: block) if content else {}


def saved_by(service: RolloutService, state: dict[str, Any]) -> SavedGroups:
    return read(to_file(service.unfinished(state), (), fetch))


def state_of(service: RolloutService) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(json.dumps(service.state_dict())))


def stopped_after(seconds: float, **how: Any) -> tuple[dict[str, Any], SavedGroups]:
    """A service stops this long after its first batch: its state, and the samples under way."""

    async def main() -> tuple[dict[str, Any], SavedGroups]:
        service, _, _ = make(**how)
        await service.next_batch(2)
        await asyncio.sleep(seconds)
        state = state_of(service)
        saved = saved_by(service, state)
        service.close()
        return state, saved

    return run_virtual(main())


def requests_to(engine: ScriptedEngine) -> list[GenerationRequest]:
    """All requests that the engine gets from here on."""
    asked: list[GenerationRequest] = []
    generate = engine.generate

    def noted(request: GenerationRequest, *further: Any) -> Any:
        asked.append(request)
        return generate(request, *further)

    cast(Any, engine).generate = noted
    return asked


def resumed(state: dict[str, Any], saved: SavedGroups, **how: Any) -> Resumed:
    """Next batch of a resumed service, the requests that its engine got, and the number of samples scored."""

    async def main() -> Resumed:
        service, engine, rewards = make(**how)
        asked = requests_to(engine)
        service.load_state_dict(state, saved)
        return await service.next_batch(2), asked, sum(rewards.asked.values())

    return run_virtual(main())


def record(sample: SavedSample) -> TokenRecord:
    row = sample.transcript.tokens
    assert row is not None and row.length == sample.transcript.prompt_length + sample.transcript.response_length
    return TokenRecord.read(row.block, row.row)


def numbers_in(state: dict[str, Any]) -> list[int]:
    return [one["group"] for one in state["domains"]["a"]["unfinished"]]


def test_responses_continue_from_their_tokens() -> None:
    state, saved = stopped_after(10.0)
    assert sorted(saved) == numbers_in(state) == [2, 3]
    short, long = saved[2][0], saved[2][1]
    assert short.outcome is SampleOutcome.ACCEPTED and short.score == Score(1.0) and long.outcome is None
    assert long.response is not None and FIRST_BATCH_S < long.response.length < LONG

    result, asked, scored = resumed(state, saved)
    group = result.groups[0]
    assert tokens_of(group.samples[0]) == record(short).ids.tolist()
    before, whole = (
        record(long),
        TokenRecord.read(group.samples[1].transcript.tokens.block, 0) if group.samples[1].transcript.tokens else None,
    )
    assert whole is not None and len(whole) == PROMPT + LONG
    assert whole.ids[: len(before)].tolist() == before.ids.tolist()
    assert whole.log_probs[: len(before)].tolist() == before.log_probs.tolist() and whole.mask.sum() == LONG
    assert [segment.length for segment in group.samples[1].transcript.segments] == [PROMPT, LONG]
    of_batch = [request for request in asked if request.resumed_tokens]
    assert [request.resumed_tokens for request in of_batch] == [long.response.length, saved[3][1].response.length]  # type: ignore[union-attr]
    assert scored == 2 + 2, "only the continued samples, and the first of the groups that started meanwhile, were scored"


def test_a_group_that_continues_does_not_wait_behind_one_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups 2 and 3 were admitted for one batch; the tokens of 2 are lost, so it counts from its new admission. Later ones are short."""
    state, saved = stopped_after(10.0)
    del saved[2]
    continued = record(saved[3][1]).ids.tolist()

    def then(request: GenerationRequest) -> Response:
        group = int(request.request_id.split("/")[3])
        return script(request) if group < 6 else Response(SHORT, 1.0)

    whole = make
    monkeypatch.setattr(f"{__name__}.make", lambda: whole(script=then))
    result, _, _ = resumed(state, saved)
    rows = [group.samples[1].transcript.tokens for group in result.groups]
    assert continued in [TokenRecord.read(row.block, row.row).ids[: len(continued)].tolist() for row in rows if row is not None]


def test_a_sample_that_waits_for_its_score_is_not_generated_again() -> None:
    state, saved = stopped_after(10.0, reward_s=100.0)
    assert [(group[1].outcome, group[1].response) for group in saved.values()] == [(None, None)] * 2
    result, asked, _ = resumed(state, saved, reward_s=0.0)
    uids = {group.samples[0].id.prompt_uid for group in result.groups}
    assert not [request for request in asked if int(request.request_id.split("/")[1]) in uids]
    assert all(
        len(tokens_of(sample)) == PROMPT + length
        for group in result.groups
        for sample, length in zip(group.samples, (SHORT, LONG), strict=True)
    )


def test_finished_groups_are_used_and_the_ledger_names_what_they_continue() -> None:
    state, saved = stopped_after(60.0)
    assert all(one.outcome is SampleOutcome.ACCEPTED for group in saved.values() for one in group.values())
    result, _, _ = resumed(state, saved)
    ended = {line["group"]: line for line in result.ledger if line["event"] == "group"}
    for old, group in zip(numbers_in(state), result.groups, strict=True):
        assert ended[old]["end"] == "dropped" and ended[group.group]["end"] == "delivered"
        assert ended[group.group]["continues"] == old and ended[group.group]["asked"] == ended[old]["asked"]
    assert result.stats.domains["a"].response_tokens < 2 * (SHORT + LONG), "their tokens are not counted again"


def test_samples_of_groups_that_became_too_old_are_not_used() -> None:
    state, saved = stopped_after(10.0)
    for one in state["domains"]["a"]["unfinished"]:
        one["asked"] -= 1
    result, asked, _ = resumed(state, saved)
    assert not any(request.resumed_tokens for request in asked)
    assert [group.samples[0].id.prompt_uid for group in result.groups] == [one["row"][1] for one in state["domains"]["a"]["unfinished"]]


@pytest.mark.parametrize("supply", [OneStepOff(1), ASYNCHRONOUS], ids=str)
def test_saved_samples_that_wait_longer_since_shares_changed_do_not_get_too_old(supply: Supply) -> None:
    """Four groups of each domain are saved; the resumed run's batches have one of `a`."""

    async def run(share: float, batches: int, state: dict[str, Any] | None, saved: SavedGroups) -> Any:
        domains = [make_domain("a", samples=1), make_domain("b", 1, share=share, samples=1)]
        service, _, _ = make_service(domains, [by_tokens(20)], supply=supply)
        if state is not None:
            service.load_state_dict(state, saved)
        ages: list[int] = []
        for number in range(batches):
            service.set_version(number)
            result = await service.next_batch(8)
            ages += [service._admission.handed_out - line["asked"] for line in result.ledger if line.get("end") == "delivered"]
            await asyncio.sleep(1.0)
        state = state_of(service)
        saved = saved_by(service, state)
        service.close()
        return ages, state, saved

    async def main() -> tuple[list[int], int]:
        _, state, saved = await run(1.0, 2, None, {})
        return (await run(7.0, 6, state, saved))[0], len(saved)

    ages, continued = run_virtual(main())
    assert continued == 8 and len(ages) == 6 * 8 and set(ages) <= {0, 1}


class ChangedRow(Prompts):
    """One row differs from that of the saved samples."""

    def __init__(self, uid: int, **change: Any) -> None:
        super().__init__("a", 0, 1000)
        self.uid, self.change = uid, change

    def __getitem__(self, index: int, /) -> Prompt:
        return replace(super().__getitem__(index), **(self.change if index == self.uid else {}))


@pytest.mark.parametrize("change", [{"answer": "9"}, {"columns": {"level": 2}}, {"token_ids": (0, 9, 9, 9)}])
def test_a_prompt_whose_row_has_changed_starts_again_and_others_continue(change: dict[str, Any]) -> None:
    state, saved = stopped_after(10.0)
    rows = [one["row"][1] for one in state["domains"]["a"]["unfinished"]]

    async def main() -> tuple[RolloutResult, list[GenerationRequest], list[str]]:
        domain = replace(make_domain("a", samples=2), prompts=ChangedRow(rows[0], **change))
        service, _, engines = make_service([domain], [script], supply=ASYNCHRONOUS, batches=9)
        asked = requests_to(engines[0])
        worker: Any = object.__new__(RolloutWorker)
        worker._service, worker._columns = service, ()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("roll_lite.workers.rollout.from_file", lambda *_: saved)
            told = await worker.load_state_dict(state, b"some")
        return await service.next_batch(2), asked, told

    result, asked, told = run_virtual(main())
    assert [group.samples[0].id.prompt_uid for group in result.groups] == rows
    assert {request.request_id.split("/")[1] for request in asked if request.resumed_tokens} == {str(rows[1])}
    assert all(tokens_of(sample)[:PROMPT] == list(sample.prompt.token_ids) for group in result.groups for sample in group.samples)
    assert told == [
        "2 samples that were under way continue with their tokens",
        "domains.a.data.train: rows of 1 prompts under way changed since the checkpoint; these start again",
    ]


def test_samples_of_a_checkpoint_without_digests_continue() -> None:
    state, saved = stopped_after(10.0)
    for one in state["domains"]["a"]["unfinished"]:
        del one["digest"]
    _, asked, _ = resumed(state, saved)
    assert sum(request.resumed_tokens > 0 for request in asked) == 2


def test_samples_are_saved_again_before_and_after_their_group_is_taken_up() -> None:
    state, saved = stopped_after(10.0)

    async def main() -> tuple[SavedGroups, SavedGroups, SavedGroups, list[int]]:
        service, _, _ = make()
        service.load_state_dict(state, saved)
        before = state_of(service)
        at_once = saved_by(service, before)
        batch = asyncio.create_task(service.next_batch(2))
        await asyncio.sleep(10.0)
        under_way = saved_by(service, before)
        await batch
        return at_once, under_way, saved_by(service, before), numbers_in(before)

    at_once, under_way, handed_out, numbers = run_virtual(main())
    assert numbers == numbers_in(state) == sorted(at_once) == sorted(under_way) == sorted(handed_out)
    lengths = [[one[2][1].transcript.response_length for one in (saved, at_once, under_way, handed_out)]][0]
    assert lengths == sorted(lengths) and lengths[0] == lengths[1] < lengths[2] < lengths[3] == LONG
    assert record(under_way[2][1]).ids[: PROMPT + lengths[0]].tolist() == record(saved[2][1]).ids.tolist()


SUPPLIES = pytest.mark.parametrize(("supply", "admitted"), [(Synchronous(), [2, 3]), (ASYNCHRONOUS, [2, 3, 4, 5])])


@SUPPLIES
def test_what_was_admitted_since_the_last_step_continues_however_often_its_run_is_preempted(supply: Supply, admitted: list[int]) -> None:
    def preempted(state: dict[str, Any] | None, saved: SavedGroups, seconds: float) -> tuple[dict[str, Any], SavedGroups]:
        async def main() -> tuple[dict[str, Any], SavedGroups]:
            service, _, _ = make(supply=supply)
            if state is None:
                await service.next_batch(2)
            else:
                service.load_state_dict(state, saved)
            waiting = asyncio.create_task(service.next_batch(2))
            await asyncio.sleep(seconds)
            reached = json.loads(json.dumps(service.state_dict(1)))
            found = saved_by(service, reached)
            waiting.cancel()
            service.close()
            return reached, found

        return run_virtual(main())

    first, saved = preempted(None, {}, 20.0)
    assert first["batches"] == 1 and numbers_in(first) == sorted(saved) == admitted
    second, again = preempted(first, saved, 10.0)
    assert second["batches"] == 1 and second["mix"] == first["mix"]
    assert second["domains"]["a"]["order"] == first["domains"]["a"]["order"], "nothing new was started"
    rows = [one["row"] for one in first["domains"]["a"]["unfinished"]]
    assert [one["row"] for one in second["domains"]["a"]["unfinished"]] == rows
    before, after = saved[admitted[0]][1].transcript, again[numbers_in(second)[0]][1].transcript
    assert after.response_length > before.response_length > 0
    result, asked, _ = resumed(second, again, supply=supply)
    assert sorted(group.samples[0].id.prompt_uid for group in result.groups) == sorted(row[1] for row in rows[:2])
    own = {group.samples[0].id.prompt_uid for group in result.groups}
    assert all(request.resumed_tokens for request in asked if int(request.request_id.split("/")[1]) in own)


@SUPPLIES
def test_a_batch_whose_step_is_not_complete_is_not_generated_again(supply: Supply, admitted: list[int]) -> None:
    async def main() -> tuple[RolloutResult, dict[str, Any], SavedGroups]:
        service, _, _ = make(supply=supply)
        await service.next_batch(2)
        second = await service.next_batch(2)
        await asyncio.sleep(10.0)
        state = json.loads(json.dumps(service.state_dict(1)))
        return second, state, saved_by(service, state)

    second, state, saved = run_virtual(main())
    assert state["batches"] == 1 and numbers_in(state)[:4] == admitted and sorted(saved)[:2] == admitted[:2]
    assert not any(line["end"] == "delivered" for line in state["ledger"])
    assert {line["group"] for line in state["ledger"]} == set(range(2, state["next_group"]))
    result, asked, _ = resumed(state, saved, supply=supply)
    uids = [group.samples[0].id.prompt_uid for group in second.groups]
    assert [group.samples[0].id.prompt_uid for group in result.groups] == uids
    assert not any(int(request.request_id.split("/")[1]) in uids for request in asked)
    assert [tokens_of(one) for group in result.groups for one in group.samples] == [
        tokens_of(one) for group in second.groups for one in group.samples
    ]


def test_groups_of_one_domain_are_kept_while_the_batch_waits_for_another() -> None:
    def both() -> RolloutService:
        def slow(request: GenerationRequest) -> Response:
            return Response(SHORT if request.request_id.startswith("a/") else LONG, 1.0)

        return make_service([make_domain("a", 0, samples=2), make_domain("b", 1, samples=2)], [slow], batches=9)[0]

    async def main() -> tuple[dict[str, Any], SavedGroups]:
        service = both()
        waiting = asyncio.create_task(service.next_batch(2))
        await asyncio.sleep(20.0)
        state = json.loads(json.dumps(service.state_dict()))
        waiting.cancel()
        return state, saved_by(service, state)

    state, saved = run_virtual(main())
    assert sorted(saved) == [0, 1] and [(line["end"], "turns" in line) for line in state["ledger"]] == [("dropped", False)] * 2

    async def go_on() -> RolloutResult:
        service = both()
        service.load_state_dict(state, saved)
        return await service.next_batch(2)

    lines = [line for line in run_virtual(go_on()).ledger if line.get("end") == "delivered"]
    assert sorted(line["continues"] for line in lines) == [0, 1]


TURNS, TURN, OBSERVED = 4, 15, (90, 91)


def talk(observed: tuple[int, ...] = OBSERVED) -> Episode:
    """Episodes of TURNS responses. `observed`: what the environment says after the first response; after others, OBSERVED."""

    async def episode(prompt: Prompt, conversation: Conversation) -> None:
        turn = await conversation.respond(prompt.token_ids)
        for number in range(1, TURNS):
            said = np.frombuffer(turn.ids, np.int32).tolist()[:1]
            turn = await conversation.respond((*(observed if number == 1 else OBSERVED), *said), number, number - 1)

    return episode


def talking(episode: Episode) -> tuple[RolloutService, ScriptedEngine]:
    """One second per token, and half of it in the first batch. Sample 0 ends sooner."""

    def script(request: GenerationRequest) -> Response:
        group, index = request.request_id.split("/")[3:5]
        return Response(TURN, (0.5 if group in "01" else 1.0) * (0.5 if index == "0" else 1.0) * (3 if 99 in request.prompt_ids else 1))

    domain = make_domain("a", samples=2, episode=episode, max_tokens=1000)
    service, _, engines = make_service([domain], [script], supply=Asynchronous(1), batches=9)
    return service, engines[0]


def stopped_episodes(episode: Episode, seconds: float) -> tuple[dict[str, Any], SavedGroups]:
    async def main() -> tuple[dict[str, Any], SavedGroups]:
        service, _ = talking(episode)
        await service.next_batch(2)
        await asyncio.sleep(seconds)
        state = state_of(service)
        saved = saved_by(service, state)
        service.close()
        return state, saved

    return run_virtual(main())


def turns_in(saved: SavedGroups) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Number and length of each response, by group and index."""
    return {
        (number, index): [(one.number, one.turn.length) for one in s.turns] for number, group in saved.items() for index, s in group.items()
    }


def resumed_episodes(state: dict[str, Any], saved: SavedGroups, episode: Episode) -> tuple[RolloutResult, list[GenerationRequest]]:
    async def main() -> tuple[RolloutResult, list[GenerationRequest]]:
        service, engine = talking(episode)
        asked = requests_to(engine)
        service.load_state_dict(state, saved)
        again = saved_by(service, state)
        assert turns_in(again) == turns_in(saved)
        return await service.next_batch(2), asked

    return run_virtual(main())


@pytest.mark.parametrize(("seconds", "differs"), [(4.0, False), (12.0, False), (12.0, True)])
def test_turns_of_an_episode_are_not_generated_again_unless_the_environment_says_something_else(seconds: float, differs: bool) -> None:
    state, saved = stopped_episodes(talk(), seconds)
    long = saved[2][1]
    expected = [(0, None), (1, 0), (2, 1)][: 2 if seconds < 5 else 3]
    assert long.outcome is None and [(one.number, one.after) for one in long.turns] == expected, "in its third turn"
    last = long.turns[-1].turn
    assert last.tokens is not None
    before, reached = TokenRecord.read(last.tokens.block, last.tokens.row), 0 if seconds < 5 else last.length
    assert (
        reached < TURN
        and before.mask.sum() == 2 * TURN + reached
        and before.ids[-last.length :].tolist() == np.frombuffer(last.ids, np.int32).tolist()
    )

    result, asked = resumed_episodes(state, saved, talk((95, 96, 97)) if differs else talk())
    (group,) = [one for one in result.groups if one.samples[1].id.prompt_uid == state["domains"]["a"]["unfinished"][0]["row"][1]]
    names = [name for request in asked if (name := request.request_id).startswith(group.samples[1].id.request_id())]
    under_way = "2" if seconds < 5 else "2~1"
    assert [name.rpartition("turn")[2] for name in names if "turn" in name] == (["1", "2", "3"] if differs else [under_way, "3"])
    resumed = [request.resumed_tokens for request in asked if request.request_id in names and request.resumed_tokens]
    assert resumed == ([] if differs or not reached else [reached])
    transcript = group.samples[1].transcript
    observed = 4 if differs else 3
    assert [one.length for one in transcript.segments] == [PROMPT, TURN, observed, TURN, 3, TURN, 3, TURN] and not transcript.branches
    assert transcript.tokens is not None
    whole = TokenRecord.read(transcript.tokens.block, transcript.tokens.row)
    same = PROMPT + TURN if differs else len(before)
    for name in ("ids", "mask", "log_probs"):
        assert getattr(whole, name)[:same].tolist() == getattr(before, name)[:same].tolist()
    assert whole.mask.sum() == TURNS * TURN and len(whole) == PROMPT + TURNS * TURN + observed + 2 * 3


def test_a_turn_under_way_is_saved_again_after_it_was_taken_up() -> None:
    state, saved = stopped_episodes(talk(), 12.0)

    async def main() -> list[SavedGroups]:
        service, _ = talking(talk())
        service.load_state_dict(state, saved)
        batch = asyncio.create_task(service.next_batch(2))
        later = []
        for seconds in (2.0, 9.5):  # the engine reports new tokens every 5 seconds
            await asyncio.sleep(seconds)
            later.append(saved_by(service, state))
        await batch
        return later

    first, *later = [one[2][1].turns[-1].turn for one in (saved, *run_virtual(main()))]
    assert [one.finish_reason for one in (first, *later)] == [FinishReason.ABORT] * 3
    assert first.length == later[0].length < later[1].length < TURN
    rows = [TokenRecord.read(one.tokens.block, one.tokens.row) for one in (first, *later) if one.tokens is not None]
    assert [row.ids[: len(rows[0])].tolist() for row in rows] == [rows[0].ids.tolist()] * 3
    assert [row.mask.sum() for row in rows] == [2 * TURN + one.length for one in (first, *later)]


def test_complete_turns_are_kept_where_the_tokens_of_the_one_under_way_are_lost() -> None:
    async def main() -> SavedGroups:
        service, _ = talking(talk())
        await service.next_batch(2)
        await asyncio.sleep(12.0)
        found = service.unfinished(state_of(service))
        ((part,),) = [pieces.parts for pieces in found[2][1].under_way.values()]
        return read(to_file(found, (), lambda blocks: [None if block is part.block else block for block in blocks]))

    saved = run_virtual(main())
    assert [(one.number, one.turn.finish_reason) for one in saved[2][1].turns] == [(0, FinishReason.STOP), (1, FinishReason.STOP)]
    assert [one.number for one in saved[3][1].turns] == [0], "its second response has tokens in the same block"


async def at_once(prompt: Prompt, conversation: Conversation) -> None:
    """Two responses side by side, of which the first takes three times as long."""
    await conversation.respond(prompt.token_ids)
    await asyncio.gather(conversation.respond((99,), 1, 0), conversation.respond((98,), 2, 0))


def test_a_complete_response_is_kept_beside_one_under_way() -> None:
    state, saved = stopped_episodes(at_once, 5.0)
    assert [(one.number, one.turn.finish_reason) for one in saved[2][1].turns] == [
        (0, FinishReason.STOP),
        (2, FinishReason.STOP),
        (1, FinishReason.ABORT),
    ]
    result, asked = resumed_episodes(state, saved, at_once)
    (uid,) = [one["row"][1] for one in state["domains"]["a"]["unfinished"] if one["group"] == 2]
    names = [name.split("/") for one in asked if int((name := one.request_id).split("/")[1]) == uid]
    assert [name[-1] for name in names if name[4] == "1"] == ["turn1~1"], "its first and third response are not generated again"
    (group,) = [one for one in result.groups if one.samples[1].id.prompt_uid == uid]
    assert [row.policy_tokens for row in group.samples[1].transcript.rows] == [2 * TURN, TURN]


def side_by_side(order: Sequence[tuple[int, ...]]) -> Episode:
    """The first response, then one response to each of these tokens; with 99 among them it takes three times as long."""

    async def episode(prompt: Prompt, conversation: Conversation) -> None:
        await conversation.respond(prompt.token_ids)
        await asyncio.gather(*(conversation.respond(tokens, number, 0) for number, tokens in enumerate(order, start=1)))

    return episode


def test_parallel_responses_under_way_go_on_in_another_order_and_are_saved_again() -> None:
    slow, slower, fast = (99,), (99, 97), (98,)
    state, saved = stopped_episodes(side_by_side([slow, slower, fast]), 5.0)
    begun = {one.given_ids: one for one in saved[2][1].turns}
    lengths = {name: begun[np.array(name, np.int32).tobytes()].turn.length for name in (slow, slower, fast)}
    assert lengths[fast] == TURN and 0 < lengths[slow] == lengths[slower] < TURN

    async def saved_again() -> SavedGroups:
        service, _ = talking(side_by_side([slow, (96,), fast, slower]))
        service.load_state_dict(state, saved)
        batch = asyncio.create_task(service.next_batch(2))
        await asyncio.sleep(12.0)
        later = saved_by(service, state)
        await batch
        return later

    later = run_virtual(saved_again())
    turns = {one.number: one for one in later[2][1].turns}
    new = turns.pop(max(turns))
    assert new.given_ids == np.array([96], np.int32).tobytes() and 0 < new.turn.length < TURN
    assert {number: one.given_ids for number, one in turns.items()} == {one.number: name for name, one in begun.items()}
    for one in turns.values():
        was, now = (TokenRecord.read(it.turn.tokens.block, it.turn.tokens.row) for it in (begun[one.given_ids], one) if it.turn.tokens)
        assert now.ids[: len(was)].tolist() == was.ids.tolist() and now.mask[: len(was)].tolist() == was.mask.tolist()
        assert (len(now) > len(was)) == (was.ids[-begun[one.given_ids].turn.length - 1] in (99, 97))

    result, asked = resumed_episodes(state, later, side_by_side([slower, fast, slow, (96,)]))
    (group,) = [one for one in result.groups if one.samples[1].id.prompt_uid == state["domains"]["a"]["unfinished"][0]["row"][1]]
    names = [one for one in asked if one.request_id.startswith(group.samples[1].id.request_id())]
    assert sorted(one.resumed_tokens for one in names) == sorted(
        one.turn.length for one in (new, *turns.values()) if one.turn.length < TURN
    )
    rows = group.samples[1].transcript.rows
    assert sorted(row.policy_tokens for row in rows) == [TURN, TURN, TURN, 2 * TURN]
    whole = [TokenRecord.read(row.tokens.block, row.tokens.row).ids.tolist() for row in rows if row.tokens is not None]
    for one in (new, *turns.values()):
        assert one.turn.tokens is not None
        start = TokenRecord.read(one.turn.tokens.block, one.turn.tokens.row).ids.tolist()
        assert any(ids[: len(start)] == start for ids in whole)


async def test_a_saved_response_answers_only_a_request_with_the_same_limits() -> None:
    talk, asked = tree_talk()
    before = talk(())
    await before.respond((1, 2))
    long = await before.respond((70,), 1, 0, most=50)
    short = await before.respond((70,), 2, 0, most=3, stop=("end",))
    asked.clear()
    after = talk(before.saved())
    await after.respond((1, 2))
    assert await after.respond((70,), 1, 0, most=3, stop=("end",)) is short and not asked
    await after.respond((70,), 2, 0, most=3)
    assert [one.sampling.max_tokens for one in asked] == [3]
    third = talk(before.saved())
    await third.respond((1, 2))
    assert await third.respond((70,), 1, 0, most=50) is long


def tree_talk() -> tuple[Callable[[Sequence[SavedTurn]], Conversation], list[GenerationRequest]]:
    """A function that begins a conversation with saved responses, and all requests that none of them answers."""
    asked: list[GenerationRequest] = []

    async def ask(request: GenerationRequest, _: Turn | None) -> Turn:
        asked.append(request)
        return Turn(request.request_id, 2, tokens=TokenRow(request.request_id, 0, request.prompt_length + 2), ids=bytes(8))

    return lambda saved: Conversation(ask, "a/0/0/0/0/0", Sampling(1.0, 100), wants_ids=True, saved=saved), asked


@pytest.mark.parametrize("order", list(permutations("XYZ")))
async def test_parallel_requests_of_a_resumed_episode_may_come_in_another_order(order: Sequence[str]) -> None:
    talk, asked = tree_talk()
    tokens = {"X": 70, "Y": 80, "Z": 90}

    async def played(conversation: Conversation, order: Sequence[str]) -> dict[str, Turn]:
        """Three requests continue the first response, and one continues that to Y."""
        turns = {"": await conversation.respond((1, 2))}
        for number, name in enumerate(order, start=1):
            turns[name] = await conversation.respond((tokens[name],), number, 0)
        return turns | {"W": await conversation.respond((60,), 4, 1 + order.index("Y"))}

    before = talk(())
    turns = await played(before, "YXZ")
    asked.clear()
    after = talk(before.saved())
    again = await played(after, order)
    assert not asked and all(again[name] is turn for name, turn in turns.items())
    assert sorted(row.policy_tokens for row in after.transcript().rows) == [2, 2, 6], "the row of the first response goes on with Y and W"
    assert {one.number: one for one in after.saved()} == {one.number: one for one in before.saved()}

    once_more = await after.respond((80,), 5, 0)
    assert [(request.prompt_ids, request.masks_context) for request in asked] == [((80,), True)], "a saved response is used once"
    third = talk(after.saved())
    assert (await played(third, "YXZ")) == turns and (await third.respond((80,), 5, 0)) is once_more
    assert len(asked) == 1


@pytest.mark.parametrize("order", ["YZ", "ZY"])
async def test_a_saved_response_is_used_only_in_the_same_place_of_the_tree(order: str) -> None:
    """An agent's parallel requests come in any order. The first to continue a response lengthens its row, in which that response trains."""
    talk, asked = tree_talk()
    texts = {"X": ((70,), None), "Y": ((80,), 0), "Z": ((90,), 0)}
    before = talk(())
    await before.respond((1, 2))
    for number, name in enumerate("XYZ", start=1):
        await before.respond(texts[name][0], number, texts[name][1])
    first, _, own, _ = before.saved()
    assert not own.branches, "X and Z were under way at the checkpoint"
    asked.clear()
    after = talk((first, own))
    assert (await after.respond((1, 2))) is first.turn
    for number, name in enumerate(f"X{order}" if order == "YZ" else f"{order}X", start=1):
        await after.respond(texts[name][0], number, texts[name][1])
    assert [(request.prompt_ids[0], request.masks_context) for request in asked] == (
        [(70, False), (90, True)] if order == "YZ" else [(90, False), (80, True), (70, False)]
    )
    assert [row.policy_tokens for row in after.transcript().rows] == [4, 2, 2]


def test_a_deterministic_run_saves_complete_groups_only() -> None:
    """A continuation would be another response."""

    async def main() -> tuple[SavedGroups, SavedGroups, list[int]]:
        service, _, _ = make(deterministic=True, seed=5)
        batch = asyncio.create_task(service.next_batch(2))
        await asyncio.sleep(10.0)
        early = saved_by(service, state_of(service))
        await batch
        state = state_of(service)
        return early, saved_by(service, state), numbers_in(state)

    early, late, numbers = run_virtual(main())
    assert not early and sorted(late) == numbers == [2, 3]


def test_every_kind_of_sample_is_the_same_when_read_back() -> None:
    kept = {KEPT_IDS: np.array([[-1, -1], [7, 8], [9, -1]], np.int32)}
    block = token_block(
        [
            TokenRecord(np.array([4, 5, 6]), np.array([False, True, True]), np.array([0, -0.5, -2.0], np.float32), kept),
            TokenRecord(np.array([4, 9]), np.array([False, True]), np.array([0, -1.0], np.float32)),
        ],
        [KEPT_IDS],
    )

    def transcript(row: int, length: int, reason: FinishReason) -> Transcript:
        segments = Segment(Author.PROMPT, 1), Segment(Author.POLICY, length, (VersionSpan(0, 3), VersionSpan(1, 4)), engines=(2, 0))
        return Transcript(segments, TokenRow(block, row, 1 + length), "half a pair \ud83d", reason)

    score = Score(0.5, True, {"a": 1.5, "b": "text"}, None, "41", {"terms": 0.25})
    samples = {
        0: SavedSample(1, transcript(0, 2, FinishReason.STOP), SampleOutcome.ACCEPTED, score),
        1: SavedSample(0, transcript(1, 1, FinishReason.ABORT), SampleOutcome.FAILED, None, "time-out", timed_out=True),
        2: SavedSample(0, transcript(1, 1, FinishReason.ABORT)),
    }
    found = {12: {index: Unfinished(sample) for index, sample in samples.items()}}
    content = to_file(found, [KEPT_IDS], fetch)
    saved = read(content, [KEPT_IDS])
    for index, sample in samples.items():
        again, was = saved[12][index], sample.transcript
        assert again.transcript.segments == was.segments and again.transcript.text == was.text
        assert (again.attempt, again.outcome, again.score, again.failure, again.timed_out, again.transcript.finish_reason) == (
            *(sample.attempt, sample.outcome, sample.score, sample.failure, sample.timed_out),
            was.finish_reason,
        )
        assert again.transcript.tokens is not None and was.tokens is not None
        new, old = record(again), TokenRecord.read(block, was.tokens.row)
        assert [column.tolist() for column in (new.ids, new.mask, new.log_probs, new.vectors(KEPT_IDS))] == [
            column.tolist() for column in (old.ids, old.mask, old.log_probs, old.vectors(KEPT_IDS))
        ]
    assert (saved[12][0].response, saved[12][1].response) == (None, None) and saved[12][2].response is not None
    assert read(content) == {}, "the run has other token columns"


def test_all_rows_of_a_sample_are_read_back() -> None:
    block = token_block([TokenRecord.given((4, 5)), TokenRecord.given((6, 7, 8)), TokenRecord.given((9,))])
    places = [TokenRow(block, 0, 2), TokenRow(block, 1, 3), TokenRow(block, 2, 1)]
    branch = Branch((Segment(Author.PROMPT, 3),), places[1])
    branched = SavedSample(0, Transcript((Segment(Author.PROMPT, 2),), places[0], branches=(branch,)), SampleOutcome.ACCEPTED, Score(1.0))
    episode = EpisodeRecord(({"role": "user", "content": "Hi", "sent": Path("now")},))
    alone = SavedSample(0, Transcript((Segment(Author.PROMPT, 1),), places[2], episode=episode), SampleOutcome.ACCEPTED, Score(0.0))
    saved = read(to_file({1: {0: Unfinished(branched), 1: Unfinished(alone)}}, (), fetch))
    rows = [row.tokens for index in (0, 1) for row in saved[1][index].transcript.rows]
    assert [TokenRecord.read(row.block, row.row).ids.tolist() for row in rows if row is not None] == [[4, 5], [6, 7, 8], [9]]
    assert [len(saved[1][index].transcript.branches) for index in (0, 1)] == [1, 0]
    again = saved[1][1].transcript.episode
    assert again is not None and again.messages[0]["sent"] == "now", "messages may hold anything"


def test_samples_whose_tokens_are_lost_are_left_out() -> None:
    row = TokenRow("gone", 0, 3)
    lost = Unfinished(SavedSample(0, Transcript((Segment(Author.PROMPT, 3),), tokens=row), SampleOutcome.ACCEPTED, Score(1.0)))
    without = Unfinished(SavedSample(0, Transcript(), SampleOutcome.FAILED, failure="the engine refused it"))
    assert to_file({1: {0: lost, 1: without}}, (), lambda blocks: [None for _ in blocks]) == b""
