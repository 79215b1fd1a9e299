"""Unbiased estimates of pass@k, best@k and maj@k from n samples per prompt."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from math import comb

import numpy as np

NO_ANSWER, READS_NONE = -1, -2
"""Sentinels: the response has no answer; the reward function extracts no answers."""


def every_k(most: int) -> list[int]:
    """Values of k to report, ascending: `most` and smaller powers of two, without 1 (pass@1 is the mean correctness)."""
    return sorted({*(2**power for power in range(1, most.bit_length())), most} - {1})


def accuracy_error(prompts: np.ndarray, correct: np.ndarray) -> float:
    """Standard error of the mean of `correct`, clustered by prompt; NaN for one prompt. `prompts`: each sample's prompt."""
    _, number = np.unique(prompts, return_inverse=True)
    deviations = np.bincount(number, weights=correct - correct.mean())
    count = len(deviations)
    return math.sqrt(count / (count - 1) * float(np.square(deviations).sum())) / len(correct) if count > 1 else math.nan


class SampledPrompts:
    """Samples sorted by prompt. Methods return one value per prompt, NaN if it has fewer than k samples."""

    def __init__(self, prompts: np.ndarray, correct: np.ndarray, scores: np.ndarray, answers: np.ndarray) -> None:
        """`answers`: each sample's answer number, from 0 (equal for equal answers to a prompt), or NO_ANSWER, or READS_NONE."""
        _, numbers = np.unique(prompts, return_inverse=True)
        order = np.argsort(numbers, kind="stable")
        self.prompt = numbers[order]
        """Prompt of each sample, numbered 0 to P - 1, ascending."""
        self.correct, self.scores = correct[order].astype(np.float64), scores[order].astype(np.float64)
        self.answers = answers[order]
        self.samples = np.bincount(self.prompt)
        self.first = order[np.cumsum(self.samples) - self.samples]
        """[P]: index of a sample of each prompt in `__init__`'s arrays."""
        self.place = np.arange(len(order)) - (np.cumsum(self.samples) - self.samples)[self.prompt]

    def passed(self, k: int) -> np.ndarray:
        right = np.bincount(self.prompt, weights=self.correct).astype(np.int64)
        pairs, which = np.unique(np.stack([self.samples, right]), axis=1, return_inverse=True)
        values = [1 - comb(n - c, k) / comb(n, k) if n >= k else np.nan for n, c in pairs.T.tolist()]
        return np.array(values)[which.reshape(-1)]

    def best(self, k: int) -> np.ndarray:
        """Expected highest score among k samples of each prompt."""
        sizes, which = np.unique(self.samples, return_inverse=True)
        weights = np.full((len(sizes), int(self.samples.max(initial=0))), np.nan)
        for row, n in enumerate(sizes.tolist()):
            if n >= k:
                # Of the C(n, k) choices of k samples, C(i - 1, k - 1) have the i-th lowest sample as their highest.
                weights[row, :n] = [comb(i, k - 1) / comb(n, k) for i in range(n)]
        return np.bincount(self.prompt, weights=self._ascending * weights[which[self.prompt], self.place])

    @cached_property
    def _ascending(self) -> np.ndarray:
        return self.scores[np.lexsort((self.scores, self.prompt))]

    def majority(self, k: int) -> np.ndarray:
        """Share of each prompt's majority votes won by a correct answer (maj@k). Each k consecutive samples hold a vote; those without an
        answer abstain. Ties count their mean correctness. NaN if the reward extracts no answers."""
        votes = self.samples // k
        first_vote = np.cumsum(votes) - votes
        vote = first_vote[self.prompt] + self.place // k
        counted = (self.place < (votes * k)[self.prompt]) & (self.answers >= 0)
        # A party: samples of a vote with the same answer.
        answers = int(self.answers.max(initial=0)) + 1
        parties, party, sizes = np.unique(vote[counted] * answers + self.answers[counted], return_inverse=True, return_counts=True)
        value = np.bincount(party, weights=self.correct[counted], minlength=len(parties)) / sizes
        of_vote = parties // answers
        largest = np.zeros(int(votes.sum()), dtype=np.int64)
        np.maximum.at(largest, of_vote, sizes)
        won = sizes == largest[of_vote]
        winners = np.bincount(of_vote[won], minlength=len(largest))
        outcome = np.bincount(of_vote[won], weights=value[won], minlength=len(largest)) / np.maximum(winners, 1)
        total = np.bincount(np.repeat(np.arange(len(votes)), votes), weights=outcome, minlength=len(votes))
        reads = np.bincount(self.prompt, weights=self.answers != READS_NONE) > 0
        return np.where((votes > 0) & reads, total / np.maximum(votes, 1), np.nan)


AT_K: dict[str, Callable[[SampledPrompts, int], np.ndarray]] = {
    "pass": SampledPrompts.passed,
    "best": SampledPrompts.best,
    "maj": SampledPrompts.majority,
}
