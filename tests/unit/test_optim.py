"""Learning-rate schedule, weight-decay groups, and the moving average of weights."""

import itertools
import json
import math
import os
import sys
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from sfumato.algorithms.decay import WarmUp
from sfumato.config.dit import DitTrainConfig
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.optim.optimizer import build_optimizer, lr_at
from sfumato.parallel.mesh import cpu_threads

GOLDEN = json.loads((Path(__file__).parent.parent / "golden" / "data" / "flow_rl.json").read_text(encoding="utf-8"))[
    "V11_schedulers_samplers_ema"
]


def config(**settings) -> DitTrainConfig:
    return DitTrainConfig(output_dir="unused", **settings)


def rates(total_steps: int, **settings) -> list[float]:
    """The rate of every step, and the one that would come after the last."""
    return [lr_at(step, total_steps, config(**settings)) for step in range(total_steps + 1)]


def test_warm_up_is_linear_and_its_first_step_already_learns():
    assert rates(6, lr=0.8, lr_warmup_steps=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.8, 0.8], rel=1e-12)


def test_without_warm_up_the_first_step_has_the_full_rate():
    assert rates(3, lr=0.5) == [0.5] * 4


def test_linear_decay_goes_from_the_warm_up_to_lr_min():
    result = rates(6, lr=1.0, lr_min=0.2, lr_warmup_steps=2, lr_decay_style="linear")
    assert result == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2], rel=1e-12)


def test_cosine_decay_goes_from_the_warm_up_to_lr_min():
    result = rates(10, lr=1.0, lr_min=0.1, lr_warmup_steps=2, lr_decay_style="cosine")
    assert result[2] == 1.0
    assert result[6] == pytest.approx(0.55, rel=1e-12)  # half way: the mean of both
    assert result[4] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)), rel=1e-12)
    assert result[10] == pytest.approx(0.1, rel=1e-12)
    assert all(later < earlier for earlier, later in itertools.pairwise(result[2:]))


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_ratio_leaves_a_plateau_before_it(style):
    result = rates(100, lr=1.0, lr_min=0.01, lr_warmup_steps=10, lr_decay_style=style, lr_decay_ratio=0.3)
    assert set(result[9:71]) == {1.0}
    assert result[71] < 1.0
    assert result[85] == pytest.approx(0.505, rel=1e-12)
    assert result[100] == pytest.approx(0.01, rel=1e-12)


def test_warm_up_longer_than_the_rest_is_never_cut_short():
    result = rates(10, lr=1.0, lr_warmup_steps=8, lr_decay_style="linear", lr_decay_ratio=0.5)
    assert result[7] == result[8] == 1.0
    assert result[9] == pytest.approx(0.5) and result[10] == 0.0


def test_beyond_the_end_the_rate_stays_at_lr_min():
    settings = config(lr=1.0, lr_min=0.25, lr_decay_style="cosine")
    assert lr_at(50, 10, settings) == pytest.approx(0.25, rel=1e-12)


def test_the_optimizer_follows_the_schedule():
    settings = config(lr=0.003, lr_min=0.001, lr_warmup_steps=3, lr_decay_style="cosine")
    module = nn.Linear(2, 2)
    optimizer, schedule = build_optimizer(module, settings, 12)
    used = []
    for _ in range(12):
        module(torch.ones(1, 2)).sum().backward()
        used.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    expected = [lr_at(step, 12, settings) for step in range(12)]
    assert used == [pytest.approx([rate, rate], rel=1e-12) for rate in expected]


def test_matrices_decay_and_vectors_do_not():
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2, bias=False), nn.Linear(2, 2))
    module[3].requires_grad_(False)
    settings = config(lr=0.1, weight_decay=0.5, betas=(0.8, 0.9), eps=1e-5)
    optimizer, _ = build_optimizer(module, settings, 1)
    decay = {id(param): group["weight_decay"] for group in optimizer.param_groups for param in group["params"]}
    expected = {
        "0.weight": 0.5,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "2.weight": 0.5,
    }  # and nothing of the frozen layer
    assert {
        name: decay.get(id(parameter)) for name, parameter in module.named_parameters() if id(parameter) in decay
    } == expected
    assert all(group["betas"] == (0.8, 0.9) and group["eps"] == 1e-5 for group in optimizer.param_groups)

    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, tensor in module.named_parameters():
        factor = 1 - 0.1 * expected.get(name, 0.0)
        torch.testing.assert_close(tensor.detach(), before[name] * factor)


def test_biases_and_norms_of_many_rows_and_rates_of_states_do_not_decay():
    module = nn.Module()
    module.q_norm = nn.LayerNorm((4, 6), bias=False)  # as Command R+ has them
    for name in ("gate_up_proj", "gate_up_proj_bias", "A_log"):  # as gpt-oss' experts and Mamba's mixers name them
        module.register_parameter(name, nn.Parameter(torch.ones(4, 6)))
    optimizer, _ = build_optimizer(module, config(weight_decay=0.5), 1)
    decay = {id(param): group["weight_decay"] for group in optimizer.param_groups for param in group["params"]}
    assert {name: decay[id(param)] for name, param in module.named_parameters()} == {
        "q_norm.weight": 0.0,
        "gate_up_proj": 0.5,
        "gate_up_proj_bias": 0.0,
        "A_log": 0.0,
    }


def test_wsd_falls_by_the_square_root_over_its_last_part():
    actual = rates(20, lr=1.0, lr_min=0.2, lr_warmup_steps=4, lr_decay_style="wsd", lr_decay_ratio=0.5)
    assert actual[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0], rel=1e-12)
    assert set(actual[3:11]) == {1.0}
    expected = [0.2 + 0.8 * (1 - ((step - 10) / 10) ** 0.5) for step in range(10, 21)]
    assert actual[10:] == pytest.approx(expected, rel=1e-12)
    assert actual[20] == 0.2


def test_wsd_without_the_share_that_decays_is_refused():
    with pytest.raises(ValidationError, match=r"needs train\.lr_decay_ratio"):
        config(lr_decay_style="wsd")
    assert config(lr_decay_style="wsd", lr_decay_ratio=1.0).lr_decay_ratio == 1.0  # as the files of earlier runs say


@pytest.mark.parametrize("style", ["constant", "linear", "cosine", "wsd"])
@pytest.mark.parametrize(
    ("total", "warmup", "ratio"), [(1, 0, 1.0), (7, 3, 0.4), (50, 0, 1.0), (50, 20, 0.9), (4, 9, 1)]
)
def test_every_style_starts_above_zero_and_never_decays_below_its_minimum(style, total, warmup, ratio):
    decay = {"lr_min": 0.1, "lr_decay_style": style, "lr_decay_ratio": ratio} if style != "constant" else {}
    result = rates(total, lr=0.3, lr_warmup_steps=warmup, **decay)
    assert result[0] == pytest.approx(0.3 / max(warmup, 1), rel=1e-12)
    assert all(earlier >= later for earlier, later in itertools.pairwise(result[warmup:]))
    assert all(0.1 - 1e-12 <= rate <= 0.3 + 1e-12 for rate in result[warmup:])
    if total > warmup and style != "constant":
        assert result[total] == pytest.approx(0.1, rel=1e-12)


def four_layers() -> nn.Module:
    module = nn.Module()
    module.embed, module.head = nn.Embedding(5, 4), nn.Linear(4, 5)
    module.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    return module


def settings_by_name(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, tuple[float, float]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        names[id(param)]: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for param in group["params"]
    }


def test_each_parameter_follows_the_first_entry_that_matches_its_name():
    entries = [
        {"match": r"^embed", "lr_scale": 0.1},
        {"match": r"layers\.1\.", "lr_scale": 2.0, "weight_decay": 0.7},
        {"match": r"^layers", "weight_decay": 0.0},
    ]
    module = four_layers()
    settings = config(lr=0.01, weight_decay=0.5, param_groups=entries, lr_warmup_steps=2)
    optimizer, schedule = build_optimizer(module, settings, 10)
    expected = {
        "embed.weight": (0.001, 0.5),
        "head.weight": (0.01, 0.5),
        "head.bias": (0.01, 0.0),
        "layers.0.weight": (0.01, 0.0),
        "layers.0.bias": (0.01, 0.0),
        "layers.1.weight": (0.02, 0.7),
        "layers.1.bias": (0.02, 0.7),
    }
    halved = {name: pytest.approx((rate / 2, decay)) for name, (rate, decay) in expected.items()}
    assert settings_by_name(module, optimizer) == halved  # the first of two steps of warm-up
    assert schedule.get_last_lr()[0] == pytest.approx(0.005)  # what is logged is not scaled
    optimizer.step()
    schedule.step()
    assert settings_by_name(module, optimizer) == {name: pytest.approx(value) for name, value in expected.items()}


def test_a_parameter_with_a_rate_of_zero_stays():
    module = four_layers()
    optimizer, _ = build_optimizer(module, config(lr=0.1, param_groups=[{"match": "head", "lr_scale": 0}]), 1)
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    stayed = {name for name, parameter in module.named_parameters() if torch.equal(parameter, before[name])}
    assert stayed == {"head.weight", "head.bias"}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_entries_that_take_nothing_are_named(optimizer):
    module = four_layers()
    module.embed.requires_grad_(False)

    def build(*matches):
        build_optimizer(module, config(optimizer=optimizer, param_groups=[{"match": match} for match in matches]), 1)

    with pytest.raises(ConfigError, match=r"param_groups\.1: 'norm' takes no .* it matches none; there are head\.w"):
        build("head", "norm")
    with pytest.raises(ConfigError, match=r"param_groups\.0: 'embed' takes no trained parameter"):
        build("embed")
    with pytest.raises(ConfigError, match=r"param_groups\.1: 'layers.0' .* entries before it take all 2"):
        build("layers", "layers.0")
    with pytest.raises(ValidationError, match=r"'\(' is not a regular expression: missing \)"):
        build("(")


def test_default_settings_are_plain_adamw_bit_for_bit():
    def trained(make) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
        optimizer, schedule = make(module)
        for step in range(5):
            module(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return [parameter.detach() for parameter in module.parameters()]

    settings = config(lr=0.02, lr_warmup_steps=2, lr_decay_style="cosine", weight_decay=0.1, betas=(0.9, 0.95))

    def plain(module):
        matrices = [parameter for parameter in module.parameters() if parameter.ndim >= 2]
        vectors = [parameter for parameter in module.parameters() if parameter.ndim < 2]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), eps=1e-8)
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_at(step, 5, settings) / 0.02)

    result = trained(lambda module: build_optimizer(module, settings, 5))
    assert all(map(torch.equal, result, trained(plain)))


def test_8_bits_need_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.optim.adam", None)
    monkeypatch.delitem(sys.modules, "sfumato.optim.adamw8bit", raising=False)
    with pytest.raises(MissingDependencyError, match=r"adamw8bit needs torchao: run pip install 'sfumato\[low-memory"):
        build_optimizer(nn.Linear(2, 2), config(optimizer="adamw8bit"), 1)


def test_a_model_of_matrices_alone_has_one_group():
    optimizer, _ = build_optimizer(nn.Linear(2, 2, bias=False), config(), 1)
    assert len(optimizer.param_groups) == 1


def test_ema_decay_is_that_of_flow_grpo():
    for step, expected in GOLDEN["flow_grpo_ema_decay (cap 0.9)"].items():
        assert WarmUp(0.9).at(int(step)) == pytest.approx(expected, rel=1e-8)


def test_ema_follows_the_trace_of_flow_grpo():
    trace = GOLDEN["flow_grpo_ema_trace param=1+0.1*(step+1), interval 8, start 1.0"]
    module = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        module.weight.fill_(1.0)
    ema = Ema(module, decay=0.9, interval=8)
    results = []
    for step in range(len(trace)):
        with torch.no_grad():
            module.weight.fill_(1 + 0.1 * (step + 1))
        ema.update()
        results.append(float(ema.averages["weight"]))
    assert results == pytest.approx(trace, rel=1e-6)
    assert ema.num_updates == len(trace)


def test_ema_averages_only_what_is_trained():
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    assert list(Ema(module, 0.9).averages) == ["weight"]


class Stop(Exception):  # noqa: N818
    """Raised inside a block."""


@pytest.mark.parametrize("raises", [False, True])
def test_applied_shows_the_averages_and_puts_the_weights_back(raises):
    module = nn.Linear(2, 2)
    ema = Ema(module, 0.9)
    average = {name: average.clone() for name, average in ema.averages.items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    weights = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    storage = {name: parameter.data_ptr() for name, parameter in module.named_parameters()}
    try:
        with averaged_weights(ema):
            assert all(torch.equal(parameter, average[name]) for name, parameter in module.named_parameters())
            if raises:
                raise Stop
    except Stop:
        pass
    for name, tensor in module.named_parameters():
        assert torch.equal(tensor, weights[name])
        assert tensor.data_ptr() == storage[name] and tensor.requires_grad
    assert all(torch.equal(value, average[name]) for name, value in ema.averages.items())


def test_without_an_average_the_weights_are_shown_as_they_are():
    with averaged_weights(None):
        pass


def test_weights_that_fsdp_keeps_in_cpu_memory_are_updated_by_one_kernel():
    """With the results of the loop over parameters, but for rounding."""
    results = []
    for offload in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(64, 64)
        optimizer, _ = build_optimizer(module, config(enable_fsdp_offload=offload, weight_decay=0.1), 10)
        assert bool(optimizer.defaults["fused"]) == offload
        for _ in range(3):
            module(torch.ones(1, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(module.weight.detach().clone())
    assert torch.allclose(*results, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("use_gpu", "offload", "num_threads", "threads"),
    [(True, True, None, 4), (True, True, 2, 2), (True, False, None, None), (False, True, None, None)],
)
def test_a_rank_whose_cpu_updates_the_weights_has_its_share_of_threads(
    monkeypatch, use_gpu, offload, num_threads, threads
):
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cpu_threads(config(enable_fsdp_offload=offload, num_threads=num_threads), use_gpu) == threads
