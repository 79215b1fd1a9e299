"""A rank that scores texts: from text to the score that transformers gives it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support_models import BOS_ID, EOS_ID, PAD_ID, hf_scores, make_tiny_reward_model, make_tokenizer
from workers.test_phases import Gpu

from roll_lite.config.schema.models import RewardModelConfig
from roll_lite.data.microbatch import MicroBatchPlan
from roll_lite.data.proto import DataProto
from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.worker import ROLE
from roll_lite.workers.reward_model import RewardModelSpec, RewardModelWorker, TextTokens

CHAT = "{% for message in messages %}<bos>{{ message['role'] }}: {{ message['content'] }}<eos>{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny_reward_model(tmp_path / "model", "llama")  # for Qwen2, AutoTokenizer puts another tokenizer over this one's files


def spec_of(path: Path, deterministic: bool = False, **settings: Any) -> RewardModelSpec:
    return RewardModelSpec("toy", RewardModelConfig(path=path, dtype="float32", **settings), seed=1, deterministic=deterministic)


@pytest.fixture
def worker(model: Path, monkeypatch: pytest.MonkeyPatch) -> RewardModelWorker:
    for name, value in {ROLE: "reward_models.toy", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    one = RewardModelWorker(spec_of(model, micro_batch_size=3, max_length=12))
    one.initialize()
    return one


def encoded(text: str) -> list[int]:
    ids: list[int] = make_tokenizer()(text)["input_ids"]
    return ids


def test_texts_of_any_order_and_length_have_the_scores_of_transformers(worker: RewardModelWorker, model: Path) -> None:
    texts = ["1+1=2", "a", "12345678901", "x" * 13, "4 of f: ffff", "1+1=3", ""]
    found, memory = worker.score(texts)
    assert found is not None and memory == {}, "there is no GPU"
    expected = hf_scores(model, [encoded(text) for text in texts if 0 < len(text) <= 12])
    assert [score for score in found if isinstance(score, float)] == pytest.approx(expected, abs=1e-5)
    assert found[3] == "the text has 13 tokens, the reward model reads at most 12 (max_length)"
    assert found[6] == "the text has no tokens"
    assert worker.score([]) == ([], {})


BUDGETS: list[tuple[dict[str, Any], list[list[int]]]] = [
    ({}, [[40, 9, 8, 3, 2, 2]]),
    ({"micro_batch_tokens": 20}, [[40], [9, 8], [3, 2, 2]]),
    ({"micro_batch_tokens": 20, "micro_batch_size": 2}, [[40], [9, 8], [3, 2], [2]]),
    ({"micro_batch_tokens": 1}, [[40], [9], [8], [3], [2], [2]]),
]


@pytest.mark.parametrize(("settings", "expected"), BUDGETS)
def test_a_pass_keeps_within_its_tokens(
    worker: RewardModelWorker, model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: list[list[int]]
) -> None:
    """Padding counts: three texts of 9 tokens would be 27. Scores are the same however they are cut."""
    worker.spec = spec_of(model, **settings)
    worker._tokens = TextTokens(worker.spec)
    strategy = worker.strategy
    assert strategy is not None
    forward, plans = strategy.forward, []

    def seen(batch: DataProto, outputs: list[str], plan: MicroBatchPlan) -> DataProto | None:
        plans.extend(batch.lengths[part].tolist() for part in plan.parts)
        return forward(batch, outputs, plan)

    monkeypatch.setattr(strategy, "forward", seen)
    texts = ["ab", "1+1=2abcd", "x" * 40, "7*8", "12345678", "cd"]
    assert worker.score(texts)[0] == pytest.approx(hf_scores(model, [encoded(text) for text in texts]), abs=1e-5)
    assert plans == expected


def test_an_offloaded_model_comes_back(worker: RewardModelWorker) -> None:
    before = worker.score(["1+1=2"])
    worker.offload([StateGroup.WEIGHTS])
    worker.load([StateGroup.WEIGHTS])
    assert worker.score(["1+1=2"]) == before


def test_memory_is_told_by_phase(worker: RewardModelWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a pass with its weights; after an offload, what stays."""
    gpu, strategy = Gpu(monkeypatch), worker.strategy
    assert strategy is not None
    moved: dict[str, Any] = {
        "forward": lambda *_: gpu.allocate(50) or gpu.allocate(-50),  # type: ignore[func-returns-value]
        "offload": lambda _: gpu.allocate(-70),
        "load": lambda _: gpu.allocate(75),
    }
    for name, move in moved.items():
        monkeypatch.setattr(strategy, name, move)
    gpu.allocate(80)
    assert worker.score(["1+1=2"]) == (None, {"score": {"allocated": 130, "reserved": 260, "device": gpu.elsewhere + 80}})
    assert worker.offload([StateGroup.WEIGHTS]) == {"offload": {"allocated": 80, "reserved": 160, "device": gpu.elsewhere + 10}}
    assert worker.load([StateGroup.WEIGHTS]) == {"load": {"allocated": 85, "reserved": 170, "device": gpu.elsewhere + 85}}


def test_deterministic_scores_do_not_depend_on_who_else_is_scored(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {ROLE: "reward_models.toy", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    one = RewardModelWorker(spec_of(model, deterministic=True))
    one.initialize()
    (alone, _), (together, _) = one.score(["1+1=2"]), one.score(["a" * 50, "1+1=2", "b" * 7])
    assert alone is not None
    assert together is not None
    assert together[1] == alone[0]


def test_padding_at_the_end_is_not_scored(model: Path, worker: RewardModelWorker) -> None:
    """As transformers does with models whose padding token is their end of text."""
    found, _ = worker.score(["1+1=2<eos><pad><pad>"])
    (expected,) = hf_scores(model, [[*encoded("1+1=2"), EOS_ID, PAD_ID, PAD_ID]])
    assert found == pytest.approx([expected], abs=1e-5)


def test_special_tokens_come_once(model: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS_ID)])
    tokenizer.save_pretrained(model)
    tokens = TextTokens(spec_of(model))
    assert tokens.of("1") == [BOS_ID, *encoded("1")]
    assert tokens.of("<bos>1") == [BOS_ID, *encoded("1")]


def test_the_reward_models_own_chat_template(model: Path) -> None:
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    assert "chat template refuses" in str(TextTokens(spec_of(model)).of(messages))
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(model)
    assert TextTokens(spec_of(model)).of(messages) == encoded("<bos>user: 1<eos><bos>assistant: 2<eos>")


def test_the_limit_is_the_models_positions_where_nothing_is_said(model: Path) -> None:
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    tokens = TextTokens(spec_of(model))
    assert len(tokens.of("a" * positions)) == positions
    assert "reads at most" in str(tokens.of("a" * (positions + 1)))
