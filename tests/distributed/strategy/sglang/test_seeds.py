"""Which batches SGLang samples with seeds. Its scheduler's code wants stand-ins for CUDA's packages, so it runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

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


def test_only_batches_with_a_seeded_request_are_sampled_with_seeds() -> None:
    command, environment = [sys.executable, "-W", "ignore", "-c", CODE], os.environ | {"TORCHDYNAMO_DISABLE": "1"}  # as the engine's
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr
    first, again, calls = json.loads(done.stdout.splitlines()[-1])
    before, plain, seeded = first
    assert before is None, "no request has a seed"
    assert len(plain) == 6 and plain[3] == 5 and plain[5] == 2**63 - 1, "a seed stays its request's own"
    assert len(seeded) == 3 and seeded[0] == 7
    drawn = [*plain[:3], plain[4], *seeded[1:]]
    assert len(set(drawn)) == 6 and min(drawn) >= 0
    assert first == again, "workers of one engine sample each for itself, and have to draw the same"
    assert calls == ["sample", "sample", "slow"], "the slow way is for seeds alone"
