"""bf16 in one process: what fsdp2 computes with gathered bf16 weights, over float32 weights."""

from __future__ import annotations

import copy

import pytest
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from sfumato.config.parallel import ParallelConfig
from sfumato.parallel import expert
from sfumato.parallel.layout import Layout
from sfumato.parallel.memory import apply_memory_savings
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.plan import find_blocks, language_plan
from sfumato.parallel.precision import compute_in
from tests.dist.cases import CASES, build
from tests.survey.tiny_configs import tiny_config

KINDS = ("dense", "moe", "sd3", "wan")
ALONE = Mesh(Layout(), torch.device("cpu"))


def loss_of(kind: str, module: nn.Module) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return CASES[kind].loss(module, CASES[kind].row(0), ALONE)[0]


def parallel(kind: str, module: nn.Module, **config: object) -> nn.Module:
    return parallelize(module, ALONE, ParallelConfig(**config), CASES[kind].plan(module), torch.bfloat16)


def float32_weights_in_bf16(module: nn.Module) -> nn.Module:
    """As fsdp2 gathers them; buffers stay."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(torch.bfloat16) if parameter.dtype == torch.float32 else parameter.data
    return module


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_bf16_weights_and_gradients_are_float32(kind):
    plain = build(kind).train()
    trained, low = parallel(kind, copy.deepcopy(plain)), float32_weights_in_bf16(copy.deepcopy(plain))
    if kind == "moe":
        expert.apply_grouped_experts(low)
    loss = loss_of(kind, trained)
    assert loss == loss_of(kind, low)
    if kind in ("dense", "moe"):
        assert loss != loss_of(kind, plain), "autocast alone would do"
    loss.backward()
    names = dict(plain.named_parameters())
    assert dict(trained.named_parameters()).keys() == names.keys() == trained.state_dict().keys() & names.keys()
    for parameter in trained.parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is None or parameter.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_the_residual_stream_is_bf16(kind):
    module = parallel(kind, build(kind).train())
    seen = []
    for block in find_blocks(module, CASES[kind].plan(module)).values():
        block.register_forward_pre_hook(lambda _block, args: seen.append(args[0].dtype))
        block.register_forward_hook(lambda _block, _given, made: seen.append(made.dtype))
    loss_of(kind, module)
    assert seen and set(seen) == {torch.bfloat16}


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_blocks_convert_again(kind, mode):
    plain = build(kind).train()
    whole, recomputed = (parallel(kind, copy.deepcopy(plain), activation_checkpointing=way) for way in ("none", mode))
    losses = [loss_of(kind, module) for module in (whole, recomputed)]
    assert losses[0] == losses[1]
    for loss in losses:
        loss.backward()
    for parameter, other in zip(whole.parameters(), recomputed.parameters(), strict=True):
        assert (parameter.grad is None) == (other.grad is None)
        assert parameter.grad is None or torch.equal(parameter.grad, other.grad)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "recompute"), [("dense", "none"), ("wan", "none"), ("wan", "selective")])
def test_the_compiler_follows_without_a_break(kind, recompute):
    plain = build(kind).train()
    eager = loss_of(kind, parallel(kind, copy.deepcopy(plain)))
    compute_in(plain, torch.bfloat16)
    torch._dynamo.reset()
    counters.clear()
    blocks = find_blocks(plain, CASES[kind].plan(plain))
    config = ParallelConfig(compile=True, activation_checkpointing=recompute)
    apply_memory_savings(plain, config, blocks, backend="eager")
    assert loss_of(kind, plain) == eager
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]


def test_a_layer_that_fails_keeps_its_weights():
    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self) -> None:
            raise RuntimeError(str(self.weight.dtype))

    module = Fails()
    compute_in(module, torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(RuntimeError, match="bfloat16"):
        module()
    with pytest.raises(RuntimeError, match="float32"):
        module()
    assert module.weight.dtype == torch.float32 and "weight" not in vars(module)


def test_experts_are_multiplied_in_groups_and_in_bf16(monkeypatch):
    seen = []
    real = expert._compute
    monkeypatch.setattr(expert, "_compute", lambda *args: seen.append((args[1].dtype, args[3])) or real(*args))
    plain = build("moe").train()
    module = parallel("moe", copy.deepcopy(plain))
    loss = loss_of("moe", module)
    assert seen and set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert float(loss) == pytest.approx(float(loss_of("moe", plain)), rel=1e-2)


def test_adapters_take_what_comes_in_bf16(monkeypatch):
    casts = []
    real = BaseTunerLayer._cast_input_dtype
    plain = build("dense", lora=True).train()
    expected = loss_of("dense", parallel("dense", copy.deepcopy(plain)))
    monkeypatch.setattr(
        BaseTunerLayer, "_cast_input_dtype", lambda *args: casts.append(real(*args).dtype) or real(*args)
    )
    with_casts = parallel("dense", copy.deepcopy(plain))
    assert loss_of("dense", with_casts) == expected
    assert casts and set(casts) == {torch.bfloat16}
    for layer in with_casts.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.cast_input_dtype_enabled = True
    assert loss_of("dense", with_casts) == expected, "the way there and back changes nothing"
    assert torch.float32 in casts


def test_float32_experts_stay_as_transformers_computes_them():
    plain = build("moe").train()
    before = plain.config._experts_implementation
    module = parallelize(plain, ALONE, ParallelConfig(), CASES["moe"].plan(plain), None)
    assert module.config._experts_implementation == before != expert.GROUPED


def first_router(module: nn.Module) -> nn.Module:
    return next(layer for layer in module.modules() if type(layer).__name__.endswith(("TopkRouter", "TopKRouter")))


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("deepseek_v3", torch.float32),
        ("hy_v3", torch.float32),  # is given its bias by the layer around it
        ("longcat_flash", torch.float32),  # reads the weight of a linear layer
        ("qwen3_moe", torch.bfloat16),  # transformers itself rounds these scores
    ],
)
def test_routers_give_the_scores_of_transformers_model_in_bf16(kind, dtype):
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    router = first_router(float32_weights_in_bf16(copy.deepcopy(plain)))
    trained = first_router(parallelize(plain, ALONE, ParallelConfig(), language_plan(plain), torch.bfloat16))
    tokens = torch.randn(50, 32).to(torch.bfloat16)
    more = (torch.zeros(4),) if kind == "hy_v3" else ()
    scores, weights, chosen = router(tokens, *more)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = trained(tokens, *more)
        assert trained(tokens.float(), *more)[0].dtype == dtype, "layer norms of autocast give float32"
    assert scores.dtype == dtype
    for output, expected in zip(outputs, (scores, weights, chosen), strict=True):
        assert output.dtype == expected.dtype
        assert torch.equal(output, expected)
    outputs[0].sum().backward()
    assert all(weight.dtype == torch.float32 for weight in trained.parameters())
    assert trained(tokens.float(), *more)[0].dtype == torch.float32, "without autocast nothing is rounded"
