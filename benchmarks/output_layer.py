"""Output layer and cross entropy, forward and backward: time and largest memory by the way logits are computed.

    python benchmarks/output_layer.py [--tokens 2048] [--width 256] [--vocabulary 16384] [--device cuda] [--bf16]

plain: all logits at once. twice: logits of some tokens at a time, once more in the backward pass, as losses need that
weight each token by what it turns out to be. once: the gradient is computed with the logits, as a sum allows. torch:
its own ``linear_cross_entropy`` in chunks. All compute the same first; then they take turns, and ratios are taken turn
by turn. Memory is what operations made and still was there, at most, beyond inputs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.parallel.loss import cross_entropy_sum, linear_cross_entropy, token_log_probs


class Peak(TorchDispatchMode):
    """The most bytes that operations made and something held."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.held = {key: value for key, value in self.held.items() if not value[0].expired()}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in self.input_storages:
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.largest = max(self.largest, sum(size for _, size in self.held.values()))
        return out


def ways(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> dict[str, Callable[[], Tensor]]:
    """What is compared, by name: each gives the sum of the losses."""
    results: dict[str, Callable[[], Tensor]] = {
        "plain": lambda: cross_entropy_sum(functional.linear(hidden, weight), labels),
        f"twice, {chunk} tokens": lambda: -token_log_probs(hidden, weight, labels, chunk_tokens=chunk).sum(),
        f"once, {chunk} tokens": lambda: linear_cross_entropy(hidden, weight, labels, chunk_tokens=chunk)[0],
        "once, 4096 tokens": lambda: linear_cross_entropy(hidden, weight, labels)[0],
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):  # torch 2.13
        options = {"reduction": "sum", "options": torch.nn.LinearCrossEntropyOptions()}
        results["torch"] = lambda: functional.linear_cross_entropy(hidden, weight, labels, **options)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"tokens": 2048, "width": 256, "vocabulary": 16384, "chunk": 512, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), torch.bfloat16 if options.bf16 else torch.float32
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(options.vocabulary, options.width, generator=generator).mul_(0.05).to(device, dtype)
    weight.requires_grad_()
    labels = torch.randint(options.vocabulary, (options.tokens,), generator=generator).to(device)

    def run(way: Callable[[], Tensor]) -> tuple[float, Tensor]:
        hidden.grad = weight.grad = None
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        started = clock()
        loss = way()
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - started, loss.detach()

    compared, taken, expected = ways(hidden, weight, labels, options.chunk), {}, {}
    for name, way in compared.items():
        with Peak(hidden, weight, labels) as peak:
            _, loss = run(way)
        actual = {"loss": loss, "hidden": hidden.grad.clone(), "weight": weight.grad.clone()}
        expected = expected or actual
        apart = {key: float((actual[key] - expected[key]).norm() / expected[key].norm()) for key in actual}
        assert max(apart.values()) < (3e-2 if options.bf16 else 1e-5), (name, apart)
        taken[name] = [peak.largest / 2**20]
    for _ in range(options.repeats):
        for name, way in compared.items():
            taken[name].append(run(way)[0])
    for name, (memory, *seconds) in taken.items():
        ratios = [mine / plain for mine, plain in zip(seconds, taken["plain"][1:], strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{name:20} {statistics.median(ratios):.2f} of plain's time ({spread}), {memory:.0f} MiB")


if __name__ == "__main__":
    main()
