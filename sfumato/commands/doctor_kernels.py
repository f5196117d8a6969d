"""Kernels that are tried on a device for ``sfumato doctor``, in a process of their own: a broken one may hang or crash.

python -m sfumato.commands.doctor_kernels attention cuda:0
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

TOLERANCE = 0.05
"""Largest difference from float64, as a share of the largest value, that bf16 may have."""


def attention(device: str) -> None:
    """Packed documents of unequal lengths with fewer heads of keys and values, forward and backward."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from sfumato.models.language.packed_attention import register_packed_attention

    attend = ALL_ATTENTION_FUNCTIONS[register_packed_attention()]
    module = nn.Module()
    positions = torch.cat([torch.arange(length) for length in (7, 130, 64, 1)])[None]
    total = positions.shape[1]
    tensors = [_random_float64(1, heads, total, 64, seed=heads) for heads in (4, 2, 2)]

    def compute(*inputs: Tensor) -> Tensor:
        return attend(module, *inputs, None, position_ids=positions.to(inputs[0].device))[0]

    _compare("attention", compute, tensors, device)


def grouped_products(device: str) -> None:
    """Rows of several experts, one of them without any, forward and backward."""
    from sfumato.parallel.expert import grouped_matmul

    counts = torch.tensor([5, 0, 32, 91])
    tensors = [_random_float64(int(counts.sum()), 64, seed=1), _random_float64(len(counts), 64, 128, seed=2)]
    _compare(
        "grouped products",
        lambda rows, weights: grouped_matmul(rows, weights, counts.to(rows.device)),
        tensors,
        device,
    )


def compiled_blocks(device: str) -> None:
    """A small block by torch.compile, which needs Triton on GPUs and a C++ compiler on CPUs, forward and backward."""
    compiled = torch.compile(_feed_forward)
    tensors = [_random_float64(32, 64, seed=1), _random_float64(128, 64, seed=2), _random_float64(64, 128, seed=3)]

    def compute(*inputs: Tensor) -> Tensor:
        return (_feed_forward if inputs[0].dtype == torch.float64 else compiled)(*inputs)

    _compare("compiled blocks", compute, tensors, device)


CHECKS = {"attention": attention, "grouped products": grouped_products, "compiled blocks": compiled_blocks}


def _feed_forward(hidden: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return hidden + functional.linear(functional.silu(functional.linear(hidden, up)), down)


def _random_float64(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _compare(name: str, compute: Callable[..., Tensor], tensors: list[Tensor], device: str) -> None:
    """Compares a kernel in bf16 on the device with float64 on the CPU: the output, and the gradient of each input.

    Raises:
        RuntimeError: a difference is above ``TOLERANCE`` of the largest value.
    """
    # inputs that bf16 holds exactly, so that only the kernel's own error is measured
    exact = [tensor.to(torch.bfloat16).double().requires_grad_() for tensor in tensors]
    on_device = [tensor.detach().to(device, torch.bfloat16).requires_grad_() for tensor in exact]
    results = []
    for inputs in (exact, on_device):
        out = compute(*inputs)
        out.square().sum().backward()
        results.append([out.detach(), *(tensor.grad for tensor in inputs)])
    for index, (expected, actual) in enumerate(zip(*results, strict=True)):
        error = float((actual.double().cpu() - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE:  # so written that NaN fails
            of_which = "" if index == 0 else f", gradient {index}"
            raise RuntimeError(f"{name} in bf16{of_which}: wrong by {error:.2g} of the largest value")


if __name__ == "__main__":
    CHECKS[sys.argv[1]](sys.argv[2])
