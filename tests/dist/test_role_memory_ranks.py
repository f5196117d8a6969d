"""Moving sharded weights and optimiser state away between steps changes no bit of training."""

import functools
import importlib.util

import pytest
import torch

from sfumato.config.dit import DitTrainConfig
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.gradients import reduce_and_clip
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.runtime.memory import RoleMemory, _plain_tensors
from tests.dist.cases import CASES, build, make_mesh, weights_of

MODES = {
    "fsdp2, adapters": ({}, "adamw", True),
    "fsdp2, Muon": ({}, "muon", False),
    "fsdp2, 8 bits": ({}, "adamw8bit", False),
    "fsdp2 without resharding": ({"enable_reshard_after_forward": False}, "adamw", False),
    "fsdp1": ({"data_parallel_mode": "fsdp1"}, "adamw", False),
    "tp": ({"data_parallel_mode": "ddp", "tensor_parallel_size": 2}, "muon", False),
}
SLOW = ("fsdp2, 8 bits", "fsdp2 without resharding", "tp")


def train(move: bool, config: dict, optimizer_name: str, lora: bool) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Weights after three steps, and the bytes that were moved before each."""
    mesh, parsed = make_mesh(**config)
    case = CASES["dense"]
    module = build("dense", lora)
    module = parallelize(module, mesh, parsed, case.plan(module))
    settings = DitTrainConfig(output_dir="unused", optimizer=optimizer_name, lr=1e-2, weight_decay=0.1)
    optimizer, _ = build_optimizer(module, settings, 3)
    memory, freed = RoleMemory(module, optimizer, device=mesh.device), []
    for step in range(3):
        rows = [case.row(8 * step + index) for index in mesh.range_of_rank(4)]
        if move:
            with torch.no_grad():  # a role that samples leaves weights gathered
                case.loss(module, rows[0], mesh)
            freed.append(memory.before_generation(sampled_here=False))
            assert memory.before_generation(sampled_here=False) == 0
            assert not any(
                plain.untyped_storage().nbytes()
                for parameter in module.parameters()
                for plain in _plain_tensors(parameter)
            )
            assert memory.before_update() + (memory.before_step() if step % 2 else 0) > 0
        for row in accumulate(module, rows):
            loss, count = case.loss(module, row, mesh)
            (loss / count).backward()
        reduce_and_clip(module, 1.0, mesh, "step")
        memory.before_step()
        optimizer.step()
        optimizer.zero_grad()
    weights, frozen = weights_of(module)
    return weights | frozen, freed


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.slow if mode in SLOW else ()) for mode in MODES])
def test_training_goes_on_to_the_bit(mode, ranks):
    if "8 bits" in mode and not importlib.util.find_spec("torchao"):
        pytest.skip("torchao is not installed")
    undisturbed = ranks.run(2, functools.partial(train, False, *MODES[mode]))
    moved = ranks.run(2, functools.partial(train, True, *MODES[mode]))
    for (weights, freed), (truth, _) in zip(moved, undisturbed, strict=True):
        assert weights.keys() == truth.keys() and all(torch.equal(weights[name], truth[name]) for name in truth)
        assert freed[1] > freed[0] > 0  # from the second step on there is optimiser state
