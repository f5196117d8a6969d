"""Adapters of every variant on every mesh against one plain process, or refused; and whole again in files."""

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError
from sfumato.models.lora import (
    add_lora,
    is_adapter_name,
    language_targets,
    merge_adapters,
    save_adapter,
    start_magnitudes,
)
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.shards import all_parameters, gather_whole
from sfumato.parallel.weights import build_on_meta, load_weights, whole_weights
from tests.dist import cases
from tests.dist.cases import CASES, Outcome, difference, make_mesh, packed_row, train

TOLERANCES = {"dense": 1e-6, "moe": 1e-5}
"""Dense models compute in float64, since the larger updates of these variants amplify float32's rounding; kernels of
experts know float32 only."""
DDP = {"data_parallel_mode": "ddp"}
EXPERTS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
DORA, RSLORA = {"variant": "dora"}, {"variant": "rslora"}
EXACT = {
    "dora, ddp": (2, "dense", DORA, DDP),
    "dora, fsdp1": (2, "dense", DORA, {"data_parallel_mode": "fsdp1"}),
    "dora, fsdp2": (4, "dense", DORA, {}),
    "dora, hsdp": (4, "dense", DORA, {"data_parallel_replicate_size": 2}),
    "dora, fsdp2, recomputed": (2, "dense", DORA, {"activation_checkpointing": "full"}),
    "dora, ulysses": (2, "dense", DORA, {"ulysses_parallel_size": 2}),
    "dora, ep": (2, "moe", DORA, {"expert_parallel_size": 2}),
    "dora, pp": (2, "dense", DORA, {"pipeline_parallel_size": 2, **DDP}),
    "rslora, tp": (2, "dense", RSLORA, {"tensor_parallel_size": 2, **DDP}),
    "rslora, fsdp2 x tp": (4, "dense", RSLORA, {"tensor_parallel_size": 2}),
    "lokr, ddp": (2, "dense", {"variant": "lokr"}, DDP),
    "loha, fsdp2, recomputed": (2, "dense", {"variant": "loha"}, {"activation_checkpointing": "full"}),
    "oft, fsdp2": (2, "dense", {"variant": "oft"}, {}),
    "lokr, ulysses": (2, "dense", {"variant": "lokr"}, {"ulysses_parallel_size": 2}),
    "experts, ddp": (2, "moe", EXPERTS, DDP),
    "experts, fsdp2": (4, "moe", EXPERTS, {}),
    "experts, fsdp2, recomputed": (2, "moe", EXPERTS, {"activation_checkpointing": "full"}),
    "experts, hsdp x ring": (4, "moe", EXPERTS, {"data_parallel_replicate_size": 2, "context_parallel_size": 2}),
    "experts, pp": (2, "moe", EXPERTS, {"pipeline_parallel_size": 2, **DDP}),
}
REFUSED = {
    "dora, tp": ("dense", DORA, {"tensor_parallel_size": 2, **DDP}, "tensor parallelism cuts plain LoRA adapters only"),
    "lokr, tp": (
        "dense",
        {"variant": "lokr"},
        {"tensor_parallel_size": 2, **DDP},
        "tensor parallelism cuts plain LoRA adapters only",
    ),
    "experts, tp": ("moe", EXPERTS, {"tensor_parallel_size": 2, **DDP}, "model.lora.target_parameters"),
    "experts, ep": ("moe", EXPERTS, {"expert_parallel_size": 2}, "model.lora.target_parameters"),
}


def adapt(module: nn.Module, config: dict[str, Any]) -> nn.Module:
    """Adds adapters whose second matrices are not zero, so that all have gradients."""
    scale = {} if config.get("variant") == "oft" else {"alpha": 8.0}
    add_lora(module, LoraConfig(**{"rank": 4, **scale, **config}), language_targets(module), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1, generator=generator)
            elif is_adapter_name(name) and ".lora_" not in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return module


def train_adapters(kind: str, lora: dict[str, Any], config: dict[str, Any]) -> Outcome:
    def build(kind: str, lora_of_case: bool) -> nn.Module:
        del lora_of_case
        module = adapt(CASES[kind].build(), lora)
        return module.double() if kind == "dense" else module

    with mock.patch.object(cases, "build", build):
        return train(kind, **config)


@functools.cache
def truth(kind: str, **lora: Any) -> Outcome:
    lora = {name: list(value) if isinstance(value, tuple) else value for name, value in lora.items()}
    return train_adapters(kind, lora, {})


LATER = ("lokr, ulysses", "loha, fsdp2, recomputed", "dora, hsdp", "rslora, fsdp2 x tp", "experts, hsdp x ring")
"""Left to the slow tests."""


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case in LATER)) for case in EXACT])
def test_variants_equal_one_process(case, ranks):
    num_ranks, kind, lora, config = EXACT[case]
    expected = truth(kind, **{name: tuple(value) if isinstance(value, list) else value for name, value in lora.items()})
    for outcome in ranks.run(num_ranks, functools.partial(train_adapters, kind, lora, config)):
        assert difference(outcome, expected) < TOLERANCES[kind]
        assert outcome.without_gradient == []
        assert all(torch.equal(outcome.frozen[name], value) for name, value in expected.frozen.items())


def refusal(kind: str, lora: dict[str, Any], config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        train_adapters(kind, lora, config)
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_variants_that_are_refused(case, ranks):
    *arguments, message = REFUSED[case]
    for refused in ranks.run(2, refusal, *arguments):
        assert message in refused


@torch.no_grad()
def logits(module: nn.Module) -> torch.Tensor:
    row = packed_row(0)
    return module.eval()(input_ids=row["input_ids"], position_ids=row["position_ids"], use_cache=False).logits


def load_and_save(kind: str, lora: dict[str, Any], base: str, folder: str) -> tuple[list[str], torch.Tensor]:
    """What of a model on meta differs from a plain one after loading; the adapter is saved, and its logits returned."""
    mesh, parsed = make_mesh()
    plain = adapt(CASES[kind].build(), lora)
    module = adapt(build_on_meta(CASES[kind].build), lora)
    module = parallelize(module, mesh, parsed, CASES[kind].plan(module))
    load_weights(module, Path(base), mesh)
    start_magnitudes(module)
    expected = dict(plain.named_parameters())
    actual = {name: gather_whole(parameter.detach()) for name, parameter in all_parameters(module).items()}
    differing = [
        *(actual.keys() ^ expected.keys()),
        *(name for name in actual if not torch.equal(actual[name], expected[name])),
    ]
    weights = whole_weights(module, mesh)
    if mesh.is_first:
        save_adapter(module, weights, Path(folder), base)
        torch.save(merge_adapters(module, weights), Path(folder) / "merged.pt")
    return differing, logits(module)


@pytest.mark.parametrize(("kind", "lora"), [("dense", DORA), ("moe", EXPERTS)], ids=["dora", "experts"])
def test_from_meta_to_a_file(kind, lora, ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    plain = CASES[kind].build()
    plain.save_pretrained(tmp_path / "base")
    (tmp_path / "adapter").mkdir()
    run = functools.partial(load_and_save, kind, lora, str(tmp_path / "base"), str(tmp_path / "adapter"))
    outcomes = ranks.run(2, run)
    result = outcomes[0][1]
    assert [differing for differing, _ in outcomes] == [[], []]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(logits(loaded), result, rtol=1e-5, atol=1e-5)
    plain.load_state_dict(torch.load(tmp_path / "adapter" / "merged.pt"))
    torch.testing.assert_close(logits(plain), result, rtol=1e-5, atol=1e-5)
