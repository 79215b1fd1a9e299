"""A scripted episode of two turns, from the engine to the gradient: only what the policy wrote trains."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import support_scripted
import torch
from support_local_engine import LocalEngine
from support_scripted import LOG_PROB, Response, ScriptedEngine

from roll_lite.algorithms.losses import row_weights
from roll_lite.config.schema.algorithm import AlgorithmConfig
from roll_lite.data.microbatch import MicroBatchOutputs, padded
from roll_lite.data.prompts import PromptOrder
from roll_lite.data.proto import DataProto
from roll_lite.data.samples import (
    Author,
    EpisodeRecord,
    FinishReason,
    GenerationRequest,
    Prompt,
    RewardInput,
    SampleOutcome,
    Sampling,
    Score,
    Segment,
    VersionSpan,
)
from roll_lite.scheduler.domain import Domain
from roll_lite.scheduler.router import Router
from roll_lite.scheduler.runner import Conversation, Episode, one_response
from roll_lite.scheduler.service import RolloutResult, RolloutService
from roll_lite.scheduler.supply import Asynchronous, OnSync, Pacing
from roll_lite.simulator.clock import run_virtual
from roll_lite.workers.credit import assign_credit
from roll_lite.workers.objectives import ActorLoss
from roll_lite.workers.rollout_output import rows_of

PROMPT, OBSERVATION = (7, 8, 9), (90, 91)


async def two_turns(prompt: Prompt, conversation: Conversation) -> None:
    await conversation.respond(prompt.token_ids)
    await conversation.respond(OBSERVATION, 1, 0)


class OnePrompt:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int, /) -> Prompt:
        return Prompt("toy", 0, "what?", PROMPT)


class LongerIsBetter:
    capacity = 1

    async def score(self, item: RewardInput) -> Score:
        return Score(1.0 if item.response == "2 tokens\n3 tokens" else 0.0)


def script(request: GenerationRequest) -> Response:
    """2 tokens, and in the second turn 3 for sample 0, 1 for sample 1."""
    if not request.request_id.endswith("turn1"):
        return Response(2, 1.0)
    return Response(3 if request.request_id.split("/")[4] == "0" else 1, 1.0)


def slow_script(request: GenerationRequest) -> Response:
    """As `script`, with a second turn of 6 tokens for sample 0."""
    response = script(request)
    return Response(6, 1.0) if response.tokens == 3 else response


def domain_of(episode: Episode, max_tokens: int = 20) -> Domain:
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    order = PromptOrder(1, 0, "toy")
    return Domain("toy", OnePrompt(), order, sampling, samples_per_prompt=2, share=1.0, rewards=LongerIsBetter(), episode=episode)


async def rollout(
    episode: Episode,
    engines: int = 1,
    max_tokens: int = 20,
    timeout_s: float = 1e6,
    seed: int | None = None,
    script: Callable[[GenerationRequest], Response] = script,
) -> RolloutResult:
    clients = [LocalEngine(f"e{i}", ScriptedEngine(script)) for i in range(engines)]
    return await RolloutService([domain_of(episode, max_tokens)], Router(clients, timeout_s), retries=0, seed=seed).next_batch(1)


def batch_of(result: RolloutResult) -> DataProto:
    """Rows and tokens together, as a shard gives them to a rank."""
    places = [sample.transcript.tokens for sample in result.groups[0].samples]
    tokens = [place.block.slice(place.row, place.row + 1) for place in places if place is not None]
    return rows_of(result.groups, {"toy": 1.0}).with_columns(**DataProto.concat(tokens).columns)


def test_segments_and_masks_by_hand() -> None:
    result = run_virtual(rollout(two_turns))
    first, second = result.groups[0].samples
    said = (Segment(Author.PROMPT, 3), Segment(Author.POLICY, 2, (VersionSpan(0, 0),), turn=0), Segment(Author.ENVIRONMENT, 2))
    assert first.transcript.segments == (*said, Segment(Author.POLICY, 3, (VersionSpan(0, 0),), turn=1))
    assert second.transcript.segments == (*said, Segment(Author.POLICY, 1, (VersionSpan(0, 0),), turn=1))
    batch = batch_of(result)
    mask, ids, log_probs = batch.ragged("response_mask"), batch.ragged("input_ids"), batch.ragged("rollout_log_probs")
    assert mask.row(0).int().tolist() == [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]
    assert mask.row(1).int().tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert [ids.row(row)[~mask.row(row)].tolist() for row in (0, 1)] == [[*PROMPT, *OBSERVATION]] * 2
    assert (log_probs.row(0) == LOG_PROB).int().tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 1]
    columns = {name: batch.tensor(name).tolist() for name in ("prompt_length", "response_length", "policy_tokens", "score")}
    assert columns == {"prompt_length": [3, 3], "response_length": [7, 5], "policy_tokens": [5, 3], "score": [1.0, 0.0]}
    stats = result.stats.domains["toy"]
    assert (stats.response_tokens, stats.prompt_tokens) == (8, 2 * (3 + 7)), "a later turn begins with all that was said"


def test_the_gradient_is_that_of_the_policys_tokens() -> None:
    """Scores 1 and 0: advantages 0.5 and -0.5. Eight policy tokens share the mean: d loss / d log-prob is -0.5 / 8 and +0.5 / 8."""
    batch = batch_of(run_virtual(rollout(two_turns)))
    batch = batch.with_columns(
        reward=batch.tensor("score"),
        train_weight=torch.ones(2),
        truncated=torch.zeros(2, dtype=torch.bool),
        domain_number=torch.zeros(2, dtype=torch.int64),
        loss_weight=row_weights(batch.tensor("policy_tokens"), "token_mean"),
    )
    rows = padded(batch)
    assert rows.mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 1, 1, 0, 0, 1, 0, 0]]
    algorithm = AlgorithmConfig.model_validate({"advantage": {"name": "grpo", "normalize_std": False}, "old_log_probs": "rollout"})
    credit = assign_credit(rows, 0, algorithm, 0.0, lambda rows: [rows])
    advantages = [[0, 0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0.5], [0, 0, -0.5, -0.5, 0, 0, -0.5, 0, 0]]
    assert credit.advantages.tolist() == advantages
    rows.columns["advantages"] = credit.advantages  # type: ignore[index]
    log_probs = torch.full((2, 9), 3.0).masked_fill(rows.mask, LOG_PROB).requires_grad_()
    loss, metrics = ActorLoss(old_log_probs="rollout")(MicroBatchOutputs(log_probs=log_probs), rows)
    loss.backward()
    assert float(loss) == pytest.approx(-(5 - 3) * 0.5 / 8)
    assert metrics["actor/tokens#0"] == 8
    torch.testing.assert_close(log_probs.grad, -torch.tensor(advantages) / 8)


def test_a_second_turn_may_go_to_another_engine() -> None:
    one, two = (run_virtual(rollout(two_turns, engines, seed=5)) for engines in (1, 2))
    for name in ("input_ids", "response_mask", "rollout_log_probs"):
        assert batch_of(one).ragged(name).equals(batch_of(two).ragged(name))


@pytest.mark.parametrize("on_sync", OnSync)
def test_a_weight_update_while_a_tool_runs(on_sync: OnSync, monkeypatch: pytest.MonkeyPatch) -> None:
    """New weights come from second 5 to 8. Sample 0's tool answers in second 7, sample 1's in second 12."""

    async def with_a_tool(prompt: Prompt, conversation: Conversation) -> None:
        await conversation.respond(prompt.token_ids)
        await asyncio.sleep(5.0 if conversation.request_id.split("/")[4] == "0" else 10.0)
        await conversation.respond(OBSERVATION, 1, 0)

    async def main() -> RolloutResult:
        engine = ScriptedEngine(script)
        service = RolloutService(
            [domain_of(with_a_tool)], Router([LocalEngine("e", engine)], 1e6), 0, None, Pacing(Asynchronous(1), on_sync)
        )
        batch = asyncio.create_task(service.next_batch(1))
        await asyncio.sleep(5.0)
        await service.hold()
        await engine.begin_weight_update([])
        await engine.receive_bucket([])
        await asyncio.sleep(3.0)
        await engine.finish_weight_update(7)
        monkeypatch.setattr(support_scripted, "LOG_PROB", 2 * LOG_PROB)
        service.set_version(7)
        assert not batch.done()
        result = await batch
        service.close()
        return result

    result = run_virtual(main())
    for sample, last in zip(result.groups[0].samples, (3, 1), strict=True):
        assert [(one.length, one.versions) for one in sample.transcript.segments] == [
            *((3, ()), (2, (VersionSpan(0, 0),))),
            *((2, ()), (last, (VersionSpan(0, 7),))),
        ]
    batch = batch_of(result)
    mask, log_probs = batch.ragged("response_mask"), batch.ragged("rollout_log_probs")
    assert [log_probs.row(row)[mask.row(row)[1:]].tolist() for row in (0, 1)] == [[LOG_PROB] * 2 + [2 * LOG_PROB] * last for last in (3, 1)]
    assert batch.tensor("min_version").tolist() == [0, 0], "staleness is counted from a sample's oldest token"
    assert batch.tensor("max_version").tolist() == [7, 7]


def test_max_tokens_holds_for_all_turns_together() -> None:
    """8 tokens: a response of 2, 2 of the environment, and what is left; sample 1 responds with 1 and has room for another turn."""
    asked: list[int] = []

    def noting(request: GenerationRequest) -> Response:
        asked.append(request.sampling.max_tokens)
        return script(request)

    async def until_full(prompt: Prompt, conversation: Conversation) -> None:
        await conversation.respond(prompt.token_ids)
        with pytest.raises(ValueError, match="no room for a response within 8 tokens"):
            for turn in range(1, 9):
                await conversation.respond(OBSERVATION, turn, turn - 1)

    result = run_virtual(rollout(until_full, max_tokens=8, script=noting))
    assert [sample.transcript.response_length for sample in result.groups[0].samples] == [7, 8]
    assert asked == [8, 8, 4, 4, 1]


@pytest.mark.parametrize("limit", [None, FinishReason.STOP, FinishReason.MAX_TURNS, FinishReason.LENGTH])
def test_each_row_says_whether_a_token_limit_cut_it(limit: FinishReason | None) -> None:
    """An agent's responses of 2 tokens. Two conversations are cut at 1: the first goes on and stops, the second ends so. The third stops;
    its row is cut only if no room is left after it."""

    async def three_conversations(prompt: Prompt, conversation: Conversation) -> None:
        await conversation.respond(prompt.token_ids, 0, most=1)
        await conversation.respond(prompt.token_ids, 1, most=1)
        await conversation.respond(OBSERVATION, 2, 0)
        await conversation.respond(prompt.token_ids, 3)
        conversation.end(EpisodeRecord(), limit)

    result = run_virtual(rollout(three_conversations, script=lambda _: Response(2)))
    assert [sample.transcript.finish_reason for sample in result.groups[0].samples] == [limit or FinishReason.STOP] * 2
    rows = rows_of(result.groups, {"toy": 1.0})
    assert rows.tensor("cut").tolist() == [False, True, limit is FinishReason.LENGTH] * 2
    assert rows.tensor("response_length").tolist() == [5, 1, 2] * 2


def test_a_single_response_is_cut_at_max_tokens() -> None:
    result = run_virtual(rollout(one_response, max_tokens=2, script=lambda _: Response(3)))
    assert rows_of(result.groups, {"toy": 1.0}).tensor("cut").tolist() == [True, True]


def test_a_time_out_in_the_second_turn_keeps_both() -> None:
    """Turns of 2 and 6 s; sample 0's second one is cut off 2.5 s after its start was noticed, at most a second late."""
    first, second = run_virtual(rollout(two_turns, timeout_s=2.5, script=slow_script)).groups[0].samples
    assert (first.outcome, first.timed_out, second.outcome) == (SampleOutcome.FAILED, True, SampleOutcome.ACCEPTED)
    assert [segment.length for segment in first.transcript.segments] == [3, 2, 2, 3]
    assert first.transcript.tokens is not None and first.transcript.tokens.length == 10
