"""AdamW in 8 bits: near AdamW, small, and exact when it is saved and loaded."""

import pytest
import torch
from torch import nn

from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState, load_state
from sfumato.config.dit import DitTrainConfig
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from tests.tiny import DEVICE, MESH_DEVICE

pytest.importorskip("torchao")

from sfumato.optim.adamw8bit import BLOCK, compress_state

pytestmark = pytest.mark.slow


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Linear(64, 10)).to(DEVICE)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, schedule, steps: range) -> None:
    for step in steps:
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        (module(batch) - batch[:, :10].roll(1)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


def build(name: str) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
    module = model()
    settings = DitTrainConfig(output_dir="unused", optimizer=name, lr=3e-3, lr_warmup_steps=2, weight_decay=0.1)
    return module, *build_optimizer(module, settings, 20)


def test_it_stays_near_adamw_with_a_quarter_of_the_state():
    (module, optimizer, schedule), (truth, exact, plain) = build("adamw8bit"), build("adamw")
    train(module, optimizer, schedule, range(20))
    train(truth, exact, plain, range(20))
    assert schedule.get_last_lr() == plain.get_last_lr()
    start = dict(model().named_parameters())
    for name, parameter in truth.named_parameters():
        moved = (parameter - start[name]).norm()
        assert 0 < (module.get_parameter(name) - parameter).norm() < 0.2 * moved or parameter.numel() < 4096, name
    state = optimizer.state[module[0].weight]["exp_avg"]
    assert state.codes.dtype == torch.uint8
    assert state.codes.nbytes + state.scale.nbytes < 0.27 * module[0].weight.nbytes
    assert type(optimizer.state[module[3].weight]["exp_avg"]) is torch.Tensor  # 640 elements


@pytest.mark.parametrize("is_signed", [True, False])
@pytest.mark.parametrize("scale", [1e-20, 1e-9, 1.0, 1e6])
def test_what_is_decompressed_has_the_bits_it_came_from(is_signed, scale):
    values = torch.randn(64, 4 * BLOCK, generator=torch.Generator().manual_seed(0)) * scale
    values *= torch.logspace(-9, 0, 4 * BLOCK)
    values[3] = 0
    values = values if is_signed else values.square()
    first = compress_state(values, values, is_signed)
    second = compress_state(first.dequantize(), values, is_signed)
    assert torch.equal(first.codes, second.codes)
    assert torch.equal(first.scale, second.scale)
    blocks = values.view(-1, BLOCK)
    error = (first.dequantize().view(-1, BLOCK) - blocks).abs().amax(1)
    assert (error <= 0.02 * blocks.abs().amax(1) + 1e-12).all()


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path):
    mesh = Mesh(Layout(), MESH_DEVICE)
    truth, optimizer, schedule = build("adamw8bit")
    train(truth, optimizer, schedule, range(8))
    saving = Saving(tmp_path, TrainState(truth, optimizer, schedule, step=8), mesh)
    saving.write()
    saving.finish(keep=1)
    module, resumed, again = build("adamw8bit")
    load_state(TrainState(module, resumed, again), StoredCheckpoint(tmp_path / "global_step_8"), mesh)
    train(truth, optimizer, schedule, range(8, 14))
    train(module, resumed, again, range(8, 14))
    for name, parameter in truth.named_parameters():
        assert torch.equal(module.get_parameter(name), parameter), name
