"""Muon on every mesh against one plain process, and groups of parameters over pipeline stages."""

import functools
import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from sfumato.config.dit import DitTrainConfig
from sfumato.errors import ConfigError
from sfumato.optim.optimizer import build_optimizer, saved_shard
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.pipeline import build_pipeline
from sfumato.parallel.plan import ParallelPlan
from sfumato.parallel.shards import Shards, local_shard
from tests.dist import cases
from tests.dist.cases import CASES, Outcome, build, difference, make_mesh, train

TOLERANCE = 1e-5
DDP = {"data_parallel_mode": "ddp"}
MODES = {
    "ddp": (2, "dense", DDP),
    "fsdp2": (4, "dense", {}),
    "fsdp2, experts": (2, "moe", {}),
    "hsdp": (4, "moe", {"data_parallel_replicate_size": 2}),
    "tp": (2, "dense", {"tensor_parallel_size": 2, **DDP}),
    "tp, experts": (2, "moe", {"tensor_parallel_size": 2, **DDP}),
    "fsdp2 x tp": (4, "dense", {"tensor_parallel_size": 2}),
    "fsdp2 x tp, experts": (4, "moe", {"tensor_parallel_size": 2}),
    "ep": (2, "moe", {"expert_parallel_size": 2}),
    "ep x efsdp": (4, "moe", {"expert_parallel_size": 2}),
    "ep x efsdp, replicated": (4, "moe", {"expert_parallel_size": 2, "data_parallel_replicate_size": 2}),
    "pp x fsdp2": (4, "moe", {"pipeline_parallel_size": 2}),
    "fsdp2 x tp, fused matrices": (4, "flux", {"tensor_parallel_size": 2}),
    "fsdp2, uneven shards": (4, "wan", {}),
}


def train_with_muon(kind: str, **config: Any) -> Outcome:
    """Three steps of ``tests.dist.cases.train`` with another optimiser."""
    settings = DitTrainConfig(output_dir="unused", optimizer="muon", lr=1e-2, eps=1e-4, weight_decay=0.1)
    modules: list[nn.Module] = []

    def remember(module: nn.Module) -> dict[str, nn.Parameter]:
        modules.append(module)
        return trainable(module)

    def muon(parameters: Any) -> torch.optim.Optimizer:
        del parameters
        return build_optimizer(modules[-1], settings, 3)[0]

    trainable = cases.trainable_parameters
    with mock.patch.object(cases, "trainable_parameters", remember), mock.patch.object(cases, "adamw", muon):
        return train(kind, **config)


@functools.cache
def truth(kind: str) -> Outcome:
    return train_with_muon(kind)


SLOW = ("fsdp2 x tp, fused matrices", "fsdp2 x tp, experts", "fsdp2, uneven shards", "ep x efsdp, replicated")


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=pytest.mark.slow if mode in SLOW else ()) for mode in MODES])
def test_muon_equals_one_process(mode, ranks):
    num_ranks, kind, config = MODES[mode]
    for outcome in ranks.run(num_ranks, functools.partial(train_with_muon, kind, **config)):
        assert difference(outcome, truth(kind)) < TOLERANCE


def state_of(kind: str, **config: Any) -> list[str]:
    """Parameters whose state does not lie as they do."""
    mesh, parsed = make_mesh(**config)
    module = parallelize(build(kind), mesh, parsed, CASES[kind].plan(build(kind)))
    settings = DitTrainConfig(output_dir="unused", optimizer="muon")
    optimizer, _ = build_optimizer(module, settings, 1)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return [
        f"{name}/{key}"
        for name, parameter in module.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if value.ndim
        and not (
            isinstance(value, DTensor) and (value.placements, value.shape) == (parameter.placements, parameter.shape)
        )
    ]


def test_state_lies_where_the_parameter_lies(ranks):
    assert ranks.run(4, functools.partial(state_of, "moe", expert_parallel_size=2)) == [[]] * 4


def fsdp1_message() -> str:
    mesh, parsed = make_mesh(data_parallel_mode="fsdp1")
    module = build("dense")
    module = parallelize(module, mesh, parsed, CASES["dense"].plan(module))
    with pytest.raises(ConfigError) as caught:
        build_optimizer(module, DitTrainConfig(output_dir="unused", optimizer="muon", data_parallel_mode="fsdp1"), 1)
    return str(caught.value)


def test_flat_pieces_are_refused(ranks):
    message = "train.optimizer muon needs whole matrices, which the flat shards of train.data_parallel_mode fsdp1"
    for text in ranks.run(2, fsdp1_message):
        assert text.startswith(message)


def groups_of_stages() -> tuple[list[str], str]:
    """Parameters at a tenth of the rate in this rank's stage, and the message for an entry that no stage uses."""
    config = {"pipeline_parallel_size": 2, **DDP}
    mesh, parsed = make_mesh(**config)
    module = build("dense")
    stage = build_pipeline(module, mesh, parsed, CASES["dense"].plan(module)).module
    entries = [{"match": "embed_tokens", "lr_scale": 0.1}]
    settings = DitTrainConfig(output_dir="unused", param_groups=entries, **config)
    optimizer, _ = build_optimizer(stage, settings, 1, mesh)
    names = {id(parameter): name for name, parameter in stage.named_parameters()}
    slow = [names[id(param)] for group in optimizer.param_groups if group["lr"] < 5e-5 for param in group["params"]]
    entries.append({"match": "no_such_layer"})
    with pytest.raises(ConfigError) as caught:
        build_optimizer(stage, DitTrainConfig(output_dir="unused", param_groups=entries, **config), 1, mesh)
    return slow, str(caught.value)


def test_groups_are_looked_up_in_all_stages(ranks):
    (first, message), (last, _) = ranks.run(2, groups_of_stages)
    assert first == ["model.embed_tokens.weight"]
    assert last == []
    assert message.startswith("train.param_groups.1: 'no_such_layer' takes no trained parameter")


def step_in_8_bits(num_before: int, **config: Any) -> dict[str, torch.Tensor]:
    """Whole weights after six steps, the state being saved and put back after some of them.

    Gradients are given: eight bits would turn the last bit of a sum over ranks into a visible one.
    """
    mesh, parsed = make_mesh(**config)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(256, 64), nn.GELU(), nn.Linear(512, 20, bias=False))
    module = parallelize(module, mesh, parsed, ParallelPlan(blocks=("GELU",)))
    settings = DitTrainConfig(output_dir="unused", optimizer="adamw8bit", lr=1e-2, weight_decay=0.1)
    optimizer, _ = build_optimizer(module, settings, 6)
    shards = Shards(module, mesh)
    for step in range(6):
        generator = torch.Generator().manual_seed(step)
        for name, parameter in shards.parameters.items():
            if step == num_before:
                saved = {key: saved_shard(value) for key, value in optimizer.state[parameter].items() if value.ndim}
                for key, value in saved.items():
                    optimizer.state[parameter][key] = shards.shard(name, shards.whole(name, value)).clone()
            parameter.grad = torch.zeros_like(parameter)
            whole = torch.randn(shards.shapes[name], generator=generator)
            local_shard(parameter.grad).copy_(shards.shard(name, whole).view(local_shard(parameter).shape))
        optimizer.step()
    assert "OptimState8bit" in {type(value["exp_avg"]).__name__ for value in optimizer.state.values()}
    return {name: shards.whole(name, local_shard(parameter.detach())) for name, parameter in shards.parameters.items()}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("config", [DDP, {}], ids=["ddp", "fsdp2"])
def test_8_bits_equal_one_process_and_are_saved_exactly(config, ranks):
    truth = step_in_8_bits(num_before=6)
    for num_before in (6, 3):
        for actual in ranks.run(2, functools.partial(step_in_8_bits, num_before, **config)):
            for name, value in truth.items():
                assert torch.equal(actual[name], value), name
