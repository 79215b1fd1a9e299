"""The stand-ins for SGLang's GPU packages: complete where they are wanted, and nowhere else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from roll_lite.distributed.strategy.sglang.compat import cpu_stubs


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nobody_finds_them_unless_they_are_installed() -> None:
    found = run(
        "import importlib.util as u, roll_lite.distributed.strategy.sglang\n"
        "print([name for name in ('triton', 'sgl_kernel', 'torchvision') if u.find_spec(name)])"
    )
    assert found == "[]"


def test_they_import_decorate_and_stay_out_of_the_way() -> None:
    found = run(
        "from roll_lite.distributed.strategy.sglang.compat import cpu_stubs; cpu_stubs.install(); cpu_stubs.install()\n"
        "import triton, triton.language as tl, sgl_kernel, torch\n"
        "from transformers.utils import is_torchvision_available\n"
        "@triton.jit\n"
        "def kernel(n: tl.constexpr): return n\n"
        "@triton.autotune(configs=[triton.Config({}, num_warps=4)], key=['n'])\n"
        "@triton.jit\n"
        "def other(n): return n + 1\n"
        "try:\n"
        "    import vllm\n"
        "except ModuleNotFoundError: print('no vllm', end=' ')\n"
        "print(kernel(3), other(3), is_torchvision_available(), hasattr(torch.ops.sgl_kernel, 'convert_weight_packed'))"
    )
    assert found == "no vllm 3 4 False False"


def test_they_refuse_a_machine_with_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="must not be installed where CUDA is"):
        cpu_stubs.install()


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0, of whole blocks, after Austin Appleby's text."""
    hashed = 0
    for start in range(0, len(data), 4):
        block = int.from_bytes(data[start : start + 4], "little") * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        hashed ^= block
        hashed = ((hashed << 13 | hashed >> 19) * 5 + 0xE6546B64) % 2**32
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B % 2**32
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 % 2**32
    return hashed ^ hashed >> 16


def test_the_hash_behind_seeds() -> None:
    assert murmur3(b"test") == 0xBA6BD213, "a published value"
    seeds, positions, columns = torch.tensor([3, 2**63 - 25, 2**40 + 1]), torch.tensor([0, 9, 70_000]), torch.arange(5)
    hashed = cpu_stubs.murmur_hash32(seeds.to(torch.uint64), positions, columns)
    assert hashed.dtype == torch.uint32
    for row in range(3):
        for column in range(5):
            data = int(seeds[row]).to_bytes(8, "little") + int(positions[row]).to_bytes(4, "little") + column.to_bytes(4, "little")
            assert int(hashed[row, column]) == murmur3(data)
