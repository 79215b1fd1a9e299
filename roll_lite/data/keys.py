"""Declare every column that a batch may have. DataProto refuses others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

import torch


class Kind(Enum):
    ROW = "one number per sample"
    TOKENS = "one entry per token of prompt and response: T"
    TRANSITIONS = "one entry per predicted token, entry t belongs to token t+1: T - 1"
    OBJECT = "one Python object per sample"


@dataclass(frozen=True)
class Key:
    kind: Kind
    dtype: torch.dtype | None
    writer: str
    readers: str


@dataclass(frozen=True)
class Columns:
    reads: tuple[str, ...] = ()
    if_there: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [name for name in (*self.reads, *self.if_there, *self.writes) if name not in KEYS]
        assert not unknown, f"keys.py does not declare {', '.join(unknown)}"

    @property
    def wanted(self) -> set[str]:
        return {*self.reads, *self.if_there}

    def of(self, present: Iterable[str]) -> list[str]:
        held = set(present)
        return list(dict.fromkeys([*self.reads, *(name for name in self.if_there if name in held)]))


KEYS: dict[str, Key] = {
    # identity, one number per row
    "sample": Key(Kind.ROW, torch.int64, "rollout service", "everyone: unique number of a row within its batch"),
    "group": Key(Kind.ROW, torch.int64, "rollout service", "advantages"),
    "index": Key(Kind.ROW, torch.int64, "rollout service", "dumps; with the group, the identity of a sample"),
    "branch": Key(
        Kind.ROW, torch.int64, "rollout service", "everything by sample: 0 for a sample's first row; absent if no sample has several"
    ),
    "prompt_uid": Key(Kind.ROW, torch.int64, "rollout service", "dumps, metrics"),
    "epoch": Key(Kind.ROW, torch.int64, "rollout service", "dumps"),
    "attempt": Key(Kind.ROW, torch.int64, "rollout service", "dumps"),
    "domain": Key(Kind.OBJECT, None, "rollout service", "metrics"),
    "finish_reason": Key(Kind.OBJECT, None, "rollout service", "metrics, masks"),
    # facts about a sample, one number per row
    "prompt_length": Key(Kind.ROW, torch.int64, "rollout service", "metrics"),
    "response_length": Key(Kind.ROW, torch.int64, "rollout service", "metrics: all tokens after the prompt"),
    "cut": Key(Kind.ROW, torch.bool, "rollout service", "GAE: a token limit cut the row's last response, or left no room for another one"),
    "policy_tokens": Key(Kind.ROW, torch.int64, "rollout service", "loss weights: tokens with response_mask 1, beyond the first token"),
    "score": Key(Kind.ROW, torch.float32, "rollout service", "rewards"),
    "correct": Key(Kind.ROW, torch.float32, "rollout service", "metrics"),
    "format_ok": Key(Kind.ROW, torch.float32, "rollout service", "rewards: 1 where the domain's format pattern matches, else 0"),
    "sample_weight": Key(Kind.ROW, torch.float32, "rollout service", "masks: weight that the data gives the prompt, 1 by default"),
    "temperature": Key(Kind.ROW, torch.float32, "rollout service", "log-probs: sampling temperature, by which logits are divided"),
    "baseline_score": Key(Kind.ROW, torch.float32, "rollout service", "ReMax: score of the greedy response to the row's prompt"),
    "max_tokens": Key(Kind.ROW, torch.int64, "driver", "rewards: the domain's limit of the response"),
    "domain_number": Key(Kind.ROW, torch.int64, "driver", "metrics: place of the domain in the configuration"),
    "truncated": Key(Kind.ROW, torch.bool, "driver", "masks: cut at max_tokens, or at max_turns"),
    "reward": Key(Kind.ROW, torch.float32, "driver", "advantages: the shaped score"),
    "train_weight": Key(Kind.ROW, torch.float32, "driver", "losses, whitening: weight of the sample, 0 does not train"),
    "min_version": Key(Kind.ROW, torch.int64, "rollout service", "staleness metrics: oldest weights that sampled it"),
    "max_version": Key(Kind.ROW, torch.int64, "rollout service", "metrics, watch of the weights: newest weights that sampled it"),
    "engine": Key(Kind.ROW, torch.int64, "rollout service", "watch of the weights: engine that sampled it, -1 if several"),
    "loss_weight": Key(Kind.ROW, torch.float32, "driver", "losses: weight of each policy token of the row, from global counts"),
    "ptx_weight": Key(Kind.ROW, torch.float32, "driver", "the actor's loss: weight of each learned token of a supervised row, else 0"),
    # held-out samples only
    "answer": Key(
        Kind.ROW,
        torch.int64,
        "held-out rollouts",
        "majority votes: equal numbers in a group are equal answers; -1: none, -2: not extracted",
    ),
    "parts": Key(Kind.OBJECT, None, "held-out rollouts", "metrics: tuple of the parts of its domain under which it is reported too"),
    # tokens
    "input_ids": Key(Kind.TOKENS, torch.int64, "engine worker", "every forward pass"),
    "response_mask": Key(Kind.TOKENS, torch.bool, "engine worker", "losses, advantages: tokens that the policy chose, EOS included"),
    "experts": Key(Kind.TOKENS, torch.int16, "train strategies", "workers: [T, layers x k] where each token goes in layers with experts"),
    "old_experts": Key(Kind.TOKENS, torch.int16, "actor_train", "routing replay: experts of the pass that took the old log-probs"),
    "rollout_experts": Key(
        Kind.TOKENS, torch.int16, "engine worker", "routing replay: the engine's experts; -1 where it had none, as for the last token"
    ),
    # transitions
    "rollout_log_probs": Key(Kind.TRANSITIONS, torch.float32, "engine worker", "mismatch metrics, old log-probs; 0 where the mask is 0"),
    "turn_rewards": Key(
        Kind.TRANSITIONS, torch.float32, "rollout service", "advantages: an environment's reward on the last token of each response, else 0"
    ),
    "log_probs": Key(Kind.TRANSITIONS, torch.float32, "train strategies", "workers, which name it after its use; 0 where the mask is 0"),
    "entropy": Key(Kind.TRANSITIONS, torch.float32, "train strategies", "workers, which name it after its use; 0 where the mask is 0"),
    "ref_log_probs": Key(Kind.TRANSITIONS, torch.float32, "reference", "KL"),
    "old_log_probs": Key(Kind.TRANSITIONS, torch.float32, "actor_train", "policy loss, KL in the reward"),
    "kept_ids": Key(
        Kind.TRANSITIONS, torch.int32, "engine worker", "log-probs: [T-1, K] tokens that survived truncation, -1 pads, all -1: all tokens"
    ),
    "distribution": Key(Kind.TRANSITIONS, torch.float32, "train strategies", "workers: [T-1, V] log-probs of the whole vocabulary"),
    "ref_distribution": Key(Kind.TRANSITIONS, torch.float32, "reference", "full KL"),
    "old_distribution": Key(Kind.TRANSITIONS, torch.float32, "actor_train", "full KL in the reward"),
    "old_entropy": Key(Kind.TRANSITIONS, torch.float32, "actor_train", "metrics"),
    "values": Key(Kind.TRANSITIONS, torch.float32, "critic", "GAE, value loss; entry t is the value before token t+1 is chosen"),
    "final_value": Key(Kind.ROW, torch.float32, "critic", "GAE: value of the end of the row, for cut ones"),
    "advantages": Key(Kind.TRANSITIONS, torch.float32, "actor_train", "policy loss"),
    "returns": Key(Kind.TRANSITIONS, torch.float32, "actor_train", "value loss"),
}
