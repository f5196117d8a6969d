"""Muon against torch's own, its choice of parameters, and its state in checkpoints."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.saving import Saving
from sfumato.checkpoint.state import TrainState, load_state
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import ConfigError
from sfumato.optim.muon import Muon, hidden_matrices, orthogonalise
from sfumato.optim.optimizer import build_optimizer
from tests.dist.cases import CASES, build, make_mesh
from tests.tiny import DEVICE


def config(**settings) -> DitTrainConfig:
    return DitTrainConfig(output_dir="unused", **{"optimizer": "muon", **settings})


class Layers(nn.Module):
    """Matrices of several shapes in a list, and what stands outside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 12)
        self.layers = nn.ModuleList([nn.Linear(12, 30), nn.Linear(30, 7), nn.Linear(7, 7, bias=False), nn.LayerNorm(7)])
        self.head = nn.Linear(7, 11, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = functional.gelu(layer(hidden))
        return self.head(hidden)


def train(module: nn.Module, *optimizers: torch.optim.Optimizer, num_steps: int = 4, start: int = 0) -> None:
    for step in range(start, start + num_steps):
        ids = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(step)).to(DEVICE)
        module(ids).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        module.zero_grad()


def layers() -> Layers:
    torch.manual_seed(0)
    return Layers().to(DEVICE)


def test_bf16_steps_are_those_of_torch_bit_for_bit():
    matrices = ["layers.0.weight", "layers.1.weight", "layers.2.weight"]
    truth, actual = layers(), layers()
    hidden = [parameter for name, parameter in truth.named_parameters() if name in matrices]
    others = [parameter for name, parameter in truth.named_parameters() if name not in matrices]
    muon = torch.optim.Muon(hidden, lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    train(truth, muon, torch.optim.AdamW(others, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), eps=1e-8))

    parameters = dict(actual.named_parameters())
    groups = [
        {"params": [parameters[name] for name in matrices], "orthogonal": True},
        {"params": [parameter for name, parameter in parameters.items() if name not in matrices], "orthogonal": False},
    ]
    settings = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8}
    train(actual, Muon(groups, compute_dtype=torch.bfloat16, **settings))
    for name, parameter in truth.named_parameters():
        assert torch.equal(parameters[name], parameter), name


def test_on_a_cpu_the_steps_run_in_float32():
    module, settings = layers().cpu(), config(lr=0.02, weight_decay=0.1)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    optimizer, _ = build_optimizer(module, settings, 1)
    for index, tensor in enumerate(module.parameters()):
        tensor.grad = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index))
    optimizer.step()
    for name in ("layers.0.weight", "layers.1.weight"):
        parameter = module.get_parameter(name)
        direction = parameter.grad * (0.05 + 0.95 * 0.05)  # momentum 0.05 G, and Nesterov's step ahead
        expected = before[name].double() * (1 - 0.02 * 0.1)
        expected -= 0.02 * 0.2 * math.sqrt(30) * newton_schulz(direction.double())
        torch.testing.assert_close(parameter.double(), expected, rtol=0, atol=1e-6)


def newton_schulz(matrix: torch.Tensor) -> torch.Tensor:
    """The polynomial of the singular values themselves."""
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ torch.diag(values) @ right


@pytest.mark.parametrize("shape", [(20, 20), (8, 40), (40, 8), (5, 12, 9), (3, 9, 12)])
def test_singular_values_become_about_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    result = orthogonalise(matrices)
    assert result.shape == shape
    values = torch.linalg.svdvals(result)
    assert values.max() < 1.3
    wide = torch.linalg.svdvals(matrices) > 0.02 * matrices.norm(dim=(-2, -1), keepdim=True)[..., 0]
    assert values[wide].min() > 0.6
    if len(shape) == 3:  # each expert on its own
        for matrix, orthogonal in zip(matrices, result, strict=True):
            torch.testing.assert_close(orthogonalise(matrix), orthogonal, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(orthogonalise(matrices.mT), result.mT, rtol=1e-4, atol=1e-5)


def test_a_matrix_of_zeros_stays_finite():
    assert torch.equal(orthogonalise(torch.zeros(3, 4)), torch.zeros(3, 4))


def test_what_is_hidden_in_a_language_model():
    module = build("moe")
    trained = set(dict(module.named_parameters()))
    result = hidden_matrices(module)
    assert trained - result == {
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        *(name for name in trained if "norm" in name),
    }
    assert {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.gate.weight"} <= result


def test_what_is_hidden_in_a_diffusion_transformer():
    for kind, block in (("sd3", "transformer_blocks."), ("flux", "transformer_blocks."), ("wan", "blocks.")):
        module = build(kind)
        result = hidden_matrices(module)
        linear = {f"{name}.weight" for name, layer in module.named_modules() if isinstance(layer, nn.Linear)}
        assert result == {name for name in linear if block in name}, kind  # no patch embedding, no final projection
    assert "blocks.0.scale_shift_table" in dict(build("wan").named_parameters())  # three-dimensional, but no experts


def test_adapters_are_left_to_adamw_and_muon_then_has_nothing_to_do():
    module = build("dense", lora=True)
    with pytest.raises(ConfigError, match=r"muon: Qwen3ForCausalLM trains no matrices .*model\.lora.*take adamw"):
        build_optimizer(module, config(), 1)
    module.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    optimizer, _ = build_optimizer(module, config(), 1)
    (orthogonal,) = [param_group for param_group in optimizer.param_groups if param_group["orthogonal"]]
    assert [id(param) for param in orthogonal["params"]] == [id(module.model.layers[0].mlp.up_proj.weight)]


def test_transposed_experts_move_as_their_transpose():
    """Scale and steps do not depend on which of the two dimensions is the input."""
    results = []
    for transpose in (False, True):
        weight = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(0))
        weight = nn.Parameter(weight.mT.contiguous() if transpose else weight)
        optimizer = Muon([{"params": [weight], "orthogonal": True}], lr=0.1)
        for step in range(3):
            gradient = torch.randn(4, 6, 10, generator=torch.Generator().manual_seed(step))
            weight.grad = gradient.mT.contiguous() if transpose else gradient
            optimizer.step()
        results.append(weight.mT if transpose else weight)
    torch.testing.assert_close(*results, rtol=0, atol=1e-5)


def test_groups_rates_and_schedule():
    module = layers()
    entries = [{"match": r"layers\.1", "lr_scale": 0.0}]
    settings = config(lr=0.1, param_groups=entries, lr_warmup_steps=2, weight_decay=0.3)
    optimizer, schedule = build_optimizer(module, settings, 4)
    before = module.layers[1].weight.detach().clone()
    for _ in range(4):
        train(module, optimizer, num_steps=1)
        schedule.step()
    assert torch.equal(module.layers[1].weight, before)
    assert {group["lr"] for group in optimizer.param_groups} == {0.1, 0.0}


def test_state_dict_goes_on_as_if_nothing_had_happened():
    truth = layers()
    optimizer, _ = build_optimizer(truth, config(lr=0.02), 8)
    train(truth, optimizer)
    other = copy.deepcopy(truth)
    resumed, _ = build_optimizer(other, config(lr=0.02), 8)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for module, its_optimizer in ((truth, optimizer), (other, resumed)):
        train(module, its_optimizer, start=4)
    for name, parameter in truth.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    for parameter in truth.parameters():
        state = optimizer.state[parameter]
        assert all(value.ndim == 0 or value.shape == parameter.shape for value in state.values())
    assert set(optimizer.state[truth.layers[0].weight]) == {"momentum_buffer"}
    assert set(optimizer.state[truth.embed.weight]) == {"step", "exp_avg", "exp_avg_sq"}


def test_a_checkpoint_goes_on_with_the_same_bits(tmp_path):
    mesh, _ = make_mesh()
    truth, other = layers(), layers()
    optimizer, schedule = build_optimizer(truth, config(lr=0.02), 8)
    train(truth, optimizer)
    saving = Saving(tmp_path, TrainState(truth, optimizer, schedule, step=4), mesh)
    saving.write()
    saving.finish(keep=1)
    resumed, again = build_optimizer(other, config(lr=0.02), 8)
    load_state(TrainState(other, resumed, again), StoredCheckpoint(tmp_path / "global_step_4"), mesh)
    for module, its_optimizer in ((truth, optimizer), (other, resumed)):
        train(module, its_optimizer, start=4)
    for name, parameter in truth.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name


def test_it_learns_at_the_rate_of_adamw():
    module, (mesh, _) = build("dense"), make_mesh()
    optimizer, _ = build_optimizer(module, config(lr=3e-3), 30)
    losses = []
    for _ in range(30):
        loss, count = CASES["dense"].loss(module, CASES["dense"].row(0), mesh)
        (loss / count).backward()
        losses.append(float(loss.detach()) / count)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > 4
    assert losses[-1] < 0.6
