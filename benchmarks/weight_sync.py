"""Bytes and seconds of weight synchronisation, for full weights and LoRA, over every transport.

    python -m benchmarks.weight_sync --layers 4 --width 768 --repeats 5
    python -m benchmarks.weight_sync --layout --clock cpu --repeats 15   # within one process only, on a busy machine
    python -m benchmarks.weight_sync --engines 1 2 4                     # to engines of so many ranks on one machine

An SD3 transformer is made in code. Actor and sampler are processes of their own (for ``local`` one process). Ratios are
to a plain ``copy_`` of the same tensors in the sampler's process, measured in the same run; a transfer sends, receives
and cuts the weights and takes the actor's checksums, applying copies them and verifies the sampler's. The share of the
link is the time of bare broadcasts of as many bytes between two processes, over that of a transfer. CPU and gloo.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sfumato.kernels import choose_kernels
from sfumato.models.diffusion import plans
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.shards import Shards, all_parameters, trainable_parameters
from sfumato.runtime.weight_sync.checksum import local_checksums
from sfumato.runtime.weight_sync.sync import Rescoring, SyncReport, WeightSync
from tests.dist.cases import make_mesh
from tests.dist.process_roles import ProcessRoles
from tests.dist.ranks import RankPool
from tests.engines.file_engine import RankActor, RankSampler, weights_held

LAYOUTS = {
    "1 to 1": ((1, {"data_parallel_mode": "ddp"}), (1, {"data_parallel_mode": "ddp"})),
    "fsdp2 x 2 to tp x 2": ((2, {}), (2, {"data_parallel_mode": "ddp", "tensor_parallel_size": 2})),
}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


class Peer:
    """One side."""

    def __init__(self, layers: int, width: int, rank: int, config: dict[str, Any]) -> None:
        from diffusers import SD3Transformer2DModel
        from peft import LoraConfig

        self.mesh, parsed = make_mesh(**config)
        self.version = 0
        torch.manual_seed(0)
        module = SD3Transformer2DModel(
            num_layers=layers,
            attention_head_dim=64,
            num_attention_heads=width // 64,
            caption_projection_dim=width,
            joint_attention_dim=1024,
            pooled_projection_dim=512,
            pos_embed_max_size=32,
        )
        if rank:
            module.requires_grad_(False)
            module.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGETS))
        self.received_module = parallelize(module, self.mesh, parsed, plans.SD3)

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[torch.nn.Module]:
        """The weights as they are."""
        del version
        yield self.received_module


class Here:
    """A role in this thread."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def call(self, function: Any, *args: Any, kind: str = "other") -> Future[Any]:
        """Runs it now."""
        future: Future[Any] = Future()
        future.set_result(function(self.state, *args))
        return future

    call_concurrently = call


CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}


def copy_seconds(peer: Peer, repeats: int, clock: str = "wall") -> float:
    """A plain copy of what is trained, as the sampler holds it."""
    source = [parameter.detach().clone() for parameter in trainable_parameters(peer.received_module).values()]
    target = [tensor.clone() for tensor in source]
    return min(timed(lambda: [left.copy_(right) for left, right in zip(target, source, strict=True)], repeats, clock))


def checksum_seconds(peer: Peer, repeats: int, clock: str = "wall") -> float:
    """Of what is trained."""
    parameters = trainable_parameters(peer.received_module)
    shards = Shards(peer.received_module, peer.mesh, parameters)
    return min(timed(lambda: local_checksums(shards, peer.mesh.device, parameters), repeats, clock))


def link_seconds(num_bytes: int, bucket_bytes: int, repeats: int) -> float:
    """A rank of two: broadcasts of buckets that hold so many bytes together, and nothing else."""
    sizes = [bucket_bytes] * (num_bytes // bucket_bytes) + ([rest] if (rest := num_bytes % bucket_bytes) else [])
    buckets = [torch.zeros(size, dtype=torch.uint8) for size in sizes]

    def send() -> None:
        for bucket in buckets:
            dist.broadcast(bucket, 0)
        dist.barrier()

    return statistics.median(timed(send, repeats, "wall"))


def sent_bytes(peer: Peer) -> int:
    """Of a version."""
    return sum(parameter.nbytes for parameter in trainable_parameters(peer.received_module).values())


def num_parameters(peer: Peer) -> int:
    """Of the whole model."""
    return sum(parameter.numel() for parameter in all_parameters(peer.received_module).values())


def timed(function: Any, repeats: int, clock: str) -> list[float]:
    """Seconds of each call; one goes before."""
    return [timed_once(function, clock)[1] for _ in range(repeats + 1)][1:]


def measure(sync: WeightSync, repeats: int, clock: str = "wall") -> tuple[SyncReport, float, float, float]:
    """A report; seconds of the first version with connecting, and medians of transfer and apply."""
    _, first = timed_once(lambda: sync.publish(1), clock)
    transfers, applies = [], []
    for version in range(2, repeats + 2):
        report, transfer = timed_once(lambda version=version: sync.transfer(version), clock)
        _, apply = timed_once(lambda version=version: sync.apply(version).result(), clock)
        transfers.append(transfer)
        applies.append(apply)
    return report, first, statistics.median(transfers), statistics.median(applies)


def timed_once(function: Any, clock: str) -> tuple[Any, float]:
    """What one call gives, and its seconds."""
    started = CLOCKS[clock]()
    result = function()
    return result, CLOCKS[clock]() - started


def row(
    layout: str,
    what: str,
    numbers: tuple[SyncReport, float, float, float],
    copy: float,
    checksum: float,
    link: float | None = None,
) -> None:
    """Prints one line; ``link`` are the seconds of bare broadcasts, where weights travel by them."""
    report, first, transfer, apply = numbers
    share = "" if link is None else f"{100 * link / transfer:6.0f} %"
    print(
        f"{layout:20} {what:5} {report.transport:10} {report.num_bytes / 1e6:8.1f} {report.num_tensors:7d} "
        f"{first:8.3f} {transfer:9.3f} {apply:8.3f} {copy:8.4f} {checksum:9.4f} "
        f"{(transfer + apply) / copy:8.1f} {share}",
        flush=True,
    )


def language_model(layers: int, width: int) -> torch.nn.Module:
    """A Qwen3 with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=8192,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        head_dim=64,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config).eval()


def begin_peak(state: Any) -> None:
    """Begins to watch the memory of a process."""
    Path("/proc/self/clear_refs").write_text("5")
    state.resident_before = memory_of_process("VmRSS")


def peak(state: Any) -> int:
    """Bytes that the process had more at most since then; what it shares with others counts."""
    return memory_of_process("VmHWM") - state.resident_before


def memory_of_process(field: str) -> int:
    """Bytes of a field of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def engine_rows(layers: int, width: int, counts: list[int], repeats: int, bucket_mb: float, ranks: RankPool) -> None:
    """Prints a table of weights that come to engines of several ranks on this machine."""
    tokens = torch.arange(32).view(2, 16)
    build = partial(language_model, layers, width)
    num_bytes = sum(parameter.numel() * 4 for parameter in build().parameters())
    print(f"{num_bytes / 1e6:.1f} MB, float32, to engines that load safetensors; buckets of {bucket_mb:g} MiB")
    print(
        f"{'ranks':>5} {'transport':10} {'place':7} {'held MB':>8} {'transfer':>9} {'apply':>8} {'actor MB':>9} "
        f"{'first MB':>9} {'others MB':>10}"
    )
    for count in counts:
        for transport in ("broadcast", "ipc"):
            for in_memory in (True, False):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    ProcessRoles(ranks, folder, actor=1, sampler=count) as roles,
                ):
                    roles.actor.build(RankActor, build)
                    roles.sampler.build(RankSampler, Path(folder) / "weights", in_memory, build)
                    sync = WeightSync(
                        roles.actor, roles.sampler, transport, bucket_mb, rescoring=Rescoring(tokens, 1e-3)
                    )
                    for role in (roles.actor, roles.sampler):
                        role.all(begin_peak)
                    _, _, transfer, apply = measure(sync, repeats)
                    peaks = [*roles.actor.all(peak), *roles.sampler.all(peak)]
                    held = sum(bytes_held for bytes_held, _ in roles.sampler.all(weights_held)) or sum(
                        path.stat().st_size for path in Path(folder).glob("weights/*/*/*")
                    )
                    sync.close()
                others = f"{max(peaks[2:]) / 1e6:10.0f}" if count > 1 else f"{'':10}"
                print(
                    f"{count:5d} {transport:10} {'memory' if in_memory else 'folder':7} {held / 1e6:8.0f} "
                    f"{transfer:9.3f} {apply:8.3f} {peaks[0] / 1e6:9.0f} {peaks[1] / 1e6:9.0f} {others}",
                    flush=True,
                )


def main() -> None:
    """Prints a table."""
    choose_kernels()
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rank", type=int, default=32, help="of LoRA")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--bucket-mb", type=float, default=64)
    parser.add_argument("--layout", choices=LAYOUTS, nargs="*", default=["1 to 1"])
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: what the one process itself takes")
    parser.add_argument("--engines", type=int, nargs="*", default=[], help="ranks, each with an engine: this alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.engines:
        ranks = RankPool(1 + max(args.engines))
        engine_rows(args.layers, args.width, args.engines, args.repeats, args.bucket_mb, ranks)
        ranks.close()
        return
    shape = (args.layers, args.width)
    print(f"{num_parameters(Peer(*shape, 0, {})) / 1e6:.1f} M parameters, float32; buckets of {args.bucket_mb:g} MiB")
    print(
        f"{'layout':20} {'sent':5} {'transport':10} {'MB':>8} {'tensors':>7} {'first s':>8} {'transfer':>9} "
        f"{'apply':>8} {'copy s':>8} {'checksum':>9} {'x copy':>8} {'of link':>8}"
    )
    ranks = RankPool()
    with tempfile.TemporaryDirectory() as folder:
        for what, rank in (("full", 0), ("lora", args.rank)):
            actor, sampler = Peer(*shape, rank, {}), Peer(*shape, rank, {})
            copy, checksum = (
                seconds(sampler, args.repeats, args.clock) for seconds in (copy_seconds, checksum_seconds)
            )
            num_bytes = sent_bytes(actor)
            sync = WeightSync(Here(actor), Here(sampler), "local", args.bucket_mb)
            row("one process", what, measure(sync, args.repeats, args.clock), copy, checksum)
            del actor, sampler
            for layout in args.layout:
                (actors, actor_config), (samplers, sampler_config) = LAYOUTS[layout]
                bucket_bytes = int(args.bucket_mb * 2**20)
                links = ranks.run(2, link_seconds, num_bytes, bucket_bytes, args.repeats)
                with ProcessRoles(ranks, folder, actor=actors, sampler=samplers) as roles:
                    roles.actor.build(Peer, *shape, rank, actor_config)
                    roles.sampler.build(Peer, *shape, rank, sampler_config)
                    copy = roles.sampler.call(copy_seconds, 3).result()
                    checksum = roles.sampler.call(checksum_seconds, 3).result()
                    for transport in ("broadcast", "ipc", "files"):
                        sync = WeightSync(roles.actor, roles.sampler, transport, args.bucket_mb, Path(folder))
                        numbers = measure(sync, args.repeats)
                        sync.close()
                        link = links[0] if transport == "broadcast" else None
                        row(layout, what, numbers, copy, checksum, link)
    ranks.close()


if __name__ == "__main__":
    main()
