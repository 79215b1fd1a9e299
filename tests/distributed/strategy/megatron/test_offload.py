"""The mover alone, under torch's own optimizer: the same claims on a CPU and on a GPU. test_megatron_state.py has it under Megatron's."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_device import LateDevice

from roll_lite.distributed.strategy.base import StateGroup
from roll_lite.distributed.strategy.megatron.optimizer import HostStep, Optimizer
from roll_lite.distributed.strategy.offload import StateMover

WEIGHTS, GRADIENTS, OPTIMIZER = StateGroup
WIDTH = 256
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")]


class Role:
    """Two layers whose gradients lie in one buffer, as Megatron's do, and a third whose gradients are experts'."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))).to(device)
        shared, experts = (torch.zeros(count * WIDTH * WIDTH, device=device) for count in (2, 1))
        for layer, gradient in zip(self.layers, [*shared.chunk(2), experts], strict=True):
            layer.weight.grad = gradient.view(WIDTH, WIDTH)
        self.gradients = [shared, experts]
        self.adam = torch.optim.AdamW(self.layers.parameters(), lr=1e-2)
        own, of_experts = [SimpleNamespace(grad_data=shared)], [SimpleNamespace(grad_data=experts)]
        chunk = SimpleNamespace(parameters=self.layers.parameters, buffers=own, expert_parallel_buffers=of_experts)
        part = SimpleNamespace(optimizer=self.adam, get_parameters=lambda: list(self.layers.parameters()))
        optimizer: Any = SimpleNamespace(parts=[part], on_host=False)
        optimizer.tensors = partial(Optimizer.tensors, optimizer)
        self.mover = StateMover([chunk], optimizer, torch.device(device))
        self.device = device

    def output(self) -> torch.Tensor:
        self.mover.require(WEIGHTS)
        return self.layers(torch.linspace(-1, 1, WIDTH, device=self.device))

    def train(self) -> None:
        self.mover.require_to_write(WEIGHTS, GRADIENTS)
        for gradient in self.gradients:
            gradient.zero_()
        self.output().square().sum().backward()
        self.mover.require_to_write(OPTIMIZER)
        self.adam.step()

    def bytes(self, group: StateGroup) -> int:
        return sum(storage.nbytes() for storage in self.mover._storages(group))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_whatever_leaves_comes_back_as_it_was(device: str) -> None:
    role, undisturbed = Role(device), Role(device)
    role.train(), undisturbed.train()
    matrix = WIDTH * WIDTH * 4
    for groups in ([WEIGHTS], [OPTIMIZER], [GRADIENTS, OPTIMIZER], list(StateGroup)):
        sizes = {group: role.bytes(group) for group in StateGroup}
        steps_too = 3 * 4 if device == "cpu" else 0  # torch counts them on the host
        assert sizes == {WEIGHTS: 3 * matrix, GRADIENTS: 3 * matrix, OPTIMIZER: 6 * matrix + steps_too}
        role.mover.offload(groups)
        assert {group: role.bytes(group) for group in StateGroup} == sizes | dict.fromkeys(groups, 0)
        role.mover.load(groups)
        role.train(), undisturbed.train()
        assert torch.equal(role.output(), undisturbed.output())


def test_what_is_loaded_is_what_there_is_and_has_not_left() -> None:
    """A reference has no gradients and no optimizer."""
    role = Role("cpu")
    role.train()
    assert role.mover.loaded == [WEIGHTS, GRADIENTS, OPTIMIZER]
    role.mover.offload([GRADIENTS, OPTIMIZER])
    assert role.mover.loaded == [WEIGHTS]
    assert StateMover(role.mover._chunks, None, torch.device("cpu")).loaded == [WEIGHTS]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
def test_only_what_was_written_to_is_copied_again_and_into_the_same_memory(device: str) -> None:
    role = Role(device)
    role.train()

    def copied() -> int:
        out = role.mover.offload(StateGroup)["out"]
        role.mover.load(StateGroup)
        return out

    everything = role.bytes(WEIGHTS) + role.bytes(OPTIMIZER)
    assert copied() == everything
    memory = {key: copy.memory for key, copy in role.mover._copies[WEIGHTS].items()}
    role.output()
    assert copied() == 0, "reading changes nothing"
    role.mover.require_to_write(WEIGHTS)
    assert copied() == role.bytes(WEIGHTS)
    role.train()
    assert copied() == everything
    assert all(copy.memory is memory[key] for key, copy in role.mover._copies[WEIGHTS].items())
    role.adam.load_state_dict(role.adam.state_dict())
    role.adam.state = type(role.adam.state)(dict, {key: {n: t.clone() for n, t in own.items()} for key, own in role.adam.state.items()})
    assert copied() == role.bytes(OPTIMIZER), "other storages than before"


def test_copies_wait_for_computation_and_computation_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are still being written are copied when they are, and memory is given back when they are copied."""
    late = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: late)
    role = Role("cpu")
    weight = role.layers[0].weight
    for value in (1.0, 2.0):
        role.mover.require_to_write(WEIGHTS)
        with late.stream(late.main):
            weight.fill_(value)
        role.mover.offload([WEIGHTS])
        role.mover.load([WEIGHTS])
        assert role.mover._stream.queued, "the load goes on in the background"  # type: ignore[attr-defined]
        role.mover.require(WEIGHTS)
        assert bool((weight == value).all())
    role.mover.offload([WEIGHTS])
    with late.stream(late.main):  # what is loaded may get memory that queued work still writes to
        weight.new_empty(1).fill_(0.0)
    role.mover.load([WEIGHTS])
    assert not late.main.queued


def test_a_step_on_the_host_waits_for_gradients_and_the_next_pass_for_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda device: late)
    weights = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    on_host, plain = (torch.optim.AdamW([weight], lr=0.1) for weight in weights)
    step = HostStep(on_host, torch.device("cpu"))
    on_host.state[weights[0]]["step"] = torch.tensor(0.0)
    for weight in weights:
        weight.grad = torch.zeros(4)
    for value in (1.0, -3.0):
        weights[1].grad.fill_(value)  # type: ignore[union-attr]
        plain.step()
        with late.stream(late.main):
            weights[0].grad.fill_(value)  # type: ignore[union-attr]
        step()
        assert torch.allclose(*weights)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_a_gpus_memory_is_given_back_and_the_hosts_is_pinned() -> None:
    role = Role("cuda")
    role.train()
    before = torch.cuda.memory_allocated()
    freed = role.mover.offload(StateGroup)["freed"]
    assert before - torch.cuda.memory_allocated() >= freed > 0
    assert all(copy.memory.is_pinned() for copy in role.mover._copies[WEIGHTS].values() if copy.memory is not None)
    role.mover.load(StateGroup)
    assert torch.cuda.memory_allocated() >= before
