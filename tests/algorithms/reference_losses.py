"""The losses as their papers write them, one token after the other in Python floats. Imports nothing of roll_lite.

A batch is a list of rows; a row is a list of its policy tokens only (what is masked is not there). Where a paper stops the gradient,
the function takes the numbers at which that part is frozen, so that differences of its value are the gradient that is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LIMIT = 20.0


def limited(x: float, low: float, high: float) -> float:
    return low if x < low else high if x > high else x


@dataclass(frozen=True)
class Row:
    """The policy tokens of a sample. `frozen`: the new log-probs wherever a paper writes stop-gradient."""

    new: list[float]
    old: list[float]
    advantages: list[float]
    frozen: list[float]

    def log_ratios(self) -> list[float]:
        return [limited(n - o, -LIMIT, LIMIT) for n, o in zip(self.new, self.old, strict=True)]

    def beyond(self, number: int) -> tuple[bool, bool]:
        """Whether a token's log-ratio lies beyond the limit below or above: constant there, without a slope."""
        log_ratio = self.frozen[number] - self.old[number]
        return log_ratio < -LIMIT, log_ratio > LIMIT

    def frozen_log_ratios(self) -> list[float]:
        return [limited(n - o, -LIMIT, LIMIT) for n, o in zip(self.frozen, self.old, strict=True)]

    def advantage(self) -> float:
        return sum(self.advantages) / len(self.advantages)


@dataclass(frozen=True)
class Token:
    loss: float
    ratio: float
    low: bool = False
    high: bool = False


def surrogate(ratio: float, advantage: float, low: float, high: float) -> Token:
    """Schulman et al. 2017, equation 7, negated."""
    loss = -min(ratio * advantage, limited(ratio, 1 - low, 1 + high) * advantage)
    return Token(loss, ratio, advantage < 0 and ratio < 1 - low, advantage > 0 and ratio > 1 + high)


def without_slope(row: Row, tokens: list[Token], factors: Sequence[float]) -> list[Token]:
    """The tokens, those beyond the limit of log-ratios marked as well, unless they are marked or have the factor 0."""
    marked = []
    for number, (token, factor) in enumerate(zip(tokens, factors, strict=True)):
        low, high = row.beyond(number)
        counts = factor != 0 and not (token.low or token.high)
        marked.append(Token(token.loss, token.ratio, token.low or (counts and low), token.high or (counts and high)))
    return marked


def ppo(row: Row, low: float, high: float, dual: float | None = None) -> list[Token]:
    tokens = []
    for log_ratio, a in zip(row.log_ratios(), row.advantages, strict=True):
        token = surrogate(math.exp(log_ratio), a, low, high)
        if dual is not None and a < 0 and token.ratio > dual:  # Ye et al. 2019, equation 5: max(min(...), c * A)
            token = Token(-dual * a, token.ratio, False, True)
        tokens.append(token)
    return without_slope(row, tokens, row.advantages)


def gspo(row: Row, low: float, high: float) -> list[Token]:
    """Zheng et al. 2025, equations 5 and 7."""
    s = math.exp(sum(row.log_ratios()) / len(row.new))
    return without_slope(row, [surrogate(s, row.advantage(), low, high)] * len(row.new), [row.advantage()] * len(row.new))


def gmpo(row: Row, log_low: float, log_high: float) -> list[Token]:
    """Zhao et al. 2025, equation 4: the product over tokens of min(r * A, clip(r) * A), by absolute value, to the power 1 / n."""
    a = row.advantage()
    product, tokens = 1.0, []
    for log_ratio in row.log_ratios():
        r = math.exp(log_ratio)
        product *= abs(min(r * a, limited(r, math.exp(-log_low), math.exp(log_high)) * a)) ** (1 / len(row.new))
        tokens.append((r, a < 0 and log_ratio < -log_low, a > 0 and log_ratio > log_high))
    loss = -math.copysign(product, a)
    return without_slope(row, [Token(loss, r, low, high) for r, low, high in tokens], [a] * len(tokens))


def cispo(row: Row, low: float | None, high: float) -> list[Token]:
    """MiniMax-M1, equations 4 and 5: sg(clip(r)) * A * log pi."""
    tokens = []
    for log_ratio, new, a in zip(row.frozen_log_ratios(), row.new, row.advantages, strict=True):
        r = math.exp(log_ratio)
        floor = 0.0 if low is None else 1 - low
        tokens.append(Token(-limited(r, floor, 1 + high) * a * new, r, a != 0 and r < floor, a != 0 and r > 1 + high))
    return tokens


def topr(row: Row, positive: tuple[float, float], negative: tuple[float, float]) -> list[Token]:
    """Le Roux et al. 2025, equation 7: [pi / mu] of the sequence, limited by the reward's sign, times reward times grad log pi."""
    ratio = math.exp(limited(sum(row.frozen_log_ratios()), -LIMIT, LIMIT))
    tokens = []
    for new, a in zip(row.new, row.advantages, strict=True):
        low, high = positive if a > 0 else negative
        counts = a != 0 and low != high  # a single number is no range: the ratio is not in the loss
        tokens.append(Token(-limited(ratio, low, high) * a * new, ratio, counts and ratio < low, counts and ratio > high))
    return tokens


def sapo(row: Row, tau_positive: float, tau_negative: float) -> list[Token]:
    """Gao et al. 2025, equation 6: sigmoid(tau * (r - 1)) * 4 / tau."""
    tokens = []
    for log_ratio, a in zip(row.log_ratios(), row.advantages, strict=True):
        tau, r = tau_positive if a > 0 else tau_negative, math.exp(log_ratio)
        tokens.append(Token(-4 / tau / (1 + math.exp(-tau * (r - 1))) * a, r))
    return without_slope(row, tokens, row.advantages)


def policy_gradient(row: Row) -> list[Token]:
    return [Token(-a * new, math.exp(x)) for new, a, x in zip(row.new, row.advantages, row.log_ratios(), strict=True)]


def raft(row: Row) -> list[Token]:
    return [Token(-new if a > 0 else 0.0, math.exp(x)) for new, a, x in zip(row.new, row.advantages, row.log_ratios(), strict=True)]


def kimi(row: Row, tau: float) -> list[Token]:
    """Kimi k1.5, equation 2 with the baseline in place of tau * log Z, over 2 * tau."""
    loss = (row.advantage() - tau * sum(row.log_ratios())) ** 2 / (2 * tau)
    return without_slope(row, [Token(loss, math.exp(x)) for x in row.log_ratios()], [1.0] * len(row.new))


def mismatch_weights(
    old: Sequence[float], rollout: Sequence[float], level: str, mode: str, low: float, high: float
) -> list[tuple[float, bool]]:
    """Weight and whether it was outside of the range, of each token of a row."""
    logs = [limited(o - r, -LIMIT, LIMIT) for o, r in zip(old, rollout, strict=True)]
    if level == "sequence":
        logs = [limited(sum(logs), -LIMIT, LIMIT)] * len(logs)
    elif level == "geometric":
        logs = [sum(logs) / len(logs)] * len(logs)
    weights = [math.exp(x) for x in logs]
    inside = [low <= w <= high for w in weights]
    if mode == "truncate":
        return [(limited(w, low, high), not ok) for w, ok in zip(weights, inside, strict=True)]
    return [(w if ok else 0.0, not ok) for w, ok in zip(weights, inside, strict=True)]


def mismatch_numbers(trained: Sequence[float], rollout: Sequence[float], level: str, estimator: str) -> list[float]:
    """What a filter looks at, of each token of a row."""
    logs = [limited(t - r, -LIMIT, LIMIT) for t, r in zip(trained, rollout, strict=True)]
    if estimator == "ratio":
        numbers = logs
    elif estimator == "difference":
        numbers = [math.exp(t) - math.exp(r) for t, r in zip(trained, rollout, strict=True)]
    else:
        numbers = [kl_value(-log, 0.0, estimator) for log in logs]
    if level != "token":
        of_row = {"sum": sum(numbers), "mean": sum(numbers) / len(numbers), "min": min(numbers), "max": max(numbers)}
        numbers = [of_row[level.removeprefix("sequence_")]] * len(numbers)
    return [math.exp(limited(number, -LIMIT, LIMIT)) for number in numbers] if estimator == "ratio" else numbers


def kl_value(new: float, ref: float, estimator: str) -> float:
    """Schulman, "Approximating KL divergence"."""
    r = new - ref
    return {"k1": r, "k2": r * r / 2, "k3": math.exp(-r) - 1 + r, "abs": abs(r)}[estimator]


def kl_full(log_p: Sequence[float], log_q: Sequence[float]) -> float:
    return sum(math.exp(p) * (p - q) for p, q in zip(log_p, log_q, strict=True) if p > -math.inf)


def value_loss(value: float, old: float, target: float, clip: float | None) -> float:
    """Half the larger of both squared errors."""
    error = (value - target) ** 2
    return error / 2 if clip is None else max(error, (limited(value, old - clip, old + clip) - target) ** 2) / 2


def token_weights(lengths: Sequence[int], mode: str, constant: int = 0, train: Sequence[float] | None = None) -> list[float]:
    """What each policy token of a row weighs."""
    train = [1.0] * len(lengths) if train is None else train
    counted = [n for n, w in zip(lengths, train, strict=True) if n > 0 and w != 0]
    weights = []
    for n, w in zip(lengths, train, strict=True):
        if n == 0 or w == 0:
            weights.append(0.0)
            continue
        denominator = {
            "token_mean": sum(counted),
            "sequence_mean_token_mean": len(counted) * n,
            "sequence_mean_token_sum": len(counted),
            "constant": len(counted) * constant,
        }[mode]
        weights.append(w / denominator)
    return weights


def central_differences(function: Callable[[list[float]], float], at: list[float], step: float = 1e-6) -> list[float]:
    gradient = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return gradient
