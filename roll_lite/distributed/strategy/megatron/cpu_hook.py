"""Make Megatron-Core run without CUDA: `install()` adds an import hook that rewrites modules.

EXPECTED maps modules to numbers of rewrites. If a number differs (upstream changed), the import fails.
"""

from __future__ import annotations

import marshal
import re
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import version
from importlib.util import cache_from_source
from typing import cast

import torch

from roll_lite.distributed.strategy.megatron import cpu_device

SUPPORTED = ((0, 16, 1), (0, 17, 0))

_STAND_IN = "_roll_lite_cpu_device"
"""Global variable through which rewritten modules reach cpu_device. The loader sets it: an import would shift line numbers."""


@dataclass(frozen=True)
class _Rewrite:
    pattern: re.Pattern[str]
    replacement: str | Callable[[re.Match[str]], str]


_REWRITES = (
    # Type strings of CUDA tensors, compared in optimizer.py, distrib_optimizer.py and clip_grads.py.
    _Rewrite(re.compile(r"""(['"])torch\.cuda\.(Half|Float|BFloat16)Tensor"""), r"\1torch.\2Tensor"),
    # Private helpers in tensor_parallel/random.py that wait for the CUDA driver.
    _Rewrite(re.compile(r"from torch\.cuda import"), f"from {cpu_device.__name__} import"),
    # Copies to the device (grad_scaler.py, optimizer.py, ...); .cpu() does nothing on the host.
    _Rewrite(re.compile(r"\.cuda\((?:non_blocking=True|torch\.cuda\.current_device\(\))?\)"), ".cpu()"),
    # current_device, synchronize, streams, RNG states, nvtx ranges.
    _Rewrite(re.compile(r"\btorch\.cuda\."), f"{_STAND_IN}."),
    # Device literals: torch.zeros(..., device="cuda"), custom_fwd(device_type="cuda"), ...
    _Rewrite(re.compile(r"""(['"])cuda\1"""), '"cpu"'),
    # Pinned host memory needs a GPU.
    _Rewrite(re.compile(r"\bpin_memory=True"), "pin_memory=False"),
    _Rewrite(re.compile(r"\.cpu\(\)\.pin_memory\(\)"), ".cpu()"),
    # moe_utils.py converts the dispatcher's token counts to numpy arrays only on a GPU.
    _Rewrite(
        re.compile(r"if torch\.is_tensor\(tensor\) and tensor\.is_cuda:"),
        "if torch.is_tensor(tensor := tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor) and tensor.is_cuda:",
    ),
    # Exchanges of unequal pieces in mappings.py, which gloo does not support.
    _Rewrite(re.compile(r"\btorch\.distributed\.all_gather\(output_tensor_list"), f"{_STAND_IN}.ragged_all_gather(output_tensor_list"),
    _Rewrite(re.compile(r"\btorch\.distributed\.reduce_scatter\(output, "), f"{_STAND_IN}.ragged_reduce_scatter(output, "),
    # torch.compile of small fusions in jit.py takes minutes on a CPU.
    _Rewrite(re.compile(r"jit_fuser = torch\.compile"), "jit_fuser = noop_decorator"),
)

EXPECTED: dict[str, int] = {
    "dist_checkpointing.exchange_utils": 7,
    "dist_checkpointing.strategies.async_utils": 5,
    "dist_checkpointing.strategies.filesystem_async": 1,
    "dist_checkpointing.strategies.fully_parallel": 3,
    "dist_checkpointing.strategies.state_dict_saver": 2,
    "distributed.distributed_data_parallel": 8,
    "distributed.param_and_grad_buffer": 8,
    "jit": 1,
    "models.common.embeddings.rope_utils": 2,
    "models.common.embeddings.rotary_pos_embedding": 3,
    "models.common.language_module.language_module": 1,
    "models.gpt.gpt_model": 1,
    "optimizer.clip_grads": 6,
    "optimizer.distrib_optimizer": 11,
    "optimizer.grad_scaler": 5,
    "optimizer.optimizer": 14,
    "parallel_state": 5,
    "pipeline_parallel.p2p_communication": 8,
    "pipeline_parallel.schedules": 4,
    "pipeline_parallel.utils": 13,
    "tensor_parallel.layers": 14,
    "tensor_parallel.mappings": 7,
    "tensor_parallel.random": 20,
    "tensor_parallel.utils": 2,
    "timers": 3,
    "transformer.attention": 1,
    "transformer.mlp": 2,
    "transformer.module": 4,
    "transformer.moe.experts": 2,
    "transformer.moe.moe_utils": 3,
    "transformer.moe.router": 6,
    "transformer.moe.shared_experts": 8,
    "transformer.moe.token_dispatcher": 5,
    "transformer.transformer_layer": 2,
    "transformer.utils": 2,
    "utils": 32,
}


def install() -> None:
    _check_version()
    if torch.cuda.is_available() or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = sorted(name for name in sys.modules if name.startswith("megatron.core"))
    if early:
        raise RuntimeError(f"megatron.core was imported ({early[0]}) before roll_lite could prepare it for a machine without CUDA")
    sys.meta_path.insert(0, _Finder())


def rewrite(module: str, source: str) -> str:
    count = 0
    for rule in _REWRITES:
        source, found = rule.pattern.subn(rule.replacement, source)
        count += found
    if count != EXPECTED[module]:
        raise ImportError(
            f"megatron.core.{module}: {count} places needed rewriting for a machine without CUDA, expected {EXPECTED[module]}: "
            f"megatron-core {version('megatron-core')} differs from the version that {__name__} was written for"
        )
    return source


def _check_version() -> None:
    found = version("megatron-core")
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:3])
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise ImportError(f"megatron-core {found} is installed; roll_lite supports {low} up to but not including {high}")


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None) -> ModuleSpec | None:
        if fullname.removeprefix("megatron.core.") not in EXPECTED or not fullname.startswith("megatron.core."):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.origin is None:
            return None
        spec.loader = _Loader(fullname, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> types.CodeType:
        """Compile the rewritten source. Its bytecode is cached apart from Python's .pyc of the original."""
        source = self.get_data(self.path)
        cache = cache_from_source(self.path, optimization="roll0lite")
        key = sha256(source + repr((fullname, self.path, _REWRITES, EXPECTED)).encode()).digest()
        with suppress(OSError, ValueError, EOFError, TypeError):
            cached = self.get_data(cache)
            if cached.startswith(key):
                return cast(types.CodeType, marshal.loads(cached[len(key) :]))
        code = compile(rewrite(fullname.removeprefix("megatron.core."), source.decode()), self.path, "exec", dont_inherit=True)
        if not sys.dont_write_bytecode:
            self.set_data(cache, key + marshal.dumps(code))  # whole or not at all, and silent where it cannot write
        return code

    def exec_module(self, module: types.ModuleType) -> None:
        setattr(module, _STAND_IN, cpu_device)
        super().exec_module(module)
