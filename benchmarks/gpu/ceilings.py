"""What the device can do, which everything else is compared with."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from importlib import metadata, util
from typing import Any

import torch
from torch.nn import functional

from benchmarks.gpu.cells import Bound, Cell, Setting

PACKAGES = ("torch", "triton", "transformers", "diffusers", "peft", "accelerate", "rapidocr", "onnxruntime", "torchao")

SLOW = "the card is throttled, shared or another one than an H100 or H200: every other figure is lower by as much"
BOUNDS = (
    Bound("bf16_tflops_per_s", 550, SLOW, least=True, real=True),
    Bound("device_gb_per_s", 2200, SLOW, least=True, real=True),
    Bound("to_gpu_gb_per_s", 20, "offloading and saving wait for the bus: leave them out here", least=True, real=True),
    Bound(
        "same_bits_with_gradients_flash",
        1,
        "rollout and replay differ by attention alone: the self-check needs its bound of rounding",
        least=True,
        real=True,
    ),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {
        "machine": machine,
        "products": products,
        "copies": copies,
        "attention": attention,
    }


def machine(setting: Setting) -> dict[str, Any]:
    """Versions and hardware."""
    results: dict[str, Any] = {"python": platform.python_version(), "cores": os.cpu_count()}
    for name in PACKAGES:
        try:
            results[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            results[name] = "not installed"
    results["c_compiler"] = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), "none")
    results["triton_imports"] = util.find_spec("triton") is not None
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(0)
        results |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        results |= {"gpu_gib": properties.total_memory / 2**30, "cuda": torch.version.cuda}
        results |= {"cudnn": torch.backends.cudnn.version(), "capability": str(torch.cuda.get_device_capability())}
    return results


def products(setting: Setting) -> dict[str, Any]:
    """Square matrix products of random numbers, which are slower than those of zeros: TFLOP/s by precision."""
    size, results = setting.size(8192, 256), {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        left, right = (torch.randn(size, size, device=setting.device).to(dtype) for _ in range(2))
        out = torch.empty_like(left)
        seconds = setting.seconds(lambda a=left, b=right, o=out: torch.mm(a, b, out=o), setting.size(20, 2))
        results[f"{name}_tflops_per_s"] = 2 * size**3 / seconds / 1e12
    return results


def copies(setting: Setting) -> dict[str, Any]:
    """GB/s: within the device (bytes read and written), and from and to pinned memory of the CPU."""
    count = setting.size(2**31, 2**22)
    source = torch.empty(count, dtype=torch.uint8, device=setting.device).random_(0, 256)
    target = torch.empty_like(source)
    results = {"device_gb_per_s": 2 * count / setting.seconds(lambda: target.copy_(source), 5) / 1e9}
    if setting.on_gpu:
        pinned = torch.empty(count // 4, dtype=torch.uint8, pin_memory=True)
        part = source[: count // 4]
        to_cpu = setting.seconds(lambda: pinned.copy_(part, non_blocking=True), 3, warm_up=1)
        to_gpu = setting.seconds(lambda: part.copy_(pinned, non_blocking=True), 3, warm_up=1)
        results |= {"to_cpu_gb_per_s": count / 4 / to_cpu / 1e9, "to_gpu_gb_per_s": count / 4 / to_gpu / 1e9}
    return results


def attention(setting: Setting) -> dict[str, Any]:
    """Which kernel torch takes, TFLOP/s of each that it has, and whether a result depends on who asks for gradients.

    Rollout and replay are compared to the bit (``same_bits_*``): a kernel that computes otherwise where gradients are
    wanted, or in a batch of another size, makes their ratio differ from 1.
    """
    shape = setting.size((8, 24, 1280, 64), (2, 2, 32, 16))
    made = [torch.randn(shape, device=setting.device).to(torch.bfloat16) for _ in range(3)]
    results: dict[str, Any] = {"default": kernel_of(lambda: functional.scaled_dot_product_attention(*made), setting)}
    backends = torch.nn.attention.SDPBackend
    named = {
        "flash": backends.FLASH_ATTENTION,
        "cudnn": backends.CUDNN_ATTENTION,
        "efficient": backends.EFFICIENT_ATTENTION,
    }
    batch, heads, tokens, width = shape
    operations = 4 * batch * heads * tokens**2 * width
    for name, backend in named.items():
        with torch.nn.attention.sdpa_kernel(backend):
            try:
                plain = functional.scaled_dot_product_attention(*made)
            except RuntimeError:  # this device has no such kernel
                results[name] = "none"
                continue
            seconds = setting.seconds(lambda: functional.scaled_dot_product_attention(*made), setting.size(20, 1))
            results[f"{name}_tflops_per_s"] = operations / seconds / 1e12
            wanting = [tensor.clone().requires_grad_() for tensor in made]
            with_gradients = functional.scaled_dot_product_attention(*wanting).detach()
            one = functional.scaled_dot_product_attention(*(tensor[:1] for tensor in made))
            results[f"same_bits_with_gradients_{name}"] = bool(torch.equal(plain, with_gradients))
            results[f"same_bits_in_a_batch_of_one_{name}"] = bool(torch.equal(plain[:1], one))
    return results


def kernel_of(work: Callable[[], Any], setting: Setting) -> str:
    """Name of the longest kernel that runs (on a CPU: of the longest operation)."""
    from torch.profiler import ProfilerActivity, profile

    work()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.on_gpu else [])]
    with profile(activities=activities) as profiled:
        work()
        setting.wait()
    key = "self_device_time_total" if setting.on_gpu else "self_cpu_time_total"
    return max(profiled.key_averages(), key=lambda event: getattr(event, key)).key[:80]
