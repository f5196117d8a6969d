"""A layer of 128 experts as Qwen3-30B-A3B has it, of which some get no token: error, speed, waits, gradients."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from benchmarks.gpu.ceilings import kernel_of
from benchmarks.gpu.cells import Bound, Cell, Setting, relative_error
from benchmarks.gpu.syncs import Waits
from sfumato.parallel.expert import grouped_experts

if TYPE_CHECKING:
    from sfumato.parallel.expert_modules import ExpertsModule

ROUTES = {"all experts": 1, "half of them": 2, "one in sixteen": 16}
"""Only every so-manieth expert gets tokens."""

BOUNDS = (
    Bound("error", 0.02, "experts compute something else than their formula: train no mixture of experts here"),
    Bound("empty_gradient", 0, "an expert without tokens gets a gradient: train no mixture of experts here"),
    Bound("waits", 0, "the host waits in each layer: find the line with the stage syncs, task train_text of a mixture"),
    Bound(
        "tflops_per_s",
        250,
        "the grouped kernel is not taken: see kernel, and run sfumato doctor",
        least=True,
        real=True,
    ),
    Bound("of_all", 1.5, "empty groups cost time: raise the tokens of a micro-batch", real=True),
)

ALL_MS: dict[str, float] = {}
"""Milliseconds of the cell ``all experts``, once it has been measured in this process."""


def cells(setting: Setting) -> dict[str, Cell]:
    return {name: partial(measure, name=name) for name in ROUTES}


def measure(setting: Setting, name: str) -> dict[str, Any]:
    """Forward and backward passes of tokens that choose among some experts."""
    experts = make_experts(setting)
    tokens, chosen_per_token = setting.size((16_384, 8), (64, 2))
    hidden, index, weights = make_tokens(experts, tokens, chosen_per_token, ROUTES[name], setting)
    upstream = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(3)).to(hidden)

    def run() -> Tensor:
        experts.zero_grad()
        output = grouped_experts(experts, hidden, index, weights)
        output.backward(upstream)
        return output.detach()

    output = run()
    rows = range(0, tokens, max(tokens // 32, 1))
    expected = torch.stack([expert_formula(experts, hidden, index, weights, row) for row in rows])
    used = torch.zeros(len(experts.down_proj), dtype=torch.bool)
    used[index.flatten().cpu()] = True
    unused = cast("Tensor", experts.down_proj.grad).float().cpu()[~used]
    values: dict[str, Any] = {
        "error": relative_error(output[list(rows)], expected),
        "empty_gradient": float(unused.abs().max()) if len(unused) else 0.0,
        "empty": len(unused),
        "kernel": kernel_of(run, setting),
    }
    if setting.on_gpu:
        with Waits() as waits:
            waits.after_step(2)
            run()
        values["waits"] = waits.lines.total()
    seconds = setting.seconds(run, setting.size(10, 1), setting.size(3, 0))
    inner = experts.down_proj.shape[2]
    operations = 3 * 2 * 3 * tokens * chosen_per_token * hidden.shape[1] * inner
    if name == "all experts":
        ALL_MS[name] = seconds * 1e3
    elif ALL_MS:
        values["of_all"] = seconds * 1e3 / ALL_MS["all experts"]
    return values | {"ms": seconds * 1e3, "tflops_per_s": operations / seconds / 1e12}


def make_experts(setting: Setting) -> ExpertsModule:
    """transformers' experts in bf16 with random weights: ``[E, 2I, H]`` and ``[E, H, I]``."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    hidden_size, inner, count = setting.size((2048, 768, 128), (32, 16, 32))
    config = Qwen3MoeConfig(hidden_size=hidden_size, moe_intermediate_size=inner, num_experts=count)
    torch.manual_seed(0)
    with torch.device(setting.device):
        experts = cast("ExpertsModule", Qwen3MoeSparseMoeBlock(config).experts)
        for parameter in experts.parameters():
            nn.init.normal_(parameter, std=0.05)
    return experts.to(torch.bfloat16)


def make_tokens(
    experts: ExpertsModule, tokens: int, chosen: int, every: int, setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[T, H]``, the experts of each token ``[T, k]`` and their weights ``[T, k]``."""
    generator = torch.Generator().manual_seed(1)
    count, width = experts.down_proj.shape[0], experts.down_proj.shape[1]
    available = torch.arange(0, count, every)
    places = torch.rand(tokens, len(available), generator=generator).argsort(dim=1)[:, :chosen]
    hidden = torch.randn(tokens, width, generator=generator)
    weights = torch.rand(tokens, places.shape[1], generator=generator)
    return (
        hidden.to(setting.device, torch.bfloat16).requires_grad_(),
        available[places].to(setting.device),
        (weights / weights.sum(1, keepdim=True)).to(setting.device, torch.bfloat16),
    )


def expert_formula(experts: ExpertsModule, hidden: Tensor, index: Tensor, weights: Tensor, row: int) -> Tensor:
    """One token's output in float64 on the CPU: the sum of ``w_e W_down (silu(W_gate h) * (W_up h))``."""
    token = hidden[row].detach().double().cpu()
    output = torch.zeros_like(token)
    for expert, weight in zip(index[row].tolist(), weights[row].tolist(), strict=True):
        gate, up = (experts.gate_up_proj[expert].detach().double().cpu() @ token).chunk(2)
        output += weight * (experts.down_proj[expert].detach().double().cpu() @ (nn.functional.silu(gate) * up))
    return output
