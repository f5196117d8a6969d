"""What roles that share a GPU move away: to the bit the same when it is back, and refused while it is not.

Here device and store are both CPU memory, so nothing is gained, but storages do become empty and are filled again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch
from torch import nn

from sfumato.config.dit import DitTrainConfig
from sfumato.errors import OffloadedError
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.shards import trainable_parameters
from sfumato.runtime.memory import RoleMemory, _plain_tensors, _state_tensors
from tests.dist.cases import CASES, build, make_mesh

CPU = torch.device("cpu")
HAS_TORCHAO = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
OPTIMIZERS = ["adamw", "muon", pytest.param("adamw8bit", marks=[pytest.mark.slow, HAS_TORCHAO])]


class Tied(nn.Module):
    """Two layers with one weight, a view of a part of it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.rows = self.first.weight.detach()[:8]
        self.register_buffer("scale", torch.full((64,), 1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh()) * self.scale + (x[:, :8] @ self.rows).sum()


class Stack(nn.Module):
    """Matrices in a list, which Muon moves, and one outside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 256), nn.Linear(256, 64)])
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers[1](self.layers[0](x).tanh()))


def trained(
    make: Callable[[], nn.Module], name: str, between: Callable[[RoleMemory], object], before_step: bool = False
) -> tuple[list[torch.Tensor], RoleMemory]:
    """All tensors of a module, its average and its optimiser after steps with something between them."""
    torch.manual_seed(0)
    module = make()
    settings = DitTrainConfig(output_dir="unused", optimizer=name, lr=1e-2, weight_decay=0.1)
    optimizer, _ = build_optimizer(module, settings, 20)
    ema = Ema(module, 0.9)
    memory = RoleMemory(module, optimizer, {"average": lambda: ema.averages.values()}, device=CPU)
    for step in range(4):
        between(memory)
        module(torch.randn(4, 64, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        if before_step:
            memory.before_step()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    tensors = [*module.parameters(), *module.buffers(), *ema.averages.values()]
    tensors += [plain for state_tensor in _state_tensors(optimizer) for plain in _plain_tensors(state_tensor)]
    return [tensor.detach().clone() for tensor in tensors], memory


def there_and_back(memory: RoleMemory) -> None:
    freed = memory.before_generation(sampled_here=False)
    assert memory.away == ["parameters", "optimizer", "average"]
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in memory.module.parameters())
    assert all(
        plain.untyped_storage().nbytes() == 0
        for part in _state_tensors(memory.optimizer)
        for plain in _plain_tensors(part)
    )
    brought = memory.before_update()
    assert memory.away == ["optimizer"]
    assert brought + memory.before_step() == freed > 0
    assert memory.away == []


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_to_the_bit(name):
    undisturbed, _ = trained(Stack, name, lambda memory: None)
    moved, _ = trained(Stack, name, there_and_back)
    assert len(moved) == len(undisturbed) > 12
    assert all(torch.equal(a, b) for a, b in zip(moved, undisturbed, strict=True))


def test_tied_weights_and_views_move_once_and_stay_tied():
    undisturbed, _ = trained(Tied, "adamw", lambda memory: None)
    moved, memory = trained(Tied, "adamw", there_and_back)
    assert all(torch.equal(a, b) for a, b in zip(moved, undisturbed, strict=True))
    module = memory.module
    assert module.second.weight is module.first.weight
    assert module.rows.data_ptr() == module.first.weight.data_ptr()
    assert memory.offload("parameters") == 4 * (64 * 64 + 64 + 64 + 64)


def test_adapters_on_a_frozen_model():
    def outcome(between):
        module = build("sd3", lora=True)
        case = CASES["sd3"]
        optimizer = torch.optim.AdamW(trainable_parameters(module).values(), lr=1e-2)
        memory = RoleMemory(module, optimizer, device=CPU)
        for step in range(3):
            between(memory)
            loss, count = case.loss(module, case.row(step), make_mesh()[0])
            (loss / count).backward()
            memory.before_step()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in module.parameters()]

    def away(memory):
        freed = memory.before_generation(sampled_here=False)
        assert freed >= sum(parameter.numel() * 4 for parameter in memory.module.parameters()) > 0
        memory.before_update()

    assert all(torch.equal(a, b) for a, b in zip(outcome(away), outcome(lambda memory: None), strict=True))


def test_phases_move_what_the_next_one_does_not_need():
    seen = []

    def phases(memory):
        for parameter in memory.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        memory.before_generation(sampled_here=True, keep=["average"])
        seen.append(memory.away)
        assert all(parameter.grad is None for parameter in memory.module.parameters())
        memory.module(torch.ones(1, 64))  # the role samples
        assert memory.before_update() == 0
        seen.append(memory.away)

    moved, memory = trained(Stack, "adamw", phases, before_step=True)
    undisturbed, _ = trained(Stack, "adamw", lambda memory: None)
    assert seen == [["optimizer"]] * 8
    assert all(torch.equal(a, b) for a, b in zip(moved, undisturbed, strict=True))
    assert memory.parts == ["parameters", "optimizer", "average"] and memory.away == []


def test_what_is_away_is_refused_instead_of_read():
    _, memory = trained(Stack, "adamw", lambda memory: None)
    module, optimizer = memory.module, memory.optimizer
    assert memory.offload("parameters", "parameters") > 0
    uses = [lambda: module(torch.ones(1, 64)), optimizer.step, module.state_dict]
    for use in uses:
        with pytest.raises(OffloadedError, match=r"part 'parameters' .* call onload\('parameters'\)"):
            use()
    optimizer.state_dict()  # its state is here
    assert memory.offload("parameters") == 0
    memory.onload("parameters")
    memory.offload("optimizer")
    module(torch.ones(1, 64)), module.state_dict()
    for use in (optimizer.step, optimizer.state_dict):
        with pytest.raises(OffloadedError, match="part 'optimizer'"):
            use()
    assert memory.onload("optimizer") > 0 == memory.onload("optimizer")
    for use in (*uses, optimizer.state_dict):
        use()
    for verb in (memory.offload, memory.onload):
        with pytest.raises(KeyError, match="gradients"):
            verb("gradients")
    assert memory.away == []


def test_memory_that_torch_cannot_free_stays():
    import numpy as np

    module = nn.Linear(2, 2)
    foreign = torch.from_numpy(np.arange(4, dtype=np.float32))
    memory = RoleMemory(module, None, {"foreign": lambda: [foreign]}, device=CPU)
    assert memory.offload("foreign") == 0 and foreign.tolist() == [0, 1, 2, 3]
    elsewhere = RoleMemory(module, None, device=torch.device("cuda"))
    assert elsewhere.drop_gradients() is None and module.weight.device == CPU
