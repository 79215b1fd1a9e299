"""Which batches SGLang samples with seeds, and what greedy requests get among sampled ones. Its scheduler's code wants stand-ins for CUDA's
packages, so it runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

CODE = """
from roll_lite.distributed.strategy.sglang.compat import cpu_stubs
cpu_stubs.install()
import json
from types import SimpleNamespace
import torch
import sglang.srt.layers.sampler as sampler
from roll_lite.distributed.strategy.sglang.compat import scheduler

class Info:
    device = "cpu"
    def __init__(self, rows): self.rows, self.sampling_seed = rows, None
    def __len__(self): return self.rows
    @classmethod
    def from_schedule_batch(cls, batch, vocab_size): return cls(len(batch.reqs))
    def merge_batch(self, other):
        self.rows += other.rows
        if self.sampling_seed is not None and other.sampling_seed is not None:  # SGLang's way with what only one side has
            self.sampling_seed = torch.cat([self.sampling_seed, other.sampling_seed])

scheduler.SamplingBatchInfo = Info
scheduler.take_seeds_where_given()

def batch(*seeds):
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    return Info.from_schedule_batch(SimpleNamespace(reqs=reqs), 8)

def seeds(info): return None if info.sampling_seed is None else info.sampling_seed.tolist()

def mixed():
    torch.manual_seed(3)
    plain = batch(None, None)
    plain.merge_batch(batch(None))
    before = seeds(plain)
    plain.merge_batch(batch(5, None, 2**63 - 1))
    seeded = batch(7)
    seeded.merge_batch(batch(None, None))
    return before, seeds(plain), seeds(seeded)

calls, slow = [], sampler.multinomial_with_seed
sampler.multinomial_with_seed = lambda *args: calls.append("slow") or slow(*args)
for info in (batch(None, None), batch(1, None)):
    calls.append("sample")
    probs, positions = torch.full((2, 8), 1 / 8), torch.tensor([0, 0])
    sampler.sampling_from_probs_torch(probs, sampling_seed=info.sampling_seed, positions=positions)
print(json.dumps([mixed(), mixed(), calls]))
"""

GREEDY = """
from roll_lite.distributed.strategy.sglang.compat import cpu_stubs
cpu_stubs.install()
import json
from types import SimpleNamespace
import torch
from roll_lite.distributed.strategy.sglang.compat import scheduler

rows = 64
probs = torch.tensor([0.1, 0.4, 0.1, 0.4]).repeat(rows, 1)
top_k = torch.tensor([1, 1 << 30]).repeat(rows // 2)
info = SimpleNamespace(
    top_ks=top_k, top_ps=torch.full((rows,), 0.8), min_ps=torch.zeros(rows), sampling_seed=None, sampling_mask_batch_indices=None
)
sampler = scheduler.RolloutSampler.__new__(scheduler.RolloutSampler)
tokens, _ = sampler._sample_from_probs(probs, info, torch.zeros(rows, dtype=torch.int64), False)
print(json.dumps([tokens[::2].tolist(), tokens[1::2].tolist(), probs[:2].tolist()]))
"""


def printed(code: str) -> Any:
    command, environment = [sys.executable, "-W", "ignore", "-c", code], os.environ | {"TORCHDYNAMO_DISABLE": "1"}  # as the engine's
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_greedy_requests_take_one_of_tied_tokens_also_among_sampled_ones() -> None:
    greedy, sampled, probabilities = printed(GREEDY)
    assert set(greedy) == {1} and set(sampled) == {1, 3}
    assert probabilities[0] == pytest.approx([0.1, 0.4, 0.1, 0.4]), "log-probs are those of the whole distribution"
    assert probabilities[1] == pytest.approx([0.0, 0.5, 0.0, 0.5])


def test_only_batches_with_a_seeded_request_are_sampled_with_seeds() -> None:
    first, again, calls = printed(CODE)
    before, plain, seeded = first
    assert before is None, "no request has a seed"
    assert len(plain) == 6 and plain[3] == 5 and plain[5] == 2**63 - 1, "a seed stays its request's own"
    assert len(seeded) == 3 and seeded[0] == 7
    drawn = [*plain[:3], plain[4], *seeded[1:]]
    assert len(set(drawn)) == 6 and min(drawn) >= 0
    assert first == again, "workers of one engine sample each for itself, and have to draw the same"
    assert calls == ["sample", "sample", "slow"], "the slow way is for seeds alone"
