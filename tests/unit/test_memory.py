"""Recomputation, activation offload and compilation of blocks: the same numbers, less memory."""

import copy
import functools
import logging
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel import memory
from sfumato.parallel.memory import ActivationOffload, apply_memory_savings
from sfumato.parallel.plan import find_blocks
from tests.dist import cases
from tests.dist.cases import CASES, make_mesh
from tests.tiny import DEVICE

MODES: dict[str, dict[str, Any]] = {
    "full": {"activation_checkpointing": "full"},
    "selective": {"activation_checkpointing": "selective"},
    "offload": {"enable_activation_offload": True},
    "full and offload": {"activation_checkpointing": "full", "enable_activation_offload": True},
}


def build(kind: str) -> nn.Module:
    """The model of a case, where the tests compute."""
    return cases.build(kind).to(DEVICE)


def row_of(kind: str, index: int) -> dict[str, torch.Tensor]:
    """A row of a case, there too."""
    return {name: value.to(DEVICE) for name, value in CASES[kind].row(index).items()}


def prepare(kind: str, module: nn.Module | None = None, backend: str = "aot_eager", **config: Any) -> nn.Module:
    """A case's model with memory savings. Offload moves CPU tensors too, into other CPU memory."""
    module = (module or build(kind)).train()
    blocks = find_blocks(module, CASES[kind].plan(module))
    apply_memory_savings(module, ParallelConfig(**config), blocks, backend)
    offload = ActivationOffload(min_bytes=64, stay=())
    for block in blocks.values():
        if config.get("enable_activation_offload"):
            block.forward.offload = offload
    return module


def run(kind: str, module: nn.Module, rows: int = 2) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and summed gradients of some rows of unequal lengths."""
    losses = []
    for index in range(rows):
        loss, _ = CASES[kind].loss(module, row_of(kind, index), make_mesh()[0])
        loss.backward()
        losses.append(float(loss.detach()))
    return losses, {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


@functools.cache
def truth(kind: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    return run(kind, build(kind).train())


def assert_same(actual: Any, expected: Any, tolerance: float) -> None:
    if DEVICE == "cuda":  # where backward passes add in no fixed order, and convolutions are rounded to TF32
        tolerance = max(tolerance, 3e-4)
    assert actual[0] == pytest.approx(expected[0], rel=tolerance)
    assert actual[1].keys() == expected[1].keys()
    for name, value in actual[1].items():
        assert float((value - expected[1][name]).norm()) <= tolerance * float(expected[1][name].norm()), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CASES)
def test_losses_and_gradients_stay_as_they_are(kind, mode):
    module = prepare(kind, **MODES[mode])
    assert_same(run(kind, module), truth(kind), 1e-6 if "offload" in mode else 0)
    assert module.state_dict().keys() == build(kind).state_dict().keys()


@pytest.fixture
def compiler(monkeypatch):
    """A fresh compiler, whose trace pytest does not record (that would take most of the time)."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch._dynamo.utils.counters


@pytest.mark.parametrize(
    ("kind", "recompute", "rows", "graphs"),
    [pytest.param("dense", "selective", 2, 2, marks=pytest.mark.slow), ("flux", "full", 1, 3), ("moe", "none", 1, 2)],
    ids=["dense", "flux", "moe"],
)
def test_compiled_blocks_compute_the_same(kind, recompute, rows, graphs, compiler):
    module = prepare(kind, compile=True, activation_checkpointing=recompute)
    assert_same(run(kind, module, rows), run(kind, build(kind).train(), rows), 1e-6)
    if kind == "moe" and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        return  # older versions of transformers cannot compile the backward pass of their float32 experts
    assert not compiler["graph_break"]
    # One graph for each kind of block and, where lengths differ, one more for any length; never one for each block.
    assert compiler["stats"]["unique_graphs"] == graphs


def test_compiled_blocks_offload_and_run_without_gradients(compiler):
    module = prepare("dense", compile=True, enable_activation_offload=True)
    assert_same(run("dense", module, rows=1), run("dense", build("dense").train(), rows=1), 1e-6)
    with torch.no_grad():
        loss, _ = CASES["dense"].loss(module, row_of("dense", 0), make_mesh()[0])
    assert float(loss) == pytest.approx(truth("dense")[0][0], rel=1e-6)


class Alive(TorchDispatchMode):
    """Storages that operations made and that something still holds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.weights = {parameter.untyped_storage()._cdata for parameter in module.parameters()}
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.weights:
                storage = tensor.untyped_storage()
                self.made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        return out

    def num_bytes(self) -> int:
        return sum(size for storage, size in self.made.values() if not storage.expired())


@pytest.fixture
def copies(monkeypatch) -> weakref.WeakSet:
    """Offload's copies that exist."""
    host_copies: weakref.WeakSet = weakref.WeakSet()

    class Known(memory._HostCopy):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            host_copies.add(self)

    monkeypatch.setattr(memory, "_HostCopy", Known)
    return host_copies


@pytest.mark.parametrize("kind", ["dense", "sd3"])
def test_less_memory_waits_for_the_backward_pass(kind, copies):
    def measure(**config: Any) -> tuple[int, int]:
        """Bytes that wait where they were made, and those in offload's copies."""
        module = prepare(kind, **config)
        with Alive(module) as alive:
            loss, _ = CASES[kind].loss(module, row_of(kind, 4), make_mesh()[0])
        moved = sum(copy._host.nbytes for copy in copies)
        waiting = alive.num_bytes() - moved
        loss.backward()
        assert not copies  # nothing outlives the backward pass
        return waiting, moved

    none, selective, full = (measure(activation_checkpointing=name)[0] for name in ("none", "selective", "full"))
    assert full < 0.6 * selective < 0.4 * none
    waiting, moved = measure(enable_activation_offload=True)
    assert waiting < 0.35 * none and waiting + moved < 1.1 * none  # one copy of what several operations save
    both, inputs = measure(enable_activation_offload=True, activation_checkpointing="full")
    assert both < full and 0 < inputs < 0.2 * moved


def test_selective_keeps_attention_and_every_second_product():
    class Products(TorchDispatchMode):
        counts: dict[str, int]

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.name().partition(".")[0]
            self.counts[name] = self.counts.get(name, 0) + 1
            return func(*args, **(kwargs or {}))

    def count(mode: str) -> tuple[int, int]:
        with Products() as products:
            products.counts = {}
            run("dense", prepare("dense", activation_checkpointing=mode), rows=1)
        attention = sum(number for name, number in products.counts.items() if name in memory.ATTENTION)
        return products.counts["aten::mm"], attention

    (none, once), (selective, stored), (full, twice) = count("none"), count("selective"), count("full")
    assert (once, stored, twice) == (4, 4, 8)
    assert (full - none) // 4 == 6 and (selective - none) // 4 == 3  # q k v o gate up; down is not needed again


def test_dropout_is_recomputed_as_it_was():
    module = prepare("dense", activation_checkpointing="full")
    grads = []
    for model in (build("dense"), module):
        for layer in model.model.layers:
            layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.5))
        torch.manual_seed(5)
        grads.append(run("dense", model.train(), rows=1)[1])
    assert all(torch.equal(value, grads[0][name]) for name, value in grads[1].items())


def test_without_gradients_and_frozen_blocks_run_as_they_were():
    module = prepare("dense", activation_checkpointing="selective")
    with torch.no_grad():
        loss, _ = CASES["dense"].loss(module, row_of("dense", 0), make_mesh()[0])
    assert float(loss) == truth("dense")[0][0]
    module.requires_grad_(False).lm_head.requires_grad_(True)
    assert run("dense", module)[1].keys() == {"lm_head.weight"}


def test_a_copy_uses_its_own_weights():
    module = prepare("dense", activation_checkpointing="full")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert_same(run("dense", twin), truth("dense"), 0)


def test_weights_and_small_tensors_stay():
    offload = ActivationOffload(min_bytes=400, stay=())
    layer = nn.Linear(20, 20)
    weights = {layer.weight.untyped_storage()._cdata}
    assert offload.moves(torch.ones(100), weights) and not offload.moves(torch.ones(99), weights)
    assert not offload.moves(layer.weight.t(), weights)
    assert offload.moves(torch.ones(20, 20).bfloat16().repeat(2, 2), weights)
    assert not offload.moves(layer.weight.bfloat16().t(), weights)  # autocast's conversion
    assert not ActivationOffload(min_bytes=0).moves(torch.ones(100), weights)  # already in CPU memory


def test_indices_and_small_tensors_without_gradients_come_back_as_they_are():
    """By the object attention knows where documents begin; for another one it would have to ask the device."""
    offload, seen = ActivationOffload(min_bytes=64, stay=()), []
    positions, small, hidden = torch.arange(100), torch.ones(2), torch.ones(100, requires_grad=True)

    def block(*tensors: torch.Tensor) -> torch.Tensor:
        seen.append(tensors)
        return tensors[0] * tensors[1] * tensors[2].sum()

    with offload.hold(nn.Identity()):
        result = checkpoint(block, hidden, positions, small, use_reentrant=False)
    result.sum().backward()
    forward, again = seen
    assert again[1] is positions and again[2] is small
    assert again[0].data_ptr() != forward[0].data_ptr() and torch.equal(hidden.grad, 2.0 * positions)


@pytest.mark.parametrize("entries", [39, 7])
def test_a_mask_comes_back_with_its_strides(entries):
    """The backward kernel of attention refuses a mask whose rows are not aligned, as torch had made them."""
    padded = torch.randn(2, 1, entries, entries + -entries % 16)[..., :entries].expand(2, 4, -1, -1)
    x = torch.ones(2, 4, entries, entries, requires_grad=True)
    seen = []

    class Masked(torch.autograd.Function):
        @staticmethod
        def forward(ctx, scores, mask):
            ctx.save_for_backward(mask)
            return scores * mask

        @staticmethod
        def backward(ctx, gradient):
            seen.append(ctx.saved_tensors[0])
            return gradient * ctx.saved_tensors[0], None

    with ActivationOffload(min_bytes=64, stay=()).hold(nn.Identity()):
        result = Masked.apply(x, padded)
    result.sum().backward()
    assert seen[0].stride() == padded.stride() and seen[0].data_ptr() != padded.data_ptr()
    assert torch.equal(seen[0], padded) and torch.equal(x.grad, padded)


def test_a_changed_tensor_is_copied_again():
    offload, x = ActivationOffload(min_bytes=0, stay=()), torch.ones(8, requires_grad=True)
    with offload.hold(nn.Identity()):
        y = x * 1
        first = (y * y).sum()
        with torch.no_grad():
            y.mul_(3)
        second = (y * y).sum()
    (first + second).backward()
    assert torch.equal(x.grad, torch.full((8,), 2.0 + 6.0))


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ConfigError, match="enable_activation_offload cannot reach"):
        prepare("dense", activation_checkpointing="selective", enable_activation_offload=True)
    dense = build("dense")
    dense.gradient_checkpointing_enable()
    with pytest.raises(ConfigError, match="recompute twice"):
        prepare("dense", dense, activation_checkpointing="full")
    sd3 = build("sd3")
    sd3.enable_gradient_checkpointing()
    with pytest.raises(ConfigError, match="SD3Transformer2DModel checkpoints gradients itself"):
        prepare("sd3", sd3, activation_checkpointing="full")
    with pytest.raises(ConfigError, match=r"the forward of model\.layers\.0 has been replaced"):
        prepare("dense", prepare("dense", activation_checkpointing="full"), activation_checkpointing="full")
    module = prepare("dense", activation_checkpointing="full")
    with pytest.raises(ConfigError, match="use_cache=False"):
        module(input_ids=torch.arange(5, device=DEVICE)[None], use_cache=True)
