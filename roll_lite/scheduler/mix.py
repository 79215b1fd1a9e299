"""Divide a batch's groups among domains, and a domain's prompts among its files. Shares are exact over a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm
from typing import Any

from roll_lite.data.prompts import SAME_DATA, PromptOrder


class DomainMix:
    """Divides groups by Tijdeman's rule: after n groups, a domain's count differs from share * n by less than one."""

    def __init__(self, shares: Mapping[str, float]) -> None:
        # Through the decimal text, so that 0.1 means one tenth.
        fractions = {name: Fraction(str(share)) for name, share in shares.items()}
        scale = lcm(*(fraction.denominator for fraction in fractions.values()))
        self._weights = {name: int(fraction * scale) for name, fraction in fractions.items()}
        self._total_weight = sum(self._weights.values())
        self._counts = dict.fromkeys(shares, 0)
        self._places = 0

    @property
    def shares(self) -> dict[str, float]:
        return {name: weight / self._total_weight for name, weight in self._weights.items()}

    def places(self, count: int) -> list[str]:
        return [self._give() for _ in range(count)]

    def _give(self) -> str:
        name = self._next()
        self._counts[name] += 1
        self._places += 1
        return name

    def _next(self) -> str:
        if len(self._weights) == 1:
            return next(iter(self._weights))
        # Let d = 2 * (number of domains) - 2. A domain is eligible for place t once share * t - count >= 1/d. The eligible domain that
        # would first fall behind by 1 - 1/d is served. All terms are multiplied by d * total weight, to stay in integers.
        slack = 2 * len(self._weights) - 2
        best: str | None = None
        best_deadline = Fraction(0)
        for name, weight in self._weights.items():
            lead = slack * (weight * (self._places + 1) - self._counts[name] * self._total_weight)
            if lead < self._total_weight:
                continue
            deadline = Fraction((slack - 1) * self._total_weight - lead, weight)
            if best is None or deadline < best_deadline:
                best, best_deadline = name, deadline
        assert best is not None, "Tijdeman's rule always has a candidate"
        return best

    def state_dict(self) -> dict[str, Any]:
        return {"weights": dict(self._weights), "counts": dict(self._counts), "places": self._places}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore counts; they start at zero if domains or shares differ."""
        if state["weights"] == self._weights:
            self._counts = dict(state["counts"])
            self._places = state["places"]


@dataclass(frozen=True)
class _Batch:
    places: list[str]
    after: dict[str, Any]


class BatchPlan:
    """Plan of coming batches: groups per domain, which domain starts next. `least`: minimum groups per batch and domain."""

    def __init__(self, shares: Mapping[str, float], least: Mapping[str, int] | None = None) -> None:
        self.size = 0
        self._mix = DomainMix(shares)
        self._shares = dict(shares)
        self._least = {name: count for name, count in (least or {}).items() if count}
        self._handed_out = self._mix.state_dict()
        self._open: dict[str, deque[int]] = {name: deque() for name in shares}
        """{domain: planned groups whose prompt has not started, numbered across batches}."""
        self._places = 0
        self._planned: deque[_Batch] = deque()
        self.charged = 0
        self._names = list(shares)

    @property
    def shares(self) -> dict[str, float]:
        return self._mix.shares

    def admit(self, most: Mapping[str, int]) -> tuple[str, int] | None:
        """Take the next planned group without a started prompt whose number is below its domain's limit in `most`; return (domain,
        number)."""
        while not (first := [(places[0], name) for name, places in self._open.items() if places and places[0] < most[name]]):
            if self._places >= max(most.values()):
                return None
            self._plan()
        place, name = min(first)
        self._open[name].popleft()
        self.charged += 1
        return name, place

    def has_open(self, domain: str, most: int) -> bool:
        """True if one of the run's first `most` groups still needs a prompt of this domain."""
        places = self._open[domain]
        return bool(places) and places[0] < most

    def next_quota(self) -> dict[str, int]:
        if not self._planned:
            self._plan()
        batch = self._planned.popleft()
        self._handed_out = batch.after
        given = Counter(batch.places)
        return {name: given[name] for name in self._names}

    def turns_until(self, domain: str, most: int) -> int:
        """Return how many batches ahead the domain's next groups are (1: the next batch); `most` + 1 if the next `most` have none."""
        while len(self._planned) < most and not self.exhausted and not any(domain in batch.places for batch in self._planned):
            self._plan()
        return next((turn for turn, batch in enumerate(self._planned, 1) if domain in batch.places), most + 1)

    def drop(self, domain: str) -> None:
        """Remove a domain without further prompts. Planned batches shrink; later, other domains take its share."""
        if domain in self._shares:
            del self._shares[domain]
            self._least.pop(domain, None)
            self._mix = DomainMix(self._shares)

    @property
    def ahead(self) -> int:
        return len(self._planned)

    @property
    def exhausted(self) -> bool:
        return not self._shares

    def _plan(self) -> None:
        places = self._mix.places(self.size)
        counts = Counter(places)
        for name, least in self._least.items():
            while counts[name] < least:
                giver = max(self._shares, key=lambda other: counts[other] - self._least.get(other, 0))
                places[len(places) - 1 - places[::-1].index(giver)] = name
                counts.update({giver: -1, name: 1})
        self._planned.append(_Batch(places, self._mix.state_dict()))
        for name in places:
            self._open[name].append(self._places)
            self._places += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last requested batch: a resumed run restarts prompts of later batches."""
        return self._handed_out

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mix.load_state_dict(state)
        self._handed_out = self._mix.state_dict()


class MixedOrder:
    """Prompt order of a domain with several files, mixed by shares. Each file has its own epochs, at most `epochs`."""

    def __init__(self, parts: Sequence[int], shares: Sequence[float], seed: int, domain: str, epochs: int | None = None) -> None:
        self._domain = domain
        self._starts = [0, *accumulate(parts)]
        self._orders = {str(place): PromptOrder(count, seed, f"{domain}/{place}") for place, count in enumerate(parts)}
        self._shares = dict(zip(self._orders, shares, strict=True))
        self._epochs = epochs
        self._mix = self._mix_left()

    def _mix_left(self) -> DomainMix:
        goes_on = {name for name, order in self._orders.items() if self._epochs is None or order.next_epoch < self._epochs}
        return DomainMix({name: share for name, share in self._shares.items() if name in goes_on})

    @property
    def epoch(self) -> int:
        return max(order.epoch for order in self._orders.values())

    @property
    def next_epoch(self) -> int:
        return min(order.next_epoch for order in self._orders.values())

    def next(self) -> tuple[int, int]:
        """Draw the next prompt: (its file's epoch, row number in all files concatenated)."""
        (name,) = self._mix.places(1)
        epoch, index = self._orders[name].next()
        if self._orders[name].next_epoch == self._epochs:
            self._mix = self._mix_left()
        return epoch, self._starts[int(name)] + index

    def state_dict(self) -> dict[str, Any]:
        return {"mix": self._mix.state_dict(), "parts": {name: order.state_dict() for name, order in self._orders.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the order. Shares may differ, but not files."""
        if state.get("parts", {}).keys() != self._orders.keys():
            raise ValueError(f"domain {self._domain}: the checkpoint's prompts came from other files. {SAME_DATA}")
        for name, order in self._orders.items():
            order.load_state_dict(state["parts"][name])
        self._mix = self._mix_left()
        self._mix.load_state_dict(state["mix"])
