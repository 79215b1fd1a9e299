import subprocess
import sys
from pathlib import Path

import pytest
import torch

from roll_lite.distributed.strategy.megatron import cpu_device, cpu_hook

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the hook does nothing where CUDA is available")


def source_of(module: str) -> str:
    import importlib.util

    found = importlib.util.find_spec("megatron")
    assert found is not None
    assert found.submodule_search_locations is not None
    return (Path(next(iter(found.submodule_search_locations))) / "core" / f"{module.replace('.', '/')}.py").read_text()


def without_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if not isinstance(finder, cpu_hook._Finder)])


@pytest.mark.parametrize("module", sorted(cpu_hook.EXPECTED))
def test_every_listed_module_is_freed_of_cuda(module: str) -> None:
    source = source_of(module)
    rewritten = cpu_hook.rewrite(module, source)
    for gone in ("torch.cuda.", '"cuda"', "'cuda'", ".cuda(", "pin_memory=True"):
        assert gone not in rewritten, gone
    assert rewritten.count("\n") == source.count("\n"), "tracebacks must keep their line numbers"


def test_another_number_of_rewrites_fails_and_names_the_module() -> None:
    source = source_of("parallel_state") + "\ntorch.cuda.synchronize()\n"
    with pytest.raises(ImportError, match=r"megatron\.core\.parallel_state: 6 places needed rewriting.*expected 5"):
        cpu_hook.rewrite("parallel_state", source)


@pytest.mark.parametrize("found", ["0.15.3", "0.16.0", "0.17.0", "1.0.0"])
def test_other_versions_are_refused(monkeypatch: pytest.MonkeyPatch, found: str) -> None:
    monkeypatch.setattr(cpu_hook, "version", lambda name: found)
    with pytest.raises(
        ImportError, match=rf"megatron-core {found} is installed; roll_lite supports 0\.16\.1 up to but not including 0\.17\.0"
    ):
        cpu_hook.install()


def test_too_late_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_hook(monkeypatch)
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(RuntimeError, match=r"megatron\.core was imported"):
        cpu_hook.install()


def test_with_cuda_nothing_is_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    without_hook(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    cpu_hook.install()
    assert sys.meta_path == before


@pytest.mark.nightly
def test_torch_and_the_rest_of_megatron_are_left_alone() -> None:
    program = """
import torch
before = {name: id(getattr(torch.cuda, name)) for name in dir(torch.cuda)}
import roll_lite.distributed.strategy.megatron
import megatron.core.tensor_parallel.random as rewritten, megatron.core.enums as untouched
assert before == {name: id(getattr(torch.cuda, name)) for name in before}
assert type(rewritten.__loader__).__module__.startswith("roll_lite")
assert type(untouched.__loader__).__module__ == "importlib._bootstrap_external" or "importlib" in type(untouched.__loader__).__module__
state = torch.get_rng_state()
rewritten.model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
with rewritten.get_cuda_rng_tracker().fork():
    first = torch.rand(2)
with rewritten.get_cuda_rng_tracker().fork():
    assert not torch.equal(first, torch.rand(2)), "the stream must go on"
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


def test_the_stand_in_offers_nothing_it_does_not_have() -> None:
    assert not hasattr(cpu_device, "memory_stats")
    assert cpu_device.current_device() == torch.device("cpu")
