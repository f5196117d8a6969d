"""Kernels that compute something of sfumato's own, on the device, against float64 or the same bits on the CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu.ceilings import kernel_of
from benchmarks.gpu.cells import Bound, Cell, NotHereError, Setting, relative_error

WRONG = (
    "the kernel computes something else than float64 does: do not train with it here; the test of its name says more"
)
BOUNDS = (
    Bound("largest_error", 0.02, WRONG),
    Bound("largest_difference", 1e-5, "noise must be the CPU's: sample ids would draw other images here"),
    Bound("moves", 0.03, WRONG, cells="^muon$"),
    Bound("moves", 2e-5, WRONG, cells="^adamw$"),
    Bound("moves", 0.2, WRONG, cells="^adamw8bit$"),
)
"""Relative errors; numbers in bf16 have 8 bits."""


def cells(setting: Setting) -> dict[str, Cell]:
    return {
        "packed attention": packed_attention,
        "encoder attention": encoder_attention,
        "grouped products": grouped_products,
        "chunked loss": chunked_loss,
        "dropout": dropout,
        "noise": noise,
        "checksums": checksums,
        "muon": partial(optimiser, name="muon"),
        "adamw": partial(optimiser, name="adamw"),
        "adamw8bit": partial(optimiser, name="adamw8bit"),
        "memory moves": memory_moves,
        "weights between processes": weights,
    }


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, float64, on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_gradients(work: Callable[..., Tensor], upstream: Tensor, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """The result, and the gradients of all inputs."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    out = work(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.to(out))]


def errors_of(names: tuple[str, ...], results: list[Tensor], expected: list[Tensor]) -> dict[str, Any]:
    """Relative errors of a result and of gradients by name, and the largest of them."""
    errors = {name: relative_error(*pair) for name, *pair in zip(names, results, expected, strict=True)}
    return {"largest_error": max(errors.values()), **errors}


def packed_attention(setting: Setting) -> dict[str, Any]:
    """Documents of unequal lengths in one row, half as many heads of keys; forward and backward."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from sfumato.models.language.packed_attention import register_packed_attention

    attend = ALL_ATTENTION_FUNCTIONS[register_packed_attention()]
    lengths = setting.size((700, 5, 1300, 64, 1, 1026), (9, 1, 14, 5))
    (heads, width), total = setting.size((8, 128), (4, 16)), sum(lengths)
    shapes = [(1, heads, total, width), (1, heads // 2, total, width), (1, heads // 2, total, width)]
    inputs = tuple(drawn(*shape, seed=number).bfloat16() for number, shape in enumerate(shapes))
    upstream = drawn(1, total, heads, width, seed=3).bfloat16()
    places = torch.cat([torch.arange(length) for length in lengths])[None]

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [tensor.split(lengths, dim=2) for tensor in (query, key, value)]
        results = []
        for q, k, v in zip(*parts, strict=True):
            k, v = (heads.repeat_interleave(2, dim=1) for heads in (k, v))
            scores = (q @ k.mT / width**0.5).masked_fill(torch.ones(q.shape[2], q.shape[2]).triu(1).bool(), -torch.inf)
            results.append(scores.softmax(-1) @ v)
        return torch.cat(results, dim=2).transpose(1, 2)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(nn.Module(), query, key, value, None, position_ids=on_device)[0]

    truth = with_gradients(expected, upstream, tuple(tensor.double() for tensor in inputs))
    on_device = places.to(setting.device)
    moved = tuple(tensor.to(setting.device) for tensor in inputs)
    actual = with_gradients(ours, upstream.to(setting.device), moved)
    names = ("forward", "query", "key", "value")
    values = errors_of(names, actual, truth)
    kernel = kernel_of(lambda: ours(*moved), setting)
    seconds = setting.seconds(lambda: with_gradients(ours, upstream.to(setting.device), moved), setting.size(10, 1))
    return values | {"kernel": kernel, "ms": seconds * 1e3}


def encoder_attention(setting: Setting) -> dict[str, Any]:
    """Windows of unequal lengths in one row, as encoders of images have them; forward and backward."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from sfumato.models.language.encoder_attention import register_segment_attention

    attend = ALL_ATTENTION_FUNCTIONS[register_segment_attention()]
    lengths = setting.size((*(64,) * 30, 32, 32, 16, 1536, 4, 700), (9, 4, 4, 5))
    (heads, width), total_tokens = setting.size((16, 80), (2, 8)), sum(lengths)
    inputs = tuple(drawn(1, heads, total_tokens, width, seed=number).bfloat16() for number in range(3))
    upstream = drawn(1, total_tokens, heads, width, seed=3).bfloat16()

    def expected(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = zip(*(tensor.split(lengths, dim=2) for tensor in (query, key, value)), strict=True)
        results = [(q @ k.mT / width**0.5).softmax(-1) @ v for q, k, v in parts]
        return torch.cat(results, dim=2).transpose(1, 2)

    bounds = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int().to(setting.device)

    def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(nn.Module(), query, key, value, None, cu_seq_lens_q=bounds, max_length_q=max(lengths))[0]

    truth = with_gradients(expected, upstream, tuple(tensor.double() for tensor in inputs))
    moved = tuple(tensor.to(setting.device) for tensor in inputs)
    actual = with_gradients(ours, upstream.to(setting.device), moved)
    values = errors_of(("forward", "query", "key", "value"), actual, truth)
    kernel = kernel_of(lambda: ours(*moved), setting)
    seconds = setting.seconds(lambda: with_gradients(ours, upstream.to(setting.device), moved), setting.size(10, 1))
    return values | {"kernel": kernel, "ms": seconds * 1e3}


def grouped_products(setting: Setting) -> dict[str, Any]:
    """Rows of each expert times its matrix, experts without rows among them."""
    from sfumato.parallel import expert

    counts = torch.tensor(setting.size((300, 0, 17, 1000, 1, 730), (5, 0, 1, 10)))
    inner, outer = setting.size((2048, 1536), (16, 24))
    inputs = (drawn(int(counts.sum()), inner).bfloat16(), drawn(len(counts), inner, outer, seed=1).bfloat16())
    upstream = drawn(int(counts.sum()), outer, seed=2).bfloat16()
    truth = with_gradients(
        lambda rows, weight: expert.multiply_in_turn(rows, weight, counts), upstream, tuple(map(Tensor.double, inputs))
    )
    moved, on_device = tuple(tensor.to(setting.device) for tensor in inputs), counts.to(setting.device)

    def ours(rows: Tensor, weight: Tensor) -> Tensor:
        return expert.grouped_matmul(rows, weight, on_device)

    actual = with_gradients(ours, upstream.to(setting.device), moved)
    names = ("forward", "rows", "weight")
    values = errors_of(names, actual, truth)
    kernel = kernel_of(lambda: ours(*moved), setting)
    return values | {"kernel": kernel, "ms": setting.seconds(lambda: ours(*moved), setting.size(10, 1)) * 1e3}


def chunked_loss(setting: Setting) -> dict[str, Any]:
    """Output layer and loss in chunks: value, gradients and memory, beside plain logits."""
    from sfumato.parallel.loss import IGNORED, token_log_probs

    tokens, width, vocabulary = setting.size((4096, 2048, 151_936), (40, 16, 300))
    hidden, weight = drawn(tokens, width).bfloat16(), (drawn(vocabulary, width, seed=1) / width**0.5).bfloat16()
    labels = torch.randint(0, vocabulary, (tokens,), generator=torch.Generator().manual_seed(2))
    labels[::7] = IGNORED
    part = slice(0, min(tokens, 256))  # float64 on a CPU takes its time
    upstream = torch.where(labels == IGNORED, 0.0, drawn(tokens, seed=3))

    def plain(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        logits = functional.linear(hidden, weight)
        logits = logits if logits.dtype == torch.float64 else logits.float()
        result = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
        return torch.where(labels == IGNORED, 0.0, result)

    truth = with_gradients(
        lambda h, w: plain(h, w, labels[part]), upstream[part], (hidden[part].double(), weight.double())
    )
    moved = hidden.to(setting.device), weight.to(setting.device)
    on_device, up = labels.to(setting.device), upstream.to(setting.device).float()
    actual = with_gradients(lambda h, w: token_log_probs(h, w, on_device[part]), up[part], (moved[0][part], moved[1]))
    names = ("forward", "hidden", "weight")
    values = errors_of(names, actual, truth)
    ways = {"chunked": lambda h, w: token_log_probs(h, w, on_device), "plain": lambda h, w: plain(h, w, on_device)}
    for name, way in ways.items():
        if setting.on_gpu:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        values[f"{name}_ms"] = setting.seconds(lambda w=way: with_gradients(w, up, moved), setting.size(5, 1), 1) * 1e3
        if setting.on_gpu:
            values[f"{name}_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
    return values


def dropout(setting: Setting) -> dict[str, Any]:
    """Masks by keys are the CPU's."""
    from sfumato.parallel.dropout import keyed_dropout

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.3)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.dropout(hidden)

    outputs = []
    for device in ("cpu", setting.device):
        model = Model().train()
        keys = keyed_dropout(model, seed=7)
        with keys.batch(step=3, sample_ids=[11, 5]):
            outputs.append(model(torch.ones(2, 33, 130, device=device)).cpu())
    assert torch.equal(outputs[0] == 0, outputs[1] == 0), "the device drops other elements than the CPU"
    assert 0.25 < float((outputs[0] == 0).float().mean()) < 0.35
    return {"equal": True}


def noise(setting: Setting) -> dict[str, Any]:
    """Noise by keys is the CPU's, to rounding."""
    from sfumato.algorithms.noise import keyed_normal

    shape, ids = (16, 64, 64), [3, 900, 17]
    cpu, device = (keyed_normal(shape, 1, "latent", 5, ids, target) for target in ("cpu", setting.device))
    values = {"largest_difference": float((cpu - device.cpu()).abs().max())}
    seconds = setting.seconds(lambda: keyed_normal(shape, 1, "latent", 5, ids, setting.device), 5)
    return values | {"ms_of_3": seconds * 1e3}


def checksums(setting: Setting) -> dict[str, Any]:
    """Checksums of weights are the CPU's, of every dtype."""
    from sfumato.parallel.shards import whole_chunk
    from sfumato.runtime.weight_sync.checksum import shard_checksum

    size = setting.size((4099, 2053), (67, 129))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8):
        values = (drawn(*size) * 50).to(dtype)
        results = [int(shard_checksum(size, copy, [whole_chunk(size)])) for copy in (values, values.to(setting.device))]
        assert results[0] == results[1], f"{dtype}: the device has another checksum than the CPU"
    large = torch.empty(setting.size(2**28, 2**12), device=setting.device).normal_()
    seconds = setting.seconds(lambda: shard_checksum(large.shape, large, [whole_chunk(large.shape)]), 3)
    return {"gb_per_s": large.numel() * 4 / seconds / 1e9}


def optimiser(setting: Setting, name: str) -> dict[str, Any]:
    """Three steps of a model on the device, and of AdamW or Muon in float64 on the CPU: how much the moves differ."""
    from sfumato.config.sections import TrainConfig
    from sfumato.errors import MissingDependencyError
    from sfumato.optim.muon import Muon
    from sfumato.optim.optimizer import build_optimizer

    width = setting.size(1024, 64)
    config = TrainConfig(output_dir="unused", optimizer=name, lr=1e-3, weight_decay=0.1)
    reference = config if name == "muon" else config.model_copy(update={"optimizer": "adamw"})
    moves = []
    for device, dtype, settings in (("cpu", torch.float64, reference), (setting.device, torch.float32, config)):
        module = nn.Module()
        module.layers = nn.ModuleList([nn.Linear(width, 2 * width), nn.Linear(2 * width, width)])
        with torch.no_grad():
            for number, parameter in enumerate(module.parameters()):
                parameter.copy_(drawn(*parameter.shape, seed=number) / width**0.5)
        module = module.to(device, dtype)
        start = [parameter.detach().clone() for parameter in module.parameters()]
        try:
            optimizer, _ = build_optimizer(module, settings, 10)
        except MissingDependencyError as error:
            raise NotHereError(str(error)) from error
        if isinstance(optimizer, Muon) and dtype == torch.float64:
            optimizer.compute_dtype = torch.float64
        for step in range(3):
            for number, parameter in enumerate(module.parameters()):
                parameter.grad = drawn(*parameter.shape, seed=100 * step + number).to(parameter)
            optimizer.step()
        moves.append(
            torch.cat([(p - s).detach().flatten().cpu() for p, s in zip(module.parameters(), start, strict=True)])
        )
    values = {"moves": relative_error(moves[1], moves[0])}
    return values | {"step_ms": setting.seconds(optimizer.step, setting.size(5, 1), 1) * 1e3}


def memory_moves(setting: Setting) -> dict[str, Any]:
    """A role's weights and optimiser state to CPU memory and back, to the bit."""
    from sfumato.runtime.memory import RoleMemory

    if not setting.on_gpu:
        raise NotHereError("a CPU has no other memory to move to")
    width = setting.size(8192, 256)
    module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(setting.device)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    module(torch.randn(4, width, device=setting.device)).sum().backward()
    optimizer.step()
    memory = RoleMemory(module, optimizer, device=torch.device(setting.device, 0))
    before = [parameter.detach().clone().cpu() for parameter in module.parameters()]
    memory.drop_gradients()
    held = torch.cuda.memory_allocated()
    size = memory.offload(*memory.parts)
    assert torch.cuda.memory_allocated() <= held - size, "memory was not freed"
    memory.onload(*memory.parts)
    assert all(torch.equal(p.cpu(), b) for p, b in zip(module.parameters(), before, strict=True)), (
        "weights have changed"
    )
    away = setting.seconds(lambda: (memory.offload(*memory.parts), memory.onload(*memory.parts)), 2, 0)
    return {"gib": size / 2**30, "both_ways_gb_per_s": 2 * size / away / 1e9}


class Holder:
    """One side of a transfer of weights: a model, and the mesh of one process."""

    def __init__(self, device: str, width: int, seed: int) -> None:
        from sfumato.parallel.layout import Layout
        from sfumato.parallel.mesh import Mesh

        where = torch.device(device, 0) if device == "cuda" else torch.device(device)
        if device == "cuda":
            torch.cuda.set_device(where)
        self.mesh, self.version = Mesh(Layout(), where), 0
        torch.manual_seed(seed)
        self.received_module = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(where)

    def sent_weights(self, version: int) -> Any:
        """The weights as they are."""
        import contextlib

        return contextlib.nullcontext(self.received_module)


def total(holder: Holder) -> float:
    """Of all weights, in float64."""
    return float(sum(parameter.double().sum() for parameter in holder.received_module.parameters()))


def weights(setting: Setting) -> dict[str, Any]:
    """Weights that another process on the same GPU sends: GB/s of each transport.

    Broadcast runs over gloo, between CPUs: NCCL wants a GPU for each process.
    """
    import time

    from sfumato.runtime.weight_sync.sync import WeightSync
    from tests.dist.process_roles import ProcessRoles
    from tests.dist.ranks import RankPool

    width, ranks, results = setting.size(4096, 64), RankPool(2), {}
    try:
        with tempfile.TemporaryDirectory() as folder, ProcessRoles(ranks, folder, actor=1, sampler=1) as roles:
            for transport, device in (("ipc", setting.device), ("files", setting.device), ("broadcast", "cpu")):
                roles.actor.build(Holder, device, width, 0)
                roles.sampler.build(Holder, device, width, 1)
                sync = WeightSync(roles.actor, roles.sampler, transport, 64, Path(folder))
                sync.publish(1)
                started = time.perf_counter()
                report = sync.publish(2)
                results[f"{transport}_gb_per_s"] = report.num_bytes / (time.perf_counter() - started) / 1e9
                sums = [role.call(total).result() for role in (roles.actor, roles.sampler)]
                sync.close()
                assert sums[0] == sums[1], f"{transport}: the sampler has other weights than the actor: {sums}"
    finally:
        ranks.close()
    return results | {"mb": report.num_bytes / 1e6}
