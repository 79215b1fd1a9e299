from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from roll_lite.config.schema.models import ModelConfig, RewardModelConfig
from roll_lite.data.microbatch import MicroBatchPlanner, PaddedBudget, RowsAtATime, TokenBudget
from roll_lite.data.proto import DataProto
from roll_lite.data.ragged import Ragged
from roll_lite.data.templates import load_tokenizer
from roll_lite.distributed.failures import MemberLost
from roll_lite.distributed.strategy.base import ForwardStrategy, ModelSpec, RankLayout, StateGroup
from roll_lite.distributed.strategy.build import build_model
from roll_lite.distributed.worker import Worker, freeze_heap
from roll_lite.observability.device_memory import MemoryPeaks, PeaksByPhase
from roll_lite.rewards.model import ScoredText


@dataclass(frozen=True)
class RewardModelSpec:
    name: str
    config: RewardModelConfig
    seed: int
    deterministic: bool

    @property
    def path_key(self) -> str:
        return f"reward_models.{self.name}.path"

    @property
    def model_spec(self) -> ModelSpec:
        return ModelSpec(
            ModelConfig(path=self.config.path, dtype=self.config.dtype),
            self.config.strategy,
            self.path_key,
            value_init="reward_model",
            seed=self.seed,
            deterministic=self.deterministic,
        )


class NotInitialized(MemberLost):
    """Error: the process was restarted and has no model yet."""


class RewardModelWorker(Worker):
    """Rank of a reward model. Its death does not end the run: Ray restarts it, the rollout service initializes it again."""

    watched: ClassVar[bool] = False
    max_restarts: ClassVar[int] = -1
    strategy: ForwardStrategy | None = None

    def __init__(self, spec: RewardModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self._memory = MemoryPeaks()

    def initialize(self) -> RankLayout:
        torch.manual_seed(self.spec.seed)
        self._tokens = TextTokens(self.spec)
        strategy = build_model(self.spec.model_spec)
        if strategy.needs_process_group:
            self.init_process_group()
        with self._memory.of("start"):
            strategy.initialize()
        self.strategy = strategy
        freeze_heap()
        return strategy.layout

    def score(self, texts: Sequence[ScoredText]) -> tuple[list[float | str] | None, PeaksByPhase]:
        """Return each text's score, or why it has none, and the rank's GPU memory by phase since the last answer. All ranks of a model copy
        call this; only the head returns scores."""
        strategy = self._initialized()
        tokens = [self._tokens.of(text) for text in texts]
        with self._memory.of("score"):
            scores = self._scores(strategy, [ids for ids in tokens if not isinstance(ids, str)])
        found = iter(scores or [])
        results = None if scores is None else [ids if isinstance(ids, str) else next(found) for ids in tokens]
        return results, self._memory.take()

    def load(self, groups: Sequence[StateGroup]) -> PeaksByPhase:
        with self._memory.of("load"):
            self._initialized().load(groups)
        return self._memory.take()

    def offload(self, groups: Sequence[StateGroup]) -> PeaksByPhase:
        with self._memory.of("offload"):
            self._initialized().offload(groups)
        return self._memory.take()

    def _initialized(self) -> ForwardStrategy:
        if self.strategy is None:
            raise NotInitialized(f"reward model {self.spec.name}: its process has been started again, and has no model yet")
        return self.strategy

    def _scores(self, strategy: ForwardStrategy, rows: list[list[int]]) -> list[float] | None:
        batch = DataProto(
            {
                "input_ids": Ragged.from_rows([torch.tensor(row, dtype=torch.int64) for row in rows], torch.int64),
                "response_mask": Ragged.from_rows([torch.zeros(len(row), dtype=torch.bool) for row in rows], torch.bool),
            }
        )
        limits = self.spec.config.micro_batch_tokens, self.spec.config.micro_batch_size
        planner: MicroBatchPlanner
        if self.spec.deterministic:  # a score's last digits depend on the other rows of its pass
            planner = RowsAtATime(1)
        elif strategy.pads_rows:
            planner = PaddedBudget(*limits)
        else:
            planner = TokenBudget(*limits, strategy.layout.attention_parity_tokens)
        # Each copy takes texts on its own, so a pass needs no agreement with other copies.
        plan = strategy.plan(batch.lengths, planner, together=False)
        outputs = strategy.forward(batch, ["final_value"], plan)
        return None if outputs is None else outputs.tensor("final_value").tolist()


class TextTokens:
    def __init__(self, spec: RewardModelSpec) -> None:
        self._tokenizer: Any = load_tokenizer(spec.config.path, spec.path_key)
        raw = json.loads((spec.config.path / "config.json").read_text(encoding="utf-8"))
        self._limit = spec.config.max_length or raw.get("max_position_embeddings")
        self._padding = raw.get("pad_token_id")

    def of(self, text: ScoredText) -> list[int] | str:
        """Return token ids, or why the text cannot be scored. Messages get special tokens from the chat template, plain text from the
        tokenizer (unless it starts with BOS)."""
        tokenizer = self._tokenizer
        try:
            if isinstance(text, str):
                add = not (tokenizer.bos_token and text.startswith(tokenizer.bos_token))
            else:
                text, add = tokenizer.apply_chat_template(text, tokenize=False), False
            ids = list(tokenizer(text, add_special_tokens=add, return_attention_mask=False, verbose=False)["input_ids"])
        except Exception as error:  # the model's chat template may raise anything
            return f"the reward model's chat template refuses the messages: {error}"
        # Like transformers: the output of the last non-padding token.
        while len(ids) > 1 and ids[-1] == self._padding:
            ids.pop()
        if not ids:
            return "the text has no tokens"
        if self._limit is not None and len(ids) > self._limit:
            return f"the text has {len(ids)} tokens, the reward model reads at most {self._limit} (max_length)"
        return ids
